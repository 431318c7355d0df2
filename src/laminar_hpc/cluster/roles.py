"""Which rank does what in one torchrun world: a pure function of the layout, so that every rank knows it
without asking.

Ranks are node-major with equal ranks per node. The trainers come first, then the controller; of what is left
on each node the first ranks are its relays, one per lane, and the others are rollouts. A replay has neither
relays nor rollouts.
"""

from dataclasses import dataclass

from laminar_hpc.config.errors import LaminarError


@dataclass(frozen=True)
class RoleOfRank:
    role: str
    index: int


def assign_roles(
    trainers: int, rollouts: int, nodes: int, ranks_per_node: int, lanes: int = 1
) -> list[RoleOfRank]:
    """Roles by rank; relay number i is lane i modulo `lanes` of its machine.

    Raises LaminarError when the world does not fit what the configuration asks for.
    """
    world = nodes * ranks_per_node
    if not _fits(trainers, rollouts, nodes, ranks_per_node, lanes):
        relays = "a relay" if lanes == 1 else f"{lanes} relays"
        others = (
            f" + {rollouts} rollout ranks and {relays} per rollout machine" if rollouts else " (a replay)"
        )
        wanted = f"{trainers} trainer + 1 controller{others}"
        raise LaminarError(
            f"a world of {world} ranks ({nodes} x {ranks_per_node}) does not "
            f"fit {wanted}: start {_fitting(trainers, rollouts, nodes, lanes)}, "
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


def _fits(trainers: int, rollouts: int, nodes: int, ranks_per_node: int, lanes: int) -> bool:
    """Whether every node's ranks after trainers and controller are none, or all its relays and rollouts, and
    the rollouts add up."""
    left = [max(0, min(ranks_per_node, (n + 1) * ranks_per_node - trainers - 1)) for n in range(nodes)]
    return (
        trainers + 1 <= nodes * ranks_per_node
        and sum(max(0, x - lanes) for x in left) == rollouts
        and not any(1 <= x <= lanes for x in left)
    )


def _fitting(trainers: int, rollouts: int, nodes: int, lanes: int) -> str:
    """A world that fits, in words."""
    limit = trainers + rollouts + nodes * lanes + 2
    fitting = [n for n in range(1, limit) if _fits(trainers, rollouts, nodes, n, lanes)]
    return (
        f"{fitting[0]} ranks per node"
        if fitting
        else f"{trainers + 1 + (rollouts and rollouts + lanes)} ranks on one node"
    )
