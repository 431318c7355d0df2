"""Routing replay: how far the trainer's log-probs are from the engine's in bfloat16, with the engine's routes
and without, and what the routes take up.

    python bench/routing.py [--json PATH]

A real SGLang engine draws responses in bfloat16 and says which experts each token went to; the learner then
trains on them, from the same weights with algorithm.routing_replay=true and false. Two mixtures: a random one
of LAYERS layers and CHOSEN of EXPERTS experts, whose routers are often undecided, as those of large models
are; and the shipped one, which is trained and has 2 of 4 experts in 3 layers. Mismatch: the mean over
trajectories of the mean |log-prob by the trainer - by the engine| of their tokens, in nats, as a run's store
has it. `routing_difference`: of all pairs of a token and a layer, the share in which the trainer's own router
would have chosen other experts.

`mismatch_replay_over_free`: of the random one. Goal: at most 0.5. `shipped_...`: the same of the shipped one,
where few choices are close, and most of what is left is rounding in attention.

`route_bytes_per_token_...`: of the models of two experiments; `..._over_response`: over the 8.05 bytes that a
token takes in a payload file without them.
"""

import argparse
import asyncio
import json
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import common
import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer

import laminar_hpc.machine.compat.torchvision  # noqa: F401 (before transformers)
from laminar_hpc.config.load import load_config
from laminar_hpc.config.models import model_config
from laminar_hpc.config.routing import RouteShape, route_shape
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.engine.interface import Generation, sampling_parameters
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.store.payload.whole import Whole
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.batch import in_memory
from laminar_hpc.trainer.step.learner import Learner

LAYERS, EXPERTS, CHOSEN, VOCABULARY = 6, 32, 4, 512
PROMPTS, SAMPLES, PROMPT_TOKENS, RESPONSE_TOKENS = 48, 4, 24, 48
RESPONSE_BYTES = 8.05  # of a token in a payload file
LARGE = {"30b_a3b": "node_8gpu_30b_a3b", "235b_a22b": "cluster_128gpu_235b_a22b"}
COLUMNS = ("model", "tokens", "routing_difference", "free", "replay", "replay_over_free")


@dataclass(frozen=True)
class Drawn:
    """A prompt, one of its responses, and the routes of both."""

    group: int
    prompt: list[int]
    generation: Generation


def random_mixture(folder: Path) -> Path:
    import transformers

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=True,
        max_position_embeddings=512,
        initializer_range=0.1,
        rope_parameters=rope,
        tie_word_embeddings=False,
    )
    transformers.Qwen3MoeForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def settings(options: argparse.Namespace, model: Path, replay: bool) -> RunConfig:
    words = ["experiment=moe", "model.dtype=bfloat16", f"model.path={model}"]
    words += [f"algorithm.prompts_per_step={PROMPTS}", f"algorithm.samples_per_prompt={SAMPLES}"]
    words += ["algorithm.minibatches_per_step=1", "rollout.engine_start_seconds=600", *options.overrides]
    return load_config([*words, f"algorithm.routing_replay={str(replay).lower()}"])


def shipped_prompts(config: RunConfig) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(Path(config.model.path) / "tokenizer.json"))
    lines = Path(config.data.train).read_text().splitlines()[:PROMPTS]
    texts = [json.loads(line)["prompt"] for line in lines]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


async def drawn(config: RunConfig, prompts: list[list[int]], ends: list[int], folder: Path) -> list[Drawn]:
    """SAMPLES responses to each prompt, all at once, by an engine in bfloat16."""
    sampling = sampling_parameters(config.sampling, 1.0, RESPONSE_TOKENS, ends)
    engine = SglangServer(config, 0, folder)
    try:
        await engine.start(Path(config.model.path), 0, seed=1)
        whose = [(group, prompt) for group, prompt in enumerate(prompts) for _ in range(SAMPLES)]
        found = await asyncio.gather(
            *(
                engine.generate(prompt, sampling, f"r{i}", "0", routes_from=0)
                for i, (_, prompt) in enumerate(whose)
            )
        )
    finally:
        await engine.stop()
    return [Drawn(*of, generation) for of, generation in zip(whose, found, strict=True)]


def trajectory(number: int, one: Drawn, shape: RouteShape) -> Whole:
    generation = one.generation
    whole = common.whole(
        number, one.group, one.prompt, generation.tokens.tolist(), generation.logprobs.tolist()
    )
    routes = np.frombuffer(generation.routes or b"", shape.dtype)
    routes = routes.reshape(-1, len(shape.layers), shape.per_token)
    return replace(whole, response=replace(whole.response, routed_experts=routes))


def compared(options: argparse.Namespace, model: Path, batch: list[Whole]) -> dict[str, float]:
    """The mean mismatch without replay and with it, and the share of other choices."""
    found = {}
    for name, replay in (("free", False), ("replay", True)):
        config = settings(options, model, replay)
        learner = Learner(config, MegatronPolicy(config))
        metrics = learner.train(in_memory(batch), 0, lambda: None)
        found[name] = sum(mean for mean, _ in learner.mismatches.values()) / len(batch)
    tokens = sum(len(whole.response.tokens) for whole in batch)
    difference = metrics["routing_difference"]
    ratio = found["replay"] / found["free"]
    return {"tokens": tokens, "routing_difference": difference, **found, "replay_over_free": ratio}


def main() -> None:
    options = common.parser(__doc__ or "").parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    draw, rows = random.Random(0), []
    with common.run_folder(options) as folder:
        shipped = common.ROOT / "examples" / "arithmetic" / "mixture"
        made = random_mixture(folder / "random")
        texts = [[draw.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
        cases = {"random": (made, texts, []), "shipped": (shipped, None, [1])}
        for name, (model, prompts, ends) in cases.items():
            config = settings(options, model, True)
            prompts = prompts or shipped_prompts(config)
            (folder / f"engine-{name}").mkdir()
            batch = asyncio.run(drawn(config, prompts, ends, folder / f"engine-{name}"))
            shape = route_shape(model_config(str(model)))
            assert shape is not None
            wholes = [trajectory(number, one, shape) for number, one in enumerate(batch)]
            rows.append({"model": name, **compared(options, model, wholes)})
            print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    figures: dict[str, float] = {}
    for row in rows:
        prefix = "" if row["model"] == "random" else f"{row['model']}_"
        figures[f"{prefix}mismatch_replay_over_free"] = row["replay_over_free"]
        figures[f"{prefix}routing_difference"] = row["routing_difference"]
    for name, experiment in LARGE.items():
        shape = route_shape(model_config(load_config([f"experiment={experiment}"]).model.path, True))
        assert shape is not None
        figures[f"route_bytes_per_token_{name}"] = shape.token_bytes
        figures[f"route_bytes_per_token_{name}_over_response"] = shape.token_bytes / RESPONSE_BYTES
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
