"""Which rank does what in one world: a pure function of the layout, so that every rank knows it
without asking.

Ranks are node-major with equal ranks per node. The trainers come first, then the controller; of what is left
on each node the first ranks are its relays, one per lane, and the others are rollouts. A replay has neither
relays nor rollouts.

On several nodes with GPUs these decide (`Gpus`): a node takes as many trainers as it has GPUs, in whole
tensor-parallel groups, and as many rollouts as fit on the GPUs that are left. The controller is on the first
node, whose address the others are given, and what is left over on a node is spare and ends at once.
"""

from dataclasses import dataclass
from itertools import count

from laminar_hpc.config.errors import LaminarError


@dataclass(frozen=True)
class RoleOfRank:
    """A rank's role, and its number within the role."""

    role: str
    index: int


@dataclass(frozen=True)
class Gpus:
    """Of each node; and how many a tensor-parallel group of trainers and an engine take."""

    per_node: int
    trainer_group: int = 1
    engine: int = 1


def assign_roles(
    trainers: int, rollouts: int, nodes: int, ranks_per_node: int, lanes: int = 1, gpus: Gpus | None = None
) -> list[RoleOfRank]:
    """Roles by rank; relay number i is lane i modulo `lanes` of its machine. `gpus`: of nodes that have some;
    where they are too few for each to have one use only, they are shared, and do not decide.

    Raises LaminarError when the world does not fit what the configuration asks for.
    """
    world = nodes * ranks_per_node
    if gpus and nodes > 1 and (roles := _by_gpus(trainers, rollouts, nodes, ranks_per_node, lanes, gpus)):
        return roles
    if not _fits(trainers, rollouts, nodes, ranks_per_node, lanes):
        relays = "a relay" if lanes == 1 else f"{lanes} relays"
        others = (
            f" + {rollouts} rollout ranks and {relays} per rollout machine" if rollouts else " (a replay)"
        )
        wanted = f"{trainers} trainer + 1 controller{others}"
        raise LaminarError(
            f"a world of {world} ranks ({nodes} x {ranks_per_node}) does not "
            f"fit {wanted}: start {_fitting(trainers, rollouts, nodes, lanes, gpus)}, "
            "or change trainer.data_parallel or rollout.replicas"
        )
    roles = [*(RoleOfRank("trainer", i) for i in range(trainers)), RoleOfRank("controller", 0)]
    relay = rollout = 0
    for node in range(nodes):
        for position in range((node + 1) * ranks_per_node - len(roles)):
            if position < lanes:
                roles.append(RoleOfRank("relay", relay))
                relay += 1
            else:
                roles.append(RoleOfRank("rollout", rollout))
                rollout += 1
    return roles


def _by_gpus(
    trainers: int, rollouts: int, nodes: int, ranks_per_node: int, lanes: int, gpus: Gpus
) -> list[RoleOfRank]:
    """Roles by rank where each trainer and engine has GPUs of its own; [] where that does not fit."""
    indices = {role: count() for role in ("trainer", "controller", "relay", "rollout", "spare")}
    roles: list[RoleOfRank] = []
    for node in range(nodes):
        free = ranks_per_node - (node == 0)
        here = min(trainers, free, gpus.per_node)
        if here < trainers:
            here -= here % gpus.trainer_group
        free -= here
        engines = max(0, min(rollouts, free - lanes, (gpus.per_node - here) // gpus.engine))
        trainers, rollouts = trainers - here, rollouts - engines
        names = ["trainer"] * here + ["controller"] * (node == 0)
        names += ["relay"] * (lanes if engines else 0) + ["rollout"] * engines
        names += ["spare"] * (ranks_per_node - len(names))
        roles += [RoleOfRank(name, next(indices[name])) for name in names]
    return [] if trainers or rollouts else roles


def _fits(trainers: int, rollouts: int, nodes: int, ranks_per_node: int, lanes: int) -> bool:
    """Whether each node's ranks behind trainers and controller are none or whole, and rollouts add up."""
    left = [max(0, min(ranks_per_node, (n + 1) * ranks_per_node - trainers - 1)) for n in range(nodes)]
    return (
        trainers + 1 <= nodes * ranks_per_node
        and sum(max(0, x - lanes) for x in left) == rollouts
        and not any(1 <= x <= lanes for x in left)
    )


def ranks_per_node_that_fit(
    trainers: int, rollouts: int, nodes: int, lanes: int, gpus: Gpus | None
) -> int | None:
    """The smallest number of ranks on each of `nodes` nodes that has room for all; None: there is none."""
    numbers = range(1, trainers + rollouts + nodes * lanes + 2)
    if gpus and nodes > 1:
        most = min(numbers[-1], gpus.per_node + lanes + 1)
        if found := next(
            (n for n in range(1, most + 1) if _by_gpus(trainers, rollouts, nodes, n, lanes, gpus)), None
        ):
            return found
    return next((n for n in numbers if _fits(trainers, rollouts, nodes, n, lanes)), None)


def _fitting(trainers: int, rollouts: int, nodes: int, lanes: int, gpus: Gpus | None) -> str:
    """A world that fits, in words."""
    found = ranks_per_node_that_fit(trainers, rollouts, nodes, lanes, gpus)
    return (
        f"{found} ranks per node"
        if found
        else f"{trainers + 1 + (rollouts and rollouts + lanes)} ranks on one node"
    )
