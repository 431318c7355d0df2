"""docs/promises.md#hangs on emulated engines: one that stands still is replaced, and its work goes on."""

import time

from helpers.emulated.stand import Stand, assert_every_one_ended_once, small_config
from laminar_hpc.controller.loop import Controller
from laminar_hpc.report import rundata, summary
from laminar_hpc.rollout import engine_watch
from laminar_hpc.simulator.emulated.engine import EmulatedEngine


def test_an_engine_that_hangs_is_replaced(tmp_path, monkeypatch):
    """Its clock stops while requests run. Within the limit another one starts in its place in the same
    process; what it generated goes on from what is known of it, and one line says so."""
    monkeypatch.setattr(engine_watch, "LEAST_SECONDS", 1.5)
    monkeypatch.setattr(engine_watch, "FIRST_SECONDS", 3.0)
    monkeypatch.setattr(engine_watch, "TIMES_SLOWEST", 2.0)
    config = small_config(tmp_path, replicas=2, steps=5)
    config.rollout.increment_tokens = 25
    stand = Stand(config)
    hung: list[EmulatedEngine] = []

    def hang(controller: Controller) -> None:
        worker = stand.replicas[0].worker if 0 in stand.replicas else None
        if hung or worker is None or controller.state.trainer_step < 1:
            return
        if sum(work.request_id is not None for work in list(worker.batch.trajectories.values())) >= 8:
            engine = worker.engines.current
            assert isinstance(engine, EmulatedEngine)
            hung.append(engine)
            stand.loop.run(engine.pause())

    stand.each_turn = hang
    begun = time.monotonic()
    stand.run(120)
    assert hung and time.monotonic() - begun < 60
    assert_every_one_ended_once(config)
    worker = stand.replicas[0].worker
    assert worker is not None and worker.engines.current is not hung[0] and stand.lives == 2
    (record,) = rundata.load(tmp_path / "run").records["engine_hung"]
    assert record["replica"] == 0 and "has made no progress for" in record["reason"]
    assert sum("is started again" in line for line in stand.lines) == 1
    lost = summary.build(tmp_path / "run")["tokens_discarded"]
    assert lost < 64 * config.sampling.max_response_tokens
