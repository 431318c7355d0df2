"""Which rank does what in one torchrun world: a pure function of the layout, so that every rank knows it without asking.

Ranks are node-major with equal ranks per node. The trainers come first, then the controller; of what is left on each node the first rank
is the relay and the others are rollouts. A replay has neither relays nor rollouts.
"""

from dataclasses import dataclass

from laminar_hpc.config.errors import LaminarError


@dataclass(frozen=True)
class RoleOfRank:
    role: str
    index: int


def assign_roles(trainers: int, rollouts: int, nodes: int, ranks_per_node: int) -> list[RoleOfRank]:
    """Roles by rank. Raises LaminarError when the world does not fit what the configuration asks for."""
    world = nodes * ranks_per_node
    roles = [RoleOfRank("trainer", i) for i in range(min(trainers, world))]
    if len(roles) < world:
        roles.append(RoleOfRank("controller", 0))
    relay = rollout = 0
    if rollouts:
        for node in range(nodes):
            for position in range(len([r for r in range(len(roles), (node + 1) * ranks_per_node)])):
                roles.append(RoleOfRank("relay", relay) if position == 0 else RoleOfRank("rollout", rollout))
                relay, rollout = (relay + 1, rollout) if position == 0 else (relay, rollout + 1)
    if (
        len(roles) != world
        or rollout != rollouts
        or len([r for r in roles if r.role == "trainer"]) != trainers
        or roles[-1].role == "trainer"
    ):
        raise LaminarError(
            f"a world of {world} ranks ({nodes} x {ranks_per_node}) does not fit {trainers} trainer + 1 controller"
            + (
                f" + {rollouts} rollout ranks and a relay per rollout machine: start {world_size_hint(trainers, rollouts, nodes)}"
                if rollouts
                else f": start {trainers + 1}"
            )
            + ", or change trainer.data_parallel or rollout.replicas"
        )
    if relay and roles[-1].role == "relay":
        raise LaminarError(f"the last node would hold a relay without a rollout: use fewer nodes than {nodes} or more ranks per node")
    return roles


def world_size_hint(trainers: int, rollouts: int, nodes: int) -> str:
    """The ranks that would fit, in words."""
    fitting = [n for n in range(1, trainers + rollouts + nodes + 2) if _fits(trainers, rollouts, nodes, n)]
    return f"{fitting[0]} ranks per node" if fitting else f"{trainers + 2 + rollouts} ranks on one node"


def _fits(trainers: int, rollouts: int, nodes: int, ranks_per_node: int) -> bool:
    left = [max(0, min(ranks_per_node, (n + 1) * ranks_per_node - trainers - 1)) for n in range(nodes)]
    return trainers + 1 <= nodes * ranks_per_node and sum(max(0, x - 1) for x in left) == rollouts and 1 not in left
