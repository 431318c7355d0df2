"""What passes between a rollout, its fork server and the workers: msgpack, nothing pickled. With a worker
that is a program of its own it is the same in JSON.

    rollout <->   framing                  there                                    back
    fork server   one message per packet   WorkerSetup | Fork with a socket | Reap  Ready | Forked
    worker        as in framing.py         WorkerSetup, then Calls                  Ready, CallResults, Ticks
"""

import msgspec

MAX_ERROR = 300  # characters of an error that are kept
END_SECONDS = 3.0  # in which a program ends by itself, once nobody asks it any more


def sendable(text: str) -> str:
    """With a question mark for each half of a surrogate pair, which no frame can hold."""
    return text.encode(errors="replace").decode()


def error_words(error: BaseException) -> str:
    """Returns an error's kind, and what it says if it can say anything."""
    try:
        said = str(error)
    except Exception:  # of the user's own kind
        said = "it cannot say what"
    return sendable(f"{type(error).__name__}: {said}")


# ---- to a fork server or a worker --------------------------------------------------------------------------


class Spec(msgspec.Struct):
    """One reward: a function or a URL, and how it is called. `label` is what messages call it."""

    name: str
    label: str
    function: str
    url: str = ""
    style: str = ""
    api_key_env: str = ""


class WorkerSetup(msgspec.Struct, tag=True):
    """First message to a fork server and to a worker. `prompt_field`: where a row has its prompt, as in
    data.prompt_field. `program`: the command that each worker becomes, in place of functions; its socket's
    descriptor is added."""

    specs: list[Spec]
    timeout_seconds: float
    prompt_field: str = ""
    program: list[str] = []


class Fork(msgspec.Struct, tag=True):
    """A worker that serves the socket coming with this: call after call, or `together` on one event loop."""

    together: bool


class Reap(msgspec.Struct, tag=True):
    """This worker has been killed."""

    pid: int


class Call(msgspec.Struct, tag=True, omit_defaults=True):
    """`name` of the reward, tool or environment to call. `tokens` are those of the response. Of a tool: its
    `arguments`, as JSON, whose numbers have any size. Of an environment: the `session` that is meant, and
    `method`, one of its tools, reset, get_reward, or "" to forget it."""

    id: int
    name: str = ""
    prompt: str = ""
    response: str = ""
    row: dict = {}
    tokens: list[int] = []
    session: int = 0
    method: str = ""
    arguments: str = "{}"


# ---- from them ---------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, tag=True):
    """All functions are imported, or `error` says why not. `asynchronous`: the names of those that are
    awaited. `tools`: JSON schemas, as environments/turns/tools.py makes them, by name of the function or
    environment;
    `rewards`: names of the environments that have a get_reward; `idempotent`: names of the tools that say so
    of themselves, by name of the function or environment."""

    error: str
    asynchronous: list[str] = []
    tools: dict[str, list[dict]] = {}
    rewards: list[str] = []
    idempotent: dict[str, list[str]] = {}


class Forked(msgspec.Struct, tag=True):
    pid: int


class Tick(msgspec.Struct, tag=True):
    """The event loop of a worker turns."""


class CallResult(msgspec.Struct, tag=True):
    """What became of a call. Times are seconds since the epoch.

    `reward`: None = the function says that it does not apply to this row. `error`: "" or what went wrong;
    `fault` is its kind: raised, value (it returned no reward), arguments (it cannot be called like this),
    refused (by a server, for good), time, died.
    """

    id: int
    reward: float | None
    parts: dict[str, float]
    t0: float
    t1: float
    error: str = ""
    fault: str = ""
    text: str | None = None  # of a tool or a reset, for the model


OF_A_PROGRAM = Ready("", [""], {"": []}, [""], {"": []})  # it is called as an agent is
FromWorker = Ready | CallResult | Tick
decode_to_server = msgspec.msgpack.Decoder(WorkerSetup | Fork | Reap).decode
decode_from_server = msgspec.msgpack.Decoder(Ready | Forked).decode
decode_to_worker = msgspec.msgpack.Decoder(WorkerSetup | Call).decode
