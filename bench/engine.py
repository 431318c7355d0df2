"""Decoding on the CPU: an engine with our plugin's hooks (batched attention and the rest) against SGLang's
stock torch_native backend.

    python bench/engine.py --json engine.json       5 pairs of runs at 32 and at 128 concurrent requests
    python bench/engine.py --repeats 1 rollout.threads=2
    python bench/engine.py --deterministic          what model.deterministic costs: `ours` has it, `stock` not

Both engines stay up; the runs of a pair follow one another directly, and the figures are medians of the
pairs' ratios, so that other work on the machine weighs on both alike. They have the same model, arguments and
platform; the stock one runs without our port and its hooks. Greedy responses are compared first: the tokens
must be equal, the log-probs equal to 1e-3. A run is WAVES batches of sampled responses, all of a batch at
once, behind prompts of 8 to 192 tokens, each of exactly 128 tokens, so that all decode to the end; log-probs
are returned as in training. Tokens per second are response tokens over the time from the first request to the
last reply, prefill included.

`ours_start_seconds` and `stock_start_seconds`: from a process's beginning until it answers, both at once.
Goal: `decode_over_stock_at_32` at least 1.7. At 128, and in tokens per second, it is reported as it is.
"""

import argparse
import asyncio
import copy
import random
import time
from pathlib import Path

import common
import numpy as np

from laminar_hpc.config.load import load_config
from laminar_hpc.config.models import model_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.interface import Generation, sampling_parameters
from laminar_hpc.engine.sglang.plugin import protocol
from laminar_hpc.engine.sglang.process import EngineProcess
from laminar_hpc.engine.sglang.server import SglangServer

WAVES = 3
PROMPT_TOKENS, RESPONSE_TOKENS = (8, 192), 128
CLOSE = 1e-3
COLUMNS = ("concurrent", "repeat", "stock tokens/s", "ours tokens/s", "ratio")


class StockProcess(EngineProcess):
    """Without the port's path in its environment, SGLang's processes load none of our hooks."""

    def environment(self) -> dict[str, str]:
        return {
            name: value for name, value in super().environment().items() if name != protocol.SOCKET_VARIABLE
        }


class StockServer(SglangServer):
    Process = StockProcess

    async def ping(self, seconds: float = 0.0) -> None:
        """There is no port."""


async def generate(
    server: SglangServer, config: RunConfig, concurrent: int, temperature: float, name: str
) -> list[Generation]:
    """One batch; the same prompts for the same name, which also keeps prefix caches apart."""
    draw, vocabulary = random.Random(name), model_config(Path(config.model.path))["vocab_size"]
    prompts = [
        [draw.randrange(vocabulary) for _ in range(draw.randint(*PROMPT_TOKENS))] for _ in range(concurrent)
    ]
    sampling = sampling_parameters(config.sampling, temperature, RESPONSE_TOKENS, []) | {"ignore_eos": True}
    return await asyncio.gather(
        *(server.generate(prompt, sampling, f"{name}-{i}", name) for i, prompt in enumerate(prompts))
    )


async def tokens_per_second(server: SglangServer, config: RunConfig, concurrent: int, name: str) -> float:
    started = time.monotonic()
    done = [await generate(server, config, concurrent, 1.0, f"{name}-{wave}") for wave in range(WAVES)]
    return sum(len(generation.tokens) for batch in done for generation in batch) / (
        time.monotonic() - started
    )


async def compare(stock: SglangServer, ours: SglangServer, config: RunConfig) -> None:
    """Raises SystemExit unless both give the same greedy responses."""
    pairs = zip(*[await generate(server, config, 32, 0.0, "greedy") for server in (stock, ours)], strict=True)
    for number, (a, b) in enumerate(pairs):
        gap = max(abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True))
        same = np.array_equal(a.tokens, b.tokens)
        if not same or gap > CLOSE:
            raise SystemExit(
                f"response {number}: the engines differ (log-probs by up to {gap:.2g}; tokens equal: {same})"
            )


async def measure(options: argparse.Namespace, folder: Path, starts: dict[str, float]) -> list[dict]:
    """`starts` gets the seconds until each engine answered; both start at once."""
    config = load_config(
        [f"experiment={options.experiment}", "rollout.engine_start_seconds=600", *options.overrides]
    )
    model = Path(config.model.path)
    changed = copy.deepcopy(config)
    changed.model.deterministic = options.deterministic
    usual = SglangServer if options.deterministic else StockServer
    stock, ours = usual(config, 0, folder), SglangServer(changed, 1, folder)
    rows = []
    try:
        started = await asyncio.gather(*(server.start(model, 0, seed=1) for server in (stock, ours)))
        starts.update(zip(("stock", "ours"), started, strict=True))
        await compare(stock, ours, config)
        for concurrent in options.concurrent:
            for repeat in range(options.repeats + 1):  # the first pair warms up
                found = {}
                for name, server in (("stock", stock), ("ours", ours)):
                    found[f"{name} tokens/s"] = await tokens_per_second(
                        server, config, concurrent, f"{concurrent}-{repeat}"
                    )
                if repeat:
                    ratio = found["ours tokens/s"] / found["stock tokens/s"]
                    rows.append({"concurrent": concurrent, "repeat": repeat, **found, "ratio": ratio})
    finally:
        await asyncio.gather(stock.stop(), ours.stop())
    return rows


def main() -> None:
    options = common.parser(__doc__ or "")
    options.set_defaults(repeats=5)
    options.add_argument(
        "--concurrent", type=int, nargs="+", default=[32, 128], help="requests in flight (default 32 128)"
    )
    options.add_argument(
        "--deterministic", action="store_true", help="an engine with the key is `ours`, one without `stock`"
    )
    options = options.parse_args()
    with common.run_folder(options) as folder:
        starts: dict[str, float] = {}
        rows = asyncio.run(measure(options, folder, starts))
    figures = {f"{name}_start_seconds": seconds for name, seconds in starts.items()}
    for concurrent in options.concurrent:
        mine = [row for row in rows if row["concurrent"] == concurrent]
        figures[f"decode_over_stock_at_{concurrent}"] = common.median([row["ratio"] for row in mine])
        figures[f"decode_tokens_per_second_at_{concurrent}"] = common.median(
            [row["ours tokens/s"] for row in mine]
        )
        figures[f"stock_tokens_per_second_at_{concurrent}"] = common.median(
            [row["stock tokens/s"] for row in mine]
        )
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
