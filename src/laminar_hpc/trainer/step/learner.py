"""One trainer step: a batch of trajectories -> advantages -> mini-batches -> optimizer updates -> the step's
metrics.

Called by trainer/loop.py on every rank with the same batch. Every rank makes the same plan and trains its own
part of it; the metrics are those of the whole batch on every rank; those of tokens leave out the mini-batches
whose update was skipped.
"""

from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.messages import Trajectory
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
from laminar_hpc.trainer.step.packing import plan_microbatches, split_minibatches
from laminar_hpc.trainer.step.rescoring import ReferenceWeights, batch_logprobs


class Learner:
    """The algorithm of config.algorithm on a MegatronPolicy. `skipped_in_a_row` is part of a checkpoint's
    state."""

    def __init__(self, config: RunConfig, policy: MegatronPolicy) -> None:
        """`policy` still has the weights of config.model.path, which are those of the reference model: a
        checkpoint is loaded later."""
        self.config, self.policy = config, policy
        self.skipped_in_a_row = 0
        self.gaps: dict[int, tuple[float, int]] = {}  # of the last step, see messages.StepDone; on every rank
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
        examples = self._examples(trajectories, step)
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        rate, norms, collected, skipped = self.policy.learning_rate, [], [], 0
        updates, count = (
            minibatches or self.config.algorithm.minibatches_per_step,
            self.config.algorithm.minibatches_per_step,
        )
        gaps, ahead = torch.zeros(len(trajectories), device=self.policy.device), {}
        for number, members in enumerate(
            split_minibatches(len(trajectories), updates, self.config.seed, step), earlier
        ):
            lengths = [length(trajectories[i]) for i in members]
            plan = plan_microbatches(lengths, ranks, self.config.trainer.tokens_per_microbatch)[rank]
            # the stages pass on tensors of one shape
            size = max(sum(lengths[j] for j in part) for part in plan) if stages > 1 else 0
            micro_batches = [
                make_microbatch([examples[members[j]] for j in part], self.policy.device, size)
                for part in plan
            ]
            of_tokens, of_trajectories = [], self.policy.accumulate(micro_batches, self._loss)
            for part, row in zip(plan, of_trajectories, strict=False):  # a stage before the last has none
                gaps[[members[j] for j in part]] = row[len(SUMS) + 1 :][: len(part)]
                of_tokens.append(row[: len(SUMS) + 1])
            ahead |= {i: (step - trajectories[i].weight_step) * count + number for i in members}
            before_update()
            before_update = _nothing
            norm = self.policy.update()
            if norm is None:
                skipped += 1
            else:
                norms.append(norm)
                collected += of_tokens
            self._count_skipped(norm is None, step)
        for group in (
            parallel_state.get_data_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        ):
            dist.all_reduce(gaps, group=group)
        self.gaps = {
            t.trajectory_id: (gap, ahead[i])
            for i, (t, gap) in enumerate(zip(trajectories, gaps.tolist(), strict=True))
        }
        metrics = {
            **batch_metrics(trajectories, step),
            **reward_means(trajectories, self.config.reward.functions),
            **self._token_metrics(collected),
            "grad_norm": sum(norms) / max(1, len(norms)),
            "learning_rate": rate,
            "skipped_updates": float(skipped),
        }
        return {name: float(value) for name, value in metrics.items()}

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
        least, most = algorithm.first_samples or algorithm.samples_per_prompt, algorithm.samples_per_prompt
        wrong = {group: size for group, size in sizes.items() if not least <= size <= most}
        if wrong:
            wanted = f"{most} each" if least == most else f"{least} to {most} each"
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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The micro-batch's summed loss; its count; and the objective's sums, the largest ratio, and each
        trajectory's gap."""
        tokens = batch.tokens
        found = objective(
            self.config.algorithm, self.config.sampling.max_response_tokens, tokens, logprobs, entropies
        )
        gaps = tokens.sequence_sums((logprobs.detach() - tokens.behaviour).abs()) / tokens.sequence_sums(
            tokens.real
        ).clamp(min=1)
        return found.total, found.count, torch.cat([found.sums, found.largest_ratio[None], gaps])

    def _token_metrics(self, collected: list[torch.Tensor]) -> dict[str, float]:
        """Of all micro-batches of all data-parallel ranks: the loss over its denominator, means over tokens,
        the largest ratio."""
        a = self.config.algorithm
        rows = torch.stack(collected or [torch.zeros(len(SUMS) + 1, device=self.policy.device)]).double()
        sums, largest = rows[:, :-1].sum(0), rows[:, -1].max()
        # Tensor-parallel ranks have the same numbers; of the pipeline's stages only the last has any, the
        # others bring zeros.
        for group in (
            parallel_state.get_data_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        ):
            dist.all_reduce(sums, group=group)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
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


def _nothing() -> None:
    pass
