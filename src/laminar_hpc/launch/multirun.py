"""`laminar train --multirun`: one run for each combination of the values that the words name, one after the
other on this machine, or each as a Slurm job.

Hydra's grammar says what the values are: `seed=1,2`, `steps=range(1,4)`, `pipeline=choice(sync,laminar)`,
`experiment=glob(*)`. Every combination is checked before the first begins, and has a folder of its own, named
after its values, below RUN_DIR-multirun.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, QuotedString, Transformer
from hydra.errors import HydraException

from laminar_hpc.config.bounds import shown
from laminar_hpc.config.directories import shipped_directory
from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.load import keys_of
from laminar_hpc.config.options import split, take_config_dir
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.words import Keys
from laminar_hpc.machine.observability import console
from laminar_hpc.machine.processes import die_with_parent, on_stop_signals

_LABEL_MAX = 100  # characters of a folder's name, of 255 that a file system takes
_COLUMNS = ("combination", "exit", "steps", "before", "after", "tok/s", "time", "folder")


@dataclass(frozen=True)
class Combination:
    label: str  # the values that differ, as key=value,key=value
    words: tuple[str, ...]
    run_dir: Path

    @property
    def all_words(self) -> list[str]:
        return [*self.words, f"run_dir={self.run_dir}"]


def alternatives(word: str, keys: Keys) -> list[str]:
    """The words that one word stands for: itself, unless Hydra's grammar reads several values in it.

    Raises LaminarError for values that cannot be counted, and for none."""
    try:
        override = OverridesParser.create().parse_override(word)
    except HydraException:
        return [word]  # a text that stands as it is
    if not override.is_sweep_override():
        return [word]
    key, value = override.key_or_group, cast(object, override.value())
    if isinstance(value, Glob):
        values = value.filter(list(keys.groups.get(key, ())))
        if not values:
            raise LaminarError(f"{word}: no such file; glob is for {', '.join(keys.groups)}")
        return [f"{key}={name}" for name in values]
    if not override.is_discrete_sweep():
        raise LaminarError(
            f"{word}: its values cannot be listed; write {key}=choice(A,B) or {key}=range(A,B)"
        )
    return [f"{key}={_written(each)}" for each in override.sweep_iterator()]


def _written(value: Any) -> str:
    """A value as a word has it: a text as it stands, a list or table by Hydra's grammar."""
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list | dict):
        return str(Transformer.str(value))
    return shown(value) if value != "" else ""


def combinations(words: Sequence[str], load: Callable[[Sequence[str]], RunConfig]) -> list[Combination]:
    """Every combination, the last word's values changing first. `load` gives the configuration of one.

    Raises Refused with what is wrong in any of them."""
    own, settings = take_config_dir(words)
    keys, option = keys_of(own), [f"--config-dir={own}"] if own else []
    choices = [alternatives(word, keys) for word in settings]
    if any(len(values) > 1 and values[0].startswith("run_dir=") for values in choices):
        raise LaminarError("run_dir: name one folder; each combination gets its own beside it")
    made: list[Combination] = []
    wrong: list[str] = []
    for chosen in dict.fromkeys(itertools.product(*choices)):
        label = ",".join(word for word, values in zip(chosen, choices, strict=True) if len(values) > 1)
        try:
            run_dir = Path(load([*option, *chosen]).run_dir)
        except LaminarError as error:
            wrong += [line for line in str(error).splitlines() if line not in wrong]
            continue
        folder = run_dir.with_name(f"{run_dir.name}-multirun") / _folder(label, len(made))
        if folder in [each.run_dir for each in made]:
            folder = folder.with_name(f"{folder.name}-{len(made)}")
        made.append(Combination(label or "(one)", (*option, *chosen), folder))
    if wrong:
        raise Refused(wrong)
    return made


def _folder(label: str, index: int) -> str:
    """A name for a combination's folder, without what a path gives a meaning to."""
    plain = re.sub(r"[^\w.=,+-]+", "_", label) or "one"
    return plain if len(plain) <= _LABEL_MAX else f"{plain[:_LABEL_MAX]}-{index}"


def run_here(every: Sequence[Combination]) -> int:
    """Runs one after the other, then prints a table of them all. A signal ends the run that is going on, in
    order, and those after it do not begin.

    Exit code: 0 if none failed, else the first one's that did."""
    stopped: list[int] = []
    codes: dict[Combination, tuple[int, float]] = {}
    running: list[subprocess.Popen[bytes]] = []

    def on_signal(number: int, _: object) -> None:
        stopped.append(number)
        if running and running[-1].poll() is None:
            running[-1].send_signal(number)

    on_stop_signals(on_signal)
    for number, each in enumerate(every, 1):
        if stopped:
            break
        print(console.line("multirun", f"{number} of {len(every)}  {each.label}"), flush=True)
        begin = time.monotonic()
        command = [sys.executable, "-m", "laminar_hpc.launch.cli", "train", *each.all_words]
        running.append(subprocess.Popen(command, preexec_fn=die_with_parent))
        if stopped:  # it came while the process was being made
            running[-1].send_signal(stopped[-1])
        codes[each] = running[-1].wait(), time.monotonic() - begin
    print("\n".join(table(every, codes)), flush=True)
    return next((code for code, _ in codes.values() if code), 0)


def table(every: Sequence[Combination], codes: dict[Combination, tuple[int, float]]) -> list[str]:
    """One line for each combination: exit code (- if it has not begun), steps, accuracy before and after,
    tokens per second, time and folder."""
    rows = [_COLUMNS]
    for each in every:
        code, seconds = codes.get(each, (None, None))
        path = each.run_dir / "summary.json"
        figures = json.loads(path.read_text()) if code is not None and path.is_file() else {}
        rows.append(
            (
                each.label,
                "-" if code is None else str(code),
                str(figures.get("steps", "-")),
                console.number(figures.get("accuracy_before")),
                console.number(figures.get("accuracy_after")),
                console.count(figures.get("tokens_per_second")),
                console.duration(seconds),
                str(each.run_dir),
            )
        )
    return console.table(rows, left=range(len(_COLUMNS)))


def submit(every: Sequence[Combination], options: str) -> int:
    """Submits each as a Slurm job by slurm/laminar_single.sbatch and prints its id. `options` are sbatch's.

    Raises LaminarError where one is not taken; those before it stay submitted."""
    if shutil.which("sbatch") is None:
        raise LaminarError("--slurm: there is no sbatch here; run this on a login node of the cluster")
    script = str(shipped_directory("slurm") / "laminar_single.sbatch")
    for number, each in enumerate(every):
        environment = {"VENV": sys.prefix, **os.environ, "RUN_DIR": str(each.run_dir.absolute())}
        words = [word for word in each.words if not word.startswith("run_dir=")]  # the script has RUN_DIR
        command = ["sbatch", "--parsable", *split("--slurm", [options]), script, *words]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            why = " ".join(done.stderr.split())
            raise LaminarError(f"--slurm: {each.label}: {why}; {number} jobs before it are submitted")
        job = done.stdout.strip().partition(";")[0]  # behind a semicolon: the cluster's name
        print(console.line("submitted", f"job {job}  {each.label}  {each.run_dir}"), flush=True)
    return 0
