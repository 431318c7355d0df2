"""docs/kv.md#machines-that-are-taken-back, with processes: all machines are noticed at once, their processes
are gone within the grace, and others go on with the parked KV caches."""

import time

import pytest

from helpers.emulated.launch import Emulation
from helpers.emulated.stand import assert_every_one_ended_once, small_config
from helpers.runs import assert_clean
from laminar_hpc.report import rundata, summary

REPLICAS, GRACE_SECONDS = 2, 10.0
pytestmark = pytest.mark.timeout(120)


def pulled(emulation: Emulation) -> int:
    """Replicas that have their first weights."""
    path = emulation.run_dir / "metrics.jsonl"
    return len(rundata.load(emulation.run_dir).records.get("pull", [])) if path.exists() else 0


def test_every_machine_is_noticed(tmp_path):
    config = small_config(tmp_path, replicas=REPLICAS, steps=1, prompts=8, repack="kv", repack_seconds=600.0)
    # all are as long as they may be, some seconds: none ends before the notice is read
    config.emulation.median_response_tokens = 2.0 * config.sampling.max_response_tokens
    config.emulation.sigma = 0.1
    config.emulation.time_scale = 4.0
    notice = tmp_path / "notice"
    config.cluster.preemption_notice = str(notice)
    emulation = Emulation(config, 1e-6, per_process=REPLICAS)
    try:
        while pulled(emulation) < REPLICAS:
            assert emulation.controller.poll() is None
            time.sleep(0.05)
        notice.write_text(f"{GRACE_SECONDS:g}")
        begun = time.monotonic()
        for fleet in emulation.fleets.values():
            assert fleet.wait(2 * GRACE_SECONDS) == 0
        took = time.monotonic() - begun
        notice.unlink()
        for index in emulation.fleets:
            emulation.fleets[index] = emulation.fleet(index, REPLICAS)
        assert emulation.wait(60) == 0
    finally:
        emulation.stop()
    assert took < GRACE_SECONDS
    assert_every_one_ended_once(config)
    assert_clean(emulation.run_dir)
    records, figures = rundata.load(emulation.run_dir).records, summary.build(emulation.run_dir)
    parked, taken = records["parked"], records["taken_up"]
    assert len(parked) >= 16 and not any(each["reason"] for each in taken)
    assert sorted(each["trajectory_id"] for each in taken) == sorted(e["trajectory_id"] for e in parked)
    assert sum(each["tokens"] for each in taken) == sum(each["tokens"] for each in parked)
    assert figures["tokens_discarded"] == 0
