"""Lanes: a publication as several byte ranges of the canonical layout, each a stream with a manifest of its
own.

A lane's manifest lists flat parts of tensors, so whatever moves and checks streams need not know of lanes. A
border may cut a tensor between two of its 32-bit words; the sums of its parts add up. Used by
trainer/canonical/gather.py, trainer/publishing/ and weights/lane_slots.py.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.weights.kernels.sums import add_sums, shifted
from laminar_hpc.weights.manifest import ITEM_BYTES, Manifest, TensorEntry
from laminar_hpc.weights.stream import TensorSpan, chunks

_WORD = 4
_SNAP = 8  # a border moves by at most one part in so many of a lane


@dataclass(frozen=True)
class Lane:
    """Bytes [begin, end) of the canonical layout leave trainer rank `sender`."""

    sender: int
    begin: int
    end: int


def borders(whole: Manifest, lanes: int, preferred: Sequence[int] = ()) -> list[int]:
    """lanes + 1 places in bytes that divide the layout evenly: at one of `preferred` where that is near, else
    between two words.

    Raises LaminarError when there is too little for so many lanes.
    """
    size, places = whole.data_bytes, [0]
    for number in range(1, lanes):
        even = size * number // lanes
        near = [place for place in preferred if abs(place - even) * _SNAP * lanes <= size]
        start = next(entry.offset for entry in whole.tensors if entry.offset + entry.nbytes > even)
        on_a_word = start + (even - start) // _WORD * _WORD
        distances = {abs(place - even): place for place in reversed(near)}
        places.append(distances[min(distances)] if distances else on_a_word)
    places.append(size)
    if any(begin >= end for begin, end in itertools.pairwise(places)):
        raise LaminarError(
            f"relay.lanes={lanes}: the model's {size} bytes do not make up so many lanes; lower it"
        )
    return places


def lane_manifest(whole: Manifest, begin: int, end: int) -> Manifest:
    """Of bytes [begin, end): the parts of tensors in it, flat, and `whole` with them. `whole` itself if that
    is all of it."""
    if (begin, end) == (0, whole.data_bytes):
        return whole
    parts = []
    for entry in whole.tensors:
        first, last = max(begin, entry.offset), min(end, entry.offset + entry.nbytes)
        if first < last:
            items = (last - first) // ITEM_BYTES[entry.dtype]
            parts.append(TensorEntry(entry.name, [items], entry.dtype, first - begin, last - first))
    return Manifest(whole.weight_id, whole.step, whole.dtype, parts, begin, whole)


def lane_chunks(lane: Manifest, size: int) -> list[list[TensorSpan]]:
    """What lies in each chunk of a lane, as stream.chunks; tensors and items are numbered as in the whole."""
    cut = chunks(lane, size)
    if lane.whole is None:
        return cut
    number, entry = next((n, e) for n, e in enumerate(lane.whole.tensors) if e.offset + e.nbytes > lane.begin)
    before = (lane.begin - entry.offset) // ITEM_BYTES[entry.dtype]
    return [[_moved(span, number, 0 if span.tensor else before) for span in spans] for spans in cut]


def _moved(span: TensorSpan, tensors: int, items: int) -> TensorSpan:
    return TensorSpan(span.tensor + tensors, span.first + items, span.last + items, span.offset)


def lane_sums(lane: Manifest, sums: dict[int, tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts' sums, of which each counts its own words from 0, from what they add to those of their
    tensors (by number in the whole)."""
    return [
        shifted(both, -words)
        for both, words in zip((sums[number] for number in sorted(sums)), _words_before(lane), strict=True)
    ]


def join(lanes: Sequence[Manifest]) -> Manifest:
    """The whole manifest with its sums, from those of all lanes."""
    whole = lanes[0].whole
    assert whole is not None
    by_name: dict[str, list[tuple[int, int]]] = {}
    for lane in lanes:
        for entry, words in zip(lane.tensors, _words_before(lane), strict=True):
            by_name.setdefault(entry.name, []).append(shifted((entry.sum_words, entry.sum_indexed), words))
    for entry in whole.tensors:
        entry.sum_words, entry.sum_indexed = add_sums(by_name.get(entry.name, []))
    return whole


def _words_before(lane: Manifest) -> list[int]:
    """Of each part, the words of its tensor that lie before the lane: only the first one's can."""
    if lane.whole is None:
        return [0] * len(lane.tensors)
    offsets = {entry.name: entry.offset for entry in lane.whole.tensors}
    return [(lane.begin + entry.offset - offsets[entry.name]) // _WORD for entry in lane.tensors]
