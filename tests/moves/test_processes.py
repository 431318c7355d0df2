"""Emulated runs as processes of their own: 64 replicas on one machine without torch; fleets and the
controller killed while things move."""

import random
import time
from pathlib import Path

import psutil
import pytest

from helpers.emulated.launch import Emulation
from helpers.emulated.stand import assert_every_one_ended_once, small_config
from laminar_hpc.report import rundata

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def steps_done(run_dir: Path) -> int:
    return len(rundata.load(run_dir).steps) if (run_dir / "metrics.jsonl").exists() else 0


def test_64_replicas_in_four_processes(tmp_path):
    """The scale of a large run's control plane, and no process of it has torch in memory."""
    config = small_config(tmp_path, replicas=64, steps=3, repack="kv")
    config.algorithm.prompts_per_step = 128
    emulation = Emulation(config, 1e-6, per_process=16)
    try:
        while steps_done(emulation.run_dir) < 1:
            assert emulation.controller.poll() is None
            time.sleep(0.2)
        for process in (emulation.controller, emulation.stage, *emulation.fleets.values()):
            assert not any(
                "libtorch" in mapping.path for mapping in psutil.Process(process.pid).memory_maps()
            )
        assert emulation.wait(240) == 0
    finally:
        emulation.stop()
    found = assert_every_one_ended_once(config)
    assert len({t.replica for t in found.values()}) == 64


def test_fleets_are_killed(tmp_path):
    """SIGKILL of a process with two replicas, again and again: what they had goes on elsewhere or starts
    again, nothing is lost."""
    config = small_config(tmp_path, replicas=6, steps=8, repack="kv")
    config.rollout.increment_tokens = 50
    emulation, draw, kills = Emulation(config, 1e-6, per_process=2), random.Random(7), 0
    try:
        while steps_done(emulation.run_dir) < 1:
            time.sleep(0.1)
        while emulation.wait(1.0) is None and kills < 8:
            first = draw.choice(sorted(emulation.fleets))
            emulation.fleets[first].kill()
            emulation.fleets[first].wait()
            kills += 1
            emulation.fleets[first] = emulation.fleet(first, 2)
        assert emulation.wait(240) == 0
    finally:
        emulation.stop()
    assert kills >= 4
    assert_every_one_ended_once(config)


def test_the_controller_is_killed(tmp_path):
    """Everything starts again from the store: what was finished is there, what was on its way starts again,
    each ends once."""
    config = small_config(tmp_path, replicas=4, steps=6, repack="kv")
    config.resume = "auto"
    emulation = Emulation(config, 1e-6, per_process=2)
    try:
        while steps_done(emulation.run_dir) < 2:
            time.sleep(0.05)
        emulation.controller.kill()
    finally:
        emulation.stop(patience=0.0)
    again = Emulation(config, 1e-6, per_process=2)
    try:
        assert again.wait(240) == 0
    finally:
        again.stop()
    assert_every_one_ended_once(config)
