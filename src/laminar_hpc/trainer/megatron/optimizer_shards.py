"""The optimizer's state as Megatron's torch_dist format has it: named after the model's parameters, so that
it can be loaded at any other layout. Used by trainer/checkpoint.py on every rank.

Of the distributed optimizer each rank has a range of each parameter's items. Megatron (0.16.1,
optimizer/distrib_optimizer.py) either gathers it on all ranks ("fully_reshardable") or names it after
buckets, which ties it to tensor and pipeline parallelism ("dp_reshardable"). Here each range is saved as the
boxes of the parameter that it covers, at most three of a matrix, under the names of "fully_reshardable":
nothing is gathered, and a rank writes and reads its own range alone, straight from and into the live tensors.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from laminar_hpc.trainer.megatron.adam import parts, restore_step_0

_EXPERTS = "experts"  # the place of their optimizer's tensors
Box = tuple[tuple[int, ...], tuple[int, ...]]  # where it begins in each dimension, and its extent


def sharded_state(
    optimizer: MegatronOptimizer, model: torch.nn.Module, loading: bool, prefix: str = ""
) -> dict:
    """What this rank has of the optimizer's state, for `dist_checkpointing.save` and `load`: the tensors are
    the live ones. The weights are not in it, nor main parameters that are views of them: hf/ has them.
    `prefix`: of the model's names, where the checkpoint has another model's too.

    With expert parallelism Megatron chains an optimizer of the experts behind the first. Of it the tensors
    alone are saved: its settings and its step are those of the first, and without expert parallelism the
    first has its parameters.
    """
    metadata = _metadata()
    parameters = model.sharded_state_dict(metadata=metadata, prefix=prefix)
    first, *behind = parts(optimizer)
    state = _state_of(first, parameters, metadata, loading)
    for experts in behind:
        state[_EXPERTS] = _tensors_alone(_state_of(experts, parameters, metadata, loading))
    return state


def load_sharded_state(optimizer: MegatronOptimizer, loaded: dict) -> None:
    """Takes what `dist_checkpointing.load` made of `sharded_state(loading=True)`."""
    first, *behind = parts(optimizer)
    of_experts = loaded.pop(_EXPERTS, {})
    if isinstance(first, DistributedOptimizer):
        loaded = {name: value for name, value in loaded.items() if name in first.state_dict()}
    else:
        restore_step_0(loaded)
    settings = _settings(loaded)
    step = settings.get("state", {}).get("common_step")
    group_step = next((group["step"] for group in settings["param_groups"] if "step" in group), None)
    first.load_state_dict(loaded)
    for experts in behind:
        experts.load_state_dict(_with_settings(experts, of_experts, step, group_step))


def _metadata() -> dict:
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"dp_cp_group": replicas, "distrib_optim_sharding_type": "fully_reshardable"}


def _settings(state: dict) -> dict:
    """Where `param_groups` are, and the step if it is no group's."""
    inner = state.get("optimizer", state)
    assert isinstance(inner, dict)
    return inner


def _state_of(own: MegatronOptimizer, parameters: dict, metadata: dict, loading: bool) -> dict:
    if not isinstance(own, DistributedOptimizer):
        return own.sharded_state_dict(parameters, is_loading=loading, metadata=metadata)
    if loading:
        own.load_state_dict(own.state_dict())  # makes what is not there before the first update
    ranges = {str(number): each for number, each in enumerate(_ranges(own, parameters))}
    return {**own.state_dict(), "param_state_sharding_type": "fully_reshardable", "ranges": ranges}


def _tensors_alone(state: dict) -> dict:
    """Of the experts' optimizer, what is loaded at any layout."""
    if "ranges" in state:
        return {"ranges": state["ranges"]}
    inner = _settings(state)
    del inner["param_groups"]
    inner["state"].pop("common_step", None)
    return state


def sharded_weights(model: torch.nn.Module, prefix: str) -> dict[str, ShardedTensor]:
    """The trained parameters that the model has now, under names that begin with `prefix`; the tensors share
    their memory, and keep to it when the parameters get another."""
    named, _ = extract_sharded_tensors_and_factories(
        model.sharded_state_dict(prefix=prefix, metadata=_metadata())
    )
    trained = (each for each in nested_values(named) if each.data.requires_grad)
    found = (tensor for each in trained for tensor, _ in _tensors(each))
    return {str(number): replace(each, data=each.data.detach()) for number, each in enumerate(found)}


def _with_settings(
    experts: MegatronOptimizer, loaded: dict, step: torch.Tensor | None, group_step: object
) -> dict:
    """`loaded` tensors of the experts' optimizer with its live settings, and the first optimizer's step."""
    live = experts.state_dict()
    groups = _settings(live)["param_groups"]
    for group in groups:
        if group_step is not None:
            group["step"] = group_step
    if isinstance(experts, DistributedOptimizer):
        return live
    inner = _settings(loaded)
    inner["param_groups"] = groups
    if step is not None:
        inner["state"]["common_step"] = step
    return loaded


def _ranges(optimizer: DistributedOptimizer, parameters: dict) -> Iterator[ShardedTensor]:
    named, _ = extract_sharded_tensors_and_factories(parameters)
    of_parameter = {id(each.data): each for each in nested_values(named)}
    buckets = (each for buffer in optimizer.gbuf_ranges for of_dtype in buffer.values() for each in of_dtype)
    for parameter, places in (item for bucket in buckets for item in bucket["param_map"].items()):
        state = dict(optimizer._get_main_param_and_optimizer_states(parameter))
        state.pop("step", None)  # with the settings of its group
        if parameter.dtype is torch.float32:
            del state["param"]  # a view of the parameter
        start = places["param"].start
        for whole, first in _tensors(of_parameter[id(parameter)]):
            for name, values in state.items():
                yield from _boxes_of(whole, first, f"optimizer.state.{name}", values.detach(), start)


def _tensors(parameter: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[ShardedTensor, int]]:
    """The tensors of the checkpoint that lie in a parameter, and the item of it with which each begins."""
    made = parameter.build() if isinstance(parameter, ShardedTensorFactory) else parameter
    for tensor in [made] if isinstance(made, ShardedTensor) else nested_values(made):
        assert tensor.data.is_contiguous(), tensor
        yield tensor, (tensor.data.data_ptr() - parameter.data.data_ptr()) // tensor.data.element_size()


def _boxes_of(
    whole: ShardedTensor, first: int, prefix: str, values: torch.Tensor, start: int
) -> Iterator[ShardedTensor]:
    """`values` are the parameter's items from `start` on; `whole` begins with its item `first`."""
    begin = max(start, first) - first
    end = min(start + values.numel(), first + math.prod(whole.local_shape)) - first
    at = begin + first - start
    shape = (*(1 for _ in range(whole.prepend_axis_num)), *whole.local_shape)  # the layer's place comes first
    for offset, extent in boxes(shape, begin, end):
        items = math.prod(extent)
        yield replace(
            whole,
            key=f"{prefix}.{whole.key}",
            data=values[at : at + items].view(extent),
            dtype=values.dtype,
            local_shape=extent,
            global_offset=tuple(a + b for a, b in zip(whole.global_offset, offset, strict=True)),
            axis_fragmentations=None,  # no regular grid
            prepend_axis_num=0,
            replica_id=(*whole.replica_id[:2], 0),  # data-parallel ranks have different ranges
        )
        at += items


def boxes(shape: Sequence[int], first: int, last: int) -> list[Box]:
    """The items [first, last) of a tensor, in row-major order, as boxes that follow on each other."""
    if first >= last:
        return []
    if len(shape) == 1:
        return [((first,), (last - first,))]
    inner = math.prod(shape[1:])
    head, tail = -(-first // inner), last // inner  # rows that are whole
    if head > tail:
        return _in_row(shape, head - 1, first, last)
    before, behind = _in_row(shape, head - 1, first, head * inner), _in_row(shape, tail, tail * inner, last)
    middle = [((head, *(0 for _ in shape[1:])), (tail - head, *shape[1:]))] if head < tail else []
    return [*before, *middle, *behind]


def _in_row(shape: Sequence[int], row: int, first: int, last: int) -> list[Box]:
    begin = row * math.prod(shape[1:])
    inside = boxes(shape[1:], first - begin, last - begin)
    return [((row, *offset), (1, *extent)) for offset, extent in inside]
