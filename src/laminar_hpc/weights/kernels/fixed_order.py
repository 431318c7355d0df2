"""Operations of a model on the CPU whose result for a row follows from that row alone, bit for bit: however
many rows a batch has, in which order they stand, and how many threads share them (csrc/rows.cpp). With them a
token's log-prob is the same in a prefill, in a decoding step and in the trainer's pack.

`install` puts them in the place of torch's own in this process: for float32 on the CPU, where products,
means, exponentials and logarithms are else added or rounded by the shape of the whole. What adds, multiplies,
divides or takes a root element by element is rounded correctly whatever its place, and stays torch's.
"""

import importlib
import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from laminar_hpc.config.errors import LaminarError

_ROOT_2_OVER_PI = math.sqrt(2.0 / math.pi)  # of GELU's approximation
_library: torch.library.Library | None = None


def extension() -> ModuleType:
    """The module laminar_hpc._rows. Raises LaminarError where it was not built."""
    try:
        return importlib.import_module("laminar_hpc._rows")
    except ImportError as error:
        raise LaminarError(
            "model.deterministic=true on the CPU needs laminar_hpc._rows, which cannot be loaded "
            f"({error}): apt-get install g++, make setup"
        ) from None


def is_installed() -> bool:
    """Whether `install` was called in this process."""
    return _library is not None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, inner] times weight [columns, inner] transposed, and bias [columns], float32: [rows, columns].
    Each element is added up in 16 lanes, then lane by lane."""
    x, weight = _rows(x), _rows(weight)
    bias = None if bias is None else bias.contiguous()
    out = x.new_empty(len(x), len(weight))
    bias_at = 0 if bias is None else bias.data_ptr()
    places = x.data_ptr(), x.stride(0), weight.data_ptr(), weight.stride(0), bias_at, out.data_ptr()
    extension().product(*places, len(weight), len(x), len(weight), x.shape[1], torch.get_num_threads())
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """With the elements of a row next to each other."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _mapped(function: str, x: torch.Tensor) -> torch.Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    extension().map(function, out.data_ptr(), out.numel(), torch.get_num_threads())
    return out


def exp(x: torch.Tensor) -> torch.Tensor:
    """e to each element of x, float32, a new tensor."""
    return _mapped("e", x)


def log(x: torch.Tensor) -> torch.Tensor:
    """The logarithm of each element of x, float32, a new tensor."""
    return _mapped("l", x)


def sums(x: torch.Tensor) -> torch.Tensor:
    """x [..., columns] -> the sum of each row, [...]."""
    return linear(x.reshape(-1, x.shape[-1]), x.new_ones(1, x.shape[-1])).view(x.shape[:-1])


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    sequences: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of single queries: query [queries, heads, d], key [places, kv_heads, d] and value [places,
    kv_heads, dv] float32 -> [queries, heads, dv]. Query t attends to the first lengths[t] places of row
    sequences[t] of `slots` [sequences, longest], or to the last `window` of these; all int64."""
    longest = int(lengths.max()) if len(lengths) else 0
    query, key, value = (
        x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in (query, key, value)
    )
    slots, sequences, lengths = (x.to(torch.int64).contiguous() for x in (slots, sequences, lengths))
    out = query.new_empty(len(query), query.shape[1], value.shape[2])
    tensors = [x.data_ptr() for x in (query, key, value, out, slots, sequences, lengths)]
    strides = [x.stride(0) for x in (slots, query, key, value, out)]
    sizes = query.shape[1], key.shape[1], query.shape[2], value.shape[2], window or 0
    extension().attend(*tensors, *strides, *sizes, scale, len(query), longest, torch.get_num_threads())
    return out


def draw(weights: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """A column of each row of `weights` [rows, columns] float32, with a probability proportional to its
    weight: a function of the row, its seed and its position alone, [rows] int64 each. The Gumbel-max trick
    over the hash of SGLang's sampler (sampler.py, `multinomial_with_seed`), as a race of exponential
    variables."""
    weights, out = weights.contiguous(), torch.empty(len(weights), dtype=torch.int64)
    seeds, positions = (x.to(torch.int64).contiguous() for x in (seeds, positions))
    tensors = [x.data_ptr() for x in (weights, seeds, positions, out)]
    extension().draw(*tensors, *weights.shape, torch.get_num_threads())
    return out


class PackAttention(torch.autograd.Function):
    """Causal attention within each sequence of a pack by `attend`; its gradient is that of torch's own
    attention, sequence by sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        lengths: tuple[int, ...],
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """query [tokens, heads, d], key and value [tokens, kv_heads, d] -> [tokens, heads, d]."""
        ctx.save_for_backward(query, key, value)
        ctx.options = lengths, scale, window
        counts = torch.tensor(lengths)
        places = torch.arange(max(lengths)) + (counts.cumsum(0) - counts)[:, None]
        known = torch.cat([torch.arange(1, n + 1) for n in lengths])
        numbers = torch.arange(len(lengths)).repeat_interleave(counts)
        return attend(query, key, value, places, numbers, known, scale, window)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        lengths, scale, window = ctx.options
        parts = [x.split(lengths) for x in (*ctx.saved_tensors, gradient)]
        found = [_gradients(of_one, scale, window) for of_one in zip(*parts, strict=True)]
        return *(torch.cat(of_all) for of_all in zip(*found, strict=True)), None, None, None


def _gradients(
    of_one: tuple[torch.Tensor, ...], scale: float, window: int | None
) -> tuple[torch.Tensor, ...]:
    """Of one sequence: query, key, value and the gradient of its output."""
    with torch.enable_grad():
        *inputs, upstream = of_one
        leaves = [x.detach().requires_grad_() for x in inputs]
        length = len(upstream)
        near = torch.ones(length, length, dtype=torch.bool).tril()
        mask = near if window is None else near.triu(1 - window)
        q, k, v = (x.transpose(0, 1)[None] for x in leaves)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        return torch.autograd.grad(out[0].transpose(0, 1), leaves, upstream)


# ---- torch's operators -------------------------------------------------------------------------------------


def _addmm(
    bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    product = linear(a, b.t())
    product = product if alpha == 1 else product * alpha
    return product + (bias if beta == 1 else bias * beta)


def _bmm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.stack([linear(x, y.t()) for x, y in zip(a, b, strict=True)])


def _row_sums(
    x: torch.Tensor, dim: list[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor | None:
    if not dim or [d % x.dim() for d in dim] != [x.dim() - 1] or dtype not in (None, torch.float32):
        return None
    found = sums(x)
    return found[..., None] if keepdim else found


def _row_means(x: torch.Tensor, *how: Any, **options: Any) -> torch.Tensor | None:
    found = _row_sums(x, *how, **options)
    return None if found is None else found / x.shape[-1]


def _shifted(x: torch.Tensor) -> torch.Tensor:
    return x - x.amax(-1, keepdim=True)


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor | None:
    if dim % x.dim() != x.dim() - 1:
        return None
    weights = exp(_shifted(x))
    return weights / sums(weights)[..., None]


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor | None:
    if dim % x.dim() != x.dim() - 1:
        return None
    shifted = _shifted(x)
    return shifted - log(sums(exp(shifted)))[..., None]


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + exp(-x))


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + exp(-x))


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if approximate == "tanh":
        return 0.5 * x * (1 + _mapped("t", _ROOT_2_OVER_PI * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + _mapped("r", x * math.sqrt(0.5)))


# operator -> what takes its place, or gives None for what it does not know
OPERATORS: dict[str, Callable[..., torch.Tensor | None]] = {
    "mm": lambda a, b: linear(a, b.t()),
    "addmm": _addmm,
    "addmm_": lambda out, *factors, **options: out.copy_(_addmm(out, *factors, **options)),
    "mv": lambda a, b: linear(a, b[None])[:, 0],
    "bmm": _bmm,
    "sum.dim_IntList": _row_sums,
    "mean.dim": _row_means,
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "sigmoid": _sigmoid,
    "silu": _silu,
    "gelu": _gelu,
    "exp": exp,
    "log": log,
    "tanh": lambda x: _mapped("t", x),
}


def install() -> None:
    """From here on in this process; a second call does nothing. Raises LaminarError without the extension."""
    global _library
    if _library is not None:
        return
    extension()
    stock = {name: torch.library.get_kernel(f"aten::{name}", "CPU") for name in OPERATORS}
    library = torch.library.Library("aten", "IMPL")
    for name, function in OPERATORS.items():
        library.impl(name, _replaced(function, stock[name]), "CPU", with_keyset=True)
    _library = library


def _replaced(function: Callable[..., torch.Tensor | None], stock: Any) -> Callable[..., Any]:
    """`function` for float32 tensors, `stock` for others and for what it does not know."""

    def operator(keys: Any, *arguments: Any, **options: Any) -> Any:
        tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
        if all(x.dtype is torch.float32 and x.numel() for x in tensors):
            found = function(*arguments, **options)
            if found is not None:
                return found
        return stock.call_boxed(keys, *arguments, **options)

    return operator
