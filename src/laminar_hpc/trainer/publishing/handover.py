"""Where the trainer's thread and the publisher's meet: the live publication, under one lock."""

import logging
import threading
import time
from collections.abc import Callable

from laminar_hpc.trainer.publishing.publication import Publication, PublicationEvent, PublicationProgress

log = logging.getLogger(__name__)
POLL_SECONDS = 0.2  # after which a thread that waits here looks again


class Handover:
    """`changed` guards all else and is notified of every change. `live` may not change while it is here."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.live: Publication | None = None
        self.error: Exception | None = None  # that ended the publisher's thread
        self.awaited = "nothing"  # by the publisher's thread, for errors
        self.closing = False

    def hand(self, publication: Publication) -> None:
        """With the lock, by the trainer's thread."""
        self.live = publication
        self.changed.notify_all()

    def release(self, publication: Publication) -> None:
        """With the lock: the weights may change. Does nothing the second time."""
        if self.live is publication:
            if publication.progress is PublicationProgress.IDLE:
                log.warning(
                    "the weights of step %d were not published: no link to a relay took them; "
                    "the next ones go out",
                    publication.step,
                )
            publication.advance(PublicationEvent.RELEASE)
            self.live = None
            self.changed.notify_all()

    def end(self) -> Publication | None:
        """By the publisher's thread when it ends and reads nothing any more: whoever waits goes on. Returns
        what was live."""
        with self.changed:
            held = self.live
            self.live = None
            self.changed.notify_all()
        return held

    def wait_until(self, reached: Callable[[], bool], seconds: float, thread: threading.Thread) -> bool:
        """With the lock: whether it came true within `seconds`. Raises the error of the publisher's `thread`;
        nothing is awaited of a thread that has ended."""
        deadline = time.monotonic() + seconds
        while not reached() and thread.is_alive():
            self.raise_error()
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.changed.wait(min(left, 1.0))
        self.raise_error()
        return True

    def raise_error(self) -> None:
        """Raises the publisher's error in the trainer's thread."""
        if self.error is not None:
            raise self.error
