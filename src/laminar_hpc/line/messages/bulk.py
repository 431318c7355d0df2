"""What rollouts and the bulk door of the controller's side say to each other (line/bulk_server.py), each with
a body of bytes behind it. Nothing is numbered: each request can be made again, and bytes have their offset.
"""

from typing import Annotated

import msgspec

from laminar_hpc.line.address import ControllerAddress

Offset = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Size = Annotated[int, msgspec.Meta(ge=0, le=4 << 20)]
PROCESS = r"\A(rollout|engine|relay)[0-9]{1,9}\Z"  # as its log and its trace are called
ProcessName = Annotated[str, msgspec.Meta(pattern=PROCESS)]
LOG_BYTES_MAX = 1 << 20


class BulkMessage(msgspec.Struct, tag=True, omit_defaults=True):
    """Base of all of them."""


class AppendBytes(BulkMessage):
    """The body is to stand at `offset` of a payload file. Bytes that are there are not written again."""

    file: str
    offset: Offset


class AskStored(BulkMessage):
    """How much of a payload file is there? `number` comes back with the answer."""

    file: str
    number: int


class ReadBytes(BulkMessage):
    """At most `size` bytes from `offset` of a payload file, or with `model` of a file of the model."""

    file: str
    offset: Offset
    size: Size
    model: bool = False


class AskController(BulkMessage):
    """Where is the controller? `rollout`: who asks again and again, on a machine that has joined, and gives
    logs of that machine away (SendLog)."""

    rollout: ProcessName = ""


class AskToJoin(BulkMessage):
    """A machine wants to add rollouts; `version` is its laminar_hpc."""

    version: str


class AskLog(BulkMessage):
    """The end of the log of a process on a machine that has joined, at most `size` bytes?"""

    process: ProcessName
    size: Size


class LogSent(BulkMessage):
    """The body has what SendLog `number` asked for. `trouble`: why it has not."""

    number: int
    trouble: str = ""


class AppendTrace(BulkMessage):
    """The body is lines of the trace of a rollout or relay on a machine that has joined, from `offset` on."""

    process: ProcessName
    offset: Offset


class Stored(BulkMessage):
    """`size` bytes of the file are on the disk. `number`: of the AskStored that this answers. `missing`: what
    came does not begin where the file ends. `trouble`: why the rest is not there yet."""

    file: str
    size: int
    number: int = 0
    missing: bool = False
    trouble: str = ""


class BytesRead(BulkMessage):
    """The body has them; fewer than were asked for where the file ends."""


class ControllerIs(BulkMessage):
    """Where the controller is, with the keys to talk to it."""

    address: ControllerAddress


class JoinGranted(BulkMessage):
    """What a machine needs to add rollouts. `config`: the run's configuration as YAML; `model`:
    OWNER/NAME@COMMIT of a model of the hub, else "", and `model_files` are those of its folder, with their
    sizes in bytes; `slots`: as in Welcome; `relays`: machines (Hello.machine) that have some, None until the
    run's trainers have joined; `machine`: a number that no other machine of the run has had."""

    config: str
    address: ControllerAddress
    model: str
    model_files: dict[str, int]
    slots: str
    relays: list[str] | None
    machine: int


class SendLog(BulkMessage):
    """To a rollout on a machine that has joined: somebody asks for the end of a log there."""

    process: ProcessName
    size: Size
    number: int


class LogRead(BulkMessage):
    """The body has the end of the log."""


class TraceStored(BulkMessage):
    """`size` bytes of the trace are there."""

    process: ProcessName
    size: int


class BulkRefused(BulkMessage):
    """It is not done, and asking again is of no use."""

    reason: str


Request = AppendBytes | AskStored | ReadBytes | AskController | AskToJoin | AskLog | LogSent | AppendTrace
Reply = Stored | BytesRead | ControllerIs | JoinGranted | SendLog | LogRead | TraceStored | BulkRefused

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def encode_bulk(message: BulkMessage) -> bytes:
    return _encoder.encode(message)


def decode_request(frame: bytes) -> Request:
    """Raises msgspec.DecodeError on anything else, and runs nothing."""
    return _decode(_requests, frame)  # type: ignore[return-value]


def decode_reply(frame: bytes) -> Reply:
    """Raises msgspec.DecodeError on anything else, and runs nothing."""
    return _decode(_replies, frame)  # type: ignore[return-value]


def _decode(decoder: msgspec.msgpack.Decoder, frame: bytes) -> BulkMessage:
    try:
        return decoder.decode(frame)
    except (RecursionError, UnicodeDecodeError) as error:
        raise msgspec.DecodeError(str(error)) from None
