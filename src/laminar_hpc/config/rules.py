"""Which settings go together: every rule that takes more than one value, or the model's numbers, to tell.
Imports no torch.

What one value may be by itself stands in schema.py. A rule that is broken yields what to say, in which `@KEY`
stands for KEY=VALUE; the values are within their bounds. The formulas of `algorithm` are in
trainer/algorithms/.
"""

import math
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laminar_hpc.config.bounds import shown
from laminar_hpc.config.critic import wrong_critic
from laminar_hpc.config.determinism import wrong_determinism
from laminar_hpc.config.experts import experts_of
from laminar_hpc.config.layout_rules import wrong_expert_layout, wrong_layout
from laminar_hpc.config.learning_schema import AlgorithmConfig
from laminar_hpc.config.objectives import SEQUENCE_LOSSES, WEIGHTS, is_own, wrong_options
from laminar_hpc.config.routing import wrong_replay
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.scraping import wrong_scraping
from laminar_hpc.config.teachers import wrong_teachers

_NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}


def broken_rules(config: RunConfig, model: dict | None) -> list[str]:
    """One line per broken rule; without a model those that need its numbers are left out."""

    def written(match: re.Match[str]) -> str:
        value: Any = config
        for name in match[1].split("."):
            value = getattr(value, name)
        return f"{match[1]}={_written(value)}"

    parts = [_source, _data, _devices, _sampling, _rollout, _places, _environment, _pipeline, _batch]
    parts += [_loss, _corrections, _rewards, _advantages, _schedule]
    texts = [text for part in parts for text in part(config)]
    texts += wrong_scraping(config)
    texts += [*wrong_teachers(config, model), *wrong_critic(config, model), *wrong_determinism(config)]
    if model is not None:
        experts = experts_of(model)
        texts += [*wrong_layout(config, model), *wrong_expert_layout(config, experts)]
        texts += wrong_replay(config, experts)
    return [re.sub(r"@([\w.]*\w)", written, text) for text in texts]


def _source(config: RunConfig) -> Iterator[str]:
    kind, colon, folder = config.source.partition(":")
    replay = kind == "replay" and bool(colon)
    if not replay and config.source != "rollout":
        yield "@source: use rollout or replay:RUN_DIR"
    if replay and not (Path(folder) / "store.sqlite").exists():
        yield "@source: no store.sqlite in that run directory"
    if replay and Path(folder).resolve() == Path(config.run_dir).resolve():
        yield "@source is run_dir itself: a replay is a run of its own; choose another run_dir"
    if not config.run_dir.strip() or Path(config.run_dir).name in ("", ".."):  # `.` and `/` have no name
        yield "@run_dir: name a folder of the run's own, for example runs/mine"
    if not re.fullmatch(r"all|(last|every):[1-9]\d{0,8}", config.archive):
        yield "@archive: use all, last:N or every:N, where N counts trainer steps"


def _data(config: RunConfig) -> Iterator[str]:
    data = config.data
    for name in ("chat_template_arguments", "system_prompt"):
        if getattr(data, name) and not data.chat_template:
            why = "without it a prompt is used as it is"
            yield f"data.{name} needs data.chat_template=true: {why}"
    for name in ("messages", "tools", "documents", "add_generation_prompt"):
        if name in data.chat_template_arguments:
            yield f"data.chat_template_arguments.{name}: the run sets it; leave it out"
    if data.system_prompt and config.environment.by_url:
        yield (
            "data.system_prompt has no effect, because environment.agent and verifiers write their own "
            "messages; leave it out, and set it there"
        )


def _devices(config: RunConfig) -> Iterator[str]:
    size = max(1, config.rollout.tensor_parallel)
    for key, devices, of_one, whom in (
        ("trainer.devices", config.trainer.devices, len(config.trainer.devices or []), ""),
        ("rollout.devices", config.rollout.devices, size, " for a replica"),  # several may share a GPU
    ):
        parts = [devices[i : i + of_one] for i in range(0, len(devices), of_one)] if devices else []
        if devices is not None and (not devices or any(len(set(part)) != len(part) for part in parts)):
            yield f"@{key}: name each GPU once{whom}, by its index from 0, or leave it at null"


def _sampling(config: RunConfig) -> Iterator[str]:
    why = "the engine's log-probs would not be those of the sampled distribution"
    for name, neutral in _NEUTRAL.items():
        if getattr(config.sampling, name) != neutral:
            yield f"@sampling.{name} is refused for training: {why}; leave it at {neutral}"


def _rollout(config: RunConfig) -> Iterator[str]:
    if config.rollout.replicas_min is not None and config.rollout.replicas_min > config.rollout.fewest:
        yield (
            "@rollout.replicas_min is more than @rollout.replicas: lower it, or leave it at null; more than "
            "rollout.replicas may join anyway"
        )
    notice = config.cluster.preemption_notice
    if notice is not None and not notice.startswith(("/", "http://", "https://")):
        yield "@cluster.preemption_notice: write an absolute path, or an address with http:// or https://"
    yield from _scaling(config)
    if config.relay.lanes > 1 and config.relay.slots < 3:
        yield "@relay.slots: @relay.lanes needs at least 3, as lanes may be on two ids at a time"


def _places(config: RunConfig) -> Iterator[str]:
    port = re.fullmatch(r"(?:[\w.-]+:)?(\d{1,5})", config.relay.gate)
    if config.relay.gate and (port is None or int(port[1]) >= 1 << 16):
        yield "@relay.gate: write [HOST:]PORT, as in 7443 or gate.example.org:7443"
    if config.cluster.place and config.role not in ("relay", "rollout"):
        yield "@cluster.place is that of a machine which only has rollouts and relays: leave it out for @role"
    if config.cluster.place and config.relay.lanes > 1:
        yield "@relay.lanes: @cluster.place gets one stream for all of its machines; set relay.lanes=1 there"


def _scaling(config: RunConfig) -> Iterator[str]:
    rollout, command = config.rollout, config.cluster.scale_command
    if not rollout.scales:
        if command:
            yield "@cluster.scale_command has no effect with @rollout.replicas; write MIN:MAX"
        return
    if config.source.startswith("replay:"):
        yield "@rollout.replicas: a replay has no rollouts; leave it out"
    if not command:
        return
    try:
        words = shlex.split(command)
    except ValueError as error:
        yield f"@cluster.scale_command cannot be read as words: {error}"
        return
    if not words or not (config.dry_run or shutil.which(words[0])):
        yield "@cluster.scale_command: no such program here, or it may not be executed"


def _environment(config: RunConfig) -> Iterator[str]:
    e = config.environment
    given = [
        f"@environment.{name}" for name in ("factory", "tools", "agent", "verifiers") if getattr(e, name)
    ]
    key = given[0] if given else ""
    if not all(isinstance(path, str) and path for path in e.factories.values()):
        yield "@environment.factory: write a class's dotted path, or several as {NAME: PATH}"
    if len(given) > 1:
        why = "the factory's methods are its tools, and an agent has its own"
        yield f"{' and '.join(given)}: {why}; leave all but one out"
    if e.verifiers and not _names_a_taskset(e.verifiers):
        yield (
            "@environment.verifiers: write a taskset's id, or verifiers' own table with it, "
            "{taskset: {id: ID}}"
        )
    if e.verifiers and not e.python:
        yield (
            "environment.verifiers needs environment.python: the interpreter of the virtual environment that "
            "has verifiers and the taskset"
        )
    if e.python and not given:
        more = "set environment.factory, tools, agent or verifiers too, or leave it out"
        yield f"@environment.python runs nothing: {more}"
    if e.history != "refuse" and not e.several:
        more = "set environment.tools, factory, agent or verifiers too, or leave it out"
        yield f"@environment.history: a trajectory has one turn; {more}"
    if e.several and not config.data.chat_template:
        yield f"{key} needs data.chat_template=true: the model's template writes what is between turns"
    if e.several and config.pipeline.refresh == "interrupt":
        why = "one trajectory keeps its policy over all its turns"
        yield f"{key} needs pipeline.refresh=drained or barrier, not interrupt: {why}"


def _names_a_taskset(given: object) -> bool:
    if isinstance(given, str):
        return True
    taskset = given.get("taskset") if isinstance(given, dict) else None
    return isinstance(taskset, dict) and isinstance(taskset.get("id"), str) and taskset["id"] != ""


def _written(value: object) -> str:
    """Writes a value as the command line has it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{path}" for name, path in value.items()) + "}"
    return shown(value)


def _pipeline(config: RunConfig) -> Iterator[str]:
    p, a = config.pipeline, config.algorithm
    if p.refresh == "barrier" and p.max_staleness is None:
        yield (
            "@pipeline.refresh needs a pipeline.max_staleness, 0 for turns or 1 for one step ahead: else "
            "nobody waits for the trainer"
        )
    if p.refresh == "versions" and config.model.lora.rank == 0:
        cure = "set model.lora.rank, for example 16, or take pipeline=laminar"
        yield f"@pipeline.refresh holds several adapters at once, and model.lora.rank=0 has none: {cure}"
    if p.refresh == "versions" and p.max_staleness is None:
        yield (
            "@pipeline.refresh needs a pipeline.max_staleness, for example 2: an engine holds that many "
            "adapters and two more"
        )
    if p.repack in ("kv", "reprefill") and p.refresh not in ("drained", "versions"):
        why = "only a replica that refreshes by itself gains by it"
        yield f"@pipeline.repack needs pipeline.refresh=drained or versions, not {p.refresh}: {why}"
    if p.keep_kv and p.refresh != "interrupt":
        why = "otherwise no request outlives its weights"
        yield f"pipeline.keep_kv=true needs pipeline.refresh=interrupt: {why}"
    if p.keep_kv and config.model.lora.rank:
        why = "a running request stays with the adapter that it names"
        yield f"pipeline.keep_kv=true does not go with @model.lora.rank: {why}; set it to false"
    undivided = a.prompts_per_step % a.minibatches_per_step != 0
    if p.consumption == "stream" and (undivided or config.source != "rollout"):
        yield (
            "@pipeline.consumption needs @algorithm.prompts_per_step divisible by "
            "@algorithm.minibatches_per_step, and source=rollout"
        )


def _batch(config: RunConfig) -> Iterator[str]:
    a, ranks = config.algorithm, config.trainer.data_parallel
    prompts, first, updates = a.prompts_per_step, a.first_samples, a.minibatches_per_step
    largest, smallest = prompts * a.samples_per_prompt, prompts * (first or 0)
    shares = "@algorithm.minibatches_per_step x @trainer.data_parallel"
    if first is not None and first > a.samples_per_prompt:
        yield "@algorithm.first_samples: must be from 2 to @algorithm.samples_per_prompt, or null"
    if first is None and a.more_samples != AlgorithmConfig.more_samples:
        more = "set algorithm.first_samples too, or leave it out"
        yield f"@algorithm.more_samples has no first samples to add to: {more}"
    if first is not None and smallest < updates * ranks:
        some = f"@algorithm.prompts_per_step x @algorithm.first_samples = {smallest} trajectories"
        yield f"{some} are fewer than {shares}; raise first_samples"
    if (first is None and largest % updates != 0) or largest // updates < ranks:
        some = f"@algorithm.prompts_per_step x @algorithm.samples_per_prompt = {largest} trajectories"
        yield f"{some} do not divide into {shares}; change one of them"
    longest = "@sampling.max_response_tokens; raise it"
    if config.trainer.pack_tokens <= config.sampling.max_response_tokens:
        several = " x @trainer.context_parallel" if config.trainer.context_parallel > 1 else ""
        yield f"@trainer.tokens_per_microbatch{several} cannot hold a prompt and {longest}"
    if config.rollout.kv_cache_tokens <= config.sampling.max_response_tokens:
        yield f"@rollout.kv_cache_tokens cannot hold one response of {longest}"


def _loss(config: RunConfig) -> Iterator[str]:
    """Yields what is wrong with the loss and its importance ratios."""
    a = config.algorithm
    least, most = a.sequence_ratio_min or 0.0, a.sequence_ratio_max
    yield from wrong_options(a.options, [a.advantage, a.loss, *a.corrections])
    if a.clip_dual is not None and a.loss != "clip" and not is_own(a.loss):
        yield f"@algorithm.clip_dual belongs to algorithm.loss=clip, not {a.loss}"
    if a.clip_dual is not None and not a.clip_dual > 1 + a.clip_high:
        yield "@algorithm.clip_dual: must be above 1 + clip_high, for example 3"
    if a.loss in SEQUENCE_LOSSES and a.loss_aggregation != "sequences":
        cure = f"set algorithm.loss_aggregation=sequences, not {a.loss_aggregation}"
        yield f"@algorithm.loss has one ratio per sequence: {cure}"
    if a.loss == "aipo" and a.importance_weight_cap is None:
        yield "@algorithm.loss truncates its weights: set algorithm.importance_weight_cap, for example 5"
    if a.loss == "aipo" and a.proximal != "behaviour":
        cure = f"set algorithm.proximal=behaviour, not {a.proximal}"
        yield f"@algorithm.loss weighs against the behaviour policy itself: {cure}"
    capped = a.loss == "aipo" or any(is_own(name) for name in (a.loss, *a.corrections))
    if a.importance_weight_cap is not None and a.proximal == "behaviour" and not capped:
        cure = "set algorithm.proximal=recomputed, or null"
        yield f"@algorithm.importance_weight_cap has no weight to truncate: {cure}"
    if not 0 <= least < (math.inf if most is None else most):
        values = f"sequence_ratio_min={a.sequence_ratio_min} and sequence_ratio_max={most}"
        yield f"algorithm.{values}: the first must be below the second"


def _schedule(config: RunConfig) -> Iterator[str]:
    """Yields what is wrong with the learning rate's course."""
    o = config.optimizer
    left = config.steps - o.warmup_steps
    if o.schedule == "constant":
        given = {"decay_steps": o.decay_steps is not None, "min_lr": o.min_lr > 0}
        for key in (name for name, is_set in given.items() if is_set):
            yield f"@optimizer.{key} belongs to a fall; set optimizer.schedule=linear, cosine or wsd"
        return
    if o.min_lr > o.lr:
        yield "@optimizer.min_lr must be at most @optimizer.lr"
    if o.schedule == "wsd" and o.decay_steps is None:
        yield "@optimizer.schedule needs optimizer.decay_steps, for example a tenth of steps"
    if left < (o.decay_steps or 1):
        cure = "raise steps, or lower one of them"
        yield f"@steps is too few for @optimizer.warmup_steps and @optimizer.decay_steps; {cure}"


def _corrections(config: RunConfig) -> Iterator[str]:
    """Yields what is wrong with algorithm.corrections."""
    a = config.algorithm
    weights = [name for name in a.corrections if name in WEIGHTS]
    if len(set(a.corrections)) < len(a.corrections):
        yield "@algorithm.corrections: one is named twice"
    if len(weights) > 1:
        yield f"@algorithm.corrections: {' and '.join(weights)} both weigh tokens; keep one"
    if weights and a.proximal != "recomputed":
        yield f"@algorithm.corrections: {weights[0]} weighs q / mu; set algorithm.proximal=recomputed"
    if weights and a.importance_weight_cap is None:
        yield f"@algorithm.corrections: {weights[0]} needs algorithm.importance_weight_cap, for example 2"
    floor = a.options.get("importance_weight_floor", 0.0)
    if weights and isinstance(floor, int | float) and floor >= (a.importance_weight_cap or math.inf):
        cap = "@algorithm.importance_weight_cap"
        yield f"algorithm.options.importance_weight_floor={floor} must be below {cap}"


def _advantages(config: RunConfig) -> Iterator[str]:
    """Yields what is wrong with advantages that ask for more than a reward."""
    a = config.algorithm
    shaped = a.kl_in_reward or a.overlong_buffer_tokens > 0
    if a.advantage == "max_rl" and shaped:
        what = "without kl_in_reward and overlong_buffer_tokens"
        yield f"@algorithm.advantage divides by the mean reward, which must not be negative: {what}"
    if a.advantage == "gdpo" and (shaped or a.length_penalty > 0):
        what = "without kl_in_reward, overlong_buffer_tokens and length_penalty"
        yield f"@algorithm.advantage takes each of reward.functions as it came: {what}"
    if a.advantage == "gdpo" and len(config.reward.functions) < 2:
        yield "@algorithm.advantage is of several rewards: name two or more in reward.functions"
    if a.length_penalty > 0 and a.zero_variance == "estimate":
        yield "@algorithm.zero_variance takes rewards as probabilities: it goes without length_penalty"


def _rewards(config: RunConfig) -> Iterator[str]:
    """Yields what is wrong with rewards, advantages and the KL divergence."""
    a = config.algorithm
    alone = a.advantage == "grpo" and not a.kl_in_reward and a.overlong_buffer_tokens <= 0
    if a.zero_variance == "estimate" and not alone:
        yield (
            "@algorithm.zero_variance takes rewards as probabilities: it goes with advantage=grpo, without "
            "kl_in_reward and without overlong_buffer_tokens; use keep or filter"
        )
    if not a.normalize_std and a.advantage != "grpo" and not is_own(a.advantage):
        what = f"belongs to algorithm.advantage=grpo, not {a.advantage}"
        yield f"algorithm.normalize_std=false {what}: leave it out"
    if a.kl_in_reward and a.kl_coefficient == 0:
        what = "does nothing while algorithm.kl_coefficient=0"
        yield f"algorithm.kl_in_reward=true {what}: set one of them"
    for key in ("kl_target", "reference_every"):
        if getattr(a, key) is not None and a.kl_coefficient == 0:
            yield f"@algorithm.{key} needs a reference: set algorithm.kl_coefficient above 0"
    if a.kl_in_reward and a.kl_estimator == "k3_weighted":
        yield "@algorithm.kl_estimator weighs a loss, and algorithm.kl_in_reward=true has none: use k1"
    if a.kl_coefficient > 0 and a.kl_estimator == "k1" and not a.kl_in_reward:
        why = "as a loss pulls nowhere (its gradient has mean 0)"
        yield f"@algorithm.kl_estimator {why}: use k2 or k3, or algorithm.kl_in_reward=true"
    if a.loss in SEQUENCE_LOSSES and a.kl_in_reward and a.advantage.startswith("reinforce_pp"):
        why = f"one advantage per sequence, {a.advantage} with kl_in_reward one per token"
        yield f"@algorithm.loss has {why}: use another loss"
    if a.overlong_buffer_tokens > config.sampling.max_response_tokens:
        yield "@algorithm.overlong_buffer_tokens: must be at most @sampling.max_response_tokens"
