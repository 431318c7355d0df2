"""Relays at other places: the real controller, the real publisher, real relays, each a process of its own."""

import json
import sys

import pytest

from helpers.paths import BENCH

sys.path.insert(0, str(BENCH))
from chain_roles import START_SECONDS, ChainRun

MEGABYTE = 1 << 20
SOON = 40.0


@pytest.fixture
def chain(tmp_path):
    run = ChainRun(tmp_path, 1, 5 * MEGABYTE, "relay.delta=auto")
    yield run
    run.close()


def received(run: ChainRun, index: int) -> list[dict]:
    """Of each publication that this relay has told of, as the metrics have it."""
    lines = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "relay" and line["index"] == index]


@pytest.mark.timeout(300)
def test_one_copy_for_a_place_and_from_there_on_from_relay_to_relay(chain):
    """Two relays of a place without a folder in common with the run: both hold what was sent (else `wait`
    fails); one of them alone pulls it, first in full, then as changes."""
    chain.publish()
    chain.wait([0], chain.step, START_SECONDS)
    chain.start_far_relay(1, "elsewhere")
    chain.start_far_relay(2, "elsewhere")
    chain.wait([1, 2], chain.step, START_SECONDS)
    for _ in range(3):
        chain.publish()
        chain.wait([1, 2], chain.step, SOON)
    chain.until(lambda: len(received(chain, 2)) >= 4, "the metrics lack a publication")
    pulled = [
        [line["wire_bytes"] / line["bytes"] for line in received(chain, index) if "wire_bytes" in line]
        for index in (1, 2)
    ]
    assert sorted(map(len, pulled)) == [0, 4], pulled
    shares = max(pulled, key=len)
    assert 1.0 <= shares[0] < 1.01
    assert max(shares[1:]) < 0.05, shares
