"""Responses from payload files, by their places: many at once by several threads, each checked against its
digest.

Called by trainer ranks for what they train, by rollouts that score for others, by reports, audit and archive.
"""

import itertools
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.routing import RouteShape
from laminar_hpc.line.messages.data import ResponsePlace
from laminar_hpc.store.payload.layout import DamagedResponse, Response, Routes, unpack
from laminar_hpc.store.payload.routes import packed_bytes, unpack_routes
from laminar_hpc.store.payload.writer import FOLDER

T = TypeVar("T")
_NAME = re.compile(r"[a-z]+-?\d+_[0-9a-f]{8}\.\d{4,}")
_THREADS = 4
_AT_ONCE_BYTES = 64 << 20  # per thread and turn
# a network file system may show another machine's file late, though it is on its disk
LATE_SECONDS = 10.0


def is_file_name(name: str) -> bool:
    """Whether a rollout names a payload file so: it leads nowhere else."""
    return bool(_NAME.fullmatch(name))


def is_sound(place: ResponsePlace | None) -> bool:
    """Whether this can be a place at all: a peer may say anything."""
    return place is not None and is_file_name(place.file) and place.offset >= 0 and place.size > 0


def read(
    run_dir: Path, wanted: Sequence[tuple[int, ResponsePlace]], late: float = LATE_SECONDS
) -> list[Response]:
    """The responses of these trajectories, in this order: views of one buffer, which is as large as they are.
    Raises LaminarError, with the trajectory and the file, where one is not there, also after `late` seconds,
    or not as it was generated."""

    def unpacked(into: np.ndarray, i: int) -> Response:
        return unpack(into, due=wanted[i][0])

    return _read_all(
        run_dir, wanted, late, unpacked, "the response of trajectory {} is not in {} as it was generated"
    )


def read_routes(
    run_dir: Path,
    wanted: Sequence[tuple[int, ResponsePlace, int]],
    shape: RouteShape,
    late: float = LATE_SECONDS,
) -> list[Routes]:
    """The routes behind the responses of these trajectories, at their places, each of so many tokens, as
    `read`. Raises LaminarError as `read`, and where there are no routes or other ones than are due."""
    places = [
        (i, ResponsePlace(place.file, place.offset + place.size, packed_bytes(tokens, shape)))
        for i, place, tokens in wanted
    ]

    def unpacked(into: np.ndarray, i: int) -> Routes:
        return unpack_routes(into, wanted[i][0], wanted[i][2], shape)

    return _read_all(
        run_dir, places, late, unpacked, "the routes of trajectory {} are not in {} as they were generated"
    )


def _read_all(
    run_dir: Path,
    wanted: Sequence[tuple[int, ResponsePlace]],
    late: float,
    unpacked: Callable[[np.ndarray, int], T],
    what: str,
) -> list[T]:
    """`unpacked` of the bytes at each place. It is called in threads; `what` begins an error, with
    places for the trajectory and the file."""
    starts = np.cumsum([0, *(place.size for _, place in wanted)])
    buffer = np.empty(int(starts[-1]), np.uint8)
    parts = [buffer[a:b] for a, b in itertools.pairwise(starts)]
    deadline = time.monotonic() + late

    def read_one(i: int) -> T:
        trajectory_id, place = wanted[i]
        path = run_dir / FOLDER / place.file
        try:
            _fill_by(path, place, parts[i], deadline)
            return unpacked(parts[i], i)
        except (OSError, DamagedResponse) as error:
            why = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
            raise LaminarError(
                f"{what.format(trajectory_id, path)} ({why}): all roles must see one run_dir; look at the "
                "files with laminar audit RUN_DIR"
            ) from None

    shares = _shares(wanted)
    found = dict[int, T]()
    with ThreadPoolExecutor(min(_THREADS, max(1, len(shares)))) as pool:
        for of_share in pool.map(lambda members: [(i, read_one(i)) for i in members], shares):
            found.update(of_share)
    return [found[i] for i in range(len(wanted))]


def _shares(wanted: Sequence[tuple[int, ResponsePlace]]) -> list[list[int]]:
    """Indices in the order of the files, in parts of some megabytes."""
    order = sorted(range(len(wanted)), key=lambda i: (wanted[i][1].file, wanted[i][1].offset))
    shares, size = list[list[int]](), _AT_ONCE_BYTES
    for i in order:
        if size >= _AT_ONCE_BYTES:
            shares.append([])
            size = 0
        shares[-1].append(i)
        size += wanted[i][1].size
    return shares


def _fill_by(path: Path, place: ResponsePlace, into: np.ndarray, deadline: float) -> None:
    if not is_sound(place):
        raise DamagedResponse("no rollout names a file so")
    while not _fill(path, place.offset, into):
        if time.monotonic() > deadline:
            raise DamagedResponse(f"bytes {place.offset} to {place.offset + place.size} are not there")
        time.sleep(0.1)


def _fill(path: Path, offset: int, into: np.ndarray) -> bool:
    """Whether all bytes were there. Opens the file anew: only so a network file system looks again."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        rest = into.data
        while rest and (count := os.preadv(file, [rest], offset)):
            rest, offset = rest[count:], offset + count
        return not rest
    finally:
        os.close(file)
