"""A loss, an advantage and a correction of one's own: copy this file, and change what you like.

    PYTHONPATH=examples/objectives laminar train +experiment=demo algorithm.loss=my_objectives.loss \\
        algorithm.options='{negative_weight: 0.5}'
    PYTHONPATH=examples/objectives laminar train +experiment=demo algorithm.advantage=my_objectives.advantage
    PYTHONPATH=examples/objectives laminar train +experiment=demo \\
        algorithm.corrections=[my_objectives.likely_tokens] algorithm.options='{smallest_probability: 1e-4}'

Each is called with the settings of `algorithm`, with its own numbers in a.options, and is tried on random
tensors before a run begins.
"""

import torch

from laminar_hpc.config.learning_schema import AlgorithmConfig
from laminar_hpc.trainer.algorithms.corrections import Correction
from laminar_hpc.trainer.algorithms.groups import by_group
from laminar_hpc.trainer.algorithms.losses import TokenLosses
from laminar_hpc.trainer.algorithms.scored import ScoredBatch
from laminar_hpc.trainer.algorithms.tokens import Tokens


def loss(a: AlgorithmConfig, logprobs: torch.Tensor, old: torch.Tensor, tokens: Tokens) -> TokenLosses:
    """Clip-higher in which bad tokens count `negative_weight` (by default 1, the shipped `clip`).

    logprobs (with gradient), old: float32 [tokens]. The gradient goes through logprobs; only `loss` has one.
    """
    ratio = torch.exp(logprobs - old)
    advantages = tokens.advantages
    free = ratio * advantages
    bounded = ratio.clamp(1 - a.clip_low, 1 + a.clip_high) * advantages
    weight = torch.where(advantages < 0, float(a.options.get("negative_weight", 1.0)), 1.0)
    return TokenLosses(-torch.minimum(free, bounded) * weight, (bounded < free).float())


def advantage(a: AlgorithmConfig, batch: ScoredBatch) -> torch.Tensor:
    """The reward less its group's median: one lucky sample among many does not make the others bad.

    batch.rewards: float64 [trajectories], group after group -> the same shape.
    """
    return by_group(
        batch.rewards, batch.sizes, lambda rewards: rewards - rewards.quantile(0.5, dim=1, keepdim=True)
    )


def likely_tokens(a: AlgorithmConfig, logprobs: torch.Tensor, tokens: Tokens) -> Correction:
    """Leaves out tokens that the engine drew with a probability below `smallest_probability`.

    logprobs: float32 [tokens], without gradient. A Correction has weights, kept, or both, [tokens] each.
    """
    return Correction(kept=tokens.behaviour.exp() >= float(a.options.get("smallest_probability", 1e-5)))
