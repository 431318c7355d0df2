"""Which GPUs of a machine a rank uses: from the lists of the configuration, or derived from what runs on the
machine. Imports no torch.

A rank is given its own in CUDA_VISIBLE_DEVICES before anything asks CUDA, so that its first device is device
0, for its engine too. Without a list, trainer ranks take a GPU each, in order, and replicas
rollout.tensor_parallel each of those that are left, or of all where too few are left; the relays of a machine
are spread evenly over the replicas' GPUs, as each may lie next to a network card of its own. With roles
apart a rank knows those of its own role only, so trainers take the first GPUs and replicas the last ones;
name the lists when several of one role share a machine.
"""

import functools
import itertools
import logging
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.machine.roles import Gpus, RoleOfRank

log = logging.getLogger(__name__)
DEVICES = Path("/dev")
NODE_GPUS = "LAMINAR_GPUS_PER_NODE"
SMI_SECONDS = 20.0  # without a persistent driver nvidia-smi wakes up all GPUs first
_SMI_OF_WSL = "/usr/lib/wsl/lib/nvidia-smi"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"  # of a GPU, in hardware, to which CUDA spreads a process's streams
_QUEUES = 32
_FEWEST_QUEUES = 8


def present() -> list[str]:
    """The names of the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES up to the first that is
    none, as CUDA reads it; else CUDA's own numbers from 0. Those of the files in /dev are the driver's: a
    container may hold /dev/nvidia5 alone, which CUDA calls 0. WSL2 has /dev/dxg instead, for all GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        files = list(DEVICES.glob("nvidia[0-9]*"))
        count = len(files) or (_listed_by_smi() if (DEVICES / "dxg").exists() else 0)
        return [str(number) for number in range(count)]
    names = [name.strip() for name in visible.split(",")]
    return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))


@functools.cache
def _listed_by_smi() -> int:
    """How many GPUs nvidia-smi lists; 0 where there is no such tool, or it fails."""
    for tool in ("nvidia-smi", _SMI_OF_WSL):
        try:
            done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=SMI_SECONDS)
        except (OSError, subprocess.SubprocessError):
            continue
        return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
    return 0


def is_slice(name: str) -> bool:
    """Whether a name of `present` is that of a part of a GPU (MIG)."""
    return name.startswith("MIG-")


def check_present(config: RunConfig) -> None:
    """Raises LaminarError for a configuration that is for GPUs on a machine that shows none."""
    if present() or config.role in ("controller", "relay"):
        return
    own = {"trainer": config.trainer.gpu_memory_gigabytes}
    if config.rollout.engine == "sglang":
        own["rollout"] = config.rollout.gpu_memory_gigabytes
    for role, gigabytes in own.items():
        if gigabytes and config.role in ("all", role):
            raise LaminarError(
                f"{role}.gpu_memory_gigabytes={gigabytes:g}: this machine shows no GPU (/dev/nvidia0, or "
                "CUDA_VISIBLE_DEVICES); start a container with its GPUs (--gpus all), or for a run on the "
                f"CPU set {role}.gpu_memory_gigabytes=null"
            )


def gpus_per_node(config: RunConfig) -> Gpus | None:
    """What assign_roles is to know of the nodes' GPUs: as many as the job says that all have (NODE_GPUS, by
    slurm/laminar_single.sbatch), else as this one shows. None without GPUs.

    Raises LaminarError where this node has another number: it would place the roles in another way."""
    here, said = len(present()), os.environ.get(NODE_GPUS, "")
    if said.isdigit() and int(said) != here:
        raise LaminarError(
            f"this machine shows {here} GPUs and the first one of the job {said}: look at nvidia-smi -L on "
            "both, and ask for as many on each node (--gpus-per-node)"
        )
    return Gpus(here, config.trainer.tensor_parallel, config.rollout.tensor_parallel) if here else None


def devices_of(config: RunConfig, here: Sequence[RoleOfRank], mine: RoleOfRank, count: int) -> list[int]:
    """Indices below `count`, the number of GPUs, for the rank `mine`; `here` are all ranks of this machine.
    [] without GPUs.

    Raises LaminarError for a list that does not fit the machine.
    """
    order = {role: [rank for rank in here if rank.role == role] for role in ("trainer", "rollout", "relay")}
    trainers = _chosen("trainer.devices", config.trainer.devices, len(order["trainer"]), count)
    size = config.rollout.tensor_parallel
    rollouts = _chosen("rollout.devices", config.rollout.devices, len(order["rollout"]) * size, count)
    if not count or mine.role not in order:
        return []
    if trainers is None:
        trainers = list(range(len(order["trainer"])))
        if len(trainers) > count:
            raise LaminarError(
                f"{len(trainers)} trainer ranks on a machine with "
                f"{count} GPUs: start fewer, or on more machines"
            )
    if rollouts is None:
        left = [device for device in range(count) if device not in trainers]
        wanted = len(order["rollout"]) * size or count  # relays apart: the replicas may use any
        pool = left if len(left) >= wanted else list(range(count))
        if config.role == "rollout":
            pool = pool[-wanted:]
        rollouts = [pool[i % len(pool)] for i in range(wanted)]
    if size > count and mine.role == "rollout":
        raise LaminarError(f"rollout.tensor_parallel={size}: this machine has {count} GPUs; lower it")
    place = order[mine.role].index(mine)
    if mine.role == "relay":
        return [rollouts[place * len(rollouts) // len(order["relay"]) % len(rollouts)]]
    return (
        trainers[place : place + 1] if mine.role == "trainer" else rollouts[place * size : (place + 1) * size]
    )


def _chosen(key: str, devices: list[int] | None, wanted: int, count: int) -> list[int] | None:
    """The configured list. Raises LaminarError unless these GPUs are there and enough for `wanted`."""
    if devices is None or not wanted:
        return devices
    if not count:
        raise LaminarError(f"{key}={devices}: this machine has no GPU; leave it at null")
    if max(devices, default=-1) >= count:
        raise LaminarError(f"{key}={devices}: this machine has {count} GPUs, 0 to {count - 1}")
    if len(devices) < wanted:
        raise LaminarError(
            f"{key}={devices}: {wanted} GPUs are needed on this machine; name so many, or null"
        )
    return devices


def use_devices(config: RunConfig, here: Sequence[RoleOfRank], mine: RoleOfRank) -> None:
    """Lets this process and its children see the GPUs of its rank only. Raises LaminarError where it should
    have some and there are none."""
    check_present(config)
    names = present()
    chosen = devices_of(config, here, mine, len(names))
    slices = [names[index] for index in chosen if is_slice(names[index])] if names else []
    if slices and config.relay.transport == "nccl" and mine.role in ("trainer", "relay"):
        raise LaminarError(
            f"relay.transport=nccl: {mine.role} {mine.index} uses {slices[0]}, a slice of a GPU, and NCCL "
            "takes all slices of one for the same device; use relay.transport=auto or host"
        )
    if names:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[index] for index in chosen)
    if names and mine.role in ("trainer", "relay"):
        _take_queues(says=(mine.role, mine.index) == ("trainer", 0))


def _take_queues(says: bool) -> None:
    """Before CUDA starts: as many hardware queues as there are streams. With one, which recipes for Megatron
    set, the training would stand behind a copy or a link of a publication, which wait for relays."""
    given = os.environ.get(QUEUES, "")
    if given.isdigit() and int(given) >= _FEWEST_QUEUES:
        return
    os.environ[QUEUES] = str(_QUEUES)
    if given and says:
        log.warning(
            "%s=%s is not used: %d, so that the training never waits behind a publication",
            *(QUEUES, given, _QUEUES),
        )
