"""What changed, and the way back: the new image bit for bit, never more bytes than in full, the same from C++
and torch; what no sender makes is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_hpc.weights import delta
from laminar_hpc.weights.delta import (
    BLOCK,
    FULL,
    MASK,
    OFFSETS,
    PACKED,
    Frame,
    FrameWrong,
    Image,
    apply,
    encode,
    pack,
    payload_bytes,
    unit_bytes,
)
from laminar_hpc.weights.manifest import layout

LENGTHS = [
    1,
    31,
    32,
    33,
    1000,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    2 * BLOCK + 77,
]  # in units: the borders of words and blocks


def images(seed: int, units: int, width: int, fraction: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(old, new): flat bytes of which about `fraction` of the units differ, by one bit each."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randint(0, 256, (units * width,), dtype=torch.uint8, generator=generator)
    new = old.clone()
    chosen = torch.rand(units, generator=generator) < fraction
    new.view(units, width)[chosen, width - 1] ^= 0x80  # the sign: 0.0 becomes -0.0
    return old, new


def both_ways(
    monkeypatch: pytest.MonkeyPatch, old: torch.Tensor, new: torch.Tensor, width: int
) -> list[Frame]:
    """Frames by the extension, if it is built, and by torch, each applied by both."""
    frames = []
    for extension in {delta.extension, None}:
        with monkeypatch.context() as patch:
            patch.setattr(delta, "extension", extension)
            image = old.clone()
            frame = encode(new.clone(), image, width)
            assert torch.equal(image, new)
            frames.append(Frame(frame.head, frame.payload.clone()))
    for frame in frames:
        assert torch.equal(frame.head, frames[0].head) and torch.equal(frame.payload, frames[0].payload)
        for extension in {delta.extension, None}:
            with monkeypatch.context() as patch:
                patch.setattr(delta, "extension", extension)
                target = torch.full_like(old, 0xA5)
                apply(frame, old, target, width)
                assert torch.equal(target, new)
    return frames


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    units=st.one_of(st.sampled_from(LENGTHS), st.integers(1, 5000)),
    width=st.sampled_from([2, 4]),
    fraction=st.sampled_from([0.0, 1e-4, 0.01, 0.06, 0.07, 0.5, 0.9, 0.97, 1.0]),
)
def test_any_change_of_any_length(seed: int, units: int, width: int, fraction: float) -> None:
    """Promise: bit-exact, and never more than full."""
    old, new = images(seed, units, width, fraction)
    with pytest.MonkeyPatch.context() as patch:
        frame = both_ways(patch, old, new, width)[0]
    kind, changed = frame.head.tolist()
    assert changed == int((old.view(units, width) != new.view(units, width)).any(1).sum())
    assert frame.payload.numel() == payload_bytes(kind, changed, units, width) <= units * width


@pytest.mark.parametrize("width", [2, 4])
def test_the_smallest_kind_is_taken(width: int) -> None:
    """No change, few, many and all: each has the kind with the smallest payload."""
    kinds = {}
    for fraction in (0.0, 0.01, 0.3, 1.0):
        old, new = images(1, 2 * BLOCK, width, fraction)
        frame = encode(new, old.clone(), width)
        kinds[fraction] = int(frame.head[0])
    assert kinds == {0.0: OFFSETS, 0.01: OFFSETS, 0.3: MASK, 1.0: FULL}
    assert payload_bytes(OFFSETS, 0, 2 * BLOCK, width) == 8  # of an unchanged chunk


@pytest.mark.parametrize("extension", [delta.extension, None], ids=["extension", "torch"])
@pytest.mark.parametrize("fraction", [0.01, 0.3])
def test_what_no_sender_makes_is_refused(
    extension: object, fraction: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is written outside the chunk, whatever a network or memory did to a frame."""
    monkeypatch.setattr(delta, "extension", extension)
    units = 1000
    old, new = images(2, units, 2, fraction)
    frame = encode(new, old.clone(), 2)
    changed = int(frame.head[1])
    end = -(-changed * 2 // 4) * 4
    for place, value in [
        (end, frame.payload[end] ^ 1),
        (-1, 0xFF),
    ]:  # another count or bit, then a place beyond the end
        bad = frame.payload.clone()
        bad[place] = value
        with pytest.raises(FrameWrong, match="not as many places inside it"):
            apply(Frame(frame.head, bad), old, torch.empty_like(old), 2)
    for head in ((3, 1), (MASK, units + 1), (OFFSETS, -1)):
        with pytest.raises(FrameWrong, match="run the same version everywhere"):
            payload_bytes(*head, units, 2)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    units=st.sampled_from([*LENGTHS, 9 * BLOCK]),
    width=st.sampled_from([2, 4]),
    fraction=st.sampled_from([0.0, 2e-5, 1e-3, 0.01, 0.06, 0.5, 1.0]),
)
def test_packed_changes_are_the_same_changes(seed: int, units: int, width: int, fraction: float) -> None:
    """Bit-exact, smaller or as it was, and of the size that its head says."""
    old, new = images(seed, units, width, fraction)
    plain = encode(new.clone(), old.clone(), width)
    frame = pack(Frame(plain.head, plain.payload.clone()), old, new, width)
    target = torch.full_like(old, 0xA5)
    apply(frame, old, target, width)
    assert torch.equal(target, new)
    kind, changed = frame.head.tolist()
    assert frame.payload.numel() == payload_bytes(kind, changed, units, width)
    assert frame is not plain and (kind & 0xFF) in (FULL, MASK, OFFSETS, PACKED)
    if kind & 0xFF == PACKED:
        assert frame.payload.numel() < plain.payload.numel()
    elif units > 2 * BLOCK and width == 2 and 1e-3 <= fraction <= 0.01:
        pytest.fail("thousands of changes were not packed")


@pytest.mark.parametrize(("rate", "share"), [(1e-4, 0.6), (1e-6, 0.4)])
def test_a_step_of_float32_weights_is_packed(rate: float, share: float) -> None:
    """All of them change, each by little."""
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(BLOCK, generator=generator) * 0.05
    after = before + rate * torch.randn(BLOCK, generator=generator).clamp(-1, 1)
    after[7], after[8] = float("nan"), -0.0
    old, new = before.view(torch.uint8), after.view(torch.uint8)
    frame = pack(encode(new.clone(), old.clone(), 4), old, new, 4)
    assert int(frame.head[0]) & 0xFF == PACKED and len(frame.payload) < share * len(new)
    target = torch.empty_like(old)
    apply(frame, old, target, 4)
    assert torch.equal(target, new)
    with pytest.raises(FrameWrong, match="cannot be unpacked"):
        apply(Frame(frame.head, frame.payload[: len(frame.payload) // 2]), old, target, 4)


def test_packed_changes_that_no_sender_makes_are_refused() -> None:
    """No place behind the chunk's end, no bytes without end, no size above the chunk's."""
    units = 4 * BLOCK
    old, new = images(3, units, 2, 0.01)
    head, payload = pack(encode(new.clone(), old.clone(), 2), old, new, 2)
    changed = int(head[1])
    assert int(head[0]) & 0xFF == PACKED
    with pytest.raises(FrameWrong, match="changes behind its end"):
        apply(Frame(head, payload), old[: 2 * BLOCK], torch.empty(2 * BLOCK, dtype=torch.uint8), 2)
    for bad in (payload.flip(0), payload[: len(payload) // 2], torch.zeros(9, dtype=torch.uint8)):
        with pytest.raises(FrameWrong, match="cannot be unpacked"):
            apply(Frame(head, bad), old, torch.empty_like(old), 2)
    for wrong in ((PACKED | 2 * units << 8, changed), (PACKED | 99 << 8, 0), (PACKED | -1 << 8, 5)):
        with pytest.raises(FrameWrong, match="run the same version everywhere"):
            payload_bytes(*wrong, units, 2)


def test_units_of_a_mixed_layout() -> None:
    """A chunk may then end inside a float32 element: halves of it are units like any other."""
    assert unit_bytes(layout([("a", (3,), "float32"), ("b", (2,), "float32")], 0, 0)) == 4
    assert unit_bytes(layout([("a", (3,), "bfloat16"), ("b", (2,), "float32")], 0, 0)) == 2


def test_the_image_of_a_publication() -> None:
    """An image is a base only for who has that very id, only when it is of one publication, and not when an
    anchor is due."""
    image, held = Image(torch.empty(1000, dtype=torch.uint8), 2, full_every=3), None
    weights, bases = torch.zeros(1000, dtype=torch.uint8), []
    for weight_id in range(7):
        base = image.begin(held)
        bases.append(base)
        for first in (0, 600):
            bucket = weights[first : first + (600 if not first else 400)].clone()
            frame = image.take(first, bucket, base is not None)
            assert (frame is not None) == (base is not None)
        fraction = image.complete(weight_id)
        assert fraction == (None if weight_id == 0 else 1 / 500)
        weights[2 * weight_id] += 1
        held = weight_id
    assert bases == [None, 0, 1, None, 3, 4, None]
    assert image.begin(5) is None, "whoever has another id gets all"
    image.complete(7)
    assert image.begin(7) == 7
    assert image.begin(7) is None, "the one before was broken off"
