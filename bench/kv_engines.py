"""Moving a running request between two real engines, against prefilling its tokens anew on the destination.

    python bench/kv_engines.py --json kv_engines.json       prompts of 512 to 4,096 tokens, 3 repeats each
    python bench/kv_engines.py --lengths 1024,4096
    python bench/kv_engines.py --model 7b --lengths 1024,8192     all of Qwen2.5-7B's weights, at random,
                                                                  twice on one GPU of 80 GB or more
    python bench/kv_engines.py --tensor-parallel 1,2        engines of one process, then of two

The model has the KV cache of Qwen2.5-7B (28 layers, 4 heads of 128, bf16) but a hundredth of its weights, so
that two cores can serve it: a real 7B's prefill takes far longer, its move as long. A move is all from the
reservation to the first token that the destination draws; a re-prefill is the same tokens under another
namespace, to the first token. Every continuation is checked to have the moved prefix.

Figures: `reprefill_over_move_4k`, the ratio at the longest prompt; `break_even_tokens`, the length from which
a move is the faster one (between two lengths by a straight line, 0 where it always is, null where it never
is); `stalled_ms`, the longest that a scheduler stood still for a move. They are of the first tensor-parallel
size; those of another one have its name behind theirs, as in `stalled_ms_tp2`.
"""

import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import common
import torch

import laminar_hpc.machine.compat.torchvision  # noqa: F401  (before transformers)
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.interface import sampling_parameters
from laminar_hpc.engine.sglang.server import SglangServer

COLUMNS = ("TP", "tokens", "repeat", "move ms", "prefill ms", "prefill / move", "stalled ms")
START_SECONDS = 600.0


def make_model(folder: Path, model: str) -> None:
    """A random Qwen2 in bf16."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    sizes = {
        "narrow": {
            "vocab_size": 512,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_attention_heads": 4,
        },
        "7b": {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
        },
    }
    config = Qwen2Config(
        **sizes[model],
        num_hidden_layers=28,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=32768,
        eos_token_id=2,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        made = Qwen2ForCausalLM._from_config(config)
    made.to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a"))).save_pretrained(
        folder
    )


async def move(
    engines: Sequence[SglangServer], prompt: list[int], name: str, greedy: dict
) -> tuple[float, list[int]]:
    """Seconds from the reservation to the first token on the other engine, and the tokens that it had
    then."""
    source, destination = engines
    call = asyncio.create_task(source.generate(prompt, greedy, name, "0"))
    while (await source.utilization()).kv_tokens < len(prompt):
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)  # it is decoding by now
    begin = time.perf_counter()
    address = await destination.kv_reserve(name, 0, len(prompt) + greedy["max_new_tokens"])
    await source.kv_send(name, name, address)
    sent = await source.kv_detach(name, name)
    tokens = prompt + (await call).tokens.tolist()
    await destination.kv_import(name, tokens)
    after = await destination.generate(tokens, {**greedy, "max_new_tokens": 1}, name, "0")
    taken = time.perf_counter() - begin
    if after.cached_tokens != sent:
        raise SystemExit(f"{after.cached_tokens} tokens were cached where {sent} had been moved")
    await asyncio.gather(source.kv_commit(name), destination.kv_commit(name))
    return taken, tokens


async def measure(
    engines: Sequence[SglangServer], lengths: list[int], repeats: int, config: RunConfig
) -> list[dict]:
    greedy = {**sampling_parameters(config.sampling, 0.0, 400, []), "ignore_eos": True}
    ranks = config.rollout.tensor_parallel
    rows: list[dict] = []
    for repeat in range(-1, repeats):  # the first is not counted
        for length in lengths:
            draw = random.Random(f"{length}/{repeat}")
            prompt, name = [draw.randrange(512) for _ in range(length)], f"{length}-{repeat}"
            stalled = [engine.kv_stalled_seconds for engine in engines]
            moved, tokens = await move(engines, prompt, name, greedy)
            begin = time.perf_counter()
            await engines[1].generate(
                tokens, {**greedy, "max_new_tokens": 1}, f"again-{name}", f"anew-{name}"
            )
            prefill = time.perf_counter() - begin
            still = max(
                engine.kv_stalled_seconds - before for engine, before in zip(engines, stalled, strict=True)
            )
            rows.append(
                dict(
                    zip(
                        COLUMNS,
                        (ranks, length, repeat, 1e3 * moved, 1e3 * prefill, prefill / moved, 1e3 * still),
                        strict=True,
                    )
                )
            )
            for engine in engines:
                await engine.flush()
    return [row for row in rows if row["repeat"] >= 0]


def break_even(ratios: dict[int, float]) -> float | None:
    """Where the ratio of prefill to move, by length, passes 1."""
    points = sorted(ratios.items())
    if points[0][1] >= 1:
        return 0.0
    for (a, low), (b, high) in itertools.pairwise(points):
        if high >= 1:
            return a + (b - a) * (1 - low) / (high - low)
    return None


def figures_of(rows: list[dict], lengths: list[int]) -> dict[str, float | None]:
    """Of the rows of one tensor-parallel size."""
    ratios = {
        n: common.median([row["prefill / move"] for row in rows if row["tokens"] == n]) for n in lengths
    }
    return {
        "reprefill_over_move_4k": ratios[max(lengths)],
        "break_even_tokens": break_even(ratios),
        "stalled_ms": max(row["stalled ms"] for row in rows),
    }


async def run(folder: Path, ranks: int, lengths: list[int], repeats: int) -> list[dict]:
    config = RunConfig()
    config.rollout.tensor_parallel = ranks
    config.model.path, config.model.dtype = str(folder / "model"), "bfloat16"
    config.rollout.kv_cache_tokens, config.rollout.engine_start_seconds = (
        4 * max(lengths) + 2048,
        START_SECONDS,
    )
    engines = [SglangServer(config, index, folder) for index in range(2)]
    try:
        await asyncio.gather(*(engine.start(folder / "model", 0, seed=1) for engine in engines))
        return await measure(engines, lengths, repeats, config)
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


def main() -> None:
    options = common.parser(__doc__ or "")
    options.add_argument(
        "--lengths", type=lambda text: [int(n) for n in text.split(",")], default=[512, 1024, 2048, 4096]
    )
    options.add_argument(
        "--tensor-parallel",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[1],
        help="default 1",
    )
    options.add_argument("--model", choices=("narrow", "7b"), default="narrow", help="default narrow")
    options = options.parse_args()
    rows: list[dict] = []
    figures: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        make_model(Path(folder) / "model", options.model)
        for ranks in options.tensor_parallel:
            found = asyncio.run(run(Path(folder), ranks, options.lengths, options.repeats))
            name = f"_tp{ranks}" if rows else ""
            figures |= {f"{key}{name}": value for key, value in figures_of(found, options.lengths).items()}
            rows += found
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
