"""The trainer role: the policy on Megatron-core, GRPO on it, checkpoints and publishing."""

import os

import torch

from laminar_hpc.machine.compat.optional import left_out

# Megatron's jit_fuser is torch.compile at import, of no use here and slow to start
if not torch.cuda.is_available():
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

with left_out("wandb"):  # Megatron's dynamic inference would import it: 20 s of a processor
    import megatron.core  # noqa: F401
