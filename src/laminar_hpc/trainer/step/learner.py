"""One trainer step: a batch of trajectories -> advantages -> mini-batches -> optimizer updates -> the step's
metrics.

Called by trainer/loop.py on every rank with the same batch. Every rank makes the same plan and trains its own
part of it; the metrics are those of the whole batch on every rank; those of tokens leave out the mini-batches
whose update was skipped.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.messages.data import Trajectory
from laminar_hpc.policies.metrics import batch_metrics, reward_means
from laminar_hpc.trainer.algorithms.advantages import token_advantages
from laminar_hpc.trainer.algorithms.kl import kl_estimate
from laminar_hpc.trainer.algorithms.objective import SUMS, objective
from laminar_hpc.trainer.algorithms.shaping import overlong_punishment, shuffled
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.microbatch import (
    Example,
    MicroBatch,
    behaviour_logprobs,
    length,
    make_microbatch,
    trained,
)
from laminar_hpc.trainer.step.packing import split_minibatches
from laminar_hpc.trainer.step.parallel import own_microbatches, reduced
from laminar_hpc.trainer.step.rescoring import ReferenceWeights, batch_logprobs


class Collected(NamedTuple):
    """Of one micro-batch: the objective's sums [len(SUMS)] and largest ratio, and of each trajectory the mean
    |log-prob by the trainer - by the engine| over its trained tokens [trajectories, at least 1]."""

    sums: torch.Tensor
    largest_ratio: torch.Tensor
    mismatch: torch.Tensor


class Learner:
    """The algorithm of config.algorithm on a MegatronPolicy. `skipped_in_a_row` is part of a checkpoint's
    state.

    `mismatches`, of the last step and on every rank: trajectory id -> its log-prob mismatch, and the number
    of optimizer updates between the weights that generated it and those that it met.
    """

    def __init__(
        self, config: RunConfig, policy: MegatronPolicy, progress: Callable[[], None] = lambda: None
    ) -> None:
        """`policy` still has the weights of config.model.path, which are those of the reference model: a
        checkpoint is loaded later. `progress` is called after the forward pass of each micro-batch that this
        rank ends, and after each update."""
        self.config, self.policy, self._progress = config, policy, progress
        self.skipped_in_a_row = 0
        self.mismatches: dict[int, tuple[float, int]] = {}
        self._reference = ReferenceWeights(policy) if config.algorithm.kl_coefficient > 0 else None

    def train(
        self,
        trajectories: list[Trajectory],
        step: int,
        before_update: Callable[[], None],
        minibatches: int | None = None,
        earlier: int = 0,
    ) -> dict[str, float]:
        """Turns the weights of `step` into those of step + 1. `before_update` is called once, before the
        weights change; `minibatches`: updates, by default algorithm.minibatches_per_step; `earlier`: updates
        of this step before.

        Raises LaminarError for an incomplete group, and when too many updates in a row had gradients that are
        not finite.
        """
        # the order of arrival must not matter
        trajectories = sorted(trajectories, key=lambda t: (t.group_id, t.trajectory_id))
        examples, learning_rate = self._examples(trajectories, step), self.policy.learning_rate
        updates = minibatches or self.config.algorithm.minibatches_per_step
        mismatch = torch.zeros(len(trajectories), device=self.policy.device)
        update_of, norms, collected = dict[int, int](), list[float](), list[Collected]()
        for number, members in enumerate(
            split_minibatches(len(trajectories), updates, self.config.seed, step)
        ):
            of_minibatch, mismatch[members] = self._accumulate([examples[i] for i in members])
            update_of |= dict.fromkeys(members, earlier + number)
            if number == 0:
                before_update()
            norm = self.policy.update()
            self._progress()
            self._count_skipped(norm is None, step)
            if norm is not None:
                norms.append(norm)
                collected += of_minibatch
        self._note_mismatches(trajectories, step, reduced(mismatch).tolist(), update_of)
        metrics = {
            **batch_metrics(trajectories, step),
            **reward_means(trajectories, self.config.reward.functions),
            **self._token_metrics(collected),
            "grad_norm": sum(norms) / max(1, len(norms)),
            "learning_rate": learning_rate,
            "skipped_updates": updates - len(norms),
        }
        return {name: float(value) for name, value in metrics.items()}

    def _accumulate(self, examples: list[Example]) -> tuple[list[Collected], torch.Tensor]:
        """The gradients of one mini-batch. Returns what this rank's micro-batches collected, and the mismatch
        of all its trajectories [examples], which is 0 where another rank has it."""
        lengths = [length(example.trajectory) for example in examples]
        plan, size = own_microbatches(lengths, self.config.trainer.tokens_per_microbatch)
        micro_batches = [
            make_microbatch([examples[i] for i in part], self.policy.device, size) for part in plan
        ]
        collected = self.policy.accumulate(micro_batches, self._loss)
        mismatch = torch.zeros(len(examples), device=self.policy.device)
        for part, of_part in zip(plan, collected, strict=False):  # a stage before the last has none
            mismatch[part] = of_part.mismatch[: len(part)]
        return collected, mismatch

    def _note_mismatches(
        self, trajectories: list[Trajectory], step: int, mismatch: list[float], update_of: dict[int, int]
    ) -> None:
        per_step = self.config.algorithm.minibatches_per_step
        self.mismatches = {
            t.trajectory_id: (mismatch[i], (step - t.weight_step) * per_step + update_of[i])
            for i, t in enumerate(trajectories)
        }

    def _examples(self, trajectories: list[Trajectory], step: int) -> list[Example]:
        """The trajectories, which are ordered by group, with what is computed of them before the first
        update."""
        sizes = self._group_sizes(trajectories, step)
        a, counts = self.config.algorithm, [len(trained(t)) for t in trajectories]
        flat: dict[str, torch.Tensor] = {}
        if a.proximal == "recomputed":
            flat["proximal"] = batch_logprobs(self.policy, trajectories)
        if self._reference is not None:
            with self._reference.in_place():
                flat["reference"] = batch_logprobs(self.policy, trajectories)
        penalties = torch.zeros(sum(counts), dtype=torch.float64)
        if a.kl_in_reward:
            sampled = (
                flat["proximal"]
                if "proximal" in flat
                else torch.cat([behaviour_logprobs(t) for t in trajectories])
            )
            penalties = a.kl_coefficient * kl_estimate(sampled, flat["reference"], a.kl_estimator).double()
        rewards = torch.tensor(self._rewards(trajectories, step), dtype=torch.float64)
        flat["advantages"] = token_advantages(a, rewards, sizes, torch.tensor(counts), penalties).float()
        parts = {name: values.split(counts) for name, values in flat.items()}
        return [
            Example(t, **{name: values[i] for name, values in parts.items()})
            for i, t in enumerate(trajectories)
        ]

    def _group_sizes(self, trajectories: list[Trajectory], step: int) -> list[int]:
        """Trajectories per group, in order; groups may differ in size when sampling is adaptive."""
        algorithm, sizes = self.config.algorithm, Counter(t.group_id for t in trajectories)
        largest = algorithm.samples_per_prompt
        smallest = algorithm.first_samples or largest
        wrong = {group: size for group, size in sizes.items() if not smallest <= size <= largest}
        if wrong:
            wanted = f"{largest} each" if smallest == largest else f"{smallest} to {largest} each"
            raise LaminarError(
                f"the batch of step {step} has incomplete groups (group: "
                f"trajectories) {wrong}; {wanted} are needed"
            )
        return list(sizes.values())

    def _rewards(self, trajectories: list[Trajectory], step: int) -> list[float]:
        """What is trained on; the metrics report the rewards as they came."""
        buffer, longest = (
            self.config.algorithm.overlong_buffer_tokens,
            self.config.sampling.max_response_tokens,
        )
        rewards = [
            t.reward + overlong_punishment(len(t.response_tokens), longest, buffer) for t in trajectories
        ]
        return shuffled(rewards, self.config.seed, step) if self.config.algorithm.shuffle_rewards else rewards

    def _loss(
        self, batch: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, Collected]:
        """As `MegatronPolicy.accumulate` wants it."""
        tokens, longest = batch.tokens, self.config.sampling.max_response_tokens
        self._progress()
        micro = objective(self.config.algorithm, longest, tokens, logprobs, entropies)
        distance, count = (logprobs.detach() - tokens.behaviour).abs(), tokens.sequence_sums(tokens.real)
        mismatch = tokens.sequence_sums(distance) / count.clamp(min=1)
        return micro.total, micro.count, Collected(micro.sums, micro.largest_ratio, mismatch)

    def _token_metrics(self, collected: list[Collected]) -> dict[str, float]:
        """Of all micro-batches of all data-parallel ranks: the loss over its denominator, means over tokens,
        the largest ratio."""
        a, none = self.config.algorithm, torch.zeros(len(SUMS), device=self.policy.device)
        sums = reduced(torch.stack([c.sums for c in collected] or [none]).double().sum(0))
        ratios = torch.stack([c.largest_ratio for c in collected] or [none[0]])
        largest = reduced(ratios.double().max(), dist.ReduceOp.MAX)
        of = dict(zip(SUMS, sums.tolist(), strict=True))
        tokens, kept = max(of["tokens"], 1.0), max(of["kept"], 1.0)
        metrics = {
            "loss": of["loss"] / max(of["count"], 1.0),
            "ratio_mean": of["ratio"] / kept,
            "ratio_max": float(largest),
            "clip_fraction": of["clipped"] / kept,
            "entropy": of["entropy"] / tokens,
        }
        if a.kl_coefficient > 0:
            metrics["kl"] = of["kl"] / tokens
        if a.sequence_ratio_min is not None or a.sequence_ratio_max is not None:
            metrics["left_out_fraction"] = (of["tokens"] - of["kept"]) / tokens
        if a.proximal == "recomputed":
            metrics["truncated_weight_fraction"] = of["truncated"] / kept
        return metrics

    def _count_skipped(self, skipped: bool, step: int) -> None:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        limit = self.config.optimizer.max_skipped_updates
        if self.skipped_in_a_row >= limit:
            raise LaminarError(
                f"{limit} optimizer updates in a row had gradients that are not finite, the last at step "
                f"{step}: lower optimizer.lr, "
                "or look for non-finite log-probs of the engine; optimizer.max_skipped_updates allows more"
            )
