"""From the command line to a checked SimulationConfig: Hydra composes conf/simulation, wrong words are
refused in one line."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from laminar_hpc.config.bounds import wrong_values
from laminar_hpc.config.errors import LaminarError, Refused, did_you_mean
from laminar_hpc.config.load import compose_config, conf_directory
from laminar_hpc.config.models import known_models
from laminar_hpc.config.words import Keys
from laminar_hpc.simulator import bounds
from laminar_hpc.simulator.bounds import choice, numbers, refuse
from laminar_hpc.simulator.constants import DEFAULT, GPUS, GPUS_PER_MACHINE, MODELS, Constants
from laminar_hpc.simulator.cost import kv_capacity
from laminar_hpc.simulator.request import ENGINES
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.schema import PlanConfig, SimulationConfig
from laminar_hpc.simulator.trainer_fit import shards
from laminar_hpc.simulator.workload import read_lengths

Config = TypeVar("Config", SimulationConfig, PlanConfig)


def take_apart(
    arguments: list[str], command: str, what: str, names: list[str]
) -> tuple[str, list[str], bool]:
    """`NAME [key=value ...] [--json]`: the name, the overrides, and whether JSON is asked for. Raises
    LaminarError with the usage."""
    words = [word for word in arguments if word != "--json"]
    if not words or words[0].startswith("-") or "=" in words[0]:
        raise LaminarError(
            f"usage: laminar {command} {what.upper()} [key=value ...] [--json]; {what}s: {', '.join(names)}"
        )
    return words[0], words[1:], len(words) < len(arguments)


def experiments() -> list[str]:
    return _names("experiment")


def questions() -> list[str]:
    return _names("plan/question")


def _names(folder: str) -> list[str]:
    return sorted(path.stem for path in (conf_directory() / "simulation" / folder).glob("*.yaml"))


def _unknown(what: str, name: str, folder: str, names: list[str]) -> str:
    known = f"{', '.join(names)} in {conf_directory()}/simulation/{folder}"
    return f"no {what} '{name}'{did_you_mean(name, names)}: there are {known}"


def load(name: str, overrides: list[str]) -> SimulationConfig:
    """The experiment `name` of conf/simulation/experiment with overrides. Raises LaminarError that names what
    is wrong."""
    if name not in experiments():
        raise LaminarError(_unknown("simulation", name, "experiment", experiments()))
    config = _compose(SimulationConfig, "schema", "", {"experiment": name}, overrides)
    check(config)
    return config


def load_plan(name: str, overrides: list[str]) -> PlanConfig:
    """The question `name` of conf/simulation/plan/question with overrides. Raises LaminarError that names
    what is wrong."""
    if name not in questions():
        raise LaminarError(_unknown("plan", name, "plan/question", questions()))
    config = _compose(PlanConfig, "plan_schema", "plan", {"question": name}, overrides)
    check_plan(config)
    return config


def _compose(
    schema: type[Config], node: str, folder: str, group: dict[str, str], overrides: list[str]
) -> Config:
    keys = Keys(schema, {}, "src/laminar_hpc/simulator/schema.py")
    read = keys.read(overrides)
    if read.broken:
        raise Refused(read.wrong)
    read.groups = group
    config = compose_config(schema, node, conf_directory() / "simulation" / folder, keys, read)
    if read.wrong:
        raise Refused([*read.wrong, *wrong_values(config)])
    return config


def constants_of(config: SimulationConfig) -> Constants:
    return dataclasses.replace(DEFAULT, **config.constants)


def check(config: SimulationConfig) -> None:
    """Refuses what cannot be simulated: numbers beyond their bounds first, then what doesn't go together."""
    w = config.workload
    splits = [choice("splits", key.partition("@")[0], PIPELINES) for key in config.splits]
    splits += [
        bounds.SIMULATION["trainer_share"].refusal(f"splits.{key}", value)
        for key, value in config.splits.items()
    ]
    refuse(
        [
            choice("model", config.model, MODELS),
            choice("trainer_gpu", config.trainer_gpu, GPUS),
            choice("rollout_gpu", config.rollout_gpu, GPUS),
            choice("engine", config.engine, ENGINES),
            bounds.name(config.name),
            *(choice("pipelines", pipeline, PIPELINES) for pipeline in config.pipelines),
            "" if config.gpus else "gpus is empty: name at least one number of GPUs",
            "" if config.pipelines else f"pipelines is empty: name at least one of {', '.join(PIPELINES)}",
            *numbers(config, bounds.SIMULATION),
            *numbers(w, bounds.WORKLOAD, "workload."),
            *bounds.constants(config.constants),
            *splits,
        ]
    )
    refuse([*_work(config), *_replicas(config)])


def check_plan(config: PlanConfig) -> None:
    """Refuses what cannot be planned, in the same order."""
    pools = [
        text for i, pool in enumerate(config.pools) for text in numbers(pool, bounds.POOL, f"pools[{i}].")
    ]
    refuse(
        [
            choice("model", config.model, MODELS),
            choice("objective", config.objective, ("throughput", "cost")),
            bounds.name(config.name),
            *(choice("pools.gpu", pool.gpu, GPUS) for pool in config.pools),
            ""
            if config.pools
            else "pools is empty: name at least one, for example 'pools=[{gpu: H100, count: 8}]'",
            *numbers(config, bounds.PLAN),
            *pools,
            *numbers(config.workload, bounds.WORKLOAD, "workload."),
        ]
    )
    refuse([*_work(config), *_plannable(config)])


def _work(config: SimulationConfig | PlanConfig) -> Iterator[str]:
    w = config.workload
    yield from bounds.run_length(config.steps, config.warmup_steps, w.prompts_per_step * w.samples_per_prompt)
    if w.updates_per_step > w.prompts_per_step:
        yield (
            f"workload.updates_per_step={w.updates_per_step}: at most "
            f"workload.prompts_per_step={w.prompts_per_step}"
        )
    if w.lengths_file:
        longest = max(max(row) for row in read_lengths(Path(w.lengths_file)))
        if longest > w.max_response_tokens:
            yield (
                f"workload.lengths_file has a response of {longest} tokens: raise "
                f"workload.max_response_tokens={w.max_response_tokens}"
            )
    elif w.mean_response_tokens >= w.max_response_tokens:
        yield (
            f"workload.mean_response_tokens={w.mean_response_tokens:g} must lie between 1 and "
            f"workload.max_response_tokens={w.max_response_tokens}"
        )


def _replicas(config: SimulationConfig) -> Iterator[str]:
    w, model, c = config.workload, MODELS[config.model], constants_of(config)
    tensor_parallel = config.tensor_parallel or model.tensor_parallel
    if not shards(model, tensor_parallel):
        yield (
            f"tensor_parallel={tensor_parallel} does not divide the heads of {config.model}; use 1, 2 or 4, "
            "or 8 if it has as many"
        )
    capacity = kv_capacity(
        model, GPUS[config.rollout_gpu], tensor_parallel, min(c.kv_memory_share, c.kv_memory_share_colocated)
    )
    if capacity < w.longest:
        yield (
            f"{config.model} on {tensor_parallel} x {config.rollout_gpu} has room for {max(0, capacity)} KV "
            "tokens, the longest trajectory "
            f"has {w.longest}: raise tensor_parallel or lower workload.max_response_tokens"
        )
    for gpus in config.gpus:
        if gpus < 2 * tensor_parallel:
            yield (
                f"gpus={gpus}: at least {2 * tensor_parallel}, "
                f"one replica of {tensor_parallel} and as many to train"
            )


def _plannable(config: PlanConfig) -> Iterator[str]:
    """What a run would refuse, and machines that are not whole."""
    w, model = config.workload, known_models()[MODELS[config.model].hf]
    trajectories = w.prompts_per_step * w.samples_per_prompt
    if w.samples_per_prompt < 2:
        yield (
            f"workload.samples_per_prompt={w.samples_per_prompt}: a run needs at least 2, a group to take "
            "advantages over"
        )
    if trajectories % w.updates_per_step:
        yield (
            f"workload.updates_per_step={w.updates_per_step} does not divide the {trajectories} "
            "trajectories of a step, "
            "workload.prompts_per_step x workload.samples_per_prompt"
        )
    if w.longest > model["max_position_embeddings"]:
        yield (
            f"a trajectory of {w.longest} tokens exceeds the {model['max_position_embeddings']} positions "
            f"of {config.model}; lower it"
        )
    if config.name in {path.stem for path in (conf_directory() / "experiment").glob("*.yaml")}:
        yield (
            f"name={config.name}: conf/experiment has one of that name, "
            "which would go before the plan's; choose another"
        )
    for i, pool in enumerate(config.pools):
        if pool.count > GPUS_PER_MACHINE and pool.count % GPUS_PER_MACHINE:
            yield (
                f"pools[{i}].count={pool.count}: machines have {GPUS_PER_MACHINE} GPUs: give a multiple, or "
                "the rest a pool of its own"
            )
    if sum(pool.count for pool in config.pools) == 1:
        yield (
            "pools: one GPU cannot be divided; trainer and engine can share it in turns, as in laminar "
            "train experiment=one_gpu, "
            "with a model of 0.5B or so"
        )
