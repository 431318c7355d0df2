"""Low-rank adapters beside Megatron's own linear layers, whose weights are frozen (LoRA, Hu et al., arXiv
2106.09685, section 4.1). Called by trainer/megatron/building.py and policy.py.

A layer gives W x + scale * B A x, summed in float32 and rounded once for what is added. Of a layer whose
outputs are split over the tensor-parallel ranks, A is on each of them and B is split; of one whose inputs
are, A is split and B is on each. A rank computes A x of its own share of the tokens, or of its own inputs,
and only this, `rank` values of a token, goes to the others. Each rank has a share of the gradient of what is
on all of them, which Megatron adds up as it does for norms (`note_tensor_parallel`).

Where Megatron computes several of PEFT's modules as one layer, their A are one product and their B are one
matrix that is 0 where a module does not lead.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from laminar_hpc.config.adapters import TARGETS
from laminar_hpc.config.schema import LoraConfig
from laminar_hpc.weights.adapters import adapter_scale
from laminar_hpc.weights.hf import ModelShape
from laminar_hpc.weights.kernels.slices import LocalSlice


class LowRank(torch.nn.Module):
    """lora_A [rank, inputs] and lora_B [outputs, rank] of one module, or this rank's shards of them. `block`:
    rows of B that follow on each other in Megatron's layer; behind them come those of other modules."""

    def __init__(self, rank: int, inputs: int, outputs: int, block: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.lora_A = torch.nn.Parameter(torch.empty(rank, inputs, dtype=dtype))
        self.lora_B = torch.nn.Parameter(torch.empty(outputs, rank, dtype=dtype))
        self.block = block


class Adapter(torch.nn.ModuleDict):
    """The modules of one layer of Megatron's, by PEFT's names."""

    def __init__(self, modules: dict[str, LowRank], scale: float) -> None:
        super().__init__(modules)
        self._scale = scale

    def narrowed(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, 1, inputs] -> A x of all modules, [tokens, modules * rank]."""
        return x.flatten(0, -2) @ _joined([each.lora_A for each in self.values()]).t()

    def added(self, output: torch.Tensor, narrow: torch.Tensor) -> torch.Tensor:
        """output [tokens, 1, outputs] + scale * B narrow."""
        flat = torch.addmm(output.flatten(0, -2), narrow, self._whole_b().t(), alpha=self._scale)
        return flat.view_as(output)

    def _whole_b(self) -> torch.Tensor:
        """[outputs, modules * rank], of all modules, whose blocks of rows take turns."""
        modules = list(self.values())
        if len(modules) == 1:
            return modules[0].lora_B
        rank, parts = modules[0].lora_B.shape[1], []
        for number, each in enumerate(modules):
            blocks = each.lora_B.view(-1, each.block, rank)
            parts.append(F.pad(blocks, (number * rank, (len(modules) - 1 - number) * rank)))
        return torch.cat(parts, 1).flatten(0, 1)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class AdaptedColumn(ColumnParallelLinear):
    """A layer whose outputs are split, with its `adapter`, which `add_adapters` gives it."""

    adapter: Adapter

    def forward(
        self,
        input_: torch.Tensor,
        weight: torch.Tensor | None = None,
        runtime_gather_output: bool | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(input_, weight, runtime_gather_output)
        narrow = self.adapter.narrowed(input_)
        if self.sequence_parallel:
            narrow = gather_from_sequence_parallel_region(narrow, group=self.tp_group)
        return self.adapter.added(output, narrow), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        return _sharded(self, prefix, sharded_offsets, metadata, {"weight": 0, "bias": 0}, ("lora_B", 0))


class AdaptedRow(RowParallelLinear):
    """A layer whose inputs are split, with its `adapter`."""

    adapter: Adapter

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        output, bias = super().forward(input_)
        narrow = self.adapter.narrowed(input_)
        if self.sequence_parallel:
            narrow = reduce_scatter_to_sequence_parallel_region(narrow, group=self.tp_group)
        return self.adapter.added(output, narrow), bias

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict:
        return _sharded(self, prefix, sharded_offsets, metadata, {"weight": 1}, ("lora_A", 1))


def _sharded(
    layer: AdaptedColumn | AdaptedRow,
    prefix: str,
    offsets: tuple,
    metadata: dict | None,
    axes: dict[str, int],
    split: tuple[str, int],
) -> dict:
    """As Megatron's own: which tensors are split over the tensor-parallel ranks, and by which dimension."""
    half, axis = split
    axes = axes | {f"adapter.{module}.{half}": axis for module in layer.adapter}
    assert metadata is not None
    return make_sharded_tensors_for_checkpoint(
        layer.state_dict(prefix="", keep_vars=True),
        prefix,
        axes,
        offsets,
        tp_group=layer.tp_group,
        dp_cp_group=metadata["dp_cp_group"],
    )


def adapt_spec(spec: ModuleSpec, lora: LoraConfig) -> None:
    """Of a layer's spec with Megatron's own layers, in place: those that have an adapter."""
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp.submodules
    if lora.targets != "mlp":
        attention.linear_qkv = AdaptedColumn
        attention.linear_proj = AdaptedRow
    if lora.targets != "attention":
        mlp.linear_fc1 = AdaptedColumn
        mlp.linear_fc2 = AdaptedRow


def add_adapters(gpt: GPTModel, shape: ModelShape, lora: LoraConfig) -> None:
    """Of layers whose spec is `adapt_spec`'s: each gets its adapter, without values, and all other parameters
    are frozen."""
    gpt.requires_grad_(False)
    queries = shape.heads // shape.kv_heads
    blocks = {"q_proj": queries * shape.head_dim, "k_proj": shape.head_dim, "v_proj": shape.head_dim}
    names = {"linear_qkv": TARGETS["attention"][:3], "linear_proj": ("o_proj",)}
    names |= {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}
    for path, layer in gpt.named_modules():
        if not isinstance(layer, AdaptedColumn | AdaptedRow):
            continue
        modules, (outputs, inputs) = {}, layer.weight.shape
        of_layer = names[path.rpartition(".")[2]]
        together = sum(blocks.get(name, outputs // len(of_layer)) for name in of_layer)
        for name in of_layer:
            block = blocks.get(name, outputs // len(of_layer))
            modules[name] = LowRank(lora.rank, inputs, outputs // together * block, block, layer.weight.dtype)
        layer.adapter = Adapter(modules, adapter_scale(lora))
    if gpt.pre_process and gpt.config.recompute_granularity == "full":
        # a layer that is computed twice has a gradient only if its input has one
        gpt.embedding.register_forward_hook(_with_gradient)


def _with_gradient(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def is_adapter(name: str) -> bool:
    """Whether Megatron's parameter of this name is an adapter's."""
    return ".adapter." in name


def is_replicated(name: str) -> bool:
    """Whether an adapter's parameter is on each tensor-parallel rank, which has a share of its gradient."""
    half = "lora_B" if ".linear_proj." in name or ".linear_fc2." in name else "lora_A"
    return is_adapter(name) and name.endswith(half)


@torch.no_grad()
def set_initial(slices: Sequence[LocalSlice], lora: LoraConfig, seed: int) -> None:
    """The first values of a new adapter, the same at every layout: they follow from the seed and the tensor's
    name. As in PEFT, A is uniform within 1 / sqrt(inputs), or normal of standard deviation 1 / rank; B is 0.
    """
    for each in slices:
        values = torch.zeros(each.shape)
        if ".lora_A." in each.name:
            digest = hashlib.sha256(f"{seed} {each.name}".encode()).digest()
            draw = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
            bound = each.shape[1] ** -0.5
            if lora.init == "gaussian":
                values.normal_(0.0, 1 / lora.rank, generator=draw)
            else:
                values.uniform_(-bound, bound, generator=draw)
        each.load(values.narrow(each.dim, each.start, each.length))
