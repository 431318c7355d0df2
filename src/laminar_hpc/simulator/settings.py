"""From the command line to a checked SimulationConfig: Hydra composes, wrong words get one line."""

import dataclasses
import errno
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from laminar_hpc.config.bounds import wrong_values
from laminar_hpc.config.directories import conf_directory
from laminar_hpc.config.errors import LaminarError, Refused, did_you_mean
from laminar_hpc.config.load import compose_config
from laminar_hpc.config.models import TRAINED
from laminar_hpc.config.options import take_config_dir
from laminar_hpc.config.words import Keys, Words
from laminar_hpc.simulator import tables
from laminar_hpc.simulator.constants import DEFAULT, Constants
from laminar_hpc.simulator.cost import kv_capacity
from laminar_hpc.simulator.lora import wrong_adapter
from laminar_hpc.simulator.one_gpu import is_one_gpu, shared_trainers
from laminar_hpc.simulator.plan_refusal import why_nothing_fits
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.schema import PlanConfig, PoolConfig, SimulationConfig, WorkloadConfig
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.trainer_fit import serves
from laminar_hpc.simulator.workload import read_lengths

Config = TypeVar("Config", SimulationConfig, PlanConfig)
_TRAJECTORIES_MAX = 20_000_000  # of a simulated run, some 20 us each
# a plan's GPUs have a type, and there may be several
_INSTEAD = dict.fromkeys(
    ("gpus", "trainer_gpu", "rollout_gpu", *(field.name for field in dataclasses.fields(PoolConfig))),
    "GPUs are named in pools, for example 'pools=[{gpu: H100, count: 4}]', with the keys "
    + ", ".join(field.name for field in dataclasses.fields(PoolConfig)),
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def say(line: str) -> None:
    """Tells the user how far the work has come, apart from what the command prints."""
    print(line, file=sys.stderr, flush=True)


def experiments() -> list[str]:
    return _names("experiment")


def questions() -> list[str]:
    return _names("plan/question")


def key_names(schema: type[SimulationConfig] | type[PlanConfig]) -> str:
    """What may be set, for a line."""
    return ", ".join(field.name for field in dataclasses.fields(schema)) + " (docs/simulator.md)"


def help_of(command: str) -> str:
    """What `--help` of `laminar sim` or `laminar plan` says behind the options."""
    schema, first, names = (
        (SimulationConfig, "EXPERIMENT", experiments())
        if command == "sim"
        else (PlanConfig, "QUESTION", questions())
    )
    words = f"{first} is one of {', '.join(names)}. RUN_DIR is a finished run, which takes no keys."
    return f"{words}\nkeys: {key_names(schema)}"


def _names(folder: str) -> list[str]:
    return sorted(path.stem for path in (conf_directory() / "simulation" / folder).glob("*.yaml"))


def load_simulation(name: str, overrides: list[str]) -> SimulationConfig:
    """The experiment `name` of conf/simulation/experiment with overrides, `--config-dir DIR` among them for
    tables and experiments of one's own. Raises LaminarError that names what is wrong."""
    config = _load(SimulationConfig, "simulation", "experiment", name, overrides)
    check(config)
    return config


def load_plan(name: str, overrides: list[str]) -> PlanConfig:
    """The question `name` of conf/simulation/plan/question, as `load_simulation`."""
    config = _load(PlanConfig, "plan", "plan/question", name, overrides)
    check_plan(config)
    return config


def _load(schema: type[Config], what: str, folder: str, name: str, overrides: list[str]) -> Config:
    """`name`: a file of `folder`; its schema and those of its group's folder are composed with it."""
    own, words = take_config_dir(overrides)
    shipped = conf_directory() / "simulation"
    known: list[str] = _names(folder)
    yours: list[str] = []
    parent, _, group = folder.rpartition("/")
    there = f"{', '.join(known)} in {shipped}/{folder}"
    if own is not None:
        yours = sorted(path.stem for path in (own / group).glob("*.yaml"))
        there += f"; {', '.join(yours) or 'none'} in {own / group}"
    if own is not None and ((own / "tables").exists() or not yours):
        tables.add(own / "tables")
    if name not in (*known, *yours):
        raise LaminarError(f"no {what} '{name}'{did_you_mean(name, [*known, *yours])}: there are {there}")
    keys = Keys(schema, {}, key_names(schema), _INSTEAD if schema is PlanConfig else {})
    read: Words = keys.read(words)
    if read.broken:
        raise Refused(read.wrong)
    read.groups = {group: name}
    node = "plan_schema" if parent else "schema"
    config: Config = compose_config(schema, node, shipped / parent, keys, read, own)
    if read.wrong:
        raise Refused([*read.wrong, *wrong_values(config)])
    if config.model not in MODELS and (Path(config.model) / "config.json").exists():
        tables.add_directory(config.model)
    return config


def constants_of(config: SimulationConfig) -> Constants:
    """The calibrated constants with the configuration's changes."""
    return dataclasses.replace(DEFAULT, **config.constants)


def check(config: SimulationConfig) -> None:
    """Refuses what cannot be simulated: values beyond their bounds first, then what doesn't go together."""
    names = [key.partition("@")[0] for key in config.splits]
    _refuse(
        [
            *wrong_values(config),
            _wrong_name(config.name),
            "" if config.gpus else "gpus is empty: name at least one number of GPUs",
            "" if config.pipelines else f"pipelines is empty: name at least one of {', '.join(PIPELINES)}",
            *_wrong_constants(config.constants),
            *(_unknown_entry("splits", name, PIPELINES) for name in names),
        ]
    )
    _refuse(
        [
            *_work(config),
            *_replicas(config),
            *_elsewhere(config),
            *_places("sites", config.sites),
            _bound(config),
        ]
    )


def check_plan(config: PlanConfig) -> None:
    """Refuses what cannot be planned, in the same order."""
    example = "name at least one, for example 'pools=[{gpu: H100, count: 8}]'"
    _refuse(
        [
            *wrong_values(config),
            _wrong_name(config.name),
            "" if config.pools else f"pools is empty: {example}",
        ]
    )
    _refuse([*_work(config), *_plannable(config), *_places("pools", config.pools), *_of_cost(config)])


def output_folder(config: SimulationConfig | PlanConfig, default: str) -> Path:
    """Where files go, made here. Raises LaminarError where that cannot be."""
    folder = Path(config.out_dir or default)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        why = error.strerror
        raise LaminarError(f"out_dir={folder}: cannot be written ({why}); choose another") from None
    return folder


def _refuse(wrong: Iterable[str]) -> None:
    """Raises Refused with all sentences that are not empty, each once."""
    if lines := list(dict.fromkeys(text for text in wrong if text)):
        raise Refused(lines)


def _wrong_name(value: str) -> str:
    if _NAME.fullmatch(value):
        return ""
    return f"name={value!r}: use letters, digits, '.', '_' and '-', at most 64, for files have it"


def _unknown_entry(key: str, name: str, known: Collection[str]) -> str:
    """A sentence that lists the entries a table may have, and the nearest one; empty for one of them."""
    if name in known:
        return ""
    return f"{key}={name}: use one of {', '.join(known)}{did_you_mean(name, known)}"


def _wrong_constants(values: dict[str, float]) -> Iterator[str]:
    """A sentence for each constant that does not exist or lies beyond its bounds."""
    known = [field.name for field in dataclasses.fields(Constants)]
    yield from (_unknown_entry("constants", name, known) for name in values)
    there = {name: value for name, value in values.items() if name in known}
    yield from wrong_values(dataclasses.replace(DEFAULT, **there), "constants.")


def _work(config: SimulationConfig | PlanConfig) -> Iterator[str]:
    w = config.workload
    trajectories = w.prompts_per_step * w.samples_per_prompt
    if config.warmup_steps >= config.steps:
        yield f"warmup_steps={config.warmup_steps} must be at least 0 and below steps={config.steps}"
    if config.steps * trajectories > _TRAJECTORIES_MAX:
        yield (
            f"steps={config.steps} of {trajectories:,} trajectories are more than the {_TRAJECTORIES_MAX:,} "
            "that are simulated in minutes: lower steps, workload.prompts_per_step or "
            "workload.samples_per_prompt"
        )
    if w.updates_per_step > w.prompts_per_step:
        yield (
            f"workload.updates_per_step={w.updates_per_step}: at most "
            f"workload.prompts_per_step={w.prompts_per_step}"
        )
    yield from _turns(w)
    if w.lengths_file and w.growth:
        yield f"workload.growth={w.growth:g}: those of workload.lengths_file do not grow; give one of them"
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


def _turns(w: WorkloadConfig) -> Iterator[str]:
    """Turns without calls, and calls without turns, would change nothing."""
    keys = ("turn_seconds", "turn_sigma", "turn_tokens", "turn_hung")
    given = ", ".join(f"workload.{key}" for key in keys if getattr(w, key))
    if w.turns == 1 and given:
        yield f"{given}: of the calls between turns, and workload.turns=1 has none; raise it"
    elif w.turns > 1 and not (w.turn_seconds or w.turn_tokens or w.turn_hung):
        yield (
            f"workload.turns={w.turns}: nothing happens between turns; give workload.turn_seconds or "
            "workload.turn_tokens, for example 2.0 and 256, those of the experiment tools"
        )
    elif w.turn_sigma and not w.turn_seconds:
        yield f"workload.turn_sigma={w.turn_sigma:g}: the spread of workload.turn_seconds; give that too"


def _bound(config: SimulationConfig) -> str:
    names = config.pipelines
    if config.max_staleness is None or any(PIPELINES[name].max_staleness != 0 for name in names):
        return ""
    always = f"that of {', '.join(names)} is always 0"
    return f"max_staleness={config.max_staleness:g}: {always}; name another pipeline"


def _of_cost(config: PlanConfig) -> Iterator[str]:
    keys = {"trainer_busy": PlanConfig.trainer_busy, "least_throughput": PlanConfig.least_throughput}
    for key, default in keys.items() if config.objective != "cost" else ():
        if (value := getattr(config, key)) not in (0, default):  # 0 asks for nothing
            yield f"{key}={value:g}: says what the cheapest GPUs must reach; give objective=cost too"


def _replicas(config: SimulationConfig) -> Iterator[str]:
    model, c = MODELS[config.model], constants_of(config)
    tensor_parallel = config.replica_gpus
    yield from wrong_adapter(model, config.lora)
    if config.speculation and not config.cuda_graphs:
        yield "speculation=true needs cuda_graphs=true: without them a guess's cost is not known"
    if not serves(model, tensor_parallel):
        yield (
            f"tensor_parallel={tensor_parallel} does not divide the heads of {config.model}; use 1, 2 or 4, "
            "or 8 if it has as many"
        )
    names = [name for name in config.pipelines if PIPELINES[name].placement == "colocated"]
    colocated = len(names) if config.trainer_gpu == config.rollout_gpu else 0
    split = colocated < len(config.pipelines)
    yield from _kv_room(
        config, min([c.kv_memory_share_colocated] * bool(colocated) + [c.kv_memory_share] * split)
    )
    least = (2 if split else 1) * tensor_parallel
    what = f"one replica of {tensor_parallel}" + (" and as many to train" if split else ", which trains too")
    for gpus in config.gpus:
        each = "" if config.trainer_groups == 1 else f" for each of {config.trainer_groups} trainer_groups"
        if gpus < least * config.trainer_groups:
            yield f"gpus={gpus}: at least {least}{each}, {what}"
        elif gpus % config.trainer_groups:
            yield f"gpus={gpus}: must be a multiple of trainer_groups={config.trainer_groups}"


def _kv_room(config: SimulationConfig, share: float) -> Iterator[str]:
    """GPU types on which a replica's `share` of the memory does not hold the longest trajectory."""
    w, model, tensor = config.workload, MODELS[config.model], config.replica_gpus
    for gpu in dict.fromkeys([config.rollout_gpu, *(site.gpu for site in config.sites)]):
        alone, beside = (
            kv_capacity(model, GPUS[gpu], tensor, share, requests) for requests in (0, config.max_concurrent)
        )
        where = f"{config.model} on {tensor} x {gpu} has room for"
        if alone < w.longest:
            yield (
                f"{where} {max(0, alone)} KV tokens, the longest trajectory has {w.longest}: raise "
                "tensor_parallel or lower workload.max_response_tokens"
            )
        elif beside < w.longest:
            yield (
                f"{where} {max(0, beside)} KV tokens beside the states of max_concurrent="
                f"{config.max_concurrent} requests, the longest trajectory has {w.longest}: lower it"
            )


def _elsewhere(config: SimulationConfig) -> Iterator[str]:
    """What sites do not go together with."""
    for name in config.pipelines if config.sites else []:
        if not PIPELINES[name].relays:
            known = ", ".join(key for key, rules in PIPELINES.items() if rules.relays)
            yield f"sites: weights reach them through relays, which {name} has none of; use {known}"
    replica = config.replica_gpus * config.trainer_groups
    for i, site in enumerate(config.sites):
        if site.price is not None:
            yield f"sites[{i}].price={site.price:g}: a simulation has no prices; ask `laminar plan`"
        if site.preemptible and site.mtbf_hours is None:
            yield f"sites[{i}].preemptible=true: give mtbf_hours too, the mean time until it is taken"
        if site.count % replica:
            yield (
                f"sites[{i}].count={site.count}: must be a multiple of {replica}, the GPUs of a replica"
                + (" for each of the trainer_groups" if config.trainer_groups > 1 else "")
            )


def _places(key: str, pools: list[PoolConfig]) -> Iterator[str]:
    """Settings of a pool that say nothing without another one."""
    for i, pool in enumerate(pools):
        if pool.grace_seconds and not (pool.preemptible and pool.mtbf_hours):
            yield (
                f"{key}[{i}].grace_seconds={pool.grace_seconds:g}: a notice comes before a preemption; give "
                "preemptible=true and mtbf_hours too"
            )
        if (pool.wan_milliseconds or pool.wan_loss) and pool.wan_gbps is None:
            yield f"{key}[{i}]: wan_milliseconds and wan_loss are of a link; give its wan_gbps too"


def _plannable(config: PlanConfig) -> Iterator[str]:
    """What a run would refuse, and machines that are not whole."""
    w, model = config.workload, MODELS[config.model].config
    yield from wrong_adapter(MODELS[config.model], config.lora)
    if model["model_type"] not in TRAINED:
        yield (
            f"model={config.model} is of the family {model['model_type']}, which can be simulated but not "
            f"planned: use one of {', '.join(TRAINED)}"
        )
    trajectories = w.prompts_per_step * w.samples_per_prompt
    if w.samples_per_prompt < 2:
        yield (
            f"workload.samples_per_prompt={w.samples_per_prompt}: a run needs at least 2, a group to take "
            "advantages over"
        )
    if trajectories % w.updates_per_step:
        yield (
            f"workload.updates_per_step={w.updates_per_step} does not divide the {trajectories} trajectories "
            "of a step, workload.prompts_per_step x workload.samples_per_prompt"
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
        machine = GPUS[pool.gpu].machine
        if pool.count > machine and pool.count % machine:
            yield (
                f"pools[{i}].count={pool.count}: machines have {machine} GPUs: give a multiple, or "
                "the rest a pool of its own"
            )
    if is_one_gpu(config) and not shared_trainers(config):
        yield why_nothing_fits(config)
