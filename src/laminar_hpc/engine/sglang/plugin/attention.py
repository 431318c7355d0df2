"""Attention of a whole batch in a few calls, for engines on the CPU: the same numbers as SGLang's
torch_native backend up to rounding.

Stock torch_native walks over the requests in Python, four small operations each per layer, which is most of
an engine's time. Here the requests of a step are put in buckets of similar length, and each bucket is one
gather and one scaled_dot_product_attention with a mask. While the same requests decode on, their buckets only
grow by a column a step. Hooked in by hooks.py where there is no CUDA; what it does not cover (sliding
windows, cross attention, very long prefills) goes to stock.
"""

from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch.nn.functional import scaled_dot_product_attention

SHRINK = 0.6  # a bucket takes lengths down to this share of its longest: at most 40% of a gather is padding
SMALL_BUCKET = 8  # fewer requests are not worth a bucket of their own
MASK_ELEMENTS = 1 << 24  # per bucket: 64 MB of float32
ROOM = 64  # decoding steps for which a bucket has columns in store


@dataclass
class Bucket:
    """Requests attended together: b requests, Lq queries, Lk keys each (padded), G heads per KV head."""

    # [b * Lq] rows of `query`; where Lq is 1 these are the requests' positions in the batch
    queries: torch.Tensor
    # [b * Lk] rows of the KV cache; padding repeats a slot of the same request, so that no other one is
    # touched
    slots: torch.Tensor
    bias: torch.Tensor  # [b, 1, Lq * G, Lk] of the model's dtype, 0 or -inf; [b, 1, 1, Lk] where Lq is 1
    taken: torch.Tensor | None  # [n] rows of the padded result that are real; None = all
    written: torch.Tensor  # [n] rows of `output` that they belong to


def buckets_of(lengths: list[int]) -> list[list[int]]:
    """Positions in `lengths`, in groups of similar length; each group keeps the order of the batch."""
    groups: list[list[int]] = []
    longest = 0
    for position in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not groups or (lengths[position] < SHRINK * longest and len(groups[-1]) >= SMALL_BUCKET):
            groups.append([])
            longest = lengths[position]
        groups[-1].append(position)
    return [sorted(group) for group in groups]


def make_bucket(
    group: list[int],
    starts: torch.Tensor,
    prefixes: torch.Tensor,
    news: torch.Tensor,
    table: torch.Tensor,
    heads: int,
    dtype: torch.dtype,
) -> Bucket:
    """The bucket of requests `group`. starts, prefixes, news: [all requests] first row of `query`, tokens
    before it, tokens to attend from; table: [all requests, longest context] KV cache rows; heads: G."""
    rows = torch.tensor(group)
    start, prefix, new = starts[rows, None], prefixes[rows, None], news[rows, None]
    total = prefix + new
    keys = torch.arange(int(total.max()))
    query = torch.minimum(torch.arange(int(new.max())), new - 1)  # [b, Lq]; padding repeats the last one
    slots = table[rows, : len(keys)].to(torch.int64)
    slots = torch.where(keys < total, slots, slots[:, :1])
    hidden = keys > (prefix + query)[:, :, None]  # [b, Lq, Lk]
    bias = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))[:, None]
    written = (start + query).flatten()
    taken = None
    if query.shape[1] > 1:
        bias = bias.repeat_interleave(heads, dim=2)
        taken = (torch.arange(query.shape[1]) < new).flatten().nonzero()[:, 0]
    return Bucket(written, slots.flatten(), bias, taken, written if taken is None else written[taken])


def attend(
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    buckets: list[Bucket],
    scaling: float | None,
) -> torch.Tensor:
    """query, output: [tokens, heads, dim]; k_cache, v_cache: [slots, KV heads, dim]. Returns `output`."""
    kv_heads, heads, dim, out_dim = k_cache.shape[1], query.shape[1], query.shape[2], v_cache.shape[2]
    group = heads // kv_heads
    for bucket in buckets:
        b, keys = bucket.bias.shape[0], bucket.bias.shape[3]
        k = k_cache.index_select(0, bucket.slots).to(query.dtype).view(b, keys, kv_heads, dim).transpose(1, 2)
        v = (
            v_cache.index_select(0, bucket.slots)
            .to(query.dtype)
            .view(b, keys, kv_heads, out_dim)
            .transpose(1, 2)
        )
        q = query.index_select(0, bucket.queries)
        lq = len(q) // b
        if lq == 1:  # query heads of one KV head are more queries to it
            q = q.view(b, kv_heads, group, dim)
            result = scaled_dot_product_attention(q, k, v, attn_mask=bucket.bias, scale=scaling).view(
                b, heads, out_dim
            )
        else:
            q = q.view(b, lq, kv_heads, group, dim).transpose(1, 2).reshape(b, kv_heads, lq * group, dim)
            result = scaled_dot_product_attention(q, k, v, attn_mask=bucket.bias, scale=scaling)
            result = (
                result.view(b, kv_heads, lq, group, out_dim).transpose(1, 2).reshape(b * lq, heads, out_dim)
            )
        if bucket.taken is not None:
            result = result.index_select(0, bucket.taken)
        output.index_copy_(0, bucket.written, result)
    return output


class Decoding:
    """Buckets of requests that decode step after step: wide tables from which each step takes its columns."""

    def __init__(self, buckets: list[Bucket], requests: torch.Tensor, totals: torch.Tensor) -> None:
        """`buckets`: of the first step; requests, totals: [all requests] pool index and length of each."""
        self.buckets = buckets
        self.requests = requests.clone()
        self.totals = totals.clone()
        self.room = ROOM
        self.slots = []
        self.biases = []
        for bucket in buckets:
            b, _, _, keys = bucket.bias.shape
            slots = bucket.slots.view(b, keys)
            # a padding that is the request's own
            self.slots.append(torch.cat([slots, slots[:, :1].expand(b, ROOM)], dim=1))
            self.biases.append(
                torch.cat([bucket.bias, bucket.bias.new_full((b, 1, 1, ROOM), float("-inf"))], dim=3)
            )

    def follows(self, requests: torch.Tensor, totals: torch.Tensor) -> bool:
        """Whether these are the same requests one token later."""
        return self.room > 0 and torch.equal(requests, self.requests) and torch.equal(totals, self.totals + 1)

    def advance(self, newest: torch.Tensor) -> list[Bucket]:
        """The next step's buckets; newest: [all requests] KV cache row of each one's newest token."""
        self.room -= 1
        columns = self.totals
        self.totals = self.totals + 1
        for bucket, slots, bias in zip(self.buckets, self.slots, self.biases, strict=True):
            rows, column = torch.arange(len(slots)), columns[bucket.queries]
            slots[rows, column] = newest[bucket.queries]
            bias[rows, 0, 0, column] = 0.0
            keys = bucket.bias.shape[3] + 1
            bucket.slots = slots[:, :keys].flatten()
            bucket.bias = bias[..., :keys]
        return self.buckets


class BatchedAttention(TorchNativeAttnBackend):
    """torch_native without its loops over requests. A step's buckets are made once and serve all layers."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        config = model_runner.model_config
        self._dtype = model_runner.dtype
        ranks = getattr(model_runner, "tp_size", 1)
        self._heads = config.num_attention_heads // ranks // max(1, config.num_key_value_heads // ranks)
        self._buckets: list[Bucket] | None = None
        self._decoding: Decoding | None = None  # of the last step, if it was one of decoding

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        before = self._decoding
        self._decoding = None
        self._buckets = None
        totals, requests, mode = (
            forward_batch.seq_lens,
            forward_batch.req_pool_indices,
            forward_batch.forward_mode,
        )
        if not len(totals) or self.use_sliding_window_kv_pool or not (mode.is_decode() or mode.is_extend()):
            return
        pool = self.req_to_token_pool.req_to_token
        if mode.is_decode():
            if before is not None and before.follows(requests, totals):
                self._decoding = before
                self._buckets = before.advance(pool[requests, totals - 1].to(torch.int64))
                return
            news, starts = torch.ones_like(totals), torch.arange(len(totals))
        elif forward_batch.extend_seq_lens is not None:
            news = forward_batch.extend_seq_lens.to(totals.dtype)
            starts = torch.cumsum(news, 0) - news
        else:
            return
        table = pool[requests, : int(totals.max())]
        groups = [part for group in buckets_of(totals.tolist()) for part in self._cut(group, totals, news)]
        if groups and all(groups):
            self._buckets = [
                make_bucket(group, starts, totals - news, news, table, self._heads, self._dtype)
                for group in groups
            ]
            if mode.is_decode():
                self._decoding = Decoding(self._buckets, requests, totals)

    def _cut(self, group: list[int], totals: torch.Tensor, news: torch.Tensor) -> list[list[int]]:
        """Parts of `group` whose mask fits; an empty part says that a single request's does not."""
        each = int(totals[group].max()) * int(news[group].max()) * self._heads
        size = MASK_ELEMENTS // each
        return [group[i : i + size] for i in range(0, len(group), size)] if size else [[]]

    def _covers(self, encoder_lens: object, options: dict) -> bool:
        windowed = options.get("sliding_window_size") is not None
        special = encoder_lens is not None or options.get("is_cross_attn") or windowed
        return self._buckets is not None and not special

    # `rest` are tables of the batch, which the buckets have replaced; the last is encoder_lens

    def _run_sdpa_forward_decode(self, query, output, k_cache, v_cache, *rest, scaling=None, **options):
        if self._covers(rest[-1], options):
            return attend(query, output, k_cache, v_cache, self._buckets, scaling)
        stock = super()._run_sdpa_forward_decode
        return stock(query, output, k_cache, v_cache, *rest, scaling=scaling, **options)

    def _run_sdpa_forward_extend(self, query, output, k_cache, v_cache, *rest, scaling=None, **options):
        if self._covers(rest[-1], options) and options.get("causal"):
            return attend(query, output, k_cache, v_cache, self._buckets, scaling)
        stock = super()._run_sdpa_forward_extend
        return stock(query, output, k_cache, v_cache, *rest, scaling=scaling, **options)
