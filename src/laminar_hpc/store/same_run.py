"""What a run keeps when it goes on: its model, the size of its batches and groups, and the prompts that its
groups in progress were granted for. All else may be another at the next start (docs/resuming.md)."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from operator import attrgetter
from pathlib import Path

from laminar_hpc.config.adapter_check import is_same_model
from laminar_hpc.config.adapters import ADAPTER_CONFIG_FILE
from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.load import read_config
from laminar_hpc.config.models import SHAPE, model_config
from laminar_hpc.config.schema import ModelConfig, RunConfig
from laminar_hpc.data.prompts import Prompt
from laminar_hpc.machine.files import jsonl
from laminar_hpc.store.audit.checks import audit
from laminar_hpc.store.audit.records import read
from laminar_hpc.store.checkpoints import checkpoint_path, steps
from laminar_hpc.store.payload.layout import tokens_array
from laminar_hpc.store.store_layout import connect_read_only

_ANOTHER = "or begin another run with a checkpoint's hf/ as model.path"


def refuse_changes(config: RunConfig) -> None:
    """Raises Refused when the run in run_dir, which is to go on, has another model or size of batches, or
    groups of a size that would not be trained; or when a replay has another temperature than its source."""
    run_dir = Path(config.run_dir)
    if config.source != "rollout":
        _refuse_other_temperature(config, Path(config.source.removeprefix("replay:")))
    if config.resume != "auto":
        return
    newest = max(steps(run_dir), default=None)
    try:  # what cannot be read is damaged: others say so
        if newest is not None:
            folder = checkpoint_path(run_dir, newest) / "hf"
            if config.model.lora.rank or (folder / ADAPTER_CONFIG_FILE).is_file():
                _refuse_other_adapter(config, read_config(run_dir / "config.yaml").model)
            else:
                _refuse_other_model(config, folder)
        if any(jsonl.read(run_dir / "metrics.jsonl", "step")):
            _refuse_other_batches(config, read_config(run_dir / "config.yaml"))
    except Refused:
        raise
    except LaminarError:
        return


def _refuse_other_batches(config: RunConfig, then: RunConfig) -> None:
    """Admission counts all groups that were ever granted against so many for each step: with another number
    it would grant none for many steps, or more than the staleness bound allows."""
    key, now = "algorithm.prompts_per_step", config.algorithm.prompts_per_step
    if now != then.algorithm.prompts_per_step:
        text = f"{key}={now}: the run in {config.run_dir} counts by {then.algorithm.prompts_per_step}"
        raise Refused([f"{text}: leave it at that, {_ANOTHER}"])
    (least, most), (smallest, largest) = _group_sizes(config), _group_sizes(then)
    if smallest < least or largest > most:  # the trainers would refuse them
        given = (
            f"algorithm.samples_per_prompt={most}, first_samples={config.algorithm.first_samples or 'null'}"
        )
        what = f"groups of {smallest} to {largest} samples of the run in {config.run_dir} may wait"
        raise Refused([f"{given}: {what} for their training; allow such groups, {_ANOTHER}"])


def refuse_unsound_source(config: RunConfig) -> None:
    """Raises Refused for a replay of a run to which `laminar audit` objects, with the first culprit. Reads
    every response of that run. Of a store alone, without its run, nothing is known."""
    source = Path(config.source.removeprefix("replay:"))
    if config.source == "rollout" or not (source / "metrics.jsonl").exists():
        return
    with read(source) as records:
        found = next((f for f in audit(records) if f.wrong), None)
    if found:
        text = f"{config.source}: its records are not as that run wrote them ({found.culprits[0]})"
        raise Refused([f"{text}; see laminar audit {source}, and bring the files back from a copy"])


def _refuse_other_temperature(config: RunConfig, source: Path) -> None:
    """Ratios are taken of log-probs at sampling.temperature: those of the trainer and the recorded ones."""
    try:
        then = read_config(source / "config.yaml").sampling.temperature
    except LaminarError:  # a store alone
        return
    if (now := config.sampling.temperature) != then:
        text = f"sampling.temperature={now}: the responses of {config.source} were drawn at {then}"
        raise Refused([f"{text}; set that, else ratios would be wrong without a sign"])


def _group_sizes(config: RunConfig) -> tuple[int, int]:
    """Samples of the smallest and the largest complete group."""
    a = config.algorithm
    return a.first_samples or a.samples_per_prompt, a.samples_per_prompt


def _refuse_other_model(config: RunConfig, folder: Path) -> None:
    """Another shape would not fit the checkpoint's `folder`, another dtype would lose its main parameters."""
    then, now = model_config(str(folder)), model_config(config.model.path)
    cure = f"of the run in {config.run_dir}: set the run's own, {_ANOTHER}"
    if keys := [key for key in SHAPE if then.get(key) != now.get(key)]:
        what = ", ".join(f"{key} {now.get(key)}, not {then.get(key)}" for key in keys)
        raise Refused([f"model.path={config.model.path} ({what}) is another model than that {cure}"])
    dtype = then.get("dtype", then.get("torch_dtype", config.model.dtype))  # of transformers 5, or 4
    if dtype != config.model.dtype:
        raise Refused([f"model.dtype={config.model.dtype} is not the {dtype} {cure}"])


def _refuse_other_adapter(config: RunConfig, then: ModelConfig) -> None:
    """Another adapter would not fit the checkpoint, and on another model it would be another policy."""
    now = config.model
    key = "model.lora.path" if then.lora.rank else "model.path"
    cure = f"set the run's own, or begin another run with a checkpoint's hf/ as {key}"
    for name in ("lora.rank", "lora.alpha", "lora.targets", "dtype"):
        mine, theirs = (attrgetter(name)(each) for each in (now, then))
        if mine != theirs:
            raise Refused([f"model.{name}={mine}: the run in {config.run_dir} has {theirs}: {cure}"])
    if not is_same_model(then.path, now.path):
        raise Refused([f"model.path={now.path}: the run in {config.run_dir} has {then.path}: {cure}"])


def check_same_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Raises Refused if a group in progress in the store at `path` has another prompt than `prompts` says:
    its samples would be generated for one prompt and scored by the row of another, without a sign.

    Prompts behind those may have come or gone. Without prompts, in a replay, there is nothing to compare."""
    if not prompts or not path.is_file() or path.stat().st_size == 0:
        return
    text = "SELECT id, prompt_index, tokens FROM groups JOIN prompts ON group_id = id WHERE state = 'granted'"
    try:
        with closing(connect_read_only(path)) as db:
            granted = db.execute(text).fetchall()
    except sqlite3.Error:  # of another version, which is refused where it is opened
        return
    for group_id, index, tokens in granted:
        if index < len(prompts) and tokens_array(prompts[index].tokens).tobytes() == tokens:
            continue
        what = "is another one than" if index < len(prompts) else "is missing, which was there"
        text = f"data.train: prompt {index + 1} of {len(prompts)} {what} when group {group_id} was granted"
        cure = "go on with the rows, the tokenizer and the data.* settings that the run had"
        raise Refused([f"{text}: {cure}, {_ANOTHER}"])
