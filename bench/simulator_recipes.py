"""NeMo RL's published recipes and step times, for bench/simulator_runs.py: its blog post of 0.3,
docs/about/performance-summary.md of 0.4 to 0.6 and examples/configs/recipes/llm/performance of the same
versions (NVIDIA-NeMo/RL). GRPO on eight-GPU machines of H100 and, where a row says so, on racks of GB200."""

from typing import Any, NamedTuple


class Recipe(NamedTuple):
    """`tokens`: mean of a trajectory. `train`, `generate`: GPUs, of the type `gpu`. `tensor`: parallelism of
    the engines. `layout`: tensor, pipeline and expert parallelism of the trainer, whose `context` parallelism
    is beside them. `seconds`: of a step. `recompute`: activation checkpointing. `logprobs`: sequences of the
    longest length in a micro-batch of log-probs. `samples`: of a prompt. `phases`: seconds of generation,
    updates and log-probs, where they are published. `staleness`: in steps, where it is asynchronous."""

    version: str
    model: str
    mode: str
    tokens: int
    train: int
    generate: int
    tensor: int
    layout: tuple[int, int, int]
    seconds: float
    recompute: float = 0.0
    logprobs: int = 4
    prompts: int = 64
    updates: int = 4
    longest: int = 4096
    even: bool = False
    memory: float = 0.6  # of the engines, where they share the trainer's GPUs
    phases: tuple[float, ...] = ()
    staleness: int = 1
    samples: int = 32
    context: int = 1
    gpu: str = "H100"


LARGE: dict[str, Any] = {
    "recompute": 1.0,
    "logprobs": 1,
    "prompts": 16,
    "updates": 1,
    "longest": 8192,
    "even": True,
}
SHORT: dict[str, Any] = LARGE | {"prompts": 32, "samples": 16, "longest": 1536}
RACK: dict[str, Any] = {"gpu": "GB200"}
LESS: dict[str, Any] = {"memory": 0.4}

# Generated tokens are published for 0.3, without the prompt.
NEMO = [
    Recipe("0.3", "Llama-3.1-8B", "sync", 945, 8, 8, 1, (1, 1, 1), 112.0, phases=(58, 28, 18)),
    Recipe("0.3", "Llama-3.1-70B", "sync", 548, 64, 64, 4, (4, 4, 1), 147.0, phases=(84, 28, 18)),
    Recipe("0.3", "Qwen3-32B", "sync", 3433, 64, 64, 4, (4, 2, 1), 213.0, phases=(96, 68, 40)),
    Recipe(
        "0.3", "Qwen3-30B-A3B", "sync", 3401, 64, 64, 4, (2, 1, 8), 167.0, memory=0.7, phases=(78, 50, 23)
    ),
    Recipe("0.4", "Llama-3.1-8B", "sync", 1060, 16, 16, 1, (1, 2, 1), 97.7, 1.0, 2),
    Recipe("0.4", "Llama-3.1-8B", "async", 1129, 8, 8, 1, (1, 2, 1), 74.6, 1.0, 2),
    Recipe("0.4", "Qwen3-32B", "sync", 3206, 32, 32, 4, (4, 4, 1), 393.0),
    Recipe("0.4", "Qwen3-32B", "async", 3207, 32, 32, 4, (4, 4, 1), 215.0),
    Recipe("0.4", "Qwen3-30B-A3B", "sync", 3154, 32, 32, 4, (2, 1, 8), 225.0),
    Recipe("0.4", "Qwen3-30B-A3B", "async", 3158, 16, 16, 4, (2, 1, 8), 244.0),
    Recipe("0.4", "Qwen3-235B-A22B", "async", 5691, 128, 128, 8, (4, 8, 16), 241.0, **LARGE),
    Recipe("0.5", "Llama-3.1-8B", "sync", 1019, 16, 16, 1, (1, 2, 1), 92.8, 1.0, 2),
    Recipe("0.5", "Llama-3.1-8B", "async", 1123, 8, 8, 1, (1, 1, 1), 64.8, 1.0, 2),
    Recipe("0.5", "Qwen3-32B", "sync", 3251, 32, 32, 4, (4, 4, 1), 376.0),
    Recipe("0.5", "Qwen3-32B", "async", 3252, 32, 32, 4, (4, 4, 1), 200.0),
    Recipe("0.5", "Qwen3-30B-A3B", "sync", 3196, 32, 32, 2, (1, 1, 8), 198.0),
    Recipe("0.5", "Qwen3-30B-A3B", "async", 3201, 16, 16, 2, (1, 2, 8), 154.0),
    Recipe("0.5", "Qwen3-235B-A22B", "async", 5707, 128, 128, 8, (4, 8, 16), 203.0, **LARGE),
    Recipe("0.6", "Qwen3-30B-A3B", "async", 3206, 128, 64, 2, (1, 1, 8), 34.5, staleness=8),
    Recipe("0.6", "Qwen3-30B-A3B", "sync", 3203, 32, 32, 2, (1, 1, 8), 192.0, logprobs=2),
    Recipe("0.6", "Qwen3-30B-A3B", "async", 3201, 16, 16, 2, (1, 2, 8), 152.0, logprobs=2),
    # Engines over two machines: an all-reduce of each layer crosses the network.
    Recipe("0.4", "Qwen3-235B-A22B", "sync", 5671, 128, 128, 16, (2, 8, 16), 506.0, **LARGE, context=2),
    Recipe("0.6", "Qwen3-235B-A22B", "sync", 5698, 128, 128, 16, (2, 8, 16), 395.0, **LARGE, context=2),
    Recipe("0.6", "Qwen3-235B-A22B", "sync", 5713, 256, 256, 16, (2, 8, 16), 312.0, **LARGE, context=2),
    Recipe("0.6", "Qwen3-235B-A22B", "async", 5721, 128, 128, 8, (4, 8, 16), 231.0, **LARGE),
    # Over four, and 1.3 TB of weights to be had by all of them.
    Recipe("0.4", "DeepSeek-V3", "sync", 745, 256, 256, 32, (1, 16, 16), 154.0, **SHORT),
    Recipe("0.4", "DeepSeek-V3", "async", 744, 256, 256, 32, (1, 16, 16), 77.9, **SHORT),
    Recipe("0.6", "DeepSeek-V3", "sync", 701, 256, 256, 32, (1, 16, 16), 134.0, **SHORT),
    Recipe("0.6", "DeepSeek-V3", "sync", 697, 512, 512, 32, (1, 16, 32), 111.0, **SHORT),
    Recipe("0.6", "DeepSeek-V3", "async", 710, 256, 256, 32, (1, 16, 16), 64.1, **SHORT),
]
# GB200, whose NVLink joins a rack.
RACKS = [
    Recipe("0.6", "DeepSeek-V3", "sync", 711, 128, 128, 32, (1, 8, 16), 108.0, **SHORT | RACK | LESS),
    Recipe("0.6", "DeepSeek-V3", "sync", 700, 256, 256, 32, (1, 8, 16), 98.7, **SHORT | RACK | LESS),
    Recipe("0.6", "DeepSeek-V3", "async", 708, 128, 128, 16, (1, 8, 16), 61.7, **SHORT | RACK),
    Recipe(
        "0.6", "Qwen3-235B-A22B", "sync", 5709, 64, 64, 8, (2, 4, 16), 286.0, **LARGE | RACK | LESS, context=2
    ),
    Recipe("0.6", "Qwen3-235B-A22B", "sync", 5693, 128, 128, 8, (2, 4, 16), 345.0, **LARGE | RACK, context=2),
    Recipe("0.6", "Qwen3-235B-A22B", "async", 5705, 64, 64, 8, (4, 4, 16), 278.0, **LARGE | RACK),
    Recipe("0.6", "Qwen3-30B-A3B", "sync", 3199, 16, 16, 1, (1, 1, 16), 221.0, logprobs=2, **RACK),
    Recipe("0.6", "Qwen3-30B-A3B", "async", 3197, 8, 8, 1, (1, 1, 8), 301.0, logprobs=2, **RACK),
]
