"""`laminar join`: replicas that see nothing of the run directory generate for a run, over a line that breaks
in the middle of what it carries."""

import time
from pathlib import Path

import pytest

from helpers.emulated.launch import Emulation
from helpers.emulated.stand import assert_every_one_ended_once, small_config
from helpers.joined import join, key_of_run
from helpers.links.proxy import Proxy
from helpers.runs import assert_clean, steps_done
from laminar_hpc.line.join_key import JOIN_FILE, JOINED_FILE, SECRET_FILE
from laminar_hpc.store.payload.writer import FOLDER


@pytest.mark.timeout(150)
def test_replicas_elsewhere_do_all_the_work(tmp_path: Path) -> None:
    """The run has no replica of its own. Configuration, model and address come over the line, responses go
    over it, and it is cut three times. Each trajectory is whole, once; the audit is clean. No key is left,
    and the joined machine keeps its logs alone."""
    config = small_config(tmp_path, replicas=1, steps=2)
    config.cluster.storage = "stream"
    emulation = Emulation(config, 1e-6, per_process=1, kinds=[(config, 0)])
    away, proxy, joined = tmp_path / "away", None, None
    try:
        key = key_of_run(emulation.run_dir, away)
        proxy = Proxy(key.port)
        proxy.cuts = [60_000, 160_000, 260_000]
        hidden = [emulation.run_dir, tmp_path / "model"]
        joined = join(away, f"127.0.0.1:{proxy.port}", hidden, "run_dir=here")
        assert emulation.wait(120) == 0, joined.stdout and joined.stdout.read()
        said, _ = joined.communicate(timeout=30)
    finally:
        emulation.stop(patience=1.0)
        if joined is not None:
            joined.kill()
            joined.wait()
        if proxy is not None:
            proxy.close()
    assert joined.returncode == 0, said
    assert "joined       rollout; logs in" in said and "fetching" in said
    assert not proxy.cuts, "the line was not cut"
    found = assert_every_one_ended_once(config)
    assert_clean(emulation.run_dir)
    assert {t.replica for t in found.values()} == {0}
    payloads = [path for path in (emulation.run_dir / FOLDER).iterdir() if path.stat().st_size]
    assert payloads, "no response came"
    for folder in (emulation.run_dir, away / "here"):
        assert not any((folder / name).exists() for name in (JOIN_FILE, JOINED_FILE, SECRET_FILE))
    assert sorted(path.name for path in (away / "here").iterdir()) == ["conf", "logs", "trace"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_replicas_elsewhere_outlive_the_controller(tmp_path: Path) -> None:
    """It is killed in the middle of the run, and another takes over: they find it at the same address by the
    same key, what they have generated meanwhile arrives, and nothing is lost or trained twice."""
    config = small_config(tmp_path, replicas=2, steps=6)
    config.cluster.storage = "stream"
    config.resume = "auto"
    emulation = Emulation(config, 1e-6, per_process=1, kinds=[(config, 0)])
    away, joined = tmp_path / "away", None
    try:
        key = key_of_run(emulation.run_dir, away)
        joined = join(away, key.place, [emulation.run_dir], "--replicas=2", "run_dir=here")
        while steps_done(emulation.run_dir) < 2:
            assert emulation.controller.poll() is None
            time.sleep(0.1)
        emulation.controller.kill()
        emulation.controller.wait()
        emulation.stage.wait(60)  # stand-ins end with their controller
        emulation.controller = emulation.start("controller")
        emulation.stage = emulation.start("stage", "1e-6")
        assert emulation.wait(120) == 0
        said, _ = joined.communicate(timeout=30)
    finally:
        emulation.stop(patience=1.0)
        if joined is not None:
            joined.kill()
            joined.wait()
    assert joined.returncode == 0 and "restart" not in said, said
    assert len(assert_every_one_ended_once(config)) and steps_done(emulation.run_dir) == 6
    assert_clean(emulation.run_dir)
