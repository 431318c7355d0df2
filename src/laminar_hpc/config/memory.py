"""Whether a configuration fits the memory of its GPUs, by the estimates of config/models.py. Imports no
torch.

`check_memory` knows the GPUs by `trainer.gpu_memory_gigabytes` and `rollout.gpu_memory_gigabytes`, or by what
the caller has found on this machine. What is not known is not checked.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from laminar_hpc.config.adapters import rank_adapter_parameters
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.kv_moves import kv_moves
from laminar_hpc.config.models import (
    count_parameters,
    kv_bytes_per_token,
    kv_heads,
    kv_tokens_that_fit,
    model_config,
    serving_bytes,
    trainer_bytes,
)
from laminar_hpc.config.schema import RunConfig

USABLE = 0.95  # of a GPU's memory; a process's CUDA context and fragmentation take the rest
_CONTEXT_BYTES = 500_000_000  # of each process more than one on a GPU
GRAPH_BYTES = (
    1_000_000_000  # an engine's CUDA graphs and activations, which only a shared GPU has no room for
)
_NCCL_BYTES = 250_000_000  # buffers of a relay's link to another machine
MOVE_BYTES = 3 * (32 << 20)  # buffers of engine/kv/device.py: one for each direction, one to share
_CHOSEN = 0.85  # the share that a choice of ours fills: one that is wrong ends the run out of memory


@dataclass(frozen=True)
class Need:
    """Bytes that a trainer rank and one GPU of an engine need."""

    trainer: int
    rollout: int


def relay_bytes(config: RunConfig) -> int:
    """What the relays on an engine's GPU take there where weights cross between machines by NCCL: a context,
    and for each of two links NCCL's buffers and its staging (weights/links/staging.py: three chunks that
    arrive, two that leave). 0 where they go through host memory."""
    relay, rollout = config.relay, config.rollout
    if relay.transport == "host" or config.source.startswith("replay:"):
        return 0
    each = _CONTEXT_BYTES + 2 * _NCCL_BYTES + 5 * (relay.chunk_megabytes << 20)
    return math.ceil(relay.lanes / (rollout.fewest * rollout.tensor_parallel)) * each


def move_bytes(config: RunConfig) -> int:
    """What moves of KV caches take of an engine's GPU, beside the cache."""
    return MOVE_BYTES if kv_moves(config) else 0


def shared_bytes(need: Need, engines: int) -> int:
    """Of a GPU with a trainer rank, if need.trainer is above 0, and `engines` replicas."""
    beside = max(0, engines + bool(need.trainer) - 1) * _CONTEXT_BYTES
    return need.trainer + engines * (need.rollout + GRAPH_BYTES) + beside


def shared_engines(config: RunConfig) -> int:
    """The most replicas that rollout.devices puts on a GPU that trainer.devices names too."""
    devices = config.rollout.devices or []
    return max((devices.count(device) for device in config.trainer.devices or []), default=0)


def check_memory(
    config: RunConfig, need: Need, found_gigabytes: float | None = None, found_counts: bool = False
) -> None:
    """Refuses what cannot fit. `found_gigabytes`: a GPU of this machine, None: unknown. It stands in for keys
    that are null; with `found_counts` for all, because the run is to start here.

    Raises LaminarError with every role that doesn't fit, and how to mend it.
    """
    wrong: list[str] = []
    sizes = [config.trainer.gpu_memory_gigabytes, config.rollout.gpu_memory_gigabytes]
    trainer, rollout = (found_gigabytes if found_counts else size or found_gigabytes for size in sizes)
    if trainer and need.trainer > USABLE * trainer * 1e9:
        wrong.append(
            f"{_misfit('trainer', need.trainer, trainer)}: {_trainer_cure(config, USABLE * trainer * 1e9)}"
        )
    if rollout and need.rollout > USABLE * rollout * 1e9:
        wrong.append(
            f"{_misfit('rollout', need.rollout, rollout)}: {_rollout_cure(config, USABLE * rollout * 1e9)}"
        )
    both = min((size for size in (trainer, rollout) if size), default=None)
    engines = shared_engines(config)
    if not wrong and both and engines and shared_bytes(need, engines) > USABLE * both * 1e9:
        wrong.append(shared_misfit(config, need, engines, both))
    if wrong:
        raise LaminarError("; ".join(wrong))


def trainer_need(config: RunConfig, model: dict, width: int, **change: Any) -> int:
    """Estimated bytes on the fullest trainer GPU, with other values for some settings of the trainer."""
    trainer = replace(config.trainer, **change)
    return trainer_bytes(model, width, trainer, rank_adapter_parameters(model, config.model.lora, trainer))


def recompute_that_fits(config: RunConfig, model: dict, width: int, beside: float) -> str:
    """What trainer.recompute_activations stands for. For auto: the least that fits into
    trainer.gpu_memory_gigabytes beside so many bytes, full if nothing does, none where that key is null."""
    t = config.trainer
    if t.recompute_activations != "auto":
        return t.recompute_activations
    if t.gpu_memory_gigabytes is None:
        return "none"
    budget = _CHOSEN * t.gpu_memory_gigabytes * 1e9 - beside
    for choice in ("none", "selective"):
        if trainer_need(config, model, width, recompute_activations=choice) <= budget:
            return choice
    return "full"


def shared_misfit(config: RunConfig, need: Need, engines: int, gigabytes: float) -> str:
    """What a GPU that a trainer rank shares with `engines` replicas lacks, and the cure."""
    total, usable = shared_bytes(need, engines), USABLE * gigabytes * 1e9
    more = total - need.trainer - engines * need.rollout
    trainer = _trainer_cure(config, usable - total + need.trainer) if need.trainer else ""
    rollout = _rollout_cure(config, need.rollout - (total - usable) / engines) if engines else ""
    return (
        f"a GPU shared by trainer and rollouts needs {total / 1e9:.1f} GB ({need.trainer / 1e9:.1f} + "
        f"{engines} x {need.rollout / 1e9:.1f}, and {more / 1e9:.1f} of CUDA's contexts and graphs), of "
        f"{gigabytes:g} GB {USABLE:.0%} can be used: {', or '.join(filter(None, (trainer, rollout)))}"
    )


def _misfit(role: str, need: int, gigabytes: float) -> str:
    return f"{role} needs {need / 1e9:.1f} GB on a GPU, of {gigabytes:g} GB {USABLE:.0%} can be used"


def _trainer_cure(config: RunConfig, budget: float) -> str:
    """Settings that bring a trainer rank nearer to `budget` bytes; one that alone is enough stands alone."""
    t, width = config.trainer, serving_bytes(config.model.dtype)
    model = model_config(config.model.path, config.dry_run)
    changes: list[tuple[str, dict]] = []
    if t.data_parallel > 1 and not t.distributed_optimizer:
        changes.append(("trainer.distributed_optimizer=true", {"distributed_optimizer": True}))
    choices = ("none", "selective", "full")
    least = choices.index("none" if t.recompute_activations == "auto" else t.recompute_activations) + 1
    more = () if t.recompute_activations == "auto" and t.gpu_memory_gigabytes else choices[least:]
    changes += [(f"trainer.recompute_activations={c}", {"recompute_activations": c}) for c in more]
    for text, change in changes:
        if trainer_need(config, model, width, **change) <= budget:
            return f"set {text}"
    words = [text for text, _ in changes]
    longest = config.sampling.max_response_tokens
    if t.pack_tokens > 1.5 * longest:
        words.append(
            f"trainer.tokens_per_microbatch={t.tokens_per_microbatch} nearer to the longest trajectory "
            f"(over {longest}{f' on {t.context_parallel} ranks' if t.context_parallel > 1 else ''})"
        )
    return ", ".join(
        [
            *(f"set {words[0]}" if i == 0 else word for i, word in enumerate(words)),
            "more trainer.tensor_parallel or trainer.pipeline_parallel",
        ]
    )


def _rollout_cure(config: RunConfig, gpu: float) -> str:
    """The KV cache that fits into `gpu` bytes beside the relays, if any."""
    width, tensor = serving_bytes(config.model.dtype), config.rollout.tensor_parallel
    model = model_config(config.model.path, config.dry_run)
    tokens = kv_tokens_that_fit(
        count_parameters(model) * width,
        kv_bytes_per_token(model, width),
        kv_heads(model),
        tensor,
        gpu - relay_bytes(config) - move_bytes(config),
    )
    if tokens > config.sampling.max_response_tokens:
        fewer = tokens // 1000 * 1000 or tokens
        return f"lower rollout.kv_cache_tokens={config.rollout.kv_cache_tokens} to {fewer}"
    return f"raise rollout.tensor_parallel={tensor}"
