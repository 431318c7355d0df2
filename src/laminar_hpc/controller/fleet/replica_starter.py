"""Who starts replicas for the run, and ends what they stood on: the agent of this process (`laminar train`),
or a program of the user's own, `cluster.scale_command` (scale_program.py)."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.fleet.scale_program import CommandStarter, FailedCall, OnTheirWay
from laminar_hpc.line.agent_line import RankReport, orders, report


class ReplicaStarter(Protocol):
    """Neither `start` nor `stop` waits; what became of it `look` says, called each turn. `here` says the IDs
    of those who are in the run."""

    here: Callable[[], Collection[str]]

    def start(self, count: int) -> None: ...

    def stop(self, starter_id: str) -> None: ...

    def look(self) -> list[FailedCall | OnTheirWay]: ...

    def close(self, is_final: bool) -> None:
        """The controller ends; `is_final`: no other goes on with the run."""


def starter_of(config: RunConfig) -> ReplicaStarter:
    """Raises LaminarError where nobody starts replicas for this controller."""
    if config.role == "all":
        raise LaminarError(
            f"rollout.replicas={config.rollout.replicas}: ranks of one world begin and end together; start "
            "it with laminar train, laminar submit --apart or the scripts of launch/"
        )
    if config.cluster.scale_command:
        return CommandStarter(config.cluster.scale_command, Path(config.run_dir), start_limit(config))
    if not orders().starts_replicas:
        raise LaminarError(
            f"rollout.replicas={config.rollout.replicas}: nobody starts replicas here; name a program that "
            "does, cluster.scale_command=PROGRAM (docs/running.md), or write a number"
        )
    return AgentStarter()


def start_limit(config: RunConfig) -> float:
    """Seconds for a replica that has a machine to join, and to serve."""
    return config.rollout.engine_start_seconds + config.cluster.join_timeout_seconds


class AgentStarter:
    """The agent that has forked this process starts them beside it. A replica that leaves frees its place."""

    def __init__(self) -> None:
        self.here: Callable[[], Collection[str]] = frozenset

    def start(self, count: int) -> None:
        report(RankReport(start=count))

    def stop(self, starter_id: str) -> None:
        """Its agent has seen it leave."""

    def look(self) -> list[FailedCall | OnTheirWay]:
        return []

    def close(self, is_final: bool) -> None:
        """The agent ends those that it has started."""
