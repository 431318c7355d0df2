"""What a rank holds of a Hugging Face directory's tensors, and how it reads just that."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import WEIGHTS_FILE
from laminar_hpc.config.schema import LoraConfig
from laminar_hpc.trainer.control import all_frames
from laminar_hpc.trainer.megatron.adapters import is_adapter
from laminar_hpc.weights.adapter_slices import adapter_slices
from laminar_hpc.weights.finite import all_finite, culprits
from laminar_hpc.weights.hf import ModelShape, TensorReader
from laminar_hpc.weights.kernels.slices import LocalSlice
from laminar_hpc.weights.layouts import Shard
from laminar_hpc.weights.mapping import EMBEDDING, HEAD, check_names, local_slices


def own_slices(
    chunks: Sequence[GPTModel], shape: ModelShape, lora: LoraConfig | None = None, without: str = ""
) -> list[LocalSlice]:
    """Of the parameters of this rank's stage, as they are now: each is a view. Those of the model, or with
    `lora` those of its adapter. `without`: a parameter that has no counterpart in a directory."""
    shard = Shard(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    found: list[LocalSlice] = []
    for gpt in chunks:
        layers = gpt.decoder.layers
        first = layers[0].layer_number - 1 if len(layers) else 0
        named = {
            name: p
            for name, p in gpt.named_parameters()
            if is_adapter(name) == (lora is not None) and name != without
        }
        if lora is not None:
            found += adapter_slices(named, shape, lora, first, shard)
        else:
            found += local_slices(named, shape, first, shard)
    return found


def names_of_all(own: Sequence[LocalSlice], seconds: float) -> set[str]:
    """The tensors of which any trainer rank has a slice. Collective; `seconds` bounds the wait."""
    names = msgspec.json.encode(sorted({each.name for each in own}))
    frames = all_frames(names, seconds, "the names of the model's tensors")
    return {name for frame in frames for name in msgspec.json.decode(frame, type=list[str])}


def load_whole(
    model: torch.nn.Module, directory: Path, own: list[LocalSlice], canonical: Iterable[str], tied: bool
) -> None:
    """`load_slices` of a whole model, whose vocabulary's padding has no counterpart in the directory and
    is 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_slices(directory, own, canonical, tied)


@torch.no_grad()
def load_slices(
    directory: Path,
    own: list[LocalSlice],
    canonical: Iterable[str],
    tied: bool,
    file: str = WEIGHTS_FILE,
) -> None:
    """Into `own`, what the directory has for them in `file`, or in those of its index. Raises LaminarError
    when it is not the model whose tensors `canonical` names, holds NaN or an infinity, or of a tied model two
    heads."""
    with TensorReader(directory, file) as tensors:
        check_names(canonical, tensors.names(), tied, str(directory))
        load_own(tensors, own, directory, tied)


def load_own(tensors: TensorReader, own: list[LocalSlice], directory: Path, tied: bool = False) -> None:
    """Reads into `own` from an open directory. Raises LaminarError for a tensor of another shape, or that
    holds NaN or an infinity, or of a tied model two heads."""
    for each in own:
        if (there := tensors.shape(each.name)) != each.shape:
            raise LaminarError(
                f"{directory}: {each.name} is {there}, "
                f"config.json says {each.shape}; download the model again"
            )
        part = tensors.narrow(each.name, each.dim, each.start, each.length)
        if not all_finite([part]):
            raise LaminarError(
                f"{directory}: {culprits([(each.name, part)])} is NaN or infinite, so the model "
                "cannot be trained; download it again, or repair the checkpoint that it comes from"
            )
        if tied and each.name == EMBEDDING and HEAD in tensors.names():
            head = tensors.narrow(HEAD, each.dim, each.start, each.length)
            if not torch.equal(part.float(), head.float()):
                raise LaminarError(
                    f"{directory}: {HEAD} is not {EMBEDDING}, though config.json ties them; set "
                    "tie_word_embeddings to false there, or save the model anew without its head"
                )
        each.load(part)
