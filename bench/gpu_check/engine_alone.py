"""An engine alone: how long it takes to start, the first time and again, and how many tokens per second it
decodes.

    export PYTHONPATH=bench
    python bench/gpu_check/engine_alone.py --shape 7b --concurrent 1 32 256

Run by bench/gpu_check. The weights are random and made by SGLang itself (load-format=dummy), so that only
the shape counts. Requests are those of bench/engine.py: prompts of 8 to 192 tokens, responses of exactly 128,
all of a wave at once, log-probs returned.

Figures: `first_start_seconds`, `second_start_seconds`; `tokens_per_second_at_N`, response tokens over the
time from the first request to the last reply, prefill included.
"""

import asyncio
import time
from pathlib import Path

import common
import shapes
import torch

import engine
from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.sglang.server import SglangServer

COLUMNS = ("concurrent", "repeat", "tokens/s")
START_SECONDS = 600


async def measure(
    config: RunConfig, folder: Path, concurrent: list[int], repeats: int
) -> tuple[dict, list[dict]]:
    figures, rows, model = dict[str, float | None](), list[dict](), Path(config.model.path)
    for index, name in enumerate(("first_start_seconds", "second_start_seconds")):
        server = SglangServer(config, index, folder)
        try:
            figures[name] = await server.start(model, 0, seed=1)
            if index == 0:
                continue
            for requests in concurrent:
                await engine.generate(server, config, requests, 1.0, f"warm-{requests}")
                for repeat in range(repeats):
                    started = time.monotonic()
                    done = await engine.generate(server, config, requests, 1.0, f"{requests}-{repeat}")
                    rate = sum(len(each.tokens) for each in done) / (time.monotonic() - started)
                    rows.append({"concurrent": requests, "repeat": repeat, "tokens/s": rate})
        finally:
            await server.stop()
    for requests in concurrent:
        rates = [row["tokens/s"] for row in rows if row["concurrent"] == requests]
        figures[f"tokens_per_second_at_{requests}"] = common.median(rates)
    return figures, rows


def main() -> None:
    options = common.parser(__doc__ or "")
    options.set_defaults(repeats=2)
    options.add_argument("--shape", choices=("tiny", "0.5b", "7b"), default="0.5b", help="default 0.5b")
    options.add_argument("--concurrent", type=int, nargs="+", default=[1, 32, 256])
    options = options.parse_args()
    with common.run_folder(options) as folder:
        model = shapes.make_directory(folder / options.shape, shapes.shape(options.shape))
        words = [
            "experiment=demo",
            f"model.path={model}",
            f"model.dtype={'bfloat16' if torch.cuda.is_available() else 'float32'}",
            f"rollout.engine_start_seconds={START_SECONDS}",
            f"rollout.max_concurrent={max(options.concurrent)}",
            f"rollout.kv_cache_tokens={512 * max(options.concurrent)}",
            "rollout.engine_arguments.load-format=dummy",
            *options.overrides,
        ]
        figures, rows = asyncio.run(measure(load_config(words), folder, options.concurrent, options.repeats))
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
