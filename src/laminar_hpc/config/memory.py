"""Whether a configuration fits the memory of its GPUs, by the estimates of config/models.py. Imports no
torch.

`check_memory` knows the GPUs by `trainer.gpu_memory_gigabytes` and `rollout.gpu_memory_gigabytes`, or by what
the caller has found on this machine. What is not known is not checked.
"""

import math
from dataclasses import dataclass, replace

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import (
    count_parameters,
    kv_bytes_per_token,
    kv_heads,
    kv_tokens_that_fit,
    model_config,
    trainer_bytes,
)
from laminar_hpc.config.schema import RunConfig

USABLE = 0.95  # of a GPU's memory; CUDA's context, NCCL's buffers and fragmentation take the rest
_WIDTH = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Need:
    """Bytes that a trainer rank and one GPU of an engine need."""

    trainer: int
    rollout: int


def check_memory(
    config: RunConfig, need: Need, found_gigabytes: float | None = None, found_counts: bool = False
) -> None:
    """Refuses what cannot fit. `found_gigabytes`: a GPU of this machine, None: unknown. It stands in for keys
    that are null; with `found_counts` for all, because the run is to start here.

    Raises LaminarError with every role that doesn't fit, and how to mend it.
    """
    wrong = [
        f"{role}.gpu_memory_gigabytes={value:g}: must be above 0, or null"
        for role, value in (
            ("trainer", config.trainer.gpu_memory_gigabytes),
            ("rollout", config.rollout.gpu_memory_gigabytes),
        )
        if value is not None and not 0 < value < math.inf
    ]
    if wrong:
        raise LaminarError("; ".join(wrong))
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
    if not wrong and both and shared_by_lists(config) and need.trainer + need.rollout > USABLE * both * 1e9:
        wrong.append(shared_misfit(config, need, 1, both))
    if wrong:
        raise LaminarError("; ".join(wrong))


def shared_by_lists(config: RunConfig) -> bool:
    """Whether trainer.devices and rollout.devices name a GPU that both use."""
    return bool(set(config.trainer.devices or ()) & set(config.rollout.devices or ()))


def shared_misfit(config: RunConfig, need: Need, engines: int, gigabytes: float) -> str:
    """What a GPU that a trainer rank shares with `engines` replicas lacks, and the cure."""
    total, usable = need.trainer + engines * need.rollout, USABLE * gigabytes * 1e9
    trainer = _trainer_cure(config, usable - engines * need.rollout) if need.trainer else ""
    rollout = _rollout_cure(config, (usable - need.trainer) / engines) if engines else ""
    return (
        f"a GPU shared by trainer and rollouts needs {total / 1e9:.1f} GB "
        f"({need.trainer / 1e9:.1f} + {engines} x {need.rollout / 1e9:.1f}), of {gigabytes:g} "
        f"GB {USABLE:.0%} can be used: {', or '.join(filter(None, (trainer, rollout)))}"
    )


def _misfit(role: str, need: int, gigabytes: float) -> str:
    return f"{role} needs {need / 1e9:.1f} GB on a GPU, of {gigabytes:g} GB {USABLE:.0%} can be used"


def _trainer_cure(config: RunConfig, budget: float) -> str:
    """Settings that bring a trainer rank nearer to `budget` bytes; one that alone is enough stands alone."""
    t, width = config.trainer, _WIDTH.get(config.model.dtype, 4)
    model = model_config(config.model.path, config.dry_run)
    changes: list[tuple[str, dict]] = []
    if t.data_parallel > 1 and not t.distributed_optimizer:
        changes.append(("trainer.distributed_optimizer=true", {"distributed_optimizer": True}))
    if not t.recompute_activations:
        changes.append(("trainer.recompute_activations=true", {"recompute_activations": True}))
    for text, change in changes:
        if trainer_bytes(model, width, replace(t, **change)) <= budget:
            return f"set {text}"
    words = [text for text, _ in changes]
    longest = config.sampling.max_response_tokens
    if t.tokens_per_microbatch > 1.5 * longest:
        words.append(
            f"trainer.tokens_per_microbatch={t.tokens_per_microbatch} nearer to the longest trajectory "
            f"(over {longest})"
        )
    return ", ".join(
        [
            *(f"set {words[0]}" if i == 0 else word for i, word in enumerate(words)),
            "more trainer.tensor_parallel or trainer.pipeline_parallel",
        ]
    )


def _rollout_cure(config: RunConfig, gpu: float) -> str:
    """The KV cache that fits into `gpu` bytes, if any."""
    width, tensor = _WIDTH.get(config.model.dtype, 4), config.rollout.tensor_parallel
    model = model_config(config.model.path, config.dry_run)
    tokens = kv_tokens_that_fit(
        count_parameters(model) * width, kv_bytes_per_token(model, width), kv_heads(model), tensor, gpu
    )
    if tokens > config.sampling.max_response_tokens:
        return (
            f"lower rollout.kv_cache_tokens={config.rollout.kv_cache_tokens} to "
            f"{tokens // 1000 * 1000 or tokens}"
        )
    return f"raise rollout.tensor_parallel={tensor}"
