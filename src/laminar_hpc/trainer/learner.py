"""One trainer step: a batch of trajectories -> advantages -> mini-batches -> optimizer updates -> the step's metrics.

Called by trainer/loop.py on every rank with the same batch. Every rank makes the same plan and trains its own part of it; the metrics are
those of the whole batch on every rank; those of tokens leave out the mini-batches whose update was skipped.
"""

from collections import defaultdict
from collections.abc import Callable

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.messages import Trajectory
from laminar_hpc.trainer.algorithms.advantages import group_advantages, shuffled
from laminar_hpc.trainer.algorithms.losses import clip_higher
from laminar_hpc.trainer.megatron import MegatronPolicy
from laminar_hpc.trainer.microbatch import MicroBatch, length, make_microbatch
from laminar_hpc.trainer.packing import plan_microbatches, split_minibatches


class Learner:
    """GRPO with clip-higher on a MegatronPolicy. `skipped_in_a_row` is part of a checkpoint's state."""

    def __init__(self, config: RunConfig, policy: MegatronPolicy) -> None:
        self.config, self.policy = config, policy
        self.skipped_in_a_row = 0

    def train(self, trajectories: list[Trajectory], step: int, before_update: Callable[[], None]) -> dict[str, float]:
        """Turns the weights of `step` into those of step + 1. `before_update` is called once, before the weights change.

        Raises LaminarError for an incomplete group, and when too many updates in a row had gradients that are not finite.
        """
        trajectories = sorted(trajectories, key=lambda t: (t.group_id, t.trajectory_id))  # the order of arrival must not matter
        advantages = self._advantages(trajectories, step)
        rank, ranks = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        rate, norms, collected, skipped = self.policy.learning_rate, [], [], 0
        for members in split_minibatches(len(trajectories), self.config.algorithm.minibatches_per_step, self.config.seed, step):
            lengths = [length(trajectories[i]) for i in members]
            plan = plan_microbatches(lengths, ranks, self.config.trainer.tokens_per_microbatch)[rank]
            size = max(sum(lengths[j] for j in part) for part in plan) if stages > 1 else 0  # the stages pass on tensors of one shape
            micro_batches = [
                make_microbatch([trajectories[members[j]] for j in part], [advantages[members[j]] for j in part], self.policy.device, size)
                for part in plan
            ]
            of_tokens = self.policy.accumulate(micro_batches, self._loss)
            before_update()
            before_update = _nothing
            norm = self.policy.update()
            if norm is None:
                skipped += 1
            else:
                norms.append(norm)
                collected += of_tokens
            self._count_skipped(norm is None, step)
        metrics = {
            **batch_metrics(trajectories, step),
            **self._token_metrics(collected),
            "grad_norm": sum(norms) / max(1, len(norms)),
            "learning_rate": rate,
            "skipped_updates": float(skipped),
        }
        return {name: float(value) for name, value in metrics.items()}

    def _advantages(self, trajectories: list[Trajectory], step: int) -> list[float]:
        """One per trajectory, which are ordered by group."""
        samples, sizes = self.config.algorithm.samples_per_prompt, defaultdict(int)
        for t in trajectories:
            sizes[t.group_id] += 1
        wrong = {group: size for group, size in sizes.items() if size != samples}
        if wrong:
            raise LaminarError(f"the batch of step {step} has incomplete groups (group: trajectories) {wrong}; {samples} each are needed")
        rewards = [t.reward for t in trajectories]
        if self.config.algorithm.shuffle_rewards:
            rewards = shuffled(rewards, self.config.seed, step)
        grouped = torch.tensor(rewards, dtype=torch.float64).view(-1, samples)
        return group_advantages(grouped, self.config.algorithm.normalize_std).flatten().tolist()

    def _loss(self, batch: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The micro-batch's summed loss; and [6] sums over its tokens: loss, ratio, clipped, entropy, tokens; and the largest ratio."""
        a = self.config.algorithm
        tokens = clip_higher(logprobs, batch.behaviour_logprobs, batch.advantages, a.clip_low, a.clip_high)
        total = (tokens.loss * batch.weights).sum()
        with torch.no_grad():
            each = torch.stack([tokens.loss.detach(), tokens.ratio, tokens.clipped, entropies, torch.ones_like(tokens.ratio)])
            largest = (tokens.ratio * batch.weights).max() if len(tokens.ratio) else total.new_zeros(())
            return total, torch.cat([(each * batch.weights).sum(1), largest[None]])

    def _token_metrics(self, collected: list[torch.Tensor]) -> dict[str, float]:
        """Means over the tokens of all micro-batches of all data-parallel ranks, on every rank."""
        rows = torch.stack(collected or [torch.zeros(6, device=self.policy.device)]).double()
        sums, largest = rows[:, :5].sum(0), rows[:, 5].max()
        # Tensor-parallel ranks have the same numbers; of the pipeline's stages only the last has any, the others bring zeros.
        for group in (parallel_state.get_data_parallel_group(), parallel_state.get_pipeline_model_parallel_group()):
            dist.all_reduce(sums, group=group)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        loss, ratio, clipped, entropy, tokens = sums.tolist()
        tokens = max(tokens, 1.0)
        return {
            "loss": loss / tokens,
            "ratio_mean": ratio / tokens,
            "ratio_max": float(largest),
            "clip_fraction": clipped / tokens,
            "entropy": entropy / tokens,
        }

    def _count_skipped(self, skipped: bool, step: int) -> None:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        limit = self.config.optimizer.max_skipped_updates
        if self.skipped_in_a_row >= limit:
            raise LaminarError(
                f"{limit} optimizer updates in a row had gradients that are not finite, the last at step {step}: lower optimizer.lr, "
                "or look for non-finite log-probs of the engine; optimizer.max_skipped_updates allows more"
            )


def _nothing() -> None:
    pass


def batch_metrics(trajectories: list[Trajectory], step: int) -> dict[str, float]:
    """What can be said of a batch without the policy. Staleness is in trainer steps: at generation, finished minus weights; at training,
    `step` minus weights."""
    n, lengths = len(trajectories), [len(t.response_tokens) for t in trajectories]
    generation = [t.step_finished - t.weight_step for t in trajectories]
    training = [step - t.weight_step for t in trajectories]
    return {
        "trajectories": n,
        "reward_mean": sum(t.reward for t in trajectories) / n,
        "accuracy_mean": sum(t.reward_parts.get("accuracy", float(t.reward > 0)) for t in trajectories) / n,
        "reward_error_count": sum(bool(t.reward_error) for t in trajectories),
        "truncated_fraction": sum(t.finish_reason == "length" for t in trajectories) / n,
        "prompt_tokens": sum(len(t.prompt_tokens) for t in trajectories),
        "response_tokens": sum(lengths),
        "response_length_mean": sum(lengths) / n,
        "response_length_max": max(lengths),
        "staleness_generation_mean": sum(generation) / n,
        "staleness_generation_max": max(generation),
        "staleness_training_mean": sum(training) / n,
        "staleness_training_max": max(training),
        "versions_per_trajectory_max": max(len({s.weight_id for s in t.version_spans}) for t in trajectories),
    }
