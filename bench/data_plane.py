"""What a batch costs between the last token and the optimizer: bytes per token on wire and disk, seconds from
the choice of a batch to the last micro-batch in the trainers' memory, the longest time for which a process
stands still meanwhile, and the ranks' memory over their share.

A rollout's writer puts the responses into payload files, the controller's store gives out the plan, and
--ranks trainer processes (gloo, data parallel) read what they train and make all their micro-batches, one
after the other, as a step does. No engine and no model take part: responses are made up, and nothing is
computed on a micro-batch. The files were just written, so they are read from the page cache.

    python bench/data_plane.py [--trajectories 8192] [--tokens 16384] [--json PATH]

Goals: `bytes_per_token` at most 9, `batch_seconds_per_134M` 20, `longest_block_seconds` 0.5,
`rank_memory_over_share` 1.2.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import common
import numpy as np

SAMPLES, PROMPT, BUDGET = 16, 512, 32_768 + 1_024
MILLION_TOKENS = 134.217728  # that the goal of batch_seconds is for
COLUMNS = ("rank", "tokens", "reading_seconds", "seconds", "longest_block_seconds", "memory_over_share")
_LOOK_SECONDS = 0.005


class Watch:
    """The longest time for which a thread that looks every 5 ms could not, and the most memory that it
    saw."""

    def __init__(self) -> None:
        self.longest, self.most = 0.0, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self.first = self.most = resident_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(_LOOK_SECONDS):
            now = time.monotonic()
            self.longest, last = max(self.longest, now - last - _LOOK_SECONDS), now
            self.most = max(self.most, resident_bytes())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- rollout and controller --------------------------------------------------------------------------------


def generate(run_dir: Path, trajectories: int, tokens: int) -> dict[str, float]:
    """Responses in payload files and rows in the store, as rollout and controller leave them."""
    from laminar_hpc.line.messages.data import Sample, ScorePart
    from laminar_hpc.line.messages.rollouts import Generated
    from laminar_hpc.line.messages.wire import encode
    from laminar_hpc.store.payload.layout import pack, packed_digest
    from laminar_hpc.store.payload.writer import FOLDER, PayloadWriter
    from laminar_hpc.store.store import Store

    draw, store, wire = np.random.default_rng(0), Store(run_dir), 0
    writer, seconds = PayloadWriter(run_dir, "rollout0"), 0.0
    for group in range(trajectories // SAMPLES):
        store.rows.add_group(group, group, 0, 0, group + 1, 1.0)
        store.rows.add_prompt(group, draw.integers(0, 150_000, PROMPT).tolist())
        for sample in (Sample(group * SAMPLES + i, 0) for i in range(SAMPLES)):
            drawn = draw.integers(0, 150_000, tokens), draw.standard_normal(tokens)
            made = common.whole(sample.trajectory_id, group, [], *drawn)
            begun = time.perf_counter()
            packed = pack(made.response)
            made.record.place = writer.append(packed).result(60.0)
            seconds += time.perf_counter() - begun
            made.record.digest = packed_digest(packed)
            wire += len(encode(Generated(made.record)))
            ids = range(sample.trajectory_id, sample.trajectory_id + 1)
            store.rows.add_trajectories(ids, group, sample.trajectory_id % SAMPLES, 0, 0, 0)
            store.rows.store_response(made.record)
            store.rows.finish_trajectory(
                sample.trajectory_id, ScorePart(3.0, float(sample.trajectory_id % 2)), 1.0
            )
        store.rows.finish_group(group, 0, group, 2.0)
        store.commit()
    writer.close()
    store.close()
    disk = sum(file.stat().st_size for file in (run_dir / FOLDER).iterdir())
    return {
        "disk_bytes": disk,
        "wire_bytes": wire,
        "store_bytes": store.path.stat().st_size,
        "write_megabytes_per_second": disk / seconds / 1e6,
    }


def choose(run_dir: Path, groups: int) -> tuple[bytes, float, float]:
    """The plan as it goes to the trainers, the seconds that it takes, and the longest block."""
    from laminar_hpc.line.messages.training import Batch
    from laminar_hpc.line.messages.wire import encode
    from laminar_hpc.store.store import Store

    store = Store(run_dir)
    with Watch() as watch:
        begun = time.perf_counter()
        store.rows.consume(range(groups), 0)
        plan = encode(Batch(0, store.rows.batch(range(groups)), SAMPLES, ""))
        store.commit()
        seconds = time.perf_counter() - begun
    store.close()
    return plan, seconds, watch.longest


# ---- a trainer rank ----------------------------------------------------------------------------------------


@contextmanager
def world(rank: int, ranks: int, port: int) -> Iterator[None]:
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    parallel_state.initialize_model_parallel()
    yield
    dist.destroy_process_group()


def train(options: argparse.Namespace) -> dict[str, float]:
    """One rank: from the plan to its last micro-batch."""
    import torch

    from laminar_hpc.line.messages.training import Batch
    from laminar_hpc.line.messages.wire import decode
    from laminar_hpc.store.payload.reader import read
    from laminar_hpc.store.payload.whole import place_of
    from laminar_hpc.trainer.control import all_frames
    from laminar_hpc.trainer.step.batch import plan_of
    from laminar_hpc.trainer.step.microbatch import Example, Text, make_microbatch
    from laminar_hpc.trainer.step.parallel import own_share

    plan = (options.run_dir / "plan").read_bytes()
    torch.set_num_threads(1)
    with world(options.rank, options.ranks, options.port):
        all_frames(b"", 60.0, "the start")
        make_microbatch([], torch.device("cpu"))
        with Watch() as watch:
            begun = time.perf_counter()
            batch = decode(plan)
            assert isinstance(batch, Batch)
            planned = plan_of(batch.groups)
            share = own_share([p.length for p in planned], list(range(len(planned))), BUDGET)
            own = sorted(i for part in share.plan for i in part)
            found = read(options.run_dir, [place_of(planned[i].record) for i in own])
            responses = dict(zip(own, found, strict=True))
            all_frames(b"", 60.0, "the responses")
            reading = time.perf_counter() - begun
            tokens = 0
            for part in share.plan:
                texts = [Text(planned[i].prompt, responses[i]) for i in part]
                advantages = [torch.ones(()).expand(text.response.trained) for text in texts]
                examples = [Example(*pair) for pair in zip(texts, advantages, strict=True)]
                tokens += len(make_microbatch(examples, torch.device("cpu")).tokens.behaviour)
            seconds = time.perf_counter() - begun
        bytes_of_share = sum(planned[i].record.place.size for i in own)
        return {
            "rank": options.rank,
            "tokens": tokens,
            "reading_seconds": reading,
            "seconds": seconds,
            "longest_block_seconds": watch.longest,
            "memory_over_share": (watch.most - watch.first) / bytes_of_share,
        }


def trained(run_dir: Path, ranks: int) -> list[dict[str, float]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = [sys.executable, __file__, "--run-dir", str(run_dir), "--ranks", str(ranks), "--port", str(port)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen([*own, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=400)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(process.returncode for process in processes):
        raise SystemExit("a rank failed")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def figures(run_dir: Path, options: argparse.Namespace) -> tuple[dict[str, float], list[dict[str, float]]]:
    made = generate(run_dir, options.trajectories, options.tokens)
    plan, choosing, block = choose(run_dir, options.trajectories // SAMPLES)
    (run_dir / "plan").write_bytes(plan)
    rows = trained(run_dir, options.ranks)
    tokens = sum(row["tokens"] for row in rows)
    batch = choosing + max(row["seconds"] for row in rows)
    found = {
        "tokens": tokens,
        "bytes_per_token": (made["disk_bytes"] + made["wire_bytes"] + len(plan)) / tokens,
        "disk_bytes_per_token": made["disk_bytes"] / tokens,
        "wire_bytes_per_token": (made["wire_bytes"] + len(plan)) / tokens,
        "store_bytes_per_trajectory": made["store_bytes"] / options.trajectories,
        "write_megabytes_per_second": made["write_megabytes_per_second"],
        "choosing_seconds": choosing,
        "batch_seconds": batch,
        "batch_seconds_per_134M": batch * MILLION_TOKENS * 1e6 / tokens,
        "longest_block_seconds": max(block, *(row["longest_block_seconds"] for row in rows)),
        "rank_memory_over_share": max(row["memory_over_share"] for row in rows),
    }
    return found, rows


def main() -> None:
    options = common.options_of(__doc__ or "")
    options.add_argument("--folder", type=Path, help="where the files are made")
    options.add_argument("--trajectories", type=int, default=8_192, help=f"a multiple of {SAMPLES}")
    options.add_argument("--tokens", type=int, default=16_384, help="of each response (default 16,384)")
    options.add_argument("--ranks", type=int, default=2, help="trainer processes (default 2)")
    for name, kind in (("--run-dir", Path), ("--rank", int), ("--port", int)):  # of a trainer process
        options.add_argument(name, type=kind, help=argparse.SUPPRESS)
    chosen = options.parse_args()
    if chosen.run_dir:
        print(json.dumps(train(chosen)))
        return
    root = Path(tempfile.mkdtemp(prefix="laminar-data-plane-", dir=chosen.folder))
    try:
        found, rows = figures(root, chosen)
    finally:
        shutil.rmtree(root)
    common.finish(chosen, found, rows, COLUMNS)


if __name__ == "__main__":
    main()
