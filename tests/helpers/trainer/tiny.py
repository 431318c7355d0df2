"""Tiny models, trajectories and configurations for the trainer's tests, and an independent GRPO update in
plain torch and transformers."""

import random
from pathlib import Path

import torch
from safetensors.torch import load_file

import laminar_hpc.machine.compat.torchvision  # noqa: F401 (before transformers)
from helpers.made import Made
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.messages.data import VersionSpan
from laminar_hpc.trainer.step.batch import StepBatch, in_memory
from laminar_hpc.trainer.step.microbatch import Example, Text

VOCAB = 50  # no multiple of the padded vocabulary's granularity, so there is padding


# Models that differ in what a family may differ in; each with `make_model`'s other settings. Every one can be
# split over two ranks.
LLAMA3_ROPE = {  # of the 4 frequencies of a head of 8, some are kept, some divided, some interpolated
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {  # of the 4 frequencies of a head of 8 one is kept, one is interpolated, two are divided
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8,
}
FAMILIES: dict[str, dict[str, object]] = {
    "qwen2-tied": {},
    "qwen2-untied-gqa7": {
        "hidden_size": 56,
        "num_attention_heads": 14,
        "head_dim": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-untied": {
        "family": "Qwen3",
        "num_key_value_heads": 4,
        "head_dim": 16,
        "tie_word_embeddings": False,
    },  # 4 x 16 is not 32
    "qwen3-tied": {
        "family": "Qwen3",
        "head_dim": 16,
        "num_hidden_layers": 3,
    },  # two stages are of 2 layers and 1
    "llama3-gqa8": {
        "family": "Llama",
        "hidden_size": 64,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": LLAMA3_ROPE,
        "tie_word_embeddings": False,
    },
    "llama-tied": {"family": "Llama", "num_key_value_heads": 4},
    "mistral-nemo": {  # heads of 16 where 32 / 4 is 8, as Mistral-Nemo's are of 128 where 5120 / 32 is 160
        "family": "Mistral",
        "head_dim": 16,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "mistral-window": {"family": "Mistral", "sliding_window": 12, "tie_word_embeddings": False},
    "qwen2-yarn": {"rope_parameters": YARN, "max_position_embeddings": 64},
    "qwen3-yarn": {
        "family": "Qwen3",
        "head_dim": 16,
        "rope_parameters": {**YARN, "attention_factor": 1.3, "truncate": False},
        "tie_word_embeddings": False,
    },
    "gemma3": {  # windows in every other layer, whose RoPE is another
        "family": "Gemma3",
        "num_hidden_layers": 4,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "pad_token_id": None,
        "eos_token_id": 1,
    },
    "glm4": {  # half of a head is turned, by pairs of neighbours; what is added to the residual is normalized
        "family": "Glm4",
        "head_dim": 16,
        "tie_word_embeddings": False,
        "pad_token_id": None,  # of a token that is one transformers trains no embedding
        "eos_token_id": 1,
    },
    "glm4-yarn": {
        "family": "Glm4",
        "head_dim": 16,
        "attention_bias": False,
        "rope_parameters": {**YARN, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": False,
        "pad_token_id": None,  # of a token that is one transformers trains no embedding
        "eos_token_id": 1,
    },
    "llama-linear": {
        "family": "Llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4},
    },
}

# Mixtures of experts; each can be split over two ranks, by experts too.
EXPERTS: dict[str, dict[str, object]] = {
    "qwen3-moe": {
        "family": "Qwen3Moe",
        "num_key_value_heads": 4,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "qwen3-moe-yarn": {
        "family": "Qwen3Moe",
        "head_dim": 16,
        "rope_parameters": YARN,
        "tie_word_embeddings": False,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "qwen2-moe": {
        "family": "Qwen2Moe",
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 40,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": False,
        "tie_word_embeddings": False,
    },
    "mixtral": {
        "family": "Mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
}


def make_model(
    directory: Path, seed: int = 0, family: str = "Qwen2", shard_size: str = "5GB", **settings: object
) -> Path:
    """A random model (float32, 2 layers, 4 heads, 2 KV heads) whose norms and biases matter; written by
    transformers, in files of at most `shard_size`."""
    import transformers

    torch.manual_seed(seed)
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    }
    if "rope_parameters" not in settings:
        shape["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    kind = {"Gemma3": "Gemma3Text"}.get(family, family)
    config = getattr(transformers, f"{kind}Config")(**{**shape, **settings})
    model = getattr(transformers, f"{family}ForCausalLM")(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(directory, max_shard_size=shard_size)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def published(directory: Path) -> dict[str, torch.Tensor]:
    """The model's tensors as a Hugging Face directory names them: a dense model's in the order of its state
    dict. transformers has a layer's experts in two tensors in memory, and in three of each in a file."""
    state = transformers_model(directory).state_dict()
    files = {n: t for file in directory.glob("*.safetensors") for n, t in load_file(file).items()}
    return files if files.keys() - state.keys() else state


def transformers_model(directory: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def make_config(model: Path, **settings: object) -> RunConfig:
    """Settings are named `section__name`, for example optimizer__lr=1e-3."""
    config = RunConfig(steps=4)
    config.model.path = str(model)
    (
        config.algorithm.prompts_per_step,
        config.algorithm.samples_per_prompt,
        config.algorithm.minibatches_per_step,
    ) = 4, 4, 1
    config.trainer.tokens_per_microbatch = 64
    config.guard.enabled = False  # the log-probs of `make_batch` are no engine's
    config.optimizer.eps = (
        1e-4  # so that Adam's first update is no mere sign, which tiny differences of a gradient could flip
    )
    for key, value in settings.items():
        *sections, name = key.split("__")
        section = config
        for part in sections:
            section = getattr(section, part)
        assert hasattr(section, name), key
        setattr(section, name, value)
    return config


def make_batch(
    seed: int, groups: int = 4, samples: int = 4, longest: int = 30, weight_step: int = 0
) -> list[Made]:
    """Complete groups of trajectories of 2 to `longest` random tokens. Every third has a token in the middle
    that the environment gave."""
    draw, batch = random.Random(seed), []
    for group in range(groups):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 6))]
        for sample in range(samples):
            n = draw.randint(2, longest)
            number = group * samples + sample
            mask = [0 if number % 3 == 0 and i == n // 2 else 1 for i in range(n)]
            batch.append(
                Made(
                    trajectory_id=number,
                    group_id=group,
                    attempt=0,
                    replica=0,
                    weight_id=1,
                    weight_step=weight_step,
                    prompt_tokens=prompt,
                    response_tokens=[draw.randrange(VOCAB) for _ in range(n)],
                    logprobs=[-3.9 + draw.uniform(-0.8, 0.8) for _ in range(n)],
                    loss_mask=mask,
                    finish_reason="length" if draw.random() < 0.25 else "stop",
                    version_spans=[VersionSpan(1, 0, n)],
                    time_started=0.0,
                    time_finished=1.0,
                    step_finished=weight_step + 1,
                    reward=float(draw.random() < 0.5),
                )
            )
    return batch


def step_batch(batch: list[Made]) -> StepBatch:
    """As the Learner takes it."""
    return in_memory([made.whole for made in batch])


def examples(batch: list[Made], advantages: list[float] | None = None) -> list[Example]:
    """One advantage for all trained tokens of a trajectory, by default 1."""
    return [
        Example(Text(t.whole.prompt, t.response), torch.full((sum(t.loss_mask),), a))
        for t, a in zip(batch, advantages or [1.0] * len(batch), strict=True)
    ]


def token_logprobs(
    model: torch.nn.Module, trajectory: Made, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """By transformers, one sequence at a time: log-probs [response] and entropies [response]."""
    tokens = torch.tensor([trajectory.prompt_tokens + trajectory.response_tokens])
    logits = model(tokens).logits[0, len(trajectory.prompt_tokens) - 1 : -1] / temperature
    logp = logits.log_softmax(-1)
    return logp.gather(1, tokens[0, len(trajectory.prompt_tokens) :, None])[:, 0], -(logp.exp() * logp).sum(
        -1
    )


def on_policy(directory: Path, batch: list[Made], noise: float = 1e-3) -> list[Made]:
    """The same with log-probs as an engine with these weights has them, but for some rounding."""
    model, draw = transformers_model(directory), random.Random(0)
    with torch.no_grad():
        for t in batch:
            t.logprobs = [value + draw.gauss(0, noise) for value in token_logprobs(model, t)[0].tolist()]
    return batch


def reference_loss(
    model: torch.nn.Module, batch: list[Made], config: RunConfig, left_out: int | None = None
) -> torch.Tensor:
    """GRPO with clip-higher over the whole batch, written from the papers: mean over all trained tokens, of
    which those of trajectory `left_out` have no loss."""
    a, rewards = config.algorithm, {}
    for t in batch:
        rewards.setdefault(t.group_id, []).append(t.reward)
    total, count = torch.zeros(()), 0
    for t in batch:
        r = torch.tensor(rewards[t.group_id])
        advantage = (t.reward - r.mean()) / ((r.std() + 1e-4) if a.normalize_std else 1.0)
        ratio = (token_logprobs(model, t, config.sampling.temperature)[0] - torch.tensor(t.logprobs)).exp()
        mask = torch.tensor(t.loss_mask, dtype=torch.float32)
        surrogate = torch.min(ratio * advantage, ratio.clamp(1 - a.clip_low, 1 + a.clip_high) * advantage)
        count += int(mask.sum())
        if t.trajectory_id != left_out:
            total = total - (surrogate * mask).sum()
    return total / count


def reference_training(
    start: Path | torch.nn.Module, config: RunConfig, steps: int
) -> tuple[list[float], list[float], torch.nn.Module]:
    """Losses, gradient norms before clipping and the model after `steps` updates on make_batch(seed=100 +
    step), by transformers and torch's AdamW; of a model's parameters those that are trained."""
    model = transformers_model(start) if isinstance(start, Path) else start
    trained, c = [p for p in model.parameters() if p.requires_grad], config.optimizer
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": c.weight_decay},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps)
    losses, norms = [], []
    for step in range(steps):
        loss = reference_loss(model, make_batch(seed=100 + step), config)
        adam.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, c.clip_grad).item())
        losses.append(loss.item())
        adam.step()
    return losses, norms, model
