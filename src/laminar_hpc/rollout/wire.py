"""What a replica knows, as messages say it: what is not known is None here, and -1 or 0 on the wire."""

import dataclasses

from laminar_hpc.engine.interface import Utilization
from laminar_hpc.messages.data import ReplicaLoad
from laminar_hpc.messages.rollouts import RequestWork
from laminar_hpc.rollout.state import ReplicaState

_NONE = -1  # a weight id or batch id that there is not


def request_work(weight_id: int | None, newest_batch: int | None) -> RequestWork:
    """`newest_batch`: the newest one that this replica was granted in this life."""
    return RequestWork(_or_none(weight_id), _or_none(newest_batch))


def replica_load(
    state: ReplicaState,
    scoring: int,
    utilization: Utilization | None,
    tokens_per_second: float,
    saturation_requests: int | None,
) -> ReplicaLoad:
    """`utilization` is None when the engine does not say, `saturation_requests` before it is measured."""
    return ReplicaLoad(
        state.phase.value,
        _or_none(state.weight_id),
        state.in_flight,
        scoring,
        tokens_per_second=tokens_per_second,
        batch_max=saturation_requests or 0,
        **(dataclasses.asdict(utilization) if utilization else {}),
    )


def _or_none(value: int | None) -> int:
    return _NONE if value is None else value
