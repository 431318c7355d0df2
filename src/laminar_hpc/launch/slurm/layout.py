"""Which Slurm jobs a run needs, on how many nodes with how many GPUs: a pure function of the configuration.

A run that fits one node, or whose trainers and engines share GPUs, is one job there (laminar_single.sbatch).
Any other has a job per failure domain: the controller without a GPU, the trainers on whole nodes, and an
array of rollouts with one element for each node; or these three are the components of one heterogeneous job
(laminar_hetjob.sbatch). machine/devices.py places the ranks on a node's GPUs.
"""

import math
from dataclasses import dataclass

from laminar_hpc.config.check import Derived
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig

GPUS_PER_NODE = 8


@dataclass(frozen=True)
class SlurmJob:
    """A job script of slurm/, sbatch's options for it, and the environment that it needs. A heterogeneous job
    has its options in its components, each named after the script of a job of its own."""

    script: str
    options: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    components: tuple["SlurmJob", ...] = ()


def gpus_by_default(config: RunConfig) -> int:
    """Of each node: 8 for a configuration that names its GPUs' memory, else none."""
    named = config.trainer.gpu_memory_gigabytes or config.rollout.gpu_memory_gigabytes
    return GPUS_PER_NODE if named else 0


def shares_gpus(config: RunConfig) -> bool:
    return bool(set(config.trainer.devices or ()) & set(config.rollout.devices or ()))


def layout(
    config: RunConfig, derived: Derived, gpus: int, apart: bool, hetjob: bool = False
) -> list[SlurmJob]:
    """The jobs, in the order in which they are submitted. `gpus` of each node, 0 = run on the CPU; `apart`:
    a job for each role although one node would do; `hetjob`: one heterogeneous job of all roles.

    Raises LaminarError for what has no place on such nodes."""
    apart = apart or config.rollout.scales
    used, replay, by_role = derived.gpus_unless_shared, not derived.rollout_ranks, hetjob or apart
    if shares_gpus(config):
        used = len({*(config.trainer.devices or ()), *(config.rollout.devices or ())})
        if by_role:
            raise LaminarError(
                f"--{'hetjob' if hetjob else 'apart'}: trainer.devices and rollout.devices name the same "
                "GPUs; leave both at null"
            )
    if hetjob and replay:
        raise LaminarError("--hetjob: a replay has no rollouts; drop the option")
    if not by_role and (replay or used <= gpus or not gpus) and (nodes := _nodes(derived, gpus)) == 1:
        return [_single(derived, nodes, min(used, gpus))]
    trainer = _trainer(config, derived, gpus)
    if replay:
        return [SlurmJob("control.sbatch", (), (("WAIT_FOR", "trainer"),)), trainer]
    rollouts = _rollouts(config, derived, gpus, hetjob)
    if hetjob:
        parts = (SlurmJob("control.sbatch", ("--nodes=1",)), trainer, rollouts)
        return [SlurmJob("laminar_hetjob.sbatch", (), rollouts.environment, parts)]
    return [SlurmJob("control.sbatch", ()), trainer, rollouts]


def refuse_unless_scaled(config: RunConfig) -> None:
    """Raises LaminarError where the run is to start replicas and nobody does so for it."""
    if config.rollout.scales and not config.cluster.scale_command:
        raise LaminarError(
            f"rollout.replicas={config.rollout.replicas}: on several machines name a program that starts and "
            "ends replicas, cluster.scale_command=PROGRAM (docs/running.md), or write a number"
        )


def _nodes(derived: Derived, gpus: int) -> int:
    """For all trainers."""
    return math.ceil(derived.trainer_ranks / gpus) if gpus else 1


def _gpus(count: int) -> tuple[str, ...]:
    return (f"--gpus-per-node={count}",) if count else ()


def _single(derived: Derived, nodes: int, gpus: int) -> SlurmJob:
    ranks = (("NPROC_PER_NODE", str(derived.world_size)),)
    return SlurmJob("laminar_single.sbatch", (f"--nodes={nodes}", *_gpus(gpus)), ranks)


def trainers_per_node(config: RunConfig, derived: Derived, gpus: int) -> int:
    """As many as a node has GPUs (0: all), equally many on each; whole tensor-parallel groups if they fit."""
    ranks, group = derived.trainer_ranks, config.trainer.tensor_parallel
    if not gpus:
        return ranks
    fits = [n for n in range(1, min(gpus, ranks) + 1) if ranks % n == 0]
    whole = [n for n in fits if n % group == 0] if group <= gpus else [n for n in fits if group % n == 0]
    return max(whole or fits)


def _trainer(config: RunConfig, derived: Derived, gpus: int) -> SlurmJob:
    each = trainers_per_node(config, derived, gpus)
    nodes = derived.trainer_ranks // each
    return SlurmJob("trainer.sbatch", (f"--nodes={nodes}", *_gpus(each if gpus else 0)))


def _rollouts(config: RunConfig, derived: Derived, gpus: int, hetjob: bool) -> SlurmJob:
    """As many replicas on each node as its GPUs hold, one without GPUs; as equally many as possible."""
    size = config.rollout.tensor_parallel
    if gpus and size > gpus:
        raise LaminarError(
            f"rollout.tensor_parallel={size}: an engine needs one node, which has --gpus-per-node={gpus}; "
            "lower it"
        )
    replicas = config.rollout.fewest
    nodes = math.ceil(replicas / (gpus // size if gpus else 1))
    each = math.ceil(replicas / nodes)
    place = f"--nodes={nodes}" if hetjob else f"--array=0-{nodes - 1}"
    options = (place, *_gpus(each * size if gpus else 0))
    return SlurmJob("rollouts.sbatch", options, (("ROLLOUTS", str(each)),))
