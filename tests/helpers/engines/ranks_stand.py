"""Engines of several tensor-parallel ranks in one process: each rank has SGLang's pool, page allocator and
prefix cache, and our port. Made up are the broadcast, which calls one rank after the other, and the model,
whose keys and values are random numbers."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import zmq
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams

from laminar_hpc.engine.sglang.plugin import kv_cache, protocol
from laminar_hpc.engine.sglang.plugin.port import EnginePort

SIZE, HEADS, HEAD_DIM, LAYERS = 512, 2, 16, 2
NAMESPACE = "0"  # the weight id
TURNS = 4000  # of some 0.1 ms and more, for one answer
STEPS = 5  # tokens that a request gets while one answer is awaited


class Request:
    """As much of SGLang's Req as a move looks at."""

    def __init__(self, name: str, prompt: list[int], new: int, page_size: int) -> None:
        self.rid, self.extra_key, self.origin_input_ids, self.new = name, NAMESPACE, prompt, new
        self.output_ids: list[int] = []
        self.sampling_params, self.grammar, self.retraction_count = SamplingParams(), None, 0
        self.finished_reason: Any = None
        self.to_finish: Any = None
        self.pages = -(-(len(prompt) + new) // page_size) * page_size
        self.kv = SimpleNamespace(holds_kv=True, req_pool_idx=0, kv_committed_len=len(prompt))

    @property
    def tokens(self) -> list[int]:
        return self.origin_input_ids + self.output_ids

    def finished(self) -> bool:
        return self.finished_reason is not None

    def update_finish_state(self) -> None:
        """In the order of schedule_batch.py:1919."""
        if self.to_finish:
            self.finished_reason, self.to_finish = self.to_finish, None
        elif len(self.output_ids) >= self.new:
            self.finished_reason = SimpleNamespace(to_json=lambda: {"type": "length"})


class Rank:
    """One scheduler, and a request at most."""

    def __init__(self, base: str, rank: int, ranks: int, page_size: int, seed: int) -> None:
        self.page_size, self.draw = page_size, torch.Generator().manual_seed(100 * seed + rank)
        options = {"dtype": torch.float32, "device": "cpu"}
        shape = {"head_num": HEADS, "head_dim": HEAD_DIM, "layer_num": LAYERS}
        pool = MHATokenToKVPool(size=SIZE, page_size=page_size, enable_memory_saver=False, **shape, **options)
        if page_size == 1:
            self.allocator = TokenToKVPoolAllocator(SIZE, kvcache=pool, need_sort=False, **options)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(
                SIZE, page_size, kvcache=pool, need_sort=False, **options
            )
        components = (ComponentType.FULL,)
        self.tree = UnifiedRadixCache(
            CacheInitParams(False, None, self.allocator, page_size, tree_components=components)
        )
        self.batch = SimpleNamespace(reqs=[], batch_is_full=False)
        self.rows = torch.zeros(1, SIZE, dtype=torch.int32)
        config = SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: {"model_type": "made up"}))
        scheduler = SimpleNamespace(
            tree_cache=self.tree,
            token_to_kv_pool_allocator=self.allocator,
            running_batch=self.batch,
            last_batch=None,
            req_to_token_pool=SimpleNamespace(req_to_token=self.rows),
            tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model_config=config)),
        )
        self.port = EnginePort(scheduler, base, rank, ranks)
        cache = self.port.kv.cache
        cache.rank, cache.ranks = rank, ranks
        cache.fingerprint = f"rank {rank} of {ranks}"

    def begin(self, request: Request) -> None:
        pages = self.allocator.alloc(request.pages)
        self.rows[0, : len(pages)] = pages.to(torch.int32)
        self._compute(pages[: len(request.origin_input_ids)])
        self.batch.reqs.append(request)

    def step(self, token: int) -> None:
        """One token of each request, and what SGLang does with one that ends."""
        for request in list(self.batch.reqs):
            known = len(request.tokens) - 1
            if request.output_ids:
                self._compute(self.rows[0, known : known + 1].to(torch.int64))
                request.kv.kv_committed_len = known + 1
            request.output_ids.append(token)
            request.update_finish_state()
            if request.finished():
                self._end(request)

    def _end(self, request: Request) -> None:
        self.batch.reqs.remove(request)
        request.kv.holds_kv = False
        tokens = request.tokens[:-1]
        full = len(tokens) // self.page_size * self.page_size
        pages = self.rows[0, : request.pages].to(torch.int64)
        self.tree.insert(
            InsertParams(key=kv_cache._key(tokens[:full], NAMESPACE), value=pages[:full].clone())
        )
        self.allocator.free(pages[full:])

    def _compute(self, slots: torch.Tensor) -> None:
        for buffer in self.port.kv.cache.pool.tensors:
            buffer[slots] = torch.randn(len(slots), HEADS, HEAD_DIM, generator=self.draw)

    def prefix(self, tokens: list[int]) -> torch.Tensor:
        """Keys and values of the tokens' prefix in the cache, [2 * layers, tokens, heads, head_dim]."""
        hold = self.port.kv.cache.hold(tokens, NAMESPACE)
        self.port.kv.cache.release(hold)
        return torch.stack([buffer[hold.slots] for buffer in self.port.kv.cache.pool.tensors])

    def state(self) -> tuple:
        """What must be the same on all ranks in each turn."""
        free = self.allocator.get_all_free_pages().tolist()
        return free, self.tree.evictable_size(), sorted(self.port.kv.under_way), len(self.port.kv.leaving)

    def all_free(self) -> bool:
        """Nothing is held or reserved: all is free, or a prefix that may be evicted."""
        return self.allocator.available_size() + self.tree.evictable_size() == SIZE


class Engine:
    """Its ranks take their turns together; after each they must agree. `hasty`: a request gets a token in
    every turn, so that it may end at any time."""

    def __init__(self, folder: Path, ranks: int, page_size: int, seed: int, hasty: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        base = str(folder / "port")
        with get_parallel().override(enable_dp_attention=False, attn_cp_size=1, pp_size=1):
            self.ranks = [Rank(base, rank, ranks, page_size, seed) for rank in range(ranks)]
        self.page_size, self.folder, self.draw = page_size, folder, random.Random(seed)
        self.hasty, self.steps = hasty, STEPS
        self.client = zmq.Context.instance().socket(zmq.DEALER)
        self.client.linger = 0
        self.client.connect(f"ipc://{protocol.socket_path(base, 0)}")

    def begin(self, name: str, prompt: list[int], new: int) -> list[Request]:
        """The same request on all ranks."""
        requests = [Request(name, list(prompt), new, self.page_size) for _ in self.ranks]
        for rank, request in zip(self.ranks, requests, strict=True):
            rank.begin(request)
        return requests

    def turn(self) -> None:
        orders = self.ranks[0].port.orders()
        for rank in self.ranks:
            rank.port.turn([orders] if orders else [])
        if self.hasty or self.steps:
            token, self.steps = self.draw.randrange(1000), self.steps - 1
            for rank in self.ranks:
                rank.step(token)
        states = [rank.state() for rank in self.ranks]
        assert all(state == states[0] for state in states), states

    def ask(self, request: protocol.KvRequest) -> None:
        self.client.send_multipart([b"", protocol.encode(request)])

    def answer(self) -> protocol.PortReply | None:
        if not self.client.get(zmq.EVENTS) & zmq.POLLIN:
            return None
        return protocol.decode_reply(self.client.recv_multipart()[1])

    def call(self, request: protocol.KvRequest, *others: "Engine") -> protocol.PortReply:
        """Turns of this engine and the others until it is answered."""
        self.ask(request)
        for engine in (self, *others):
            engine.steps = STEPS
        for _ in range(TURNS):
            for engine in (self, *others):
                engine.turn()
            if (reply := self.answer()) is not None:
                return reply
            if not self.hasty or not self.ranks[0].batch.reqs:
                self.ranks[0].port.leader.socket.poll(5)
        raise AssertionError(f"{request} was not answered within {TURNS} turns")

    def settle(self) -> None:
        """Until no operation is under way and no request runs."""
        for _ in range(TURNS):
            self.steps = STEPS
            self.turn()
            under_way = any(rank.port.operations.under_way for rank in self.ranks)
            if not under_way and not any(rank.batch.reqs for rank in self.ranks):
                return
            self.ranks[0].port.leader.socket.poll(5)
        raise AssertionError(f"operations go on after {TURNS} turns")

    def close(self) -> None:
        for rank in self.ranks:
            rank.port.kv.drop_all()
            if rank.port.source._threads is not None:
                rank.port.source._threads.shutdown()  # each says how it ended
            rank.port.socket.close(0)
            rank.port.operations._socket.close(0)
            if rank.port.leader is not None:
                rank.port.leader.socket.close(0)
        self.client.close(0)
