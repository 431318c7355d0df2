"""Every objective that is shipped against another statement of it, on random tensors.

    python bench/objectives.py --json objectives.json

Where TRL has the same objective, its trainers' own methods score and weigh the same rewards and log-probs
(tests/trainer/test_trl.py); elsewhere it is the paper's formula, one number after the other in plain Python
(tests/helpers/trainer/written_out.py). Compared are advantages, losses and the gradient by each log-prob.

Figure: `largest_deviation`, the largest absolute difference of any number of all objectives. Goal: at most
1e-6.
"""

import random
import sys

import common
import torch

from laminar_hpc.config import objectives
from laminar_hpc.config.learning_schema import AlgorithmConfig
from laminar_hpc.trainer.algorithms.corrections import corrected
from laminar_hpc.trainer.algorithms.kl import kl_estimate
from laminar_hpc.trainer.algorithms.losses import policy_loss
from laminar_hpc.trainer.algorithms.shaping import length_rescaled

sys.path[:0] = [str(common.ROOT / "tests"), str(common.ROOT / "tests" / "trainer")]
import test_objectives as written  # noqa: E402 (the path above)
import test_trl as trl  # noqa: E402

from helpers.trainer import written_out  # noqa: E402

SEEDS = range(20)
COLUMNS = ("objective", "held against", "largest deviation")


def main() -> None:
    options = common.options_of(__doc__ or "").parse_args()
    rows = [
        {"objective": name, "held against": source, "largest deviation": value}
        for source, found in (
            ("TRL's code", {name: by_trl(name) for name in trl.CASES}),
            ("the formula", by_formulas()),
        )
        for name, value in found.items()
    ]
    figures = {"largest_deviation": max(row["largest deviation"] for row in rows)}
    for row in rows:
        row["largest deviation"] = f"{row['largest deviation']:.1e}"
    common.finish(options, figures, rows, COLUMNS)


def by_trl(name: str) -> float:
    """Of the advantages, the loss and its gradient."""
    settings, theirs = trl.CASES[name]
    mine, found = trl.here(**settings), trl.by_trl(**theirs)
    return max(deviation(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(mine, found, strict=True))


def deviation(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((mine.detach().double() - theirs.detach().double()).abs().max())


def by_formulas() -> dict[str, float]:
    """The largest of all seeds."""
    found = {name: max(of_loss(name, seed) for seed in SEEDS) for name in written.OF_LOSSES}
    found |= {name: max(of_correction(name, seed) for seed in SEEDS) for name in objectives.CORRECTIONS}
    found["k3_weighted"] = max(of_weighted_kl(seed) for seed in SEEDS)
    for seed in SEEDS:
        for name, value in of_advantages(seed).items():
            found[name] = max(found.get(name, 0.0), value)
    return found


def of_loss(name: str, seed: int) -> float:
    settings, formula = written.OF_LOSSES[name]
    logprobs, tokens = written.random_tokens(seed)
    current = logprobs.clone().requires_grad_(True)
    loss = policy_loss(AlgorithmConfig(loss=name, **settings), current, tokens.proximal, tokens).loss
    columns = zip(written.rows(logprobs), written.rows(tokens.proximal), written.A, strict=True)
    expected = torch.tensor([pair for each in columns for pair in formula(*each)], dtype=torch.float64)
    scale = 1 / tokens.sequence_sums(tokens.real)[tokens.sequence] if name == "gmpo" else tokens.real
    (gradient,) = torch.autograd.grad((loss * scale).sum(), current)
    return max(deviation(loss, expected[:, 0]), deviation(gradient, expected[:, 1] * scale))


def of_correction(name: str, seed: int) -> float:
    weighs = name in objectives.WEIGHTS
    a = AlgorithmConfig(
        corrections=[name],
        proximal="recomputed" if weighs else "behaviour",
        importance_weight_cap=1.4 if weighs else None,
        options={"importance_weight_floor": 0.7} if weighs else {"opsm_divergence": 0.02},
    )
    logprobs, tokens = written.random_tokens(seed)
    found = corrected(a, logprobs, tokens)
    factors = found.kept.double() if found.weights is None else found.weights * found.kept
    columns = [written.rows(each) for each in (logprobs, tokens.proximal, tokens.behaviour)]
    expected = [
        factor
        for i, each in enumerate(zip(*columns, written.A, strict=True))
        for factor in written_out.correction(name, *each, i == 1, written_out.Bounds(0.7, 1.4), 0.02)
    ]
    return deviation(factors, torch.tensor(expected, dtype=torch.float64))


def of_weighted_kl(seed: int) -> float:
    logprobs, tokens = written.random_tokens(seed)
    current = logprobs.clone().requires_grad_(True)
    found = kl_estimate(current, tokens.reference, "k3_weighted", None, tokens.proximal)
    found.sum().backward()
    columns = zip(logprobs.tolist(), tokens.proximal.tolist(), tokens.reference.tolist(), strict=True)
    expected = torch.tensor([written_out.k3_weighted(*each) for each in columns], dtype=torch.float64)
    return max(deviation(found, expected[:, 0]), deviation(current.grad, expected[:, 1]))


def of_advantages(seed: int) -> dict[str, float]:
    draw = random.Random(seed)
    rewards, lengths = written.groups_of(draw)
    other = [[draw.random() for _ in group] for group in rewards]
    parts = {
        "a": written.RewardPart(1.0, written.flat(rewards)),
        "b": written.RewardPart(0.3, written.flat(other)),
    }
    batch = written.scored(rewards, lengths, **parts)
    expected = {
        "grpo_batch_std": written_out.grpo_batch_std(rewards),
        "opo": written_out.opo(rewards, lengths),
        "max_rl": written_out.max_rl(rewards),
        "gdpo": written_out.gdpo([(1.0, rewards), (0.3, other)]),
    }
    found = {
        name: deviation(
            written.first_of_each(AlgorithmConfig(advantage=name), batch),
            torch.tensor(values, dtype=torch.float64),
        )
        for name, values in expected.items()
    }
    shaped = length_rescaled(written.flat(rewards), batch.lengths, batch.sizes, 0.33)
    again = written_out.length_rescaled(rewards, lengths, 0.33)
    return found | {"length_penalty": deviation(shaped, torch.tensor(again, dtype=torch.float64))}


if __name__ == "__main__":
    main()
