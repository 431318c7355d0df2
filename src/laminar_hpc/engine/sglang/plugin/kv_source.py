"""A move's source: a running request's KV goes to the destination while the request decodes, then the request
itself stops. Between two requests of a trajectory its KV goes from the prefix cache. The operations come
through the port; lockstep.py says how they are written.

The threads that send need no copy of the pages: KV that is written stays as it is until the request leaves
them, and `send` fails unless it still held them afterwards.
"""

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.kv.frames import PartHeader
from laminar_hpc.engine.kv.transfer import chunk_bytes, of_rank, send_part
from laminar_hpc.engine.sglang.plugin import kv_cache, protocol
from laminar_hpc.engine.sglang.plugin.kv_moves import KvMoves, Outgoing, Parts, after
from laminar_hpc.engine.sglang.plugin.lockstep import OperationPart, Steps, Until
from laminar_hpc.machine.processes import machine_name
from laminar_hpc.weights.links.streams import StreamEvent

MAX_THREADS = 8  # moves that are sent at once
DETACH_SECONDS = 30.0  # the request's last step; a prefill of others may be in it


class KvSource:
    def __init__(self, moves: KvMoves) -> None:
        self.moves = moves
        self._threads: ThreadPoolExecutor | None = None

    def send(self, request: protocol.KvSend) -> Steps:
        if request.move_id in self.moves.under_way:
            raise KvRefused(f"KV move refused: {request.move_id} is under way here already")
        running = self.moves.cache.running(request.request_id)
        tokens = self.moves.cache.computed(running)
        if not tokens:
            size = self.moves.cache.page_size
            raise KvRefused(f"KV move refused: request {request.request_id} fills no page of {size} yet")
        end = after(request.seconds)
        move = Outgoing(request.move_id, running, request.address, request.folder, request.seconds, end)
        self.moves.under_way[request.move_id] = move
        slots = self.moves.cache.slots(running, tokens)
        move.retractions = running.retraction_count
        try:
            yield from self._transfer(move, _of(running), tokens, slots, last=False)
            if not self._same(move, slots):
                raise KvRefused(
                    f"KV move failed: request {request.request_id} ended or was retracted "
                    "while its KV was sent"
                )
        except KvRefused:
            yield from self.moves.let_go(move)
            raise
        move.sent = tokens
        return protocol.KvDone(tokens)

    def detach(self, request: protocol.KvDetach) -> Steps:
        move = self.moves.under_way.get(request.move_id)
        if not isinstance(move, Outgoing) or move.sending or move.hold is not None:
            raise KvRefused(
                f"KV detach refused: nothing of {request.move_id} was sent from here, or it is being sent now"
            )
        running = self.moves.cache.running(request.request_id)
        if running is not move.request:
            raise KvRefused(f"KV detach refused: {request.move_id} is of request {move.request.rid}")
        try:
            yield from self._stop(running)
            self.moves.check_goes_on(move)
            tokens = list(running.origin_input_ids + running.output_ids)[:-1]
            move.hold = self.moves.cache.hold(tokens, str(running.extra_key))
            there = len(move.hold.slots)
            sent = move.sent if running.retraction_count == move.retractions else 0
            first = min(sent, there - self.moves.cache.page_size)
            if first < 0:
                raise KvRefused(
                    "KV detach failed: the KV of request "
                    f"{request.request_id} is not in the prefix cache any more"
                )
            yield from self._transfer(move, _of(running), there, move.hold.slots, last=True, first=first)
        except KvRefused:
            yield from self.moves.let_go(move)
            raise
        return protocol.KvDone(there)

    def send_kept(self, request: protocol.KvSendKept) -> Steps:
        if request.move_id in self.moves.under_way:
            raise KvRefused(f"KV move refused: {request.move_id} is under way here already")
        hold, end = self.moves.cache.hold(request.tokens, request.namespace), after(request.seconds)
        move = Outgoing(request.move_id, None, request.address, request.folder, request.seconds, end)
        self.moves.under_way[request.move_id], move.hold = move, hold
        there, what = len(hold.slots), (request.tokens, request.namespace)
        try:
            if not there:
                raise KvRefused(f"KV move refused: nothing of {request.move_id} is in the prefix cache")
            yield from self._transfer(move, what, there, hold.slots, last=True)
        except KvRefused:
            yield from self.moves.let_go(move)
            raise
        return protocol.KvDone(there)

    def _stop(self, running: Any) -> Generator[Until, list[str], None]:
        """The request ends as "moved" with its step."""
        refused = f"KV detach refused: request {running.rid}"
        ended = running.to_finish = kv_cache.moved_reason(running)
        late = f"{refused} took no step for {DETACH_SECONDS:g} s"
        try:
            yield Until(running.finished, DETACH_SECONDS, late)
        except KvRefused:
            running.to_finish = None
            raise
        if running.finished_reason is not ended or ended.by_itself():
            running.to_finish = None
            raise KvRefused(f"{refused} ended by itself")

    def _same(self, move: Outgoing, slots: torch.Tensor) -> bool:
        """Whether the request has held these slots all the time."""
        request = move.request
        if request.finished() or request.retraction_count != move.retractions or not request.kv.holds_kv:
            return False
        return torch.equal(self.moves.cache.slots(request, len(slots)), slots)

    def _transfer(
        self,
        move: Outgoing,
        what: tuple[list[int], str],
        tokens: int,
        slots: torch.Tensor,
        *,
        last: bool,
        first: int = 0,
    ) -> Parts:
        """Tokens [first, tokens) of `what`, which are token ids in a namespace, sent in a thread."""
        namespace = what[1]
        if not namespace.isdigit():
            raise KvRefused(
                f"KV move refused: {move.move_id} has extra_key {namespace[:20]!r}, which is no weight id"
            )
        ids = what[0][first:tokens]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MAX_THREADS, "kv-send")
        steps = self.moves.cache.launched()
        work = (self._send, move, int(namespace), ids, slots[first:tokens], first, last, steps)
        move.sending = True
        try:
            yield OperationPart(self._threads.submit(*work))
        finally:
            move.sending = False
        move.expires = after(move.seconds)
        self.moves.check_goes_on(move)

    def _send(
        self,
        move: Outgoing,
        weight_id: int,
        ids: list[int],
        slots: torch.Tensor,
        first: int,
        last: bool,
        steps: StreamEvent | None,
    ) -> None:
        """In a thread: this rank's rows, once `steps` is reached, to the same rank of the destination."""
        cache, machine = self.moves.cache, machine_name(move.folder)
        address = of_rank(move.address, cache.rank, cache.ranks)
        size = chunk_bytes(address, machine)
        header = PartHeader.of(cache.fingerprint, weight_id, cache.pool.shape, ids, size, first, last)
        send_part(
            address,
            header,
            cache.pool,
            slots,
            machine=machine,
            folder=move.folder,
            threads=torch.get_num_threads(),
            seconds=move.seconds,
            after=steps,
        )


def _of(request: Any) -> tuple[list[int], str]:
    """Returns the request's tokens so far, and their namespace."""
    return list(request.origin_input_ids + request.output_ids), str(request.extra_key)
