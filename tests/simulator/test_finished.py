"""Finished runs: their decode curve is found, they are predicted from their own measurements, and what would
have been faster is said in words that `laminar train` takes."""

import dataclasses
import itertools
import json
import random
from pathlib import Path

import numpy as np
import pytest

from helpers.emulated.launch import Emulation, prepare
from helpers.made_up_runs import (
    KV,
    PROMPT,
    PUBLISH,
    PULL,
    RELAY,
    SLOWER,
    START,
    STEP,
    TOKEN,
    TRAIN_STEP,
    TRAIN_TOKEN,
    batch_of,
    made_up_run,
    queue,
)
from laminar_hpc.config.check import check
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.launch import cli
from laminar_hpc.simulator.finished import command as finished
from laminar_hpc.simulator.finished.changes import GAIN_MIN, best_of_each, best_together, changed
from laminar_hpc.simulator.finished.decode import (
    decode_curve,
    local_batches,
    not_negative,
    speeds,
    work_before,
)
from laminar_hpc.simulator.finished.measured import Measured, measure, measure_run
from laminar_hpc.simulator.finished.prediction import predict


def test_work_before_each_end():
    """Without a queue a response ends after as many steps as it has tokens; with one place at a time after
    those of all before it. KV counts each token of prompt and response once for each step."""
    free, waiting = work_before([30, 10], queue()), work_before([30, 10], queue(max_concurrent=1))
    assert [steps for steps, *_ in free] == pytest.approx([30, 10])
    assert [tokens for _, tokens, _ in free] == pytest.approx([40, 20])
    assert [steps for steps, *_ in waiting] == pytest.approx([30, 40])
    assert [kv for *_, kv in waiting] == pytest.approx(
        [30 * PROMPT + 450, 30 * PROMPT + 450 + 10 * PROMPT + 50]
    )


@pytest.mark.parametrize("of", [queue(), queue(max_concurrent=8), queue(kv_cache_tokens=3000)])
def test_a_known_curve_is_found(of):
    """Promise: the curve and each replica's speed come out of the ends of trajectories, with a queue for the
    places or for the KV cache and without."""
    noise = random.Random(0)
    batches = [
        batch_of([round(min(256, noise.lognormvariate(4, 0.8))) + 1 for _ in range(48)], of, i % 2)
        for i in range(24)
    ]
    one = decode_curve([batch for batch in batches if batch.replica == 0], of)
    assert dataclasses.astuple(one)[:4] == pytest.approx((START, STEP, TOKEN, KV), rel=0.02)
    found = speeds(batches, one, of)
    assert found[0] / found[1] == pytest.approx(SLOWER[1], rel=0.01)


def test_a_local_batch_tells_what_came_before_its_first_move(tmp_path):
    """Promise: of a local batch that trajectories left or came to, what ended before the first move counts,
    with all that it began with; the curve is the same."""
    run, _ = made_up_run(tmp_path)
    whole = local_batches(run, 0.0, 1e9)
    assert all(batch.seconds and None not in dict(batch.ends).values() for batch in whole)
    span = [s for s in run.spans["rollout0"] if s.kind == "generate"][1]
    mine = sorted(
        (t for t in run.consumed if t.replica == 0 and span.t0 < t.time_finished <= span.t1),
        key=lambda t: t.time_finished,
    )
    last, at = mine[-1], mine[-2].time_finished
    run.consumed[last.id].replica = 1
    move = {"trajectory_id": last.id, "source": 0, "destination": 1, "time": at + 0.02, "seconds": 0.01}
    run.records["move"] = [move]
    one = local_batches(run, 0.0, 1e9)[0]
    assert one.seconds is None and one.lengths == whole[0].lengths
    assert sum(seconds is None for _, seconds in one.ends) == 1
    found = decode_curve([batch for batch in local_batches(run, 0.0, 1e9) if batch.replica == 0], queue())
    assert dataclasses.astuple(found)[:4] == pytest.approx((START, STEP, TOKEN, KV), rel=0.02)


def test_no_coefficient_is_negative():
    """What a fit would make negative is left out of it: more tokens never take less time."""
    columns = np.array([[1, 10, 100], [1, 10, 210], [1, 10, 330], [1, 9, 420]], float)
    found = not_negative(columns, np.array([1.0, 2.0, 3.0, 4.0]))
    assert min(found) >= 0 and found[2] > 0


def test_a_synchronous_run_is_predicted(tmp_path):
    """Promise: tokens/s and idle shares of a run are predicted from what its files say: here within 3% and a
    point, and what was measured is what there was."""
    measured = measure_run(*made_up_run(tmp_path))
    happened, simulated = measured.happened, predict(measured)
    assert simulated.tokens_per_second == pytest.approx(happened.tokens_per_second, rel=0.03)
    assert simulated.trainer_wait_share == pytest.approx(happened.trainer_wait_share, abs=0.01)
    assert simulated.rollout_idle_share == pytest.approx(happened.rollout_idle_share, abs=0.01)
    assert simulated.staleness_mean == happened.staleness_mean == 0.0
    assert measured.trainer.token == pytest.approx(TRAIN_TOKEN, rel=0.05)
    assert measured.trainer.step == pytest.approx(TRAIN_STEP, rel=0.1)
    assert (measured.trainer.publish, measured.trainer.relay) == pytest.approx((PUBLISH, RELAY), rel=0.01)
    assert measured.pull == pytest.approx(PULL)


def test_a_run_that_scales_is_predicted_from_the_time_without_a_change(tmp_path, monkeypatch, capsys):
    """Promise: of a run with `rollout.replicas=MIN:MAX` the longest part with the same replicas is measured,
    as many are simulated, and one line says so."""
    run, config = made_up_run(tmp_path, steps=24)
    came = run.steps[8]["time"]
    run.spans["rollout1"] = [span for span in run.spans["rollout1"] if span.t0 >= came]
    config.rollout.replicas = "1:8"
    measured = measure_run(run, config)
    assert measured.config.rollout.replicas == 2 and measured.steps == 15
    assert predict(measured).step_seconds == pytest.approx(measured.happened.step_seconds, rel=0.03)
    monkeypatch.setattr(finished, "measure", lambda _: measured)
    assert finished.sim(str(tmp_path), [], as_json=True) == 0
    assert "rollout.replicas=1:8 is not simulated: 2 replicas are" in capsys.readouterr().err


def test_what_would_be_faster_is_said_in_overrides(tmp_path):
    """Promise: the changes gain what they say, each set of words is one that a start takes, and of a
    synchronous run that waits the first is to overlap."""
    measured = measure_run(*made_up_run(tmp_path))
    now = predict(measured)
    single, together = best_of_each(measured, now), best_together(measured, now)
    assert single[0].words == together[0].words == ("pipeline=laminar",)
    assert single[0].over(now) > 0.2
    rates = [now.tokens_per_second, *(change.figures.tokens_per_second for change in together)]
    assert all(b >= a * (1 + GAIN_MIN) for a, b in itertools.pairwise(rates))
    last = changed(measured.config, together[-1].words)
    assert predict(measured, last) == together[-1].figures
    check(dataclasses.replace(last, dry_run=True))
    words = load_config(["experiment=demo", "dry_run=true", *together[-1].words])
    assert words.pipeline.refresh == "drained"


def test_nothing_is_said_where_nothing_helps(tmp_path):
    """Promise: one line says that no change helps: here the trainer is what limits, and there is one of
    it."""
    measured = measure_run(*made_up_run(tmp_path))
    trainer = dataclasses.replace(measured.trainer, token=1.0)
    bound = dataclasses.replace(
        measured, trainer=trainer, config=changed(measured.config, ("pipeline=laminar",))
    )
    bound.config.rollout.replicas = 1
    now = predict(bound)
    assert best_together(bound, now) == []
    assert finished._change_lines([], now) == ["best change  none of those tried gains 3% or more"]


@pytest.mark.parametrize("command", ["sim", "plan"])
def test_what_is_no_run_or_too_short_is_refused(command, tmp_path, monkeypatch):
    """A folder that is no run is refused, as are settings behind a run, each in one line."""
    with pytest.raises(LaminarError, match="is no run: no metrics"):
        cli.run([command, str(tmp_path)])
    with pytest.raises(LaminarError, match=r"takes no settings, and got steps=3: the run has its own"):
        cli.run([command, str(tmp_path), "steps=3"])
    run, config = made_up_run(tmp_path, steps=4)
    with pytest.raises(LaminarError, match="4 steps are too few to learn from"):
        measure_run(run, config)


@pytest.mark.parametrize(("part", "path"), [("consumed", "store.sqlite"), ("spans", "trace")])
def test_a_copy_that_lacks_a_part_is_refused(part, path, tmp_path):
    """The line names what is missing: a longer run would be of no help."""
    run, config = made_up_run(tmp_path)
    getattr(run, part).clear()
    with pytest.raises(LaminarError, match=rf"{tmp_path}/{path} has nothing of the run's newest steps; copy"):
        measure_run(run, config)


@pytest.mark.slow
@pytest.mark.parametrize(("pipeline", "bound"), [("drained", 2), ("barrier", 0)])
def test_an_emulated_run_is_predicted(pipeline, bound, tmp_path, capsys):
    """Promise: a run of four replicas with real controller, workers and messages is predicted within 10%
    of its tokens/s and 10 points of its idle shares."""
    config = prepare(tmp_path, 4_000, 100, 2048)
    config.steps, config.rollout.replicas, config.rollout.kv_cache_tokens = 12, 4, 200_000
    config.algorithm.prompts_per_step, config.algorithm.samples_per_prompt = 32, 8
    config.pipeline.refresh, config.pipeline.max_staleness = pipeline, bound
    config.emulation.time_scale, config.emulation.model = 5.0, "7B"
    config.emulation.median_response_tokens, config.emulation.sigma = 400.0, 1.0
    config.rollout.max_concurrent = 32
    emulation = Emulation(config, 1.2e-4, per_process=4)
    try:
        assert emulation.wait(300) == 0
    finally:
        emulation.stop()
    assert cli.run(["sim", config.run_dir, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    a, b = found["happened"], found["simulated"]
    assert b["tokens_per_second"] == pytest.approx(a["tokens_per_second"], rel=0.1), found
    for share in ("trainer_wait_share", "rollout_idle_share"):
        assert b[share] == pytest.approx(a[share], abs=0.1), found
    assert isinstance(measure(Path(config.run_dir)), Measured)
