"""What crosses the engine port: one request, one reply, as msgspec structs. Spoken by `port.EnginePort` and
`port_client.PortClient`.

A new operation is a request struct and a reply struct here, and one handler in `port.OPERATIONS`.
"""

import msgspec

# path of the Unix sockets, without the tensor-parallel rank that each ends with
SOCKET_VARIABLE = "LAMINAR_ENGINE_PORT"
DETERMINISTIC_VARIABLE = "LAMINAR_ENGINE_DETERMINISTIC"  # 1 with model.deterministic


class PortRequest(msgspec.Struct, tag=True):
    """Base of the requests."""


class PortReply(msgspec.Struct, tag=True):
    """Base of the replies."""


class PortPing(PortRequest):
    """Is the scheduler's loop alive?"""


class Alive(PortReply):
    pid: int


class GetLayout(PortRequest):
    """Names, shapes, dtypes and places of the live parameters of this rank."""


class TensorShard(msgspec.Struct):
    """A live shard of a tensor under its Hugging Face name: elements [start, start + length) along `dim` of
    the whole, of `shape`."""

    name: str
    shape: list[int]
    dtype: str  # as torch names it, without "torch."
    dim: int
    start: int
    length: int


class LiveLayout(PortReply):
    tensors: list[TensorShard]


class GetSums(PortRequest):
    """Check sums of the live parameters of this rank."""


class LiveSums(PortReply):
    """Hugging Face name -> what this rank adds to the tensor's sums; see weights/kernels/sums.py."""

    sums: dict[str, tuple[int, int]]


class LoadWeights(PortRequest):
    """The weights of a slot into the live parameters of this rank, while no request runs, or all are paused;
    answered with LiveSums, taken after the copy."""

    directory: str
    paused: bool = False


class LoadAdapter(PortRequest):
    """The adapter of a slot into a free place, to be named by its weight id; requests go on meanwhile."""

    directory: str
    weight_id: int


class LiveAdapter(PortReply):
    """What this rank holds of the adapter, under PEFT names, and what that adds to the tensors' sums."""

    tensors: list[TensorShard]
    sums: dict[str, tuple[int, int]]


class KvRequest(PortRequest):
    """Base of the requests of a move. Rank 0 is asked, and all tensor-parallel ranks do it (lockstep.py)."""

    move_id: str


class KvReserve(KvRequest):
    """Room for a request's KV of `tokens` tokens; answered with the address that its source sends to."""

    weight_id: int
    tokens: int
    host: str  # the destination's own address
    folder: str  # shared memory
    seconds: float  # after which the move is given up


class KvReserved(PortReply):
    """`address` is that of engine/kv/transfer.py's `of_all_ranks`."""

    address: str


class KvSend(KvRequest):
    """The KV of the full pages of a running request, to a reserved engine."""

    request_id: str
    address: str
    folder: str
    seconds: float


class KvDetach(KvRequest):
    """Ends the request with finish_reason "moved" and sends the rest of its KV."""

    request_id: str


class KvSendKept(KvRequest):
    """The KV of the longest prefix of `tokens` in the prefix cache, to a reserved engine."""

    tokens: list[int]
    namespace: str
    address: str
    folder: str
    seconds: float


class KvImport(KvRequest):
    """The destination takes the KV, of a prefix of `tokens`, into its prefix cache and holds it. `routes`: of
    these tokens, as in config/routing.py; empty where the engine returns none."""

    tokens: list[int]
    routes: bytes = b""


class KvEnd(KvRequest):
    """The move is over; what was held for it is let go. A move that is unknown is over."""


class UnloadAdapter(KvRequest):
    """No move, but like one done by all ranks in the same turn: a request of it is refused by all or none."""

    weight_id: int


class KvDone(PortReply):
    """`tokens`: whose KV was sent, or is held. `stalled`: seconds that the scheduler stood still for it."""

    tokens: int
    stalled: float = 0.0


class OperationRefused(PortReply):
    """The operation failed; the engine goes on."""

    text: str


AnyRequest = (
    PortPing
    | GetLayout
    | GetSums
    | LoadWeights
    | LoadAdapter
    | UnloadAdapter
    | KvReserve
    | KvSend
    | KvDetach
    | KvSendKept
    | KvImport
    | KvEnd
)
AnyReply = Alive | LiveLayout | LiveSums | LiveAdapter | KvReserved | KvDone | OperationRefused

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(AnyRequest)
_reply_decoder = msgspec.msgpack.Decoder(AnyReply)


def socket_path(base: str, rank: int) -> str:
    """Where the scheduler of a tensor-parallel rank listens."""
    return f"{base}{rank}"


def encode(message: PortRequest | PortReply) -> bytes:
    """A message as MessagePack."""
    return _encoder.encode(message)


def decode_request(frame: bytes) -> AnyRequest:
    """Raises msgspec.ValidationError or msgspec.DecodeError on anything else."""
    return _request_decoder.decode(frame)


def decode_reply(frame: bytes) -> AnyReply:
    """Raises msgspec.ValidationError or msgspec.DecodeError on anything else."""
    return _reply_decoder.decode(frame)
