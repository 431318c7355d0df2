"""The publisher's thread of another trainer rank than 0: does what rank 0's commands say.

Waits for: the next command, for the exchange's time limit; rank 0 gives one at least every POLL_SECONDS.
"""

from laminar_hpc.trainer.publishing.commands import PublishingCommand, take
from laminar_hpc.trainer.publishing.handover import POLL_SECONDS, Handover
from laminar_hpc.trainer.publishing.publication import Publication
from laminar_hpc.trainer.publishing.rank_lanes import Publishable, RankLanes


class PublishingFollower:
    """Called by `Publisher._run`, turn after turn."""

    def __init__(self, model: Publishable, lanes: RankLanes, handover: Handover) -> None:
        self._exchange = model.publishing
        self._lanes = lanes
        self._handover = handover

    def turn(self) -> None:
        """Once the trainer of this rank has published: all that rank 0 does with these weights."""
        with self._handover.changed:
            publication = self._handover.live
            if publication is None:
                self._handover.changed.wait(POLL_SECONDS)
                return
        unfinished = self._follow(publication)
        with self._handover.changed:
            self._handover.live = None
            self._handover.changed.notify_all()
        if unfinished:
            self._lanes.end()

    def _follow(self, publication: Publication) -> bool:
        """Until the weights are released, and nothing reads them: whether they were before the last chunks
        had left."""
        unfinished = False
        while (order := take(self._exchange)).command is not PublishingCommand.RELEASE:
            if order.command is PublishingCommand.STATE:
                self._lanes.follow_membership()
                self._lanes.state()
            elif order.command is PublishingCommand.BEGIN:
                self._lanes.begin(publication, order.weight_id, order.number)
                unfinished = self._lanes.shared
            elif order.command is PublishingCommand.CHUNK:
                self._lanes.send_chunk(order.number)
            elif order.command is PublishingCommand.END:
                unfinished = False
                self._lanes.end()
        self._lanes.settle()
        return unfinished
