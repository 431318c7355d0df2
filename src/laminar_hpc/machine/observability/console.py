"""The lines a user reads while a run goes on. Pure functions from plain values to text; the controller and
the command line print them.

Numbers stand in fixed columns, and every line fits 120 columns.
"""

import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

# recent steps whose median gives the time left: long enough to ride out an evaluation or a checkpoint
ETA_STEPS = 10
LABEL_WIDTH = 12


def duration(seconds: float | None) -> str:
    """0.6s, 42s, 1m32s, 2h05m."""
    if seconds is None:
        return "-"
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def count(value: float | None) -> str:
    """950, 6.1k, 61k, 2.4M: at most four characters below a thousand millions."""
    if value is None:
        return "-"
    power = sum(abs(value) >= limit for limit in (999.5, 999.5e3, 999.5e6))
    scaled, unit = value / 1000**power, ("", "k", "M", "G")[power]
    return f"{scaled:.1f}{unit}" if unit and abs(scaled) < 9.95 else f"{scaled:.0f}{unit}"


def size(bytes_: float | None) -> str:
    """812 B, 3.1 MB, 14 GB (powers of 1000)."""
    if bytes_ is None:
        return "-"
    text = count(bytes_)
    return f"{text[:-1]} {text[-1]}B" if text[-1] in "kMG" else f"{text} B"


def number(value: float | None, digits: int = 3) -> str:
    """`value` with `digits` decimals, "-" where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def line(label: str, text: str) -> str:
    """Any line of ours: what it is about, then the text, from the same column on in every line."""
    return f"{label:<{LABEL_WIDTH}} {text}"


def table(lines: Sequence[Sequence[str]], left: Collection[int] = ()) -> list[str]:
    """Lines of words in aligned columns; those of `left` begin at one place, all others end at one."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def aligned(line: Sequence[str]) -> list[str]:
        words = zip(line, widths, strict=True)
        return [word.ljust(n) if at in left else word.rjust(n) for at, (word, n) in enumerate(words)]

    return ["  ".join(aligned(line)).rstrip() for line in lines]


def derived_block(derived: Mapping[str, object]) -> list[str]:
    """The derived quantities before a run starts, one per line, with units by their name's ending."""
    names = {name: _words(name) for name in derived}
    width = max((len(name) for name in names.values()), default=0)
    return [
        "this run",
        *(f"  {names[name]:<{width}}  {value_text(name, value)}" for name, value in derived.items()),
    ]


def _words(name: str) -> str:
    name = name.replace("_memory_bytes", "_memory").replace("_bytes", "_size").replace("_seconds", "")
    return name.replace("_", " ")


def dry_run_lines(derived: Mapping[str, object], missing: Sequence[str]) -> list[str]:
    """What `dry_run=true` prints: the derived quantities, then what a run would still need."""
    return [*derived_block(derived), *(line("before a run", text) for text in missing)]


def setup_line(what: str, seconds: float | None = None) -> str:
    """Set-up progress: what is there now, and after how long."""
    return line("set-up", what if seconds is None else f"{what:<70} {duration(seconds):>8}")


def step_line(step: Mapping, steps: int, eta_seconds: float | None) -> str:
    """One trainer step. `step`: a metrics line of kind step; `steps`: how many there shall be; see `eta`."""
    width, errors = len(str(steps)), step.get("reward_error_count")
    lengths = f"len {step['response_length_mean']:4.0f} (max {step['response_length_max']:4.0f})"
    if errors:  # they matter more than lengths
        lengths = f"reward errors {errors:.0f}/{step['trajectories']:.0f}".ljust(len(lengths))
    elif left_out := step.get("guard_left_out"):
        lengths = f"left out {left_out:.0f}/{step['trajectories']:.0f}".ljust(len(lengths))
    tokens = (step["prompt_tokens"] + step["response_tokens"]) / step["seconds"] if step["seconds"] else None
    return "  ".join(
        (
            f"step {step['step']:>{width}}/{steps}",
            f"reward {step['reward_mean']:5.2f}",
            f"acc {step['accuracy_mean']:4.2f}",
            lengths,
            f"stale {step['staleness_training_mean']:3.1f}/{step['staleness_training_max']:.0f}",
            f"wait {duration(step['wait_seconds']):>6}",
            f"train {duration(step['train_seconds']):>6}",
            f"{count(tokens):>4} tok/s",
            f"eta {duration(eta_seconds)}",
        )
    )


def skipped_line(step: int, skipped: int, limit: int) -> str:
    """Updates of a step that were not made. `limit`: optimizer.max_skipped_updates."""
    what = f"step {step}: {skipped} update{'s' if skipped > 1 else ''} had gradients that are not finite"
    return line("skipped", f"{what}; {limit} in a row end the run")


def guard_line(step: int, skipped: int, why: str) -> str:
    """Updates of a step that the divergence guard has not made, and why not the last of them."""
    return line("guard", f"step {step}: {skipped} update{'s' if skipped > 1 else ''} skipped: {why}")


def eta(seconds_per_step: Sequence[float], steps_left: int) -> float | None:
    """Seconds until the last step, by the median of the newest steps; None before the first one."""
    return statistics.median(seconds_per_step[-ETA_STEPS:]) * steps_left if seconds_per_step else None


def evaluation_progress(name: str, label: str, done: int, responses: int) -> str:
    """An evaluation on its way. `name`: greedy or sampled; `label`: before, step or after."""
    return line("evaluation", f"{label:<6} {name:<7}  {done:>{len(str(responses))}}/{responses} responses")


def evaluation_line(evaluation: Mapping) -> str:
    """An evaluation that is done. `evaluation`: the fields of a metrics line of kind evaluation."""
    several = f" x {evaluation['samples']}" if evaluation["samples"] > 1 else ""
    parts = (
        f"{evaluation['label']:<6} {evaluation['name']:<7}",
        f"accuracy {evaluation['accuracy']:5.3f}",
        f"{evaluation['file'][:24]}",
        f"{evaluation['problems']} problems{several}",
        f"len {evaluation['response_length_mean']:.0f}",
        f"step {evaluation['step']}",
        duration(evaluation["seconds"]),
    )
    return line("evaluation", "  ".join(parts))


def final_lines(summary: Mapping, run_dir: Path, report: Path | None, reason: str = "") -> list[str]:
    """The end of a run: what it reached and where it lies. `summary` as built by `summary.build`; `reason`:
    why, if it ended early."""
    why = f" ({reason})" if reason else ""
    done = (
        f"{summary['steps']} steps in {duration(summary['wall_seconds'])}{why}",
        f"{count(summary['trajectories_trained'])} trajectories",
        f"{count(summary['tokens_per_second'])} tok/s",
        f"versions per trajectory {value_text('', summary['max_versions_per_trajectory'])}",
    )
    lines = [*_accuracy_lines(summary, bool(reason)), *_incident_lines(summary), line("run", str(run_dir))]
    return [line("done", "  ".join(done)), *lines, *([line("report", str(report))] if report else [])]


def _accuracy_lines(summary: Mapping, stopped: bool) -> list[str]:
    """Held-out accuracy of each file, or why there is none, and the means of several rewards."""
    lines = []
    if summary["accuracy_before"] is not None or summary["accuracy_after"] is not None:
        keys = ("accuracy_before", "accuracy_after", "accuracy_after_sampled")
        lines.append(_accuracy_line(stopped, *(summary[key] for key in keys)))
    for file, accuracy in list(summary["evaluations"].items())[1:]:
        keys = ("before", "after", "after_sampled")
        lines.append(f"{_accuracy_line(stopped, *(accuracy[key] for key in keys))}   {file}")
    if len(summary["rewards"]) > 1:
        means = summary["rewards"].items()
        shown = (f"{name} {number(mean['first'])} to {number(mean['last'])}" for name, mean in means)
        lines.append(line("rewards", f"first and last step: {', '.join(shown)}"))
    return lines


def _accuracy_line(stopped: bool, before: float | None, after: float | None, sampled: float | None) -> str:
    more = f"   (sampled {number(sampled)})" if sampled is not None else ""
    if after is None and stopped:
        more = "   (stopped before the last evaluation)"
    return line("accuracy", f"before {number(before)}   after {number(after)}{more}")


def _incident_lines(summary: Mapping) -> list[str]:
    """What did not go as usual: reward errors, filtered groups, rescued, lost and saved work."""
    lines = []
    if errors := summary["reward_errors"]:
        of = f"{errors:,} of {summary['trajectories_trained']:,} trajectories trained"
        lines.append(line("reward", f"errors in {of}, the first: {summary['reward_error_first']}"))
    if groups := summary["groups_filtered"]:
        lines.append(line("filtered", f"{groups:,} groups whose rewards were all equal"))
    if rescued := summary["trajectories_rescued"]:
        by_load = summary["trajectories_rescued_by_load"]
        more = f", {by_load:,} of them where their weights were loaded" if by_load else ""
        lines.append(line("rescued", f"{rescued:,} trajectories of dead replicas went on elsewhere{more}"))
    if parked := summary["trajectories_parked"]:
        share = summary["parked_tokens_taken_up"] / summary["tokens_parked"]
        what = f"{count(summary['tokens_parked'])} tokens, {count(summary['bytes_parked'])} bytes"
        text = f"{parked:,} trajectories' KV caches ({what}) at relays; {share:.0%} of it was taken up"
        if again := summary["parked_trajectories_prefilled"]:
            text += f", {again:,} were prefilled again"
        lines.append(line("parked", text))
    left_out, skipped = summary["guard_left_out"], summary["guard_skipped_updates"]
    if left_out or skipped:
        lines.append(
            line("guard", f"{left_out or 0:,} trajectories left out, {skipped or 0:,} updates skipped")
        )
    if lost := summary["tokens_discarded"]:
        text = f"{count(lost)} response tokens of trajectories that were lost and redone"
        lines.append(line("discarded", text))
    if saved := summary["tokens_saved"]:
        part = f"{summary['tokens_saved_fraction'] * 100:.0f}% of what full groups would have taken"
        lines.append(line("saved", f"{count(saved)} response tokens by adaptive sampling, {part}"))
    return lines


def value_text(name: str, value: object) -> str:
    """A value as text: bytes and seconds by their name's ending, a list as its items, None as none."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        if name.endswith("_bytes"):
            return size(value)
        if name.endswith("_seconds"):
            return duration(value)
        return f"{value:,}" if isinstance(value, int) else f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {value_text(key, part)}" for key, part in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(value_text(name, part) for part in value)
    return str(value)
