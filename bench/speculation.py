"""Speculative decoding on the CPU: an engine with `rollout.speculation=auto` against one without.

    python bench/speculation.py --json spec.json     20 pairs of tails, 5 of full engines, 4,000 samples
    python bench/speculation.py --mode suffix --repeats 5

Both engines stay up, on the same model, one thread each; the runs of a pair follow one another directly, and
the figures are medians of the pairs' ratios, so that other work on the machine weighs on both alike. The
model is that of the experiment (the demo's base, which the demo trains), its prompts are the experiment's own
and its responses end where the model ends them.

`per_stream_at_8`: the tail of a local batch. Of 8 groups of 8 samples, 56 are generated first; then the last
one of each group, 8 at once: tokens over the seconds that their requests took, added up. The prompts are of
the longest quarter, whose answers make a tail. `_cpu`: the same over the CPU seconds of the engine's
processes, which a busy machine spoils less. `at_64`: 64 requests that
decode to their last of 96 tokens (`ignore_eos`), tokens per second. `tokens_per_step` is what a step with
drafts brought a request in the tails, of at most 8.

`distribution_p`: the speculating engine draws the first three tokens of a response many times; how often
each triple came, against its probability by transformers, in a chi-squared test. Goals: at least 1.3, 0.98
and 1e-3.
"""

import argparse
import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import common
import psutil

from laminar_hpc.config.load import load_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.source import parse_source
from laminar_hpc.data.prompts import load_prompts
from laminar_hpc.data.tokens import load_tokenizer, stop_token_ids
from laminar_hpc.engine.interface import Generation, sampling_parameters
from laminar_hpc.engine.sglang.server import SglangServer

GROUPS, GROUP = 8, 8
FULL, FULL_TOKENS = 64, 96
EXPECTED = 5.0  # occurrences of a triple that has a class of its own in the test
NEGLIGIBLE = 1e-3  # expected occurrences below which a beginning is not followed
COLUMNS = ("run", "repeat", "off tokens/s", "on tokens/s", "ratio", "cpu ratio")


class Measured:
    """One engine, and what its processes have used."""

    def __init__(self, config: RunConfig, index: int, folder: Path) -> None:
        self.config = config
        self.server = SglangServer(config, index, folder)
        self.stops = stop_token_ids(Path(config.model.path))

    def cpu_seconds(self) -> float:
        root = psutil.Process(self.server.process.pid)
        members = [root, *root.children(recursive=True)]
        return sum(sum(one.cpu_times()[:2]) for one in members)

    async def generate(
        self, prompts: list[list[int]], name: str, tokens: int | None = None, to_the_end: bool = False
    ) -> tuple[list[Generation], float]:
        """One response to each prompt, all at once, and the seconds of all requests together."""
        room = tokens or self.config.sampling.max_response_tokens
        sampling = sampling_parameters(self.config.sampling, 1.0, room, self.stops)
        sampling["ignore_eos"] = to_the_end
        seconds = 0.0

        async def one(number: int, prompt: list[int]) -> Generation:
            nonlocal seconds
            begun = time.monotonic()
            generation = await self.server.generate(prompt, sampling, f"{name}-{number}", "0")
            seconds += time.monotonic() - begun
            return generation

        return list(await asyncio.gather(*(one(*pair) for pair in enumerate(prompts)))), seconds

    async def tail(self, groups: list[list[int]], name: str) -> dict[str, float]:
        """Per-stream tokens per second, and tokens per CPU second, of each group's last sample."""
        await self.generate(groups * (GROUP - 1), f"{name}-first")
        cpu = self.cpu_seconds()
        done, seconds = await self.generate(groups, f"{name}-last")
        tokens = sum(len(generation.tokens) for generation in done)
        return {"rate": tokens / seconds, "cpu": tokens / (self.cpu_seconds() - cpu)}

    async def full(self, prompts: list[list[int]], name: str) -> dict[str, float]:
        begun, cpu = time.monotonic(), self.cpu_seconds()
        done, _ = await self.generate(prompts, name, FULL_TOKENS, to_the_end=True)
        tokens = sum(len(generation.tokens) for generation in done)
        return {
            "rate": tokens / (time.monotonic() - begun),
            "cpu": tokens / (self.cpu_seconds() - cpu),
        }


def p_value(
    observed: Counter[tuple[int, ...]],
    prompt: Sequence[int],
    model: Path,
    stops: Sequence[int],
    temperature: float = 1.0,
) -> float:
    """Of a chi-squared test: how often the engine began a response with each triple of tokens, fewer where
    one of `stops` ends it, against the probabilities that transformers gives them. Triples that are expected
    fewer than EXPECTED times are one class."""
    import torch
    from torch.special import gammaincc
    from transformers import AutoModelForCausalLM

    import laminar_hpc.machine.compat.torchvision  # noqa: F401  (before transformers)

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    draws = observed.total()
    likely: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        running = {begun: p for begun, p in likely.items() if not begun or begun[-1] not in stops}
        ended = {begun: p for begun, p in likely.items() if begun not in running}
        with torch.no_grad():
            logits = network(torch.tensor([[*prompt, *begun] for begun in running])).logits[:, -1]
        rows = torch.softmax(logits.float() / temperature, -1).tolist()
        further = {
            (*begun, token): running[begun] * p
            for begun, row in zip(running, rows, strict=True)
            for token, p in enumerate(row)
            if running[begun] * p * draws > NEGLIGIBLE
        }
        likely = ended | further
    classes = [begun for begun, p in likely.items() if p * draws >= EXPECTED]
    expected = [likely[begun] * draws for begun in classes]
    counts = [observed[begun] for begun in classes]
    if (rest := draws - sum(expected)) >= EXPECTED:
        expected.append(rest)
        counts.append(draws - sum(counts))
    if len(counts) < 3:
        raise ValueError(f"{draws} draws make {len(counts)} classes: too few for a test")
    statistic = sum((o - e) ** 2 / e for o, e in zip(counts, expected, strict=True))
    return float(gammaincc(torch.tensor((len(counts) - 1) / 2), torch.tensor(statistic / 2)))


async def distribution(on: Measured, prompt: list[int], draws: int) -> float:
    """The p-value of `draws` samples, 8 at once, as a tail has them."""
    observed: Counter[tuple[int, ...]] = Counter()
    for wave in range(draws // GROUPS):
        done, _ = await on.generate([prompt] * GROUPS, f"drawn-{wave}", tokens=3)
        observed.update(tuple(generation.tokens.tolist()) for generation in done)
    return p_value(observed, prompt, Path(on.config.model.path), on.stops)


async def accepted(on: Measured) -> float | None:
    """Tokens per step and request since this was asked last, by SGLang's own count."""
    told = await on.server.http.get("/server_info", seconds=30.0) or {}
    states = told.get("internal_states") or [{}]
    return states[0].get("avg_spec_accept_length")


async def measure(options: argparse.Namespace, folder: Path, figures: dict) -> list[dict]:
    def config(*more: str) -> RunConfig:
        words = [f"experiment={options.experiment}", *options.overrides, *more]
        return load_config([*words, "rollout.engine_start_seconds=600"])

    off = Measured(config("rollout.speculation=off"), 0, folder)
    on = Measured(config(f"rollout.speculation={options.mode}"), 1, folder)
    model, draw = Path(off.config.model.path), random.Random(1)
    source = parse_source("data.train", off.config.data.train)
    tokenizer = load_tokenizer(str(model))
    rows = load_prompts(source, off.config.data, tokenizer, None, 64, 2000).prompts
    prompts = sorted((row.tokens for row in rows), key=len)
    long = prompts[len(prompts) * 3 // 4 :]
    found = []

    def add(run: str, repeat: int, without: dict[str, float], with_: dict[str, float]) -> None:
        ratios = {"ratio": with_["rate"] / without["rate"], "cpu ratio": with_["cpu"] / without["cpu"]}
        rates = {"off tokens/s": without["rate"], "on tokens/s": with_["rate"]}
        found.append({"run": run, "repeat": repeat, **rates, **ratios})

    try:
        await asyncio.gather(*(one.server.start(model, 0, seed=1) for one in (off, on)))
        for repeat in range(options.repeats + 2):  # the first two warm up
            groups = draw.sample(long, GROUPS)
            pair = [await one.tail(groups, f"tail-{repeat}") for one in (off, on)]
            if repeat > 1:
                add("tail", repeat - 2, *pair)
        figures["tokens_per_step"] = await accepted(on)
        for repeat in range(options.full_repeats):
            chosen = draw.sample(prompts, FULL)
            add("full", repeat, *[await one.full(chosen, f"full-{repeat}") for one in (off, on)])
        figures["distribution_p"] = await distribution(on, long[0], options.draws)
    finally:
        await asyncio.gather(off.server.stop(), on.server.stop())
    return found


def main() -> None:
    options = common.parser(__doc__ or "")
    options.set_defaults(repeats=20)
    options.add_argument("--mode", default="auto", help="rollout.speculation of the one engine")
    options.add_argument("--full-repeats", type=int, default=5, help="pairs of full engines (default 5)")
    options.add_argument("--draws", type=int, default=4000, help="samples of the distribution (default 4000)")
    options = options.parse_args()
    figures: dict = {}
    with common.run_folder(options) as folder:
        rows = asyncio.run(measure(options, folder, figures))
    for figure, run in (("per_stream_at_8", "tail"), ("at_64", "full")):
        mine = [row for row in rows if row["run"] == run]
        figures[figure] = common.median([row["ratio"] for row in mine])
        figures[f"{figure}_cpu"] = common.median([row["cpu ratio"] for row in mine])
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
