"""Attention and RoPE for packed sequences ("thd") in Megatron without Transformer Engine, on any device:
Megatron's own DotProductAttention (0.16.1, transformer/dot_product_attention.py) takes none. Plugged in by
trainer/megatron/building.py.

A pack is many short sequences, one after the other, without padding. A Python loop over them is too slow, and
one block-diagonal mask wastes the square of the pack. So the sequences are sorted into a few buckets of
similar length, gathered into padded [sequences, length] batches, run through torch's fused causal attention,
and scattered back. On CUDA with half precision, torch's variable-length attention takes the pack as it is.
"""

import functools
import math
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from torch.nn.attention.varlen import varlen_attn

from laminar_hpc.trainer.megatron.context import heads_of_all_tokens, tokens_of_all_heads
from laminar_hpc.trainer.megatron.rope import in_halves
from laminar_hpc.trainer.megatron.windows import causal_attention, tokens_before
from laminar_hpc.weights.kernels import fixed_order
from laminar_hpc.weights.kernels.layers import rotate

_STEP = 1.25  # of a bucket's longest sequence to its shortest: under a quarter of padding, few buckets


@dataclass(frozen=True)
class Buckets:
    """Where the tokens of a pack go. `shapes`: (sequences, padded length) of each bucket; the buckets' tokens
    follow one another.

    `gather` [padded tokens]: for each padded place its token in the pack (0 for padding). `padding`: the
    places that are padding. `scatter` [tokens]: for each token of the pack its padded place.
    """

    shapes: tuple[tuple[int, int], ...]
    gather: torch.Tensor
    padding: torch.Tensor
    scatter: torch.Tensor


def make_buckets(lengths: list[int], device: torch.device) -> Buckets:
    """Groups sequences of these lengths (all > 0, in pack order), longest first; one that is shorter by the
    factor _STEP opens a bucket."""
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    rows: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not rows or lengths[i] * _STEP < lengths[rows[-1][0]]:
            rows.append([])
        rows[-1].append(i)
    shapes, gather, real = [], [], []
    for members in rows:
        width = lengths[members[0]]
        place = torch.arange(width)
        first = torch.tensor([starts[i] for i in members])[:, None]
        inside = place < torch.tensor([lengths[i] for i in members])[:, None]
        shapes.append((len(members), width))
        gather.append(torch.where(inside, first + place, 0).flatten())
        real.append(inside.flatten())
    gathered, mask = torch.cat(gather), torch.cat(real)
    scatter = torch.empty(starts[-1], dtype=torch.long)
    scatter[gathered[mask]] = mask.nonzero()[:, 0]
    return Buckets(tuple(shapes), gathered.to(device), (~mask).nonzero()[:, 0].to(device), scatter.to(device))


class _Pad(torch.autograd.Function):
    """[tokens, ...] -> [padded tokens, ...]. Each token has one place, so the gradient is a gather too, not a
    sum."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, buckets: Buckets) -> torch.Tensor:
        ctx.buckets = buckets
        return x.index_select(0, buckets.gather)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.index_select(0, ctx.buckets.scatter), None


class _Unpad(torch.autograd.Function):
    """[padded tokens, ...] -> [tokens, ...]; the padding's gradient is zero, so nothing leaks from it into
    keys and values."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, buckets: Buckets) -> torch.Tensor:
        ctx.buckets = buckets
        return x.index_select(0, buckets.scatter)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.index_select(0, ctx.buckets.gather).index_fill_(0, ctx.buckets.padding, 0), None


@dataclass
class PackLayout(PackedSeqParams):
    """Megatron's description of a pack, and ours beside it. `lengths`: of its sequences, in order;
    `rotation`: RoPE's factors of the pack's tokens, see rope.py; `windowed_rotation`: those of layers with a
    window, None: the same; `routes` [tokens, layers, experts per token]: the experts that are to be replayed,
    of this rank's tokens and layers, see routing.py."""

    lengths: tuple[int, ...] = ()
    rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    windowed_rotation: tuple[torch.Tensor, torch.Tensor] | None = None
    routes: torch.Tensor | None = None

    def rotation_of(self, config: TransformerConfig, layer_number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the rotation of a layer, counted from 1."""
        assert self.rotation is not None
        if self.windowed_rotation is None or tokens_before(config, layer_number) is None:
            return self.rotation
        return self.windowed_rotation

    @functools.cached_property
    def buckets(self) -> Buckets:
        """Made once for all layers, and not at all where `takes_packs`."""
        return make_buckets(list(self.lengths), self.cu_seqlens_q.device)


def takes_packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's variable-length attention runs there: it takes a pack as it is, and needs no
    buckets."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def pack_layout(lengths: list[int], device: torch.device) -> PackLayout:
    """The layout of sequences of these lengths, one after the other. Its buckets are made when an attention
    first asks for them."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    return PackLayout(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=tuple(lengths),
    )


class PackedCausalAttention(MegatronModule):
    """Megatron's core_attention for PackLayout: RoPE, then causal within each sequence, or within the layer's
    window of it. With context parallelism all tokens of this rank's share of the heads. Takes no other mask,
    no bias, no dropout."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout or attention_dropout:
            raise ValueError("PackedCausalAttention knows no dropout")
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.context = groups.cp
        heads = divide(config.num_attention_heads, groups.tp.size() * self.context.size())
        self.width = config.kv_channels * heads
        self.scale = 1 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.layer_number = layer_number
        self.before = tokens_before(config, layer_number)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        attn_mask_type: object = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackLayout | None = None,
    ) -> torch.Tensor:
        """query [tokens, heads, d], key and value [tokens, kv_heads, d] -> [tokens, heads * d], of this
        context-parallel rank's share of the pack."""
        layout = packed_seq_params
        if (
            attention_mask is not None
            or attention_bias is not None
            or not isinstance(layout, PackLayout)
            or layout.rotation is None
        ):
            raise ValueError("PackedCausalAttention takes a PackLayout with its rotation and no mask")
        rotation = layout.rotation_of(self.config, self.layer_number)
        query, key = rotate(*in_halves(self.config, query, key), *rotation)
        if self.context.size() == 1:
            return self._attend(query, key, value, layout)
        query, key, value = heads_of_all_tokens(query, key, value, self.context)
        return tokens_of_all_heads(self._attend(query, key, value, layout), self.context)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackLayout
    ) -> torch.Tensor:
        if takes_packs(query.device, query.dtype):
            return self._whole_pack(query, key, value, layout)
        if fixed_order.is_installed():
            window = None if self.before is None else self.before + 1
            out = fixed_order.PackAttention.apply(query, key, value, layout.lengths, self.scale, window)
            return out.reshape(-1, self.width)
        copies = query.shape[1] // key.shape[1]
        if copies > 1 and query.is_cuda:  # torch's float32 kernels for CUDA want as many key as query heads
            key, value = (t.repeat_interleave(copies, dim=1) for t in (key, value))
        return self._by_buckets(query, key, value, layout.buckets)

    def _whole_pack(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: PackLayout
    ) -> torch.Tensor:
        ends, longest = layout.cu_seqlens_q, layout.max_seqlen_q
        value = value.contiguous()  # the backward pass keeps it, and of a view queries and keys too
        out = varlen_attn(
            query,
            key,
            value,
            ends,
            ends,
            longest,
            longest,
            scale=self.scale,
            window_size=(-1 if self.before is None else self.before, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.reshape(-1, self.width)

    def _by_buckets(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, buckets: Buckets
    ) -> torch.Tensor:
        sizes = [sequences * length for sequences, length in buckets.shapes]
        parts = zip(*(_Pad.apply(t, buckets).split(sizes) for t in (query, key, value)), strict=True)
        outputs = []
        for (sequences, length), qkv in zip(buckets.shapes, parts, strict=True):
            # [sequences, heads, length, d]
            q, k, v = (t.view(sequences, length, *t.shape[1:]).transpose(1, 2) for t in qkv)
            out = causal_attention(q, k, v, self.scale, self.before)
            outputs.append(out.transpose(1, 2).reshape(sequences * length, self.width))
        return _Unpad.apply(torch.cat(outputs), buckets)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        return {}
