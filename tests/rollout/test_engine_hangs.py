"""docs/promises.md#hangs on a real engine: SGLang's scheduler is stopped while it decodes."""

import os
import signal
import sys

import pytest

from helpers.engines.pair import fill_slot
from helpers.engines.replica_stand import Replica
from laminar_hpc.line.endings import StopReceived
from laminar_hpc.line.messages.rollouts import EngineHung, Generated, Unfinished
from laminar_hpc.rollout import engine_watch


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stopped_scheduler_is_replaced(tmp_path, monkeypatch):
    """The server still answers. Every trajectory is given back, and the replica serves the same weights with
    another engine, which generates."""
    monkeypatch.setattr(engine_watch, "LEAST_SECONDS", 5.0)
    monkeypatch.setattr(engine_watch, "FIRST_SECONDS", 10.0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    replica = Replica(tmp_path)
    try:
        fill_slot(replica.writer, replica.models[0], 0, step=0)
        controller = replica.controller
        controller.until_asked(0)
        scheduler = replica.scheduler()
        grant = controller.grant(0, groups=4, length=1500)
        scheduler.send_signal(signal.SIGSTOP)
        hung = controller.get(EngineHung)
        assert isinstance(hung, EngineHung) and "has made no progress for" in hung.reason
        given = {m.trajectory_id for m in controller.collect(16, Unfinished) if isinstance(m, Unfinished)}
        assert given == {s.trajectory_id for group in grant.groups for s in group.samples}
        controller.until_asked(0)
        assert replica.scheduler().pid != scheduler.pid and not os.path.exists(f"/proc/{scheduler.pid}/fd/0")
        controller.grant(0, groups=1, length=6)
        assert len(controller.collect(4, Generated)) == 4
    finally:
        replica.controller.tell(StopReceived("the test is over"))
        assert replica.ended()
        replica.writer.close()
