"""Payload files of a rollout with `cluster.storage=stream`: written here as ever (writer.py), into a folder
of its own, and sent from there to the controller's side (receiver.py) over the bulk door.

    append(record) -> writer -> the thread sends -> stored there -> the future has the record's place

So what the rollout says of a response goes out when its bytes are on the run's storage, as with a shared
run directory. A cut line goes on behind the last byte that was told to be stored. What waits lies on the disk
here; one chunk is in memory, and one window in the socket. A file that is all there is removed here.
"""

import logging
import os
import queue
import shutil
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.bulk_client import BulkClient
from laminar_hpc.line.dealer import connect
from laminar_hpc.line.join_key import follow_controller, has_joined, key_of
from laminar_hpc.line.messages.bulk import (
    AppendBytes,
    AskController,
    AskStored,
    BulkRefused,
    ControllerIs,
    ReadBytes,
    Request,
    SendLog,
    Stored,
    TraceStored,
    decode_reply,
    encode_bulk,
)
from laminar_hpc.line.messages.data import ResponsePlace
from laminar_hpc.store.joined_files import OwnFiles
from laminar_hpc.store.payload.layout import DamagedResponse, Response, unpack
from laminar_hpc.store.payload.upload_state import UploadPiece, UploadState
from laminar_hpc.store.payload.writer import FOLDER, PayloadWriter

log = logging.getLogger(__name__)
_ASK_SECONDS = 2.0  # of silence, with bytes under way, before asking what has arrived
_ANEW_SECONDS = 8.0  # of silence behind that: the connection is made anew
_TROUBLE_SECONDS = 1.0  # until a disk that was full is asked again
_CONTROLLER_SECONDS = 2.0  # between two questions where the controller is
_CLOSE_SECONDS = 5.0  # for what is under way
_TRACE_SECONDS = 1.0  # of these, for the end of the trace
_READ_SECONDS = 30.0
_READ_BYTES = 1 << 20


class PayloadUploader:
    """As PayloadWriter. `folder`: of this process alone, with room for what waits; removed with `close`.
    `run_dir` has the key. `patience`: seconds without a byte stored, after which what waits fails."""

    def __init__(self, run_dir: Path, folder: Path, name: str, patience: float) -> None:
        self._run_dir = run_dir
        self._folder = folder
        self._patience = patience
        self._writer = PayloadWriter(folder, name, patience)
        self._name = name
        self._identity = f"{name}_{os.urandom(8).hex()}".encode()
        self._own = OwnFiles(run_dir, name) if has_joined(run_dir) else None
        self._key = key_of(run_dir)
        self._context = zmq.Context()
        self._dealer = connect(self._context, self._identity, self._key)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake)
        self._written: queue.SimpleQueue[UploadPiece] = queue.SimpleQueue()
        self._state = UploadState()
        self._reading = ""  # the file that is being sent
        self._file = -1
        self._asked = self._number = 0  # the question that is open; the last one
        self._must_ask = False
        self._asked_at = self._held_until = self._ask_controller_at = 0.0
        now = time.monotonic()
        self._heard = self._connected = self._grown = now
        self._error: Exception | None = None
        self._close_by: float | None = None
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    # ---- for the role --------------------------------------------------------------------------------------

    def append(self, record: bytes, behind: bytes = b"") -> "Future[ResponsePlace]":
        """The future gets the record's place once it is stored at the controller's side, with what lies right
        behind it; or the error of this disk, or of the line."""
        future: Future[ResponsePlace] = Future()

        def written(done: "Future[ResponsePlace]") -> None:
            if (error := done.exception()) is not None:
                future.set_exception(error)
                return
            place = done.result()
            self._written.put(UploadPiece(place, place.offset + place.size + len(behind), future))
            os.eventfd_write(self._wake, 1)

        self._writer.append(record, behind).add_done_callback(written)
        return future

    def read(self, wanted: Sequence[tuple[int, ResponsePlace]]) -> list[Response]:
        """Responses of this run, whoever wrote them, from the controller's side; as reader.read."""
        client = BulkClient(self._key, _READ_SECONDS)
        try:
            return [_response(client, trajectory_id, place) for trajectory_id, place in wanted]
        finally:
            client.close()

    def close(self) -> None:
        """Writes and sends what was appended before, if that takes no longer than some seconds."""
        self._writer.close()
        self._close_by = time.monotonic() + _CLOSE_SECONDS
        os.eventfd_write(self._wake, 1)
        self._thread.join(2 * _CLOSE_SECONDS)
        self._context.destroy(0)
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_over():
            try:
                self._turn()
            except Exception as error:  # whoever waits for a place would wait for ever
                self._fail(error if isinstance(error, LaminarError | OSError) else LaminarError(repr(error)))
        self._dealer.close(0)
        if self._file >= 0:
            os.close(self._file)

    def _is_over(self) -> bool:
        if self._close_by is None:
            return False
        left = self._close_by - time.monotonic()
        has_trace = (
            self._own is not None and left > _CLOSE_SECONDS - _TRACE_SECONDS and not self._own.all_sent
        )
        return left < 0 or not (has_trace or self._state.waits or not self._written.empty())

    def _turn(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._dealer, zmq.POLLIN)
        poller.poll(100 if self._state.waits or self._close_by else 500)
        now = time.monotonic()
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while not self._written.empty():
            self._add(self._written.get(), now)
        self._read_replies(now)
        self._look(now)
        while not (self._asked or self._must_ask or self._is_held(now)) and self._send_chunk():
            pass

    def _add(self, piece: UploadPiece, now: float) -> None:
        if self._error is not None:
            piece.future.set_exception(self._error)
            return
        if not self._state.waits:
            self._grown = now
            self._heard = now  # silence counts from here on
        self._state.add(piece)

    def _read_replies(self, now: float) -> None:
        while True:
            try:
                frames = self._dealer.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._heard = now
            try:
                reply = decode_reply(frames[0])
            except msgspec.DecodeError as error:
                raise LaminarError(f"an answer of {self._key.place} was refused: {error}") from None
            if isinstance(reply, Stored):
                self._stored(reply, now)
            elif isinstance(reply, ControllerIs):
                with suppress(OSError):  # of this machine's disk: it is told again
                    follow_controller(self._run_dir, reply.address, self._key.host)
            elif isinstance(reply, TraceStored) and self._own is not None:
                self._own.stored(reply.process, reply.size)
            elif isinstance(reply, SendLog) and self._own is not None:
                self._put(*self._own.log(reply))
            elif isinstance(reply, BulkRefused):
                raise LaminarError(f"{self._key.place} refuses a response: {reply.reason}")

    def _stored(self, reply: Stored, now: float) -> None:
        answers = bool(self._asked) and reply.number == self._asked
        before = self._state.file, self._state.stored
        over = self._state.told(reply.file, reply.size, all_arrived=answers)
        if answers:
            self._asked = 0
        if over or (self._state.file, self._state.stored) != before:
            self._grown = now
        if reply.missing and not self._asked:
            self._must_ask = True
        if reply.trouble:
            level = logging.INFO if self._is_held(now) else logging.WARNING
            log.log(level, "responses wait: %s", reply.trouble)
            self._held_until = now + _TROUBLE_SECONDS
        for piece in over:
            piece.future.set_result(piece.place)

    def _over(self) -> None:
        """All of the file that was sent is there, as another one has its turn."""
        if self._reading:
            os.close(self._file)
            self._file = -1
            (self._folder / FOLDER / self._reading).unlink(missing_ok=True)
            self._reading = ""

    def _is_held(self, now: float) -> bool:
        return now < self._held_until

    def _look(self, now: float) -> None:
        """At the clock."""
        if self._own is not None and (now >= self._ask_controller_at or self._close_by):
            self._ask_controller_at = now + _CONTROLLER_SECONDS
            self._put(AskController(self._name))
            if (piece := self._own.trace(now)) is not None:
                self._put(*piece)
        if not self._state.waits:
            return
        if now - self._grown > self._patience:
            raise LaminarError(
                f"no byte of a response has reached {self._key.place} for {self._patience:.0f} s "
                "(cluster.join_timeout_seconds): is the line cut, or the disk of the run directory full?"
            )
        if now - max(self._heard, self._connected) > _ANEW_SECONDS:
            self._connect_anew(now)
        silent = now - max(self._heard, self._asked_at) > _ASK_SECONDS
        doubts = self._must_ask or (silent and (self._asked or self._state.under_way))
        if doubts and not self._is_held(now):
            self._ask(now)

    def _ask(self, now: float) -> None:
        """What has arrived. Until the answer nothing more is sent, so the number may be asked again."""
        if not self._asked:
            self._number += 1
            self._asked = self._number
        self._must_ask = False
        self._asked_at = now
        self._put(AskStored(self._state.file, self._asked))

    def _connect_anew(self, now: float) -> None:
        self._dealer.close(0)
        self._key = key_of(self._run_dir)  # another controller's, perhaps
        self._dealer = connect(self._context, self._identity, self._key)
        self._connected = now
        self._must_ask = True

    def _send_chunk(self) -> bool:
        """Whether one was sent."""
        if (chunk := self._state.next()) is None:
            return False
        if chunk.file != self._reading:
            self._over()
            self._file = os.open(self._folder / FOLDER / chunk.file, os.O_RDONLY)
            self._reading = chunk.file
        body = os.pread(self._file, chunk.size, chunk.offset)
        if len(body) < chunk.size:
            raise LaminarError(f"{self._folder / FOLDER / chunk.file} was cut by somebody else")
        if not self._put(AppendBytes(chunk.file, chunk.offset), body):
            return False
        self._state.advance(chunk)
        return True

    def _put(self, request: Request, body: bytes = b"") -> bool:
        """Whether the socket has taken it."""
        try:
            self._dealer.send_multipart([encode_bulk(request), body], zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _fail(self, error: Exception) -> None:
        """Nothing is stored any more; whoever waits hears why."""
        log.error("%s", error)
        self._error = self._error or error
        for piece in self._state.drop():
            piece.future.set_exception(self._error)


def _response(client: BulkClient, trajectory_id: int, place: ResponsePlace) -> Response:
    """Raises LaminarError for one that is not there as it was generated."""
    found = bytearray()
    while len(found) < place.size:
        size = min(_READ_BYTES, place.size - len(found))
        _, body = client.ask(ReadBytes(place.file, place.offset + len(found), size))
        if not body:
            break
        found += body
    try:
        return unpack(found, due=trajectory_id)
    except DamagedResponse as error:
        why = f"trajectory {trajectory_id} is not in {place.file} as it was generated ({error})"
        raise LaminarError(f"the response of {why}") from None
