"""The same numbers as TRL's trainers on the same tensors: their own scoring and loss methods, run on a
stand-in that has what those methods read. Rewards, log-probs and masks go in; advantages, the loss and its
gradient come out.

| here | in TRL |
|---|---|
| loss=clip, loss_aggregation tokens, sequences, constant | GRPOTrainer, loss_type dapo, grpo, dr_grpo |
| clip_dual | GRPOTrainer, delta |
| loss=gspo | GRPOTrainer, loss_type grpo, importance_sampling_level sequence |
| loss=cispo, loss=aipo | GRPOTrainer, loss_type cispo |
| proximal=recomputed, importance_weight_cap | GRPOTrainer, vllm_importance_sampling_mode token_truncate |
| kl_estimator=k3 in the loss | GRPOTrainer, beta |
| advantage=grpo, normalize_std | GRPOTrainer, scale_rewards group, none |
| advantage=rloo, kl_estimator=k1 in the reward | RLOOTrainer, beta |
| overlong_buffer_tokens | get_soft_overlong_punishment |
| loss=sapo | GRPOTrainer, loss_type sapo |
| corrections tis, icepop, sequence_tis, sequence_icepop | vllm_importance_sampling_mode, clip_min, clip_max |
| corrections opsm | off_policy_mask_threshold |
| advantage=grpo_batch_std, gdpo | scale_rewards batch, multi_objective_aggregation |
| kl_estimator=k3_weighted | use_bias_correction_kl |

TRL has no counterpart of REINFORCE++, of the geometric sequence mask, nor of k1 and k2 in the loss, of DPPO,
GMPO, OPO, MaxRL and GR3: test_objectives.py holds those.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import laminar_hpc.machine.compat.torchvision  # noqa: F401 (before transformers)
from laminar_hpc.config.learning_schema import AlgorithmConfig
from laminar_hpc.machine.compat.optional import left_out
from laminar_hpc.trainer.algorithms.advantages import token_advantages
from laminar_hpc.trainer.algorithms.kl import kl_estimate
from laminar_hpc.trainer.algorithms.objective import objective
from laminar_hpc.trainer.algorithms.scored import RewardPart, ScoredBatch
from laminar_hpc.trainer.algorithms.shaping import overlong_punishment
from laminar_hpc.trainer.algorithms.tokens import Tokens

pytestmark = pytest.mark.slow  # TRL takes seconds to import

LENGTHS, SAMPLES, LONGEST = [5, 3, 1, 4, 5, 2], 3, 6
MASK = torch.tensor([[1.0] * n + [0.0] * (max(LENGTHS) - n) for n in LENGTHS])
REWARDS = torch.tensor([1.0, 0.0, 0.25, 2.0, 0.0, -1.0])
OTHER = torch.tensor([0.1, 0.7, 0.4, 0.4, 0.9, 0.5])  # of a second reward function


def drawn(seed: int, spread: float) -> torch.Tensor:
    return -1.5 + spread * torch.randn(MASK.shape, generator=torch.Generator().manual_seed(seed))


BEHAVIOUR, PROXIMAL, REFERENCE, CURRENT = (
    drawn(1, 0.0) + drawn(2, 0.4),
    drawn(3, 0.4) - 1.5,
    drawn(4, 0.4) - 1.5,
    drawn(5, 0.5) - 1.5,
)


def alone(value: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
    """What gathering and reducing are in a world of one process."""
    return value


def stand_in(**settings: object) -> SimpleNamespace:
    """A trainer of TRL as far as `_generate_and_score_completions` and `_compute_loss` read it: one text-only
    batch in one step."""
    from trl import GRPOTrainer

    model, reference = (SimpleNamespace(training=True, is_gradient_checkpointing=False) for _ in range(2))
    rows = [[7] * n for n in LENGTHS]
    generated = (
        [[3]] * len(rows),
        rows,
        None,
        rows,
        [b[:n].tolist() for b, n in zip(BEHAVIOUR, LENGTHS, strict=True)],
        {},
        None,
        None,
    )
    trainer = SimpleNamespace(
        model=model,
        ref_model=reference,
        args=SimpleNamespace(
            delta=None,
            use_bias_correction_kl=False,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            per_device_train_batch_size=len(rows),
            gradient_checkpointing_kwargs=None,
        ),
        accelerator=SimpleNamespace(
            device=torch.device("cpu"), num_processes=1, process_index=0, gather=alone, reduce=alone
        ),
        loss_type="grpo",
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.28,
        beta=0.0,
        scale_rewards="group",
        max_completion_length=LONGEST,
        multi_objective_aggregation="sum_then_normalize",
        num_generations=SAMPLES,
        num_iterations=1,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=None,
        off_policy_mask_threshold=None,
        normalize_advantages=False,
        reward_clip_range=None,
        mask_truncated_completions=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        environment_factories=None,
        environments=None,
        tools=None,
        pad_to_multiple_of=None,
        log_multimodal=False,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        _metrics=defaultdict(lambda: defaultdict(list)),
        _logs=defaultdict(list, rewards=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
    )
    trainer._generate = lambda prompts: (
        generated if settings.get("trl_trainer") != "rloo" else (generated[0], rows, rows)
    )
    several = settings.get("multi_objective_aggregation") == "normalize_then_sum"
    trainer._calculate_rewards = lambda *_: torch.stack((REWARDS, OTHER), 1) if several else REWARDS[:, None]
    trainer.reward_weights = torch.tensor([1.0, 0.3] if several else [1.0])
    trainer.reward_func_names = ["given", "other"] if several else ["given"]
    trainer.reward_funcs = trainer.reward_func_names
    trainer.get_off_policy_mask = GRPOTrainer.get_off_policy_mask
    # Before the update the model's log-probs are the proximal ones; CURRENT is passed as a model of its own.
    of = {id(model): PROXIMAL, id(reference): REFERENCE}
    trainer._get_per_token_logps_and_entropies = lambda m, *_, **__: (
        of.get(id(m), m),
        torch.zeros_like(MASK),
        None,
    )
    for key, value in settings.items():
        setattr(trainer.args if hasattr(trainer.args, key) else trainer, key, value)
    return trainer


@pytest.fixture(autouse=True)
def without_wandb() -> Iterator[None]:
    """TRL would import it: half a minute of a processor."""
    with left_out("wandb"):
        yield


def by_trl(**settings: object) -> tuple[torch.Tensor, float, torch.Tensor]:
    """Advantages [trajectories], the loss, and its gradient by the log-probs [tokens]."""
    from trl import GRPOTrainer

    trainer = stand_in(**settings)
    inputs = GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": "p"}] * len(LENGTHS))
    if not trainer.use_vllm:  # then TRL's old policy is the one that generated
        inputs["old_per_token_logps"] = BEHAVIOUR
    current = CURRENT.clone().requires_grad_(True)
    loss = GRPOTrainer._compute_loss(trainer, current, inputs)
    loss.backward()
    return inputs["advantages"], loss.item(), current.grad[MASK.bool()]


def flat(values: torch.Tensor) -> torch.Tensor:
    return values[MASK.bool()]


def here(**settings: object) -> tuple[torch.Tensor, float, torch.Tensor]:
    a = AlgorithmConfig(samples_per_prompt=SAMPLES, **settings)
    lengths = torch.tensor(LENGTHS)
    penalties = torch.zeros(sum(LENGTHS), dtype=torch.float64)
    if a.kl_in_reward:
        penalties = a.kl_coefficient * kl_estimate(flat(PROXIMAL), flat(REFERENCE), a.kl_estimator).double()
    sizes = [SAMPLES] * (len(REWARDS) // SAMPLES)
    parts = {"given": RewardPart(1.0, REWARDS.double()), "other": RewardPart(0.3, OTHER.double())}
    scored = ScoredBatch(REWARDS.double(), sizes, lengths, lengths, parts)
    advantages = torch.cat(token_advantages(a, scored, penalties)).float()
    tokens = Tokens(
        behaviour=flat(BEHAVIOUR),
        proximal=flat(PROXIMAL if a.proximal == "recomputed" else BEHAVIOUR),
        reference=flat(REFERENCE) if a.kl_coefficient else None,
        advantages=advantages,
        sequence=torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths),
        sequences=len(LENGTHS),
        real=torch.ones(sum(LENGTHS)),
    )
    current = flat(CURRENT).requires_grad_(True)
    found = objective(a, LONGEST, tokens, current, torch.zeros(sum(LENGTHS)))
    loss = found.total / found.count
    loss.backward()
    return advantages[torch.cumsum(lengths, 0) - 1], loss.item(), current.grad


VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": True}


def weighed(correction: str, mode: str) -> tuple[dict, dict]:
    """Weights or masks by q / mu, between 0.75 and 1.3."""
    floor = {"importance_weight_floor": 0.75}
    mine = {"corrections": [correction], "proximal": "recomputed", "importance_weight_cap": 1.3}
    bounds = {"vllm_importance_sampling_clip_min": 0.75, "vllm_importance_sampling_clip_max": 1.3}
    theirs = {"loss_type": "dapo", "vllm_importance_sampling_mode": mode, **bounds, **VLLM}
    return {**mine, "options": floor}, theirs


CASES = {
    "clip-tokens": ({}, {"loss_type": "dapo"}),
    "clip-sequences": ({"loss_aggregation": "sequences"}, {"loss_type": "grpo"}),
    "dr-grpo": (
        {"loss_aggregation": "constant", "normalize_std": False},
        {"loss_type": "dr_grpo", "scale_rewards": "none"},
    ),
    "dual-clip": ({"clip_dual": 1.5}, {"loss_type": "dapo", "delta": 1.5}),
    "gspo": (
        {"loss": "gspo", "loss_aggregation": "sequences"},
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
    "cispo": (
        {"loss": "cispo", "clip_low": 1.0, "clip_high": 0.4},
        {"loss_type": "cispo", "epsilon_high": 1.4},
    ),
    "aipo": ({"loss": "aipo", "importance_weight_cap": 1.4}, {"loss_type": "cispo", "epsilon_high": 1.4}),
    "decoupled": (
        {"proximal": "recomputed"},
        {"loss_type": "dapo", "vllm_importance_sampling_clip_max": math.inf, **VLLM},
    ),
    "tis": (
        {"proximal": "recomputed", "importance_weight_cap": 1.2},
        {"loss_type": "dapo", "vllm_importance_sampling_clip_max": 1.2, **VLLM},
    ),
    "tis-gspo": (
        {
            "loss": "gspo",
            "loss_aggregation": "sequences",
            "proximal": "recomputed",
            "importance_weight_cap": 1.2,
        },
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "vllm_importance_sampling_clip_max": 1.2,
            **VLLM,
        },
    ),
    "kl-k3": ({"kl_coefficient": 0.3}, {"loss_type": "dapo", "beta": 0.3}),
    "kl-k3-weighted": (
        {"kl_coefficient": 0.3, "kl_estimator": "k3_weighted"},
        {"loss_type": "dapo", "beta": 0.3, "use_bias_correction_kl": True},
    ),
    "sapo": ({"loss": "sapo", "loss_aggregation": "sequences"}, {"loss_type": "sapo"}),
    "two-sided-tis": weighed("tis", "token_truncate"),
    "icepop": weighed("icepop", "token_mask"),
    "sequence-tis": weighed("sequence_tis", "sequence_truncate"),
    "sequence-icepop": weighed("sequence_icepop", "sequence_mask"),
    "opsm": (
        {"corrections": ["opsm"], "options": {"opsm_divergence": 0.1}},
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.1},
    ),
    "batch-std": ({"advantage": "grpo_batch_std"}, {"loss_type": "dapo", "scale_rewards": "batch"}),
    "gdpo": (
        {"advantage": "gdpo"},
        {"loss_type": "dapo", "multi_objective_aggregation": "normalize_then_sum"},
    ),
    "kl-k3-tis": (
        {
            "kl_coefficient": 0.3,
            "proximal": "recomputed",
            "importance_weight_cap": 1.2,
            "loss_aggregation": "sequences",
        },
        {"loss_type": "grpo", "beta": 0.3, "vllm_importance_sampling_clip_max": 1.2, **VLLM},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_advantages_loss_and_gradient_equal_trls(name: str) -> None:
    """To 1e-6, with tokens on both sides of every bound."""
    mine, theirs = here(**CASES[name][0]), by_trl(**CASES[name][1])
    assert torch.allclose(mine[0], theirs[0], atol=1e-6, rtol=1e-6)
    assert mine[1] == pytest.approx(theirs[1], abs=1e-6)
    assert (mine[2] - theirs[2]).abs().max() < 1e-6 and theirs[2].abs().max() > 0.01


def test_the_cases_tell_options_apart() -> None:
    """Another option gives another gradient (aipo is cispo with one bound), so an option that did nothing
    would be seen."""
    gradients = {name: by_trl(**theirs)[2] for name, (_, theirs) in CASES.items() if name != "aipo"}
    names = sorted(gradients)
    assert all((gradients[a] - gradients[b]).abs().max() > 1e-3 for a in names for b in names if a < b)


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_rloo_advantages_equal_trls(beta: float) -> None:
    """Leave-one-out, without and with the KL of the whole trajectory in the reward."""
    from trl import RLOOTrainer

    trainer = stand_in(trl_trainer="rloo", beta=beta)
    scored = RLOOTrainer._generate_and_score_completions(trainer, [{"prompt": "p"}] * len(LENGTHS))
    theirs = scored["advantages"]
    kl = {"kl_coefficient": beta, "kl_estimator": "k1", "kl_in_reward": True} if beta else {}
    assert torch.allclose(here(advantage="rloo", **kl)[0], theirs, atol=1e-6, rtol=1e-6)


def test_overlong_punishment_equals_trls() -> None:
    """Of every length up to beyond the limit."""
    from trl.rewards import get_soft_overlong_punishment

    theirs = get_soft_overlong_punishment(max_completion_len=30, soft_punish_cache=8)(
        [[1] * n for n in range(40)]
    )
    assert [overlong_punishment(n, 30, 8) for n in range(40)] == pytest.approx(theirs, abs=1e-9)
