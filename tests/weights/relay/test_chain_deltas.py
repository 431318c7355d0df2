"""Changes down a chain of real relay processes, which each check the sums of what they make of them: bytes,
anchors and late comers."""

import json
import sys

import pytest

from helpers.paths import BENCH

sys.path.insert(0, str(BENCH))
from chain_roles import START_SECONDS, ChainRun

MEGABYTE = 1 << 20
ANCHOR_EVERY = 4
SOON = 40.0


@pytest.fixture
def chain(tmp_path):
    words = ("relay.delta=auto", f"relay.full_every={ANCHOR_EVERY}", "relay.chunk_megabytes=1")
    run = ChainRun(tmp_path, 2, 5 * MEGABYTE, *words)
    yield run
    run.close()


def bytes_over_full(run: ChainRun) -> list[float]:
    """Of each publication, as the metrics have it."""

    def published() -> list[dict]:
        lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["kind"] == "publish"]

    run.until(lambda: published()[-1]["step"] == run.step, "the newest publication is not in the metrics")
    return [line["bytes_over_full"] for line in published()]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_changes_anchors_a_death_and_a_late_comer(chain):
    """Every relay's slot has what was sent (else `wait` fails); a publication in ANCHOR_EVERY is full; who
    comes late gets the newest weights in full, from the relay before it, and then changes like the others; a
    new link to the master is begun with a full copy."""
    for _ in range(ANCHOR_EVERY + 2):
        chain.publish()
        chain.wait([0, 1], chain.step, START_SECONDS)
    ratios = bytes_over_full(chain)[-ANCHOR_EVERY:]
    assert sorted(ratio < 0.03 for ratio in ratios) == [False] + [True] * (ANCHOR_EVERY - 1), ratios
    assert max(ratios) == 1.0

    chain.start_relay(2)
    chain.wait([2], chain.step, START_SECONDS)
    chain.until_chain([0, 1, 2])
    for _ in range(ANCHOR_EVERY):
        chain.publish()
        chain.wait([0, 1, 2], chain.step, SOON)

    chain.relays[0].kill()
    chain.publish()
    chain.wait([1, 2], chain.step, SOON)
    chain.until_chain([1, 2])
    assert bytes_over_full(chain)[-1] == 1.0
    chain.publish()
    chain.wait([1, 2], chain.step, SOON)
    assert bytes_over_full(chain)[-1] < 0.03
