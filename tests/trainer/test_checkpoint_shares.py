"""No trainer rank writes, copies or reads more of a checkpoint than its share, and the shares make up the
whole."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core import parallel_state
from test_layouts import settings_of, world_of

from helpers.trainer import tiny
from helpers.trainer.checkpointing import Trainer
from helpers.trainer.ranks import Ranks
from laminar_hpc.store.checkpoints import checkpoint_path
from laminar_hpc.trainer.canonical.files import plan_files
from laminar_hpc.trainer.canonical.plan import HeldSlice
from laminar_hpc.trainer.megatron.checkpoint_writer import ShardWriter
from laminar_hpc.trainer.megatron.cpu import cuda_as_cpu
from laminar_hpc.trainer.megatron.optimizer_shards import boxes
from laminar_hpc.weights.hf import TensorReader

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(shape=SHAPES, ends=st.tuples(st.integers(0, 700), st.integers(0, 700)))
def test_boxes_are_the_range(shape: list[int], ends: tuple[int, int]) -> None:
    """One behind the other they hold the items of the range in their order; of a matrix there are at most
    three."""
    size = math.prod(shape)
    first, last = sorted(min(end, size) for end in ends)
    items, found = torch.arange(size).view(shape), list[int]()
    cut = boxes(shape, first, last)
    for offset, extent in cut:
        box = items
        for dim, (begin, length) in enumerate(zip(offset, extent, strict=True)):
            assert length > 0
            box = box.narrow(dim, begin, length)
        found += box.flatten().tolist()
    assert found == list(range(first, last)) and len(cut) <= 2 * len(shape) - 1


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 40), min_size=4, max_size=30),
    stages=st.integers(1, 3),
    tensor_parallel=st.integers(1, 3),
    replicas=st.integers(1, 3),
)
def test_files_are_divided_among_the_ranks_of_a_stage(
    sizes: list[int], stages: int, tensor_parallel: int, replicas: int
) -> None:
    """Each tensor lies in one file, written by a rank of the stage that holds it, and no rank has much more
    than its share."""
    ranks, item = tensor_parallel * replicas, 1 << 20
    stage_of = {f"t{n}": n * stages // len(sizes) for n in range(len(sizes))}
    slices = {
        name: [HeldSlice(name, (sizes[n],), 0, 0, sizes[n], stage * ranks)]
        for n, (name, stage) in enumerate(stage_of.items())
    }
    files = plan_files(slices, item, ranks, tensor_parallel)
    assert sorted(name for file in files for name in file.tensors) == sorted(slices)
    assert len({file.writer for file in files}) == len({file.name for file in files}) == len(files)
    for file in files:
        assert {stage_of[name] for name in file.tensors} == {file.writer // ranks}
        assert file.tensors == [name for name in slices if name in file.tensors]
        whole = sum(sizes[n] for n, stage in enumerate(stage_of.values()) if stage == file.writer // ranks)
        writers = sum(other.writer // ranks == file.writer // ranks for other in files)
        assert sum(slices[name][0].length for name in file.tensors) <= whole / writers + max(sizes)


@pytest.mark.parametrize(
    ("layout", "resumed"),
    [
        ("dp2-distributed", "dp2-distributed"),
        ("pp2", "dp2"),
        pytest.param("tp2-dp2-distributed", "tp2-dp2-distributed", marks=pytest.mark.slow),
        pytest.param("dp2", "dp2", marks=pytest.mark.slow),
    ],
)
def test_shares_make_up_the_whole(layout: str, resumed: str, ranks: Ranks, tmp_path: Path) -> None:
    """docs/promises.md#own-share: each rank copies about the same part of the state and nothing twice;
    hf/ is in files of several ranks, bit for bit the weights; all of it loads, at this layout bit for bit."""
    model = tiny.make_model(tmp_path / "model")
    arguments = {"model": str(model), "run_dir": str(tmp_path / "run")}
    before, after = (settings_of(each, model__dtype="bfloat16") for each in (layout, resumed))
    found = ranks.run(world_of(layout), "cases:save_in_shares", **arguments, settings=before)
    hf = checkpoint_path(tmp_path / "run", 1) / "hf"
    with TensorReader(hf) as tensors:
        shapes = {name: tensors.shape(name) for name in tensors.names()}
        whole = {n: torch.cat([tensors.narrow(n, 0, 0, shape[0])]) for n, shape in shapes.items()}
    items = sum(tensor.numel() for tensor in whole.values())
    assert sum(each["hf"] for each in found) == 2 * items
    # main parameter and two moments; a padded vocabulary has more rows
    padding = found[0]["padding"]
    assert sum(each["shards"] for each in found) == 12 * (items + padding)
    share = 12 * (items + padding) / len(found)
    assert max(each["shards"] for each in found) < 1.5 * share
    assert len(list(hf.glob("model-*-of-*.safetensors"))) > 1
    assert all(torch.equal(found[0]["weights"][name], tensor) for name, tensor in whole.items())
    again = ranks.run(world_of(resumed), "cases:load_shares", **arguments, settings=after)
    assert all(torch.equal(again[0]["weights"][name], tensor) for name, tensor in whole.items())
    if layout == resumed:
        assert again[0]["hash"] == found[0]["hash"]


@pytest.mark.parametrize(
    ("dtype", "distributed"), [("float32", True), ("bfloat16", True), ("bfloat16", False)]
)
def test_megatrons_own_format_is_read(
    dtype: str, distributed: bool, tied_model: Path, tmp_path: Path, world: None
) -> None:
    """What Megatron itself makes of model and optimizer ("fully_reshardable", with the weights), as versions
    wrote it that gathered the optimizer's state: the same state, bit for bit."""
    trainer = Trainer(tied_model, tmp_path, model__dtype=dtype, trainer__distributed_optimizer=distributed)
    trainer.train(0, 1)
    path, saved_hash = trainer.checkpointer.save(1)
    policy, metadata = trainer.policy, {"distrib_optim_sharding_type": "fully_reshardable"}
    metadata["dp_cp_group"] = parallel_state.get_data_parallel_group(with_context_parallel=True)
    folder = path / "megatron"
    shutil.rmtree(folder)
    folder.mkdir()
    with cuda_as_cpu():
        model = policy.gpt.sharded_state_dict(metadata=metadata)
        optimizer = policy.optimizer.sharded_state_dict(model, metadata=metadata)
        state = {"model": model, "optimizer": optimizer, "scheduler": policy.scheduler.state_dict()}
        shards = ShardWriter(lambda changed: changed).plan(state, folder)
    _, written = shards.write(lambda: None)
    shards.complete([written])
    trainer.train(1, 2)
    trainer.checkpointer.load(1)
    assert trainer.checkpointer.state_hash() == saved_hash
