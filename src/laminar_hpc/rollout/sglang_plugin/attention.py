"""Attention of a whole batch in a few calls, for engines on the CPU: the same numbers as SGLang's torch_native backend up to rounding.

Stock torch_native walks over the requests in Python, four small operations each per layer, which is most of an engine's time. Here the
requests of a step are put in buckets of similar length, and each bucket is one gather and one scaled_dot_product_attention with a mask.
Hooked in by `register` where there is no CUDA; what it does not cover (sliding windows, cross attention, very long prefills) goes to stock.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

TARGET = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
SHRINK = 0.6  # a bucket takes lengths down to this share of its longest: at most 40% of a gather is padding
SMALL_BUCKET = 8  # fewer requests are not worth a bucket of their own
MASK_ELEMENTS = 1 << 24  # per bucket: 64 MB of float32


@dataclass
class Bucket:
    """Requests attended together. b requests, Lq queries and Lk keys each (padded), G query heads per KV head."""

    queries: torch.Tensor  # [b * Lq] rows of `query`
    slots: torch.Tensor  # [b * Lk] rows of the KV cache; padding repeats a slot of the same request, so that no other one is touched
    bias: torch.Tensor  # [b, 1, Lq * G, Lk] of the model's dtype, 0 or -inf
    taken: torch.Tensor | None  # [n] rows of the padded result that are real; None = all
    written: torch.Tensor  # [n] rows of `output` that they belong to


def buckets_of(lengths: list[int]) -> list[list[int]]:
    """Positions in `lengths`, grouped so that lengths in a group are similar; each group keeps the order of the batch."""
    groups: list[list[int]] = []
    longest = 0
    for position in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or (lengths[position] < SHRINK * longest and len(groups[-1]) >= SMALL_BUCKET):
            groups.append([])
            longest = lengths[position]
        groups[-1].append(position)
    return [sorted(group) for group in groups]


def make_bucket(
    group: list[int], starts: torch.Tensor, prefixes: torch.Tensor, news: torch.Tensor, table: torch.Tensor, heads: int, dtype: torch.dtype
) -> Bucket:
    """The bucket of requests `group`. starts, prefixes, news: [all requests] first row of `query`, tokens before it, tokens to attend from;
    table: [all requests, longest context] KV cache rows; heads: G."""
    rows = torch.tensor(group)
    start, prefix, new = starts[rows, None], prefixes[rows, None], news[rows, None]
    total = prefix + new
    keys = torch.arange(int(total.max()))
    query = torch.minimum(torch.arange(int(new.max())), new - 1)  # [b, Lq]; padding repeats the last one
    slots = table[rows, : len(keys)].to(torch.int64)
    slots = torch.where(keys < total, slots, slots[:, :1])
    hidden = keys > (prefix + query)[:, :, None]  # [b, Lq, Lk]
    bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    bias = bias.repeat_interleave(heads, dim=1)[:, None]
    written = (start + query).flatten()
    taken = None
    if query.shape[1] > 1:
        taken = (torch.arange(query.shape[1]) < new).flatten().nonzero()[:, 0]
    return Bucket(written, slots.flatten(), bias, taken, written if taken is None else written[taken])


def attend(
    query: torch.Tensor, output: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, buckets: list[Bucket], scaling: float | None
) -> None:
    """query, output: [tokens, heads, dim]; k_cache, v_cache: [slots, KV heads, dim]. Fills `output`."""
    kv_heads, dim, out_dim = k_cache.shape[1], query.shape[2], v_cache.shape[2]
    for bucket in buckets:
        b, keys = bucket.bias.shape[0], bucket.bias.shape[3]
        k = k_cache.index_select(0, bucket.slots).to(query.dtype).view(b, keys, kv_heads, dim).transpose(1, 2)
        v = v_cache.index_select(0, bucket.slots).to(query.dtype).view(b, keys, kv_heads, out_dim).transpose(1, 2)
        q = query.index_select(0, bucket.queries).view(b, -1, kv_heads, query.shape[1] // kv_heads, dim)
        lq, heads = q.shape[1], q.shape[3]
        q = q.transpose(1, 2).reshape(b, kv_heads, lq * heads, dim)  # query heads of one KV head are more queries to it
        result = scaled_dot_product_attention(q, k, v, attn_mask=bucket.bias, scale=scaling)
        result = result.view(b, kv_heads, lq, heads, out_dim).transpose(1, 2).reshape(b * lq, -1, out_dim)
        if bucket.taken is not None:
            result = result.index_select(0, bucket.taken)
        output.index_copy_(0, bucket.written, result)


class BatchedAttention(TorchNativeAttnBackend):
    """torch_native with the loops over requests replaced. The buckets of a step are made once and serve all layers."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        config = model_runner.model_config
        self._dtype = model_runner.dtype
        self._heads = config.num_attention_heads // config.num_key_value_heads
        self._buckets: list[Bucket] | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._buckets = None
        totals, mode = forward_batch.seq_lens, forward_batch.forward_mode
        if not len(totals) or self.use_sliding_window_kv_pool or not (mode.is_decode() or mode.is_extend()):
            return
        if mode.is_decode():
            news, starts = torch.ones_like(totals), torch.arange(len(totals))
        elif forward_batch.extend_seq_lens is not None:
            news = forward_batch.extend_seq_lens.to(totals.dtype)
            starts = torch.cumsum(news, 0) - news
        else:
            return
        table = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, : int(totals.max())]
        groups = [part for group in buckets_of(totals.tolist()) for part in self._cut(group, totals, news)]
        if groups and all(groups):
            self._buckets = [make_bucket(group, starts, totals - news, news, table, self._heads, self._dtype) for group in groups]

    def _cut(self, group: list[int], totals: torch.Tensor, news: torch.Tensor) -> list[list[int]]:
        """Parts of `group` whose mask fits; an empty part says that a single request's does not."""
        each = int(totals[group].max()) * int(news[group].max()) * self._heads
        size = MASK_ELEMENTS // each
        return [group[i : i + size] for i in range(0, len(group), size)] if size else [[]]

    def _batched(self, query: torch.Tensor, output: torch.Tensor, caches: tuple, scaling: float | None) -> torch.Tensor:
        assert self._buckets is not None
        attend(query, output, *caches, self._buckets, scaling)
        return output

    def _covers(self, encoder_lens: object, options: dict) -> bool:
        special = encoder_lens is not None or options.get("is_cross_attn") or options.get("sliding_window_size")
        return self._buckets is not None and not special

    def _run_sdpa_forward_decode(
        self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens=None, scaling=None, **options
    ) -> torch.Tensor:
        if self._covers(encoder_lens, options):
            return self._batched(query, output, (k_cache, v_cache), scaling)
        return super()._run_sdpa_forward_decode(
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, encoder_lens, scaling, **options
        )

    def _run_sdpa_forward_extend(
        self, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, prefix_lens, new_lens,
        encoder_lens=None, scaling=None, **options,
    ) -> torch.Tensor:  # fmt: skip
        if self._covers(encoder_lens, options) and options.get("causal"):
            return self._batched(query, output, (k_cache, v_cache), scaling)
        return super()._run_sdpa_forward_extend(
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, prefix_lens, new_lens,
            encoder_lens, scaling, **options,
        )  # fmt: skip
