"""Responses of several turns as the report and `laminar top` show them."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from helpers import synthetic
from helpers.made import Made
from laminar_hpc.launch import cli
from laminar_hpc.line.messages.data import VersionSpan
from laminar_hpc.machine.observability.trace import TraceSpan
from laminar_hpc.report import document, rundata, summary, turn_table
from laminar_hpc.report.rundata import Consumed

MEANS = {
    "turns_mean": 2.5,
    "tool_calls_mean": 1.5,
    "failed_calls_mean": 0.25,
    "generate_seconds_mean": 0.75,
    "tool_seconds_mean": 0.125,
    "wait_seconds_mean": 0.0,
    "cached_share_mean": 0.96,
    "busy_share_mean": 0.31,
    "refused_requests_mean": 0.5,
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose steps have means of an environment, and two of whose groups were given up."""
    synthetic.write(tmp_path / "run", steps=3)
    path = tmp_path / "run/metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        record.update(MEANS if record["kind"] == "step" else {})
    for reason in ("an environment failed: it ended", "all 4 rewards are 0"):
        records.insert(-1, {"kind": "given_up", "time": records[-1]["time"], "group_id": 1, "reason": reason})
    for reason in ("n: one answer", "stop: none"):
        of = {"trajectory_id": 1, "text": reason}
        records.insert(-1, {"kind": "refused", "time": records[-1]["time"], **of})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return tmp_path / "run"


def test_turns_in_summary_report_and_top(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Time per trajectory by kind, the cached share, and failures by class, each counted by itself."""
    found = summary.build(run_dir)["environment"]
    run = rundata.load(run_dir)
    assert {f"{name}_mean": found[name] for name in ("turns", "failed_calls", "generate_seconds")} == {
        key: MEANS[key] for key in ("turns_mean", "failed_calls_mean", "generate_seconds_mean")
    }
    assert found["cached_share"] == pytest.approx(0.96) and found["busy_share"] == pytest.approx(0.31)
    assert found["groups_given_up"] == 1
    wrong = sum(t.accuracy == 0 for t in run.consumed)
    assert found["ended"] == {"stop": len(run.consumed)} and found["wrong_answers"] == wrong > 0
    page = document.document(run)
    section = page[page.index("<h2>Turns and tools") :].partition("</section>")[0]
    rows = ["told to the model</td><td>0.250", f"answered, and wrong</td><td>graded</td><td>{wrong}"]
    rows.append("refused, the first: n: one answer</td><td>told to the agent</td><td>0.500 per trajectory<")
    for words in (*rows, "not trained</td><td>1<"):
        assert words in section, section
    assert cli.run(["top", str(run_dir), "--once"]) == 0
    text = capsys.readouterr().out
    (line,) = (line for line in text.splitlines() if line.startswith("turns"))
    expected = "2.5 per trajectory  1.5 tool calls, 0.25 failed  generate 0.75 s  tool 0.12 s  wait 0.00 s"
    assert expected in line and line.endswith("environments 31% busy  96% of later prompts cached")


def test_a_run_of_one_turn_has_none_of_it(finished: tuple[Path, synthetic.Written]) -> None:
    """Nothing is said of turns where there are none."""
    assert summary.build(finished[0])["environment"] is None
    assert "Turns and tools" not in document.document(rundata.load(finished[0]))


def row_of(made: Made) -> Consumed:
    values = {name: getattr(made, name, 0) for name in Consumed.__struct_fields__}
    return Consumed(**values | {"id": made.trajectory_id, "consumed_step": 0, "accuracy": 1.0})


def tool(t0: float, t1: float, waited: float = 0.0, what: str = "look") -> TraceSpan:
    return TraceSpan("tool", t0, t1, {"trajectory_id": 7, "waited": waited, "what": what})


def three_turns(**fields: object) -> Made:
    """Of 3, 2 and 1 tokens, with 2 and 3 given between them; from second 10 to second 20."""
    spans = [VersionSpan(0, 0, 3), VersionSpan(0, 5, 7), VersionSpan(0, 10, 11)]
    mask = [1, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1]
    return Made(
        7, 0, [1], list(range(11)), [-0.5] * 11, mask, spans, time_started=10.0, time_finished=20.0, **fields
    )


def test_each_turn_has_its_time() -> None:
    """A turn lasts up to its tools' span; what it has waited for its place is told apart, in the last turn by
    what is left of all generation. Where spans are missing no times are made up."""
    made = three_turns(reward_parts={"environment.generate_seconds": 6.0})
    spans = [tool(12.0, 13.0), tool(15.0, 17.0, waited=0.5)]
    found = turn_table.stretches(row_of(made), made.whole, spans)
    assert [(each.drawn, each.by, len(each.tokens)) for each in found] == [
        (True, "model", 3),
        (False, "look", 2),
        (True, "model", 2),
        (False, "look", 3),
        (True, "model", 1),
    ]
    assert [each.seconds for each in found] == [
        [("generate", 2.0)],
        [("tool", 1.0)],
        [("wait", 0.5), ("generate", 1.5)],
        [("tool", 2.0)],
        [("wait", 0.5), ("generate", 2.5)],
    ]
    for missing in (spans[:1], []):
        assert {len(each.seconds) for each in turn_table.stretches(row_of(made), made.whole, missing)} == {0}
    cut = three_turns(finish_reason="length")
    timed = turn_table.stretches(row_of(cut), cut.whole, [*spans, tool(19.0, 20.0)])
    assert timed[-1].seconds == [("generate", 2.0)], "the last call's results had no room"


def test_the_table_of_turns() -> None:
    """A row for each stretch, with turn, author, text, tokens and loss mask; a reset stands before the first
    turn."""
    made = three_turns()
    markup = turn_table.table(row_of(made), made.whole, [], lambda tokens: f"<code>{tokens}</code>")
    rows = ["".join(cell.itertext()) for cell in ElementTree.fromstring(f"<a>{markup}</a>").iter("tr")]
    assert rows == [
        "turnbytokensloss maskseconds",
        "1model[0, 1, 2]31-",
        "1tool[3, 4]20-",
        "2model[5, 6]21-",
        "2tool[7, 8, 9]30-",
        "3model[10]11-",
    ]
    reset = Made(8, 0, [1], [1, 2, 3], [-0.1] * 3, [0, 0, 1], [VersionSpan(0, 2, 3)])
    found = turn_table.stretches(row_of(reset), reset.whole, [])
    assert [(each.by, each.drawn) for each in found] == [("reset", False), ("model", True)]
    assert found[1].seconds, "no tool was called, so that all is known"
