"""Batched attention gives what SGLang's torch_native gives, for any mixture of lengths."""

from types import SimpleNamespace

import pytest
import torch

from laminar_hpc.engine.sglang.plugin.platform import activate

activate()  # before SGLang is imported, as its own processes do

from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402

from laminar_hpc.engine.sglang.plugin import attention  # noqa: E402
from laminar_hpc.engine.sglang.plugin.attention import BatchedAttention, buckets_of  # noqa: E402

HEADS, KV_HEADS, DIM, SLOTS, CONTEXT = 6, 2, 16, 4096, 512


def runner(generator: torch.Generator, requests: int, dtype: torch.dtype) -> SimpleNamespace:
    """What a backend takes from SGLang's ModelRunner: a full KV cache with NaN in all slots that belong to
    nobody."""
    table = torch.zeros(requests + 4, CONTEXT, dtype=torch.int32)
    k, v = (torch.randn(SLOTS, KV_HEADS, DIM, generator=generator).to(dtype) for _ in range(2))
    return SimpleNamespace(
        device="cpu",
        dtype=dtype,
        model_config=SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool=SimpleNamespace(
            get_key_buffer=lambda layer: k,
            get_value_buffer=lambda layer: v,
            set_kv_buffer=lambda *_: None,
            k=k,
            v=v,
        ),
    )


def forward_mode(name: str) -> SimpleNamespace:
    return SimpleNamespace(is_decode=lambda: name == "decode", is_extend=lambda: name == "extend")


def scene(totals: list[int], news: list[int] | None, dtype: torch.dtype, room: int = 0) -> tuple:
    """A model runner with these requests in its KV cache (`room` more tokens of each), their batch, a layer.
    `news`: None = decode."""
    generator = torch.Generator().manual_seed(len(totals))
    model = runner(generator, len(totals), dtype)
    pool = torch.randperm(SLOTS, generator=generator)
    requests = torch.randperm(len(totals) + 4, generator=generator)[: len(totals)]
    used = 0
    table = model.req_to_token_pool.req_to_token
    table[:] = pool[-1]  # stale entries point at a slot of nobody
    for request, total in zip(requests.tolist(), totals, strict=True):
        table[request, : total + room] = pool[used : used + total + room].to(torch.int32)
        used += total + room
    model.token_to_kv_pool.k[pool[used:]] = float("nan")
    model.token_to_kv_pool.v[pool[used:]] = float("nan")
    lengths = torch.tensor(totals)
    new = torch.tensor(news) if news else None
    batch = SimpleNamespace(
        forward_mode=forward_mode("extend" if news else "decode"),
        seq_lens=lengths,
        req_pool_indices=requests,
        out_cache_loc=None,
        encoder_lens=None,
        extend_seq_lens=new,
        extend_prefix_lens=lengths - new if news else None,
    )
    layer = SimpleNamespace(
        qk_head_dim=DIM,
        v_head_dim=DIM,
        tp_q_head_num=HEADS,
        tp_k_head_num=KV_HEADS,
        scaling=DIM**-0.5,
        layer_id=0,
        is_cross_attention=False,
        attn_type="decoder",
        sliding_window_size=-1,
    )
    return model, batch, layer


def step(
    backend: TorchNativeAttnBackend, batch: SimpleNamespace, layer: SimpleNamespace, query: torch.Tensor
) -> torch.Tensor:
    backend.init_forward_metadata(batch)
    forward = backend.forward_decode if batch.forward_mode.is_decode() else backend.forward_extend
    return forward(query, None, None, layer, batch, save_kv_cache=False)


def both(totals: list[int], news: list[int] | None, dtype: torch.dtype = torch.float32) -> tuple:
    """Outputs of the stock backend and of ours on the same random queries and cache, then ours itself."""
    model, batch, layer = scene(totals, news, dtype)
    query = torch.randn(sum(news) if news else len(totals), HEADS * DIM).to(dtype)
    backend = BatchedAttention(model)
    return (
        step(TorchNativeAttnBackend(model), batch, layer, query),
        step(backend, batch, layer, query),
        backend,
    )


CASES = {
    "one": [7],
    "equal": [33] * 40,
    "mixed": [1, 2, 300, 5, 80, 81, 79, 3, 3, 150, 40, 41, 90, 17, 18, 19, 20, 21, 22, 23],
    "one long among short": [400] + [9] * 30,
}


@pytest.mark.parametrize("totals", CASES.values(), ids=CASES.keys())
def test_decode_equals_stock(totals):
    """Same numbers to rounding, and no slot of another request is read (those hold NaN)."""
    stock, ours, backend = both(totals, None)
    assert backend._buckets is not None
    torch.testing.assert_close(ours, stock, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("totals", [CASES["one"], CASES["mixed"]], ids=["one", "mixed"])
def test_decoding_on_equals_stock(totals, monkeypatch):
    """Step after step, beyond the columns in store, and when a request ends; a prefill, which every new
    request has, begins anew."""
    monkeypatch.setattr(attention, "ROOM", 5)
    model, batch, layer = scene(totals, None, torch.float32, room=12)
    stock, ours = TorchNativeAttnBackend(model), BatchedAttention(model)
    reused = 0

    def same(batch: SimpleNamespace) -> None:
        nonlocal reused
        query = torch.randn(len(batch.seq_lens), HEADS * DIM)
        before = ours._decoding
        torch.testing.assert_close(
            step(ours, batch, layer, query), step(stock, batch, layer, query), atol=2e-6, rtol=1e-5
        )
        assert ours._buckets is not None
        reused += before is not None and before is ours._decoding

    for _ in range(10):
        same(batch)
        batch.seq_lens += 1  # in place, as a scheduler may
    assert reused == 8  # all but the first and the one without room
    if len(totals) > 1:
        same(
            SimpleNamespace(
                **vars(batch)
                | {"req_pool_indices": batch.req_pool_indices[1:], "seq_lens": batch.seq_lens[1:]}
            )
        )
        assert reused == 8
    same(batch)
    prefill = vars(batch) | {
        "forward_mode": forward_mode("extend"),
        "extend_seq_lens": torch.ones_like(batch.seq_lens),
    }
    ours.init_forward_metadata(SimpleNamespace(**prefill))  # none comes without its prefill
    assert ours._decoding is None


@pytest.mark.parametrize("totals", CASES.values(), ids=CASES.keys())
def test_prefill_equals_stock(totals):
    """With and without a cached prefix, also where only the last token is new."""
    news = [max(1, total - (i * 7) % total) for i, total in enumerate(totals)]
    stock, ours, backend = both(totals, news)
    assert backend._buckets is not None
    torch.testing.assert_close(ours, stock, atol=2e-6, rtol=1e-5)


def test_bfloat16_equals_stock():
    """The same in the dtype of most models, to its own rounding."""
    stock, ours, _ = both(CASES["mixed"], None, torch.bfloat16)
    torch.testing.assert_close(ours, stock, atol=2e-2, rtol=2e-2)


def test_what_does_not_fit_goes_to_stock(monkeypatch):
    """A mask beyond its bound is never made: too large a bucket is cut, too large a request is left to the
    stock backend."""
    monkeypatch.setattr(attention, "MASK_ELEMENTS", 3 * HEADS // KV_HEADS * 41 * 41)
    stock, ours, backend = both([41] * 10, [41] * 10)
    assert [bucket.bias.shape[0] for bucket in backend._buckets] == [3, 3, 3, 1]
    torch.testing.assert_close(ours, stock, atol=2e-6, rtol=1e-5)
    stock, ours, backend = both([300, 5], [300, 5])
    assert backend._buckets is None
    torch.testing.assert_close(ours, stock, atol=0, rtol=0)


def test_padding_is_bounded():
    """Buckets are a partition, and at most a handful of requests pays for a longer neighbour."""
    lengths = [3, 500, 12, 8, 9, 10, 400, 60, 61, 62, 63, 64, 65, 66, 67, 68, 11, 7, 6, 5]
    groups = buckets_of(lengths)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    padded = sum(len(group) * max(lengths[i] for i in group) for group in groups)
    assert padded < sum(lengths) + attention.SMALL_BUCKET * max(lengths)
    assert all(group == sorted(group) for group in groups)
