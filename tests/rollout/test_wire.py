"""None inside a replica is -1 or 0 in its messages, and nowhere else."""

from laminar_hpc.engine.interface import Utilization
from laminar_hpc.messages.data import ReplicaLoad
from laminar_hpc.messages.rollouts import RequestWork
from laminar_hpc.rollout.state import ReplicaState
from laminar_hpc.rollout.wire import replica_load, request_work


def test_what_is_not_known_yet():
    """A replica that has just started: no weights, no batch, no answer of its engine, nothing measured."""
    assert request_work(None, None) == RequestWork(-1, -1)
    assert replica_load(ReplicaState(), 0, None, 0.0, None) == ReplicaLoad("unverified", -1, 0, 0)


def test_what_is_known():
    """Id 0 and batch 0 are ids like others."""
    state = ReplicaState()
    state.begin_pull(0)
    state.verified(0)
    state.open(0)
    assert request_work(0, 0) == RequestWork(0, 0)
    load = replica_load(state, 3, Utilization(1, 2, 300, 4000), 5.5, 64)
    assert load == ReplicaLoad("open", 0, 0, 3, 1, 2, 300, 4000, 5.5, 64)
