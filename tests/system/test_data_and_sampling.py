"""Whole runs on users' data: Parquet as GSM8K has it, two evaluated files, groups filtered and sampled in
rounds; and a run in vain."""

import json
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from helpers.runs import Run, metrics, summary
from laminar_hpc.config.directories import examples_directory

REWARD = """
from laminar_hpc.environments import math

def score(*, prompt, response, row):
    return math.reward(prompt=prompt, response=response.replace(">", " #### "), row=row)
"""


def gsm8k(path: Path, name: str) -> Path:
    """The example's sums in the format of GSM8K: question, and an answer that ends in '#### 1,234'."""
    import pyarrow
    import pyarrow.parquet

    rows = map(json.loads, Path(examples_directory(f"arithmetic/data/{name}.jsonl")).read_text().splitlines())
    found = [{"question": r["prompt"], "answer": f"We add them.\n#### {int(r['answer']):,}"} for r in rows]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(found), path)
    return path


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_parquet_two_evaluations_filter_and_rounds(tmp_path, monkeypatch):
    """Everything at once on real parts. What is trained has an advantage and as many samples as the rounds
    gave it; what is filtered is on record and never trained; both files are evaluated on the way while
    training goes on."""
    (tmp_path / "sums_as_text.py").write_text(REWARD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    heldout = Path(examples_directory("arithmetic/data/heldout.jsonl"))
    run = Run(
        tmp_path / "sums",
        "steps=4",
        "reward.function=sums_as_text.score",
        f"data.train={gsm8k(tmp_path / 'sums.parquet', 'train')}",
        "data.prompt_field=question|prompt",
        "data.answer_field=answer",
        "data.max_prompt_tokens=14",
        "data.too_long=drop",
        f"evaluation.files=[{gsm8k(tmp_path / 'test.parquet', 'heldout')},{heldout}]",
        "evaluation.every=2",
        "evaluation.samples=2",
        "algorithm.samples_per_prompt=8",
        "algorithm.first_samples=4",
        "algorithm.zero_variance=filter",
    )
    assert run.finish() == 0, run.lines
    assert any("sums.parquet: 3," in line and "too long and dropped" in line for line in run.lines), run.lines
    figures = summary(tmp_path / "sums")
    assert (
        figures["steps"] == 4
        and figures["max_versions_per_trajectory"] == 1
        and figures["staleness_training_max"] <= 2
    )
    assert figures["reward_errors"] == 0

    found = Counter(
        (e["file"], e["name"], e["label"], e["samples"]) for e in metrics(tmp_path / "sums", "evaluation")
    )
    assert found == {
        (f, n, label, k): 1
        for f in ("test", "heldout")
        for n, k in (("greedy", 1), ("sampled", 2))
        for label in ("before", "step", "after")
    }
    for name in (
        "greedy",
        "sampled",
    ):  # one pass judges both files on the same weights; they hold the same problems
        for label in ("before", "step", "after"):
            pair = [
                e
                for e in metrics(tmp_path / "sums", "evaluation")
                if (e["name"], e["label"]) == (name, label)
            ]
            assert len({e["weight_id"] for e in pair}) == 1 and (
                name == "sampled" or pair[0]["accuracy"] == pair[1]["accuracy"]
            )
    assert list(figures["evaluations"]) == ["test", "heldout"]
    assert figures["accuracy_before"] == figures["evaluations"]["test"]["before"] > 0
    assert "held-out heldout" in (tmp_path / "sums" / "report.html").read_text()

    database = sqlite3.connect(f"file:{tmp_path / 'sums' / 'store.sqlite'}?mode=ro", uri=True)
    groups: dict[str, list[tuple]] = {}
    for state, *group in database.execute(
        "SELECT g.state, COUNT(*), COUNT(DISTINCT t.reward), MAX(t.accuracy), MIN(t.weight_step), "
        "g.weight_step FROM groups g JOIN trajectories t ON t.group_id = g.id "
        "WHERE g.state IN ('consumed', 'given_up') GROUP BY g.id"
    ):
        groups.setdefault(state, []).append(tuple(group))
    database.close()
    assert len(groups["consumed"]) == 4 * 32 and all(
        rewards == 2 and least == age for _, rewards, _, least, age in groups["consumed"]
    )
    assert {size for size, *_ in groups["consumed"]} > {4} and {size for size, *_ in groups["consumed"]} <= {
        4,
        6,
        8,
    }
    assert all(
        rewards == 1 and size == (4 if right else 8) for size, rewards, right, *_ in groups["given_up"]
    )
    assert (
        len(metrics(tmp_path / "sums", "given_up"))
        == len(groups["given_up"])
        == figures["groups_filtered"]
        > 0
    )
    assert figures["tokens_saved"] > 0 and 0 < figures["tokens_saved_fraction"] < 0.5
    run.assert_gone()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_whose_every_group_is_filtered_ends_with_a_line(tmp_path):
    """Answers that nobody can give: a hundred groups are filtered in a row, then the run ends in order, with
    a checkpoint, and says why."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "answer": "none"}) + "\n" for i in range(10, 40))
    )
    run = Run(
        tmp_path / "in-vain",
        f"data.train={tmp_path}/rows.jsonl",
        "evaluation.files=[]",
        "algorithm.prompts_per_step=4",
        "algorithm.samples_per_prompt=2",
        "algorithm.zero_variance=filter",
    )
    assert run.finish() == 1, run.lines
    (line,) = run.errors
    assert (
        "the last 100 groups were all filtered" in line
        and "all 2 rewards are 0" in line
        and "algorithm.zero_variance=keep" in line
    )
    assert len(metrics(tmp_path / "in-vain", "given_up")) >= 100
    assert metrics(tmp_path / "in-vain", "end")[-1]["reason"].startswith("failed: the last 100 groups")
    assert [c["step"] for c in metrics(tmp_path / "in-vain", "checkpoint")] == [0]
    run.assert_gone()
