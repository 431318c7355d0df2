"""A checkpoint of one trainer rank while training goes on: how long training stands still, how many bytes are
written, how fast the rest is, and how long a load takes.

    python bench/checkpoint.py --json checkpoint.json  Qwen2.5-0.5B's shape, bfloat16; 18 GB of free memory
    python bench/checkpoint.py --layers 4              a third of it: fewer layers behind the same embedding

The weights are random, the optimizer is Adam with main parameters in float32, the checkpoint lies in --folder
(default: the folder for temporary files). The first save also makes the buffers that the others use again; it
is a row of the table and of no figure. The memcpy is of as many bytes as the state has, between buffers that
have been touched, by as many threads as the trainer has.

Figures, medians: `save_stall_over_memcpy`, the time in which training stands still over the memcpy (goal at
most 1.5); `bytes_over_state`, bytes of all files over those of weights, main parameters and moments (goal at
most 1.05); `pace_beside_save`, matrix products per second beside the writing over those without.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common
import psutil
import shapes
import torch
import torch.distributed as dist

from laminar_hpc.cluster.checkpoints import checkpoint_path
from laminar_hpc.config.check import count_parameters
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.trainer.checkpoint import Checkpointer
from laminar_hpc.trainer.checkpointing.reports import Saved
from laminar_hpc.trainer.megatron.adam import named_state
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner

ROOM = (2.0, 32.0)  # GB, and bytes per parameter: weights, gradients, optimizer and copies
CHUNK = 1 << 28  # bytes that the memcpy copies at once
PRODUCT = 768  # rows of the matrices
IDLE_SECONDS = 3.0
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


def measure(options: object, model: Path, folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config, saved = RunConfig(), list[Saved]()
    config.model.path, config.model.dtype, config.checkpoint.keep = str(model), "bfloat16", 1
    policy = MegatronPolicy(config)
    checkpointer = Checkpointer(folder, policy, Learner(config, policy), saved=saved.append)
    weights = sum(p.nbytes for p in policy.gpt.parameters())
    state = weights + sum(tensor.nbytes for _, tensor in named_state(policy.optimizer))
    copy, pace, rows = memcpy(state), products(), []
    for step in range(1 + options.repeats):
        begun = time.perf_counter()
        checkpointer.begin(step)
        stalled = time.perf_counter() - begun
        beside = pace(lambda step=step: len(saved) <= step)
        checkpointer.finish()
        begun = time.perf_counter()
        copy()
        copied = time.perf_counter() - begun
        end = time.perf_counter() + IDLE_SECONDS
        rows.append(
            {
                "save": step,
                "stall s": stalled,
                "memcpy s": copied,
                "stall over memcpy": stalled / copied,
                "until named s": saved[step].seconds,
                "pace beside": beside / pace(lambda end=end: time.perf_counter() < end),
            }
        )
    path = checkpoint_path(folder, options.repeats)
    written = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    begun = time.perf_counter()
    assert checkpointer.restore().step == options.repeats
    load = time.perf_counter() - begun
    begun = time.perf_counter()
    checkpointer.load(options.repeats)
    figures = {
        "save_stall_over_memcpy": common.median([row["stall over memcpy"] for row in rows[1:]]),
        "bytes_over_state": written / state,
        "pace_beside_save": common.median([row["pace beside"] for row in rows[1:]]),
        "state_gb": state / 1e9,
        "stall_seconds": common.median([row["stall s"] for row in rows[1:]]),
        "until_named_seconds": common.median([row["until named s"] for row in rows[1:]]),
        "restore_seconds": load,
        "load_seconds": time.perf_counter() - begun,
    }
    checkpointer.close()
    shutil.rmtree(folder / "checkpoints")
    common.finish(options, figures, rows, COLUMNS)


def memcpy(nbytes: int) -> Callable[[], None]:
    """Copies so many bytes."""
    source, target = torch.ones(CHUNK, dtype=torch.uint8), torch.zeros(CHUNK, dtype=torch.uint8)

    def copy() -> None:
        for begin in range(0, nbytes, CHUNK):
            target[: nbytes - begin].copy_(source[: nbytes - begin])

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
