"""What model.deterministic adds to an engine: a token follows from weights, prefix, seed and position,
whatever else is in the batch. Hooked in by hooks.py.

On a GPU SGLang has batch-invariant kernels. On the CPU the operations of weights/kernels/fixed_order.py take
the place of torch's. On both, one greedy request would change how all others of its batch are drawn.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.runtime_context import get_exec

from laminar_hpc.weights.kernels import fixed_order


def allow_torch_native() -> None:
    """Tells SGLang that torch_native is deterministic, also with a prefix cache: as it is here."""
    from sglang.srt.arg_groups import choices

    choices.add_deterministic_attention_backend_choices(["torch_native"])
    choices.add_radix_supported_deterministic_attention_backend_choices(["torch_native"])


def install(_: Any) -> None:
    """In place of ModelRunner.maybe_enable_batch_invariant_mode, which has Triton kernels."""
    if get_exec().deterministic.enable_deterministic_inference:
        fixed_order.install()


def draw(
    probs: torch.Tensor, sampling_seed: torch.Tensor | None = None, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """In place of sampling_from_probs_torch, whose hash is a compiled kernel. probs: [requests, vocabulary],
    overwritten by nobody; returns int32 [requests]."""
    assert sampling_seed is not None and positions is not None, "SGLang draws without a seed"
    return fixed_order.draw(probs, sampling_seed, positions).to(torch.int32)


def draw_or_take_best(
    original: Callable,
    probs: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    min_ps: torch.Tensor,
    need_min_p_sampling: bool,
    sampling_seed: torch.Tensor | None,
    positions: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    """Around top_k_top_p_min_p_sampling_from_probs_torch, which a batch with a greedy request goes through
    (top_k 1): it sorts each row, and gives the others' seeds to other tokens. As sampling.* is neutral, each
    request is either greedy or drawn from all tokens."""
    from sglang.srt.layers import sampler

    drawn = sampler.sampling_from_probs_torch(probs, sampling_seed=sampling_seed, positions=positions)
    return torch.where(top_ks == 1, probs.argmax(-1).to(drawn.dtype), drawn)


class FixedOrderAttention(TorchNativeAttnBackend):
    """torch_native, each query by itself."""

    def _run_sdpa_forward_decode(
        self, query, output, k_cache, v_cache, pool, requests, totals, encoder_lens=None, **options
    ):
        sequences = torch.arange(len(totals))
        return self._attend(query, output, k_cache, v_cache, pool, requests, sequences, totals, **options)

    def _run_sdpa_forward_extend(
        self,
        query,
        output,
        k_cache,
        v_cache,
        pool,
        requests,
        totals,
        prefixes,
        news,
        encoder_lens=None,
        causal=False,
        **options,
    ):
        assert causal, "the engines have decoders only"
        sequences = torch.arange(len(totals)).repeat_interleave(news)
        begins = (news.cumsum(0) - news).repeat_interleave(news)
        known = prefixes.repeat_interleave(news) + torch.arange(len(sequences)) - begins + 1
        return self._attend(query, output, k_cache, v_cache, pool, requests, sequences, known, **options)

    def _attend(
        self, query, output, k_cache, v_cache, pool, requests, sequences, known, scaling=None, **options
    ):
        window = options.get("sliding_window_size")
        window = window + 1 if window is not None and window > -1 else None  # SGLang's leaves out the query
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        slots = pool[:, : int(known.max()) if len(known) else 0][requests]
        found = fixed_order.attend(query, k_cache, v_cache, slots, sequences, known, scale, window)
        return output.copy_(found)
