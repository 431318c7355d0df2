"""The trainer against plain transformers and torch: the same model, batches, loss and optimizer on the same
cores.

    python bench/trainer.py --json trainer.json     the example's model, 1 and 2 threads, 5 repeats of 3 steps
    python bench/trainer.py --model /models/Qwen2.5-0.5B --threads 8 --repeats 3

Both take whole batches of trajectories of uneven length through GRPO with clip-higher to an AdamW update.
Ours is trainer/step/learner.py on Megatron-core: packed micro-batches of at most
trainer.tokens_per_microbatch tokens. The other sorts by length and pads, with micro-batches of at most as
many tokens, padding included, and attention by torch's fused kernels. A process per number of threads; in it
the two take turns. Only real tokens count.

Figures: `throughput_over_transformers` = our tokens per second over theirs: the median of the ratios of
neighbouring measurements, and of the numbers of threads the one that is lower. Goal: at least 0.9.
`throughput_with_entropy_bonus` = ours with algorithm.entropy_coefficient over ours without, in the same
turns. Goal: at least 0.97.
Counted, not timed (bench/trainer_counts.py): `logit_passes`, the bytes that a bfloat16 head on a GPU moves
over those of its logits, at most 6; `selective_extra_arithmetic`, what selective recomputation adds to the
arithmetic of matrix products, at most 0.02. Of long trajectories: trainer_context.py.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import common
import trainer_context

MODEL = common.ROOT / "examples" / "arithmetic" / "base"
PROMPTS, SAMPLES = 32, 8
MEDIAN_TOKENS, P99_TOKENS, LONGEST = 23, 122, 256  # of responses: those of the example's worked answers
BUDGET = 4096  # tokens of a micro-batch
OURS, WITH_ENTROPY, THEIRS = "megatron tokens/s", "entropy bonus tokens/s", "transformers tokens/s"
COLUMNS = ("threads", "repeat", OURS, WITH_ENTROPY, THEIRS, "ratio", "entropy ratio")


def main() -> None:
    options = common.parser(__doc__ or "")
    options.set_defaults(repeats=5, steps=3)
    options.add_argument(
        "--model", type=Path, default=MODEL, help="a Hugging Face directory (default: the example's)"
    )
    options.add_argument(
        "--threads", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2], help="default 1,2"
    )
    options.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = options.parse_args()
    if options.child:
        print(json.dumps(measure(options, options.child)))
        return
    rows = [row for threads in options.threads for row in in_process(options, threads)]
    counted = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("trainer_counts.py")), str(options.model)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        timeout=options.run_seconds,
        check=True,
        text=True,
    )
    ratios, entropy = (
        {n: common.median([row[of] for row in rows if row["threads"] == n]) for n in options.threads}
        for of in ("ratio", "entropy ratio")
    )
    figures = {
        "throughput_over_transformers": min(ratios.values()),
        "throughput_with_entropy_bonus": min(entropy.values()),
        **{f"ratio_{n}_threads": ratio for n, ratio in ratios.items()},
        **trainer_context.figures(),
        **json.loads(counted.stdout.splitlines()[-1]),
    }
    common.finish(options, figures, rows, COLUMNS)


def in_process(options: argparse.Namespace, threads: int) -> list[dict]:
    """The rows of a process of its own with so many threads."""
    words = [
        "--child",
        str(threads),
        "--model",
        str(options.model),
        "--repeats",
        str(options.repeats),
        "--steps",
        str(options.steps),
    ]
    done = subprocess.run(
        [sys.executable, __file__, *words],
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.PIPE,
        timeout=options.run_seconds,
        check=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


# ---- in the process that measures --------------------------------------------------------------------------


def make_batch(vocabulary: int, seed: int) -> list:
    """PROMPTS groups of SAMPLES trajectories; lengths of responses are log-normal."""
    draw, sigma = random.Random(seed), math.log(P99_TOKENS / MEDIAN_TOKENS) / 2.326
    batch = []
    for group in range(PROMPTS):
        prompt = [draw.randrange(vocabulary) for _ in range(draw.randint(4, 24))]
        for sample in range(SAMPLES):
            n = min(LONGEST, max(2, round(draw.lognormvariate(math.log(MEDIAN_TOKENS), sigma))))
            response, logprobs = [draw.randrange(vocabulary) for _ in range(n)], [-math.log(vocabulary)] * n
            batch.append(common.whole(group * SAMPLES + sample, group, prompt, response, logprobs))
            batch[-1].record.reward = float(draw.random() < 0.5)
    return batch


def measure(options: argparse.Namespace, threads: int) -> list[dict]:
    """Repeats of (our steps, ours with an entropy bonus, their steps) in turns, after one step of each to
    warm up."""
    import laminar_hpc.machine.compat.torchvision  # noqa: F401 (before transformers)
    from laminar_hpc.config.schema import RunConfig

    config = RunConfig()
    config.model.path, config.trainer.threads, config.trainer.tokens_per_microbatch = (
        str(options.model),
        threads,
        BUDGET,
    )
    config.algorithm.minibatches_per_step, config.optimizer.lr = 1, 1e-6
    config.guard.enabled = False  # the log-probs of the batch are no engine's
    ours, vocabulary = our_step(config)
    theirs = their_step(config)

    def with_entropy(batch: list) -> None:
        config.algorithm.entropy_coefficient = 0.01
        ours(batch)
        config.algorithm.entropy_coefficient = 0.0

    rows = []
    for repeat in range(-1, options.repeats):
        found = {}
        for name, step in ((OURS, ours), (WITH_ENTROPY, with_entropy), (THEIRS, theirs)):
            batches = [
                make_batch(vocabulary, seed=repeat * options.steps + i)
                for i in range(options.steps if repeat >= 0 else 1)
            ]
            started = time.perf_counter()
            for batch in batches:
                step(batch)
            seconds = time.perf_counter() - started
            found[name] = sum(len(t.prompt) + t.record.length for batch in batches for t in batch) / seconds
        if repeat >= 0:
            rows.append(
                {
                    "threads": threads,
                    "repeat": repeat,
                    **found,
                    "ratio": found[OURS] / found[THEIRS],
                    "entropy ratio": found[WITH_ENTROPY] / found[OURS],
                }
            )
    return rows


def our_step(config: object) -> tuple[Callable[[list], None], int]:
    """A trainer step of the trainer role; and the size of the vocabulary."""
    import torch
    import torch.distributed as dist

    from laminar_hpc.trainer.megatron.policy import MegatronPolicy
    from laminar_hpc.trainer.step.batch import in_memory
    from laminar_hpc.trainer.step.learner import Learner

    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    policy = MegatronPolicy(config)
    learner = Learner(config, policy)
    return lambda batch: learner.train(in_memory(batch), 0, lambda: None), policy.shape.vocab


def their_step(config: object) -> Callable[[list], None]:
    """The same in plain torch on transformers' model."""
    import torch
    from transformers import AutoModelForCausalLM

    from laminar_hpc.trainer.algorithms.advantages import group_advantages

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = (
        AutoModelForCausalLM.from_pretrained(
            config.model.path, dtype=torch.float32, attn_implementation="sdpa"
        )
        .to(device)
        .train()
    )
    o, a = config.optimizer, config.algorithm
    adam = torch.optim.AdamW(
        model.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay
    )

    def step(batch: list) -> None:
        rewards = torch.tensor([t.record.reward for t in batch], dtype=torch.float64).view(PROMPTS, SAMPLES)
        advantages = group_advantages(rewards, normalize_std=True).flatten().tolist()
        tokens = sum(t.record.length for t in batch)
        for part in padded_parts([len(t.prompt) + t.record.length for t in batch]):
            texts = [batch[i].prompt.tolist() + batch[i].response.tokens.tolist() for i in part]
            width = max(map(len, texts))
            ids = torch.tensor([t + [0] * (width - len(t)) for t in texts], device=device)
            attention = torch.tensor([[1] * len(t) + [0] * (width - len(t)) for t in texts], device=device)
            trained = torch.tensor(
                [
                    [len(batch[i].prompt) <= place < len(t) for place in range(1, width)]
                    for i, t in zip(part, texts, strict=True)
                ],
                device=device,
            )
            logp = model(input_ids=ids, attention_mask=attention).logits[:, :-1].float().log_softmax(-1)
            logp = logp.gather(2, ids[:, 1:, None])[..., 0][trained]
            behaviour = torch.tensor(
                [lp for i in part for lp in batch[i].response.logprobs.tolist()], device=device
            )
            advantage = torch.tensor(
                [advantages[i] for i in part for _ in batch[i].response.tokens], device=device
            )
            ratio = torch.exp(logp - behaviour)
            surrogate = torch.minimum(
                ratio * advantage, ratio.clamp(1 - a.clip_low, 1 + a.clip_high) * advantage
            )
            (-surrogate.sum() / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad).item()
        adam.step()
        adam.zero_grad()

    return step


def padded_parts(lengths: list[int]) -> list[list[int]]:
    """Micro-batches by length, longest first, each of at most BUDGET tokens when padded to its longest."""
    parts: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not parts or lengths[parts[-1][0]] * (len(parts[-1]) + 1) > BUDGET:
            parts.append([])
        parts[-1].append(i)
    return parts


if __name__ == "__main__":
    main()
