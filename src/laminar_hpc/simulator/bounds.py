"""The bounds of every number that `laminar sim` and `laminar plan` take. All that is wrong is said at once,
with key, bound and cure."""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from laminar_hpc.config.errors import Refused, did_you_mean

INFINITY = math.inf


@dataclass(frozen=True)
class Bound:
    """`low` and `high` are allowed, `low` not if `above`. `why`: what is wrong beyond them, where the bound
    alone doesn't say it."""

    low: float
    high: float
    above: bool = False
    why: str = ""

    def refusal(self, key: str, value: float) -> str:
        """One sentence, or empty."""
        if (
            math.isfinite(value)
            and (value > self.low or (value == self.low and not self.above))
            and value <= self.high
        ):
            return ""
        low = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        return (
            f"{key}={value:g}: must be {low} and at most {self.high:g}{': ' + self.why if self.why else ''}"
        )


_COUNT = Bound(1, 1_000_000)
_MTBF = Bound(0.05, 1e6, why="a replica needs two minutes to come back")
_SHARE = Bound(0, 1, above=True)
_SEED = Bound(0, 2**63 - 1)
_STALENESS = Bound(0, 1000, why="with less than 0 no prompt is ever given out")

WORKLOAD = {
    "prompts_per_step": _COUNT,
    "samples_per_prompt": Bound(1, 10_000),
    "updates_per_step": Bound(1, 10_000),
    "prompt_tokens": Bound(1, 10_000_000),
    "mean_response_tokens": Bound(1, 10_000_000),
    "max_response_tokens": Bound(2, 10_000_000),
    "sigma": Bound(0.01, 10, why="for equal lengths give workload.lengths_file"),
    "group_correlation": Bound(0, 1),
    "growth": Bound(-0.99, 100),
    "turns": Bound(1, 1000),
    "turn_seconds": Bound(0, 1e5),
    "turn_sigma": Bound(0, 5),
    "turn_tokens": Bound(0, 1_000_000),
}
SIMULATION = {
    "seed": _SEED,
    "steps": Bound(1, 10_000),
    "warmup_steps": Bound(0, 9_999),
    "gpus": Bound(2, 131_072),
    "tensor_parallel": Bound(1, 8),
    "trainer_share": Bound(0.001, 0.999),
    "max_staleness": _STALENESS,
    "max_concurrent": Bound(1, 100_000),
    "checkpoint_every": _COUNT,
    "rollout_mtbf_hours": _MTBF,
    "trainer_mtbf_hours": dataclasses.replace(_MTBF, low=0.25, why="a job needs five minutes to start again"),
}
PLAN = {
    "seed": _SEED,
    "trainer_busy": Bound(0, 1),
    "max_staleness": _STALENESS,
    "max_concurrent": Bound(1, 100_000),
    "steps": Bound(1, 1000),
    "warmup_steps": Bound(0, 999),
}
POOL = {
    "count": Bound(1, 65_536),
    "price": Bound(0, 1e6, above=True, why="tokens per $ are asked for; null takes an example price"),
    "mtbf_hours": dataclasses.replace(_MTBF, low=0.25),
}

_RATE = Bound(1e3, 1e18)
_SECONDS = Bound(0, 1e6)
CONSTANTS = {
    "decode_overhead_per_layer": Bound(0, 1),
    "train_mfu": Bound(1e-4, 1),
    "mean_response_tokens_dora": Bound(1, 1e7),
    "decode_hbm_efficiency": Bound(1e-4, 1),
    "decode_flops_efficiency": Bound(1e-4, 1),
    "kv_memory_share": _SHARE,
    "kv_memory_share_colocated": _SHARE,
    "prefill_mfu": Bound(1e-4, 1),
    "admission_clip_tokens": Bound(1, 1e7),
    "new_token_ratio": Bound(0, 1),
    "new_token_ratio_least": Bound(0, 1),
    "new_token_ratio_steps": Bound(1, 1e9),
    "retract_steps": Bound(0, 1e9),
    "logprob_passes": Bound(0, 100),
    "gradient_bytes_per_parameter": Bound(0, 1000),
    "trainer_bytes_per_parameter": Bound(6, 1000),
    "trainer_memory_share": _SHARE,
    "batch_handling": Bound(0, 1),
    "colocated_switch": _SECONDS,
    "publish_bytes_per_second": _RATE,
    "chain_bytes_per_second": _RATE,
    "chain_chunk_seconds": Bound(0, 1000),
    "pull_overhead": _SECONDS,
    "global_sync_factor": Bound(0, 1000),
    "kv_move_bytes_per_second": _RATE,
    "kv_move_latency": _SECONDS,
    "repack_period": Bound(0.01, 1e6),
    "repack_kv_share": _SHARE,
    "replica_restart": _SECONDS,
    "job_restart": _SECONDS,
    "checkpoint_stall": _SECONDS,
}
_MOST_TRAJECTORIES = 20_000_000  # of a simulated run, some 20 us each
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def choice(key: str, value: str, known: Iterable[str]) -> str:
    """A sentence that lists the choices and the nearest one when `value` is none of them, else empty."""
    names = list(known)
    if value in names:
        return ""
    return f"{key}={value}: use one of {', '.join(names)}{did_you_mean(value, names)}"


def numbers(settings: object, bounds: dict[str, Bound], prefix: str = "") -> Iterator[str]:
    """A sentence for each field of the dataclass, or number of a list, beyond its bounds; null is allowed
    where the schema has it."""
    for name, bound in bounds.items():
        value = getattr(settings, name)
        for each in value if isinstance(value, list) else [value]:
            if each is not None and (text := bound.refusal(prefix + name, each)):
                yield text


def constants(values: dict[str, float], key: str = "constants") -> Iterator[str]:
    """A sentence for each constant that does not exist or lies beyond its bounds."""
    for name, value in values.items():
        if (text := choice(key, name, CONSTANTS)) or (
            text := CONSTANTS[name].refusal(f"{key}.{name}", value)
        ):
            yield text


def run_length(steps: int, warmup_steps: int, trajectories: int) -> Iterator[str]:
    """`trajectories`: of a trainer step."""
    if not warmup_steps < steps:
        yield f"warmup_steps={warmup_steps} must be at least 0 and below steps={steps}"
    if steps * trajectories > _MOST_TRAJECTORIES:
        yield (
            f"steps={steps} of {trajectories:,} trajectories are more than the {_MOST_TRAJECTORIES:,} that "
            "are simulated in minutes: "
            f"lower steps, workload.prompts_per_step or workload.samples_per_prompt"
        )


def name(value: str) -> str:
    """Files are called by it."""
    return (
        ""
        if _NAME.fullmatch(value)
        else f"name={value!r}: use letters, digits, '.', '_' and '-', at most 64, for files have it"
    )


def refuse(wrong: Iterable[str]) -> None:
    """Raises Refused with all sentences that are not empty, each once."""
    if found := list(dict.fromkeys(text for text in wrong if text)):
        raise Refused(found)
