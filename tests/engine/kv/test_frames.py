"""The header's decoder: what was encoded comes back, and no bytes make it do anything but refuse."""

import os
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.kv.frames import (
    PREFIX,
    PartHeader,
    Shape,
    _sums,
    check_fits,
    decode_header,
    encode_header,
    model_fingerprint,
)

SHAPE = Shape("bfloat16", 28, 4, 128, 1)
HEADER = PartHeader.of("f" * 64, 7, SHAPE, [1, 2, 151_000], 1 << 19)


def framed(body: bytes) -> bytes:
    return PREFIX.pack(b"LMNRKV01", len(body), 0, *_sums(body)) + body


def survives(data: bytes) -> None:
    """Decodes to a header that can be encoded again, or is refused in one line."""
    try:
        encode_header(decode_header(data))
    except KvRefused as error:
        assert "\n" not in str(error)


def test_a_header_comes_back():
    """Promise: the decoded header is the encoded one, and what follows it is left alone."""
    decoded = decode_header(encode_header(HEADER) + b"more")
    assert decoded == HEADER and decoded.ids() == [1, 2, 151_000] and decoded.tokens == 3


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_any_bytes_are_survived(data):
    """Promise: any bytes, with and without a valid prefix and checksum, are refused or are a header."""
    survives(data)
    survives(framed(data))


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 255), st.booleans())
def test_a_changed_byte_is_survived_and_noticed(place, change, resum):
    """Promise: a byte that changed anywhere is refused; with the sums made anew it is refused or is a header
    within all limits."""
    data = bytearray(encode_header(HEADER))
    data[place % len(data)] ^= change
    if resum:
        survives(framed(bytes(data[PREFIX.size :])))
    else:
        with pytest.raises(KvRefused):
            decode_header(data)


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.integers(-(2**63), 2**63) | st.text() | st.binary(),
        lambda x: st.lists(x) | st.dictionaries(st.text(), x),
    )
)
def test_any_message_is_survived(value):
    """Promise: well-formed msgpack of another type is refused."""
    survives(framed(msgspec.msgpack.encode(value)))
    fields = {
        "fingerprint": value,
        "weight_id": value,
        "shape": [value] * 5,
        "chunk_bytes": value,
        "token_ids": value,
    }
    survives(framed(msgspec.msgpack.encode(fields)))


def test_what_does_not_fit_is_refused():
    """Promise: another model, other weights and another pool are each named."""
    right = {"fingerprint": "f" * 64, "weight_id": 7, "shape": SHAPE}
    check_fits(HEADER, **right)
    for name, value, word in (
        ("fingerprint", "e" * 64, "model"),
        ("weight_id", 8, "weight id"),
        ("shape", Shape("bfloat16", 28, 4, 128, 2), "pool"),
    ):
        with pytest.raises(KvRefused, match=word):
            check_fits(HEADER, **{**right, name: value})
    config = {"model_type": "qwen2", "hidden_size": 64, "torch_dtype": "float32"}
    assert (
        model_fingerprint(config)
        == model_fingerprint({**config, "torch_dtype": "x"})
        != model_fingerprint({**config, "hidden_size": 65})
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_minutes_of_random_bytes():
    """Promise: ten minutes of mutated headers: none crashes, each is refused or is a header."""
    import random

    seed = int.from_bytes(os.urandom(4), "little")
    draw, end, count = random.Random(seed), time.monotonic() + 600, 0
    whole = encode_header(HEADER)
    while time.monotonic() < end:
        data = bytearray(whole)
        for _ in range(draw.randint(1, 8)):
            where = draw.randrange(PREFIX.size if draw.random() < 0.2 else 0, len(data) + 1)
            data[where : where + draw.choice((0, 1, 1, 4))] = draw.randbytes(draw.choice((0, 1, 1, 4, 9)))
        survives(bytes(data))
        survives(framed(bytes(data[PREFIX.size :])))
        count += 2
    assert count > 10_000, f"seed {seed}"
