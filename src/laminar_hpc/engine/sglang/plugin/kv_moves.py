"""The moves of one scheduler, which is one tensor-parallel rank's: what is held for each, and how it ends.

    destination   kv_destination.py   reserve  pages, a listening thread
                                      import   into the radix tree, locked
                                      end      unlocked
    source        kv_source.py        send     full pages so far
                                      detach   the request ends as "moved"; the rest is sent
                                      kept     of no request: what the radix tree has, locked
                                      end      unlocked

Every rank moves its own heads' rows, to the same rank of the other engine, and all ranks take each step in
the same turn: lockstep.py says how an operation is written. Gathering, scattering and the network are in
threads of their own beside the scheduler. A move that nobody ends is given up after its time limit.
"""

import math
import time
from collections.abc import Generator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch

from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.kv.inbox import KvInbox
from laminar_hpc.engine.sglang.plugin import kv_cache, protocol
from laminar_hpc.engine.sglang.plugin.kv_cache import Hold, KvCache
from laminar_hpc.engine.sglang.plugin.lockstep import OperationPart, Steps

Parts = Generator[OperationPart, list[str], None]
CLOSE_SECONDS = 5.0  # a thread stops within POLL_SECONDS of engine/kv/inbox.py and one chunk


@dataclass
class Outgoing:
    """Of the source. `sent` tokens are at the destination; `retractions` as the request had them then; one
    without a request is of what the radix tree kept."""

    move_id: str
    request: Any
    address: str
    folder: str
    seconds: float
    expires: float
    sent: int = 0
    retractions: int = 0
    hold: Hold | None = None
    sending: bool = False


@dataclass
class Incoming:
    """Of the destination: `pages` until the import, then `hold`. A rank that could not listen has none."""

    move_id: str
    weight_id: int
    expires: float
    seconds: float
    pages: torch.Tensor | None
    inbox: KvInbox | None = None
    hold: Hold | None = None

    def close(self) -> Future:
        """Done when no thread writes into the pages any more."""
        if self.inbox is not None:
            self.inbox.close()
            return self.inbox.left
        nothing: Future[None] = Future()
        nothing.set_result(None)
        return nothing


class KvMoves:
    """Those under way, by their ids, and the engine's cache."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.under_way: dict[str, Outgoing | Incoming] = {}
        # given up; their pages are freed when the threads of all ranks have ended
        self.leaving: list[Incoming] = []
        self._cache: KvCache | None = None

    @property
    def cache(self) -> KvCache:
        """Raises KvRefused where the engine is of a kind that cannot take part in a move."""
        if self._cache is None:
            self._cache = KvCache(self.scheduler)
        return self._cache

    def end(self, request: protocol.KvEnd) -> Steps:
        if (move := self.under_way.get(request.move_id)) is not None:
            yield from self.let_go(move)
        return protocol.KvDone(0)

    def check_goes_on(self, move: Outgoing | Incoming) -> None:
        if self.under_way.get(move.move_id) is not move:
            raise KvRefused(f"KV move failed: {move.move_id} was ended meanwhile")

    def _forget(self, move: Outgoing | Incoming) -> bool:
        """Returns whether pages are still to be given back."""
        if self.under_way.get(move.move_id) is not move:
            return False
        del self.under_way[move.move_id]
        if move.hold is not None:
            self.cache.release(move.hold)
        return isinstance(move, Incoming) and move.pages is not None

    def let_go(self, move: Outgoing | Incoming) -> Parts:
        """All that is held for a move, if it is not over yet. Its pages stay reserved, without a limit, as
        long as a thread of any rank may write into them."""
        if not self._forget(move):
            return
        assert isinstance(move, Incoming)
        self.leaving.append(move)
        yield OperationPart(move.close(), math.inf)
        if any(move is left for left in self.leaving):  # else the pool was cleared meanwhile
            self.leaving = [left for left in self.leaving if left is not move]
            assert move.pages is not None
            self.cache.give_back(move.pages)

    def expired(self) -> list[str]:
        """The moves whose time is over."""
        now = time.monotonic()
        return [move_id for move_id, move in self.under_way.items() if move.expires < now]

    def drop_all(self) -> None:
        """Before the pool is cleared with all that is in it: no thread of ours writes into it afterwards."""
        arriving = [move for move in self.under_way.values() if isinstance(move, Incoming)]
        closing = [move.close() for move in (*arriving, *self.leaving)]
        for move in list(self.under_way.values()):
            self._forget(move)
        self.leaving.clear()
        wait(closing, CLOSE_SECONDS)
        kv_cache.forget_reserved()


def after(seconds: float) -> float:
    """When a move expires that takes no step for so long, on the monotonic clock."""
    return time.monotonic() + seconds
