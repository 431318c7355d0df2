"""weights/kernels/fixed_order.py: a row's result is the same bits in any batch, and the right number."""

import math

import pytest
import torch
from torch.nn import functional as F

from laminar_hpc.weights.kernels import fixed_order

PARTS = [slice(0, 1), slice(3, 5), slice(7, 20), slice(36, 37)]  # of 37 rows


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("inner", "columns"), [(1, 1), (16, 4), (100, 37), (131, 200)])
def test_a_row_of_a_product_follows_from_that_row(inner: int, columns: int) -> None:
    """Alone, in any part of the batch, laid out in columns: the same bits; and they are the product's to
    float32's precision."""
    x, weight, bias = rows(37, inner), rows(columns, inner), rows(columns)
    whole = fixed_order.linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(whole.double(), exact, atol=1e-4, rtol=0)
    for part in PARTS:
        assert torch.equal(fixed_order.linear(x[part], weight, bias), whole[part])
    assert torch.equal(fixed_order.linear(x.t().contiguous().t(), weight, bias), whole)


def test_threads_change_nothing() -> None:
    """So many that each gets a part of the rows, or of the columns."""
    threads, found = torch.get_num_threads(), list[list[torch.Tensor]]()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            shapes = (900, 300), (300, 900)
            found.append([fixed_order.linear(rows(n, 100), rows(columns, 100)) for n, columns in shapes])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    "name", ["mean.dim", "sum.dim_IntList", "_softmax", "_log_softmax", "silu", "sigmoid"]
)
def test_operators_are_torchs_row_by_row(name: str) -> None:
    """What `install` puts in torch's place."""
    x = 4 * rows(37, 50)
    more = {
        "mean.dim": ([-1],),
        "sum.dim_IntList": ([1],),
        "_softmax": (1, False),
        "_log_softmax": (-1, False),
    }
    operator, arguments = fixed_order.OPERATORS[name], more.get(name, ())
    stock = torch.ops.aten
    for part in name.split("."):
        stock = getattr(stock, part)
    whole = operator(x, *arguments)
    torch.testing.assert_close(whole.double(), stock(x.double(), *arguments), atol=2e-6, rtol=1e-6)
    assert all(torch.equal(operator(x[part], *arguments), whole[part]) for part in PARTS)


@pytest.mark.parametrize("window", [None, 9])
def test_attention_of_a_query_follows_from_its_keys(window: int | None) -> None:
    """A pack's attention is torch's with its gradient; a single query over scattered keys, as an engine
    decodes, has the same bits as in the pack."""
    lengths = (21, 1, 40)
    query, key, value = rows(62, 4, 24).requires_grad_(), rows(62, 2, 24).requires_grad_(), rows(62, 2, 24)
    value.requires_grad_()
    packed = fixed_order.PackAttention.apply(query, key, value, lengths, 0.2, window)
    parts = [x.double().split(lengths) for x in (query, key, value)]
    expected = torch.cat([_plain(*each, window) for each in zip(*parts, strict=True)])
    torch.testing.assert_close(packed.double(), expected, atol=1e-5, rtol=0)
    upstream = rows(62, 4, 24)
    found = torch.autograd.grad(packed, (query, key, value), upstream)
    wanted = torch.autograd.grad(expected, (query, key, value), upstream.double())
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.float(), atol=1e-4, rtol=0)

    order = torch.randperm(62, generator=torch.Generator().manual_seed(1))
    places = order.argsort()[22:][None]  # of the last sequence, wherever its keys lie
    for known in (1, 16, 17, 40):
        asked, one = query[21 + known : 22 + known], torch.tensor([0])
        alone = fixed_order.attend(
            asked, key[order], value[order], places, one, torch.tensor([known]), 0.2, window
        )
        assert torch.equal(alone, packed[21 + known : 22 + known])


def _plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    near = torch.ones(len(query), len(query), dtype=torch.bool).tril()
    near = near if window is None else near & ~near.tril(-window)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=near, scale=0.2, enable_gqa=True)
    return out[0].transpose(0, 1)


def test_what_is_drawn_follows_from_row_seed_and_position() -> None:
    """The same in any batch; another seed or position draws anew; as often as the weights say; and as
    SGLang's own sampler does with the same hash (sampler.py, `multinomial_with_seed`)."""
    weights = torch.softmax(2 * rows(1, 12), -1).expand(6000, -1)
    seeds, positions = torch.arange(6000) * 2**40 + 7, torch.arange(6000) % 50
    drawn = fixed_order.draw(weights, seeds, positions)
    assert torch.equal(fixed_order.draw(weights[60:61], seeds[60:61], positions[60:61]), drawn[60:61])
    shares = torch.bincount(drawn, minlength=12) / 6000
    deviation = (weights[0] * (1 - weights[0]) / 6000).sqrt()
    assert ((shares - weights[0]).abs() < 5 * deviation).all()
    assert (fixed_order.draw(weights, seeds, positions + 1) != drawn).float().mean() > 0.5
    assert (fixed_order.draw(weights, seeds + 1, positions) != drawn).float().mean() > 0.5
    for row in range(20):
        noise = [_uniform(int(seeds[row]), int(positions[row]), column) for column in range(12)]
        scores = [
            math.log(float(p)) - math.log(-math.log(u)) for p, u in zip(weights[row], noise, strict=True)
        ]
        assert scores.index(max(scores)) == drawn[row]


def _uniform(seed: int, position: int, column: int) -> float:
    """MurmurHash3 of the four words, over its largest value."""
    h, word = 0, 0xFFFFFFFF
    for k in (seed & word, seed >> 32, position, column):
        k = k * 0xCC9E2D51 & word
        k = (k << 15 | k >> 17) * 0x1B873593 & word
        h ^= k
        h = ((h << 13 | h >> 19) & word) * 5 + 0xE6546B64 & word
    h ^= 16
    h = (h ^ h >> 16) * 0x85EBCA6B & word
    h = (h ^ h >> 13) * 0xC2B2AE35 & word
    return (h ^ h >> 16) / word
