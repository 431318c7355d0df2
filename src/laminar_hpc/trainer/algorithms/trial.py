"""Functions of the user's own, tried on random tensors before a run begins: what would come out wrong, or
differ with the way a batch is cut, is refused in one line that names the function.

Called by trainer/loop.py before anything is loaded.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.learning_schema import AlgorithmConfig
from laminar_hpc.config.objectives import is_own
from laminar_hpc.trainer.algorithms.advantages import ADVANTAGES
from laminar_hpc.trainer.algorithms.corrections import CORRECTIONS, Correction
from laminar_hpc.trainer.algorithms.losses import LOSSES, TokenLosses
from laminar_hpc.trainer.algorithms.named import found_in
from laminar_hpc.trainer.algorithms.scored import ScoredBatch
from laminar_hpc.trainer.algorithms.tokens import Tokens

_LENGTHS = (5, 3, 1, 4)  # trained tokens of the trajectories
_CUTS = ((0,), (1, 2), (3,))  # the same in three micro-batches
_TOLERANCE = 1e-5
_MAX_ERROR = 200  # characters that are told of an exception
T = TypeVar("T")


def try_own(a: AlgorithmConfig) -> None:
    """Tries each function that is the user's own. Raises LaminarError for the first that cannot be used."""
    if is_own(a.loss):
        _try_loss(a)
    for name in a.corrections:
        if is_own(name):
            _try_correction(a, name)
    if is_own(a.advantage):
        _try_advantage(a)


class _Label(str):
    """What errors call a function."""

    def refuse(self, what: str) -> LaminarError:
        return LaminarError(f"{self}: on random tensors {what} (docs/algorithms.md, Functions of your own)")

    def call(self, function: Callable[..., Any], kind: type[T], *arguments: Any) -> T:
        """What it returns. Raises LaminarError where that is no `kind`, or where it raises."""
        try:
            found = function(*arguments)
        except Exception as error:
            words = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_ERROR]
            raise self.refuse(f"it raised {words}") from error
        if not isinstance(found, kind):
            raise self.refuse(f"it returned a {type(found).__name__}; it must return a {kind.__name__}")
        return found

    def check(self, name: str, values: torch.Tensor | None, count: int, per: str = "token") -> None:
        """Raises LaminarError unless there is one finite value for each token."""
        if not isinstance(values, torch.Tensor):
            raise self.refuse(f"its {name} is a {type(values).__name__}; it must be a tensor")
        if values.shape != (count,):
            raise self.refuse(f"its {name} has shape {list(values.shape)}; one number per {per} is {[count]}")
        if not torch.isfinite(values).all():
            raise self.refuse(f"its {name} is not finite")


def _try_loss(a: AlgorithmConfig) -> None:
    label, function = _Label(f"algorithm.loss={a.loss}"), found_in(LOSSES, "loss", a.loss)
    tokens, logprobs, old = _random_tokens(range(len(_LENGTHS)))
    before = _copied(tokens)
    found = label.call(function, TokenLosses, a, logprobs, old, tokens)
    label.check("loss", found.loss, len(logprobs))
    label.check("clipped", found.clipped, len(logprobs))
    if not found.loss.requires_grad:
        raise label.refuse("its loss has no gradient: it must be made of logprobs, not of logprobs.detach()")
    (gradient,) = torch.autograd.grad(found.loss.sum(), logprobs)
    if not torch.isfinite(gradient).all() or not gradient.any():
        what = "is 0 everywhere" if torch.isfinite(gradient).all() else "is not finite"
        raise label.refuse(f"the gradient of its loss by the log-probs {what}")
    _check_untouched(label, before, tokens)

    def again(part: tuple[int, ...]) -> torch.Tensor:
        tokens, logprobs, old = _random_tokens(part)
        return label.call(function, TokenLosses, a, logprobs, old, tokens).loss.detach()

    _check_cuts(label, "loss", found.loss.detach(), again)
    label.check("loss of a micro-batch without trajectories", again(()), 1)


def _try_correction(a: AlgorithmConfig, name: str) -> None:
    label = _Label(f"algorithm.corrections={name}")
    function = found_in(CORRECTIONS, "corrections", name)

    def values(part: tuple[int, ...]) -> torch.Tensor:
        tokens, logprobs, _ = _random_tokens(part)
        now = logprobs.detach()
        before = _copied(tokens)
        found = label.call(function, Correction, a, now, tokens)
        if found.weights is None and found.kept is None:
            raise label.refuse("it returned a Correction without weights and without kept")
        weights = torch.ones_like(now) if found.weights is None else found.weights
        kept = torch.ones_like(now, dtype=torch.bool) if found.kept is None else found.kept
        label.check("weights", weights, len(now))
        label.check("kept", kept, len(now))
        if found.bounded is not None:
            label.check("bounded", found.bounded, len(now))
        if kept.dtype is not torch.bool:
            raise label.refuse(f"its kept is of {kept.dtype}; it must be bool")
        _check_untouched(label, before, tokens)
        return weights * kept

    _check_cuts(label, "weights or kept", values(tuple(range(len(_LENGTHS)))), values)
    values(())


def _try_advantage(a: AlgorithmConfig) -> None:
    label = _Label(f"algorithm.advantage={a.advantage}")
    function = found_in(ADVANTAGES, "advantage", a.advantage)
    draw = torch.Generator().manual_seed(0)
    sizes = [a.samples_per_prompt, a.first_samples or a.samples_per_prompt, a.samples_per_prompt]
    count = sum(sizes)
    rewards = torch.rand(count, generator=draw, dtype=torch.float64).round(decimals=1)
    rewards[-sizes[-1] :] = 1.0  # a group whose rewards are all equal
    tokens = torch.randint(1, 50, (count,), generator=draw)
    batch = ScoredBatch(rewards, sizes, tokens, tokens + 2)
    before = rewards.clone()
    found = label.call(function, torch.Tensor, a, batch)
    label.check("advantage", found, count, "trajectory")
    if not torch.equal(before, rewards):
        raise label.refuse("it changes the rewards that it is given: compute on a copy")


def _random_tokens(part: range | tuple[int, ...]) -> tuple[Tokens, torch.Tensor, torch.Tensor]:
    """These trajectories of a batch, which is always the same, and the log-probs (with gradient) and old ones
    of their tokens; of none what step/microbatch.py makes for a rank that has none."""
    if not part:
        zero = torch.zeros(1)
        empty = Tokens(zero, zero, None, zero, zero.long(), 0, zero, zero, zero, zero)
        return empty, torch.full((1,), -9.0, requires_grad=True), zero
    draw = torch.Generator().manual_seed(0)
    count = sum(_LENGTHS)
    owner = torch.repeat_interleave(torch.arange(len(_LENGTHS)), torch.tensor(_LENGTHS))
    behaviour = -2 * torch.rand(count, generator=draw) - 0.1
    near = [behaviour + 0.3 * torch.randn(count, generator=draw) for _ in range(3)]
    advantages = torch.tensor([1.0, -1.5, 0.5, -0.5])[owner]
    chosen = torch.cat([torch.nonzero(owner == i)[:, 0] for i in part])
    logprobs, proximal, reference = (values.clamp(max=-0.01)[chosen] for values in near)
    lengths = torch.tensor([_LENGTHS[i] for i in part])
    tokens = Tokens(
        behaviour=behaviour[chosen],
        proximal=proximal,
        reference=reference,
        advantages=advantages[chosen],
        sequence=torch.repeat_interleave(torch.arange(len(part)), lengths),
        sequences=len(part),
        real=torch.ones(len(chosen)),
        rewards=(advantages[chosen] > 0).float(),
        right=(advantages[chosen] > 0).float(),
        truncated=(owner[chosen] == 1).float(),
    )
    return tokens, logprobs.requires_grad_(True), proximal


def _copied(tokens: Tokens) -> dict[str, torch.Tensor]:
    each = {field.name: getattr(tokens, field.name) for field in dataclasses.fields(tokens)}
    return {name: value.clone() for name, value in each.items() if isinstance(value, torch.Tensor)}


def _check_untouched(label: _Label, before: dict[str, torch.Tensor], tokens: Tokens) -> None:
    for name, value in before.items():
        if not torch.equal(value, getattr(tokens, name)):
            raise label.refuse(f"it changes tokens.{name}, which others read: compute on a copy")


def _check_cuts(
    label: _Label, name: str, whole: torch.Tensor, of: Callable[[tuple[int, ...]], torch.Tensor]
) -> None:
    """Raises LaminarError where three micro-batches give something else than one."""
    cut = torch.cat([of(part) for part in _CUTS])
    if not torch.allclose(cut, whole, atol=_TOLERANCE, rtol=_TOLERANCE):
        raise label.refuse(
            f"its {name} changes with the trajectories that share a micro-batch: what a token gets may "
            "depend on its own trajectory alone; take tokens.sequence_means, not mean()"
        )
