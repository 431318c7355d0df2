"""Slots: readers see complete weights only, a lease keeps them, leftovers of dead runs are cleaned, no room
is said before bytes move."""

import contextlib
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.engine import leftovers
from laminar_hpc.machine.files.folders import remove_dead_slots, slots_root
from laminar_hpc.machine.processes import process_world
from laminar_hpc.weights.kernels.sums import add_sums, slice_sums, tensor_sums
from laminar_hpc.weights.manifest import layout
from laminar_hpc.weights.slots import SlotGone, SlotReader, SlotWriter

TENSORS = [("b", (7, 3), torch.float32), ("a", (5,), torch.float32)]


def write(writer, weight_id, value, commit=True):
    manifest = layout(TENSORS, weight_id, weight_id)
    data = torch.from_numpy(writer.begin(manifest))
    data.view(torch.float32).fill_(value)
    if commit:
        writer.commit(manifest)


@pytest.fixture
def writer(tmp_path):
    made = SlotWriter(str(tmp_path), "run", 3, tmp_path)
    yield made
    made.close()


def test_newest_complete_slot_is_a_loadable_directory(tmp_path, writer):
    """Readers see the newest committed id, never the one being written; safetensors loads it."""
    reader = SlotReader(str(tmp_path), "run")
    assert reader.newest() is None
    for weight_id in range(7):
        write(writer, weight_id, float(weight_id))
    write(writer, 7, 9.0, commit=False)
    newest = reader.newest()
    assert newest.weight_id == 6
    tensors = load_file(newest.directory / "model.safetensors")
    assert {k: tuple(v.shape) for k, v in tensors.items()} == {"b": (7, 3), "a": (5,)} and (
        tensors["b"] == 6
    ).all()


def test_a_leased_slot_is_not_rewritten(tmp_path, writer):
    """Its bytes stay while the lease lasts, and a later lease of what was rewritten is refused."""
    reader = SlotReader(str(tmp_path), "run")
    write(writer, 0, 1.0)
    handle = reader.newest()
    with reader.lease(handle):
        for weight_id in range(1, 6):
            write(writer, weight_id, 2.0)
        assert (load_file(handle.directory / "model.safetensors")["a"] == 1.0).all()
    for weight_id in range(6, 9):
        write(writer, weight_id, 3.0)
    with pytest.raises(SlotGone), reader.lease(handle):
        pass


def test_who_loads_goes_on_while_the_relay_is_started_again(tmp_path, writer):
    """What the dead relay left is not offered any more, and is not touched before it has been let go."""
    reader = SlotReader(str(tmp_path), "run")
    for weight_id in range(3):
        write(writer, weight_id, 1.0)
    handle = reader.newest()
    with reader.lease(handle):
        again = SlotWriter(str(tmp_path), "run", 3, tmp_path)
        assert reader.newest() is None and again.keep_newest() is None
        for weight_id in range(3, 8):
            write(again, weight_id, 2.0)
            assert reader.newest().weight_id == weight_id
        assert (load_file(handle.directory / "model.safetensors")["a"] == 1.0).all()
    for weight_id in range(8, 11):
        write(again, weight_id, 3.0)
    assert all(
        (load_file(path)["a"] == 3.0).all() for path in tmp_path.glob("laminar-run/slot*/model.safetensors")
    )


def test_a_second_relay_of_a_machine_is_refused(tmp_path, writer):
    """Each would void the other's slots, and write over what it sends: the second one says so and touches
    nothing, and when the first has ended another may come."""
    write(writer, 0, 1.0)
    code = (
        "import sys, pathlib; from laminar_hpc.weights import slots; slots._END_SECONDS = 0.1\n"
        "try: slots.SlotWriter(sys.argv[1], 'run', 3, pathlib.Path(sys.argv[1]))\n"
        "except slots.LaminarError as error: print(error)"
    )

    def second() -> str:
        command = [sys.executable, "-c", code, str(tmp_path)]
        return subprocess.run(command, timeout=60, check=True, capture_output=True, text=True).stdout

    assert f"another relay of this run (pid {os.getpid()}) writes the weight slots under" in second()
    assert SlotReader(str(tmp_path), "run").newest().weight_id == 0
    writer.close()
    assert second() == ""


def test_what_an_earlier_relay_left_is_brought_up_to_date(tmp_path):
    """Fewer slots, and another tokenizer: nothing of before is kept or offered."""
    (tmp_path / "tokenizer.json").write_text("old")
    writer = SlotWriter(str(tmp_path), "run", 4, tmp_path)
    for weight_id in range(4):
        write(writer, weight_id, 1.0)
    (tmp_path / "tokenizer.json").write_text("new")
    again = SlotWriter(str(tmp_path), "run", 2, tmp_path)
    for weight_id in range(4, 6):
        write(again, weight_id, 2.0)
    assert {path.name for path in again.root.glob("slot*")} == {"slot0", "slot1"}
    assert {path.read_text() for path in again.root.glob("slot*/tokenizer.json")} == {"new"}
    again.close()


def test_slots_of_another_layout_are_made_anew(tmp_path, writer):
    """A writer with another model replaces the files that it cannot use."""
    write(writer, 0, 1.0)
    again, manifest = (
        SlotWriter(str(tmp_path), "run", 3, tmp_path),
        layout([*TENSORS, ("c", (2,), torch.float32)], 1, 1),
    )
    torch.from_numpy(again.begin(manifest)).view(torch.float32).fill_(4.0)
    again.commit(manifest)
    assert set(load_file(SlotReader(str(tmp_path), "run").newest().directory / "model.safetensors")) == {
        "a",
        "b",
        "c",
    }


def test_a_slot_of_which_a_kill_has_left_a_part_is_made_anew(tmp_path, writer):
    """A relay that is killed while it removes its folder may leave a lock without weights."""
    write(writer, 0, 1.0)
    (writer.root / "slot0" / "model.safetensors").unlink()
    again = SlotWriter(str(tmp_path), "run", 3, tmp_path)
    write(again, 1, 2.0)
    assert (load_file(again.root / "slot0" / "model.safetensors")["a"] == 2.0).all()


def test_all_slots_read_is_said(tmp_path, writer):
    """With every slot leased or newest the writer refuses, and names the key to raise."""
    reader = SlotReader(str(tmp_path), "run")
    for weight_id in range(3):
        write(writer, weight_id, 0.0)
    handles = [reader.newest()]

    with contextlib.ExitStack() as stack:
        stack.enter_context(reader.lease(handles[0]))
        write(writer, 3, 0.0)
        stack.enter_context(reader.lease(reader.newest()))
        write(writer, 4, 0.0)
        with pytest.raises(LaminarError, match=r"raise relay\.slots"):
            write(writer, 5, 0.0)


def test_leftovers_of_a_killed_run_are_cleaned_and_a_living_run_is_left_alone(tmp_path, writer):
    """Only folders whose owner is dead are removed."""
    code = (
        "import sys, os, signal, pathlib; from laminar_hpc.weights.slots import SlotWriter;"
        "SlotWriter(sys.argv[1], 'dead', 3, pathlib.Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60, check=False)
    assert slots_root(str(tmp_path), "dead").exists()
    assert remove_dead_slots(str(tmp_path)) == [slots_root(str(tmp_path), "dead")]
    assert slots_root(str(tmp_path), "run").exists()


def test_a_dead_relay_s_slots_stay_while_one_is_loaded(tmp_path):
    """An engine's start removes what dead runs have left; it may start from a slot of a relay that has just
    died."""
    (tmp_path / "shm").mkdir()
    writer = SlotWriter(str(tmp_path / "shm"), "run", 3, tmp_path)
    write(writer, 0, 1.0)
    (writer.root / "owner").write_text(f"1 0 {process_world()}")  # an earlier process of this id: dead
    reader = SlotReader(str(tmp_path / "shm"), "run")
    with reader.lease(reader.newest()):
        assert leftovers.clean(tmp_path / "shm", tmp_path / "none") == [] and reader.newest() is not None
    assert [gone.path for gone in leftovers.clean(tmp_path / "shm", tmp_path / "none")] == [writer.root]


def test_sums_see_bits_and_places_and_add_up():
    """Sums of parts add up to the whole's; a swap of words and a flipped bit change them."""
    whole = torch.randn(1001)
    parts = [tensor_sums(whole[:400]), tensor_sums(whole[400:], first_word=400)]
    assert tensor_sums(whole) == tuple(sum(x) % 2**64 for x in zip(*parts, strict=True))
    swapped = whole.clone()
    swapped[3], swapped[900] = whole[900], whole[3]
    assert (
        tensor_sums(swapped)[0] == tensor_sums(whole)[0] and tensor_sums(swapped)[1] != tensor_sums(whole)[1]
    )
    flipped = whole.clone()
    flipped.view(torch.int32)[17] ^= 1
    assert tensor_sums(flipped) != tensor_sums(whole)
    assert tensor_sums(torch.ones(3, dtype=torch.bfloat16)) != tensor_sums(
        torch.ones(4, dtype=torch.bfloat16)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(6,), (9,), (7, 5), (8, 6), (9, 3), (5000, 4)])
def test_sums_of_slices_add_up_wherever_the_cut_is(shape, dtype):
    """A tensor-parallel shard needs no gather: rows or columns, also where a 16-bit item shares its word with
    another shard's."""
    whole = torch.randn(shape).to(dtype)
    for dim in range(len(shape)):
        for cut in {0, 1, shape[dim] // 2, shape[dim] // 2 + 1, shape[dim]}:
            parts = whole.split([cut, shape[dim] - cut], dim)
            assert add_sums(
                [slice_sums(parts[0], shape, dim, 0), slice_sums(parts[1], shape, dim, cut)]
            ) == tensor_sums(whole)
    assert slice_sums(whole, shape, 0, 0) == tensor_sums(whole)


def test_two_runs_on_one_machine_do_not_meet(tmp_path, writer):
    """Each run has a folder of its own; one that starts or ends leaves the other's weights alone."""
    write(writer, 5, 1.0)
    other = SlotWriter(str(tmp_path), "other", 2, tmp_path)
    write(other, 0, 2.0)
    assert (
        SlotReader(str(tmp_path), "run").newest().weight_id == 5
        and SlotReader(str(tmp_path), "other").newest().weight_id == 0
    )
    other.close()
    assert SlotReader(str(tmp_path), "run").newest().weight_id == 5


def test_what_the_relay_still_sends_is_not_rewritten(tmp_path, writer):
    """A slow neighbour downstream reads straight from the slot."""
    write(writer, 0, 1.0)
    slot, manifest, data = writer.keep_newest()
    for weight_id in range(1, 5):
        write(writer, weight_id, 2.0)
    assert (
        manifest.weight_id == 0
        and (torch.from_numpy(data)[: manifest.data_bytes].view(torch.float32) == 1.0).all()
    )
    writer.release(slot)
    for weight_id in range(5, 8):
        write(writer, weight_id, 3.0)
    assert (torch.from_numpy(data)[: manifest.data_bytes].view(torch.float32) == 3.0).all()
