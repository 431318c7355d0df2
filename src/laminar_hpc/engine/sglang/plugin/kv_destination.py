"""A move's destination: pages and a listening thread, then the KV in the prefix cache. Its operations come
through the port; lockstep.py says how they are written."""

import torch

from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.kv.inbox import Expected, KvInbox
from laminar_hpc.engine.kv.transfer import of_all_ranks
from laminar_hpc.engine.sglang.plugin import kv_cache, protocol
from laminar_hpc.engine.sglang.plugin.kv_moves import Incoming, KvMoves, after
from laminar_hpc.engine.sglang.plugin.lockstep import OperationPart, Steps
from laminar_hpc.machine.processes import machine_name


class Destination:
    def __init__(self, moves: KvMoves) -> None:
        self.moves = moves

    def reserve(self, request: protocol.KvReserve) -> Steps:
        cache = self.moves.cache
        if request.move_id in self.moves.under_way:
            raise KvRefused(f"KV move refused: {request.move_id} is under way here already")
        if request.weight_id not in (served := kv_cache.served_weight_ids(cache.scheduler)):
            raise KvRefused(
                f"KV move refused: it is of weight id {request.weight_id}, "
                f"this engine serves {', '.join(map(str, served)) or 'none'}"
            )
        if request.tokens < cache.page_size:
            raise KvRefused(
                f"KV move refused: {request.tokens} tokens do not fill a page of {cache.page_size}"
            )
        pages = cache.reserve(request.tokens)
        move = Incoming(request.move_id, request.weight_id, after(request.seconds), request.seconds, pages)
        self.moves.under_way[request.move_id] = move
        try:
            addresses = yield OperationPart.at_once(
                lambda: self._listen(move, pages, request.host, request.folder)
            )
        except KvRefused:
            yield from self.moves.let_go(move)
            raise
        self.moves.check_goes_on(move)
        return protocol.KvReserved(of_all_ranks(addresses))

    def _listen(self, move: Incoming, pages: torch.Tensor, host: str, folder: str) -> str:
        slots = pages.to(device="cpu", dtype=torch.int64)
        cache, threads = self.moves.cache, torch.get_num_threads()
        expected = Expected(cache.fingerprint, move.weight_id, cache.pool, slots, threads, cache.launched())
        move.inbox = KvInbox(expected, host, machine_name(folder))
        return move.inbox.address

    def take(self, request: protocol.KvImport) -> Steps:
        move = self.moves.under_way.get(request.move_id)
        if not isinstance(move, Incoming) or move.pages is None:
            raise KvRefused(
                f"KV import refused: {request.move_id} is not reserved here, "
                "has been imported, or has run out of time"
            )
        there = set((yield OperationPart.at_once(lambda: str(_arrived(move, request.tokens)))))
        self.moves.check_goes_on(move)
        if len(there) > 1:
            raise KvRefused(
                f"KV import refused: of {request.move_id} the tensor-parallel ranks have "
                f"{', '.join(sorted(there))} tokens"
            )
        if move.pages is None:
            raise KvRefused(f"KV import refused: {request.move_id} has been imported meanwhile")
        if move.weight_id not in (served := kv_cache.served_weight_ids(self.moves.scheduler)):
            raise KvRefused(
                f"KV import refused: it is of weight id {move.weight_id}, "
                f"this engine serves {', '.join(map(str, served)) or 'none'}"
            )
        move.close()
        tokens = request.tokens[: int(there.pop())]
        move.hold = self.moves.cache.insert(tokens, str(move.weight_id), move.pages)
        move.pages = None
        move.expires = after(move.seconds)
        if len(move.hold.slots) < len(tokens):
            yield from self.moves.let_go(move)
            raise KvRefused(f"KV import failed: the prefix cache kept {len(tokens)} tokens in part only")
        return protocol.KvDone(len(tokens))


def _arrived(move: Incoming, tokens: list[int]) -> int:
    """The number of tokens whose KV this rank has. Raises KvRefused unless that is all, and of `tokens`."""
    there = move.inbox.tokens if move.inbox is not None else []
    if move.inbox is None or not move.inbox.complete:
        raise KvRefused(f"KV import refused: {move.move_id} is not all here, only {len(there)} tokens")
    if tokens[: len(there)] != there:
        raise KvRefused(
            f"KV import refused: the {len(there)} tokens that came are no prefix of the "
            f"{len(tokens)} expected"
        )
    return len(there)
