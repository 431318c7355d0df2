"""PPO's critic: values of a step's tokens before its updates, advantages by them, and the critic's own
updates, one before each of the policy's. Called by trainer/step/learner.py, on every rank.

Its model is on the policy's ranks, at the policy's layout (trainer/megatron/value.py). Values are computed
when a batch is trained, not when it was generated: they are the newest critic's, however stale the batch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laminar_hpc.config.objectives import GAE, option
from laminar_hpc.config.schema import LoraConfig, RunConfig
from laminar_hpc.trainer.algorithms.advantages import whitened
from laminar_hpc.trainer.algorithms.gae import Discounts, estimates, value_losses
from laminar_hpc.trainer.checkpointing.live_state import take_optimizer
from laminar_hpc.trainer.megatron.adam import named_state
from laminar_hpc.trainer.megatron.building import apply_settings
from laminar_hpc.trainer.megatron.optimizer_shards import sharded_state, sharded_weights
from laminar_hpc.trainer.megatron.packs import Pack
from laminar_hpc.trainer.megatron.value import ValueModel
from laminar_hpc.trainer.step.microbatch import Lazily, Text, text_pack
from laminar_hpc.trainer.step.parallel import RankShare, reduced, total
from laminar_hpc.trainer.step.rescoring import own_logprobs

_KEYS = ("value_clip", "gamma", "gae_lambda", "gae_lambda_value", "gae_alpha")
_PREFIX = "critic."  # of its names in a checkpoint
_SUMS = ("loss", "tokens", "clipped")


@dataclass(frozen=True)
class _ValueBatch:
    """A pack; of its trained tokens values before the step, and returns, float32 [trained]; `real` 0 where a
    rank has no trajectory."""

    pack: Pack
    values: Tensor
    returns: Tensor
    real: Tensor


class Critic:
    """All methods but `warms_up` and `step_metrics` are collective."""

    def __init__(self, config: RunConfig) -> None:
        """Raises LaminarError for a critic.path that is not of the policy's architecture."""
        own = config.critic
        model = replace(config.model, path=own.path or config.model.path, lora=LoraConfig())
        algorithm = replace(config.algorithm, routing_replay="false")  # its router is its own
        optimizer = replace(config.optimizer, lr=own.lr, min_lr=min(own.lr, config.optimizer.min_lr))
        self.model = ValueModel(replace(config, model=model, algorithm=algorithm, optimizer=optimizer))
        self._warmup = own.warmup_steps
        numbers = {key: option(config.algorithm.options, GAE, key) for key in _KEYS}
        self._clip = numbers["value_clip"]
        self._discounts = Discounts(*(numbers[key] for key in _KEYS[1:]))
        self._texts: Mapping[int, Text] = {}
        self._values: dict[int, Tensor] = {}
        self._returns: dict[int, Tensor] = {}
        self._of_batch: dict[str, float] = {}
        self._sums: list[list[float]] = []
        self._norms: list[float | None] = []

    def warms_up(self, step: int) -> bool:
        """Whether the critic alone is trained in this step."""
        return step < self._warmup

    def advantages(
        self,
        rewards: Sequence[float],
        own: Sequence[int],
        texts: Mapping[int, Text],
        penalties: Tensor | None,
        shares: list[RankShare],
        progress: Callable[[], None],
    ) -> list[Tensor]:
        """Of every trained token, float64 [tokens] of each trajectory in `own`, whitened over the batch's
        tokens. `rewards`: of each in `own`, at its last trained token; `penalties` [tokens of `own`] float64
        come off token by token. Keeps values and returns for the step's updates."""
        values = own_logprobs(self.model, texts, shares, progress)
        counts = [len(values[i]) for i in own]
        given = [torch.zeros(n, dtype=torch.float64) for n in counts]
        if penalties is not None:
            given = [-part for part in penalties.split(counts)]
        for tokens, reward in zip(given, rewards, strict=True):
            if len(tokens):
                tokens[-1] += reward
        of_policy, returns = estimates(given, [values[i] for i in own], self._discounts)
        self._texts = texts
        self._values = values
        self._returns = {i: each.float() for i, each in zip(own, returns, strict=True)}
        self._of_batch = self._explained([values[i] for i in own], returns)
        none = torch.zeros(0, dtype=torch.float64)
        flat = torch.cat([none, *of_policy])
        device = self.model.device
        white = whitened(flat, torch.ones_like(flat), lambda tensor: total(tensor, device))
        return list(white.split(counts))

    def _explained(self, values: Sequence[Tensor], returns: Sequence[Tensor]) -> dict[str, float]:
        """1 - Var(returns - values) / Var(returns) over all tokens of the batch, and the mean value."""
        none = torch.zeros(0, dtype=torch.float64)
        v, r = torch.cat([none, *(x.double() for x in values)]), torch.cat([none, *returns])
        each = (torch.ones_like(v), v, r, r * r, r - v, (r - v).square())
        n, sum_v, sum_r, sum_rr, sum_d, sum_dd = total(
            torch.stack([x.sum() for x in each]), self.model.device
        ).tolist()
        n = max(1.0, n)
        variance = sum_rr / n - (sum_r / n) ** 2
        left = sum_dd / n - (sum_d / n) ** 2
        return {
            "value_mean": sum_v / n,
            "explained_variance": 1 - left / variance if variance > 1e-12 else 0.0,
        }

    def update(self, share: RankShare, progress: Callable[[], None]) -> None:
        """One optimizer update on the trajectories of a mini-batch. One whose gradients are not finite is
        left out and counted."""

        def batch(number: int) -> _ValueBatch:
            progress()
            return self._batch(share.plan[number], share.size)

        collected = self.model.accumulate(Lazily(len(share.plan), batch), self._loss)
        norm = self.model.update()
        progress()
        none = torch.zeros(len(_SUMS), device=self.model.device)
        sums = reduced(torch.stack([*collected, none]).double().sum(0))
        self._sums.append(sums.tolist())
        self._norms.append(norm)

    def step_metrics(self) -> dict[str, float]:
        """Of the updates since it was asked last, and of the batch before them."""
        loss, tokens, clipped = (sum(each[i] for each in self._sums) for i in range(len(_SUMS)))
        norms = [norm for norm in self._norms if norm is not None]
        skipped = len(self._norms) - len(norms)
        self._sums.clear()
        self._norms.clear()
        return {
            **self._of_batch,
            "value_loss": loss / max(1.0, tokens),
            "value_clip_fraction": clipped / max(1.0, tokens),
            "critic_grad_norm": sum(norms) / max(1, len(norms)),
            "critic_skipped_updates": skipped,
        }

    # ---- checkpoints, see Beside ---------------------------------------------------------------------------

    def sharded(self, loading: bool) -> dict:
        """Weights, optimizer, schedule."""
        model = self.model
        return {
            "weights": sharded_weights(model.gpt, _PREFIX),
            "optimizer": sharded_state(model.optimizer, model.gpt, loading, _PREFIX),
            "scheduler": model.scheduler.state_dict(),
        }

    def take(self, loaded: dict) -> None:
        """The optimizer goes on with the settings of this launch."""
        model = self.model
        for name, own in sharded_weights(model.gpt, _PREFIX).items():
            own.data.copy_(loaded["weights"][name].view_as(own.data))
        take_optimizer(model, loaded["optimizer"], loaded["scheduler"])
        apply_settings(model.config, model.optimizer, model.scheduler)

    def tensors(self) -> dict[str, Tensor]:
        """Weights, and the optimizer's state."""
        found = {f"model.{name}": p.detach() for name, p in self.model.gpt.named_parameters()}
        return found | {f"optimizer.{name}": t for name, t in named_state(self.model.optimizer)}

    # ---- one update ----------------------------------------------------------------------------------------

    def _batch(self, part: Sequence[int], size: int) -> _ValueBatch:
        device = self.model.device
        pack = text_pack([self._texts[i] for i in part], device, size)
        if not part:
            zero = torch.zeros(1, device=device)
            return _ValueBatch(pack, zero, zero, zero)
        values, returns = (
            torch.cat([of[i] for i in part]).to(device, non_blocking=True)
            for of in (self._values, self._returns)
        )
        return _ValueBatch(pack, values, returns, torch.ones_like(values))

    def _loss(self, batch: _ValueBatch, values: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        losses, clipped = value_losses(values, batch.values, batch.returns, self._clip)
        summed, count = (losses * batch.real).sum(), batch.real.sum()
        with torch.no_grad():
            sums = torch.stack((summed, count, (clipped * batch.real).sum()))
        return summed, count.to(torch.int), sums
