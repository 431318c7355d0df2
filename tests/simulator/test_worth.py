"""`laminar sim EXPERIMENT --without NAMES` and `--staleness BOUNDS`."""

import json

import pytest

from helpers.small_plans import FEW_STEPS
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.launch import cli
from laminar_hpc.simulator import worth
from laminar_hpc.simulator.mechanisms import MECHANISMS
from laminar_hpc.simulator.settings import load_simulation
from laminar_hpc.simulator.sweep import point, setup_of

SMALL = [
    *FEW_STEPS,
    "gpus=[16]",
    "trainer_share=0.5",
]


def answer(capsys, *words: str) -> list[dict]:
    assert cli.run(["sim", "small", *SMALL, "pipelines=[laminar]", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_run_is_shown_beside_itself_without_a_mechanism(capsys, monkeypatch):
    """Promise: the whole is what `laminar sim` simulates, each other row lacks one mechanism, the last one
    all; without its own pace a replica waits for the slowest, which costs tokens."""
    monkeypatch.setattr(worth, "SEEDS", 2)
    rows = answer(capsys, "--without", "repack,own_pace")
    assert [row["run"] for row in rows] == ["whole", "without repack", "without own_pace", "without all 2"]
    config = load_simulation("small", [*SMALL, "pipelines=[laminar]"])
    rates = [
        point(config_of, "laminar", 16, 8, config.steps).figures["tokens_per_second"]
        for seed in (0, worth._SEED)
        for config_of in [load_simulation("small", [*SMALL, f"seed={seed}"])]
    ]
    assert rows[0]["figures"]["tokens_per_second"] == pytest.approx(sum(rates) / 2)
    assert rows[0]["gain"] == 0 and rows[2]["gain"] > 0.1
    assert rows[3]["figures"] == rows[2]["figures"], "a batch that all generate together moves nothing"


def test_bounds_are_a_sweep(capsys, monkeypatch):
    """Promise: a row for each bound, in the order asked for; an on-policy run is the slowest."""
    monkeypatch.setattr(worth, "SEEDS", 2)
    rows = answer(capsys, "--staleness", "2,0")
    assert [row["run"] for row in rows] == ["bound 2", "bound 0"]
    assert rows[1]["gain"] > 0.1 and rows[1]["figures"]["staleness_training_mean"] == 0


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_is_part_of_some_run(name):
    """Promise: each entry changes a run that has it, and leaves out the same when left out twice."""
    sites = "sites=[{gpu: A100, count: 8, wan_gbps: 2, preemptible: true, mtbf_hours: 3}]"
    words = [*SMALL, "pipelines=[laminar]", sites, "rollout_mtbf_hours=5"]
    words += ["speculation=true", "workload.prompts=64"]
    config = load_simulation("small", words)
    whole = setup_of(config, "laminar", 16, 8, 4)
    once, mechanism = setup_of(MECHANISMS[name].config(config), "laminar", 16, 8, 4), MECHANISMS[name]
    assert mechanism.about and mechanism.setup(once) != whole
    assert mechanism.setup(mechanism.setup(once)) == mechanism.setup(once)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ["--without", "repak"],
            r"--without=repak \(did you mean repack\?\): use some of repack \(long resp",
        ),
        (
            ["--without", "deltas"],
            r"--without=deltas \(only what has .*: no pipeline of laminar has it in this",
        ),
        (["--staleness", "0,x"], "--staleness=0,x: numbers from 0 to 1000 separated by commas"),
        (["--staleness", "-1"], "--staleness=-1: numbers from 0"),
        (["--staleness", "1", "pipelines=[sync]"], "sync train what was just generated"),
        (["--staleness", "1", "--without", "repack"], "two tables: ask for one of them"),
    ],
)
def test_what_has_no_answer_is_refused_in_one_line(words, text):
    """Promise: the line names what may be asked."""
    with pytest.raises(LaminarError, match=text):
        cli.run(["sim", "small", *SMALL, "pipelines=[laminar]", *words])
