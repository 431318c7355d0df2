"""Makes the example's mixture of experts from its base model and writes it to `mixture/`, a Hugging Face
directory of less than 2 MB.

Run by hand (`python examples/arithmetic/train_mixture.py`, about 2 minutes on one core). Sparse upcycling
(Komatsuzaki et al., arXiv 2212.05055): a Qwen2-MoE whose shared expert is the first half of each feed-forward
layer of `base/`, and each of whose experts is the second half. As two experts with weights that sum to 1 make
up that half, it computes what `base/` does. Then it is trained on what the base model was trained on last,
so that the experts become different ones and the router chooses between them. The weights are rounded to
bfloat16 in the file.
"""

import laminar_hpc.machine.compat.torchvision  # noqa: F401  (first: lets transformers import under CPU torch)

# isort: split
import argparse
from pathlib import Path

import torch
from train_base import BASE, MAX_POSITIONS, STAGES, Stage, save, train
from transformers import Qwen2ForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

EXPERTS, PER_TOKEN = 4, 2
STEPS = 60
LEARNING_RATE = 5e-4
MIXTURE = Path(__file__).parent / "mixture"


def build_mixture(base: Qwen2ForCausalLM) -> Qwen2MoeForCausalLM:
    """Computes what `base` does; its routers are random."""
    dense = base.config
    half = dense.intermediate_size // 2
    config = Qwen2MoeConfig(
        vocab_size=dense.vocab_size,
        hidden_size=dense.hidden_size,
        intermediate_size=dense.intermediate_size,
        moe_intermediate_size=half,
        shared_expert_intermediate_size=half,
        num_experts=EXPERTS,
        num_experts_per_tok=PER_TOKEN,
        norm_topk_prob=True,
        num_hidden_layers=dense.num_hidden_layers,
        num_attention_heads=dense.num_attention_heads,
        num_key_value_heads=dense.num_key_value_heads,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(dense.rope_parameters),
        initializer_range=dense.initializer_range,
        tie_word_embeddings=dense.tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=dense.eos_token_id,
        pad_token_id=dense.pad_token_id,
    )
    mixture = Qwen2MoeForCausalLM(config).float()
    state = base.state_dict()
    mixture.load_state_dict({n: t for n, t in state.items() if ".mlp." not in n}, strict=False)
    with torch.no_grad():
        for number, layer in enumerate(mixture.model.layers):
            mlp = f"model.layers.{number}.mlp"
            of = {name: state[f"{mlp}.{name}_proj.weight"] for name in ("gate", "up", "down")}
            block, shared = layer.mlp, layer.mlp.shared_expert
            shared.gate_proj.weight.copy_(of["gate"][:half])
            shared.up_proj.weight.copy_(of["up"][:half])
            shared.down_proj.weight.copy_(2 * of["down"][:, :half])  # its gate is sigmoid(0) = 1/2
            block.shared_expert_gate.weight.zero_()
            block.experts.gate_up_proj.copy_(torch.cat([of["gate"][half:], of["up"][half:]]))
            block.experts.down_proj.copy_(of["down"][:, half:])
    return mixture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=MIXTURE)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    mixture = build_mixture(Qwen2ForCausalLM.from_pretrained(BASE, dtype=torch.float32))
    last = STAGES[-1].phases[-1]._replace(steps=STEPS)
    train(mixture, Stage((last,), LEARNING_RATE), seed=args.seed + 1)
    save(mixture.eval().bfloat16(), args.out)


if __name__ == "__main__":
    main()
