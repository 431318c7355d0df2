"""SGLang's KV pool, radix cache and requests as a move needs them: all that moves know of the
scheduler's inside stands here.

Everything runs in the scheduler's thread, between two steps. Reserved pages belong neither to the allocator
nor to the tree, so SGLang's idle check of its accounts would miss them: a hook adds them (`account`).
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from laminar_hpc.engine.kv import device
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.kv.frames import model_fingerprint
from laminar_hpc.engine.kv.pool import Pool, use_huge_pages
from laminar_hpc.engine.sglang.plugin.adapters import loaded
from laminar_hpc.weights.links.streams import StreamEvent

NEUTRAL = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
_reserved = 0  # tokens of this process


def account(original: Callable, checker: object, stats: object, uncached: int = 0) -> Any:
    """Hook around SchedulerInvariantChecker._check_all_pools."""
    return original(checker, stats, uncached + _reserved)


def tensor_parallel() -> tuple[int, int]:
    """This scheduler's rank, and how many there are."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return group.rank_in_group, group.world_size


def served_weight_ids(scheduler: Any) -> list[int]:
    """The weight ids that the engine serves: its adapters', or that of its weights, which may have none."""
    from sglang.srt.runtime_context import get_serving

    adapters = loaded(scheduler)
    names = [str(get_serving().weight_version)] if adapters is None else adapters
    return sorted(int(name) for name in names if name.isdigit())


def pool_of(buffers: object, page_size: int) -> Pool:
    """SGLang's pool as the extension sees it. Raises KvRefused without keys and values per layer (MLA)."""
    keys, values = getattr(buffers, "k_buffer", None), getattr(buffers, "v_buffer", None)
    if not isinstance(keys, list) or not isinstance(values, list):
        raise KvRefused(
            f"KV move refused: the engine's pool is a {type(buffers).__name__}; "
            "those of MHA and GQA models can be moved, MLA's not"
        )
    return Pool.of(keys, values, page_size)


@dataclass
class Hold:
    """KV in the radix tree that cannot be evicted until `release`. `slots` is int64 [tokens] on the CPU."""

    slots: torch.Tensor
    node: Any
    receipt: Any


class KvCache:
    """Raises KvRefused where this engine is of a kind that cannot take part in a move."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.tree = scheduler.tree_cache
        self.allocator = scheduler.token_to_kv_pool_allocator
        self.rank, self.ranks = tensor_parallel()
        try:
            from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
            from sglang.srt.runtime_context import get_parallel
        except ImportError:
            raise KvRefused(
                "KV move refused: this SGLang has no unified "
                "radix cache; install the version of requirements/"
            ) from None
        if (
            not isinstance(self.tree, UnifiedRadixCache)
            or self.tree.disable
            or len(self.tree.tree_components) != 1
        ):
            kind = (
                f"{type(self.tree).__name__} of {len(getattr(self.tree, 'tree_components', ()))} components"
            )
            raise KvRefused(
                f"KV move refused: the engine's prefix cache is {kind}, "
                "or off; a plain unified radix cache is needed"
            )
        parallel = get_parallel()
        if parallel.enable_dp_attention or parallel.attn_cp_size > 1 or parallel.pp_size > 1:
            raise KvRefused(
                "KV move refused: the engine's ranks have requests or layers of their own (data-parallel "
                "attention, context or pipeline parallelism); only plain tensor parallelism is moved"
            )
        self.page_size = self.allocator.page_size
        self.pool = pool_of(self.allocator.get_kvcache(), self.page_size)
        use_huge_pages(self.pool)
        config = scheduler.tp_worker.model_runner.model_config.hf_config.to_dict()
        self.fingerprint = model_fingerprint(config, self.rank, self.ranks)

    def launched(self) -> StreamEvent | None:
        """Of a pool on a GPU, reached when all steps launched so far are done: the last one may still write
        tokens that count as computed, and slots of a request that has ended. SGLang runs steps in a stream
        of their own (scheduler.py:4386 and 4623)."""
        on_gpu = device.on_gpu(self.pool)
        return device.launched(self.pool, self.scheduler.forward_stream) if on_gpu else None

    # ---- requests ------------------------------------------------------------------------------------------

    def running(self, request_id: str) -> Any:
        """The request, prefilled and decoding. Raises KvRefused if there is none, or a move would harm it."""
        for batch in (self.scheduler.running_batch, self.scheduler.last_batch):
            for request in batch.reqs if batch is not None else ():
                if (
                    request.rid == request_id
                    and not request.finished()
                    and request.output_ids
                    and request.kv.holds_kv
                ):
                    if wrong := _objection(request):
                        raise KvRefused(
                            f"KV move refused: request {request_id} has {wrong}, which a move does not carry"
                        )
                    return request
        raise KvRefused(f"KV move refused: no request {request_id} is decoding here")

    def computed(self, request: Any) -> int:
        """Tokens in full pages whose KV is there: of the newest token it is made in the next step."""
        known = min(request.kv.kv_committed_len, len(request.origin_input_ids) + len(request.output_ids) - 1)
        return known // self.page_size * self.page_size

    def slots(self, request: Any, tokens: int) -> torch.Tensor:
        """Copies the slots of the first `tokens` tokens, int64 on the CPU."""
        row = self.scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx, :tokens]
        return row.to(device="cpu", dtype=torch.int64, copy=True)

    # ---- pages ---------------------------------------------------------------------------------------------

    def reserve(self, tokens: int) -> torch.Tensor:
        """Whole pages for `tokens` tokens, int64 on the pool's device, by eviction. Raises KvRefused."""
        global _reserved
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        needed = -(-tokens // self.page_size) * self.page_size
        free, evictable = self.allocator.available_size(), self.tree.evictable_size()
        if needed > free + evictable:
            raise KvRefused(
                f"KV move refused: {needed} tokens do not fit, {free} are free and {evictable} can be evicted"
            )
        if needed > free:
            self.tree.evict(EvictParams(num_tokens=needed - free))
        pages = self.allocator.alloc(needed)
        if pages is None:
            raise KvRefused(
                f"KV move refused: {needed} tokens do not fit, {self.allocator.available_size()} are free"
            )
        _reserved += needed
        return pages

    def give_back(self, pages: torch.Tensor) -> None:
        global _reserved
        self.allocator.free(pages)
        _reserved -= len(pages)
        self._room()

    def insert(self, tokens: list[int], namespace: str, pages: torch.Tensor) -> Hold:
        """Reserved `pages`, the first len(tokens) filled, become a prefix in the tree; the rest is free."""
        global _reserved
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        filled = pages[: len(tokens)].to(torch.int64)
        if len(pages) > len(tokens):
            self.allocator.free(pages[len(tokens) :])
        _reserved -= len(pages)
        # frees those whose tokens it held already
        self.tree.insert(InsertParams(key=_key(tokens, namespace), value=filled))
        return self.hold(tokens, namespace)

    def hold(self, tokens: list[int], namespace: str) -> Hold:
        """The longest prefix of `tokens` in the tree, locked."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        match = self.tree.match_prefix(MatchPrefixParams(key=_key(tokens, namespace)))
        receipt = self.tree.inc_lock_ref(match.last_device_node).to_dec_params()
        return Hold(match.device_indices.to(device="cpu", dtype=torch.int64), match.last_device_node, receipt)

    def release(self, hold: Hold) -> None:
        self.tree.dec_lock_ref(hold.node, hold.receipt)
        self._room()

    def _room(self) -> None:
        """Lets the scheduler look for room again: after a request that did not fit it would wait until one of
        its own ends."""
        self.scheduler.running_batch.batch_is_full = False


def forget_reserved() -> None:
    """After the allocator has been cleared with all that was reserved of it."""
    global _reserved
    _reserved = 0


def _key(tokens: list[int], namespace: str) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(array("q", tokens), namespace)


def _objection(request: Any) -> str:
    """What of the request's state stays behind: its sampling parameters come along, but what it has drawn
    counts as prompt there."""
    parameters = request.sampling_params
    if wrong := [name for name, value in NEUTRAL.items() if getattr(parameters, name) != value]:
        return wrong[0]
    if parameters.min_new_tokens > len(request.output_ids):
        return f"min_new_tokens={parameters.min_new_tokens}"
    if parameters.stop_strs or parameters.stop_regex_strs:
        return "stop strings"
    if request.grammar is not None or any(
        (parameters.json_schema, parameters.regex, parameters.ebnf, parameters.structural_tag)
    ):
        return "a grammar"
    others = {
        "custom_logit_processor": "a custom logit processor",
        "input_embeds": "input embeddings",
        "multimodal_inputs": "images or sound",
        "session": "a session",
    }
    return next((text for name, text in others.items() if getattr(request, name, None) is not None), "")


def moved_reason(request: Any) -> Any:
    """What `request.to_finish` is set to, so that the request ends after its current step as "moved".
    `by_itself()` says afterwards whether this step was the last one anyhow.

    SGLang takes `to_finish` for the reason before it looks whether the step ended the request
    (schedule_batch.py:1923), so that is looked up when the reason is written into the answer.
    """
    from sglang.srt.managers.schedule_batch import BaseFinishReason

    class Moved(BaseFinishReason):
        json: dict | None = None
        natural = False

        def to_json(self) -> dict:
            if self.json is None:
                request.finished_reason = request.to_finish = None
                request.update_finish_state()
                own = request.finished_reason
                request.finished_reason = self
                self.natural = own is not None
                self.json = own.to_json() if own is not None else {"type": "moved"}
            return self.json

        def by_itself(self) -> bool:
            self.to_json()  # SGLang asks for it on the rank that answers only
            return self.natural

    return Moved()
