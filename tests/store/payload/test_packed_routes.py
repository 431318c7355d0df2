"""Routes behind a response in its payload file: docs/payload_files.md."""

from pathlib import Path

import numpy as np
import pytest

from helpers.made import Made
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.routing import RouteShape
from laminar_hpc.line.messages.data import ResponsePlace
from laminar_hpc.store.payload.layout import pack, packed_digest
from laminar_hpc.store.payload.reader import read, read_routes
from laminar_hpc.store.payload.routes import pack_routes, packed_bytes
from laminar_hpc.store.payload.writer import FOLDER, PayloadWriter

BYTES = RouteShape((0, 1, 2), 3, 256)
WORDS = RouteShape((0, 1, 2), 3, 257)


def drawn(shape: RouteShape, tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, shape.experts, (tokens, 3, 3)).astype(shape.dtype)


def written(folder: Path, routes: dict[int, bytes]) -> dict[int, ResponsePlace]:
    """A response of three tokens of each trajectory, with these bytes behind it."""
    folder.mkdir(exist_ok=True)
    writer = PayloadWriter(folder, "rollout0")
    found = {
        i: writer.append(pack(Made(i, 0, [1], [1, 2, 3], [-1.0] * 3).response), of)
        for i, of in routes.items()
    }
    places = {i: future.result(10) for i, future in found.items()}
    writer.close()
    return places


@pytest.mark.parametrize("shape", [BYTES, WORDS])
def test_routes_are_read_as_they_were_written(tmp_path: Path, shape: RouteShape) -> None:
    """Of several responses at once, in any order; responses and their places are what they are without."""
    rows = {i: drawn(shape, 5 + i, i) for i in range(4)}
    places = written(tmp_path, {i: pack_routes(i, 0, of) for i, of in rows.items()})
    wanted = [(i, places[i], 5 + i) for i in (2, 0, 3, 1)]
    for (i, _, tokens), found in zip(wanted, read_routes(tmp_path, wanted, shape), strict=True):
        assert found.dtype == shape.dtype and np.array_equal(found, rows[i])
        assert packed_bytes(tokens, shape) == 48 + -(-found.nbytes // 4) * 4
    plain = pack(Made(2, 0, [1], [1, 2, 3], [-1.0] * 3).response)
    [response] = read(tmp_path, [(2, places[2])])
    assert response.digest == packed_digest(plain) and places[2].size == len(plain)
    assert response.routed_experts is None, "nobody has asked for them"


def test_other_routes_are_refused_in_one_line(tmp_path: Path) -> None:
    """With the trajectory and the file: none, those of another, of other tokens or another model, or changed
    ones."""
    good = pack_routes(1, 0, drawn(BYTES, 5))
    changed = bytearray(good)
    changed[60] ^= 1
    cases = {
        bytes(len(good)): "there are no routes",
        pack_routes(2, 0, drawn(BYTES, 5)): "there are routes of trajectory 2",
        pack_routes(1, 0, drawn(BYTES, 6)): r"\[6, 3, 3\] in 1 bytes each, and \[5, 3, 3\] in 1 are due",
        pack_routes(1, 0, drawn(WORDS, 5)): r"\[5, 3, 3\] in 2 bytes each, and \[5, 3, 3\] in 1 are due",
        bytes(changed): "not the digest that they were generated with",
        b"": "are not there",
    }
    for number, (routes, says) in enumerate(cases.items()):
        place = written(tmp_path / str(number), {1: routes})[1]
        with pytest.raises(LaminarError, match=f"the routes of trajectory 1 are not in .*{says}") as error:
            read_routes(tmp_path / str(number), [(1, place, 5)], BYTES, late=0.0)
        assert "\n" not in str(error.value) and str(tmp_path / str(number) / FOLDER) in str(error.value)
