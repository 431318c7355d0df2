"""The port's KV operations: a request's cache goes to another engine while the request decodes, then the
request itself stops.

    destination   reserve  pages, a listening thread
                  import   into the radix tree, locked
                  end      unlocked
    source        send     full pages so far
                  detach   the request ends as "moved"; the rest is sent
                  end      unlocked

An operation is a generator: it runs in the scheduler's thread, and each `yield` lets the scheduler take a
turn. Gathering, scattering and the network are in threads of their own beside it. They need no copy of the
pages: KV that is written stays as it is until the request leaves them, and `send` fails unless it still held
them afterwards. A move that nobody ends is given up after its time limit.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from laminar_hpc.cluster.processes import machine_name
from laminar_hpc.engine.sglang.plugin import kv_cache, protocol
from laminar_hpc.engine.sglang.plugin.kv_cache import Hold, KvCache
from laminar_hpc.kv.errors import KvRefused
from laminar_hpc.kv.frames import Header
from laminar_hpc.kv.inbox import Expected, Inbox
from laminar_hpc.kv.transfer import chunk_bytes, send_part

Steps = Iterator[protocol.Reply | None]  # the last is the reply
MAX_THREADS = 8  # moves that are sent at once
DETACH_SECONDS = 30.0  # the request's last step; a prefill of others may be in it
CLOSE_SECONDS = 5.0  # a thread stops within POLL_SECONDS of kv/inbox.py and one chunk


@dataclass
class Outgoing:
    """Of the source. `sent` tokens are at the destination; `retractions` as the request had them then."""

    request: Any
    address: str
    folder: str
    seconds: float
    expires: float
    sent: int = 0
    retractions: int = 0
    hold: Hold | None = None
    sending: Future | None = None


@dataclass
class Incoming:
    """Of the destination: `pages` until the import, then `hold`."""

    weight_id: int
    expires: float
    seconds: float
    inbox: Inbox
    pages: torch.Tensor | None
    hold: Hold | None = None


class KvMoves:
    """All moves of one scheduler. `wake` is called from other threads when a thread of a move has ended."""

    def __init__(self, scheduler: Any, wake: Callable[[], None]) -> None:
        self.scheduler, self.wake = scheduler, wake
        self.moves: dict[str, Outgoing | Incoming] = {}
        self.leaving: list[Incoming] = []  # given up; their pages are freed when their threads have ended
        self._cache: KvCache | None = None
        self._threads: ThreadPoolExecutor | None = None

    @property
    def cache(self) -> KvCache:
        if self._cache is None:
            self._cache = KvCache(self.scheduler)
        return self._cache

    # ---- destination ---------------------------------------------------------------------------------------

    def reserve(self, request: protocol.KvReserve) -> Steps:
        cache = self.cache
        if request.move_id in self.moves:
            raise KvRefused(f"KV move refused: {request.move_id} is under way here already")
        if request.weight_id != (served := kv_cache.served_weight_id()):
            raise KvRefused(
                f"KV move refused: it is of weight id {request.weight_id}, this engine serves {served}"
            )
        if request.tokens < cache.page_size:
            raise KvRefused(
                f"KV move refused: {request.tokens} tokens do not fill a page of {cache.page_size}"
            )
        pages = cache.reserve(request.tokens)
        try:
            slots = pages.to(device="cpu", dtype=torch.int64)
            expected = Expected(
                cache.fingerprint, request.weight_id, cache.pool, slots, torch.get_num_threads()
            )
            inbox = Inbox(expected, request.host, machine_name(request.folder), self.wake)
        except Exception:
            cache.give_back(pages)
            raise
        self.moves[request.move_id] = Incoming(
            request.weight_id, _after(request.seconds), request.seconds, inbox, pages
        )
        yield protocol.KvReserved(inbox.address)

    def take(self, request: protocol.KvImport) -> Steps:
        move = self.moves.get(request.move_id)
        if not isinstance(move, Incoming) or move.pages is None:
            raise KvRefused(
                f"KV import refused: {request.move_id} is not reserved here, "
                "has been imported, or has run out of time"
            )
        tokens = move.inbox.tokens
        if not move.inbox.complete:
            raise KvRefused(
                f"KV import refused: {request.move_id} is not all here, only {len(tokens)} tokens"
            )
        if request.tokens[: len(tokens)] != tokens:
            raise KvRefused(
                f"KV import refused: the {len(tokens)} tokens that came are no prefix of the "
                f"{len(request.tokens)} expected"
            )
        if move.weight_id != (served := kv_cache.served_weight_id()):
            raise KvRefused(
                f"KV import refused: it is of weight id {move.weight_id}, this engine serves {served}"
            )
        move.inbox.close()
        move.hold, move.pages = self.cache.insert(tokens, str(move.weight_id), move.pages), None
        move.expires = _after(move.seconds)
        if len(move.hold.slots) < len(tokens):
            self._end(request.move_id)
            raise KvRefused(f"KV import failed: the prefix cache kept {len(tokens)} tokens in part only")
        yield protocol.KvDone(len(tokens))

    # ---- source --------------------------------------------------------------------------------------------

    def send(self, request: protocol.KvSend) -> Steps:
        if request.move_id in self.moves:
            raise KvRefused(f"KV move refused: {request.move_id} is under way here already")
        running = self.cache.running(request.request_id)
        tokens = self.cache.computed(running)
        if not tokens:
            raise KvRefused(
                f"KV move refused: request {request.request_id} fills no page of {self.cache.page_size} yet"
            )
        move = Outgoing(running, request.address, request.folder, request.seconds, _after(request.seconds))
        self.moves[request.move_id] = move
        slots, move.retractions = self.cache.slots(running, tokens), running.retraction_count
        try:
            yield from self._transfer(move, tokens, slots, last=False)
        except Exception:
            self._end(request.move_id)
            raise
        move.sent = tokens if self._same(move, slots) else 0
        if not move.sent:
            self._end(request.move_id)
            raise KvRefused(
                f"KV move failed: request {request.request_id} ended or was retracted while its KV was sent"
            )
        yield protocol.KvDone(tokens)

    def detach(self, request: protocol.KvDetach) -> Steps:
        move = self.moves.get(request.move_id)
        if not isinstance(move, Outgoing) or move.sending is not None or move.hold is not None:
            raise KvRefused(
                f"KV detach refused: nothing of {request.move_id} was sent from here, or it is being sent now"
            )
        running = self.cache.running(request.request_id)
        if running is not move.request:
            raise KvRefused(f"KV detach refused: {request.move_id} is of request {move.request.rid}")
        ended = running.to_finish = kv_cache.moved_reason(running)
        limit = _after(DETACH_SECONDS)
        while running.finished_reason is not ended:
            if running.finished() or time.monotonic() > limit:
                break
            yield None
        if running.finished_reason is not ended or ended.natural:
            running.to_finish = None
            self._end(request.move_id)
            how = "ended by itself" if running.finished() else f"took no step for {DETACH_SECONDS:g} s"
            raise KvRefused(f"KV detach refused: request {request.request_id} {how}")
        tokens = list(running.origin_input_ids + running.output_ids)[:-1]
        move.hold = self.cache.hold(tokens, str(running.extra_key))
        there = len(move.hold.slots)
        sent = move.sent if running.retraction_count == move.retractions else 0
        first = min(sent, there - self.cache.page_size)
        if first < 0:
            self._end(request.move_id)
            raise KvRefused(
                "KV detach failed: the KV of request "
                f"{request.request_id} is not in the prefix cache any more"
            )
        yield from self._transfer(move, there, move.hold.slots, last=True, first=first)
        if request.move_id not in self.moves:
            raise KvRefused(f"KV detach failed: {request.move_id} was ended meanwhile")
        yield protocol.KvDone(there)

    def _same(self, move: Outgoing, slots: torch.Tensor) -> bool:
        """Whether the request has held these slots all the time."""
        request = move.request
        if request.finished() or request.retraction_count != move.retractions or not request.kv.holds_kv:
            return False
        return torch.equal(self.cache.slots(request, len(slots)), slots)

    def _transfer(
        self, move: Outgoing, tokens: int, slots: torch.Tensor, *, last: bool, first: int = 0
    ) -> Steps:
        """Tokens [first, tokens) of the request, sent in a thread."""
        request, cache, machine = move.request, self.cache, machine_name(move.folder)
        namespace = str(request.extra_key)
        if not namespace.isdigit():
            raise KvRefused(
                f"KV move refused: request {request.rid} has "
                f"extra_key {namespace[:20]!r}, which is no weight id"
            )
        ids = (request.origin_input_ids + request.output_ids)[first:tokens]
        size = chunk_bytes(move.address, machine)
        header = Header.of(cache.fingerprint, int(namespace), cache.pool.shape, ids, size, first, last)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MAX_THREADS, "kv-send")
        options = {
            "machine": machine,
            "folder": move.folder,
            "threads": torch.get_num_threads(),
            "seconds": move.seconds,
        }
        move.sending = self._threads.submit(
            send_part, move.address, header, cache.pool, slots[first:tokens], **options
        )
        move.sending.add_done_callback(lambda _: self.wake())
        try:
            while not move.sending.done():
                yield None
            move.sending.result()
        finally:
            move.sending = None
        move.expires = _after(move.seconds)

    # ---- the end -------------------------------------------------------------------------------------------

    def end(self, request: protocol.KvEnd) -> Steps:
        move = self.moves.get(request.move_id)
        self._end(request.move_id)
        while any(move is left for left in self.leaving):
            yield None
        yield protocol.KvDone(0)

    def _end(self, move_id: str) -> None:
        move = self.moves.pop(move_id, None)
        if move is None:
            return
        if move.hold is not None:
            self.cache.release(move.hold)
        if isinstance(move, Incoming) and move.pages is not None:
            move.inbox.close()
            self.leaving.append(move)

    def tidy(self) -> None:
        """Each turn: moves whose time is over, and pages that no thread writes to any more."""
        now = time.monotonic()
        for move_id in [
            key
            for key, move in self.moves.items()
            if move.expires < now and getattr(move, "sending", None) is None
        ]:
            self._end(move_id)
        for move in [move for move in self.leaving if move.inbox.ended()]:
            self.leaving.remove(move)
            self.cache.give_back(move.pages)

    def drop_all(self) -> None:
        """Before the pool is cleared with all that is in it: no thread of ours writes into it afterwards."""
        arriving = [move for move in self.moves.values() if isinstance(move, Incoming)]
        for move in (*arriving, *self.leaving):
            move.inbox.close()
        for move_id in list(self.moves):
            self._end(move_id)
        for move in self.leaving:
            move.inbox.ended(CLOSE_SECONDS)
        self.leaving.clear()
        kv_cache.forget_reserved()


def _after(seconds: float) -> float:
    return time.monotonic() + seconds
