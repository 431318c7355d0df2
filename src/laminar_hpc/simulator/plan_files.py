"""What `laminar plan` writes for a candidate: the experiment file, in which everything stands that was
simulated, and on which machines it is to run."""

import dataclasses
import json
import math
from dataclasses import dataclass

from laminar_hpc.config.schema import EnvironmentConfig, LoraConfig
from laminar_hpc.config.yaml_text import load_yaml
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.divisions import (
    Candidate,
    away,
    describe,
    kv_cache_tokens,
    repack_of,
    rooms,
    trainer_settings,
    trainer_spread,
)
from laminar_hpc.simulator.plan_memory import lanes
from laminar_hpc.simulator.schema import PlanConfig
from laminar_hpc.simulator.tables import GPUS, MODELS

_RELAY_THREADS = 8  # of a relay, each of which copies some 4 GB/s, as in conf/experiment
_RATE, _ADAPTER_RATE = 1e-6, 1e-5  # of learning, as in conf/experiment; the default is the demo's
_SELDOM = ("context_parallel", "expert_parallel", "virtual_stages")  # written where they are above 1
_PATIENCE = 4  # time limits of requests and batches, over the longest that was simulated


@dataclass(frozen=True)
class Machines:
    """Machines of one pool that do the same, and the processes on each. `beside`: they are the trainer's,
    which uses the others of their GPUs."""

    pool: int
    processes: tuple[int, ...]
    beside: bool = False

    @property
    def count(self) -> int:
        return len(self.processes)


def trainer_machines(config: PlanConfig, candidate: Candidate) -> Machines:
    count, each = trainer_spread(config.pools[candidate.trainer_pool], candidate.trainer_gpus)
    return Machines(candidate.trainer_pool, (each,) * count)


def rollout_machines(config: PlanConfig, candidate: Candidate) -> list[Machines]:
    """Of each pool, those without a trainer first; `processes` are replicas, and the last machine may have
    fewer."""
    found, trainers = list[Machines](), trainer_machines(config, candidate)
    if candidate.shared:
        return [Machines(candidate.trainer_pool, (1,), beside=True)]
    for pool, gpus, tp in candidate.rollouts:
        trains = pool == candidate.trainer_pool
        room, left = rooms(config.pools[pool], trains * candidate.trainer_gpus, tp), gpus // tp
        whole = len(room) - trains * trainers.count
        for beside, part in ((False, room[:whole]), (True, room[whole:])):
            counts = list[int]()
            for free in part:
                counts.append(min(free // tp, left))
                left -= counts[-1]
            if counts := [n for n in counts if n]:
                found.append(Machines(pool, tuple(counts), beside))
    return found


def on_one_machine(config: PlanConfig) -> bool:
    """Whether one machine holds all GPUs of the only pool."""
    return len(config.pools) == 1 and config.pools[0].count <= GPUS[config.pools[0].gpu].machine


def _yaml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(each)}" for key, each in value.items()) + "}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    # a word that YAML reads as something else: off is false
    return json.dumps(text) if isinstance(value, str) and load_yaml(text) != value else text


def experiment(config: PlanConfig, candidate: Candidate, figures: dict) -> str:
    """DIR/experiment/NAME.yaml for `--config-dir DIR`. `figures`: of the simulated run, for time limits."""
    lines = ["# @package _global_", f"# laminar plan {config.name}: {describe(config, candidate)}."]
    lines += ["# Give data.train and reward.function on the command line.", *_of_turns(config)]
    lines += [f"run_dir: runs/{config.name}"]
    for name, keys in _sections(config, candidate, figures).items():
        lines += [f"{name}:", *(f"  {key}: {_yaml(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def _sections(config: PlanConfig, candidate: Candidate, figures: dict) -> dict[str, dict[str, object]]:
    t, w, tp = trainer_settings(config, candidate), config.workload, candidate.tensor_parallel
    memory = min(GPUS[config.pools[pool].gpu].memory for pool, *_ in candidate.rollouts) / 1e9
    slowest = math.ceil(_PATIENCE * max(figures["latency_max"], figures["step_seconds"], 450.0) / 600) * 600
    ready = 600 if on_one_machine(config) else 1800
    devices: dict[str, object] = {"devices": t.devices} if candidate.shared else {}
    return {
        "model": {"path": MODELS[config.model].path, "dtype": "bfloat16", **_adapter(config)},
        "sampling": {"max_response_tokens": w.max_response_tokens},
        "algorithm": {
            "prompts_per_step": w.prompts_per_step,
            "samples_per_prompt": w.samples_per_prompt,
            "minibatches_per_step": w.updates_per_step,
        },
        "optimizer": {"lr": _ADAPTER_RATE if config.lora.rank else _RATE},
        "trainer": {
            "tensor_parallel": t.tensor_parallel,
            "pipeline_parallel": t.pipeline_parallel,
            "data_parallel": t.data_parallel,
            **{key: value for key in _SELDOM if (value := getattr(t, key)) > 1},
            "distributed_optimizer": t.distributed_optimizer,
            "recompute_activations": t.recompute_activations,
            "tokens_per_microbatch": t.tokens_per_microbatch,
            "gpu_memory_gigabytes": t.gpu_memory_gigabytes,
            **devices,
        },
        "relay": {
            "lanes": lanes(config),
            "threads": _RELAY_THREADS,
            **_over_wide_area(config, candidate, figures),
        },
        "rollout": {
            "replicas": candidate.replicas,
            "tensor_parallel": tp,
            "max_concurrent": config.max_concurrent,
            "kv_cache_tokens": kv_cache_tokens(config, candidate),
            "gpu_memory_gigabytes": memory,
            **devices,
            "engine_start_seconds": ready,
            "request_timeout_seconds": slowest,
        },
        "pipeline": {
            "name": "laminar",
            "refresh": "drained",
            "consumption": "batch",
            "max_staleness": config.max_staleness,
            "repack": repack_of(config, candidate),
            "repack_seconds": DEFAULT.repack_period,
        },
        "cluster": {"join_timeout_seconds": ready, "batch_timeout_seconds": slowest},
        **_limits(config, slowest),
    }


def _adapter(config: PlanConfig) -> dict[str, object]:
    """`lora` with what is not by default."""
    given, usual = dataclasses.asdict(config.lora), dataclasses.asdict(LoraConfig())
    changed = {key: value for key, value in given.items() if value != usual[key]}
    return {"lora": changed} if config.lora.rank else {}


def _of_turns(config: PlanConfig) -> list[str]:
    """What several turns were simulated with, as comments: the run's own tools decide."""
    w = config.workload
    if w.turns == 1:
        return []
    return [
        "# Give environment.tools, factory, agent or verifiers too.",
        f"# Simulated: up to {w.turns} turns, calls of {w.turn_seconds:g} s (median), sigma {w.turn_sigma:g} "
        f"of the log, {w.turn_tokens} tokens after each.",
    ]


def _limits(config: PlanConfig, slowest: int) -> dict[str, dict[str, object]]:
    """The limits on several turns that were simulated, and the batch's on the time of a trajectory."""
    turns = config.workload.turns
    if turns == 1:
        return {}
    limits = EnvironmentConfig(max_turns=turns, max_tool_calls=turns, max_seconds=float(slowest))
    keys = ("max_turns", "max_tool_calls", "timeout_seconds", "max_seconds")
    return {"environment": {key: getattr(limits, key) for key in keys}}


def _over_wide_area(config: PlanConfig, candidate: Candidate, figures: dict) -> dict[str, object]:
    """Relay settings where rollouts are in other places: changes only, and time for a copy in full."""
    if not away(config, candidate):
        return {}
    longest = math.ceil(_PATIENCE * max(figures["site_copy_seconds_max"], 15.0))
    return {"delta": "auto", "publish_timeout_seconds": longest}
