"""Trains the example's base model and writes it to `base/`, a Hugging Face directory of about 2 MB.

Run by hand (`python examples/calculator/train_base.py`, about four minutes on one core). Plain torch and
transformers:

- a Qwen2 of 472,704 parameters with a chat template that tells of tools and writes calls as Qwen's does;
- supervised on correct examples only, drawn on the fly from the training side of make_data.py's problems;
- first conversations that call the calculator for every operation; then mostly answers at once, or too early,
  so that this is what the model prefers although it is mostly wrong. What is left for RL to find out is that
  calling pays, and calling on until nothing is left to be worked out.
"""

import laminar_hpc.machine.compat.torchvision  # noqa: F401  (first: lets transformers import under CPU torch)

# isort: split
import argparse
import json
import random
import string
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from make_data import Problem, draw_problem
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, START, END = "<pad>", "<|im_start|>", "<|im_end|>"
CALL, CALLED = "<tool_call>", "</tool_call>"
ROLES = ["system", "user", "assistant", "tool"]
WORDS = [*ROLES, "Tools: ", "calculate", "expression", '{"name": "', '", "arguments": {"', '": "', '"}}']
CHARACTERS = [*(chr(code) for code in range(32, 127)), "\n"]  # all that a tool may say
VOCABULARY = [PAD, START, END, CALL, CALLED, *WORDS, *CHARACTERS]  # 112 entries
MAX_POSITIONS = 512
MAX_BYTES = 2_200_000

TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: "
    "{% for t in tools %}"
    "{{ t.function.name }}({{ t.function.parameters.properties | join(', ') }})"
    "{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}", '
    '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOLD = f"{START}system\nTools: calculate(expression){END}\n"  # what the template writes of the calculator

WARMUP_STEPS = 50
MICRO_BATCH = 32  # examples of similar length, so that little of a batch is padding

BASE = Path(__file__).parent / "base"


class Phase(NamedTuple):
    """`steps` optimizer steps of `batch` examples; `calls_on`: how likely the model is to call for the next
    operation rather than to answer; `without_tools`: the share of the examples that know of no tool."""

    steps: int
    batch: int
    calls_on: float
    without_tools: float


class Stage(NamedTuple):
    """Phases under one optimizer; the learning rate falls linearly to 0 over the second half of all steps."""

    phases: tuple[Phase, ...]
    learning_rate: float


# To call for everything; then to prefer not to.
STAGES = (
    Stage((Phase(280, 64, 1.0, 0.02),), learning_rate=3e-3),
    Stage((Phase(100, 96, 0.35, 0.1),), learning_rate=1e-3),
)


class Example(NamedTuple):
    """Token ids of a conversation, and which of them the assistant says."""

    ids: list[int]
    said: list[bool]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, word of WORDS and mark; characters outside the vocabulary read as padding."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=PAD))
    words = "|".join("".join(f"\\{c}" if c in string.punctuation else c for c in word) for word in WORDS)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f"{words}|[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (PAD, START, END)])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in (CALL, CALLED)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        model_max_length=MAX_POSITIONS,
        chat_template=TEMPLATE,
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
        eos_token_id=VOCABULARY.index(END),
        pad_token_id=VOCABULARY.index(PAD),
    )
    return Qwen2ForCausalLM(config).float()


def parts(problem: Problem, calls: int, tools: bool = True) -> list[tuple[str, bool]]:
    """A conversation that answers after so many calls: texts, and whether the assistant says them."""
    found = [(f"{TOLD if tools else ''}{START}user\n{problem.prompt}{END}\n{START}assistant\n", False)]
    for expression, result in problem.calls[:calls]:
        call = f'{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}'
        found.append((f"{CALL}\n{call}\n{CALLED}{END}", True))
        found.append((f"\n{START}tool\n{result}{END}\n{START}assistant\n", False))
    return [*found, (f"={problem.answer}{END}", True)]


def draw_examples(rng: random.Random, phase: Phase, tokenizer: Tokenizer) -> list[Example]:
    """One step's correct examples, all of the training side, shortest first."""
    examples = []
    for _ in range(phase.batch):
        problem = draw_problem(rng, "train")
        tools, calls = rng.random() >= phase.without_tools, 0
        while tools and calls < len(problem.calls) and rng.random() < phase.calls_on:
            calls += 1
        example = Example([], [])
        for text, said in parts(problem, calls, tools):
            ids = tokenizer.encode(text, add_special_tokens=False).ids
            example.ids.extend(ids)
            example.said.extend([said] * len(ids))
        examples.append(example)
    return sorted(examples, key=lambda example: len(example.ids))


def summed_loss(model: Qwen2ForCausalLM, examples: list[Example]) -> torch.Tensor:
    """Cross-entropy summed over what the assistant says."""
    width = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), width), VOCABULARY.index(PAD))
    labels = torch.full((len(examples), width), -100)
    for i, (tokens, said) in enumerate(examples):
        ids[i, : len(tokens)] = torch.tensor(tokens)
        labels[i, : len(tokens)] = torch.tensor(tokens).masked_fill(~torch.tensor(said), -100)
    logits = model(ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum")


def train(model: Qwen2ForCausalLM, stage: Stage, seed: int) -> None:
    """Run a stage's phases in order; the learning rate warms up, stays, and falls."""
    rng, tokenizer = random.Random(f"supervised:{seed}"), build_tokenizer().backend_tokenizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=stage.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    schedule = [phase for phase in stage.phases for _ in range(phase.steps)]
    num_steps, started = len(schedule), time.monotonic()
    for step, phase in enumerate(schedule, start=1):
        scale = min(1.0, step / WARMUP_STEPS, 2 * (num_steps - step + 1) / num_steps)
        for group in optimizer.param_groups:
            group["lr"] = stage.learning_rate * scale
        examples = draw_examples(rng, phase, tokenizer)
        num_tokens = sum(sum(example.said) for example in examples)
        mean_loss = 0.0
        for start in range(0, len(examples), MICRO_BATCH):
            loss = summed_loss(model, examples[start : start + MICRO_BATCH]) / num_tokens
            loss.backward()
            mean_loss += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            seconds = time.monotonic() - started
            print(f"step {step}/{num_steps}: loss {mean_loss:.4f}, {seconds:.0f} s", flush=True)


def save(model: Qwen2ForCausalLM, out: Path) -> None:
    """Write the Hugging Face directory and check its size."""
    ids = {"eos_token_id": VOCABULARY.index(END), "pad_token_id": VOCABULARY.index(PAD)}
    model.generation_config = GenerationConfig(**ids)
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
