"""Which GPUs of a machine a rank uses: from the lists of the configuration, or derived from what runs on the
machine. Imports no torch.

A rank is given its own in CUDA_VISIBLE_DEVICES before anything asks CUDA, so that its first device is device
0, for its engine too. Without a list, trainer ranks take a GPU each, in order, and replicas
rollout.tensor_parallel each of those that are left, or of all where too few are left; the relays of a machine
are spread evenly over the replicas' GPUs, as each may lie next to a network card of its own. A torchrun of
one role sees its own ranks only: name the lists when several such share a machine.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from laminar_hpc.cluster.roles import RoleOfRank
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig


def present() -> list[str]:
    """The names of the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or the numbers of
    all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip() not in ("", "-1")]
    return sorted((path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")), key=int)


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
        wanted = len(order["rollout"]) * size or count  # a torchrun of relays: the replicas may use any
        pool = left if len(left) >= wanted else list(range(count))
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
    """The configured list. Raises LaminarError unless the machine has these GPUs and they are enough for
    `wanted`."""
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
    """Lets this process and its children see the GPUs of its rank only."""
    names = present()
    chosen = devices_of(config, here, mine, len(names))
    if names:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[index] for index in chosen)
