"""The report: one page without outside references, for whole, partial, resumed and replayed runs."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
import synthetic

from laminar_hpc.observability import jsonl, report, rundata, timeline
from laminar_hpc.observability.trace import Trace

SECTIONS = [
    "Accuracy and reward", "Staleness", "Response lengths", "Sampling", "Every process over time", "Where the time went", "Trainer",
    "Weights", "Sample trajectories", "Configuration", "Launches",
]  # fmt: skip


def sections(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def first_prompts(run_dir) -> list[list[int]]:
    """The prompts' tokens of the first batch trained."""
    run = rundata.load(run_dir)
    return [t.prompt_tokens for t in run.payloads([t.id for t in run.consumed if t.consumed_step == 0])]


def check(page: str) -> None:
    """Self-contained, small, and every SVG is well-formed."""
    assert not re.findall(r'(?:src|href)="(?!#)', page) and "@import" not in page and "url(" not in page
    assert len(page.encode()) < 1_500_000
    closed = {"div", "span", "b", "p", "td", "th", "tr", "code", "details", "figure", "section", "em"}
    assert not [name for name in re.findall(r"<(\w+)[^>]*/>", page) if name in closed]  # HTML would leave them open
    drawn = re.findall(r"<figure>.*?</figure>|<svg class=\"timeline.*?</svg>(?=<p|</div>)", page, re.S)
    assert drawn
    for part in drawn:
        ElementTree.fromstring(part)
    assert "nan" not in re.sub(r"<script>.*?</script>", "", page, flags=re.S).replace("finance", "").lower().split()


def test_a_finished_run(finished):
    """Promise: all parts are there, with decoded samples of the first and the last step."""
    run_dir = finished[0]
    page = report.write(run_dir).read_text()
    check(page)
    assert sections(page) == SECTIONS
    assert "held-out harder: filled greedy, hollow sampled" in page, "a plot for every evaluated file"
    assert "0.210 → 0.930" in page and "12 of 12" in page and "ended: finished" in page
    prompts = {"".join(synthetic.CHARACTERS[token] for token in tokens) for tokens in first_prompts(run_dir)}
    assert any(f"<code>{prompt}</code>" in page for prompt in prompts)
    for row in ("trainer0", "relay0", "rollout0", "rollout0 rewards", "rollout1", "controller0"):
        assert f">{row}</text>" in page


def test_a_run_that_died_at_step_3(tmp_path):
    """Promise: a crashed run has a report that says so, with what there is."""
    synthetic.write(tmp_path / "run", steps=3, crash=True)
    with open(tmp_path / "run" / "trace" / "trainer0.jsonl", "ab") as file:
        file.write(b'{"kind":"tra')
    page = report.write(tmp_path / "run").read_text()
    check(page)
    assert "no end recorded after step 3" in page and "0.210 → -" in page


def test_a_run_that_never_took_a_step(tmp_path):
    """Promise: even a run that failed while it was set up has a report, with the reason."""
    metrics = jsonl.Appender(tmp_path / "metrics.jsonl")
    metrics.write({"kind": "start", "time": 5.0, "restored_step": -1, "pipeline": "sync", "derived": {"parameters": 3}})
    metrics.write({"kind": "end", "time": 9.0, "reason": "failed: <engine> did not start", "step": 0})
    page = report.write(tmp_path).read_text()
    check(page)
    assert "failed: &lt;engine&gt; did not start" in page and "Where the time went" not in sections(page)


def test_a_resumed_run(resumed):
    """Promise: both launches are listed, and the time between them is cut out of the time line."""
    run_dir, before, after = resumed
    page = report.write(run_dir).read_text()
    check(page)
    assert sections(page) == SECTIONS
    assert "steps done again after a restore: 3" in page and "<td>step 4</td>" in page
    assert timeline.RunTime(rundata.load(run_dir)).total < after.end - before.start - 90


def test_a_replay(finished, tmp_path):
    """Promise: a replay's report leaves out what a replay has not."""
    synthetic.replay_of(tmp_path / "again", finished[1])
    page = report.write(tmp_path / "again").read_text()
    check(page)
    assert "trained again from elsewhere" in page
    assert "Weights" not in sections(page) and "Sample trajectories" not in sections(page) and "Trainer" in sections(page)


def test_a_model_that_is_gone(tmp_path):
    """Promise: samples are shown as token ids where the tokenizer is not there any more."""
    synthetic.write(tmp_path / "run", steps=2)
    (tmp_path / "model" / "tokenizer.json").unlink()
    page = report.write(tmp_path / "run").read_text()
    assert any(f"<code>{' '.join(map(str, tokens))}</code>" in page for tokens in first_prompts(tmp_path / "run"))


def test_crowds_are_joined(tmp_path):
    """Promise: the page stays small however many calls were traced."""
    jsonl.Appender(tmp_path / "metrics.jsonl").write({"kind": "start", "time": 0.0, "restored_step": -1})
    trace = Trace(tmp_path, "rollout", 0)
    for i in range(8000):
        trace.record("score", i, i + 0.5)
    page = timeline.figures(rundata.load(tmp_path))
    assert page.count("<rect") < timeline.MAX_SPANS_PER_ROW + 20


def test_the_command(finished, tmp_path, capsys):
    """Promise: `laminar report RUN_DIR` makes both files anew and prints the page's path; what is no run is refused in one line."""
    run_dir = finished[0]
    for name in ("summary.json", "report.html"):
        (run_dir / name).unlink(missing_ok=True)
    assert report.main([str(run_dir)]) == 0
    assert capsys.readouterr().out.strip() == str(run_dir / "report.html") and (run_dir / "summary.json").is_file()
    assert report.main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "is no run" in error and error.count("\n") == 1
    assert report.main([]) == 2


@pytest.mark.parametrize("pattern", ["*.html", "*.json"])
def test_files_come_in_one_piece(finished, pattern):
    """Promise: a reader never sees half a file, and nothing temporary stays behind."""
    report.main([str(finished[0])])
    assert not [path for path in finished[0].glob("." + pattern)]
