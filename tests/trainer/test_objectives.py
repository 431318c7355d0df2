"""The year's objectives against the same written out one number after the other (helpers/trainer/
written_out.py), values and gradients, on random tensors; to 1e-6. test_trl.py holds those that TRL has
against TRL's own code."""

import random
from dataclasses import replace

import pytest
import torch

from helpers.trainer import written_out
from helpers.trainer.written_out import Bounds
from laminar_hpc.config import objectives
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.learning_schema import AlgorithmConfig
from laminar_hpc.config.rules import broken_rules
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.trainer.algorithms.advantages import ADVANTAGES, token_advantages
from laminar_hpc.trainer.algorithms.corrections import CORRECTIONS, corrected
from laminar_hpc.trainer.algorithms.kl import kl_estimate
from laminar_hpc.trainer.algorithms.loss_aggregation import likelihood_weights, weights_and_count
from laminar_hpc.trainer.algorithms.losses import LOSSES, policy_loss
from laminar_hpc.trainer.algorithms.objective import objective
from laminar_hpc.trainer.algorithms.scored import RewardPart, ScoredBatch
from laminar_hpc.trainer.algorithms.shaping import length_rescaled
from laminar_hpc.trainer.algorithms.tokens import Tokens

LENGTHS = [7, 3, 1, 5, 6]
A = [1.3, -0.7, 0.4, -1.1, 0.0]
CLOSE = 1e-6


def random_tokens(seed: int, spread: float = 0.4) -> tuple[torch.Tensor, Tokens]:
    """The policy's log-probs and the rest, float64."""
    draw = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)
    behaviour = -0.05 - 2.5 * torch.rand(n, generator=draw, dtype=torch.float64)

    def near() -> torch.Tensor:
        return (behaviour + spread * torch.randn(n, generator=draw, dtype=torch.float64)).clamp(max=-1e-3)

    owner = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    tokens = Tokens(
        behaviour=behaviour,
        proximal=near(),
        reference=near(),
        advantages=torch.tensor(A, dtype=torch.float64)[owner],
        sequence=owner,
        sequences=len(LENGTHS),
        real=torch.ones(n, dtype=torch.float64),
        rewards=torch.zeros(n),
        right=torch.zeros(n),
        truncated=(owner == 1).double(),
    )
    return near(), tokens


def rows(values: torch.Tensor) -> list[list[float]]:
    return [part.tolist() for part in values.split(LENGTHS)]


OF_LOSSES = {
    "dppo": (
        {"clip_low": 0.05, "clip_high": 0.08},
        lambda n, o, a: written_out.dppo(n, o, a, Bounds(0.05, 0.08)),
    ),
    "sapo": (
        {"options": {"sapo_temperature_good": 0.8, "sapo_temperature_bad": 1.4}},
        lambda n, o, a: written_out.sapo(n, o, a, 0.8, 1.4),
    ),
    "gmpo": (
        {"clip_low": 0.2, "clip_high": 0.3},
        lambda n, o, a: written_out.gmpo(n, o, a, Bounds(0.2, 0.3)),
    ),
}


@pytest.mark.parametrize("name", OF_LOSSES)
def test_losses_and_their_gradients(name: str) -> None:
    """Of tokens on both sides of every bound, with advantages of both signs and of 0."""
    settings, written = OF_LOSSES[name]
    for seed in range(5):
        logprobs, tokens = random_tokens(seed)
        current = logprobs.clone().requires_grad_(True)
        found = policy_loss(AlgorithmConfig(loss=name, **settings), current, tokens.proximal, tokens)
        expected = [
            pair
            for new, old, a in zip(rows(logprobs), rows(tokens.proximal), A, strict=True)
            for pair in written(new, old, a)
        ]
        aggregation = "sequences" if name == "gmpo" else "tokens"
        scale = weights_and_count(tokens, aggregation, 1)[0]
        (gradient,) = torch.autograd.grad((found.loss * scale).sum(), current)
        losses, derivatives = torch.tensor(expected, dtype=torch.float64).T
        assert (found.loss - losses).abs().max() < CLOSE
        assert (gradient - derivatives * scale).abs().max() < CLOSE
        assert derivatives.abs().max() > 0.1
    if name != "sapo":
        assert 0 < found.clipped.mean() < 1


@pytest.mark.parametrize("name", objectives.CORRECTIONS)
def test_corrections(name: str) -> None:
    """The factor of each token's loss; some of them are at a bound or left out, and not all."""
    a = AlgorithmConfig(
        corrections=[name],
        proximal="recomputed" if name in objectives.WEIGHTS else "behaviour",
        importance_weight_cap=1.4 if name in objectives.WEIGHTS else None,
        options={"importance_weight_floor": 0.7} if name in objectives.WEIGHTS else {"opsm_divergence": 0.02},
    )
    seen = set()
    for seed in range(8):
        logprobs, tokens = random_tokens(seed)
        found = corrected(a, logprobs, tokens)
        factors = found.kept.double() if found.weights is None else found.weights * found.kept
        columns = (rows(logprobs), rows(tokens.proximal), rows(tokens.behaviour), A)
        expected = [
            factor
            for i, (new, proximal, behaviour, advantage) in enumerate(zip(*columns, strict=True))
            for factor in written_out.correction(
                name, new, proximal, behaviour, advantage, i == 1, Bounds(0.7, 1.4), 0.02
            )
        ]
        assert (factors - torch.tensor(expected, dtype=torch.float64)).abs().max() < CLOSE
        seen |= {min(expected), max(expected)}
    assert len(seen) > 1


def test_a_token_left_out_cannot_spoil_the_gradient_and_one_that_is_nan_shows() -> None:
    """IcePop with an engine's log-prob of minus infinity: the other tokens have their gradient; with NaN the
    loss is not finite, so that the learner skips the update."""
    a = AlgorithmConfig(corrections=["icepop"], proximal="recomputed", importance_weight_cap=5.0)
    logprobs, tokens = random_tokens(1)
    for value, finite in ((-float("inf"), True), (float("nan"), False)):
        behaviour = tokens.behaviour.clone()
        behaviour[3] = value
        current = logprobs.clone().requires_grad_(True)
        found = objective(a, 8, replace(tokens, behaviour=behaviour, reference=None), current, logprobs * 0)
        found.total.backward()
        assert bool(torch.isfinite(current.grad).all()) == finite
        assert torch.nan_to_num(current.grad).count_nonzero() > 5


def groups_of(draw: random.Random, count: int = 4) -> tuple[list[list[float]], list[list[int]]]:
    """Rewards and lengths of groups of unlike size; one has equal rewards, one all zeros."""
    sizes = [draw.randint(2, 5) for _ in range(count)]
    rewards = [[draw.choice([0.0, 0.3, 1.0]) for _ in range(n)] for n in sizes]
    rewards[0], rewards[1] = [0.5] * sizes[0], [0.0] * sizes[1]
    return rewards, [[draw.randint(1, 90) for _ in range(n)] for n in sizes]


def scored(rewards: list[list[float]], lengths: list[list[int]], **parts: RewardPart) -> ScoredBatch:
    counts = torch.tensor([n for group in lengths for n in group])
    return ScoredBatch(flat(rewards), [len(g) for g in rewards], counts, counts, parts)


def flat(groups: list[list[float]]) -> torch.Tensor:
    return torch.tensor([r for group in groups for r in group], dtype=torch.float64)


def first_of_each(a: AlgorithmConfig, batch: ScoredBatch) -> torch.Tensor:
    return torch.stack([of_tokens[0] for of_tokens in token_advantages(a, batch)])


def test_advantages() -> None:
    """Groups of unlike size, equal rewards and zeros among them."""
    draw = random.Random(0)
    for _ in range(5):
        rewards, lengths = groups_of(draw)
        other = [[draw.random() for _ in group] for group in rewards]
        parts = {"a": RewardPart(1.0, flat(rewards)), "b": RewardPart(0.3, flat(other))}
        expected = {
            "grpo_batch_std": written_out.grpo_batch_std(rewards),
            "opo": written_out.opo(rewards, lengths),
            "max_rl": written_out.max_rl(rewards),
            "gdpo": written_out.gdpo([(1.0, rewards), (0.3, other)]),
        }
        for name, values in expected.items():
            found = first_of_each(AlgorithmConfig(advantage=name), scored(rewards, lengths, **parts))
            assert (found - torch.tensor(values, dtype=torch.float64)).abs().max() < CLOSE, name
            assert found.abs().max() > 0.1
        shaped = length_rescaled(flat(rewards), scored(rewards, lengths).lengths, [*map(len, rewards)], 0.33)
        again = torch.tensor(written_out.length_rescaled(rewards, lengths, 0.33), dtype=torch.float64)
        assert (shaped - again).abs().max() < CLOSE and bool((shaped <= flat(rewards)).all())


def test_max_rl_wants_rewards_of_0_or_more() -> None:
    """Its mean is divided by."""
    with pytest.raises(LaminarError, match="a reward is below 0"):
        token_advantages(AlgorithmConfig(advantage="max_rl"), scored([[1.0, -1.0]], [[1, 1]]))


def test_the_weighted_kl_and_its_gradient() -> None:
    """The value, and the gradient, which is that of the reverse KL: the ratio times log(pi / ref)."""
    logprobs, tokens = random_tokens(3)
    current = logprobs.clone().requires_grad_(True)
    found = kl_estimate(current, tokens.reference, "k3_weighted", 10.0, tokens.proximal)
    found.sum().backward()
    columns = (logprobs.tolist(), tokens.proximal.tolist(), tokens.reference.tolist())
    expected = [written_out.k3_weighted(*each) for each in zip(*columns, strict=True)]
    assert (found - torch.tensor([value for value, _ in expected])).abs().max() < CLOSE
    assert (current.grad - torch.tensor([slope for _, slope in expected])).abs().max() < CLOSE


@pytest.mark.parametrize("aggregation", ["tokens", "sequences", "constant"])
def test_the_likelihood_of_right_answers_is_the_mean_over_their_tokens(aggregation: str) -> None:
    """Whatever the policy loss is divided by, and however the mini-batch is cut; nothing where none is
    right."""
    logprobs, tokens = random_tokens(4)
    for right in ([1.0, 0.0, 1.0, 0.0, 0.0], [0.0] * 5):
        weights = likelihood_weights(torch.tensor(right).double(), torch.tensor(LENGTHS), aggregation)
        tokens = replace(tokens, likelihood=0.1 * weights[tokens.sequence], advantages=0 * tokens.advantages)
        a = AlgorithmConfig(likelihood_coefficient=0.1, loss_aggregation=aggregation)
        current = logprobs.clone().requires_grad_(True)
        found = objective(a, 50, replace(tokens, reference=None), current, logprobs * 0)
        expected = 0.1 * written_out.likelihood(right, rows(logprobs))
        assert (found.total / found.count).item() == pytest.approx(expected, abs=CLOSE)


def test_every_shipped_name_has_its_function() -> None:
    """The configuration's names and the tables of functions are the same, so none is refused or missing."""
    assert tuple(LOSSES) == objectives.LOSSES
    assert tuple(ADVANTAGES) == objectives.ADVANTAGES
    assert tuple(CORRECTIONS) == objectives.CORRECTIONS
    assert set(objectives.OPTIONS) <= {*LOSSES, *ADVANTAGES, *CORRECTIONS, objectives.GAE}


REFUSED = {
    "corrections=[tis]": "tis weighs q / mu; set algorithm.proximal=recomputed",
    "corrections=[tis,icepop] proximal=recomputed": "both weigh tokens; keep one",
    "corrections=[icepop] proximal=recomputed": "icepop needs algorithm.importance_weight_cap",
    "corrections=[opsm,opsm]": "one is named twice",
    "corrections=[opsm] options.opsm_delta=1": "options.opsm_delta: nothing here reads it",
    "corrections=[opsm] options.opsm_divergence=-1": "must be a number, at least 0",
    "options.sapo_temperature_bad=1": "it is read by sapo",
    "loss=gmpo": "set algorithm.loss_aggregation=sequences",
    "advantage=gdpo": "name two or more in reward.functions",
    "advantage=max_rl overlong_buffer_tokens=8": "without kl_in_reward and overlong_buffer_tokens",
    "kl_estimator=k3_weighted kl_coefficient=1 kl_in_reward=True": "weighs a loss",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_together_is_refused(words: str) -> None:
    """In one line each."""
    config = RunConfig()
    for word in words.split():
        key, _, value = word.partition("=")
        name, _, option = key.partition(".")
        if option:
            config.algorithm.options = {option: float(value)}
        elif name == "corrections":
            config.algorithm.corrections = value.strip("[]").split(",")
        else:
            kind = type(getattr(config.algorithm, name))
            setattr(config.algorithm, name, kind(value))
    assert any(REFUSED[words] in line for line in broken_rules(config, None))
