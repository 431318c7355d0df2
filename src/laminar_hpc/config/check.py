"""What a configuration means (derived quantities) and whether it can work; both before anything starts. Imports no torch.

`derive` reads the model's config.json and counts bytes; `check` refuses what is wrong with one line that says how to mend it. With
`dry_run=true` the model and the data need not be there: `missing_inputs` says what a run would still need.
"""

import dataclasses
import math
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.config.algorithm import check_algorithm
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import count_parameters, model_config, rollout_bytes, trainer_bytes
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.source import labels, parse_source

_SERVING_BYTES = {"float32": 4, "bfloat16": 2}
_NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
_FAMILIES = {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
_LEAST_LANE = 64 << 10  # bytes: a smaller one would cost more than it saves
_VOCABULARY_MULTIPLE = 32  # trainer/building.py pads to it
_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "lustre", "beegfs", "gpfs", "cifs", "ceph", "fuse.sshfs", "9p", "smb3"}


@dataclass(frozen=True)
class Derived:
    """Quantities that follow from a configuration; printed before a run starts."""

    trainer_ranks: int
    rollout_ranks: int
    relay_ranks_per_machine: int
    world_size: int  # on one machine
    gpus_unless_shared: int  # one per trainer rank, and one per tensor-parallel rank of an engine
    trajectories_per_step: int
    trajectories_per_update: int
    local_batch_groups: int
    parameters: int
    publish_bytes: int
    slot_bytes: int  # all slots of a machine
    delta_image_bytes: int  # in host memory of the trainer ranks that send, together
    trainer_gpu_memory_bytes: int  # estimates, see models.py
    rollout_gpu_memory_bytes: int
    kv_cache_tokens: int  # per replica
    responses_in_kv_cache: int  # of the greatest length, at once
    max_staleness: int | None


def derive(config: RunConfig) -> Derived:
    model = model_config(config.model.path, config.dry_run)
    width = _SERVING_BYTES.get(config.model.dtype, 4)
    t, r = config.trainer, config.rollout
    replay = config.source.startswith("replay:")
    trainers = t.tensor_parallel * t.pipeline_parallel * t.data_parallel
    rollouts = 0 if replay else r.replicas
    trajectories = config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt
    parameters = count_parameters(model)
    publish = parameters * width
    groups = config.pipeline.local_batch_groups or math.ceil(config.algorithm.prompts_per_step / max(1, rollouts))
    return Derived(
        trainer_ranks=trainers,
        rollout_ranks=rollouts,
        relay_ranks_per_machine=0 if replay else config.relay.lanes,
        world_size=trainers + 1 + (rollouts + config.relay.lanes if rollouts else 0),
        gpus_unless_shared=trainers + rollouts * r.tensor_parallel,
        trajectories_per_step=trajectories,
        trajectories_per_update=trajectories // config.algorithm.minibatches_per_step,
        local_batch_groups=groups,
        parameters=parameters,
        publish_bytes=publish,
        slot_bytes=0 if replay else publish * config.relay.slots,
        delta_image_bytes=publish if config.relay.delta == "auto" and not replay else 0,
        trainer_gpu_memory_bytes=trainer_bytes(model, width, t) + (0 if replay else _staging_bytes(config, trainers, publish)),
        rollout_gpu_memory_bytes=0 if replay else rollout_bytes(model, width, r.tensor_parallel, r.kv_cache_tokens),
        kv_cache_tokens=r.kv_cache_tokens,
        responses_in_kv_cache=r.kv_cache_tokens // max(1, config.sampling.max_response_tokens),
        max_staleness=config.pipeline.max_staleness,
    )


def _staging_bytes(config: RunConfig, trainers: int, publish: int) -> int:
    """Two buckets for each lane that a trainer rank sends."""
    lanes = config.relay.lanes
    return 2 * math.ceil(lanes / trainers) * min(config.relay.chunk_megabytes << 20, math.ceil(publish / max(1, lanes)))


def derived_values(config: RunConfig, derived: Derived) -> dict[str, object]:
    """What is printed before a run starts: the derived quantities, and in words what the batch and the pipeline are."""
    a = config.algorithm
    batch = f"{a.prompts_per_step} prompts x {a.samples_per_prompt} samples = {derived.trajectories_per_step} trajectories"
    updates = f"{a.minibatches_per_step} updates of {derived.trajectories_per_update} each"
    return {"batch_of_a_step": f"{batch}; {updates}", **dataclasses.asdict(derived), "pipeline": pipeline_text(config)}


def pipeline_text(config: RunConfig) -> str:
    """What the pipeline does, for whoever wonders whether it is asynchronous."""
    bound, name = config.pipeline.max_staleness, config.pipeline.name
    if config.pipeline.refresh == "barrier" and bound == 0:
        return f"{name}: synchronous; trainer and replicas take turns, on-policy"
    limit = "staleness without a bound" if bound is None else f"at most {bound} steps stale"
    if config.pipeline.refresh == "interrupt":
        return f"{name}: asynchronous; new weights come into running trajectories, whose tokens are of several policies; {limit}"
    if config.pipeline.refresh == "barrier":
        return f"{name}: asynchronous; replicas generate a batch together while the trainer trains on an earlier one; {limit}"
    return f"{name}: asynchronous; trainer and replicas work at the same time; {limit}"


def missing_inputs(config: RunConfig) -> list[str]:
    """What a dry run did without and a run will not: the first thing wrong with the model, and with data or reward, one line each."""
    lines = []
    for look in (lambda: model_config(config.model.path), lambda: _check_rollout_inputs(config)):
        try:
            look()
        except LaminarError as error:
            lines.append(str(error))
    return lines


def _refuse(condition: bool, text: str) -> None:
    if condition:
        raise LaminarError(text)


def check(config: RunConfig) -> Derived:
    """Raises LaminarError for the first thing that cannot work; else returns the derived quantities."""
    model = model_config(config.model.path, config.dry_run)
    architecture = (model.get("architectures") or ["unknown"])[0]
    _refuse(
        architecture not in _FAMILIES,
        f"{config.model.path}/config.json: architecture {architecture} is not supported; supported: {', '.join(sorted(_FAMILIES))}, "
        "none with experts",
    )
    _refuse(config.model.dtype not in _SERVING_BYTES, f"model.dtype={config.model.dtype}: use float32 or bfloat16")
    _check_parallelism(config, model)
    _check_choices(config)
    _check_numbers(config, model)
    check_algorithm(config)
    if not config.source.startswith("replay:") and not config.dry_run:
        _check_rollout_inputs(config)
    derived = derive(config)
    _refuse(
        config.relay.lanes > 1 and derived.publish_bytes < config.relay.lanes * _LEAST_LANE,
        f"relay.lanes={config.relay.lanes}: a publication of {derived.publish_bytes} bytes is too small for lanes of at least "
        f"{_LEAST_LANE} bytes each; lower it",
    )
    _check_batch(config, derived)
    return derived


def _check_parallelism(config: RunConfig, model: dict) -> None:
    for key in ("tensor_parallel", "pipeline_parallel", "data_parallel"):
        value = getattr(config.trainer, key)
        _refuse(value < 1, f"trainer.{key}={value}: must be at least 1")
    tensor, stages = config.trainer.tensor_parallel, config.trainer.pipeline_parallel
    kv_heads = model.get("num_key_value_heads") or model["num_attention_heads"]
    parts = {
        "num_attention_heads": model["num_attention_heads"],
        "num_key_value_heads": kv_heads,
        "intermediate_size": model["intermediate_size"],
    }
    for name, value in parts.items():
        _refuse(
            value % tensor != 0,
            f"trainer.tensor_parallel={tensor} does not divide the model's {name}={value}; choose another, or scale with data_parallel",
        )
    _refuse(
        _VOCABULARY_MULTIPLE % tensor != 0,
        f"trainer.tensor_parallel={tensor} does not divide {_VOCABULARY_MULTIPLE}, to which the vocabulary is padded; use a power of two",
    )
    layers = model["num_hidden_layers"]
    _refuse(layers < stages, f"trainer.pipeline_parallel={stages} exceeds the model's num_hidden_layers={layers}; use fewer stages")
    _check_engine_shards(config.rollout.tensor_parallel, model)
    for key, devices in (("trainer.devices", config.trainer.devices), ("rollout.devices", config.rollout.devices)):
        wrong = devices is not None and (not devices or min(devices) < 0 or len(set(devices)) != len(devices))
        _refuse(wrong, f"{key}={devices}: name each GPU once, by its index from 0, or leave it at null")
    _refuse(config.rollout.replicas < 1, f"rollout.replicas={config.rollout.replicas}: must be at least 1")


def _check_engine_shards(ranks: int, model: dict) -> None:
    """SGLang gives each rank whole query heads, whole key-value heads (or several ranks the same one), and whole columns of the MLP."""
    heads = model["num_attention_heads"]
    kv_heads = model.get("num_key_value_heads") or heads
    _refuse(ranks < 1, f"rollout.tensor_parallel={ranks}: must be at least 1")
    _refuse(
        heads % ranks != 0 or max(kv_heads, ranks) % min(kv_heads, ranks) != 0 or model["intermediate_size"] % ranks != 0,
        f"rollout.tensor_parallel={ranks} does not divide the model's {heads} heads, {kv_heads} key-value heads and intermediate size "
        f"{model['intermediate_size']}; choose another, and scale with rollout.replicas",
    )


def _check_choices(config: RunConfig) -> None:
    choices = {
        "role": (config.role, ("all", "trainer", "relay", "rollout", "controller")),
        "resume": (config.resume, ("auto", "never")),
        "pipeline.refresh": (config.pipeline.refresh, ("drained", "barrier", "interrupt")),
        "pipeline.consumption": (config.pipeline.consumption, ("batch", "stream")),
        "pipeline.repack": (config.pipeline.repack, ("off", "reprefill", "kv")),
        "rollout.engine": (config.rollout.engine, ("sglang", "emulated")),
        "data.too_long": (config.data.too_long, ("refuse", "drop")),
        "relay.publish": (config.relay.publish, ("overlapped", "blocking")),
        "relay.delta": (config.relay.delta, ("off", "auto")),
        "algorithm.zero_variance": (config.algorithm.zero_variance, ("keep", "filter", "estimate")),
        "observability.wandb": (config.observability.wandb, ("off", "offline", "online")),
    }
    for key, (value, allowed) in choices.items():
        _refuse(value not in allowed, f"{key}={value}: use one of {', '.join(allowed)}")
    replay = config.source.startswith("replay:")
    _refuse(config.source != "rollout" and not replay, f"source={config.source}: use rollout or replay:RUN_DIR")
    _refuse(
        replay and not (Path(config.source.removeprefix("replay:")) / "store.sqlite").exists(),
        f"source={config.source}: no store.sqlite in that run directory",
    )


def _check_numbers(config: RunConfig, model: dict) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(config.sampling, name)
        _refuse(
            value != neutral,
            f"sampling.{name}={value} is refused for training: the engine's log-probs would not be those of the sampled "
            f"distribution; leave it at {neutral}",
        )
    _refuse(
        config.sampling.temperature <= 0, f"sampling.temperature={config.sampling.temperature}: training samples need a temperature above 0"
    )
    _refuse(
        config.sampling.max_response_tokens < 1, f"sampling.max_response_tokens={config.sampling.max_response_tokens}: must be at least 1"
    )
    positions = model.get("max_position_embeddings", 1 << 62)
    _refuse(
        config.sampling.max_response_tokens >= positions,
        f"sampling.max_response_tokens={config.sampling.max_response_tokens} does not leave room for a prompt in the model's "
        f"{positions} positions; lower it",
    )
    _refuse(config.steps < 1, f"steps={config.steps}: must be at least 1")
    _refuse(config.relay.slots < 2, f"relay.slots={config.relay.slots}: at least 2, one to read and one to write")
    _refuse(config.relay.lanes < 1, f"relay.lanes={config.relay.lanes}: must be at least 1")
    _refuse(
        config.relay.lanes > 1 and config.relay.slots < 3,
        f"relay.slots={config.relay.slots}: relay.lanes={config.relay.lanes} needs at least 3, as lanes may be on two ids at a time",
    )
    _refuse(config.relay.anchor_every < 1, f"relay.anchor_every={config.relay.anchor_every}: must be at least 1, which sends all in full")
    bound = config.pipeline.max_staleness
    _refuse(bound is not None and bound < 0, f"pipeline.max_staleness={bound}: must be 0 or more, or null for no bound")
    _check_pipeline(config)
    _refuse(config.rollout.max_concurrent < 1, f"rollout.max_concurrent={config.rollout.max_concurrent}: must be at least 1")
    shown = config.observability.show_samples
    _refuse(not 0 <= shown <= 100, f"observability.show_samples={shown}: must be from 0 to 100")
    _refuse(config.reward.slots < 1 or config.reward.workers < 1, "reward.slots and reward.workers must be at least 1")
    _refuse(config.checkpoint.every < 1 or config.checkpoint.keep < 1, "checkpoint.every and checkpoint.keep must be at least 1")


def _check_pipeline(config: RunConfig) -> None:
    p, minibatches = config.pipeline, config.algorithm.minibatches_per_step
    _refuse(
        p.refresh == "barrier" and p.max_staleness is None,
        "pipeline.refresh=barrier needs a pipeline.max_staleness, 0 for turns or 1 for one step ahead: else nobody waits for the trainer",
    )
    _refuse(
        p.repack != "off" and p.refresh != "drained",
        f"pipeline.repack={p.repack} needs pipeline.refresh=drained, not {p.refresh}: only a replica that refreshes by itself gains by it",
    )
    _refuse(
        p.keep_kv and p.refresh != "interrupt",
        "pipeline.keep_kv=true needs pipeline.refresh=interrupt: otherwise no request outlives its weights",
    )
    _refuse(p.repack_seconds <= 0, f"pipeline.repack_seconds={p.repack_seconds}: must be above 0")
    _refuse(
        p.consumption == "stream" and (config.algorithm.prompts_per_step % minibatches != 0 or config.source != "rollout"),
        f"pipeline.consumption=stream needs algorithm.prompts_per_step={config.algorithm.prompts_per_step} divisible by "
        f"algorithm.minibatches_per_step={minibatches}, and source=rollout",
    )
    _refuse(config.rollout.increment_tokens < 0, f"rollout.increment_tokens={config.rollout.increment_tokens}: must be 0 or more")
    e = config.emulation
    _refuse(e.time_scale <= 0 or not 0 <= e.wire_share <= 1, "emulation.time_scale must be above 0, emulation.wire_share from 0 to 1")


def _check_batch(config: RunConfig, derived: Derived) -> None:
    algorithm, ranks = config.algorithm, config.trainer.data_parallel
    _refuse(
        algorithm.samples_per_prompt < 2,
        f"algorithm.samples_per_prompt={algorithm.samples_per_prompt}: a group needs at least 2 samples to have an advantage",
    )
    first = algorithm.first_samples
    _refuse(
        first is not None and not 2 <= first <= algorithm.samples_per_prompt,
        f"algorithm.first_samples={first}: must be from 2 to algorithm.samples_per_prompt={algorithm.samples_per_prompt}, or null",
    )
    _refuse(algorithm.more_samples < 1, f"algorithm.more_samples={algorithm.more_samples}: must be at least 1")
    least = algorithm.prompts_per_step * (first or 0)
    _refuse(
        first is not None and least < algorithm.minibatches_per_step * ranks,
        f"algorithm.prompts_per_step={algorithm.prompts_per_step} x algorithm.first_samples={first} = {least} trajectories are fewer than "
        f"algorithm.minibatches_per_step={algorithm.minibatches_per_step} x trainer.data_parallel={ranks}; raise first_samples",
    )
    _refuse(algorithm.minibatches_per_step < 1, f"algorithm.minibatches_per_step={algorithm.minibatches_per_step}: must be at least 1")
    _refuse(
        (first is None and derived.trajectories_per_step % algorithm.minibatches_per_step != 0) or derived.trajectories_per_update < ranks,
        f"algorithm.prompts_per_step={algorithm.prompts_per_step} x algorithm.samples_per_prompt={algorithm.samples_per_prompt} = "
        f"{derived.trajectories_per_step} trajectories do not divide into "
        f"algorithm.minibatches_per_step={algorithm.minibatches_per_step} x trainer.data_parallel={ranks}; change one of them",
    )
    budget = config.trainer.tokens_per_microbatch
    _refuse(
        budget <= config.sampling.max_response_tokens,
        f"trainer.tokens_per_microbatch={budget} cannot hold a prompt and "
        f"sampling.max_response_tokens={config.sampling.max_response_tokens}; raise it",
    )
    _refuse(
        config.rollout.kv_cache_tokens <= config.sampling.max_response_tokens,
        f"rollout.kv_cache_tokens={config.rollout.kv_cache_tokens} cannot hold one response of "
        f"sampling.max_response_tokens={config.sampling.max_response_tokens}; raise it",
    )


def _check_rollout_inputs(config: RunConfig) -> None:
    parse_source("data.train", config.data.train)
    labels("evaluation.files", [parse_source("evaluation.files", file) for file in config.evaluation.files])
    limit = config.data.max_prompt_tokens
    _refuse(limit is not None and limit < 1, f"data.max_prompt_tokens={limit}: must be at least 1, or null")
    _refuse(config.evaluation.samples < 0, f"evaluation.samples={config.evaluation.samples}: must be 0 or more")
    _refuse(
        not config.reward.function,
        "reward.function is empty: name a Python function by its dotted path, e.g. laminar_hpc.environments.arithmetic.reward",
    )


def check_machine(config: RunConfig, derived: Derived) -> None:
    """What only the machine of the relay or controller can tell: room in shared memory, a free port, a proper disk for the store."""
    shm = Path(config.relay.shm_dir)
    if derived.slot_bytes:
        _refuse(not shm.is_dir(), f"relay.shm_dir={shm}: no such folder; name one in memory (tmpfs)")
        free = shutil.disk_usage(shm).free
        _refuse(
            free < derived.slot_bytes * 1.05,
            f"{shm} has {free / 1e6:.0f} MB free, {config.relay.slots} weight slots need {derived.slot_bytes / 1e6:.0f} MB: give "
            "it more (containers: --shm-size) or set relay.shm_dir or relay.slots",
        )
    if config.cluster.port:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((config.cluster.host, config.cluster.port))
            except OSError as error:
                raise LaminarError(
                    f"cluster.port={config.cluster.port} at {config.cluster.host} cannot be used "
                    f"({os.strerror(error.errno or 0)}): choose another, or 0 for any free one"
                ) from None


def file_system(path: Path) -> str:
    """The type of the file system that holds `path`, by /proc/mounts."""
    path = path.resolve()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [(point, kind) for point, kind in mounts if path == Path(point) or Path(point) in path.parents]
    return max(holding, key=lambda m: len(m[0]))[1] if holding else "unknown"


def check_store_directory(directory: Path) -> None:
    """SQLite's write-ahead log needs shared memory between processes, which network file systems do not give."""
    kind = file_system(directory)
    _refuse(
        kind in _NETWORK_FILE_SYSTEMS,
        f"{directory} is on {kind}: the store must not be on a network file system; set store_dir to a local folder of the "
        "controller's machine",
    )
