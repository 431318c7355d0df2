"""Writes docs/configuration.md: every key with its type, default, unit and meaning, from config/schema.py,
learning_schema.py, system_schema.py and conf/pipeline.

    python docs/make_configuration.py          write the page
    python docs/make_configuration.py --check  exit 1 if the page on disk is another one (a test runs this)

A meaning is the text below a key in the schema; a key without one is an error. Bounds and choices are those
that the checker has.
"""

import ast
import dataclasses
import inspect
import itertools
import json
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
- `~/` at the beginning of a path is the home folder.
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

This page is made by `python docs/make_configuration.py` from `config/schema.py`, `learning_schema.py` and
`system_schema.py` under `src/laminar_hpc/`; a test keeps them together.
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
    "checkpoint.keep_every": "trainer steps",
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
    "rollout.replicas_min": "replicas",
    "rollout.max_concurrent": "requests",
    "evaluation.problems": "rows",
    "evaluation.samples": "responses",
    "algorithm.first_samples": "trajectories",
    "algorithm.more_samples": "trajectories",
    "pipeline.local_batch_groups": "prompt groups",
}


def meanings(cls: type) -> dict[str, str]:
    """Field name -> the text below it in the class."""
    body = ast.parse(inspect.getsource(cls)).body[0].body
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


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
        return ", ".join([*(f"`{name}`" for name in limits.names), *["a dotted path"] * limits.or_path])
    return limits.words() if isinstance(limits, bounds.Bounds) and limits != bounds.Bounds() else ""


def rows(cls: type, prefix: str) -> list[str]:
    """The table rows of a dataclass's plain fields. Raises SystemExit for a key without a meaning."""
    lines, texts = [], meanings(cls)
    for field in dataclasses.fields(cls):
        key = prefix + field.name
        if dataclasses.is_dataclass(field.type):
            assert isinstance(field.type, type)
            lines += rows(field.type, f"{key}.") if prefix else []
            continue
        if field.name not in texts:
            raise SystemExit(f"{key} has no meaning: write it below the key in {inspect.getfile(cls)}")
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
            texts[field.name].replace("|", r"\|"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


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
    text = [INTRO, "## The run", "", *head, *rows(schema.RunConfig, ""), ""]
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
                *rows(field.type, f"{field.name}."),
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
