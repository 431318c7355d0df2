"""Moves through shared memory between threads and between processes; a side that dies, lies or leaves is
noticed."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.links.pools import make, same, slots_of
from helpers.paths import TESTS
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.kv.frames import PartHeader
from laminar_hpc.engine.kv.shm import ShmOffer, Taken

SHAPE = {"layers": 8, "heads": 4, "head_dim": 64, "pages": 300}


def offer(tmp_path, pool, tokens=256, slots=3, seconds=20.0):
    return ShmOffer(PartHeader.of("m", 1, pool.shape, list(range(tokens)), 8192), tmp_path, slots, seconds)


@pytest.mark.parametrize(
    ("send_threads", "receive_threads", "slots"), [(1, 1, 1), (2, 2, 3), (4, 1, 8), (1, 3, 2)]
)
def test_a_move_is_exact(tmp_path, send_threads, receive_threads, slots):
    """Promise: any number of threads on either side and any ring: the same bits; the file has mode 0600 and
    is gone once taken."""
    source, target = make(**SHAPE, seed=1), make(**SHAPE, seed=2)
    ours, theirs = slots_of(256, pages=300, seed=3), slots_of(256, pages=300, seed=4)
    with offer(tmp_path, source, slots=slots) as offered, ThreadPoolExecutor(1) as pool:
        assert offered.path.stat().st_mode & 0o777 == 0o600
        with Taken(offered.path, 20.0) as taken:
            assert taken.header == offered.header and not offered.path.exists()
            sent = pool.submit(offered.send, source, ours, send_threads)
            taken.receive(target, theirs, receive_threads)
            taken.accept()
            sent.result(20)
    assert same(source, ours, target, theirs)


def test_a_destination_that_refuses(tmp_path):
    """Promise: the source hears at once that nothing is kept, although all chunks have arrived."""
    source, target, slots = make(**SHAPE), make(**SHAPE), slots_of(256, pages=300)
    with (
        offer(tmp_path, source) as offered,
        ThreadPoolExecutor(1) as pool,
        Taken(offered.path, 20.0) as taken,
    ):
        sent = pool.submit(offered.send, source, slots)
        taken.receive(target, slots)
        taken.refuse()
        with pytest.raises(KvRefused, match="destination gave the move up before it accepted"):
            sent.result(20)


def test_nobody_comes_and_nobody_sends(tmp_path):
    """Promise: each wait is bounded, and its line says on whom it waited, for how long."""
    pool, slots = make(**SHAPE), slots_of(256, pages=300)
    with offer(tmp_path, pool, seconds=0.1) as offered:
        with pytest.raises(
            KvRefused, match=r"destination said nothing for 0\.1 s before it opened the offer"
        ):
            offered.send(pool, slots)
        with (
            Taken(offered.path, 0.1) as taken,
            pytest.raises(KvRefused, match=r"source said nothing for 0\.1 s at chunk 0"),
        ):
            taken.receive(pool, slots)


def test_a_source_that_leaves(tmp_path):
    """Promise: a source that closes its side ends the destination's wait at once."""
    pool, slots = make(**SHAPE), slots_of(256, pages=300)
    offered = offer(tmp_path, pool)
    with Taken(offered.path, 20.0) as taken:
        threading.Timer(0.2, offered.close).start()
        start = time.monotonic()
        with pytest.raises(KvRefused, match=r"the source (gave the move up|died) at chunk 0"):
            taken.receive(pool, slots)
        assert time.monotonic() - start < 5


CHILD = """
import sys, time
sys.path.insert(0, {folder!r})
from helpers.links.pools import make, slots_of
from laminar_hpc.engine.kv.shm import Taken, ShmOffer
from laminar_hpc.engine.kv.frames import PartHeader
pool, slots = make(layers=8, heads=4, head_dim=64, pages=300, seed=1), slots_of(256, pages=300)
if sys.argv[1] == "source":
    side = ShmOffer(PartHeader.of("m", 1, pool.shape, list(range(256)), 8192), sys.argv[2], 3, 60.0)
    print(side.path, flush=True)
else:
    side = Taken(sys.argv[2], 60.0)
    print("taken", flush=True)
time.sleep(120)
"""


def child(side, where):
    program = CHILD.format(folder=str(TESTS))
    return subprocess.Popen(
        [sys.executable, "-c", program, side, str(where)], stdout=subprocess.PIPE, text=True, env=os.environ
    )


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_killed_peer_is_noticed(tmp_path, side):
    """Promise: a peer killed in mid-move is named as dead long before the time limit, reaped by its parent or
    not."""
    pool, slots = make(**SHAPE), slots_of(256, pages=300)
    offered = None if side == "source" else offer(tmp_path, pool, seconds=60.0)
    process = child(side, offered.path if offered else tmp_path)
    try:
        said = process.stdout.readline().strip()
        mine = offered or Taken(said, 60.0)
        threading.Timer(0.3, process.send_signal, (signal.SIGKILL,)).start()
        start = time.monotonic()
        with mine, pytest.raises(KvRefused, match=f"the {side} died at chunk"):
            (mine.send if offered else mine.receive)(pool, slots)
        assert time.monotonic() - start < 10
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()


def test_what_a_killed_source_left_goes_with_the_next_offer(tmp_path):
    """Promise: an offer that nobody took goes, a minute old, when the next is made; those of the living
    stay."""
    process = child("source", tmp_path)
    left = Path(process.stdout.readline().strip())
    process.kill()
    process.wait(10)
    process.stdout.close()
    with offer(tmp_path, make(**SHAPE)) as living:
        assert left.exists()
        for path in (left, living.path):
            os.utime(path, (0, 0))
        with offer(tmp_path, make(**SHAPE)):
            assert living.path.exists() and not left.exists()


def test_files_that_are_no_offers_are_refused(tmp_path):
    """Promise: a missing, foreign, short, cut or second-hand file is refused in one line, and so is a full
    file system."""
    pool = make(**SHAPE)
    with offer(tmp_path, pool) as offered:
        data = offered.path.read_bytes()
    cases = {"short": data[:100], "cut": data[:9000], "noise": os.urandom(9000), "empty": b"", "orphan": data}
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(0o600)
    (tmp_path / "open").write_bytes(data)
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "link").symlink_to(tmp_path / "orphan")
    for name in (*cases, "open", "link", "absent"):
        with pytest.raises(KvRefused, match="refused"):
            Taken(tmp_path / name)
    with offer(tmp_path, pool) as offered, Taken(offered.path), pytest.raises(KvRefused, match="refused"):
        Taken(f"/proc/self/fd/{offered._fd}")
