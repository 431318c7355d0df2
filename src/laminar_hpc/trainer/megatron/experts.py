"""What Megatron-core is told of a mixture of experts. Called by trainer/megatron/building.py and policy.py.

Tokens go to their experts by all-to-all, which takes packs of any size on each rank. The router's products
and weights are float32, and no auxiliary loss is added. On a GPU with Transformer Engine the experts of a
rank are one grouped product (TEGroupedMLP), else one product after the other (SequentialMLP).
"""

from importlib.util import find_spec

import torch
from megatron.core.transformer.moe import moe_utils

from laminar_hpc.config.experts import Experts
from laminar_hpc.config.schema import RunConfig

if not hasattr(moe_utils, "te_general_gemm"):
    # Megatron 0.16.1 (moe_utils.py:36) forgets this name where Transformer Engine is missing, and reads it
    moe_utils.te_general_gemm = None


def expert_tensor_parallel(config: RunConfig) -> int | None:
    """Ranks over which each expert is split; None: as all other layers."""
    return 1 if config.trainer.expert_parallel > 1 else None


def expert_settings(experts: Experts | None, config: RunConfig) -> dict[str, object]:
    """Fields of Megatron's TransformerConfig."""
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.per_token,
        "moe_ffn_hidden_size": experts.width,
        "moe_shared_expert_intermediate_size": experts.shared_width or None,
        "moe_shared_expert_gate": experts.shared_width > 0,
        # the softmax of the chosen logits is that of all, made to sum to 1
        "moe_router_pre_softmax": not experts.normalized,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": torch.cuda.is_available() and find_spec("transformer_engine") is not None,
        "expert_model_parallel_size": config.trainer.expert_parallel,
        "expert_tensor_parallel_size": expert_tensor_parallel(config),
    }


def is_router(name: str) -> bool:
    """Whether Megatron's parameter of this name is held whole by each tensor-parallel rank, which computes
    its gradient from a share of the tokens: a router, or the gate of a shared expert."""
    return name.endswith((".router.weight", ".shared_experts.gate_weight"))
