"""Which role a rank has: by its rank in one world of all roles, or in one of its own role."""

import os

from laminar_hpc.config.check import derive
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.machine.devices import gpus_per_node
from laminar_hpc.machine.roles import RoleOfRank, assign_roles


def place(config: RunConfig) -> tuple[RoleOfRank, list[RoleOfRank], int]:
    """This rank's role, those of all ranks of its world on this machine, and how many relays the run has
    at least.

    Raises LaminarError for a process that neither an agent nor torchrun has started."""
    if "RANK" not in os.environ and config.role != "rollout":
        by = (
            "srun started this process without torchrun"
            if "SLURM_PROCID" in os.environ
            else "torchrun did not start this process"
        )
        raise LaminarError(
            f"{by} (RANK is not set), so it cannot know its role: use `laminar train ...`, torchrun "
            "--nproc-per-node=N -m laminar_hpc ..., "
            "or on a cluster slurm/laminar_single.sbatch"
        )
    rank, world, per_node = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1"))
    )
    first = rank // per_node * per_node
    lanes = max(1, config.relay.lanes)
    if config.role == "rollout" and config.first_index:
        raise LaminarError(
            f"first_index={config.first_index}: leave it out for rollouts; the controller numbers them"
        )
    if config.role != "all":
        if config.role == "relay":
            _refuse_broken_lanes(lanes, per_node, config.first_index)
            _refuse_number_of_another_place(config)
        here = [
            RoleOfRank(config.role, config.first_index + other) for other in range(first, first + per_node)
        ]
        return here[rank - first], here, lanes
    if notice := config.cluster.preemption_notice:
        raise LaminarError(
            f"cluster.preemption_notice={notice}: in one world the loss of any rank ends the run; start the "
            "roles apart (`laminar launch --hosts`, `laminar submit --apart`, launch/rollout.sh)"
        )
    derived = derive(config)
    gpus = gpus_per_node(config)
    roles = assign_roles(
        derived.trainer_ranks, derived.rollout_ranks, world // per_node, per_node, lanes, gpus
    )
    return roles[rank], roles[first : first + per_node], sum(role.role == "relay" for role in roles)


def _refuse_number_of_another_place(config: RunConfig) -> None:
    """Relays of all places are numbered in one row, and the first is where the trainer is."""
    if config.cluster.place and config.first_index == 0:
        raise LaminarError(
            "first_index=0: number 0 belongs to a relay at the trainer's place; at "
            f"cluster.place={config.cluster.place} set first_index=1, or a number that no other relay has"
        )


def _refuse_broken_lanes(lanes: int, here: int, first_index: int) -> None:
    """The relays of a machine fill one slot together, each its own part of it."""
    if here != lanes:
        raise LaminarError(
            f"relay.lanes={lanes}, but {here} relays start here: start all {lanes} of a machine together, "
            f"with LANES={lanes} launch/relay.sh or torchrun --nproc-per-node={lanes}"
        )
    if first_index % lanes:
        raise LaminarError(
            f"first_index={first_index}: with relay.lanes={lanes} use {lanes} x n on the n-th machine with "
            "relays, counted from 0"
        )
