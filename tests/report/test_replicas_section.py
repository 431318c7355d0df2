"""rollout.replicas=MIN:MAX for those who watch: what a change was to bring stands beside what it brought."""

from types import SimpleNamespace
from typing import Any

from laminar_hpc.report.replicas import parts, replicas_section

DECISION: dict[str, Any] = {
    "step": 8,
    "time": 10.0,
    "before": 2,
    "target": 4,
    "predicted_gain": 0.66,
    "trainer_wait_share": 0.42,
    "replica_idle_share": 0.0,
    "trainer_tokens_per_second": 24_000.0,
    "replica_tokens_per_second": 6_100.0,
}
SCALED = {"step": 8, "before": 2, "replicas": 4, "predicted_gain": 0.66, "measured_gain": 0.68}
FAILED = {"time": 11.0, "reason": "scale start 2 has ended with exit code 3: no nodes left", "replicas": 2}


def test_the_lines_of_top():
    """The decision; then what it came to; a call that failed as long as no later decision was made."""
    assert parts({}) == []
    assert parts({"scaling": DECISION}) == ["2 -> 4 at step 8 (+66% tokens/s predicted)"]
    found = parts({"scaling": DECISION, "scaled": SCALED, "scale_failed": FAILED})
    assert found[1:] == ["2 -> 4 came to +68% (+66% predicted)", FAILED["reason"]]
    assert FAILED["reason"] not in parts({"scaling": {**DECISION, "time": 12.0}, "scale_failed": FAILED})


def test_the_section_of_the_page():
    """A row for each decision; one that is not measured yet says so; nothing for a fixed number."""
    assert replicas_section(SimpleNamespace(records={})) == ""  # type: ignore[arg-type]
    records = {"scaling": [DECISION, {**DECISION, "step": 30}], "scaled": [SCALED], "scale_failed": [FAILED]}
    page = replicas_section(SimpleNamespace(records=records))  # type: ignore[arg-type]
    assert page.count("2 → 4") == 2 and page.count("+66%") == 2 and page.count("+68%") == 1
    assert "1 calls of the command have failed" in page
