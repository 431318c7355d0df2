"""A run that simulates itself, and where its forecasts are shown."""

import json

import pytest

from helpers.made_up_runs import made_up_run
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.report import forecast, rundata, top
from laminar_hpc.report.live import View
from laminar_hpc.report.rundata import FORECASTS, Run
from laminar_hpc.simulator import self_forecast
from laminar_hpc.simulator.finished.measured import measure_run
from laminar_hpc.simulator.finished.prediction import predict
from laminar_hpc.simulator.self_forecast import foretold, settings_of


@pytest.fixture
def run(tmp_path, monkeypatch) -> tuple[Run, RunConfig]:
    """A run whose files say what was made up."""
    made, config = made_up_run(tmp_path)
    monkeypatch.setattr(rundata, "load", lambda _: made)
    monkeypatch.setattr(self_forecast, "read_config", lambda _: config)
    return made, config


def test_a_run_foretells_itself(run, tmp_path, capsys):
    """Promise: the present settings within 3% of what was measured, other settings by their words, the
    fastest on the same GPUs first; the line is where readers look for it."""
    assert self_forecast.main([str(tmp_path)]) == 0
    line = json.loads(capsys.readouterr().out)
    assert forecast.newest(tmp_path) == line
    assert line["now"]["figures"]["step_seconds"] == pytest.approx(line["happened"]["step_seconds"], rel=0.03)
    assert line["step"] == 12 and line["foretold"] is None
    first, *others = line["others"]
    assert first["words"] == ["pipeline=laminar"]
    assert first["figures"]["tokens_per_second"] > 1.2 * line["now"]["figures"]["tokens_per_second"]
    assert ["rollout.replicas=4"] in [other["words"] for other in others]


def test_a_forecast_stands_beside_what_came_of_it(run, tmp_path, capsys):
    """Promise: settings that an earlier line foretold get that forecast, and the report and `laminar top`
    show it beside what is measured; the forecast of the same settings about themselves is none."""
    made, config = run
    assert self_forecast.main([str(tmp_path)]) == 0
    line = json.loads(capsys.readouterr().out)
    more = next(other for other in line["others"] if other["words"] == ["rollout.replicas=4"])
    config.rollout.replicas = 4
    found = foretold([line], settings_of(config))
    assert found == {"step": 12, "words": ["rollout.replicas=4"], "figures": more["figures"]}
    config.rollout.replicas = 2
    assert foretold([line], settings_of(config)) is None

    later = {**line, "step": 24, "foretold": found}
    with open(tmp_path / FORECASTS, "a") as file:
        file.write(json.dumps(later) + "\n")
    page = forecast.forecast_section(made)
    assert "foretold at step 12: rollout.replicas=4" in page and "pipeline=laminar" in page
    shown = top._forecast(View(tmp_path))
    assert shown is not None
    lines = shown.plain.splitlines()
    assert (
        lines[0].startswith("forecast")
        and f"measured {line['happened']['step_seconds']:.2f}, to step 24" in lines[0]
    )
    assert "foretold at step 12 of rollout.replicas=4" in lines[-1] and len(lines) == 5


def test_settings_that_gain_nothing_are_not_shown():
    """Promise: what is shown of other settings gains as much as is worth it; the file has them all."""
    figures = {"tokens_per_second": 100.0, "step_seconds": 1.0}
    others = [
        {"words": [f"a={rate}"], "figures": {**figures, "tokens_per_second": rate}} for rate in (102, 110, 90)
    ]
    line = {
        "step": 9,
        "gain_min": 0.03,
        "happened": figures,
        "now": {"figures": figures},
        "others": others,
        "foretold": None,
    }
    assert [part.partition(":")[0] for part in forecast.parts(line)[1:]] == ["a=110"]


def test_longer_responses_are_foretold(tmp_path, monkeypatch, capsys):
    """Promise: a run whose responses have grown foretells the step that it has come to, not the mean of all
    that it has done."""
    made, config = made_up_run(tmp_path, steps=40, growth=0.05)
    monkeypatch.setattr(rundata, "load", lambda _: made)
    monkeypatch.setattr(self_forecast, "read_config", lambda _: config)
    newer = made.steps[20:]
    whole = measure_run(made, config).happened.step_seconds
    assert self_forecast.main([str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)["now"]["figures"]["step_seconds"]
    assert found == pytest.approx(sum(step["seconds"] for step in newer) / len(newer), rel=0.03)
    assert found > 1.05 * whole


@pytest.mark.parametrize(("growth", "within"), [(0.1, 0.03), (0.0, 0.05)])
def test_what_is_still_to_be_learned_is_foretold(tmp_path, monkeypatch, growth, within):
    """Promise: responses are as long as their trend makes them in the steps that are left, and so is the
    step; where there is no trend they are as they were."""
    made, config = made_up_run(tmp_path, steps=36, growth=growth)
    later, config.steps = made.steps[30:], 36
    made.launches[0].steps = made.steps[:30]
    monkeypatch.setattr(rundata, "load", lambda _: made)
    monkeypatch.setattr(self_forecast, "read_config", lambda _: config)
    line = self_forecast.forecast(tmp_path)
    found = line["now"]["figures"]["step_seconds"]
    assert found == pytest.approx(sum(step["seconds"] for step in later) / len(later), rel=within)
    assert (line["growth"] > 1.1) if growth else (line["growth"] == 1.0)
    assert (found > 1.05 * line["happened"]["step_seconds"]) == bool(growth)
    assert ("% longer (" in forecast.parts(line)[0]) == bool(growth)


def test_twice_the_replicas_are_foretold(tmp_path):
    """Promise: where all wait for generation, twice the replicas are foretold to make a step shorter."""
    measured = measure_run(*made_up_run(tmp_path))
    _, others = self_forecast.forecasts(measured)
    more = next(other for other in others if other.words == ("rollout.replicas=4",))
    assert more.figures.step_seconds < predict(measured).step_seconds


def test_nothing_is_foretold_of_a_run_that_is_too_short(tmp_path, monkeypatch, capsys):
    """Promise: one line says why, nothing is written, and the page has no section."""
    made, config = made_up_run(tmp_path, steps=4)
    monkeypatch.setattr(rundata, "load", lambda _: made)
    monkeypatch.setattr(self_forecast, "read_config", lambda _: config)
    assert self_forecast.main([str(tmp_path)]) == 1
    assert "4 steps are too few" in json.loads(capsys.readouterr().out)["why_not"]
    assert not (tmp_path / FORECASTS).exists() and forecast.forecast_section(made) == ""
    assert top._forecast(View(tmp_path)) is None
