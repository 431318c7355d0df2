"""What is wrong with how a model is divided over ranks, by the model's own numbers, in the way of rules.py.
Imports no torch."""

import math
from collections.abc import Iterator

from laminar_hpc.config.adapters import published_parameters
from laminar_hpc.config.experts import Experts, experts_of
from laminar_hpc.config.models import kv_heads, serving_bytes
from laminar_hpc.config.rope import positions
from laminar_hpc.config.schema import RunConfig

_VOCABULARY_MULTIPLE = 32  # trainer/megatron/building.py pads to it
_MIN_LANE = 64 << 10  # bytes: a smaller one would cost more than it saves


def _virtual_stages(config: RunConfig, layers: int) -> Iterator[str]:
    stages, chunks = config.trainer.pipeline_parallel, config.trainer.virtual_stages
    if chunks > 1 and stages == 1:
        yield "@trainer.virtual_stages: there is one stage; set it to 1, or trainer.pipeline_parallel higher"
    elif chunks > 1 and layers % (stages * chunks) != 0:
        fits = [str(n) for n in range(1, layers // stages + 1) if layers % (stages * n) == 0]
        able = f"it may be {', '.join(fits)}" if fits else "set it to 1, or choose other stages"
        yield (
            f"@trainer.virtual_stages: {chunks} chunks of {stages} stages do not divide the model's "
            f"num_hidden_layers={layers}; {able}"
        )


def wrong_layout(config: RunConfig, model: dict) -> Iterator[str]:
    """Yields what is wrong with how heads, layers and columns are divided over ranks."""
    tensor, ranks = config.trainer.tensor_parallel, config.rollout.tensor_parallel
    heads, layers = model["num_attention_heads"], model["num_hidden_layers"]
    width, kv = model["intermediate_size"], kv_heads(model)
    dense = experts_of(model) is None
    parts = {"num_attention_heads": heads, "num_key_value_heads": kv}
    if dense:
        parts["intermediate_size"] = width
    undivided = next((f"{name}={value}" for name, value in parts.items() if value % tensor != 0), "")
    no, cure = "@trainer.tensor_parallel does not divide", "choose another, or scale with data_parallel"
    if undivided:
        yield f"{no} the model's {undivided}; {cure}"
    if not undivided and _VOCABULARY_MULTIPLE % tensor != 0:
        yield f"{no} {_VOCABULARY_MULTIPLE}, to which the vocabulary is padded; use a power of two"
    context = config.trainer.context_parallel
    if not undivided and heads % (tensor * context) != 0:
        yield (
            f"@trainer.context_parallel x @trainer.tensor_parallel does not divide the model's "
            f"num_attention_heads={heads}, of which each rank attends with its share; choose others"
        )
    if layers < config.trainer.pipeline_parallel:
        exceeds = f"exceeds the model's num_hidden_layers={layers}"
        yield f"@trainer.pipeline_parallel {exceeds}; use fewer stages"
    yield from _virtual_stages(config, layers)
    # SGLang gives each rank whole query heads, whole KV heads (or several ranks the same one), and whole
    # columns of the MLP.
    if heads % ranks != 0 or max(kv, ranks) % min(kv, ranks) != 0 or (dense and width % ranks != 0):
        columns = f" and intermediate size {width}" if dense else ""
        yield (
            f"@rollout.tensor_parallel does not divide the model's {heads} heads, {kv} key-value heads"
            f"{columns}; choose another, and scale with rollout.replicas"
        )
    longest = positions(model) or math.inf
    if config.sampling.max_response_tokens >= longest:
        room = f"room for a prompt in the model's {longest} positions"
        yield f"@sampling.max_response_tokens does not leave {room}; lower it"
    publication = published_parameters(model, config.model.lora) * serving_bytes(config.model.dtype)
    if config.relay.lanes > 1 and publication < config.relay.lanes * _MIN_LANE:
        small = (
            f"a publication of {publication} bytes is too small for lanes of at least {_MIN_LANE} bytes each"
        )
        yield f"@relay.lanes: {small}; lower it"


def wrong_expert_layout(config: RunConfig, experts: Experts | None) -> Iterator[str]:
    """Yields what is wrong with how experts are divided over ranks."""
    t, r = config.trainer, config.rollout
    if experts is None:
        for role, divided in (("trainer", t.expert_parallel), ("rollout", r.expert_parallel)):
            if divided != 1:
                yield f"@{role}.expert_parallel: the model has no experts; leave it at 1"
        return
    several = f"{' x @trainer.context_parallel' if t.context_parallel > 1 else ''} x @trainer.data_parallel"
    for role, divided, ranks, product in (
        ("trainer", t.expert_parallel, t.ranks // t.pipeline_parallel, several),
        ("rollout", r.expert_parallel, r.tensor_parallel, ""),
    ):
        if experts.count % divided:
            yield f"@{role}.expert_parallel does not divide the model's {experts.count} experts"
        elif ranks % divided:
            among = f"@{role}.tensor_parallel{product}"
            yield f"@{role}.expert_parallel does not divide {among}, the ranks that share the experts"
    trainer_parts = 1 if t.expert_parallel > 1 else t.tensor_parallel
    rollout_parts = r.tensor_parallel // r.expert_parallel
    for role, parts, ranks in (
        ("trainer", trainer_parts, t.tensor_parallel),
        ("rollout", rollout_parts, r.tensor_parallel),
    ):
        if experts.width % max(1, parts):
            more = f"raise {role}.expert_parallel, which divides whole experts"
            yield f"@{role}.tensor_parallel does not divide an expert's width of {experts.width}; {more}"
        if experts.shared_width % ranks:
            yield (
                f"@{role}.tensor_parallel does not divide the shared expert's width of "
                f"{experts.shared_width}; choose another"
            )
    if r.tensor_parallel > experts.count:
        yield f"@rollout.tensor_parallel is more than the model's {experts.count} experts; lower it"
