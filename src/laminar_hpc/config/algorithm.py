"""Which settings of `algorithm` go together; part of rules.py. The formulas are in trainer/algorithms/.
Imports no torch."""

import math
from collections.abc import Iterator

from laminar_hpc.config.schema import AlgorithmConfig, RunConfig


def algorithm_rules(config: RunConfig) -> Iterator[tuple[bool, str]]:
    """(broken, what to say): settings that contradict each other, and those that would do nothing."""
    for wrong, text in (*_loss_rules(config.algorithm), *_reward_rules(config)):
        yield wrong, f"algorithm.{text}"


def _loss_rules(a: AlgorithmConfig) -> Iterator[tuple[bool, str]]:
    """Of the loss and its importance ratios."""
    yield from (
        (
            a.clip_dual is not None and a.loss != "clip",
            f"clip_dual={a.clip_dual} belongs to algorithm.loss=clip, not {a.loss}",
        ),
        (
            a.clip_dual is not None and not a.clip_dual > 1 + a.clip_high,
            f"clip_dual={a.clip_dual}: must be above 1 + clip_high, for example 3",
        ),
        (
            a.loss == "gspo" and a.loss_aggregation != "sequences",
            "loss=gspo has one ratio per sequence: set "
            f"algorithm.loss_aggregation=sequences, not {a.loss_aggregation}",
        ),
        (
            a.loss == "aipo" and a.importance_weight_cap is None,
            "loss=aipo truncates its weights: set algorithm.importance_weight_cap, for example 5",
        ),
        (
            a.loss == "aipo" and a.proximal != "behaviour",
            "loss=aipo weighs against the behaviour policy itself: "
            f"set algorithm.proximal=behaviour, not {a.proximal}",
        ),
        (
            a.importance_weight_cap is not None and a.proximal == "behaviour" and a.loss != "aipo",
            f"importance_weight_cap={a.importance_weight_cap} has no weight to truncate: set "
            "algorithm.proximal=recomputed, or null",
        ),
        (
            not 0
            <= (a.sequence_ratio_min or 0.0)
            < (math.inf if a.sequence_ratio_max is None else a.sequence_ratio_max),
            f"sequence_ratio_min={a.sequence_ratio_min} and sequence_ratio_max={a.sequence_ratio_max}: the "
            "first must be below the second",
        ),
    )


def _reward_rules(config: RunConfig) -> Iterator[tuple[bool, str]]:
    """Of rewards, advantages and the KL divergence."""
    a = config.algorithm
    yield from (
        (
            a.zero_variance == "estimate"
            and (a.advantage != "grpo" or a.kl_in_reward or a.overlong_buffer_tokens > 0),
            "zero_variance=estimate takes rewards as probabilities: it goes with advantage=grpo, "
            "without kl_in_reward and without overlong_buffer_tokens; use keep or filter",
        ),
        (
            not a.normalize_std and a.advantage != "grpo",
            f"normalize_std=false belongs to algorithm.advantage=grpo, not {a.advantage}: leave it out",
        ),
        (
            a.kl_in_reward and a.kl_coefficient == 0,
            "kl_in_reward=true does nothing while algorithm.kl_coefficient=0: set one of them",
        ),
        (
            a.kl_coefficient > 0 and a.kl_estimator == "k1" and not a.kl_in_reward,
            "kl_estimator=k1 as a loss pulls nowhere (its gradient has mean 0): use k2 or k3, or "
            "algorithm.kl_in_reward=true",
        ),
        (
            a.loss == "gspo" and a.kl_in_reward and a.advantage.startswith("reinforce_pp"),
            f"loss=gspo has one advantage per sequence, {a.advantage} "
            "with kl_in_reward one per token: use another loss",
        ),
        (
            a.overlong_buffer_tokens > config.sampling.max_response_tokens,
            f"overlong_buffer_tokens={a.overlong_buffer_tokens}: must be at most "
            f"sampling.max_response_tokens={config.sampling.max_response_tokens}",
        ),
    )
