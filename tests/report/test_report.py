"""The report: one page without outside references, for whole, partial, resumed and replayed runs."""

import html
import re
import xml.etree.ElementTree as ElementTree

import pytest

from helpers import synthetic
from helpers.made import Made
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.launch import cli
from laminar_hpc.machine.files import jsonl
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.report import document, rundata, samples, timeline, trajectory_page
from laminar_hpc.report import sections as report_sections
from laminar_hpc.report.sections import guard

SECTIONS = [
    "Accuracy and reward",
    "Rewards",
    "Staleness",
    "Response lengths",
    "Sampling",
    "Every process over time",
    "Where the time went",
    "Trainer",
    "Weights",
    "Sample trajectories",
    "Configuration",
    "Launches",
]


def sections(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def first_prompts(run_dir) -> list[list[int]]:
    """The prompts' tokens of the first batch trained."""
    run = rundata.load(run_dir)
    return [t.prompt.tolist() for t in run.wholes([t.id for t in run.consumed if t.consumed_step == 0])]


def check(page: str) -> None:
    """Self-contained, small, and every SVG is well-formed."""
    assert not re.findall(r'(?:src|href)="(?!#)', page) and "@import" not in page and "url(" not in page
    assert len(page.encode()) < 1_500_000
    closed = {"div", "span", "b", "p", "td", "th", "tr", "code", "details", "figure", "section", "em"}
    # HTML would leave them open
    assert not [name for name in re.findall(r"<(\w+)[^>]*/>", page) if name in closed]
    drawn = re.findall(r"<figure>.*?</figure>|<svg class=\"timeline.*?</svg>(?=<p|</div>)", page, re.S)
    assert drawn
    for part in drawn:
        ElementTree.fromstring(part)
    words = re.sub(r"<script>.*?</script>", "", page, flags=re.S).replace("finance", "").lower().split()
    assert "nan" not in words


def test_a_finished_run(finished):
    """Promise: all parts are there, with decoded samples of the first and the last step."""
    run_dir = finished[0]
    page = document.write(rundata.load(run_dir)).read_text()
    check(page)
    assert sections(page) == SECTIONS
    assert "held-out harder: filled greedy, hollow sampled" in page, "a plot for every evaluated file"
    assert "0.210 → 0.930" in page and "12 of 12" in page and "ended: finished" in page
    prompts = {"".join(synthetic.CHARACTERS[token] for token in tokens) for tokens in first_prompts(run_dir)}
    assert any(f"<code>{prompt}</code>" in page for prompt in prompts)
    assert page.count('<details id="trajectory-') == 16 and all(
        f'id="{a}"' in page for a in re.findall(r'href="#(trajectory-\d+)"', page)
    )
    for row in ("trainer0", "relay0", "rollout0", "rollout0 rewards", "rollout1", "controller0"):
        assert f">{row}</text>" in page


def test_a_run_that_died_at_step_3(tmp_path):
    """Promise: a crashed run has a report that says so, with what there is."""
    synthetic.write(tmp_path / "run", steps=3, crash=True)
    with open(tmp_path / "run" / "trace" / "trainer0.jsonl", "ab") as file:
        file.write(b'{"kind":"tra')
    page = document.write(rundata.load(tmp_path / "run")).read_text()
    check(page)
    assert "no end recorded after step 3" in page and "0.210 → -" in page


def test_a_run_that_never_took_a_step(tmp_path):
    """Promise: even a run that failed while its store was being made has a report, with the reason."""
    (tmp_path / "store.sqlite").touch()
    metrics = jsonl.Appender(tmp_path / "metrics.jsonl")
    metrics.write(
        {
            "kind": "start",
            "time": 5.0,
            "restored_step": None,
            "pipeline": "sync",
            "derived": {"parameters": 3},
        }
    )
    metrics.write({"kind": "end", "time": 9.0, "reason": "failed: <engine> did not start", "step": 0})
    page = document.write(rundata.load(tmp_path)).read_text()
    check(page)
    assert "failed: &lt;engine&gt; did not start" in page and "Where the time went" not in sections(page)


def test_a_run_of_which_no_line_is_written(tmp_path):
    """Promise: a run that was killed before its first line, or on a full disk, has a report that says so."""
    (tmp_path / "metrics.jsonl").touch()
    page = document.write(rundata.load(tmp_path)).read_text()
    check(page)
    assert "never started" in page


def test_a_configuration_that_is_none_is_refused(tmp_path):
    """Promise: one line, whatever YAML the file is."""
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "config.yaml").write_text("[1]")
    with pytest.raises(LaminarError, match="no settings are in it"):
        rundata.load(tmp_path)


def test_a_resumed_run(resumed):
    """Promise: both launches are listed, and the time between them is cut out of the time line."""
    run_dir, before, after = resumed
    page = document.write(rundata.load(run_dir)).read_text()
    check(page)
    assert sections(page) == SECTIONS
    assert "steps done again after a restore: 3" in page and "<td>step 4</td>" in page
    assert timeline.RunTime(rundata.load(run_dir)).total < after.end - before.start - 90


def test_samples_are_spread_over_the_run_and_by_reward(finished):
    """Promise: a handful of trajectories over the whole run, the best and the worst answer of prompts whose
    rewards differ."""
    run = rundata.load(finished[0])
    chosen = samples.choose(run.consumed)
    steps = [t.consumed_step for t in chosen]
    assert sorted(set(steps)) == [0, 4, 7, 11] and steps == sorted(steps) and len(chosen) == 16
    for best, worst in zip(chosen[::2], chosen[1::2], strict=True):
        group = [t.reward for t in run.consumed if t.group_id == best.group_id]
        assert best.group_id == worst.group_id and (best.reward, worst.reward) == (max(group), min(group))
    assert any(best.reward > worst.reward for best, worst in zip(chosen[::2], chosen[1::2], strict=True))


def test_a_trajectorys_page(finished):
    """Promise: prompt, answer, reward parts, log-probs against the trainer's, and where and when it lived,
    all from the run's files."""
    run = rundata.load(finished[0])
    row = samples.choose(run.consumed)[-2]
    (stored,) = run.wholes([row.id])
    run.records.setdefault("lost", []).append(
        {"trajectory_id": row.id, "attempt": 0, "reason": "the engine ended it with abort"}
    )
    run.records["logprob_mismatch"] = [
        {"replica": f"rollout{row.replica}", "weight_id": row.weight_id, "mean": 2.5e-6, "max": 1.5e-5}
    ]
    record = stored.record
    record.attempt, record.moves, record.reward_parts["format"] = 1, 2, 0.5
    page = trajectory_page.page(
        row,
        stored,
        trajectory_page.facts(run, [row]),
        lambda tokens: "".join(synthetic.CHARACTERS[t] for t in tokens),
    )
    ElementTree.fromstring(page)
    text = re.sub(r"<[^>]*>", " ", page)
    words = " ".join(text.split())
    mean = stored.response.logprobs.mean()
    for part in (
        f"trajectory {row.id}: reward {row.reward:g}",
        "reward: accuracy",
        "reward: format 0.5",
        f"mean log-prob (engine) {mean:.4f}",
        "same weights (probe) mean 2.5e-06, max 1.5e-05",
        f"when it was trained mean {0.25 * row.staleness_training + 1e-6:.1e}",
        "importance ratio in its step mean 1.0010, max 1.800",
        f"replica rollout {row.replica}",
        f"weight ids, by the engine {row.weight_id} (tokens 0 to {row.response_length})",
        f"trained with weights of step {row.consumed_step}",
        "attempts 2 (attempt 1: the engine ended it with abort)",
        "moves between replicas 2",
        "group granted +0.0s",
        "last token +",
        "scored +",
        "trained +",
    ):
        assert part in words, part
    facts = trajectory_page.facts(run, [row])
    facts.left_out = {row.id: "log-prob mismatch 4 above 0.2 nats"}
    shown = html.unescape(trajectory_page.page(row, stored, facts, str))
    assert "log-prob mismatch 4 above 0.2 nats" in shown
    for ahead, said in ((0, "ahead by nothing: the engine's weights"), (3, "ahead by 3 mini-batches")):
        facts.own_mismatches = {row.id: (2e-6, ahead)}
        assert said in html.unescape(trajectory_page.page(row, stored, facts, str))
    for tokens in (stored.prompt, stored.response.tokens):
        assert "".join(synthetic.CHARACTERS[t] for t in tokens) in html.unescape(page)


def test_long_answers_are_cut_and_their_curve_is_thinned(finished):
    """Promise: an answer of 30,000 tokens does not make the page slow."""
    run = rundata.load(finished[0])
    (stored,) = run.wholes([run.consumed[0].id])
    n = 30_000
    stored = Made(stored.record.trajectory_id, 0, [1], [1] * n, [-0.5] * (n - 1) + [-9.0]).whole
    page = trajectory_page.page(
        run.consumed[0], stored, trajectory_page.facts(run, []), lambda tokens: "1" * len(tokens)
    )
    assert len(page) < 40_000 and "24000 characters" in page and "-9.0" in page


def test_replayed_routes_have_a_curve(finished):
    """Promise: where the trainer replays routes, the page shows how many its router would not have chosen."""
    run = rundata.load(finished[0])
    title = "routes that the trainer&#x27;s router would not choose (share)"
    assert title not in report_sections.trainer_curves(run)
    for number, step in enumerate(run.steps):
        step["routing_difference"] = 0.01 * (1 + number)
    assert title in report_sections.trainer_curves(run)


def test_what_the_guard_has_done_is_a_section(finished):
    """Promise: none where it did nothing; else the steps by number, and what was left out and skipped."""
    run = rundata.load(finished[0])
    assert guard(run) == ""
    run.steps[3] |= {"guard_left_out": 5, "guard_skipped_updates": 1}
    assert "Divergence guard" in guard(run) and "Steps: 4." in guard(run)


def test_a_replay(finished, tmp_path):
    """Promise: a replay's report leaves out what a replay has not."""
    synthetic.replay_of(tmp_path / "again", finished[1])
    page = document.write(rundata.load(tmp_path / "again")).read_text()
    check(page)
    assert "trained again from elsewhere" in page
    assert (
        "Weights" not in sections(page)
        and "Sample trajectories" not in sections(page)
        and "Trainer" in sections(page)
    )


def test_a_model_that_is_gone(tmp_path):
    """Promise: samples are shown as token ids where the tokenizer is not there any more."""
    synthetic.write(tmp_path / "run", steps=2)
    (tmp_path / "model" / "tokenizer.json").unlink()
    page = document.write(rundata.load(tmp_path / "run")).read_text()
    assert any(
        f"<code>{' '.join(map(str, tokens))}</code>" in page for tokens in first_prompts(tmp_path / "run")
    )


def test_crowds_are_joined(tmp_path):
    """Promise: the page stays small however many calls were traced."""
    jsonl.Appender(tmp_path / "metrics.jsonl").write({"kind": "start", "time": 0.0, "restored_step": None})
    trace = Trace(tmp_path, "rollout", 0)
    for i in range(8000):
        trace.record("score", i, i + 0.5)
    page = timeline.figures(rundata.load(tmp_path))
    assert page.count("<rect") < timeline.MAX_SPANS_PER_ROW + 20


def test_the_command(finished, tmp_path, capsys):
    """Promise: `laminar report RUN_DIR` makes both files anew and prints the page's path; what is no run is
    refused in one line."""
    run_dir = finished[0]
    for name in ("summary.json", "report.html"):
        (run_dir / name).unlink(missing_ok=True)
    assert cli.run(["report", str(run_dir)]) == 0
    assert (
        capsys.readouterr().out.strip() == str(run_dir / "report.html")
        and (run_dir / "summary.json").is_file()
    )
    with pytest.raises(LaminarError, match="is no run"):
        cli.run(["report", str(tmp_path)])


@pytest.mark.parametrize("pattern", ["*.html", "*.json"])
def test_files_come_in_one_piece(finished, pattern):
    """Promise: a reader never sees half a file, and nothing temporary stays behind."""
    cli.run(["report", str(finished[0])])
    assert not [path for path in finished[0].glob("." + pattern)]
