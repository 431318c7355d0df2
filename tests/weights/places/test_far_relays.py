"""Relays at other places: the real controller, the real publisher, real relays, each a process of its own."""

import functools
import json
import sys
import threading
import time

import pytest

from helpers.paths import BENCH

sys.path.insert(0, str(BENCH))
import wide_area
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


@pytest.mark.slow
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
    chain.until(
        lambda: all(len(received(chain, index)) >= 4 for index in (1, 2)), "the metrics lack a publication"
    )
    pulled = [
        [line["wire_bytes"] / line["bytes"] for line in received(chain, index) if "wire_bytes" in line]
        for index in (1, 2)
    ]
    assert sorted(map(len, pulled)) == [0, 4], pulled
    shares = max(pulled, key=len)
    assert 1.0 <= shares[0] < 1.01
    assert max(shares[1:]) < 0.05, shares


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(wide_area.missing()), reason=wide_area.missing())
@pytest.mark.parametrize("control", ["cubic", "reno"])
def test_over_50_mbit_80_ms_and_1_percent_loss(control, tmp_path):
    """Two network namespaces: a first copy comes through, though the line is cut for 5 s in its middle;
    publications go out meanwhile as fast as ever; later ones come as changes, within seconds."""
    size = 40 * MEGABYTE
    with wide_area.WideArea(50, 80, 0.01, control) as line:
        where = functools.partial(namespace, line)
        run = ChainRun(tmp_path, 1, size, "relay.delta=auto", host=line.address(0), namespace=where)
        try:
            run.publish()
            run.wait([0], run.step, START_SECONDS)
            run.start_far_relay(1, "elsewhere")
            run.until(lambda: "pulls for place elsewhere" in run.said(), "nobody pulls", START_SECONDS)
            time.sleep(3)
            line.cut(1)
            mended = threading.Timer(5, line.mend, [1])
            mended.start()
            stalls = []
            for _ in range(4):
                run.publish()
                stalls.append(run.stall)
            mended.join()
            run.wait([1], 1, 120)
            run.wait([1], run.step, 60)
            began = time.monotonic()
            run.publish()
            run.wait([1], run.step, 60)
            took = time.monotonic() - began
        finally:
            run.close()
    shares = [each["wire_bytes"] / each["bytes"] for each in received(run, 1)]
    assert 1.0 <= shares[0] < 1.01
    assert len(shares) < run.step, "it has skipped none while the line was cut"
    assert max(shares[1:]) < 0.1, shares
    assert max(stalls) < 10.0, stalls
    assert took < 30.0


def namespace(line, who):
    """Of the run's processes; relay 1 is at the other place."""
    return line.namespace(1 if who == 1 else 0)
