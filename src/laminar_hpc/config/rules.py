"""Which settings go together: every rule that takes more than one value, or the model's numbers, to tell.
Imports no torch.

What one value may be by itself stands in schema.py. Each rule is a pair (it is broken, what to say); the
values are within their bounds.
"""

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from laminar_hpc.config.algorithm import algorithm_rules
from laminar_hpc.config.schema import AlgorithmConfig, RunConfig

Rule = tuple[bool, str]
_NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
_VOCABULARY_MULTIPLE = 32  # trainer/megatron/building.py pads to it


def broken_rules(config: RunConfig, model: dict | None) -> list[str]:
    """One line per broken rule; without a model those that need its numbers are left out."""
    rules: list[Rule] = [
        *_source(config),
        *_data(config),
        *_archive(config),
        *_devices(config),
        *_sampling(config),
        *_rollout(config),
        *_environment(config),
        *_relay(config),
        *_pipeline(config),
        *_batch(config),
        *algorithm_rules(config),
        *(_model(config, model) if model is not None else ()),
    ]
    return [text for wrong, text in rules if wrong]


def _source(config: RunConfig) -> Iterator[Rule]:
    source, kind, folder = config.source, *config.source.partition(":")[::2]
    replay = kind == "replay" and ":" in source
    yield not replay and source != "rollout", f"source={source}: use rollout or replay:RUN_DIR"
    yield (
        replay and not (Path(folder) / "store.sqlite").exists(),
        f"source={source}: no store.sqlite in that run directory",
    )
    yield (
        replay and Path(folder).resolve() == Path(config.run_dir).resolve(),
        f"source={source} is run_dir itself: a replay is a run of its own; choose another run_dir",
    )
    yield (
        not config.run_dir.strip() or Path(config.run_dir).name in ("", ".."),  # `.` and `/` have no name
        f"run_dir={config.run_dir or '(empty)'}: name a folder of the run's own, for example runs/mine",
    )


def _data(config: RunConfig) -> Iterator[Rule]:
    data = config.data
    for name in ("chat_template_arguments", "system_prompt"):
        yield (
            bool(getattr(data, name)) and not data.chat_template,
            f"data.{name} needs data.chat_template=true: a prompt that is not rendered is the text as it is",
        )
    for name in ("messages", "tools", "documents", "add_generation_prompt"):
        text = f"data.chat_template_arguments.{name}: that is the run's to give; leave it out"
        yield name in data.chat_template_arguments, text
    yield (
        bool(data.system_prompt and config.environment.by_url),
        "data.system_prompt has no effect, as environment.agent and verifiers write their messages "
        "themselves; leave it out, and write it there",
    )


def _archive(config: RunConfig) -> Iterator[Rule]:
    yield (
        not re.fullmatch(r"all|(last|every):[1-9]\d{0,8}", config.archive),
        f"archive={config.archive}: use all, last:N or every:N, where N counts trainer steps",
    )


def _devices(config: RunConfig) -> Iterator[Rule]:
    size = max(1, config.rollout.tensor_parallel)
    for key, devices, of_one, whom in (
        ("trainer.devices", config.trainer.devices, len(config.trainer.devices or []), ""),
        ("rollout.devices", config.rollout.devices, size, " for a replica"),  # several may share a GPU
    ):
        parts = [devices[i : i + of_one] for i in range(0, len(devices), of_one)] if devices else []
        yield (
            devices is not None and (not devices or any(len(set(part)) != len(part) for part in parts)),
            f"{key}={devices}: name each GPU once{whom}, by its index from 0, or leave it at null",
        )


def _sampling(config: RunConfig) -> Iterator[Rule]:
    for name, neutral in _NEUTRAL.items():
        value = getattr(config.sampling, name)
        yield (
            value != neutral,
            f"sampling.{name}={value} is refused for training: the engine's log-probs "
            f"would not be those of the sampled distribution; leave it at {neutral}",
        )


def _rollout(config: RunConfig) -> Iterator[Rule]:
    least, replicas = config.rollout.replicas_min, config.rollout.replicas
    yield (
        least is not None and least > replicas,
        f"rollout.replicas_min={least} is more than rollout.replicas={replicas}: lower it, or leave it at "
        "null; more than rollout.replicas may join all the same",
    )


def _environment(config: RunConfig) -> Iterator[Rule]:
    e = config.environment
    given = [
        f"environment.{name}={_written(value)}"
        for name in ("factory", "tools", "agent", "verifiers")
        if (value := getattr(e, name))
    ]
    key = given[0] if given else ""
    yield (
        not all(isinstance(path, str) and path for path in e.factories.values()),
        f"environment.factory={_written(e.factory)}: write a class's dotted path, or several as "
        "{NAME: PATH}",
    )
    yield (
        len(given) > 1,
        f"{' and '.join(given)}: the factory's methods are its tools, and an agent has its own; leave "
        "all but one out",
    )
    yield (
        bool(e.verifiers) and not _names_a_taskset(e.verifiers),
        f"environment.verifiers={e.verifiers}: write a taskset's id, or verifiers' own table with it, "
        "{taskset: {id: ID}}",
    )
    yield (
        bool(e.verifiers and not e.python),
        "environment.verifiers needs environment.python: the interpreter of the virtual environment that has "
        "verifiers and the taskset",
    )
    yield (
        bool(e.python) and not given,
        f"environment.python={e.python} runs nothing: set environment.factory, tools, agent or verifiers "
        "too, or leave it out",
    )
    yield (
        e.history != "refuse" and not e.several,
        f"environment.history={e.history}: a trajectory has one turn; set environment.tools, factory, "
        "agent or verifiers too, or leave it out",
    )
    yield (
        e.several and not config.data.chat_template,
        f"{key} needs data.chat_template=true: what stands between turns is the model's template's",
    )
    yield (
        e.several and config.pipeline.refresh == "interrupt",
        f"{key} needs pipeline.refresh=drained or barrier, not interrupt: one trajectory keeps its policy "
        "over all its turns",
    )


def _names_a_taskset(given: object) -> bool:
    if isinstance(given, str):
        return True
    taskset = given.get("taskset") if isinstance(given, dict) else None
    return isinstance(taskset, dict) and isinstance(taskset.get("id"), str) and taskset["id"] != ""


def _written(value: object) -> str:
    """As on the command line."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{path}" for name, path in value.items()) + "}"
    return str(value)


def _relay(config: RunConfig) -> Iterator[Rule]:
    yield (
        config.relay.lanes > 1 and config.relay.slots < 3,
        f"relay.slots={config.relay.slots}: relay.lanes={config.relay.lanes} "
        "needs at least 3, as lanes may be on two ids at a time",
    )


def _pipeline(config: RunConfig) -> Iterator[Rule]:
    p, a = config.pipeline, config.algorithm
    yield (
        p.refresh == "barrier" and p.max_staleness is None,
        "pipeline.refresh=barrier needs a pipeline.max_staleness, 0 for turns or 1 for one step ahead: else "
        "nobody waits for the trainer",
    )
    yield (
        p.repack != "off" and p.refresh != "drained",
        f"pipeline.repack={p.repack} needs pipeline.refresh=drained, not {p.refresh}: only a replica that "
        "refreshes by itself gains by it",
    )
    yield (
        p.keep_kv and p.refresh != "interrupt",
        "pipeline.keep_kv=true needs pipeline.refresh=interrupt: otherwise no request outlives its weights",
    )
    yield (
        p.consumption == "stream"
        and (a.prompts_per_step % a.minibatches_per_step != 0 or config.source != "rollout"),
        f"pipeline.consumption=stream needs algorithm.prompts_per_step={a.prompts_per_step} divisible by "
        f"algorithm.minibatches_per_step={a.minibatches_per_step}, and source=rollout",
    )


def _batch(config: RunConfig) -> Iterator[Rule]:
    a, ranks = config.algorithm, config.trainer.data_parallel
    prompts, first, updates = a.prompts_per_step, a.first_samples, a.minibatches_per_step
    largest, smallest = prompts * a.samples_per_prompt, prompts * (first or 0)
    yield (
        first is not None and first > a.samples_per_prompt,
        f"algorithm.first_samples={first}: must be from 2 to "
        f"algorithm.samples_per_prompt={a.samples_per_prompt}, or null",
    )
    yield (
        first is None and a.more_samples != AlgorithmConfig.more_samples,
        f"algorithm.more_samples={a.more_samples} has no first samples to add to: set "
        "algorithm.first_samples too, or leave it out",
    )
    yield (
        first is not None and smallest < updates * ranks,
        f"algorithm.prompts_per_step={prompts} x algorithm.first_samples={first} = "
        f"{smallest} trajectories are fewer than algorithm.minibatches_per_step={updates} "
        f"x trainer.data_parallel={ranks}; raise first_samples",
    )
    yield (
        (first is None and largest % updates != 0) or largest // updates < ranks,
        f"algorithm.prompts_per_step={prompts} x algorithm.samples_per_prompt={a.samples_per_prompt} "
        f"= {largest} trajectories do not divide into algorithm.minibatches_per_step={updates} "
        f"x trainer.data_parallel={ranks}; change one of them",
    )
    longest = config.sampling.max_response_tokens
    yield (
        config.trainer.tokens_per_microbatch <= longest,
        f"trainer.tokens_per_microbatch={config.trainer.tokens_per_microbatch} cannot hold a prompt and "
        f"sampling.max_response_tokens={longest}; raise it",
    )
    yield (
        config.rollout.kv_cache_tokens <= longest,
        f"rollout.kv_cache_tokens={config.rollout.kv_cache_tokens} cannot hold one response of "
        f"sampling.max_response_tokens={longest}; raise it",
    )


def _model(config: RunConfig, model: dict) -> Iterator[Rule]:
    tensor, stages = config.trainer.tensor_parallel, config.trainer.pipeline_parallel
    heads, layers = model["num_attention_heads"], model["num_hidden_layers"]
    width = model["intermediate_size"]
    kv_heads = model.get("num_key_value_heads") or heads
    parts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": width}
    undivided = _first(f"{name}={value}" for name, value in parts.items() if value % tensor != 0)
    yield (
        bool(undivided),
        f"trainer.tensor_parallel={tensor} does not divide the model's "
        f"{undivided}; choose another, or scale with data_parallel",
    )
    yield (
        not undivided and _VOCABULARY_MULTIPLE % tensor != 0,
        f"trainer.tensor_parallel={tensor} does not divide {_VOCABULARY_MULTIPLE}, to which the vocabulary "
        "is padded; use a power of two",
    )
    yield (
        layers < stages,
        f"trainer.pipeline_parallel={stages} exceeds the "
        f"model's num_hidden_layers={layers}; use fewer stages",
    )
    # SGLang gives each rank whole query heads, whole KV heads (or several ranks the same one), and whole
    # columns of the MLP.
    ranks = config.rollout.tensor_parallel
    yield (
        heads % ranks != 0 or max(kv_heads, ranks) % min(kv_heads, ranks) != 0 or width % ranks != 0,
        f"rollout.tensor_parallel={ranks} does not divide the model's {heads} heads, {kv_heads} "
        f"key-value heads and intermediate size {width}; choose another, and scale with rollout.replicas",
    )
    positions = model.get("max_position_embeddings") or math.inf
    yield (
        config.sampling.max_response_tokens >= positions,
        f"sampling.max_response_tokens={config.sampling.max_response_tokens} does "
        f"not leave room for a prompt in the model's {positions} positions; lower it",
    )


def _first(texts: Iterable[str]) -> str:
    return next(iter(texts), "")
