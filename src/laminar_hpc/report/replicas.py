"""rollout.replicas=MIN:MAX in `laminar top` and on the page: each change, with what was predicted of it and
what was measured."""

from laminar_hpc.machine.observability.console import count
from laminar_hpc.report.page import section
from laminar_hpc.report.rundata import Run
from laminar_hpc.report.svg import row, tag


def parts(newest: dict[str, dict]) -> list[str]:
    """The newest decision, what the last one that has settled came to, and a call that has failed since."""
    decision, scaled, failed = (newest.get(kind) for kind in ("scaling", "scaled", "scale_failed"))
    found = []
    if decision:
        found.append(
            f"{decision['before']} -> {decision['target']} at step {decision['step']} "
            f"({decision['predicted_gain']:+.0%} tokens/s predicted)"
        )
    if scaled:
        found.append(
            f"{scaled['before']} -> {scaled['replicas']} came to {scaled['measured_gain']:+.0%} "
            f"({scaled['predicted_gain']:+.0%} predicted)"
        )
    if failed and failed["time"] > (decision or {"time": 0.0})["time"]:
        found.append(failed["reason"])
    return found


def replicas_section(run: Run) -> str:
    """The report's section; empty for a run with a fixed number of replicas."""
    decisions = run.records.get("scaling", [])
    if not decisions:
        return ""
    measured = {each["step"]: each for each in run.records.get("scaled", [])}
    head = row(
        *("step", "replicas", "trainer waited", "replicas idle", "trainer could take", "a replica gives"),
        *("predicted", "measured", "reached"),
        cell="th",
    )
    body = "".join(_row(each, measured.get(each["step"], {})) for each in decisions)
    failed = len(run.records.get("scale_failed", []))
    note = "Tokens per second; the gain is measured once a change has settled, before the next one."
    note += f" {failed} calls of the command have failed: logs/scale.log." if failed else ""
    return section("Replicas", tag("table", head + body), note)


def _row(decision: dict, scaled: dict) -> str:
    return row(
        str(decision["step"]),
        f"{decision['before']} → {decision['target']}",
        f"{decision['trainer_wait_share']:.0%}",
        f"{decision['replica_idle_share']:.0%}",
        count(decision["trainer_tokens_per_second"]),
        count(decision["replica_tokens_per_second"]),
        f"{scaled.get('predicted_gain', decision['predicted_gain']):+.0%}",
        f"{scaled['measured_gain']:+.0%}" if scaled else "-",
        str(scaled.get("replicas", "-")),
    )
