"""Trains the example's base model and writes it to `base/`, a Hugging Face directory of less than 2 MB.

Run by hand (`python examples/arithmetic/train_base.py`, about 9 minutes on one core). Plain torch and
transformers:

- a Qwen2 of 448,128 parameters, one token per character;
- supervised on correct examples only, drawn on the fly from the training side of make_data.py's partition of
  the numbers;
- first mostly worked answers of all lengths, so that the model can work a sum out; then mostly answers given
  at once, so that this is what it prefers although it is often wrong. What is left for RL to find out is that
  working pays.
"""

import laminar_hpc.machine.compat.torchvision  # noqa: F401  (first: lets transformers import under CPU torch)

# isort: split
import argparse
import json
import random
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from make_data import DIGIT_SHARES, draw_problem
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, EOS = "<pad>", "<eos>"
VOCABULARY = [PAD, EOS, *"0123456789+=;>"]  # 16 entries: no embedding row is padding
TOKEN_ID = {token: i for i, token in enumerate(VOCABULARY)}
MAX_POSITIONS = 512
MAX_BYTES = 2_000_000

WARMUP_STEPS = 50
MICRO_BATCH = 24  # examples of similar length, so that little of a batch is padding

EQUAL_SHARES = dict.fromkeys(
    DIGIT_SHARES, 1.0
)  # long sums are rare among the problems: too rare to learn to work them out
MOSTLY_SHORT = EQUAL_SHARES | {2: 28.0}

BASE = Path(__file__).parent / "base"


class Phase(NamedTuple):
    """`steps` optimizer steps, each on so many examples that are worked out and so many that are answered at
    once."""

    steps: int
    worked: int
    at_once: int
    worked_digit_shares: dict[int, float]
    at_once_digit_shares: dict[int, float] = DIGIT_SHARES


class Stage(NamedTuple):
    """Phases under one optimizer; the learning rate falls linearly to 0 over the second half of all steps."""

    phases: tuple[Phase, ...]
    learning_rate: float


# To work sums out; then to answer at once, until sums of two digits are mastered that way; then to prefer it,
# alike for all lengths. A skill that is half learnt would be lost to the noise of any policy gradient, and
# the control with shuffled rewards could not tell.
STAGES = (
    Stage((Phase(800, 32, 8, EQUAL_SHARES), Phase(500, 24, 96, EQUAL_SHARES)), learning_rate=3e-3),
    Stage((Phase(600, 16, 184, DIGIT_SHARES, MOSTLY_SHORT),), learning_rate=3e-3),
    Stage((Phase(100, 24, 136, DIGIT_SHARES),), learning_rate=1e-3),
)


class Example(NamedTuple):
    """Token ids of a prompt and of a correct response with its end token."""

    prompt: list[int]
    response: list[int]

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; characters outside the vocabulary read as padding."""
    tokenizer = Tokenizer(models.WordLevel(TOKEN_ID, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, pad_token=PAD, model_max_length=MAX_POSITIONS
    )


def build_model() -> Qwen2ForCausalLM:
    """Random weights. RoPE's base and the initial scale suit short sequences and small matrices: the defaults
    learn far slower."""
    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0},
        initializer_range=0.07,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=TOKEN_ID[EOS],
        pad_token_id=TOKEN_ID[PAD],
    )
    return Qwen2ForCausalLM(config).float()


def encode(text: str) -> list[int]:
    return [TOKEN_ID[character] for character in text]


def draw_examples(rng: random.Random, phase: Phase) -> list[Example]:
    """One step's correct examples, all of the training side, shortest first."""
    examples = []
    for _ in range(phase.worked):
        problem = draw_problem(rng, "train", digit_shares=phase.worked_digit_shares)
        examples.append(Example(encode(problem.prompt), [*encode(problem.worked), TOKEN_ID[EOS]]))
    for _ in range(phase.at_once):
        problem = draw_problem(rng, "train", digit_shares=phase.at_once_digit_shares)
        examples.append(Example(encode(problem.prompt), [*encode(problem.at_once), TOKEN_ID[EOS]]))
    return sorted(examples, key=lambda example: example.length)


def summed_loss(model: Qwen2ForCausalLM, examples: list[Example]) -> torch.Tensor:
    """Cross-entropy summed over the response tokens of `examples`."""
    width = max(example.length for example in examples)
    ids = torch.full((len(examples), width), TOKEN_ID[PAD])
    labels = torch.full((len(examples), width), -100)
    for i, example in enumerate(examples):
        ids[i, : example.length] = torch.tensor(example.prompt + example.response)
        labels[i, len(example.prompt) : example.length] = torch.tensor(example.response)
    logits = model(ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")


def train(model: Qwen2ForCausalLM, stage: Stage, seed: int) -> None:
    """Run a stage's phases in order; the learning rate warms up, stays, and falls."""
    rng = random.Random(f"supervised:{seed}")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=stage.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    schedule = [phase for phase in stage.phases for _ in range(phase.steps)]
    num_steps = len(schedule)
    started = time.monotonic()
    for step, phase in enumerate(schedule, start=1):
        scale = min(1.0, step / WARMUP_STEPS, 2 * (num_steps - step + 1) / num_steps)
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate * scale
        examples = draw_examples(rng, phase)
        num_tokens = sum(len(example.response) for example in examples)
        mean_loss = 0.0
        for start in range(0, len(examples), MICRO_BATCH):
            loss = summed_loss(model, examples[start : start + MICRO_BATCH]) / num_tokens
            loss.backward()
            mean_loss += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(
                f"step {step}/{num_steps}: loss {mean_loss:.4f}, {time.monotonic() - started:.0f} s",
                flush=True,
            )


def save(model: Qwen2ForCausalLM, out: Path) -> None:
    """Write the Hugging Face directory and check its size."""
    model.generation_config = GenerationConfig(eos_token_id=TOKEN_ID[EOS], pad_token_id=TOKEN_ID[PAD])
    model.save_pretrained(out)
    build_tokenizer().save_pretrained(out)
    tokenizer_config = out / "tokenizer_config.json"  # the class under the name that transformers 4 knows too
    content = json.loads(tokenizer_config.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer_config.write_text(json.dumps(content, indent=2) + "\n")
    size = sum(file.stat().st_size for file in out.iterdir())
    if size > MAX_BYTES:
        raise SystemExit(f"{out} has {size} bytes, more than {MAX_BYTES}: make the model smaller")
    print(f"{out}: {sum(p.numel() for p in model.parameters())} parameters, {size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=BASE)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)  # as fast as two at this size, and the same sums everywhere
    torch.manual_seed(args.seed)
    model = build_model()
    for stage in STAGES:
        train(model, stage, args.seed)
    save(model.eval(), args.out)


if __name__ == "__main__":
    main()
