"""What passes between a client of the sandbox, the preloaded process and a call's keeper."""

import msgspec


class Limits(msgspec.Struct, frozen=True):
    """Of one call. Memory and files are per process of it, `box_bytes` is for its folder where that is of
    memory (namespaces), `output_bytes` is what is kept of each stream. `at_once`: calls that run at a time;
    0 = as many as cores."""

    memory_bytes: int = 2 << 30
    file_bytes: int = 64 << 20
    box_bytes: int = 256 << 20
    processes: int = 32
    output_bytes: int = 64 << 10
    at_once: int = 0


class SandboxSetup(msgspec.Struct):
    """To the preloaded process, once. `isolation`: auto or a tier; `preload`: modules; `folder`: its own."""

    isolation: str
    preload: list[str]
    folder: str
    limits: Limits


class SandboxCall(msgspec.Struct):
    """Python `code` with `stdin` as its input, ended after `timeout_seconds`."""

    code: str
    stdin: str
    timeout_seconds: float


class Result(msgspec.Struct, frozen=True, tag=True):
    """What became of a call. `exit` is the exit code, negative for a signal; `timed_out`: it was ended at its
    time limit; `truncated`: an output was longer than is kept, and its middle is left out."""

    stdout: str
    stderr: str
    exit: int
    timed_out: bool
    truncated: bool
    seconds: float


class Failed(msgspec.Struct, tag=True):
    """The sandbox itself could not run the code."""

    reason: str


decode_setup = msgspec.msgpack.Decoder(SandboxSetup).decode
decode_call = msgspec.msgpack.Decoder(SandboxCall).decode
decode_answer = msgspec.msgpack.Decoder(Result | Failed).decode
