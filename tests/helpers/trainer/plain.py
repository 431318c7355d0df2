"""The trainer's step once more, written from the papers in plain torch and transformers: one sequence and one
token at a time (the year's objectives number by number, in written_out.py), no packs, no micro-batches, no
shared code but the shuffle of mini-batches. What tests hold
the Learner against."""

import math

import torch

from helpers.made import Made
from helpers.trainer import written_out
from helpers.trainer.tiny import token_logprobs
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.trainer.step.packing import split_minibatches


def kl(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    ratio = torch.exp(reference - logprobs)
    return {"k1": -ratio.log(), "k2": ratio.log() ** 2 / 2, "k3": ratio - 1 - ratio.log()}[estimator]


def of_numbers(pairs: list[tuple[float, float]], logprobs: torch.Tensor) -> torch.Tensor:
    """Values with these derivatives by the log-probs."""
    values, slopes = torch.tensor(pairs).T
    return values + slopes * (logprobs - logprobs.detach())


def by_group(batch: list[Made], values: list) -> list[list]:
    """In the order of the batch, whose groups follow each other."""
    groups: dict[int, list] = {}
    for t, value in zip(batch, values, strict=True):
        groups.setdefault(t.group_id, []).append(value)
    return list(groups.values())


def selected(values: torch.Tensor, t: Made) -> torch.Tensor:
    return values[torch.tensor(t.loss_mask, dtype=torch.bool)]


class PlainTrainer:
    """AdamW without weight decay; `reference` is a frozen copy of the initial model."""

    def __init__(self, config: RunConfig, model: torch.nn.Module, reference: torch.nn.Module) -> None:
        self.config, self.model, self.reference = config, model, reference
        c = config.optimizer
        self.adam = torch.optim.AdamW(
            model.parameters(), lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=0.0
        )

    def logprobs(self, model: torch.nn.Module, t: Made) -> torch.Tensor:
        return self.logprobs_and_entropies(model, t)[0]

    def logprobs_and_entropies(self, model: torch.nn.Module, t: Made) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies = token_logprobs(model, t, self.config.sampling.temperature)
        return selected(logprobs, t), selected(entropies, t)

    def train(self, batch: list[Made], step: int) -> tuple[list[float], list[float]]:
        """Losses and gradient norms of the mini-batches."""
        a = self.config.algorithm
        with torch.no_grad():
            proximal = [self.logprobs(self.model, t) for t in batch]
            reference = [self.logprobs(self.reference, t) for t in batch]
        behaviour = [selected(torch.tensor(t.logprobs), t) for t in batch]
        if a.proximal == "behaviour":
            proximal = behaviour
        advantages = self.advantages(
            batch,
            [
                kl(p, r, a.kl_estimator.removesuffix("_weighted"))
                for p, r in zip(proximal, reference, strict=True)
            ],
        )
        losses, norms = [], []
        for members in split_minibatches(len(batch), a.minibatches_per_step, self.config.seed, step):
            self.adam.zero_grad()
            numerator, tokens = torch.zeros(()), sum(len(behaviour[i]) for i in members)
            for i in members:
                logprobs, entropies = self.logprobs_and_entropies(self.model, batch[i])
                per_token = self.token_losses(
                    logprobs,
                    proximal[i],
                    behaviour[i],
                    reference[i],
                    advantages[i],
                    batch[i].finish_reason == "length",
                )
                per_token = per_token - a.entropy_coefficient * entropies
                if a.likelihood_coefficient and batch[i].reward > 0:
                    right = sum(len(behaviour[j]) for j in members if batch[j].reward > 0)
                    numerator = numerator - a.likelihood_coefficient * logprobs.sum() / right
                scale = {
                    "tokens": 1 / tokens,
                    "sequences": 1 / (len(members) * len(behaviour[i])),
                    "constant": 1 / (len(members) * self.config.sampling.max_response_tokens),
                }[a.loss_aggregation]
                numerator = numerator + per_token.sum() * scale
            numerator.backward()
            norms.append(
                float(
                    torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip_grad)
                )
            )
            self.adam.step()
            losses.append(numerator.item())
        return losses, norms

    def shaped_rewards(self, batch: list[Made]) -> list[float]:
        a, longest = self.config.algorithm, self.config.sampling.max_response_tokens
        rewards = []
        for t in batch:
            overlong = 0.0
            if a.overlong_buffer_tokens:
                free = longest - a.overlong_buffer_tokens
                overlong = max(-1.0, min(0.0, (free - len(t.loss_mask)) / a.overlong_buffer_tokens))
            rewards.append(t.reward + overlong)
        lengths = by_group(batch, [len(t.loss_mask) for t in batch])
        if a.length_penalty:
            rewards = written_out.length_rescaled(by_group(batch, rewards), lengths, a.length_penalty)
        return rewards

    def advantages(self, batch: list[Made], penalty: list[torch.Tensor]) -> list[torch.Tensor]:
        """Per trained token."""
        a = self.config.algorithm
        rewards = self.shaped_rewards(batch)
        tokens, groups = by_group(batch, [len(p) for p in penalty]), by_group(batch, rewards)
        parts = [
            (float(f.get("weight", 1.0)), by_group(batch, [t.reward_parts[name] for t in batch]))
            for name, f in self.config.reward.functions.items()
        ]
        written = {
            "grpo_batch_std": lambda: written_out.grpo_batch_std(groups),
            "opo": lambda: written_out.opo(groups, tokens),
            "max_rl": lambda: written_out.max_rl(groups),
            "gdpo": lambda: written_out.gdpo(parts),
        }
        if a.advantage in written:
            values = written[a.advantage]()
            return [torch.full((len(p),), value) for p, value in zip(penalty, values, strict=True)]
        beta = a.kl_coefficient if a.kl_in_reward else 0.0
        if a.advantage.startswith("reinforce_pp"):
            returns = []
            for i, t in enumerate(batch):
                group = [r for r, other in zip(rewards, batch, strict=True) if other.group_id == t.group_id]
                base = sum(group) / len(group) if a.advantage == "reinforce_pp_baseline" else 0.0
                returns.append(
                    [rewards[i] - base - beta * float(penalty[i][j:].sum()) for j in range(len(penalty[i]))]
                )
            every = [x for own in returns for x in own]
            mean = sum(every) / len(every)
            std = math.sqrt(sum((x - mean) ** 2 for x in every) / len(every))
            return [(torch.tensor(own) - mean) / (std + 1e-4) for own in returns]
        found, whole = [], [r - beta * float(p.sum()) for r, p in zip(rewards, penalty, strict=True)]
        for i, t in enumerate(batch):
            group = [j for j, other in enumerate(batch) if other.group_id == t.group_id]
            values = torch.tensor([whole[j] for j in group])
            if a.advantage == "rloo":
                value = whole[i] - sum(whole[j] for j in group if j != i) / (len(group) - 1)
            else:
                value = float(
                    (whole[i] - values.mean()) / ((values.std() + 1e-4) if a.normalize_std else 1.0)
                )
            found.append(torch.full((len(penalty[i]),), value))
        return found

    def token_losses(
        self,
        logprobs: torch.Tensor,
        proximal: torch.Tensor,
        behaviour: torch.Tensor,
        reference: torch.Tensor,
        advantages: torch.Tensor,
        truncated: bool,
    ) -> torch.Tensor:
        a = self.config.algorithm
        clip = written_out.Bounds(a.clip_low, a.clip_high)
        numbers = (logprobs.tolist(), proximal.tolist(), float(advantages[0]) if len(advantages) else 0.0)
        ratio = (logprobs - proximal).exp()
        if a.loss == "gspo":
            ratio = (logprobs - proximal).mean().exp().expand(len(logprobs))
        if a.loss in ("cispo", "aipo"):
            low, high = (
                (1 - a.clip_low, 1 + a.clip_high) if a.loss == "cispo" else (0.0, a.importance_weight_cap)
            )
            loss = -ratio.detach().clamp(low, high) * advantages * logprobs
        elif a.loss == "dppo":
            loss = of_numbers(written_out.dppo(*numbers, clip), logprobs)
        elif a.loss == "sapo":
            loss = of_numbers(written_out.sapo(*numbers, 1.0, 1.05), logprobs)
        elif a.loss == "gmpo":
            loss = of_numbers(written_out.gmpo(*numbers, clip), logprobs)
        else:
            surrogate = torch.min(
                ratio * advantages, ratio.clamp(1 - a.clip_low, 1 + a.clip_high) * advantages
            )
            if a.clip_dual is not None:
                surrogate = torch.where(
                    advantages < 0, torch.max(surrogate, a.clip_dual * advantages), surrogate
                )
            loss = -surrogate
        loss = self.corrected(loss, *numbers, behaviour, truncated)
        weighs = any("tis" in name or "icepop" in name for name in a.corrections)
        if a.proximal == "recomputed" and not weighs:
            weight = (proximal - behaviour).exp()
            loss = loss * weight.clamp(max=a.importance_weight_cap or math.inf)
        numerator = proximal if a.proximal == "recomputed" else logprobs.detach()
        mean = float((numerator - behaviour).mean().exp())
        if mean < (a.sequence_ratio_min or 0.0) or mean > (a.sequence_ratio_max or math.inf):
            loss = loss * 0.0
        if a.kl_coefficient and not a.kl_in_reward:
            estimate = kl(logprobs, reference, a.kl_estimator.removesuffix("_weighted"))
            if a.kl_estimator == "k3_weighted":
                estimate = estimate * (logprobs - proximal).exp()
            loss = loss + a.kl_coefficient * estimate
        return loss

    def corrected(
        self,
        loss: torch.Tensor,
        logprobs: list[float],
        proximal: list[float],
        advantage: float,
        behaviour: torch.Tensor,
        truncated: bool,
    ) -> torch.Tensor:
        """By algorithm.corrections."""
        a = self.config.algorithm
        floor, divergence = (
            a.options.get("importance_weight_floor", 0.0),
            a.options.get("opsm_divergence", 1e-4),
        )
        bounds = written_out.Bounds(floor, a.importance_weight_cap or 0.0)
        lists = (logprobs, proximal, behaviour.tolist())
        for name in a.corrections:
            factors = written_out.correction(name, *lists, advantage, truncated, bounds, divergence)
            loss = loss * torch.tensor(factors)
        return loss
