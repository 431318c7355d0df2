"""The machines of a run without Slurm: the host file, and which role runs on which of them. Pure functions.

    # a line for each: what ssh calls it, and its GPUs
    node1            gpus=8
    me@10.0.0.2      gpus=8

The controller is on the first machine. The trainers fill the first ones in equal shares, as in a Slurm job
(launch/slurm/layout.py); relays and replicas are on those behind them, and where these have no room also on
the trainers' other GPUs. With cluster.storage=stream these see no folder of the run, and the first machine
has a relay from which theirs get the weights.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from laminar_hpc.config.check import Derived
from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.launch.slurm.layout import refuse_unless_scaled, shares_gpus, trainers_per_node


@dataclass(frozen=True)
class Host:
    """A machine; `gpus`: 0 = its part of the run is on the CPU."""

    name: str
    gpus: int


@dataclass(frozen=True)
class HostPart:
    """What one machine does. `trainers`: (which of the trainers' machines, how many of them there are).
    `replicas`: here, with their relays. `relay`: a relay alone. `joins`: it sees no folder of the run."""

    host: Host
    controller: bool = False
    trainers: tuple[int, int] | None = None
    replicas: int = 0
    relay: bool = False
    joins: bool = False


def read_hosts(path: Path, gpus: int) -> list[Host]:
    """`gpus`: of machines whose line does not say. Raises Refused with a line for each mistake."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise LaminarError(f"--hosts={path} cannot be read: {why}") from None
    hosts, mistakes = list[Host](), list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        name, rest = words[0], words[1:]
        key, _, value = rest[0].partition("=") if rest else ("gpus", "", str(gpus))
        if name.startswith("-") or "=" in name or len(rest) > 1 or key != "gpus" or not value.isdigit():
            mistakes.append(f"{path}:{number}: {line.strip()}: write NAME or NAME gpus=N")
        elif name in [host.name for host in hosts]:
            mistakes.append(f"{path}:{number}: {name} is there twice")
        else:
            hosts.append(Host(name, int(value)))
    if mistakes:
        raise Refused(mistakes)
    if not hosts:
        raise LaminarError(f"--hosts={path} names no machine: write one line for each, NAME or NAME gpus=N")
    return hosts


def assign(config: RunConfig, derived: Derived, hosts: Sequence[Host]) -> list[HostPart]:
    """A part for each machine that has one, in the order of `hosts`.

    Raises LaminarError for what has no place on them."""
    refuse_unless_scaled(config)
    on_gpus = any(host.gpus for host in hosts)
    if on_gpus and shares_gpus(config):
        raise LaminarError(
            "trainer.devices and rollout.devices name the same GPUs: that is for one machine "
            "(laminar train); leave both at null"
        )
    nodes = _trainer_hosts(config, derived, hosts)
    here = {host: (index, len(nodes)) for index, host in enumerate(nodes)}
    free = [host for host in hosts if host not in here]
    beside = {host: host.gpus - derived.trainer_ranks // len(nodes) for host in nodes if host.gpus}
    replicas = _replicas(config, derived, free or ([] if on_gpus else list(hosts)), beside)
    parts = [
        HostPart(host, host == hosts[0], here.get(host), replicas.get(host, 0))
        for host in hosts
        if host == hosts[0] or host in here or host in replicas
    ]
    return parts if config.cluster.storage == "shared" else _joining(parts)


def _joining(parts: Sequence[HostPart]) -> list[HostPart]:
    """With cluster.storage=stream: machines of replicas alone join the run over the network."""
    found = [replace(part, joins=not part.controller and part.trainers is None) for part in parts]
    if any(part.joins for part in found):
        found[0] = replace(found[0], relay=True)
    return found


def _trainer_hosts(config: RunConfig, derived: Derived, hosts: Sequence[Host]) -> list[Host]:
    size = next((host.gpus for host in hosts if host.gpus), 0)
    each = trainers_per_node(config, derived, size)
    nodes = [host for host in hosts if host.gpus >= each or not size][: derived.trainer_ranks // each]
    if len(nodes) * each < derived.trainer_ranks:
        raise LaminarError(
            f"{derived.trainer_ranks} trainers, {each} on each machine, need {derived.trainer_ranks // each} "
            f"machines with GPUs, but there are {len(nodes)}: name more, or lower trainer.data_parallel"
        )
    return nodes


def _replicas(
    config: RunConfig, derived: Derived, free: Sequence[Host], beside: Mapping[Host, int]
) -> dict[Host, int]:
    """How many on which machine: on the `free` ones as equally as their GPUs allow, then on the trainers',
    whose other GPUs are `beside`."""
    size = config.rollout.tensor_parallel
    left = config.rollout.fewest if derived.rollout_ranks else 0
    room = {host: host.gpus // size if host.gpus else left for host in free}
    if any(host.gpus for host in free):
        room = {host: number for host, number in room.items() if host.gpus}
    if left > sum(room.values()):
        room |= {host: gpus // size for host, gpus in beside.items()}
    if left > sum(room.values()):
        raise LaminarError(
            f"{left} replicas of {size} GPUs (rollout.replicas, rollout.tensor_parallel) do not fit the "
            f"machines, which have room for {sum(room.values())} beside the trainers: name more, or lower "
            "rollout.replicas"
        )
    found: dict[Host, int] = {}
    for position, (host, most) in enumerate(room.items()):
        found[host] = min(most, math.ceil(left / (len(room) - position)))
        left -= found[host]
    for host, most in room.items():  # what the later ones had no room for
        more = min(left, most - found[host])
        found[host], left = found[host] + more, left - more
    return {host: number for host, number in found.items() if number}
