"""The trainer alone, on one device: tokens per second, the share of the device's peak that the model's
arithmetic takes (MFU), and the peak of memory against the estimate that refuses runs.

    export PYTHONPATH=bench
    python bench/gpu_check/trainer_alone.py --shape 0.5b             random trajectories, 8,192 tokens a pack
    python bench/gpu_check/trainer_alone.py --shape 7b --layers 8    a 7B's layers, as many as fit
    python bench/gpu_check/trainer_alone.py --replay RUN_DIR         the batches that a run has trained on

Run by bench/gpu_check. A step is all of trainer/step/learner.py: advantages, packing, forward, backward,
AdamW. The first is not counted.

Arithmetic per step: 6 x parameters x tokens, the head's only for trained tokens, and 6 x layers x width x
length^2 of causal attention for each sequence; nothing that is computed twice counts twice. `mfu` is over the
device's dense bfloat16 peak, null where that is not known.
"""

import time
from pathlib import Path

import common
import shapes

import trainer
from laminar_hpc.report import rundata

TOKENS = 8192  # of a pack, and of a step so many packs:
PACKS = 4
SAMPLES = 4  # sequences of a pack, which are a group
PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12}
COLUMNS = ("step", "tokens", "seconds", "tokens/s", "TFLOP/s")


def arithmetic(model: dict, lengths: list[tuple[int, int]]) -> float:
    """Floating-point operations of a step over sequences of (all, trained) tokens."""
    from laminar_hpc.config.models import count_parameters

    hidden, head = model["hidden_size"], model["vocab_size"] * model["hidden_size"]
    inner = count_parameters(model) - head * (1 if model.get("tie_word_embeddings") else 2)
    attention = 6 * model["num_hidden_layers"] * hidden
    return float(sum(6 * (inner * n + head * of_head) + attention * n * n for n, of_head in lengths))


def peak_of(device: str) -> float | None:
    return next((peak for name, peak in PEAKS.items() if all(word in device for word in name.split())), None)


def random_batch(vocabulary: int, tokens: int, seed: int) -> list:
    """PACKS packs of SAMPLES sequences, which fill `tokens`: short prompts, long responses."""
    trainer.PROMPTS, trainer.SAMPLES = PACKS, SAMPLES
    each = tokens // SAMPLES
    trainer.MEDIAN_TOKENS = trainer.LONGEST = each - 32
    trainer.P99_TOKENS = each - 31
    return trainer.make_batch(vocabulary, seed)


def replayed(run_dir: Path, steps: int) -> list[list]:
    """The batches of the first steps of a finished run."""
    from laminar_hpc.store.payload.whole import wholes
    from laminar_hpc.store.store import Store

    if not (run_dir / "store.sqlite").is_file():
        raise SystemExit(
            f"{run_dir} has no store to replay: the live run before this stage must have finished"
        )
    store = Store(run_dir)
    batches = [
        wholes(store.run_dir, store.rows.batch(store.rows.consumed_groups(step))) for step in range(steps)
    ]
    return [batch for batch in batches if batch]


def samples_per_prompt(replay: Path | None) -> int:
    if replay is None or not (replay / "metrics.jsonl").is_file():
        return SAMPLES
    return rundata.load(replay).config["algorithm"]["samples_per_prompt"]


def settings(options, folder: Path, on_gpu: bool) -> list[str]:
    path = shapes.make_model(
        folder / f"{options.shape}-{options.layers or 'all'}", shapes.shape(options.shape, options.layers)
    )
    return [
        "experiment=demo",
        f"model.path={path}",
        f"model.dtype={'bfloat16' if on_gpu else 'float32'}",
        f"trainer.tokens_per_microbatch={options.tokens}",
        f"sampling.max_response_tokens={options.tokens - 64}",
        "algorithm.minibatches_per_step=1",
        f"algorithm.samples_per_prompt={samples_per_prompt(options.replay)}",
        "optimizer.lr=1e-6",
        "guard.enabled=false",  # the log-probs of made-up batches are no engine's
        *options.overrides,
    ]


def main() -> None:
    options = common.parser(__doc__ or "")
    options.set_defaults(steps=4)
    options.add_argument("--shape", choices=("tiny", "0.5b", "7b"), default="0.5b", help="default 0.5b")
    options.add_argument("--layers", type=int, help="fewer layers of that shape (default: all)")
    options.add_argument("--tokens", type=int, default=TOKENS, help=f"of a pack (default {TOKENS})")
    options.add_argument("--replay", type=Path, help="a finished run whose batches are trained on")
    options = options.parse_args()
    with common.run_folder(options) as folder:
        figures, rows = measure(options, folder)
    common.finish(options, figures, rows, COLUMNS)


def measure(options, folder: Path) -> tuple[dict, list[dict]]:
    import torch
    import torch.distributed as dist

    import laminar_hpc.trainer  # noqa: F401 (before torch compiles anything)
    from laminar_hpc.config.load import load_config
    from laminar_hpc.config.models import trainer_bytes
    from laminar_hpc.trainer.megatron.policy import MegatronPolicy
    from laminar_hpc.trainer.step.batch import in_memory
    from laminar_hpc.trainer.step.learner import Learner

    on_gpu = torch.cuda.is_available()
    config = load_config(settings(options, folder, on_gpu))
    dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    policy = MegatronPolicy(config)
    learner, model = Learner(config, policy), shapes.shape(options.shape, options.layers)
    batches = (
        replayed(options.replay, options.steps)
        if options.replay
        else [random_batch(policy.shape.vocab, options.tokens, seed) for seed in range(options.steps)]
    )
    rows = []
    for step, batch in enumerate(batches):
        started = time.perf_counter()
        learner.train(in_memory(batch), step, lambda: None)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        sizes = [(len(t.prompt) + t.record.length, t.record.length) for t in batch]
        total = sum(size for size, _ in sizes)
        rows.append(
            {
                "step": step,
                "tokens": total,
                "seconds": seconds,
                "tokens/s": total / seconds,
                "TFLOP/s": arithmetic(model, sizes) / seconds / 1e12,
            }
        )
    counted = rows[1:] or rows
    figures = {
        "tokens_per_second": common.median([row["tokens/s"] for row in counted]),
        "tflops": common.median([row["TFLOP/s"] for row in counted]),
        "mfu": None,
        "peak_over_estimate": None,
    }
    if on_gpu:
        peak = peak_of(torch.cuda.get_device_name())
        figures["mfu"] = figures["tflops"] * 1e12 / peak if peak else None
        estimate = trainer_bytes(model, policy.dtype.itemsize, config.trainer)
        figures["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        figures["peak_over_estimate"] = torch.cuda.max_memory_allocated() / estimate
    return figures, rows


if __name__ == "__main__":
    main()
