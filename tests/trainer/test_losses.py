"""Policy losses, corrections, denominators and KL estimates against values worked out by hand, and gradients
by autograd."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.config.learning_schema import AlgorithmConfig
from laminar_hpc.trainer.algorithms.corrections import behaviour_weights, kept_sequences
from laminar_hpc.trainer.algorithms.kl import kl_estimate
from laminar_hpc.trainer.algorithms.loss_aggregation import weights_and_count
from laminar_hpc.trainer.algorithms.losses import TokenLosses, policy_loss
from laminar_hpc.trainer.algorithms.objective import SUMS, objective
from laminar_hpc.trainer.algorithms.tokens import Tokens
from laminar_hpc.trainer.step.microbatch import make_microbatch


def tokens(behaviour: list[float], advantages: list[float], lengths: list[int]) -> Tokens:
    return Tokens(
        behaviour=torch.tensor(behaviour),
        proximal=torch.tensor(behaviour),
        reference=None,
        advantages=torch.tensor(advantages),
        sequence=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        sequences=len(lengths),
        real=torch.ones(sum(lengths)),
    )


def of_tokens(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, **settings: object
) -> TokenLosses:
    """The loss of trajectories of one token each."""
    batch = tokens(old.tolist(), advantages.tolist(), [1] * len(old))
    return policy_loss(AlgorithmConfig(**settings), logprobs, old, batch)


# ratio, advantage -> loss, gradient of the loss by the log-prob, clipped; with clip_low 0.2, clip_high 0.28
CLIP = [
    (1.0, 2.0, -2.0, -2.0, 0),
    (1.27, 1.0, -1.27, -1.27, 0),  # between 1 + clip_low and 1 + clip_high: clip-higher lets it through
    (1.5, 1.0, -1.28, 0.0, 1),
    (0.5, 1.0, -0.5, -0.5, 0),  # too unlikely a good token is always pulled up
    (0.5, -1.0, 0.8, 0.0, 1),
    (0.79, -2.0, 1.6, 0.0, 1),
    (1.5, -1.0, 1.5, 1.5, 0),  # too likely a bad token is always pushed down
    (3.0, 0.0, 0.0, 0.0, 0),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "clipped"), CLIP)
def test_clip_higher_in_closed_form(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: int
) -> None:
    """Each side of the clip, for good and bad tokens (arXiv 2503.14476, equation 8)."""
    logprob = torch.tensor([math.log(ratio) - 1.0], requires_grad=True)
    found = of_tokens(logprob, torch.tensor([-1.0]), torch.tensor([advantage]))
    found.loss.sum().backward()
    assert found.loss.item() == pytest.approx(loss, abs=1e-6)
    assert logprob.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert found.clipped.item() == clipped


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [(2.0, -1.0, 2.0, 2.0), (5.0, -1.0, 3.0, 0.0), (5.0, 1.0, -1.28, 0.0), (5.0, -2.0, 6.0, 0.0)],
)
def test_dual_clip_bounds_the_loss_of_bad_tokens(
    ratio: float, advantage: float, loss: float, gradient: float
) -> None:
    """Above the bound 3 a negative advantage has no gradient any more; a positive one is clipped as before
    (arXiv 1912.09729)."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    found = of_tokens(logprob, torch.zeros(1), torch.tensor([advantage]), clip_dual=3.0)
    found.loss.sum().backward()
    assert (found.loss.item(), logprob.grad.item()) == pytest.approx((loss, gradient), abs=1e-6)


def test_gspo_clips_the_geometric_mean() -> None:
    """Ratios 2 and 8 have the mean 4; 1/2 and 1/2 have 1/2. Clip 0.5/2: the first, A = 1, is clipped at 3;
    the second, A = -2, at the edge is not. A sequence's gradient is spread evenly: s A / |y| per token and
    unit of its mean."""
    logprobs = torch.tensor(
        [math.log(2), math.log(8), -math.log(2), -math.log(2), math.log(1.5)], requires_grad=True
    )
    batch = tokens([0.0] * 5, [1.0, 1.0, -2.0, -2.0, 1.0], [2, 2, 1])
    a = AlgorithmConfig(loss="gspo", clip_low=0.5001, clip_high=2.0)
    found = policy_loss(a, logprobs, batch.behaviour, batch)
    assert found.loss.tolist() == pytest.approx(
        [-3.0, -3.0, 1.0, 1.0, -1.5], abs=1e-6
    ) and found.clipped.tolist() == [1, 1, 0, 0, 0]
    weights, count = weights_and_count(batch, "sequences", 100)
    ((found.loss * weights).sum() / count).backward()
    assert logprobs.grad.tolist() == pytest.approx([0, 0, 1 / 6, 1 / 6, -0.5], abs=1e-6)


@pytest.mark.parametrize(("ratio", "weight"), [(0.2, 0.5), (1.3, 1.3), (9.0, 2.0)])
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_cispo_clips_the_weight_and_never_the_gradient(ratio: float, weight: float, advantage: float) -> None:
    """The gradient is -clip(r) A on both sides (arXiv 2506.13585, equations 4 and 5)."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    settings = {"loss": "cispo", "clip_low": 0.5, "clip_high": 1.0}
    found = of_tokens(logprob, torch.zeros(1), torch.tensor([advantage]), **settings)
    found.loss.sum().backward()
    assert logprob.grad.item() == pytest.approx(-weight * advantage, abs=1e-6)
    assert found.clipped.item() == (weight != ratio)


@pytest.mark.parametrize(("ratio", "weight"), [(0.01, 0.01), (1.3, 1.3), (9.0, 4.0)])
def test_aipo_truncates_on_one_side(ratio: float, weight: float) -> None:
    """The gradient is -min(r, rho) A (arXiv 2505.24034), which is CISPO's without a lower bound."""
    gradients = []
    aipo = {"loss": "aipo", "importance_weight_cap": 4.0}
    for settings in (aipo, {"loss": "cispo", "clip_low": 1.0, "clip_high": 3.0}):
        logprob = torch.tensor([math.log(ratio)], requires_grad=True)
        of_tokens(logprob, torch.zeros(1), torch.tensor([1.5]), **settings).loss.sum().backward()
        gradients.append(logprob.grad.item())
    assert gradients == pytest.approx([-weight * 1.5] * 2, abs=1e-6)


@given(st.lists(st.tuples(st.floats(-5, 0), st.floats(-3, 3)), min_size=4, max_size=4))
def test_on_policy_all_losses_are_the_policy_gradient(rows: list[tuple[float, float]]) -> None:
    """Ratio 1: the gradient by every log-prob is -A over the denominator, whatever the loss; of gspo where a
    sequence has one advantage."""
    logprobs, advantages = [r[0] for r in rows], [r[1] for r in rows]
    advantages[1], advantages[3] = advantages[0], advantages[2]
    batch = tokens(logprobs, advantages, [2, 2])
    for settings in (
        {},
        {"clip_dual": 3.0},
        {"loss": "gspo"},
        {"loss": "cispo"},
        {"loss": "aipo", "importance_weight_cap": 2.0},
        {"proximal": "recomputed", "importance_weight_cap": 2.0},
        {"sequence_ratio_min": 0.99, "sequence_ratio_max": 1.01},
    ):
        current = torch.tensor(logprobs, requires_grad=True)
        found = objective(
            AlgorithmConfig(**{"loss_aggregation": "sequences", **settings}),
            8,
            batch,
            current,
            torch.zeros(4),
        )
        (found.total / found.count).backward()
        assert current.grad.tolist() == pytest.approx([-a / 4 for a in advantages], abs=1e-6), settings


def test_gradients_agree_with_finite_differences() -> None:
    """Of the whole objective, away from the edges of the clip, in float64."""
    draw = torch.Generator().manual_seed(0)
    behaviour, proximal, reference, logprobs, advantages = (
        torch.randn(6, generator=draw, dtype=torch.float64) * 0.3 for _ in range(5)
    )
    batch = replace(
        tokens([0.0] * 6, [0.0] * 6, [4, 2]),
        behaviour=behaviour,
        proximal=proximal,
        reference=reference,
        advantages=advantages,
    )
    for settings in (
        {"loss": "clip", "kl_coefficient": 0.3},
        {"loss": "gspo", "kl_coefficient": 0.3, "kl_estimator": "k2"},
    ):
        a = AlgorithmConfig(
            proximal="recomputed", importance_weight_cap=1.1, loss_aggregation="sequences", **settings
        )
        assert torch.autograd.gradcheck(
            lambda x, a=a: objective(a, 8, batch, x, torch.zeros(6)).total,
            logprobs.clone().requires_grad_(True),
            eps=1e-6,
        )


def test_behaviour_weights_by_hand() -> None:
    """q / mu of 1/2, 1 and 4, bounded by 2 or not."""
    proximal = torch.tensor([math.log(0.5), 0.0, math.log(4.0)])
    assert behaviour_weights(proximal, torch.zeros(3), 2.0).tolist() == pytest.approx([0.5, 1.0, 2.0])
    assert behaviour_weights(proximal, torch.zeros(3), None).tolist() == pytest.approx([0.5, 1.0, 4.0])


def test_sequences_outside_the_bounds_are_left_out_but_counted() -> None:
    """Geometric means 4, 1 and 1/4 with bounds 1/2 and 2: only the second has a loss; all three are in the
    denominator."""
    ratios = torch.tensor([2.0, 8.0, 1.0, 0.25, 0.25])
    batch = tokens([0.0] * 5, [1.0] * 5, [2, 1, 2])
    assert kept_sequences(batch, ratios.log(), 0.5, 2.0).tolist() == [False, False, True, False, False]
    assert kept_sequences(batch, ratios.log(), None, 2.0).tolist() == [False, False, True, True, True]
    a = AlgorithmConfig(
        sequence_ratio_min=0.5, sequence_ratio_max=2.0, loss_aggregation="sequences", clip_high=9.0
    )
    logprobs = ratios.log().requires_grad_(True)
    found = objective(a, 8, batch, logprobs, torch.zeros(5))
    (found.total / found.count).backward()
    assert found.total.item() == pytest.approx(-1.0) and found.count.item() == 3
    assert logprobs.grad.tolist() == pytest.approx([0, 0, -1 / 3, 0, 0])


def test_what_is_left_out_keeps_its_kl() -> None:
    """docs/algorithms.md: a trajectory out of bounds loses its policy loss, but not its KL."""
    batch = replace(tokens([0.0, 0.0], [1.0, 1.0], [1, 1]), reference=torch.tensor([0.5, 0.5]))
    a = AlgorithmConfig(sequence_ratio_max=2.0, kl_coefficient=0.1, kl_estimator="k2")
    logprobs = torch.tensor([math.log(4.0), 0.0]).requires_grad_(True)
    objective(a, 8, batch, logprobs, torch.zeros(2)).total.backward()
    assert logprobs.grad.tolist() == pytest.approx([0.1 * (math.log(4.0) - 0.5), -1 - 0.1 * 0.5])


def test_gspo_takes_the_mean_of_its_behaviour_weights() -> None:
    """docs/algorithms.md: with proximal=recomputed the weights 1/2 and 3/2, and 4 cut to 2, act by their mean
    over the sequence, as in TRL: each token's gradient is mean(w) s A / |y|."""
    weights = torch.tensor([0.5, 1.5, 4.0, 1.0])
    batch = replace(tokens([0.0] * 4, [1.0, 1.0, -2.0, -2.0], [2, 2]), behaviour=-weights.log())
    a = AlgorithmConfig(
        loss="gspo",
        loss_aggregation="sequences",
        proximal="recomputed",
        importance_weight_cap=2.0,
        clip_high=9.0,
        clip_low=1.0,
    )
    logprobs = torch.tensor([math.log(2.0), math.log(0.5), 0.0, 0.0]).requires_grad_(True)
    found = objective(a, 8, batch, logprobs, torch.zeros(4))
    (found.total / found.count).backward()
    assert logprobs.grad.tolist() == pytest.approx([-1 / 4, -1 / 4, 2 * 1.5 / 4, 2 * 1.5 / 4])


@pytest.mark.parametrize(
    ("loss_aggregation", "weights", "count"),
    [("tokens", [1, 1, 1, 1], 4), ("sequences", [1, 1 / 3, 1 / 3, 1 / 3], 3), ("constant", [0.1] * 4, 3)],
)
def test_loss_aggregation_by_hand(loss_aggregation: str, weights: list[float], count: int) -> None:
    """Trajectories of 1, 3 and 0 trained tokens, at most 10 each: a trajectory without trained tokens is one
    all the same."""
    found, number = weights_and_count(tokens([0.0] * 4, [1.0] * 4, [1, 3, 0]), loss_aggregation, 10)
    assert found.tolist() == pytest.approx(weights) and number.item() == count and number.dtype == torch.int


def test_kl_estimates_by_hand_and_in_the_mean() -> None:
    """At p / q = 2: -log 2, (log 2)^2 / 2, 1 - log 2. Over a distribution k1 and k3 have the mean KL(q || p)
    and k2 nearly; the mean gradient of k1 is 0, which is why it is refused as a loss."""
    one = [kl_estimate(torch.zeros(1), torch.tensor([math.log(2)]), k).item() for k in ("k1", "k2", "k3")]
    assert one == pytest.approx([-math.log(2), math.log(2) ** 2 / 2, 1 - math.log(2)], abs=1e-6)
    logits = torch.tensor([0.2, -0.1, 0.4], dtype=torch.float64, requires_grad=True)
    q, p = logits.log_softmax(0), torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64).log()
    divergence = (q.exp() * (q - p)).sum()
    (exact,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    for estimator in ("k1", "k2", "k3"):
        each = kl_estimate(q, p, estimator)
        mean, gradient = (
            (q.exp() * each).sum(),
            torch.autograd.grad((q.detach().exp() * each).sum(), logits, retain_graph=True)[0],
        )
        assert mean.item() == pytest.approx(divergence.item(), abs=1e-3 if estimator == "k2" else 1e-12)
        if estimator == "k1":
            assert gradient.abs().max() < 1e-12
        if estimator == "k2":
            assert torch.allclose(gradient, exact, atol=1e-12)
        if estimator == "k3":
            forward = torch.autograd.grad((p.exp() * (p - q)).sum(), logits, retain_graph=True)[0]
            assert torch.allclose(gradient, forward, atol=1e-12)


def verls_k3(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """As verl's `low_var_kl` and, with its defaults, NeMo RL's k3 write it."""
    log_r = (reference - logprobs).clamp(-20, 20)
    return (log_r.exp() - log_r - 1).clamp(-10, 10)


def test_one_token_far_from_the_reference_does_not_decide_the_update() -> None:
    """Of reference - policy from -100 to 200 nats: the loss of k3 is 10 at most and its gradient finite, both
    verl's; in the objective with the default settings, where the tokens at the bound are counted."""
    nats = torch.tensor([-100.0, -20.0, -11.1, -3.0, 0.0, 1.0, 2.6, 2.7, 5.0, 10.0, 20.0, 88.0, 89.0, 200.0])
    theirs, mine = (torch.zeros(len(nats)).requires_grad_(True) for _ in range(2))
    verls_k3(theirs, nats).sum().backward()
    batch = replace(tokens([0.0] * len(nats), [0.0] * len(nats), [len(nats)]), reference=nats)
    found = objective(AlgorithmConfig(kl_coefficient=1.0), 8, batch, mine, torch.zeros(len(nats)))
    found.total.backward()
    assert found.total.item() == pytest.approx(verls_k3(torch.zeros(len(nats)), nats).sum().item(), rel=1e-6)
    assert torch.allclose(mine.grad, theirs.grad, rtol=1e-5) and mine.grad.abs().max() < 13
    assert dict(zip(SUMS, found.sums.tolist(), strict=True))["kl_bounded"] == 10


def test_without_a_bound_k3_is_the_papers() -> None:
    """kl_k3_max=null: at 5 nats the loss is 142, and nothing is counted."""
    batch = replace(tokens([0.0], [0.0], [1]), reference=torch.tensor([5.0]))
    settings = AlgorithmConfig(kl_coefficient=1.0, kl_k3_max=None)
    found = objective(settings, 8, batch, torch.zeros(1), torch.zeros(1))
    assert found.total.item() == pytest.approx(math.exp(5) - 6, rel=1e-6)
    assert dict(zip(SUMS, found.sums.tolist(), strict=True))["kl_bounded"] == 0


def test_a_behaviour_logprob_that_is_not_finite_shows_in_the_loss() -> None:
    """Nothing is clamped away: the learner must be able to see it and skip the update."""
    assert not torch.isfinite(
        of_tokens(torch.tensor([-1.0]), torch.tensor([-math.inf]), torch.tensor([-1.0])).loss
    ).all()


@pytest.mark.parametrize("settings", [{}, {"kl_coefficient": 0.1}, {"proximal": "recomputed"}])
def test_an_empty_micro_batch_adds_nothing_however_unlikely_its_token(settings: dict) -> None:
    """Its one token is nobody's; at a low temperature, or where a model never draws token 0, it has a
    log-prob at which a ratio overflows float32."""
    batch = make_microbatch([], torch.device("cpu")).tokens
    logprobs = torch.tensor([-200.0], requires_grad=True)
    found = objective(AlgorithmConfig(**settings), 8, batch, logprobs, torch.zeros(1))
    found.total.backward()
    assert found.total.item() == 0 and logprobs.grad.tolist() == [0]
    assert found.sums.tolist() == [0] * len(found.sums)
