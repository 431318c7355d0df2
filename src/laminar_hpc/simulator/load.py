"""From the command line to a checked SimulationConfig: Hydra composes conf/simulation, wrong words are refused in one line."""

import dataclasses
from typing import TypeVar

from laminar_hpc.config.bounds import wrong_values
from laminar_hpc.config.errors import LaminarError, Refused, did_you_mean
from laminar_hpc.config.load import compose_config, conf_directory
from laminar_hpc.config.words import Keys
from laminar_hpc.simulator.constants import DEFAULT, GPUS, MODELS, Constants
from laminar_hpc.simulator.cost import kv_capacity
from laminar_hpc.simulator.request import ENGINES
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.schema import PlanConfig, SimulationConfig, WorkloadConfig
from laminar_hpc.simulator.workload import mu_of_mean

Config = TypeVar("Config", SimulationConfig, PlanConfig)


def take_apart(arguments: list[str], command: str, what: str, names: list[str]) -> tuple[str, list[str], bool]:
    """`NAME [key=value ...] [--json]`: the name, the overrides, and whether JSON is asked for. Raises LaminarError with the usage."""
    words = [word for word in arguments if word != "--json"]
    if not words or words[0].startswith("-") or "=" in words[0]:
        raise LaminarError(f"usage: laminar {command} {what.upper()} [key=value ...] [--json]; {what}s: {', '.join(names)}")
    return words[0], words[1:], len(words) < len(arguments)


def experiments() -> list[str]:
    return _names("experiment")


def questions() -> list[str]:
    return _names("plan/question")


def _names(folder: str) -> list[str]:
    return sorted(path.stem for path in (conf_directory() / "simulation" / folder).glob("*.yaml"))


def load(name: str, overrides: list[str]) -> SimulationConfig:
    """The experiment `name` of conf/simulation/experiment with overrides. Raises LaminarError that names what is wrong."""
    if name not in experiments():
        near = did_you_mean(name, experiments())
        known = f"{', '.join(experiments())} in {conf_directory()}/simulation/experiment"
        raise LaminarError(f"no simulation '{name}'{near}: there are {known}")
    config = _compose(SimulationConfig, "schema", "", {"experiment": name}, overrides)
    check(config)
    return config


def load_plan(name: str, overrides: list[str]) -> PlanConfig:
    """The question `name` of conf/simulation/plan/question with overrides. Raises LaminarError that names what is wrong."""
    if name not in questions():
        near = did_you_mean(name, questions())
        raise LaminarError(f"no plan '{name}'{near}: there are {', '.join(questions())} in {conf_directory()}/simulation/plan/question")
    config = _compose(PlanConfig, "plan_schema", "plan", {"question": name}, overrides)
    _known("model", config.model, MODELS)
    _known("objective", config.objective, ("throughput", "cost"))
    for pool in config.pools:
        _known("pools.gpu", pool.gpu, GPUS)
        if pool.count < 1:
            raise LaminarError(f"pools: {pool.count} x {pool.gpu}: at least 1")
    _check_run(config.steps, config.warmup_steps, config.max_concurrent, config.workload)
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
    if wrong := [*read.wrong, *wrong_values(config)]:
        raise Refused(wrong)
    return config


def constants_of(config: SimulationConfig) -> Constants:
    return dataclasses.replace(DEFAULT, **config.constants)


def _known(key: str, value: str, known: object) -> None:
    names = list(known)  # type: ignore[call-overload]
    if value not in names:
        raise LaminarError(f"{key}={value}: use one of {', '.join(names)}{did_you_mean(value, names)}")


def check(config: SimulationConfig) -> None:
    """Refuses what cannot be simulated."""
    _known("model", config.model, MODELS)
    _known("trainer_gpu", config.trainer_gpu, GPUS)
    _known("rollout_gpu", config.rollout_gpu, GPUS)
    _known("engine", config.engine, ENGINES)
    for pipeline in config.pipelines:
        _known("pipelines", pipeline, PIPELINES)
    for name in config.constants:
        _known("constants", name, [field.name for field in dataclasses.fields(Constants)])
    if not config.gpus:
        raise LaminarError("gpus is empty: name at least one number of GPUs")
    _check_run(config.steps, config.warmup_steps, config.max_concurrent, config.workload)
    w = config.workload
    model, c = MODELS[config.model], constants_of(config)
    tensor_parallel = config.tensor_parallel or model.tensor_parallel
    capacity = kv_capacity(model, GPUS[config.rollout_gpu], tensor_parallel, min(c.kv_memory_share, c.kv_memory_share_colocated))
    if capacity < w.longest:
        raise LaminarError(
            f"{config.model} on {tensor_parallel} x {config.rollout_gpu} has room for {max(0, capacity)} KV tokens, the longest trajectory "
            f"has {w.longest}: raise tensor_parallel or lower workload.max_response_tokens"
        )
    for gpus in config.gpus:
        if gpus < 2 * tensor_parallel:
            raise LaminarError(f"gpus={gpus}: at least {2 * tensor_parallel}, one replica of {tensor_parallel} and as many to train")


def _check_run(steps: int, warmup_steps: int, max_concurrent: int, w: WorkloadConfig) -> None:
    if not 0 <= warmup_steps < steps:
        raise LaminarError(f"warmup_steps={warmup_steps} must be at least 0 and below steps={steps}")
    if min(w.prompts_per_step, w.samples_per_prompt, w.updates_per_step, w.turns, w.max_response_tokens, max_concurrent) < 1:
        raise LaminarError("prompts_per_step, samples_per_prompt, updates_per_step, turns, max_response_tokens, max_concurrent: at least 1")
    if w.updates_per_step > w.prompts_per_step:
        raise LaminarError(f"workload.updates_per_step={w.updates_per_step}: at most workload.prompts_per_step={w.prompts_per_step}")
    if not 0 <= w.group_correlation <= 1 or w.sigma <= 0:
        raise LaminarError("workload.group_correlation must lie between 0 and 1, workload.sigma be above 0")
    mu_of_mean(w.mean_response_tokens, w.sigma, w.max_response_tokens)
