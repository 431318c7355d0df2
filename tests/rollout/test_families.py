"""Each family through real SGLang: weights that are pulled are verified, and the log-probs of what is
drawn are transformers'."""

import asyncio
from pathlib import Path

import pytest
import torch

from helpers.engines.pair import engine_config, file_sums, fill_slot, hf_logprobs
from helpers.processes import LoopThread
from helpers.trainer.tiny import EXPERTS, FAMILIES, VOCAB, make_model, transformers_model
from laminar_hpc.engine.interface import sampling_parameters
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.rollout.engine_lives import EngineLives
from laminar_hpc.rollout.weight_loader import WeightLoader
from laminar_hpc.weights.probe import probe_sequences
from laminar_hpc.weights.slots import SlotReader, SlotWriter

PROMPTS = [
    [7],
    [3, 4, 5, 6],
    [(i * i) % VOCAB for i in range(150)],
]  # the last is long enough for every frequency of the RoPE
ENGINES = [  # family of trainer/tiny.py, tensor parallel
    pytest.param("qwen3-untied", 1, marks=pytest.mark.slow),  # one norm per head of 16, 4 x 16 is not 32
    pytest.param("qwen3-tied", 2, marks=pytest.mark.slow),
    pytest.param("llama3-gqa8", 1, marks=pytest.mark.slow),  # Llama 3's RoPE, heads of 8 where 64 / 16 is 4
    pytest.param("llama3-gqa8", 2, marks=pytest.mark.slow),
    pytest.param("llama-tied", 1, marks=pytest.mark.slow),
    pytest.param("gemma3", 1, marks=pytest.mark.slow),
    pytest.param("gemma3", 2, marks=pytest.mark.slow),  # the embedding is whole on both ranks
    pytest.param("glm4", 1, marks=pytest.mark.slow),
    pytest.param("glm4", 2, marks=pytest.mark.slow),  # gate and up projection are one tensor
    pytest.param("glm4-yarn", 1, marks=pytest.mark.slow),
    pytest.param("llama-linear", 1, marks=pytest.mark.slow),
    pytest.param("mistral-nemo", 2, marks=pytest.mark.slow),
    pytest.param("mistral-window", 1, marks=pytest.mark.slow),  # a window of 12 tokens
    pytest.param("qwen2-yarn", 1, marks=pytest.mark.slow),  # 150 tokens and more, where 64 were trained
    pytest.param("qwen3-yarn", 1, marks=pytest.mark.slow),  # with an attention_factor
]
MIXTURES = [  # of trainer/tiny.py, tensor parallel, expert parallel
    ("qwen3-moe", 1, 1),
    pytest.param("qwen3-moe", 2, 1, marks=pytest.mark.slow),
    pytest.param("qwen3-moe", 2, 2, marks=pytest.mark.slow),
    pytest.param("qwen3-moe-yarn", 1, 1, marks=pytest.mark.slow),
    pytest.param("qwen2-moe", 1, 1, marks=pytest.mark.slow),
    pytest.param("qwen2-moe", 2, 1, marks=pytest.mark.slow),
    pytest.param("mixtral", 1, 1, marks=pytest.mark.slow),
    pytest.param("mixtral", 2, 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("family", "ranks", "experts"), MIXTURES)
def test_an_engine_of_experts(family: str, ranks: int, experts: int, tmp_path: Path) -> None:
    """As the next, of a mixture of experts: SGLang has all experts of a layer in two parameters."""
    check_engine(EXPERTS[family], ranks, tmp_path, experts)


@pytest.mark.parametrize(("family", "ranks"), ENGINES)
def test_an_engine_of_each_family(family: str, ranks: int, tmp_path: Path) -> None:
    """Started on one model, it pulls another: names and shapes agree, sums are verified; log-probs of the
    probe and of sampled tokens are transformers' to 1e-4."""
    check_engine(FAMILIES[family], ranks, tmp_path)


def check_engine(shape: dict, ranks: int, tmp_path: Path, expert_parallel: int = 1) -> None:
    models = [
        make_model(tmp_path / f"model{seed}", seed, **{"initializer_range": 0.3, **shape}) for seed in (0, 1)
    ]
    config, loop = engine_config(models[0]), LoopThread()
    config.rollout.tensor_parallel = ranks
    config.rollout.expert_parallel = expert_parallel
    engine = SglangServer(config, 0, tmp_path)
    writer = SlotWriter(str(tmp_path), "run", 3, models[0])
    model, probe = transformers_model(models[1]).eval(), probe_sequences(VOCAB)
    sampling = sampling_parameters(config.sampling, 1.0, 24, []) | {"ignore_eos": True}

    async def generate() -> list:
        return await asyncio.gather(
            *(engine.generate(p, sampling, f"r{i}", "4") for i, p in enumerate(PROMPTS))
        )

    try:
        loop.run(engine.start(models[0], 0, seed=0), seconds=250)
        fill_slot(writer, models[1], 4, 2)
        reader = SlotReader(str(tmp_path), "run")
        pulled = loop.run(
            WeightLoader(
                reader, probe, Trace(tmp_path, "rollout", 0), EngineLives(lambda: engine, lambda: 0)
            ).pull()
        )
        assert pulled.weight_id == 4 and "start" not in pulled.phases, "it was loaded by the engine that ran"
        assert loop.run(engine.sums()) == file_sums(models[1])
        expected = torch.cat([hf_logprobs(model, s[:1], s[1:]) for s in probe])
        torch.testing.assert_close(torch.tensor(pulled.probe_logprobs), expected, atol=1e-4, rtol=0)
        for prompt, generation in zip(PROMPTS, loop.run(generate()), strict=True):
            assert len(generation.tokens) == 24 and [s.weight_id for s in generation.spans] == [4]
            expected = hf_logprobs(model, prompt, generation.tokens)
            torch.testing.assert_close(torch.tensor(generation.logprobs), expected, atol=1e-4, rtol=0)
        assert expected.std() > 0.3, "the tokens are about equally likely, so the comparison proves little"
    finally:
        loop.run(engine.stop())
        loop.close()
        writer.close()
