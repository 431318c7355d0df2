"""A checkpoint of one trainer rank while training goes on: how long training stands still, how many bytes are
written, how fast the rest is, and how long a load takes.

    python bench/checkpoint.py --json checkpoint.json  Qwen2.5-0.5B's shape, bfloat16; 18 GB of free memory
    python bench/checkpoint.py --layers 4              a third of it: fewer layers behind the same embedding

The weights are random, the optimizer is Adam with main parameters in float32, the checkpoint lies in --folder
(default: the folder for temporary files). The buffers of the copies are made before the first save, beside
the training as in a run; at the end a save of another trainer makes its own. The memcpy is of as many bytes
as the state has, between buffers that have been touched, by as many threads as the trainer has, once before
and once after each save: their mean counts.

Figures, medians: `save_stall_over_memcpy`, the time in which training stands still over the memcpy (goal at
most 1.5); `first_stall_over_memcpy`, that of the first save, and `unprepared_stall_over_memcpy`, of one that
makes its buffers; `bytes_over_state`, bytes of all files over those of weights, main parameters and moments
(goal at most 1.05); `pace_beside_save` and `pace_beside_making`, matrix products per second beside the
writing, and beside the making of the buffers, over those without.
"""

import argparse
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import common
import psutil
import shapes
import torch
import torch.distributed as dist

from laminar_hpc.config.check import count_parameters
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.store.checkpoints import checkpoint_path
from laminar_hpc.trainer.checkpoint import Checkpointer
from laminar_hpc.trainer.checkpointing.reports import Saved
from laminar_hpc.trainer.megatron.adam import named_state
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner

ROOM = (2.0, 32.0)  # GB, and bytes per parameter: weights, gradients, optimizer and copies
CHUNK = 1 << 28  # bytes that the memcpy copies at once
PRODUCT = 768  # rows of the matrices
IDLE_SECONDS = 3.0
MAKING = "checkpoint buffers"  # the thread
COLUMNS = ("save", "stall s", "memcpy s", "stall over memcpy", "until named s", "pace beside")


def main() -> None:
    options = common.options_of(__doc__ or "")
    options.add_argument("--layers", type=int, help="default: the shape's 24")
    options.add_argument("--repeats", type=int, default=5, help="saves after the first (default 5)")
    options.add_argument("--folder", type=Path, help="on the disk that is written to")
    options = options.parse_args()
    shape = shapes.shape("0.5b", options.layers)
    needed = ROOM[0] + ROOM[1] * count_parameters(shape) / 1e9
    if (free := psutil.virtual_memory().available / 1e9) < needed:
        raise SystemExit(f"this needs {needed:.0f} GB of free memory, {free:.0f} are; lower --layers")
    with tempfile.TemporaryDirectory(prefix="laminar-checkpoint-", dir=options.folder) as folder:
        measure(options, shapes.make_model(Path(folder) / "model", shape), Path(folder))


def measure(options: argparse.Namespace, model: Path, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config, saved = RunConfig(), list[Saved]()
    config.model.path, config.model.dtype, config.checkpoint.keep = str(model), "bfloat16", 1
    policy = MegatronPolicy(config)
    learner = Learner(config, policy)
    checkpointer = Checkpointer(folder, policy, learner, saved=saved.append)
    weights = sum(p.nbytes for p in policy.gpt.parameters())
    state = weights + sum(tensor.nbytes for _, tensor in named_state(policy.optimizer))
    save = Save(saved, memcpy(state), products())
    alone = save.idle_pace()
    begun = time.perf_counter()
    checkpointer.prepare()
    planned = time.perf_counter() - begun
    making = save.pace(lambda: any(thread.name == MAKING for thread in threading.enumerate()))
    made = time.perf_counter() - begun
    rows = [save.row(step, checkpointer) for step in range(1 + options.repeats)]
    path = checkpoint_path(folder, options.repeats)
    written = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    begun = time.perf_counter()
    assert checkpointer.restore().step == options.repeats
    restored = time.perf_counter()
    checkpointer.load(options.repeats)
    loaded = time.perf_counter()
    checkpointer.close()
    del checkpointer  # and its buffers
    checkpointer = Checkpointer(folder, policy, learner, saved=saved.append)
    rows.append(save.row(options.repeats + 1, checkpointer))
    figures = {
        "save_stall_over_memcpy": common.median([row["stall over memcpy"] for row in rows[1:-1]]),
        "first_stall_over_memcpy": rows[0]["stall over memcpy"],
        "unprepared_stall_over_memcpy": rows[-1]["stall over memcpy"],
        "bytes_over_state": written / state,
        "pace_beside_save": common.median([row["pace beside"] for row in rows[1:-1]]),
        "pace_beside_making": making / alone,
        "state_gb": state / 1e9,
        "stall_seconds": common.median([row["stall s"] for row in rows[1:-1]]),
        "until_named_seconds": common.median([row["until named s"] for row in rows[1:-1]]),
        "prepare_seconds": planned,
        "making_seconds": made,
        "restore_seconds": restored - begun,
        "load_seconds": loaded - restored,
    }
    checkpointer.close()
    shutil.rmtree(folder / "checkpoints")
    common.finish(options, figures, rows, COLUMNS)


class Save(NamedTuple):
    """What saves, copies and multiplies: see `row`. `saved` gets each checkpoint that has its name."""

    saved: list[Saved]
    copy: Callable[[], float]
    pace: Callable[[Callable[[], bool]], float]

    def row(self, step: int, checkpointer: Checkpointer) -> dict[str, float]:
        """Of one save, with a memcpy before and one after it."""
        count, before = len(self.saved), self.copy()
        begun = time.perf_counter()
        checkpointer.begin(step)
        stalled = time.perf_counter() - begun
        beside = self.pace(lambda: len(self.saved) == count)
        checkpointer.finish()
        copied = (before + self.copy()) / 2
        return {
            "save": step,
            "stall s": stalled,
            "memcpy s": copied,
            "stall over memcpy": stalled / copied,
            "until named s": self.saved[-1].seconds,
            "pace beside": beside / self.idle_pace(),
        }

    def idle_pace(self) -> float:
        end = time.perf_counter() + IDLE_SECONDS
        return self.pace(lambda: time.perf_counter() < end)


def memcpy(nbytes: int) -> Callable[[], float]:
    """Copies so many bytes, and gives the seconds."""
    source, target = torch.ones(CHUNK, dtype=torch.uint8), torch.zeros(CHUNK, dtype=torch.uint8)

    def copy() -> float:
        begun = time.perf_counter()
        for begin in range(0, nbytes, CHUNK):
            target[: nbytes - begin].copy_(source[: nbytes - begin])
        return time.perf_counter() - begun

    copy()
    return copy


def products() -> Callable[[Callable[[], bool]], float]:
    """What multiplies matrices as long as it is told to: products per second."""
    left, right = torch.randn(PRODUCT, PRODUCT), torch.randn(PRODUCT, PRODUCT)

    def pace(goes_on: Callable[[], bool]) -> float:
        begun, count = time.perf_counter(), 0
        while goes_on():
            torch.mm(left, right)
            count += 1
        return count / (time.perf_counter() - begun)

    return pace


if __name__ == "__main__":
    main()
