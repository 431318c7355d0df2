"""What rollouts could not say before they ended, because there was no controller, is taken up by the next:
responses and scores count, and responses so far go to the pool, from where they go on elsewhere when their
replica has not come back.

Once, before anybody joins; in one transaction for each rollout, which also holds how far its stream is taken.
"""

import logging
from pathlib import Path

import msgspec

from laminar_hpc.controller.fleet.members import Member
from laminar_hpc.controller.trajectories.partial_responses import PartialResponsePool
from laminar_hpc.controller.trajectories.reports import TrajectoryReports
from laminar_hpc.controller.trajectories.tracker import TrajectoryTracker
from laminar_hpc.line import unsaid
from laminar_hpc.line.messages.membership import Hello
from laminar_hpc.line.messages.rollouts import Generated, Increment, Lost, Scored, Unfinished
from laminar_hpc.line.messages.wire import AnyMessage, decode
from laminar_hpc.store.store import Store

log = logging.getLogger(__name__)


def take_up(
    run_dir: Path,
    store: Store,
    tracker: TrajectoryTracker,
    pool: PartialResponsePool,
    reports: TrajectoryReports,
) -> None:
    """All that is left there for this store. What cannot be read stays, and is logged."""
    for path in unsaid.left(run_dir):
        try:
            head, frames = unsaid.read(path)
            if head.store_id != store.store_id:
                log.warning("%s is for the store %s and stays", path, head.store_id)
                continue
            count = sum(1 for _ in map(decode, frames))  # all of it is sound, or nothing is taken
            member = Member(head.identity, Hello("rollout", head.index, "", 1, ""), 0.0)
        except (OSError, msgspec.DecodeError) as error:
            log.error("%s cannot be read: %s", path, error)
            continue
        received = store.received().get(head.identity, 0)
        for number, frame in enumerate(unsaid.read(path)[1], head.first):
            if number > received:
                _take(decode(frame), member, tracker, pool, reports)
        store.note_received({head.identity: max(received, head.first + count - 1)})
        store.commit()
        log.info("%s: %d messages of a rollout that has ended", path, count)
        path.unlink()


def _take(
    message: AnyMessage,
    member: Member,
    tracker: TrajectoryTracker,
    pool: PartialResponsePool,
    reports: TrajectoryReports,
) -> None:
    """What only a live replica needs is passed over."""
    if isinstance(message, Generated):
        reports.on_generated(member, message)
    elif isinstance(message, Scored):
        reports.on_scored(member, message)
    elif isinstance(message, Lost):
        reports.on_lost(member, message)
    elif isinstance(message, Increment):
        reports.on_increment(member, message)
    elif isinstance(message, Unfinished) and tracker.owners.counts_as(message.trajectory_id, message.attempt):
        known = pool.get(message.trajectory_id, message.attempt)
        if known is None or message.partial.count > known.count:
            pool.put(message.trajectory_id, message.attempt, message.partial)
