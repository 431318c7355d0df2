"""Adapters of Qwen3 and Llama in real SGLang: log-probs are transformers' on the merged weights."""

import asyncio
from pathlib import Path

import pytest
import torch

from helpers.engines.adapters import (
    ALPHA,
    RANK,
    adapter_of,
    fill_adapter_slot,
    manifest_sums,
    merged,
    slot_writer,
)
from helpers.engines.pair import engine_config, hf_logprobs
from helpers.processes import LoopThread
from helpers.trainer import tiny
from laminar_hpc.engine.interface import Generation, sampling_parameters
from laminar_hpc.engine.sglang.server import SglangServer


@pytest.mark.slow
@pytest.mark.parametrize(("family", "ranks"), [("qwen3-untied", 1), ("llama-tied", 1), ("llama3-gqa8", 2)])
def test_an_adapter_of_each_family(family: str, ranks: int, tmp_path: Path) -> None:
    """Promise: heads of their own width, norms per head, tied heads and many queries to a key change nothing
    of it."""
    model = tiny.make_model(tmp_path / "base", 0, **{"initializer_range": 0.3, **tiny.FAMILIES[family]})
    config, loop = engine_config(model), LoopThread()
    config.model.lora.rank, config.model.lora.alpha = RANK, ALPHA
    config.rollout.tensor_parallel = ranks
    engine, writer = SglangServer(config, 0, tmp_path), slot_writer(tmp_path, model)
    sampling = sampling_parameters(config.sampling, 1.0, 24, []) | {"ignore_eos": True}
    prompts = [[7], [3, 4, 5, 6], [(i * i) % tiny.VOCAB for i in range(150)]]

    async def run() -> list[Generation]:
        await engine.start(model, None, seed=0)
        for weight_id in (1, 2):
            directory, manifest = fill_adapter_slot(writer, adapter_of(model, weight_id), weight_id)
            assert await engine.load_adapter(directory, weight_id) == manifest_sums(manifest)
        calls = [engine.generate(p, sampling, f"r{i}", str(1 + i % 2)) for i, p in enumerate(prompts)]
        return await asyncio.gather(*calls)

    try:
        answers = loop.run(run(), seconds=300)
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            weights = merged(model, adapter_of(model, 1 + i % 2), tmp_path / f"merged{i}")
            expected = hf_logprobs(tiny.transformers_model(weights).eval(), prompt, answer.tokens)
            torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-4, rtol=0)
    finally:
        loop.run(engine.stop())
        loop.close()
        writer.close()
