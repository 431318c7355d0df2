"""The trainer role: the policy on Megatron-core, GRPO on it, checkpoints and publishing."""

import os

import torch

if not torch.cuda.is_available():  # Megatron's jit_fuser is torch.compile at import, of no use here and slow to start
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
