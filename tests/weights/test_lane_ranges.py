"""Lanes of a publication: any cut gives back the bytes and the sums of the whole, and a slot is complete with
the last part only."""

import contextlib
import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.weights import lane_slots
from laminar_hpc.weights.kernels.sums import tensor_sums
from laminar_hpc.weights.lane_slots import LaneWriter, SlotsBusy
from laminar_hpc.weights.lanes import borders, join, lane_chunks, lane_manifest, lane_sums
from laminar_hpc.weights.manifest import Manifest, decode_manifest, encode_manifest, layout
from laminar_hpc.weights.slots import SlotReader

SHAPES = [("a", (50, 7)), ("odd", (3, 3)), ("b", (40, 10)), ("c", (5,))]


def whole(weight_id: int = 1, dtype: str = "bfloat16") -> tuple[Manifest, torch.Tensor]:
    """A manifest, its sums included, and random bytes for it."""
    manifest = layout([(name, shape, dtype) for name, shape in SHAPES], weight_id, weight_id)
    data = torch.randint(0, 256, (manifest.data_bytes,), dtype=torch.uint8)
    for entry in manifest.tensors:
        entry.sum_words, entry.sum_indexed = tensor_sums(data[entry.offset : entry.offset + entry.nbytes])
    return manifest, data


def parts(manifest: Manifest, data: torch.Tensor, places: list[int]) -> list[tuple[Manifest, torch.Tensor]]:
    """Lanes as they come out of a stream: each with the sums of its parts."""
    found = []
    for begin, end in itertools.pairwise(places):
        lane, held = (
            lane_manifest(
                layout([(n, s, manifest.dtype) for n, s in SHAPES], manifest.weight_id, 1), begin, end
            ),
            data[begin:end],
        )
        for entry in lane.tensors:
            entry.sum_words, entry.sum_indexed = tensor_sums(held[entry.offset : entry.offset + entry.nbytes])
        found.append((decode_manifest(encode_manifest(lane)), held))
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_lanes_make_up_the_whole(lanes: int, dtype: str) -> None:
    """The joined manifest has the sums of whole tensors; what a sender adds up per tensor are the parts'
    sums; chunks cover each lane."""
    manifest, data = whole(dtype=dtype)
    places = borders(manifest, lanes)
    assert (
        places[0] == 0
        and places[-1] == manifest.data_bytes
        and max(np.diff(places)) < 1.1 * manifest.data_bytes / lanes
    )
    cut = parts(manifest, data, places)
    assert join([lane for lane, _ in cut]) == manifest
    for lane, _ in cut:
        sums, reached = {}, lane.begin
        for chunk in lane_chunks(lane, 64):
            for part in chunk:
                entry, item = manifest.tensors[part.tensor], 4 if dtype == "float32" else 2
                assert entry.offset + part.first * item == reached
                reached = entry.offset + part.last * item
                sums.setdefault(part.tensor, [reached - (part.last - part.first) * item, reached])[1] = (
                    reached
                )
        assert reached == lane.begin + lane.data_bytes
        whole_relative = {
            number: tensor_sums(data[first:last], (first - manifest.tensors[number].offset) // 4)
            for number, (first, last) in sums.items()
        }
        assert lane_sums(lane, whole_relative) == [(e.sum_words, e.sum_indexed) for e in lane.tensors]
    assert lane_manifest(manifest, 0, manifest.data_bytes) is manifest


def test_borders_keep_to_stages_and_refuse_too_little() -> None:
    """A border goes to a stage's end where that is near; too small a model is refused."""
    manifest, _ = whole()
    size = manifest.data_bytes
    assert (
        borders(manifest, 2, [size // 2 + 20, 12]) == [0, size // 2 + 20, size] != borders(manifest, 2, [12])
    )
    with pytest.raises(LaminarError, match="do not make up so many lanes"):
        borders(layout([("a", (2,), "float32")], 0, 0), 3)


def writers(folder: Path, slots: int = 3) -> list[LaneWriter]:
    return [LaneWriter(str(folder), "run", slots, folder, lane, 2) for lane in range(2)]


def write(writer: LaneWriter, lane: tuple[Manifest, torch.Tensor]) -> bool:
    writer.begin(lane[0])[:] = lane[1].numpy()
    return writer.commit(lane[0]) is not None


def test_a_slot_is_seen_when_all_lanes_are_there(tmp_path: Path) -> None:
    """In any order, over more ids than slots, one lane up to an id ahead; what is seen are the bytes of one
    id."""
    pair, reader = writers(tmp_path), SlotReader(str(tmp_path), "run")
    ids = [whole(weight_id) for weight_id in range(8)]
    cut = [parts(*each, borders(each[0], 2)) for each in ids]
    for number in range(8):
        first, second = (0, 1) if number % 2 else (1, 0)
        assert not write(pair[first], cut[number][first])
        seen = reader.newest()
        assert (seen.weight_id if seen else -1) == number - 1
        assert write(pair[second], cut[number][second])
        seen = reader.newest()
        assert seen.weight_id == number and [e.sum_words for e in seen.manifest.tensors] == [
            e.sum_words for e in ids[number][0].tensors
        ]
        content = (seen.directory / "model.safetensors").read_bytes()
        assert content.endswith(ids[number][1].numpy().tobytes())
        slot, part, data = pair[0].keep_newest()
        assert part.weight_id == number and bytes(data) == cut[number][0][1].numpy().tobytes()
        pair[0].release(slot)
    for writer in pair:
        writer.close()
    assert not reader.root.exists(), "the last one cleans up"


def test_a_lane_that_dies_commits_nothing_and_comes_back(tmp_path: Path) -> None:
    """Its half-written part is never seen. Started again beside the living lane it finds the slots and
    completes the id that was open; when all have gone, the next one starts afresh."""
    pair, reader = writers(tmp_path), SlotReader(str(tmp_path), "run")
    cut = [parts(*each, borders(each[0], 2)) for each in (whole(1), whole(2))]
    for lane in range(2):
        write(pair[lane], cut[0][lane])
    assert not write(pair[0], cut[1][0])
    pair[1].begin(cut[1][1][0])[:5] = 7
    pair[1].abandon()
    os.close(pair[1]._present)  # what the kernel does at its death
    again = LaneWriter(str(tmp_path), "run", 3, tmp_path, 1, 2)
    assert reader.newest().weight_id == 1 and again.keep_newest()[1].weight_id == 1
    assert write(again, cut[1][1]) and reader.newest().weight_id == 2
    for writer in (pair[0], again):
        os.close(writer._present)
    assert (
        LaneWriter(str(tmp_path), "run", 3, tmp_path, 0, 2).keep_newest() is None and reader.newest() is None
    )


def test_no_slot_is_taken_from_who_needs_it(tmp_path: Path) -> None:
    """Not the newest complete one, none that is read, sent or written, none of a newer id."""
    pair, reader = writers(tmp_path), SlotReader(str(tmp_path), "run")
    cut = [parts(*each, borders(each[0], 2)) for each in (whole(n) for n in range(6))]
    for number in range(3):
        for lane in range(2):
            write(pair[lane], cut[number][lane])
    with reader.lease(reader.newest()):
        assert not write(pair[0], cut[3][0])
        pair[0].begin(cut[4][0][0])
        with pytest.raises(SlotsBusy, match=r"raise relay\.slots"):
            pair[1].begin(cut[2][1][0])
        pair[1].begin(cut[4][1][0])
        kept = pair[1].keep_held()
        pair[1].abandon()
        pair[0].abandon()
        assert reader.newest().weight_id == 2
        assert not write(pair[0], cut[5][0]), "takes the slot of id 3, whose other half never came"
        assert pair[0].keep_newest()[1].weight_id == 5
        pair[1].release(kept)


def test_a_large_slot_s_memory_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another lane takes it, in its turn: the larger the slot, the longer that may last."""
    monkeypatch.setattr(lane_slots, "_TURN_SECONDS", 0.0)
    pair, now = writers(tmp_path), [0.0]
    monkeypatch.setattr(lane_slots, "_TAKEN_PER_SECOND", 1.0)
    first, second = parts(*whole(), borders(whole()[0], 2))
    seconds = whole()[0].data_bytes

    def later(waited: float) -> None:
        if now[0]:
            turn.close()
        now[0] = seconds - 1.0  # as long as all bytes take, but for one

    monkeypatch.setattr(lane_slots, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=later))
    turn = contextlib.ExitStack()
    turn.enter_context(pair[0]._turn())
    assert not write(pair[1], second)
    assert write(pair[0], first)
    for writer in pair:
        writer.close()
