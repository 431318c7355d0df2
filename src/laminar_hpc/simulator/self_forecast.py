"""A run that simulates itself: `python -m laminar_hpc.simulator.self_forecast RUN_DIR`, as `laminar top` and
`laminar report` start it beside themselves.

From the files of a run that goes on: what the newer half of its newest launch is measured to do, what its
present settings are simulated to do in the steps that are left, at the measured costs and with responses as
long as their trend makes them (finished/length_trend.py, `growth`), and what others would: on the same GPUs
(split, staleness bound, local batch, repack) the fastest first, then with more replicas or fewer. One JSON
line is printed, and added to RUN_DIR/forecasts.jsonl. Where an earlier line of other settings foretold the
present ones, that forecast stands in it too, beside what they are measured to do (`foretold`).
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import read_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.machine.files import jsonl
from laminar_hpc.machine.processes import die_with_parent
from laminar_hpc.report import rundata
from laminar_hpc.simulator.finished.changes import GAIN_MIN, changed, single_changes
from laminar_hpc.simulator.finished.measured import Figures, Measured, measure_run
from laminar_hpc.simulator.finished.prediction import predict

_TRAJECTORIES = 10_000  # simulated for each setting, some 20 us each
_STEPS_MIN = 6
_NEWEST_MIN = 12  # steps that costs can be measured from


@dataclass(frozen=True)
class Foretold:
    """`words`: overrides of `laminar train`; none: the present settings."""

    words: tuple[str, ...]
    settings: dict[str, object]
    figures: Figures


def settings_of(config: RunConfig) -> dict[str, object]:
    """What forecasts are told apart by."""
    p = config.pipeline
    return {
        "trainer.data_parallel": config.trainer.data_parallel,
        "rollout.replicas": config.rollout.replicas,
        "pipeline.refresh": p.refresh,
        "pipeline.max_staleness": p.max_staleness,
        "pipeline.local_batch_groups": p.local_batch_groups,
        "pipeline.repack": p.repack,
    }


def replica_changes(config: RunConfig) -> Iterator[tuple[str, ...]]:
    """Half and twice as many replicas, one less and one more: they may join and leave a run that goes on."""
    now = config.rollout.most
    for other in sorted({max(1, now // 2), max(1, now - 1), now + 1, 2 * now} - {now}):
        yield (f"rollout.replicas={other}",)


def forecasts(measured: Measured) -> tuple[Foretold, list[Foretold]]:
    """Of the present settings, and of others: those on the same GPUs, the fastest first, then other numbers
    of replicas."""
    of_step = measured.config.algorithm.prompts_per_step * measured.config.algorithm.samples_per_prompt
    steps = max(_STEPS_MIN, min(measured.steps, _TRAJECTORIES // of_step))
    short = dataclasses.replace(measured, steps=steps)

    def told(words: tuple[str, ...]) -> Foretold:
        config = changed(measured.config, words)
        return Foretold(words, settings_of(config), predict(short, config))

    others = list[Foretold]()
    for options in (single_changes(measured.config), replica_changes(measured.config)):
        others += sorted(map(told, options), key=lambda each: -each.figures.tokens_per_second)
    return told(()), others


def foretold(earlier: list[dict], settings: dict[str, object]) -> dict | None:
    """The figures that the newest forecast made under other settings gave these; None: nobody asked."""
    for line in reversed(earlier):
        if line["now"]["settings"] != settings:
            for other in line["others"]:
                if other["settings"] == settings:
                    return {"step": line["step"], "words": other["words"], "figures": other["figures"]}
    return None


def forecast(run_dir: Path) -> dict:
    """The line. Raises LaminarError where the newest launch is too short to measure."""
    run = rundata.load(run_dir)
    run.launches = run.launches[-1:]
    steps = run.launches[0].steps
    run.launches[0].steps = steps[-max(_NEWEST_MIN, len(steps) // 2) :]
    config = read_config(run_dir / "config.yaml")
    step = run.launches[0].steps[-1]["step"]
    measured = measure_run(run, config, ahead=config.steps - step)
    now, others = forecasts(measured)
    return {
        "step": step,
        "happened": dataclasses.asdict(measured.happened),
        "growth": measured.growth,
        "gain_min": GAIN_MIN,
        "now": dataclasses.asdict(now),
        "others": [dataclasses.asdict(other) for other in others],
        "foretold": foretold(list(jsonl.read(run_dir / rundata.FORECASTS)), now.settings),
    }


def main(arguments: list[str]) -> int:
    """0; 1, with a line that says why, where nothing can be foretold yet."""
    die_with_parent()
    run_dir = Path(arguments[0])
    try:
        line = json.dumps(forecast(run_dir))
    except LaminarError as error:
        print(json.dumps({"why_not": str(error)}))
        return 1
    print(line)
    with (
        suppress(OSError),
        open(run_dir / rundata.FORECASTS, "a") as file,
    ):  # a run that others own is read alone
        file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
