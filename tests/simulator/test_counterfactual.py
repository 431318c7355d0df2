"""`laminar sim RUN_DIR --as PIPELINES`: a finished run under other pipelines."""

import json

import pytest

from helpers.made_up_runs import made_up_run
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.launch import cli
from laminar_hpc.simulator import counterfactual
from laminar_hpc.simulator.counterfactual import OTHERS, run_as
from laminar_hpc.simulator.finished import command as finished
from laminar_hpc.simulator.finished.measured import measure_run
from laminar_hpc.simulator.finished.prediction import predict


def test_a_synchronous_run_as_others(tmp_path):
    """Promise: as a synchronous run it is itself; others overlap training with generation, within their own
    bounds, and are faster; the same tokens are trained by all."""
    measured = measure_run(*made_up_run(tmp_path))
    own, found = predict(measured), {name: run_as(measured, name) for name in OTHERS}
    assert found["sync"] == own
    assert own.staleness_mean == found["verl"].staleness_mean == 0.0
    assert 0 < found["one_step"].staleness_mean <= 1.0 and found["areal"].staleness_mean <= 4.0
    assert found["one_step"].tokens_per_second > 1.1 * own.tokens_per_second
    assert found["areal"].trainer_wait_share < own.trainer_wait_share
    tokens = [figures.tokens_per_second * figures.step_seconds for figures in (own, found["one_step"])]
    assert tokens[0] == pytest.approx(tokens[1], rel=0.05)


def test_verl_generates_and_trains_on_all_gpus(tmp_path):
    """Promise: one trainer GPU and two replicas are three of each in turns: a third of the training time."""
    measured = measure_run(*made_up_run(tmp_path))
    split, all_gpus = (OTHERS[name][1](finished_setup(measured)) for name in ("sync", "verl"))
    assert (split.trainer_gpus, len(split.engines)) == (1, 2)
    assert (all_gpus.trainer_gpus, len(all_gpus.engines)) == (3, 3)
    assert all_gpus.job.train_token == pytest.approx(split.job.train_token / 3)


def finished_setup(measured):
    return counterfactual.setup_of(measured)


def test_one_table(tmp_path, capsys, monkeypatch):
    """Promise: one line each for what happened, the run as simulated and as others; in JSON the same."""
    measured = measure_run(*made_up_run(tmp_path))
    monkeypatch.setattr(finished, "measure", lambda _: measured)
    assert cli.run(["sim", str(tmp_path), "--as", "verl,one_step"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split("  ")[0].strip() for line in lines[1:5]]
    assert names == ["happened", "simulated", "as verl", "as one_step"]
    assert " x " in lines[4] and lines[6].startswith("as verl")
    assert cli.run(["sim", str(tmp_path), "--as=sync", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["as_sync"] == found["simulated"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["RUN", "--as", "vrl"], r"--as=vrl \(did you mean verl\?\): use some of verl \(all GPUs"),
        (["RUN", "--as", "verl", "steps=3"], "takes no settings, and got steps=3"),
        (["RUN", "--without", "repack"], "asked of an EXPERIMENT; of a run ask --as"),
        (["small", "--as", "verl"], "--as=verl is asked of a RUN_DIR"),
    ],
)
def test_what_is_asked_of_the_wrong_one_is_refused(words, text, tmp_path):
    """Promise: one line that says of what it is asked."""
    with pytest.raises(LaminarError, match=text):
        cli.run(["sim", *(str(tmp_path) if word == "RUN" else word for word in words)])
