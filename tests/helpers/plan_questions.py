"""Twenty questions to `laminar plan` over models and GPUs, small and large."""

SHORT = ["workload.max_response_tokens=2048", "workload.mean_response_tokens=400"]
LONG = ["workload.max_response_tokens=64000", "workload.mean_response_tokens=12000"]
LORA = ["lora.rank=16"]


def pool(gpu: str, count: int) -> str:
    return f"pools=[{{gpu: {gpu}, count: {count}}}]"


QUESTIONS = {
    "0.5B on one 4090": ["node", "model=0.5B", pool("RTX4090", 1)],
    "0.5B on one L4": ["node", "model=0.5B", pool("L4", 1), *SHORT],
    "1.5B LoRA on one A10": ["node", "model=1.5B", pool("A10", 1), *LORA],
    "3B LoRA on one 3090": ["node", "model=3B", pool("RTX3090", 1), *LORA, *SHORT],
    "7B LoRA on one L40S": ["node", "model=7B", pool("L40S", 1), *LORA, *SHORT],
    "1.5B on one H100": ["node", "model=1.5B", pool("H100", 1), *SHORT],
    "32B LoRA on one B200": ["node", "model=32B", pool("B200", 1), *LORA, *SHORT],
    "7B LoRA on two 4090": ["node", "model=7B", pool("RTX4090", 2), *LORA, *SHORT],
    "7B LoRA on four L4": ["node", "model=7B", pool("L4", 4), *LORA],
    "1.5B on eight 4090": ["node", "model=1.5B", pool("RTX4090", 8)],
    "3B on eight A10": ["node", "model=3B", pool("A10", 8)],
    "7B on 16 4090": ["node", "model=7B", pool("RTX4090", 16)],
    "Llama-3.1-8B LoRA on eight 3090": ["node", "model=Llama-3.1-8B", pool("RTX3090", 8), *LORA],
    "72B LoRA on eight H100": ["node", "model=72B", pool("H100", 8), *LORA],
    "14B on eight H200": ["node", "model=14B", pool("H200", 8)],
    "7B on eight H100, 64K": ["node", "model=7B", pool("H100", 8), *LONG],
    "32B on 32 H800, 64K": ["mixed", "model=32B", pool("H800", 32), *LONG],
    "Qwen3-30B-A3B on 16 H200": ["node", "model=Qwen3-30B-A3B", pool("H200", 16)],
    "Qwen3-235B-A22B on 128 H200": ["mixed", "model=Qwen3-235B-A22B", pool("H200", 128)],
    "7B on H100 and 4090": [
        "mixed",
        "model=7B",
        "pools=[{gpu: H100, count: 8}, {gpu: RTX4090, count: 8}]",
        *SHORT,
    ],
}
