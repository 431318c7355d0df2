"""One trainer step: a batch of trajectories -> advantages -> mini-batches -> optimizer updates -> the step's
metrics.

Called by trainer/loop.py on every rank with the same batch. Every rank makes the same plan, and reads and
trains its own part of it; the metrics are those of the whole batch on every rank; those of tokens leave out
the mini-batches whose update was skipped.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.learning_schema import AlgorithmConfig
from laminar_hpc.config.models import even_tokens, model_config
from laminar_hpc.config.objectives import GAE
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.messages.data import Trajectory
from laminar_hpc.policies.metrics import batch_metrics, reward_means
from laminar_hpc.trainer.algorithms.advantages import token_advantages
from laminar_hpc.trainer.algorithms.kl import kl_estimate, steered
from laminar_hpc.trainer.algorithms.objective import SUMS, objective
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.batch import PlannedMicrobatch, StepBatch
from laminar_hpc.trainer.step.critic import Critic
from laminar_hpc.trainer.step.demonstrations import Demonstrations, OfUpdate
from laminar_hpc.trainer.step.guard import Guard, GuardReport, trajectory_figures
from laminar_hpc.trainer.step.microbatch import (
    Drawn,
    Example,
    Lazily,
    MicroBatch,
    Text,
    make_microbatch,
    outcomes,
)
from laminar_hpc.trainer.step.packing import split_minibatches
from laminar_hpc.trainer.step.parallel import RankShare, own_share, reduced, total
from laminar_hpc.trainer.step.rescoring import Beside, ReferenceWeights, own_logprobs
from laminar_hpc.trainer.step.rewards import scored_batch
from laminar_hpc.trainer.step.routes import routed
from laminar_hpc.trainer.step.teachers import Teachers


class Collected(NamedTuple):
    """Of one micro-batch: the objective's sums [len(SUMS)] and largest ratio, and of each trajectory what
    `trajectory_figures` gives [trajectories, at least 1]."""

    sums: torch.Tensor
    largest_ratio: torch.Tensor
    mismatch: torch.Tensor
    log_ratio: torch.Tensor


class Learner:
    """The algorithm of config.algorithm on a MegatronPolicy; `state` and `beside` are parts of a
    checkpoint's.

    `mismatches`, of the last step and on every rank: trajectory id -> its log-prob mismatch, and the number
    of optimizer updates between the weights that generated it and those that it met.
    """

    def __init__(
        self, config: RunConfig, policy: MegatronPolicy, progress: Callable[[], None] = lambda: None
    ) -> None:
        """`policy` still has the weights of config.model.path, which are those of the reference model: a
        checkpoint is loaded later. `progress` is called for each micro-batch of each pass over the batch, on
        every pipeline stage, and after each update."""
        self.config = config
        self.policy = policy
        self._progress = progress
        self.skipped_in_a_row = 0
        self.kl_coefficient = config.algorithm.kl_coefficient
        self.mismatches: dict[int, tuple[float, int]] = {}
        self._reference = ReferenceWeights(policy) if config.algorithm.kl_coefficient > 0 else None
        self.critic = Critic(config) if config.algorithm.advantage == GAE else None
        self._teachers = Teachers(config, policy) if config.teacher.model else None
        self._demonstrations = Demonstrations(config, self._even) if config.demonstrations.path else None
        invented = config.rollout.engine == "emulated"  # log-probs of no policy
        self._guard = Guard(replace(config.guard, enabled=config.guard.enabled and not invented))

    @cached_property
    def _even(self) -> float:
        """As in packing.py's `work`, of the model that is trained."""
        return even_tokens(model_config(self.config.model.path))

    @property
    def beside(self) -> dict[str, Beside]:
        """What a checkpoint holds beside the policy, by name: the reference where it does not stay what
        model.path has, and the critic."""
        moving = self._reference if self.config.algorithm.reference_every is not None else None
        parts: dict[str, Beside | None] = {"reference": moving, "critic": self.critic}
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint holds of it beside tensors, as JSON has it."""
        own = {"skipped_in_a_row": self.skipped_in_a_row, "kl_coefficient": self.kl_coefficient}
        return own | ({"guard": self._guard.state} if self.config.guard.enabled else {})

    def take_state(self, state: Mapping[str, Any]) -> None:
        """After a load. A coefficient that is not steered is this launch's own."""
        self.skipped_in_a_row = state["skipped_in_a_row"]
        if self.config.algorithm.kl_target is not None:
            self.kl_coefficient = state.get("kl_coefficient", self.kl_coefficient)
        if "guard" in state:
            self._guard.take_state(state["guard"])

    @property
    def guarded(self) -> GuardReport:
        """What the guard has done in the last `train`; the same on every rank."""
        return self._guard.report

    @property
    def algorithm(self) -> AlgorithmConfig:
        """The settings with the KL coefficient of now."""
        if self.config.algorithm.kl_target is None:
            return self.config.algorithm
        return replace(self.config.algorithm, kl_coefficient=self.kl_coefficient)

    def train(
        self,
        batch: StepBatch,
        step: int,
        before_update: Callable[[], None],
        minibatches: int | None = None,
        earlier: int = 0,
    ) -> dict[str, float]:
        """Turns the weights of `step` into those of step + 1. `before_update` is called once, before the
        weights change; `minibatches`: updates, by default algorithm.minibatches_per_step; `earlier`: updates
        of this step before.

        Raises LaminarError for an incomplete group, a response that is not as it was generated, and when too
        many updates in a row had gradients that are not finite.
        """
        planned, learning_rate = batch.planned, self.policy.learning_rate
        every = self.config.algorithm.reference_every
        if self._reference is not None and every and earlier == 0 and step > 0 and step % every == 0:
            self._reference.move()
        updates = minibatches or self.config.algorithm.minibatches_per_step
        members, shares = self._plan(planned, updates, step)
        examples = self._examples(batch, shares, members, step)
        records = [p.record for p in planned]
        figures = torch.zeros(2, len(planned), device=self.policy.device)
        of_update = self._demonstrations.of_update if self._demonstrations is not None else None
        self._guard.begin()
        update_of, norms, collected = dict[int, int](), list[float](), list[Collected]()
        for number, share in enumerate(shares):
            own = [records[i] for i in members[number]]
            if self.critic is not None:
                self.critic.update(share, self._progress)
            shown = of_update(step, earlier + number, [t.trained for t in own]) if of_update else None
            of_minibatch = self._accumulate(examples, share, figures, shown)
            update_of |= dict.fromkeys(members[number], earlier + number)
            if number == 0:
                before_update()
            norm = self._update(step, own, figures[:, members[number]], of_minibatch)
            if norm is not None:
                norms.append(norm)
                collected += of_minibatch
        token_metrics = self._token_metrics(collected)
        if norms and earlier + updates == self.config.algorithm.minibatches_per_step:
            self._steer(token_metrics)
        self._note_mismatches(records, step, reduced(figures[0]).tolist(), update_of)
        metrics = {
            **batch_metrics(records, sum(len(p.prompt) for p in planned), step),
            **reward_means(records, self.config.reward.functions),
            **token_metrics,
            "grad_norm": sum(norms) / max(1, len(norms)),
            "learning_rate": learning_rate,
            "skipped_updates": updates - len(norms) - self.guarded.skipped,
            **self._metrics_of_parts(),
        }
        return {name: float(value) for name, value in metrics.items()}

    def _metrics_of_parts(self) -> dict[str, float]:
        """Of what is there in some runs only. Collective."""
        found = self._guard.metrics
        if self.critic is not None:
            found |= self.critic.step_metrics()
        if self._demonstrations is not None:
            found |= self._demonstrations.metrics(self.policy.device)
        if self.policy.routing is not None:
            found["routing_difference"] = self.policy.routing.difference()
        return found

    def _plan(
        self, planned: list[PlannedMicrobatch], updates: int, step: int
    ) -> tuple[list[list[int]], list[RankShare]]:
        """The members of each mini-batch, and this rank's share of it."""
        members = split_minibatches(len(planned), updates, self.config.seed, step)
        lengths, budget = [p.length for p in planned], self.config.trainer.pack_tokens
        return members, [own_share(lengths, of_one, budget, self._even) for of_one in members]

    def _accumulate(
        self,
        examples: dict[int, Example],
        share: RankShare,
        figures: torch.Tensor,
        shown: OfUpdate | None = None,
    ) -> list[Collected]:
        """The gradients of one mini-batch, and of the demonstrations `shown` beside it. Returns what this
        rank's micro-batches collected, and notes in `figures` [2, batch] what `trajectory_figures` gives,
        which stays 0 where another rank has it."""
        own, more = len(share.plan), len(shown.share.plan) if shown else 0
        device, size = self.policy.device, max(share.size, shown.share.size if shown else 0)

        def micro_batch(number: int) -> MicroBatch:
            if number:  # a stage without a loss asks for the next one when it has handed one on
                self._progress()
            if shown and number >= own:
                return shown.micro_batch(number - own, device, size)
            made = make_microbatch([examples[i] for i in share.plan[number]], device, size)
            return self._teachers.beside(made, share.plan[number]) if self._teachers else made

        collected = self.policy.accumulate(Lazily(own + more, micro_batch), self._loss)
        for part, of_part in zip(share.plan, collected, strict=False):  # a stage before the last has none
            figures[0, part] = of_part.mismatch[: len(part)]
            figures[1, part] = of_part.log_ratio[: len(part)]
        if shown:  # the engine's log-probs of their tokens are 0: the mean distance is a sum of their own
            shown.note([of_part.mismatch[0] for of_part in collected[own:]])
        return collected[:own]

    def _update(
        self, step: int, records: list[Trajectory], figures: torch.Tensor, collected: list[Collected]
    ) -> float | None:
        """The update of the mini-batch of `records`, unless the guard forbids it. The norm of its gradients;
        None where it was not made."""
        has_reference = self._reference is not None
        allowed = self._guard.allows(step, records, figures, lambda: self._sums(collected), has_reference)
        if allowed and self.critic is not None and self.critic.warms_up(step):
            norm: float | None = 0.0
        else:
            norm = self.policy.update() if allowed else None
        self._progress()
        if allowed:
            self._count_skipped(norm is None, step)
        return norm

    def _note_mismatches(
        self, records: list[Trajectory], step: int, mismatch: list[float], update_of: dict[int, int]
    ) -> None:
        per_step = self.config.algorithm.minibatches_per_step
        self.mismatches = {
            t.trajectory_id: (mismatch[i], (step - t.weight_step) * per_step + update_of[i])
            for i, t in enumerate(records)
        }

    def _examples(
        self, batch: StepBatch, shares: list[RankShare], members: list[list[int]], step: int
    ) -> dict[int, Example]:
        """What this rank trains, by its place in the batch, with what is computed of it before the first
        update."""
        a, planned = self.config.algorithm, batch.planned
        records = [p.record for p in planned]
        scored = scored_batch(self.config, records, step)
        own = sorted({i for share in shares for part in share.plan for i in part})
        responses = batch.read([planned[i] for i in own])
        texts = {i: Text(planned[i].prompt, of) for i, of in zip(own, responses, strict=True)}
        texts = self._routed(texts)
        proximal = reference = penalties = None
        if a.proximal == "recomputed":
            proximal = own_logprobs(self.policy, texts, shares, self._progress)
        if self._reference is not None:
            with self._reference.in_place():
                reference = own_logprobs(self.policy, texts, shares, self._progress)
        sampled = proximal or Drawn(texts)
        if a.kl_in_reward and reference is not None:
            penalties = self._penalties(own, sampled, reference)
        if self.critic is not None:
            rewards = scored.rewards[torch.tensor(own, dtype=torch.long)].tolist()
            advantages = self.critic.advantages(rewards, own, texts, penalties, shares, self._progress)
        else:
            summed = partial(total, device=self.policy.device)
            advantages = token_advantages(a, scored, penalties, own, summed)
        if self._teachers is not None:
            names = {i: planned[i].teacher for i in own}
            advantages = self._teachers.advantages(
                advantages, own, texts, names, sampled, shares, self._progress
            )
        of_records = outcomes(records, members, a)
        return {
            i: Example(
                texts[i],
                of,
                proximal[i] if proximal else None,
                reference[i] if reference else None,
                of_records[i],
            )
            for i, of in zip(own, advantages, strict=True)
        }

    def _routed(self, texts: dict[int, Text]) -> dict[int, Text]:
        """With the engine's choices of experts, where they are replayed."""
        if (routing := self.policy.routing) is None:
            return texts
        return routed(texts, routing.shape, routing.layers, self.config.cluster.batch_timeout_seconds)

    def _penalties(
        self, own: list[int], sampled: Mapping[int, torch.Tensor], reference: dict[int, torch.Tensor]
    ) -> torch.Tensor:
        """float64 [trained tokens of `own`]."""
        a, none = self.algorithm, torch.zeros(0)
        left, right = (torch.cat([none, *(values[i] for i in own)]) for values in (sampled, reference))
        return a.kl_coefficient * kl_estimate(left, right, a.kl_estimator, a.kl_k3_max).double()

    def _loss(
        self,
        batch: MicroBatch,
        logprobs: torch.Tensor,
        entropies: torch.Tensor,
        divergences: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, Collected]:
        """Returns the loss as `MegatronPolicy.accumulate` wants it."""
        tokens, longest = batch.tokens, self.config.sampling.max_response_tokens
        self._progress()
        figures = trajectory_figures(tokens, logprobs.detach())
        tokens, logprobs, entropies = self._guard.mask(tokens, logprobs, entropies)
        if divergences is not None:
            divergences = self.config.teacher.coefficient * divergences
            if tokens.left_out is not None:
                divergences = divergences.masked_fill(tokens.left_out, 0.0)
        micro = objective(self.algorithm, longest, tokens, logprobs, entropies, divergences)
        return micro.total, micro.count, Collected(micro.sums, micro.largest_ratio, *figures)

    def _token_metrics(self, collected: list[Collected]) -> dict[str, float]:
        """Of all micro-batches of all data-parallel ranks: the loss over its denominator, means over tokens,
        the largest ratio."""
        a, of, none = self.config.algorithm, self._sums(collected), torch.zeros((), device=self.policy.device)
        ratios = torch.stack([c.largest_ratio for c in collected] or [none])
        largest = reduced(ratios.double().max(), dist.ReduceOp.MAX)
        tokens, kept = max(of["tokens"], 1.0), max(of["kept"], 1.0)
        metrics = {
            "loss": of["loss"] / max(of["count"], 1.0),
            "ratio_mean": of["ratio"] / kept,
            "ratio_max": float(largest),
            "clip_fraction": of["clipped"] / kept,
            "entropy": of["entropy"] / tokens,
        }
        if self._teachers is not None:
            metrics["teacher_kl"] = self._teachers.mean(of["beside"] / tokens)
        if a.kl_coefficient > 0:
            metrics["kl"] = of["kl"] / tokens
            metrics["kl_bounded_tokens"] = of["kl_bounded"]
        if a.corrections or a.sequence_ratio_min is not None or a.sequence_ratio_max is not None:
            metrics["left_out_fraction"] = (of["tokens"] - of["kept"]) / tokens
        if a.corrections or a.proximal == "recomputed":
            metrics["truncated_weight_fraction"] = of["truncated"] / kept
        return metrics

    def _sums(self, collected: list[Collected]) -> dict[str, float]:
        """By the names of SUMS, over all data-parallel ranks."""
        none = torch.zeros(len(SUMS), device=self.policy.device)
        sums = reduced(torch.stack([c.sums for c in collected] or [none]).double().sum(0))
        return dict(zip(SUMS, sums.tolist(), strict=True))

    def _steer(self, metrics: dict[str, float]) -> None:
        """After the last update of a step."""
        target = self.config.algorithm.kl_target
        if target is not None:
            metrics["kl_coefficient"] = self.kl_coefficient
            self.kl_coefficient = steered(self.kl_coefficient, metrics["kl"], target)

    def _count_skipped(self, skipped: bool, step: int) -> None:
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        limit = self.config.optimizer.max_skipped_updates
        if skipped and self.skipped_in_a_row >= limit:
            raise LaminarError(
                f"{self.skipped_in_a_row} optimizer updates in a row had gradients that are not finite, the "
                f"last at step {step}: lower optimizer.lr, or look for non-finite log-probs of the engine; "
                "optimizer.max_skipped_updates allows more"
            )
