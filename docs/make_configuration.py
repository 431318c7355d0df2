"""Writes docs/configuration.md: every key with its type, default, unit and meaning, from config/schema.py and
conf/pipeline.

    python docs/make_configuration.py          write the page
    python docs/make_configuration.py --check  exit 1 if the page on disk is another one (a test runs this)

Meanings are the comments of the schema, behind a key or above it; MEANING holds those of keys whose name says
most of it. A key with neither is an error. Bounds and choices are those that the checker has.
"""

import ast
import dataclasses
import inspect
import itertools
import json
import re
import sys
from pathlib import Path

import yaml

from laminar_hpc.config import bounds, schema

ROOT = Path(__file__).resolve().parent.parent
PAGE = Path(__file__).with_name("configuration.md")

INTRO = """# Configuration

Every key of a run, written `key=value` on the command line, as in
`laminar train experiment=demo steps=20 sampling.temperature=0.9`, or in a file under `conf/experiment/`.
Unknown keys, wrong types and values that are not allowed are refused before anything starts, one line for
each, all at once. A finished run keeps its resolved configuration in `config.yaml`. `dry_run=true` prints
what follows from a configuration and stops.

- A text stands as it is, whatever signs it has: `data.train=/data/lr=1,b.jsonl`. For a space quote the whole
  word.
- A list: `'evaluation.files=[a.jsonl,b.jsonl]'`. A table: `rollout.engine_arguments.mem-fraction-static=0.3`,
  entry by entry.
- `null` is a value where the type says `None`. `${oc.env:NAME}` is a variable of the environment.
- Every number has to be finite, and every whole number below 2^31.

Your own files need no copy of this repository: `laminar train --config-dir DIR experiment=NAME` reads
`DIR/experiment/NAME.yaml`, and `DIR/pipeline/NAME.yaml` for `pipeline=NAME`. A file begins with `# @package
_global_` and holds keys of this page, as those of `conf/experiment/` do. It is Hydra's own flag: `DIR` is
searched after `conf/`, so a name that both have is `conf/`'s, and words of the command line go before any
file. The flag may stand anywhere among the words, as `--config-dir DIR` or `--config-dir=DIR`; the scripts
in `launch/` and `slurm/` and a bare `torchrun ... -m laminar_hpc` take it too. A relative `DIR` is relative
to the folder where they are started.

What a GPU must hold is estimated before a run starts (`trainer gpu memory` and `rollout gpu memory` of a
dry run). What cannot fit is refused with its cure: in a dry run by `trainer.gpu_memory_gigabytes` and
`rollout.gpu_memory_gigabytes`, or by this machine's GPUs where these are null; in a real start by what all
ranks of a machine put on each of its GPUs as well. 5% are left to CUDA, NCCL and fragmentation. Without a
GPU only a warning is given, when the host's memory is too small.

This page is made by `python docs/make_configuration.py` from `src/laminar_hpc/config/schema.py`; a test keeps
the two together.
"""

# By the ending of a key's name, else by the whole key.
UNITS_BY_ENDING = {
    "_seconds": "s",
    "_tokens": "tokens",
    "_gigabytes": "GB",
    "_megabytes": "MiB",
    "threads": "CPU threads",
    "tokens_per_microbatch": "tokens",
    "_parallel": "ranks",
    "_staleness": "trainer steps",
}
UNITS = {
    "steps": "trainer steps",
    "evaluation.every": "trainer steps",
    "checkpoint.every": "trainer steps",
    "checkpoint.keep": "checkpoints",
    "relay.full_every": "publications",
    "optimizer.warmup_steps": "trainer steps",
    "optimizer.max_skipped_updates": "optimizer updates",
    "algorithm.prompts_per_step": "prompts",
    "algorithm.samples_per_prompt": "trajectories",
    "algorithm.minibatches_per_step": "updates",
    "reward.workers": "processes",
    "reward.slots": "calls",
    "relay.slots": "copies of the weights",
    "rollout.replicas": "replicas",
    "rollout.max_concurrent": "requests",
    "evaluation.problems": "rows",
    "evaluation.samples": "responses",
    "algorithm.first_samples": "trajectories",
    "algorithm.more_samples": "trajectories",
    "pipeline.local_batch_groups": "prompt groups",
}
MEANING = {
    "run_dir": "folder of the run: metrics, traces, store, checkpoints, report",
    "seed": "of the order of prompts, the mini-batches and the shuffled rewards; the engines' seeds follow "
    "from it",
    "model.path": "Hugging Face directory of the model to train, or OWNER/NAME[@REVISION] of the hub; see "
    "models.md",
    "data.train": "the training prompts: a JSONL or Parquet file, a folder, or a Hugging Face dataset as "
    "OWNER/NAME[:SUBSET][@SPLIT]",
    "data.prompt_field": "field of a row that holds the prompt",
    "data.answer_field": "field of a row that holds the right answer",
    "data.max_prompt_tokens": "longest prompt",
    "reward.timeout_seconds": "longest time for one call; then the trajectory gets `reward.score_on_failure`",
    "sampling.temperature": "of the softmax over next tokens",
    "sampling.max_response_tokens": "a response is cut here",
    "sampling.top_p": "refused for training unless 1.0",
    "sampling.top_k": "refused for training unless -1",
    "sampling.min_p": "refused for training unless 0.0",
    "sampling.frequency_penalty": "refused for training unless 0.0",
    "sampling.presence_penalty": "refused for training unless 0.0",
    "sampling.repetition_penalty": "refused for training unless 1.0",
    "algorithm.prompts_per_step": "prompt groups in the global batch of a trainer step",
    "algorithm.samples_per_prompt": "trajectories per prompt (the most, with `algorithm.first_samples`): the "
    "group over which advantages are taken",
    "algorithm.advantage": "how rewards become advantages",
    "algorithm.more_samples": "samples that a group gets at a time after its first, up to "
    "`algorithm.samples_per_prompt`",
    "algorithm.normalize_std": "divide advantages by the group's standard deviation",
    "algorithm.loss": "policy loss",
    "algorithm.clip_low": "importance ratios are clipped below 1 - clip_low",
    "algorithm.clip_high": "importance ratios are clipped above 1 + clip_high",
    "algorithm.kl_estimator": "estimate of the divergence from one token",
    "optimizer.lr": "Adam's learning rate",
    "optimizer.weight_decay": "decoupled, as in AdamW",
    "optimizer.beta1": "Adam's decay of the first moment",
    "optimizer.beta2": "Adam's decay of the second moment",
    "optimizer.eps": "Adam's epsilon",
    "optimizer.clip_grad": "largest global gradient norm",
    "optimizer.warmup_steps": "linear warm-up of the learning rate",
    "trainer.tensor_parallel": "ranks over which every layer is split; divides the model's heads, key-value "
    "heads and feed-forward width",
    "trainer.pipeline_parallel": "stages of consecutive layers; at most the number of layers",
    "trainer.data_parallel": "replicas of the trainer (tensor_parallel x pipeline_parallel ranks); each "
    "takes its share of every batch",
    "trainer.distributed_optimizer": "Megatron's distributed optimizer",
    "relay.slots": "complete weight versions kept in shared memory per machine",
    "relay.shm_dir": "folder in memory that holds the slots",
    "relay.chunk_megabytes": "size of the pieces in which weights are sent; the trainer's rank 0 has two "
    "such buffers on its device",
    "relay.full_every": "with delta=auto one publication in so many goes in full, whatever has changed; 1 "
    "sends all in full",
    "relay.publish_timeout_seconds": "longest time for one publication to reach a relay",
    "relay.threads": "of a relay's process",
    "rollout.replicas": "rollout ranks, each with an engine of its own",
    "rollout.tensor_parallel": "processes per replica that share one copy of the weights; divides the "
    "model's heads",
    "rollout.kv_cache_tokens": "size of an engine's KV cache",
    "rollout.engine_start_seconds": "longest time for an engine to be ready",
    "rollout.request_timeout_seconds": "longest time for one generation",
    "pipeline.name": "shown in logs and reports; decides nothing",
    "cluster.heartbeat_timeout_seconds": "a process that is silent for so long counts as dead",
    "cluster.stop_timeout_seconds": "longest time for an orderly stop",
    "observability.wandb_project": "project on Weights & Biases",
    "checkpoint.keep": "the newest so many stay on disk",
}


def comments() -> dict[tuple[str, str], str]:
    """(class name, field name) -> the comment behind the field."""
    source = Path(schema.__file__).read_text()
    lines = source.splitlines()
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    above = [line.strip() for line in lines[: part.lineno - 1]]
                    block = list(itertools.takewhile(lambda line: line.startswith("#"), reversed(above)))
                    behind = re.search(r"#\s*(.+)$", lines[part.lineno - 1])
                    text = (
                        behind.group(1) if behind else " ".join(line.lstrip("# ") for line in reversed(block))
                    )
                    if text:
                        found[node.name, part.target.id] = text
    return found


def unit(key: str) -> str:
    return UNITS.get(key) or next(
        (unit for ending, unit in UNITS_BY_ENDING.items() if key.endswith(ending)), ""
    )


def default(field: dataclasses.Field) -> str:
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value) if value != "" else "(empty)"


def values(field: dataclasses.Field) -> str:
    """What the checker allows."""
    limits = bounds.allowed(field)
    if isinstance(limits, bounds.Choices):
        return ", ".join(f"`{name}`" for name in limits.names)
    return limits.words() if isinstance(limits, bounds.Bounds) and limits != bounds.Bounds() else ""


def rows(cls: type, prefix: str, known: dict[tuple[str, str], str]) -> list[str]:
    """The table rows of a dataclass's plain fields. Raises SystemExit for a key without a meaning."""
    found = []
    for field in dataclasses.fields(cls):
        if dataclasses.is_dataclass(field.type):
            continue
        key = prefix + field.name
        comment = known.get((cls.__name__, field.name))
        meaning = "; ".join(text for text in (MEANING.get(key), comment) if text)
        if not meaning:
            raise SystemExit(
                f"{key} has no meaning: write a comment behind it "
                f"in {schema.__file__}, or an entry of MEANING here"
            )
        kind = (
            field.type.__name__
            if isinstance(field.type, type) and not hasattr(field.type, "__args__")
            else str(field.type)
        )
        kind = kind.replace("typing.", "")
        cells = (
            f"`{key}`",
            kind.replace("|", "or"),
            f"`{default(field)}`",
            values(field),
            unit(key),
            meaning.replace("|", "or"),
        )
        found.append(f"| {' | '.join(cells)} |")
    return found


def presets() -> list[str]:
    """The pipelines of conf/pipeline as a table."""
    read = {
        path.stem: yaml.safe_load(path.read_text())
        for path in sorted((ROOT / "conf" / "pipeline").glob("*.yaml"))
    }
    keys = list(dict.fromkeys(key for values in read.values() for key in values if key != "name"))
    table = [f"| `pipeline=` | {' | '.join(f'`{key}`' for key in keys)} |", "|---" * (len(keys) + 1) + "|"]
    cell = {None: "null"}
    table += [
        f"| `{name}` | {' | '.join(str(cell.get(values.get(key), values.get(key))) for key in keys)} |"
        for name, values in read.items()
    ]
    return table


def page() -> str:
    head = ["| key | type | default | allowed | unit | meaning |", "|---|---|---|---|---|---|"]
    known = comments()
    text = [INTRO, "## The run", "", *head, *rows(schema.RunConfig, "", known), ""]
    for field in dataclasses.fields(schema.RunConfig):
        if dataclasses.is_dataclass(field.type):
            assert isinstance(field.type, type)
            written = inspect.cleandoc(field.type.__doc__ or "")
            # what dataclass writes where there is none
            about = "" if written.startswith(f"{field.type.__name__}(") else written
            text += [
                f"## {field.name}",
                "",
                *([about, ""] if about else []),
                *head,
                *rows(field.type, f"{field.name}.", known),
                "",
            ]
            if field.name == "pipeline":
                text += [*presets(), ""]
    return "\n".join(text)


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if not PAGE.is_file() or PAGE.read_text() != page():
            sys.exit(
                "docs/configuration.md is not that of the schema: run `python docs/make_configuration.py`"
            )
    else:
        PAGE.write_text(page())
