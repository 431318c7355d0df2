"""What a configuration means (derived quantities) and whether it can work; both before anything starts.
Imports no torch.

`derive` reads the model's config.json and counts bytes; `check` refuses what is wrong, with one line for each
mistake that says how to mend it. With `dry_run=true` model and data need not be there: `missing_inputs` says
what a run would still need. What one value may be stands in schema.py, what goes together in rules.py.
"""

import dataclasses
import errno
import math
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from laminar_hpc.config.adapter_check import adapter_problems
from laminar_hpc.config.adapter_places import adapter_pool_bytes, slots_of
from laminar_hpc.config.adapters import adapter_text, published_parameters
from laminar_hpc.config.bounds import wrong_values
from laminar_hpc.config.critic import other_critic
from laminar_hpc.config.errors import LaminarError, Refused, said
from laminar_hpc.config.experts import experts_text, objection
from laminar_hpc.config.families import FAMILIES, family_of
from laminar_hpc.config.file_systems import NETWORK_FILE_SYSTEMS, file_system
from laminar_hpc.config.memory import (
    Need,
    check_memory,
    move_bytes,
    recompute_that_fits,
    relay_bytes,
    shared_bytes,
    shared_engines,
    trainer_need,
)
from laminar_hpc.config.models import (
    SHAPE,
    count_parameters,
    is_downloaded,
    is_known,
    kv_heads,
    missing_files,
    model_config,
    rollout_bytes,
    serving_bytes,
    teacher_head_bytes,
    trainer_bytes,
)
from laminar_hpc.config.objectives import GAE
from laminar_hpc.config.rewards import check_reward
from laminar_hpc.config.routing import many_routes, replay_text, replayed_routes
from laminar_hpc.config.rules import broken_rules
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.source import labels, parse_source
from laminar_hpc.config.teachers import SAMPLED, held_teachers, other_models

_NEEDED = [key for key in SHAPE if key not in ("model_type", "num_key_value_heads")]
_MAY_BE_NULL = ("num_key_value_heads", "head_dim", "max_position_embeddings")
_LONGEST_PER_MEAN = 8  # a response's greatest length is rarely less than so many times the mean


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
    recompute_activations: str  # none, selective or full
    trainer_gpu_memory_bytes: int  # estimates, see models.py
    rollout_gpu_memory_bytes: int
    kv_cache_tokens: int  # per replica
    responses_in_kv_cache: int  # of the greatest length, at once
    max_staleness: int | None


def derive(config: RunConfig) -> Derived:
    """What follows from a configuration: world size, batch sizes, bytes published. Sizes are in bytes."""
    model = model_config(config.model.path, config.dry_run)
    width = serving_bytes(config.model.dtype)
    t, r = config.trainer, config.rollout
    replay = config.source.startswith("replay:")
    trainers = t.ranks
    rollouts = 0 if replay else r.most
    trajectories = config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt
    parameters = count_parameters(model)
    publish = published_parameters(model, config.model.lora) * width
    groups = config.pipeline.local_batch_groups or math.ceil(
        config.algorithm.prompts_per_step / (1 if replay else r.fewest)
    )
    engine = 0 if replay else rollout_bytes(model, width, r.tensor_parallel, r.kv_cache_tokens)
    engine += 0 if replay else adapter_pool_bytes(config, model, width)
    staging = 0 if replay else _staging_bytes(config, trainers, publish)
    staging += _held_bytes(config, model, publish)
    engines = 0 if r.engine == "emulated" else shared_engines(config)
    beside = shared_bytes(Need(0, engine + relay_bytes(config) + move_bytes(config)), engines)
    recompute = recompute_that_fits(config, model, width, staging + beside)
    need = trainer_need(config, model, width, recompute_activations=recompute)
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
        slot_bytes=0 if replay else publish * slots_of(config),
        delta_image_bytes=publish if config.relay.delta == "auto" and not replay else 0,
        recompute_activations=recompute,
        trainer_gpu_memory_bytes=need + staging,
        rollout_gpu_memory_bytes=engine,
        kv_cache_tokens=r.kv_cache_tokens,
        responses_in_kv_cache=r.kv_cache_tokens // max(1, config.sampling.max_response_tokens),
        max_staleness=config.pipeline.staleness_max,
    )


def _staging_bytes(config: RunConfig, trainers: int, publish: int) -> int:
    """Two buckets for each lane that a trainer rank sends, and what relay.publish=copied copies of it."""
    lanes, t = config.relay.lanes, config.trainer
    bucket = min(config.relay.chunk_megabytes << 20, math.ceil(publish / max(1, lanes)))
    copies = math.ceil(publish / (t.tensor_parallel * t.pipeline_parallel))
    return 2 * math.ceil(lanes / trainers) * bucket + copies * (config.relay.publish == "copied")


def _held_bytes(config: RunConfig, model: dict, publish: int) -> int:
    """What a trainer rank holds beside the policy: copies of a reference and of teachers, a teacher's logits,
    and the state of a critic, whose activations are not there while the policy's are."""
    t, width = config.trainer, serving_bytes(config.model.dtype)
    critic = trainer_bytes(model, width, dataclasses.replace(t, tokens_per_microbatch=0))
    logits = 0
    if config.teacher.divergence != SAMPLED and held_teachers(config.teacher):
        logits = math.ceil(teacher_head_bytes(model, width, t.tensor_parallel, t.tokens_per_microbatch))
    reference = config.algorithm.kl_coefficient > 0 and config.model.lora.rank == 0
    copies = reference + held_teachers(config.teacher)
    each = math.ceil(publish / (t.tensor_parallel * t.pipeline_parallel))
    return copies * each + logits + critic * (config.algorithm.advantage == GAE)


def derived_values(config: RunConfig, derived: Derived) -> dict[str, object]:
    """Printed before a run starts: the derived quantities, and in words what batch and pipeline are."""
    a = config.algorithm
    batch = f"{a.prompts_per_step} prompts x {a.samples_per_prompt} samples"
    batch += f" = {derived.trajectories_per_step} trajectories"
    updates = f"{a.minibatches_per_step} updates of {derived.trajectories_per_update} each"
    model = model_config(config.model.path, config.dry_run)
    routes = replayed_routes(config, model)
    texts = {
        "experts": experts_text(model),
        "adapter": adapter_text(model, config.model.lora),
        "routing_replay": replay_text(config, routes) if routes else "",
    }
    return {
        "batch_of_a_step": f"{batch}; {updates}",
        **{name: text for name, text in texts.items() if text},
        **dataclasses.asdict(derived),
        "relay_transport": transport_text(config),
        "pipeline": pipeline_text(config),
    }


def transport_text(config: RunConfig) -> str:
    """By which way weights cross from trainer to relay and from relay to relay."""
    return {
        "auto": "auto: NCCL between GPUs of different machines, else host memory",
        "nccl": "nccl: NCCL, from GPU to GPU; a link without a GPU at each end is refused",
        "host": "host: host memory, by shared memory on a machine and TCP between machines",
    }[config.relay.transport]


def pipeline_text(config: RunConfig) -> str:
    """What the pipeline does, for whoever wonders whether it is asynchronous."""
    bound, name = config.pipeline.staleness_max, config.pipeline.name
    if config.pipeline.refresh == "barrier" and bound == 0:
        return f"{name}: synchronous; trainer and replicas take turns, on-policy"
    limit = "staleness without a bound" if bound is None else f"at most {bound} steps stale"
    if config.pipeline.adapts_staleness:
        limit += ", by a bound that follows who waits"
    how = {
        "interrupt": "new weights come into running trajectories, whose tokens are of several policies",
        "versions": "replicas begin on the newest adapter while older trajectories go on on theirs",
        "barrier": "replicas generate a batch together while the trainer trains on an earlier one",
    }.get(config.pipeline.refresh, "trainer and replicas work at the same time")
    return f"{name}: asynchronous; {how}; {limit}"


def missing_inputs(config: RunConfig) -> list[str]:
    """What a dry run did without and a run will not: the first thing wrong with the model, and with data or
    reward, one line each."""
    inputs = _input_problems(config)
    try:
        model = model_config(config.model.path)
    except LaminarError as error:
        return [str(error), *inputs]
    inputs += [*other_models(config, model), *other_critic(config, model)]
    return [*missing_files(config.model.path), *inputs]


def problems(config: RunConfig, may_download: bool = False) -> list[str]:
    """Everything that cannot work, one line each: values, then model, data and reward, then what does not go
    together. `may_download`: a model of the hub need not be here yet; of a public one the numbers are known.

    Where a value is wrong by itself the last are left out, as they might only follow from it."""
    wrong = wrong_values(config)
    model, of_model = None, []
    unseen = may_download and is_downloaded(config.model.path)
    known = dataclasses.replace(config, dry_run=True) if unseen else config
    try:
        model = supported_model(known)
    except LaminarError as error:
        of_model = [] if unseen and not is_known(config.model.path) else [str(error)]
    inputs = [] if config.dry_run else _input_problems(config)
    if wrong:
        return [*wrong, *of_model, *inputs]
    return [*of_model, *inputs, *adapter_problems(config, model), *broken_rules(config, model)]


def check(config: RunConfig) -> Derived:
    """The derived quantities. Raises Refused, with one line for everything that cannot work."""
    if lines := problems(config):
        raise Refused(lines)
    derived = derive(config)
    check_memory(config, memory_need(config, derived))
    return derived


def memory_need(config: RunConfig, derived: Derived) -> Need:
    """What is held against the GPUs' memory, of relays with the engine beside them; none if emulated."""
    emulated = config.rollout.engine == "emulated"
    engine = derived.rollout_gpu_memory_bytes + relay_bytes(config) + move_bytes(config)
    return Need(derived.trainer_gpu_memory_bytes, 0 if emulated else engine)


def supported_model(config: RunConfig) -> dict:
    """The model's config.json. Raises LaminarError if it is missing, of another family, or wrong."""
    model = model_config(config.model.path, config.dry_run)
    file = f"{config.model.path}/config.json"
    named = model.get("architectures")
    kind = str(model.get("model_type", "unknown"))
    architecture = str(named[0]) if isinstance(named, list) and named else kind
    if architecture in FAMILIES:
        added = f'"architectures": ["{FAMILIES[architecture].architecture}"]'
        raise LaminarError(
            f"{file} does not list its architectures, which the engine needs; add {added}, or save the model "
            "again with transformers"
        )
    supported = sorted(family.architecture for family in FAMILIES.values())
    if architecture not in supported:
        raise LaminarError(
            f"{file}: architecture {architecture} is not supported; supported: {', '.join(supported)}"
        )
    again = "download the model again"
    if lacking := [key for key in _NEEDED if not _is_count(model.get(key))]:
        raise LaminarError(f"{file} has no {', '.join(lacking)}; {again}")
    if odd := [key for key in _MAY_BE_NULL if model.get(key) is not None and not _is_count(model[key])]:
        raise LaminarError(f"{file}: {odd[0]}={model[odd[0]]!r} is not a number of 1 or more; {again}")
    heads, width = model["num_attention_heads"], model["hidden_size"]
    undivided = [f"num_key_value_heads={kv_heads(model)}"] if heads % kv_heads(model) else []
    if not model.get("head_dim") and not family_of(model).head_dim and width % heads:
        undivided.append(f"hidden_size={width}")
    if undivided:
        rule = "KV heads divide heads, and heads the hidden size unless there is a head_dim"
        what = f"num_attention_heads={heads} does not go with {' and '.join(undivided)}"
        raise LaminarError(f"{file}: {what}: {rule}; {again}")
    if wrong := objection(model):
        raise LaminarError(f"{file}: {wrong}")
    return model


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _input_problems(config: RunConfig) -> list[str]:
    """What is missing of data and reward, of which a replay has its own."""
    key, files = "evaluation.files", config.evaluation.files
    own = config.environment.factory or config.environment.by_url
    path = config.demonstrations.path
    shown = said(parse_source, "demonstrations.path", path) if path else []
    if config.source.startswith("replay:"):
        return shown
    return [
        *shown,
        *([] if config.brings_rows else said(parse_source, "data.train", config.data.train)),
        *said(lambda: labels(key, [parse_source(key, file) for file in files])),
        *said(check_reward, config.reward, own),
    ]


def warnings(config: RunConfig, derived: Derived) -> list[str]:
    """What works, but hardly as meant. One line each."""
    never = "evaluation.every is set and evaluation.files is empty: nothing is evaluated; name held-out files"
    lines = [never] if config.evaluation.every and not config.evaluation.files else []
    if (routes := replayed_routes(config, model_config(config.model.path, config.dry_run))) is not None:
        mean = config.sampling.max_response_tokens / _LONGEST_PER_MEAN
        lines += filter(None, [many_routes(config, routes, derived.trajectories_per_step, mean)])
    local_batch = derived.local_batch_groups * config.algorithm.samples_per_prompt
    at_once = min(config.rollout.max_concurrent, local_batch)
    needed = math.ceil(at_once / _LONGEST_PER_MEAN) * config.sampling.max_response_tokens
    if not derived.rollout_ranks or config.rollout.kv_cache_tokens >= needed:
        return lines
    return [
        *lines,
        f"rollout.kv_cache_tokens={config.rollout.kv_cache_tokens} holds {derived.responses_in_kv_cache} "
        f"responses of sampling.max_response_tokens={config.sampling.max_response_tokens} at once, "
        f"and a replica is given {at_once}: most of them will wait for room; set it to {needed} or more",
    ]


def check_machine(config: RunConfig, derived: Derived) -> None:
    """What only the machine of the relay or controller can tell: room in shared memory, a free port, folders
    that can be made. Raises Refused with a line for each that is wrong."""
    if lines := [*_wrong_folders(config), *_wrong_memory(config, derived), *_wrong_port(config)]:
        raise Refused(lines)


def _wrong_folders(config: RunConfig) -> Iterator[str]:
    """Those that are neither there nor can be made; none is made for it."""
    for key, folder in (("run_dir", config.run_dir), ("store_dir", config.store_dir or config.run_dir)):
        path = Path(folder).absolute()
        while not path.exists() and path != path.parent:
            path = path.parent
        if not (path.is_dir() and os.access(path, os.W_OK | os.X_OK)):
            what = "cannot be written" if path.is_dir() else "is not a folder"
            yield f"{key}={folder}: {path} {what}; choose another"
        if not config.store_dir:
            return


def _wrong_memory(config: RunConfig, derived: Derived) -> Iterator[str]:
    shm, slots = Path(config.relay.shm_dir), derived.slot_bytes
    if slots and not shm.is_dir():
        yield f"relay.shm_dir={shm}: no such folder; name one in memory (tmpfs)"
    elif slots and (free := shutil.disk_usage(shm).free) < slots * 1.05:
        have, need = f"{free / 1e6:.0f} MB", f"{slots / 1e6:.0f} MB"
        cure = "give it more (containers: --shm-size) or set relay.shm_dir or relay.slots"
        yield f"{shm} has {have} free, {slots_of(config)} weight slots need {need}: {cure}"


def _wrong_port(config: RunConfig) -> Iterator[str]:
    host, port = config.cluster.host, config.cluster.port
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, UnicodeError) as error:
        if isinstance(error, socket.gaierror | UnicodeError) or error.errno == errno.EADDRNOTAVAIL:
            yield (
                f"cluster.host={host}: not an address of this machine; use 127.0.0.1 for one machine, or the "
                "address at which the others reach this one"
            )
        else:
            why, cure = os.strerror(error.errno or 0), "choose another, or 0 for any free one"
            yield f"cluster.port={port} at {host} cannot be used ({why}): {cure}"


def check_store_directory(directory: Path) -> None:
    """SQLite's write-ahead log needs memory shared between processes, which network file systems lack."""
    kind = file_system(directory)
    if kind in NETWORK_FILE_SYSTEMS:
        raise LaminarError(
            f"{directory} is on {kind}: the store must not be on a network file system; set store_dir to a "
            "local folder of the controller's machine"
        )
