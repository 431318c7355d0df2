"""What crosses the engine port: one request, one reply, as msgspec structs. Spoken by `port.EnginePort` and `port_client.PortClient`.

A new operation is a request struct and a reply struct here, and one handler in `port.OPERATIONS`.
"""

import msgspec

SOCKET_VARIABLE = "LAMINAR_ENGINE_PORT"  # path of the Unix sockets, without the tensor-parallel rank that each ends with


class Request(msgspec.Struct, tag=True):
    """Base of the requests."""


class Reply(msgspec.Struct, tag=True):
    """Base of the replies."""


class Ping(Request):
    """Is the scheduler's loop alive?"""


class Alive(Reply):
    pid: int


class Layout(Request):
    """Names, shapes, dtypes and places of the live parameters of this rank."""


class TensorLayout(msgspec.Struct):
    """A live shard of a tensor under its Hugging Face name: elements [start, start + length) along `dim` of the whole, of `shape`."""

    name: str
    shape: list[int]
    dtype: str  # as torch names it, without "torch."
    dim: int
    start: int
    length: int


class LiveLayout(Reply):
    tensors: list[TensorLayout]


class Sums(Request):
    """Check sums of the live parameters of this rank."""


class LiveSums(Reply):
    """Hugging Face name -> what this rank adds to (sum_words, sum_indexed) of the whole tensor, see weights/sums.py."""

    sums: dict[str, tuple[int, int]]


class Load(Request):
    """The weights of a slot into the live parameters of this rank, while no request runs, or all are paused; answered with LiveSums, taken
    after the copy."""

    directory: str
    paused: bool = False


class Refused(Reply):
    """The operation failed; the engine goes on."""

    text: str


AnyRequest = Ping | Layout | Sums | Load
AnyReply = Alive | LiveLayout | LiveSums | Refused

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(AnyRequest)
_reply_decoder = msgspec.msgpack.Decoder(AnyReply)


def socket_path(base: str, rank: int) -> str:
    """Where the scheduler of a tensor-parallel rank listens."""
    return f"{base}{rank}"


def encode(message: Request | Reply) -> bytes:
    return _encoder.encode(message)


def decode_request(frame: bytes) -> AnyRequest:
    """Raises msgspec.ValidationError or msgspec.DecodeError on anything else."""
    return _request_decoder.decode(frame)


def decode_reply(frame: bytes) -> AnyReply:
    """Raises msgspec.ValidationError or msgspec.DecodeError on anything else."""
    return _reply_decoder.decode(frame)
