"""The state of one publication: the live weights of a step, from `Publisher.publish` until they may change
and are sent. Pure: no threads, no clock.

Two threads advance it. The publisher's moves the weights along (Progress); the trainer's wants to change them
(Claim). Invariant: weights that are read are never released, and released weights are never read.
"""

from dataclasses import dataclass
from enum import Enum


class PublicationProgress(Enum):
    """How far the publisher's thread is."""

    IDLE = "not with the relays, and nobody reads them"
    READING = "packed chunk by chunk"
    READ = "all packed; the last chunks and the sums are on their way"
    SENT = "with the first relay of every lane"


class Claim(Enum):
    """What the trainer's thread wants."""

    WORKING = "nothing: it runs forward and backward passes"
    FENCED = "it waits to change the weights"
    GIVEN_UP = "it has waited too long: whatever still reads them must stop"
    RELEASED = "it may change them"


class PublicationEvent(Enum):
    """What moves a publication on, one of the two."""

    START = "the publisher's thread begins to read"
    ALL_READ = "it has read all"
    ARRIVED = "the first relay of every lane has all"
    BROKE = "a link broke before that"
    RESEND = "a new link wants what was sent last"
    FENCE = "the trainer waits to change the weights"
    GIVE_UP = "it has waited too long"
    RELEASE = "the weights may change"


PROGRESS = {
    (PublicationProgress.IDLE, PublicationEvent.START): PublicationProgress.READING,
    (PublicationProgress.READING, PublicationEvent.ALL_READ): PublicationProgress.READ,
    (PublicationProgress.READ, PublicationEvent.ARRIVED): PublicationProgress.SENT,
    (PublicationProgress.READING, PublicationEvent.BROKE): PublicationProgress.IDLE,
    (PublicationProgress.READ, PublicationEvent.BROKE): PublicationProgress.IDLE,
    (PublicationProgress.SENT, PublicationEvent.RESEND): PublicationProgress.IDLE,
}
CLAIM = {
    (Claim.WORKING, PublicationEvent.FENCE): Claim.FENCED,
    (Claim.FENCED, PublicationEvent.FENCE): Claim.FENCED,
    (Claim.GIVEN_UP, PublicationEvent.FENCE): Claim.GIVEN_UP,
    (Claim.FENCED, PublicationEvent.GIVE_UP): Claim.GIVEN_UP,
    (Claim.GIVEN_UP, PublicationEvent.GIVE_UP): Claim.GIVEN_UP,
    (Claim.FENCED, PublicationEvent.RELEASE): Claim.RELEASED,
    (Claim.GIVEN_UP, PublicationEvent.RELEASE): Claim.RELEASED,
}


@dataclass
class Publication:
    """One thread at a time: the two meet under the lock of `Handover`."""

    step: int
    probe: list[float]
    probe_seconds: float
    stall_seconds: float = 0.0  # in which the trainer stood still
    waiting_since: float | None = None  # time.monotonic(), while the trainer stands still
    progress: PublicationProgress = PublicationProgress.IDLE
    claim: Claim = Claim.WORKING

    @property
    def fenced(self) -> bool:
        """The trainer waits for the release."""
        return self.claim in (Claim.FENCED, Claim.GIVEN_UP)

    def allows(self, event: PublicationEvent) -> bool:
        """By the tables, and by the invariant, which binds the two together."""
        if event is PublicationEvent.RELEASE and self.progress is PublicationProgress.READING:
            return False
        if event in (PublicationEvent.START, PublicationEvent.RESEND) and self.claim in (
            Claim.GIVEN_UP,
            Claim.RELEASED,
        ):
            return False
        return (self.progress, event) in PROGRESS or (self.claim, event) in CLAIM

    def advance(self, event: PublicationEvent) -> None:
        """Raises ValueError for an event that the tables do not allow."""
        if not self.allows(event):
            raise ValueError(f"{event.name} of weights that are {self.progress.name} and {self.claim.name}")
        self.progress = PROGRESS.get((self.progress, event), self.progress)
        self.claim = CLAIM.get((self.claim, event), self.claim)

    def goes_on(self, now: float) -> None:
        """The trainer no longer stands still."""
        if self.waiting_since is not None:
            self.stall_seconds += now - self.waiting_since
            self.waiting_since = None
