"""Real engines and real weight slots for tests: a tiny random Qwen2, an event loop in a thread, and two
SGLang servers that tests share."""

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

import laminar_hpc.machine.compat.torchvision  # noqa: F401  (before transformers)
from helpers.processes import LoopThread
from laminar_hpc.config.models import WEIGHTS_FILE
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.weights.kernels.sums import tensor_sums
from laminar_hpc.weights.manifest import Manifest, layout
from laminar_hpc.weights.slots import SlotWriter

EOS = 258


def make_model(directory: Path, seed: int, tied: bool = False, kv_heads: int = 2) -> Path:
    """A random 140k-parameter Qwen2 (float32, 2 layers, 4 heads, vocabulary 500) with a byte-level
    tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"])
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=tied,
        eos_token_id=EOS,
        pad_token_id=259,
        bos_token_id=None,
        rope_theta=10000.0,
    )
    model = Qwen2ForCausalLM(config).to(torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(directory)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>"
    ).save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return directory


def reference(directory: Path) -> torch.nn.Module:
    """Transformers' own model of a directory, to compare with."""
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def fill_slot(writer: SlotWriter, source: Path, weight_id: int, step: int) -> tuple[Path, Manifest]:
    """What a relay does: the weights of a Hugging Face directory into a slot, with sums and manifest."""
    tensors = load_file(source / "model.safetensors")
    manifest = layout([(name, tuple(t.shape), t.dtype) for name, t in tensors.items()], weight_id, step)
    data = writer.begin(manifest)
    for entry in manifest.tensors:
        tensor = tensors[entry.name].contiguous()
        data[entry.offset : entry.offset + entry.nbytes] = np.frombuffer(
            tensor.view(torch.uint8).numpy().tobytes(), dtype=np.uint8
        )
        entry.sum_words, entry.sum_indexed = tensor_sums(tensor)
    return writer.commit(manifest), manifest


@dataclass
class Pair:
    """Two engines on the weights of `models[0]` (weight version "0"); `models[1]` holds others of the same
    shape."""

    loop: LoopThread
    engines: list[SglangServer]
    models: list[Path]
    config: RunConfig
    writer: SlotWriter

    async def load(self, engine: int, number: int, paused: bool = False) -> None:
        """`models[number]` from a slot, as weight id `number`."""
        directory, _ = fill_slot(self.writer, self.models[number], number, 0)
        await self.engines[engine].load_weights(directory, number, paused)

    def stop(self) -> None:
        for engine in self.engines:
            self.loop.run(engine.stop())
        self.loop.close()
        self.writer.close()


def engine_config(model: Path) -> RunConfig:
    config = RunConfig()
    config.model.path = str(model)
    config.rollout.kv_cache_tokens = 16384
    return config


def start_pair(
    folder: Path,
    tensor_parallel: int = 1,
    kv_heads: int = 2,
    speculation: tuple[str, str] = ("off", "off"),
    deterministic: bool = False,
) -> Pair:
    """Starts both at once. The caller stops them."""
    models = [make_model(folder / f"model{seed}", seed, kv_heads=kv_heads) for seed in (0, 1)]
    config, loop = engine_config(models[0]), LoopThread()
    config.rollout.tensor_parallel = tensor_parallel
    config.model.deterministic = deterministic
    rollouts = [replace(config.rollout, speculation=mode) for mode in speculation]

    async def start() -> list[SglangServer]:
        engines = [
            SglangServer(replace(config, rollout=rollout), index, folder)
            for index, rollout in enumerate(rollouts)
        ]
        await asyncio.gather(
            *(engine.start(models[0], 0, seed=index) for index, engine in enumerate(engines))
        )
        return engines

    return Pair(
        loop, loop.run(start(), seconds=250), models, config, SlotWriter(str(folder), "pair", 3, models[0])
    )


def hf_logprobs(
    model: torch.nn.Module, prompt: list[int], response: Iterable[int], temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of the response by transformers at `temperature`, float32 [response]."""
    response = list(map(int, response))
    with torch.no_grad():
        logits = (
            model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float() / temperature
        )
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(response)[:, None])[:, 0]


def file_sums(model: Path) -> dict[str, tuple[int, int]]:
    """The checksums of each tensor of the model's file."""
    return {name: tensor_sums(tensor) for name, tensor in load_file(model / WEIGHTS_FILE).items()}
