"""PPO's critic: advantages and returns by the papers' recursion, written out; its updates as plain torch and
transformers do them; its checkpoints and layouts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.made import Made
from helpers.trainer import tiny
from helpers.trainer.plain import selected
from helpers.trainer.ranks import Ranks
from laminar_hpc.config.critic import wrong_critic
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.trainer.algorithms.gae import Discounts, estimates, value_losses
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.critic import Critic
from laminar_hpc.trainer.step.learner import Learner

GAE = {"algorithm__advantage": "gae", "optimizer__lr": 1e-3, "critic__lr": 2e-3}
CLOSE = 1e-9


def written_out(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Equations 11 to 16 of arXiv 1506.02438, one token after the other: advantages, and advantages + V."""
    found, later = [0.0] * len(rewards), 0.0
    for t in reversed(range(len(rewards))):
        following = values[t + 1] if t + 1 < len(values) else 0.0
        delta = rewards[t] + gamma * following - values[t]
        later = delta + gamma * lam * later
        found[t] = later
    return found, [a + v for a, v in zip(found, values, strict=True)]


@pytest.mark.parametrize(
    "discounts",
    [Discounts(), Discounts(0.99, 0.95, 0.95), Discounts(1.0, 0.9, 1.0), Discounts(0.9, 1.0, 0.5, 0.05)],
    ids=["plain", "gamma-lambda", "two-lambdas", "by-length"],
)
def test_estimates_are_those_of_the_papers(discounts: Discounts) -> None:
    draw = torch.Generator().manual_seed(1)
    lengths = [1, 7, 40, 3]
    rewards = [torch.randn(n, generator=draw).double() for n in lengths]
    values = [torch.randn(n, generator=draw).double() for n in lengths]
    advantages, returns = estimates(rewards, values, discounts)
    for i, n in enumerate(lengths):
        lam = max(0.0, 1 - 1 / (discounts.alpha * n)) if discounts.alpha else discounts.policy
        expected, _ = written_out(rewards[i].tolist(), values[i].tolist(), discounts.gamma, lam)
        _, learned = written_out(rewards[i].tolist(), values[i].tolist(), discounts.gamma, discounts.critic)
        assert advantages[i].tolist() == pytest.approx(expected, abs=CLOSE)
        assert returns[i].tolist() == pytest.approx(learned, abs=CLOSE)
    assert estimates([], [], discounts) == ([], [])


def test_with_lambda_one_a_return_is_what_is_still_to_come() -> None:
    rewards, values = [torch.tensor([0.5, -1.0, 2.0])], [torch.tensor([0.1, 0.7, -0.2])]
    advantages, returns = estimates(rewards, values, Discounts())
    assert returns[0].tolist() == pytest.approx([1.5, 1.0, 2.0])
    assert advantages[0].tolist() == pytest.approx([1.4, 0.3, 2.2])


def test_the_values_bound_keeps_the_larger_error() -> None:
    """As in verl: the larger squared error, halved. Where it is the bounded one, the gradient ends."""
    values = torch.tensor([0.0, 1.0, 0.2], requires_grad=True)
    losses, clipped = value_losses(values, torch.tensor([0.0, 0.0, 0.0]), torch.tensor([1.0, 2.0, -1.0]), 0.5)
    assert losses.tolist() == pytest.approx([0.5, 1.125, 0.72]) and clipped.tolist() == [0.0, 1.0, 0.0]
    losses.sum().backward()
    assert values.grad.tolist() == pytest.approx([-1.0, 0.0, 1.2])
    assert value_losses(values, values, torch.zeros(3), 0.0)[0].tolist() == pytest.approx([0, 0.5, 0.02])


# ---- updates -----------------------------------------------------------------------------------------------


class PlainCritic(torch.nn.Module):
    """transformers' decoder with a linear layer of zeros."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.body = tiny.transformers_model(directory).model
        self.head = torch.nn.Linear(self.body.config.hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.head.weight)

    def values(self, t: Made) -> torch.Tensor:
        """Before each trained token [trained]."""
        tokens = torch.tensor([t.prompt_tokens + t.response_tokens])
        hidden = self.body(tokens).last_hidden_state[0, len(t.prompt_tokens) - 1 : -1]
        return selected(self.head(hidden)[:, 0], t)


def adam_of(module: torch.nn.Module, config, lr: float) -> torch.optim.AdamW:
    c = config.optimizer
    return torch.optim.AdamW(module.parameters(), lr=lr, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=0)


def plain_step(config, model, critic: PlainCritic, adams, batch: list[Made]) -> dict[str, float]:
    """One PPO step with one update of each: the critic first, by values from before it."""
    with torch.no_grad():
        old = [critic.values(t) for t in batch]
    advantages, returns = [], []
    for t, values in zip(batch, old, strict=True):
        rewards = [0.0] * (len(values) - 1) + [t.reward]
        a, _ = written_out(rewards, values.tolist(), 1.0, 0.95)
        _, r = written_out(rewards, values.tolist(), 1.0, 1.0)
        advantages.append(torch.tensor(a))
        returns.append(torch.tensor(r))
    flat, learned, known = torch.cat(advantages), torch.cat(returns), torch.cat(old)
    white = ((flat - flat.mean()) / (flat.std(unbiased=False) + 1e-4)).split([len(a) for a in advantages])
    now = torch.cat([critic.values(t) for t in batch])
    bounded = known + (now - known).clamp(-0.5, 0.5)
    loss = torch.maximum((now - learned) ** 2, (bounded - learned) ** 2).mean() / 2
    norms = []
    total = torch.zeros(())
    for t, a in zip(batch, white, strict=True):
        ratio = selected((tiny.token_logprobs(model, t)[0] - torch.tensor(t.logprobs)).exp(), t)
        total = total - torch.min(ratio * a, ratio.clamp(0.8, 1.28) * a).sum()
    policy_loss = total / len(flat)
    for adam, each, module in zip(adams, (loss, policy_loss), (critic, model), strict=True):
        adam.zero_grad()
        each.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), config.optimizer.clip_grad).item())
        adam.step()
    left = (learned - known).var(unbiased=False) / learned.var(unbiased=False)
    return {
        "value_loss": loss.item(),
        "loss": policy_loss.item(),
        "critic_grad_norm": norms[0],
        "grad_norm": norms[1],
        "explained_variance": 1 - left.item(),
        "value_mean": known.mean().item(),
    }


@pytest.mark.parametrize("optimizer", [False, True], ids=["plain", "distributed-optimizer"])
def test_steps_equal_plain_torch(optimizer: bool, untied_model: Path, world: None) -> None:
    config = tiny.make_config(
        untied_model,
        algorithm__options={"gae_lambda": 0.95},
        trainer__distributed_optimizer=optimizer,
        **GAE,
    )
    policy = MegatronPolicy(config)
    learner = Learner(config, policy)
    model, critic = tiny.transformers_model(untied_model), PlainCritic(untied_model)
    adams = (adam_of(critic, config, 2e-3), adam_of(model, config, 1e-3))
    for step in range(3):
        batch = tiny.make_batch(seed=50 + step)
        expected = plain_step(config, model, critic, adams, batch)
        metrics = learner.train(tiny.step_batch(batch), step, lambda: None)
        for name, value in expected.items():
            assert metrics[name] == pytest.approx(value, abs=2e-5, rel=1e-4), (step, name)
        assert metrics["critic_skipped_updates"] == 0 and (metrics["value_mean"] == 0) == (step == 0)
    found, state = dict(policy.canonical_tensors()), model.state_dict()
    assert max((found[name] - state[name]).abs().max().item() for name in found) < 5e-6


def test_a_critic_that_warms_up_leaves_the_policy_as_it_is(tied_model: Path, world: None) -> None:
    config = tiny.make_config(tied_model, critic__warmup_steps=1, **GAE)
    policy = MegatronPolicy(config)
    learner = Learner(config, policy)
    before = {name: t.clone() for name, t in policy.canonical_tensors()}
    metrics = learner.train(tiny.step_batch(tiny.make_batch(seed=60)), 0, lambda: None)
    assert metrics["skipped_updates"] == 0 and metrics["critic_grad_norm"] > 0
    assert all(torch.equal(t, before[name]) for name, t in policy.canonical_tensors())
    learner.train(tiny.step_batch(tiny.make_batch(seed=61)), 1, lambda: None)
    assert not all(torch.equal(t, before[name]) for name, t in policy.canonical_tensors())


def test_a_reward_model_gives_its_score(untied_model: Path, tmp_path: Path, world: None) -> None:
    """As transformers saves a sequence classifier with one label."""
    tensors = load_file(untied_model / "model.safetensors")
    tensors["score.weight"] = torch.randn(1, 32)
    (tmp_path / "config.json").write_text((untied_model / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    config = tiny.make_config(untied_model, critic__path=str(tmp_path), **GAE)
    MegatronPolicy(config)
    critic = Critic(config)
    assert torch.equal(critic.model._last.output_layer.weight.cpu(), tensors["score.weight"])
    save_file({**tensors, "score.weight": torch.randn(3, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(LaminarError, match="a value is one number"):
        Critic(config)


# ---- layouts and checkpoints -------------------------------------------------------------------------------


def same(alone: dict, other: dict, bound: float = 1e-6) -> None:
    assert max(abs(alone["weights"][n] - other["weights"][n]).max() for n in alone["weights"]) < bound
    for name in ("value_loss", "explained_variance", "critic_grad_norm", "value_mean"):
        of = [[m[name] for m in each["metrics"]] for each in (alone, other)]
        assert of[0] == pytest.approx(of[1], abs=1e-5), name


def test_two_ranks_have_one_critic(untied_model: Path, ranks: Ranks) -> None:
    settings = {**GAE, "algorithm__minibatches_per_step": 2}
    split = {"trainer__data_parallel": 2, "trainer__distributed_optimizer": True}
    (alone,) = ranks.run(1, "cases:steps", model=str(untied_model), settings=settings, count=2)
    first, _ = ranks.run(2, "cases:steps", model=str(untied_model), settings={**settings, **split}, count=2)
    same(alone, first)


LAYOUTS = {
    "tensor": {"tensor_parallel": 2},
    "pipeline": {"pipeline_parallel": 2},
    "virtual": {"pipeline_parallel": 2, "virtual_stages": 2},
    "context": {"context_parallel": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_the_critic_has_the_policys_layout(layout: str, tied: bool, tmp_path: Path, ranks: Ranks) -> None:
    model = tiny.make_model(tmp_path, seed=3, num_hidden_layers=4, tie_word_embeddings=tied)
    split = {f"trainer__{key}": value for key, value in LAYOUTS[layout].items()}
    (alone,) = ranks.run(1, "cases:steps", model=str(model), settings=GAE, count=3)
    first, _ = ranks.run(2, "cases:steps", model=str(model), settings={**GAE, **split}, count=3)
    same(alone, first)


def trained(ranks: Ranks, run_dir: Path, model: Path, steps: tuple[int, int], resume: bool, **split) -> dict:
    settings = {**GAE, "checkpoint__state_hash": True, **split}
    world = 2 if split else 1
    found = ranks.run(
        world,
        "cases:train",
        model=str(model),
        settings=settings,
        texts=[[1, 2, 3]],
        steps=steps,
        run_dir=str(run_dir),
        resume=resume,
    )
    return found[0]


def test_a_resume_has_the_critic_bit_for_bit(untied_model: Path, tmp_path: Path, ranks: Ranks) -> None:
    whole = trained(ranks, tmp_path / "whole", untied_model, (0, 4), False)
    trained(ranks, tmp_path / "parts", untied_model, (0, 2), False)
    rest = trained(ranks, tmp_path / "parts", untied_model, (2, 4), True)
    assert rest["hash"] == whole["hash"] and rest["hash"]
    for name in ("value_loss", "explained_variance"):
        assert [m[name] for m in rest["metrics"]] == [m[name] for m in whole["metrics"][2:]]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resume_at_another_layout_has_the_critic(layout: str, tmp_path: Path, ranks: Ranks) -> None:
    model = tiny.make_model(tmp_path / "model", seed=4, num_hidden_layers=4, tie_word_embeddings=False)
    split = {f"trainer__{key}": value for key, value in LAYOUTS[layout].items()}
    whole = trained(ranks, tmp_path / "whole", model, (0, 4), False)
    trained(ranks, tmp_path / "parts", model, (0, 2), False)
    rest = trained(ranks, tmp_path / "parts", model, (2, 4), True, **split)
    for name in ("value_loss", "explained_variance", "loss"):
        parts = [[m[name] for m in of["metrics"]][-2:] for of in (whole, rest)]
        assert parts[0] == pytest.approx(parts[1], abs=1e-5), name


# ---- what is refused before a run --------------------------------------------------------------------------


def test_what_cannot_work_with_a_critic_is_refused(
    untied_model: Path, tied_model: Path, tmp_path: Path
) -> None:
    policy = json.loads((untied_model / "config.json").read_text())
    wide = tiny.make_model(tmp_path / "wide", intermediate_size=64)

    def lines(**settings: object) -> str:
        return "\n".join(wrong_critic(tiny.make_config(untied_model, **settings), policy))

    assert lines() == lines(**GAE) == lines(critic__path=str(tied_model), **GAE) == ""
    assert "does nothing without algorithm.advantage=gae" in lines(critic__warmup_steps=2)
    assert "one per token" in lines(algorithm__loss="gspo", **GAE)
    assert "has none" in lines(algorithm__zero_variance="estimate", **GAE)
    assert "leaves none" in lines(critic__warmup_steps=9, **GAE)
    assert "intermediate_size is 64" in lines(critic__path=str(wide), **GAE)
    assert "no config.json" in lines(critic__path=str(tmp_path / "none"), **GAE)
