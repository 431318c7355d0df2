"""A run whose only rollout is on a machine without its run directory: it trains as any other."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from helpers.joined import join, key_of_run
from helpers.links.proxy import Proxy
from helpers.paths import ROOT
from helpers.runs import SHORT, assert_clean, metrics, summary

STEPS = 24


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_trains_on_responses_from_elsewhere(tmp_path: Path) -> None:
    """Controller, trainer and relay in one folder; a relay and a real engine join that see neither it nor its
    shared memory, model and data, and the line breaks within responses. The model learns sums, nothing is
    lost or trained twice."""
    run_dir, away, joined, proxy = tmp_path / "run", tmp_path / "away", None, None
    words = [str(run_dir), *SHORT, f"steps={STEPS}", "cluster.storage=stream"]
    with open(tmp_path / "out", "w") as out:
        everything = subprocess.Popen(
            [ROOT / "launch/all_roles.sh", *words],
            stdout=out,
            stderr=out,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "ROLLOUTS": "0"},
        )
        try:
            key = key_of_run(run_dir, away)
            proxy = Proxy(key.port)
            proxy.cuts = [30_000 * k for k in range(1, 6)]
            joined = join(away, f"127.0.0.1:{proxy.port}", [run_dir, ROOT / "examples", Path("/dev/shm")])
            assert everything.wait(400) == 0, (tmp_path / "out").read_text()
            said, _ = joined.communicate(timeout=60)
            assert joined.returncode == 0 and "relay, rollout" in said, said
        finally:
            if proxy is not None:
                proxy.close()
            for process in (joined, everything):
                if process is not None and process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                    process.wait(60)
    assert not proxy.cuts, "the line was not cut"
    rewards = [step["reward_mean"] for step in metrics(run_dir, "step")]
    assert len(rewards) == summary(run_dir)["steps"] == STEPS
    assert sum(rewards[-8:]) > sum(rewards[:8])
    assert_clean(run_dir)
