"""Run by test_kernels.py under TRITON_INTERPRET=1: RoPE, and the sum with its norm, against plain torch. The
interpreter truncates to bfloat16 where a GPU rounds, so bits are compared in float16 and float32."""

import pytest
import torch

from laminar_hpc.weights.kernels import layers, triton_layers

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def halves(tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = 100 * torch.rand(tokens, width // 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize(("heads", "kv", "width"), [(7, 1, 16), (4, 4, 10), (3, 2, 128)])
def test_rotation_to_the_last_bit(heads: int, kv: int, width: int, dtype: torch.dtype) -> None:
    """Odd numbers of heads, widths that are no power of two, keys that are a view: values and gradients have
    the bits of plain torch."""
    tokens = 5
    mixed = torch.randn(tokens, kv, heads // kv + 2, width).to(dtype)
    query, key = torch.randn(tokens, heads, width).to(dtype), mixed[:, :, -2]
    cos, sin = halves(tokens, width)
    found = triton_layers.rotate(query, key, cos, sin, 1.0)
    for ours, x in zip(found, (query, key), strict=True):
        theirs = x.detach().clone().requires_grad_()
        expected = layers.rotated(theirs, cos, sin)
        assert torch.equal(ours, expected) and ours.is_contiguous()
        upstream = torch.randn_like(expected)
        expected.backward(upstream)
        back, _ = triton_layers.rotate(upstream, upstream, cos, sin, -1.0)
        assert torch.equal(back, theirs.grad)
    triton_layers.rotate(query[:0], key[:0], cos[:0], sin[:0], 1.0)


@pytest.mark.parametrize("dtype", [F32, F16])
@pytest.mark.parametrize(("rows", "columns"), [(3, 64), (9, 56), (1, 1000)])
@pytest.mark.parametrize("summed", [True, False])
def test_a_sum_and_its_norm(
    rows: int, columns: int, dtype: torch.dtype, summed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum has the bits of plain torch, the norm and all gradients its values to the order of sums, also
    where a program has several rows, and where nobody takes the sum."""
    monkeypatch.setattr(triton_layers, "PROGRAMS", 4)
    output, residual = torch.randn(rows, columns).to(dtype), torch.randn(rows, columns)
    weight = (1 + 0.1 * torch.randn(columns)).to(dtype)
    inputs = [t.clone().requires_grad_() for t in (output, residual, weight)]
    total, normed = layers.added_and_normed(*inputs, 1e-6)
    ours, ours_normed, scales = triton_layers.norm(output, residual, weight, 1e-6)
    assert torch.equal(ours, total) and ours_normed.dtype is dtype
    close = {"rtol": 2e-3, "atol": 1e-5} if dtype is F16 else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(ours_normed, normed, **close)
    of_total, of_normed = torch.randn(rows, columns), torch.randn(rows, columns).to(dtype)
    torch.autograd.backward(
        [total, normed] if summed else [normed], [of_total, of_normed] if summed else [of_normed]
    )
    found = triton_layers.norm_gradient(
        of_normed, of_total if summed else None, ours, scales, weight, dtype, F32
    )
    for mine, theirs in zip(found[:2], inputs[:2], strict=True):
        torch.testing.assert_close(mine, theirs.grad, **close)
        assert mine.dtype is theirs.dtype
    torch.testing.assert_close(found[2].to(dtype), inputs[2].grad, **close)
    assert torch.equal(found[0].float(), found[1])  # both are the rounded gradient of the sum


@pytest.mark.parametrize("dtype", [F32, F16])
def test_a_norm_alone(dtype: torch.dtype) -> None:
    """Of an embedding, of any dtype, and of a stage's input."""
    x, weight = torch.randn(6, 1, 48).to(dtype), torch.randn(48).to(F16)
    own, scale = x.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = layers.normed(own, scale, 1e-6)
    total, found, scales = triton_layers.norm(None, x, weight, 1e-6)
    assert total is x
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-5)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    none, of_x, of_weight = triton_layers.norm_gradient(upstream, None, x, scales, weight, None, dtype)
    assert none is None and of_x.dtype is dtype
    torch.testing.assert_close(of_x, own.grad, rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(of_weight.to(F16), scale.grad, rtol=2e-3, atol=1e-3)


def test_bfloat16_is_read_and_written() -> None:
    """To a rounding, which the interpreter makes a truncation."""
    query, key = (torch.randn(4, n, 8).to(BF16) for n in (4, 2))
    cos, sin = halves(4, 8)
    for ours, x in zip(triton_layers.rotate(query, key, cos, sin, 1.0), (query, key), strict=True):
        torch.testing.assert_close(ours, layers.rotated(x, cos, sin), rtol=2**-7, atol=1e-6)
    weight = torch.ones(32, dtype=BF16)
    output, residual = torch.randn(4, 32).to(BF16), torch.randn(4, 32).to(BF16).float()
    ours = triton_layers.norm(output, residual, weight, 1e-6)
    theirs = layers.added_and_normed(output, residual, weight, 1e-6)
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("summed", [True, False])
def test_autograd_is_told_the_same(summed: bool) -> None:
    """What is called on GPUs, over the interpreted kernels: gradients are those of plain torch, of a sum that
    is used, and is not, of a norm alone, and of a rotation."""
    output, residual, weight = torch.randn(5, 1, 32).to(F16), torch.randn(5, 1, 32), torch.randn(32).to(F16)
    up, found = torch.randn(5, 1, 32), []
    for function in (layers._SumNorm.apply, layers.added_and_normed):
        inputs = [t.clone().requires_grad_() for t in (output, residual, weight)]
        total, normed = function(*inputs, 1e-6)
        ((total * up).sum() * summed + (normed.float() * up).sum()).backward()
        found.append([total.detach(), normed.detach(), *(t.grad for t in inputs)])
    for function in (
        lambda *inputs: layers._SumNorm.apply(None, *inputs, 1e-6)[1],
        lambda *inputs: layers.normed(*inputs, 1e-6),
    ):
        inputs = [t.clone().requires_grad_() for t in (output, weight)]
        normed = function(*inputs)
        (normed.float() * up).sum().backward()
        found.append([normed.detach(), *(t.grad for t in inputs)])
    cos, sin = halves(5, 8)
    query, key = torch.randn(5, 4, 8), torch.randn(5, 2, 8)
    for function in (layers._Rotate.apply, layers.rotate):
        inputs = [t.clone().requires_grad_() for t in (query, key)]
        outs = function(*inputs, cos, sin)
        (outs[0].square().sum() + outs[1].pow(3).sum()).backward()
        found.append([*(t.detach() for t in outs), *(t.grad for t in inputs)])
    for ours, theirs in zip(found[::2], found[1::2], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=4e-3, atol=2e-3)
