"""`laminar sim RUN_DIR` and `laminar plan RUN_DIR`: a finished run predicted from its own measurements beside
what happened, and overrides that would have made it faster on the same GPUs."""

import dataclasses
import json
import math
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.simulator import counterfactual
from laminar_hpc.simulator.finished.changes import GAIN_MIN, Change, best_of_each, best_together
from laminar_hpc.simulator.finished.courses import Turns
from laminar_hpc.simulator.finished.measured import Figures, Measured, measure
from laminar_hpc.simulator.finished.prediction import predict
from laminar_hpc.simulator.settings import say

_SHARES = ("trainer_wait_share", "rollout_idle_share")
_ROWS = {
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "step_seconds": ("seconds per step", "{:,.2f}"),
    "trainer_wait_share": ("trainer waits", "{:.1%}"),
    "rollout_idle_share": ("rollouts idle", "{:.1%}"),
    "staleness_mean": ("staleness", "{:.2f}"),
}
_SPLIT = ("generates", "at its tools", "waits")


def is_run(name: str, known: list[str]) -> bool:
    """Whether a command's first word names a folder, and none of what it knows by name."""
    return name not in known and ("/" in name or Path(name).is_dir())


def sim(run_dir: str, words: list[str], as_json: bool) -> int:
    """Prints what happened beside what is simulated, and the best single change. Returns 0."""
    measured, now = _measured("sim", run_dir, words)
    changes = best_of_each(measured, now, say)[:1]
    lines = [*table(measured.happened, now), *costs(measured), *_change_lines(changes, now)]
    return _print(measured, now, changes, lines, as_json)


def sim_as(run_dir: str, words: list[str], pipelines: str, as_json: bool) -> int:
    """Prints the run beside itself under other pipelines. Returns 0."""
    names = counterfactual.names_of(pipelines)
    measured, own = _measured("sim", run_dir, words)
    others = dict[str, Figures]()
    for name in names:
        others[name] = counterfactual.run_as(measured, name)
        say(f"as {name}: {others[name].tokens_per_second:,.0f} tokens/s")
    if as_json:
        print(json.dumps(counterfactual.as_dict(measured, own, others), indent=1))
    else:
        print("\n".join(counterfactual.table(measured, own, others)))
    return 0


def plan(run_dir: str, words: list[str], as_json: bool) -> int:
    """Prints the overrides that would be fastest together, step by step. Returns 0."""
    measured, now = _measured("plan", run_dir, words)
    changes = best_together(measured, now, say)
    happened, simulated = measured.happened.tokens_per_second, now.tokens_per_second
    first = f"{'now':<12} {happened:,.0f} tokens/s; simulated {simulated:,.0f}"
    last = [f"{'overrides':<12} {' '.join(changes[-1].words)}"] if changes else []
    return _print(measured, now, changes, [first, *_change_lines(changes, now), *last], as_json)


def _print(measured: Measured, now: Figures, changes: list[Change], lines: list[str], as_json: bool) -> int:
    print(json.dumps(_as_dict(measured, now, changes), indent=1) if as_json else "\n".join(lines))
    return 0


def _measured(command: str, run_dir: str, words: list[str]) -> tuple[Measured, Figures]:
    """A run, and its prediction."""
    if words:
        raise LaminarError(
            f"laminar {command} RUN_DIR takes no settings, and got {' '.join(words)}: the run has its own"
        )
    measured = measure(Path(run_dir))
    if measured.scales:
        say(
            f"rollout.replicas={measured.scales} is not simulated: {measured.config.rollout.most} replicas "
            f"are, as in the longest time without a change, {measured.steps} steps"
        )
    return measured, predict(measured)


def table(happened: Figures, simulated: Figures) -> list[str]:
    """A line for each figure; shares differ in points, the others in per cent."""
    lines = [f"{'':<18}{'happened':>12}{'simulated':>12}{'difference':>14}"]
    for key, (name, form) in _ROWS.items():
        lines.append(_line(name, form, getattr(happened, key), getattr(simulated, key), key in _SHARES))
    if happened.split is not None and simulated.split is not None:
        a, b = happened.split, simulated.split
        lines.append(_line("trajectory takes", "{:,.2f} s", a.seconds, b.seconds))
        for name, x, y in zip(_SPLIT, a.shares, b.shares, strict=True):
            lines.append(_line(f"  {name}", "{:.1%}", x, y, share=True))
    return lines


def _line(name: str, form: str, a: float, b: float, share: bool = False) -> str:
    if share:
        difference = f"{(b - a) * 100:+.1f} points"
    else:
        difference = f"{b / a - 1:+.1%}" if a else "-"
    return f"{name:<18}{form.format(a):>12}{form.format(b):>12}{difference:>14}"


def costs(measured: Measured) -> list[str]:
    """What was measured in the run, in words."""
    curve, trainer, turns = measured.curve, measured.trainer, measured.turns
    begin = f"{curve.start:.3g} s per local batch"
    if turns is not None:
        begin = f"{curve.ask:.3g} s per turn and {curve.prefill * 1e6:.3g} us per token prefilled"
    return [
        "",
        f"{'decode':<12} {curve.step * 1e3:.3g} ms per step, {curve.token * 1e6:.3g} us per token, "
        f"{curve.kv * 1e9:.3g} ns per token of KV cache; {begin}",
        *(_turn_costs(turns) if turns is not None else []),
        f"{'training':<12} {trainer.token * 1e6:.3g} us per token of the fullest rank, {trainer.step:.3g} s "
        "per step",
        f"{'weights':<12} publication {trainer.publish:.3g} s, relays {trainer.relay:.3g} s more, "
        f"pull {measured.pull:.3g} s; checkpoint {trainer.checkpoint:.3g} s",
    ]


def _turn_costs(turns: Turns) -> list[str]:
    """What calls and resets took: a median, the slowest in a hundred, and those that came to nothing."""
    found = []
    for name, took in (("calls", turns.known.calls), ("resets", turns.known.resets)):
        if took:
            seconds = sorted(each.seconds for each in took if each.seconds < math.inf) or [0.0]
            middle, slow = seconds[len(seconds) // 2], seconds[len(seconds) * 99 // 100]
            hung = sum(each.seconds == math.inf for each in took) / len(took)
            failed = sum(each.failed for each in took) / len(took)
            found.append(
                f"{name:<12} {len(took):,} of them: median {middle:.3g} s, the slowest in a hundred "
                f"{slow:.3g} s; {hung:.1%} never returned, {failed:.1%} failed with their environment"
            )
    return found


def _change_lines(changes: list[Change], now: Figures) -> list[str]:
    if not changes:
        return [f"{'best change':<12} none of those tried gains {GAIN_MIN:.0%} or more"]
    lines = []
    for number, change in enumerate(changes):
        f = change.figures
        lines.append(
            f"{'best change' if not number else 'then':<12} {' '.join(change.words)}: "
            f"{f.tokens_per_second:,.0f} tokens/s ({change.over(now):+.0%}), trainer waits "
            f"{f.trainer_wait_share:.0%}, rollouts idle {f.rollout_idle_share:.0%}, staleness "
            f"{f.staleness_mean:.1f}"
        )
    return lines


def _counts(turns: Turns | None) -> dict[str, int] | None:
    """How many calls and resets, and how many of either never returned or failed."""
    if turns is None:
        return None
    calls, resets = turns.known.calls, turns.known.resets
    both = [*calls, *resets]
    hung, failed = sum(each.seconds == math.inf for each in both), sum(each.failed for each in both)
    return {"calls": len(calls), "resets": len(resets), "hung": hung, "failed": failed}


def _as_dict(measured: Measured, now: Figures, changes: list[Change]) -> dict[str, object]:
    return {
        "happened": dataclasses.asdict(measured.happened),
        "simulated": dataclasses.asdict(now),
        "measured": {
            "decode": dataclasses.asdict(measured.curve),
            "trainer": dataclasses.asdict(measured.trainer),
            "pull": measured.pull,
            "score": measured.score,
            "move": measured.move,
            "turns": _counts(measured.turns),
        },
        "changes": [{"words": c.words, "figures": dataclasses.asdict(c.figures)} for c in changes],
    }
