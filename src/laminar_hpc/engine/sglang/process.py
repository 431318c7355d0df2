"""The engine as a process: starts SGLang's server as a child, notices its death, ends it with all that it
started.

Used by server.py only. The child runs in a session of its own, so that one signal reaches all of its
processes, and dies with its parent (plugin/serve.py asks the kernel for that). Its temporary files, the
ports' sockets among them, lie in a folder that only this user can enter. `stop` removes the folder, and the
segments of shared memory noted in it; after a kill the next start on this machine does.
"""

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.engine import leftovers
from laminar_hpc.engine.interface import EngineDied
from laminar_hpc.engine.sglang.command_line import has_cuda
from laminar_hpc.engine.sglang.plugin import key, protocol, serve
from laminar_hpc.machine.compat import cuda_toolkit
from laminar_hpc.machine.files import folders, shared_memory
from laminar_hpc.machine.files.folders import ENGINE_FOLDER_PREFIX, claim

MODEL_PACKAGE = "laminar_hpc.engine.sglang.plugin.models"
# What torchrun and Slurm tell their workers must not reach the engine's own torch.distributed.
FOREIGN_VARIABLES = re.compile(
    r"^(TORCHELASTIC_|GROUP_|ROLE_|LOCAL_(RANK|WORLD_SIZE)$|RANK$|WORLD_SIZE$|MASTER_|TORCH_NCCL_|SLURM_)"
)
# the kernel frees a large process's memory for so long; later, the next start removes what it had
DYING_SECONDS = 5.0
_LINE_CHARACTERS = 300  # of a log's line that an error quotes
_ERROR_LINE = re.compile(
    r"^(\w+\.)*\w*(Error|Exception|Killed)\b.*"
    r"|.*\b(ERROR|error:|Fatal|SIGKILL|crashed with)\b.*"
    r"|SGLang (does not find|finds no GPU) .*"
)


def hold_port() -> socket.socket:
    """A free loopback port that nobody gets by chance while this socket is open: a server listens there many
    seconds later, as one that names the port and sets SO_REUSEADDR may."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


def last_log_line(log: Path, begin: int = 0) -> str:
    """The last line of `log`, from byte `begin` on, that tells of an error, else its last line at all."""
    try:
        with open(log, "rb") as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - 200_000))
            lines = [
                line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()
            ]
    except FileNotFoundError:
        return "it left no log"
    errors = [line for line in lines if _ERROR_LINE.match(line)]
    return (errors or lines or ["its log is empty"])[-1][:_LINE_CHARACTERS]


def _cpu_variables(ranks: int) -> dict[str, str]:
    """What SGLang must be told on the CPU."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    return {
        # A group of cores per rank must be named for more ranks than NUMA nodes; nothing is bound without
        # SGLang's own CPU kernels.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join([cores] * ranks),
        # as on CUDA; else the cosines and sines are rounded to the model's dtype
        "SGLANG_ROPE_CACHE_FP32": "1",
        # a compiler would be at work for half a minute, for one small function of the embedding
        "TORCH_COMPILE_DISABLE": "1",
    }


def _cuda_variables() -> dict[str, str]:
    """What SGLang must be told on a GPU: the compiler of the kernels that it builds at its start."""
    # Triton's kernels would round float32 factors to TF32, 10 bits. Three products of TF32 parts keep nearly
    # all of them on the tensor cores; "ieee" does without them.
    return {**cuda_toolkit.variables(), "TRITON_F32_DEFAULT": "tf32x3"}


class EngineProcess:
    """One life of an engine. `dead` is set once one of its processes ended, but for `stop`."""

    def __init__(
        self, name: str, log: Path, threads: int, ranks: int = 1, deterministic: bool = False
    ) -> None:
        self.name = name
        self.log = log
        self.threads = threads
        self.ranks = ranks  # tensor parallel
        self.deterministic = deterministic
        self.port = 0
        self._held_port: socket.socket | None = None
        self.key = ""
        # temporary files and the ports' sockets; made by `start`, removed by `stop`
        self.folder: Path | None = None
        self.dead = asyncio.Event()
        self._child: subprocess.Popen[bytes] | None = None
        self._note: shared_memory.Note | None = None
        self._note_time = 0.0
        self._log_begin = 0
        self._ended: str | None = None  # the member that ended first, if it was not the server
        self._watched: list[int] = []  # descriptors of processes

    @property
    def socket_path(self) -> Path:
        """Returns the path of the ports; see `protocol.socket_path`."""
        assert self.folder is not None
        return self.folder / "port"

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def start(self, arguments: list[str]) -> None:
        """Starts SGLang with `arguments` on a free loopback port. It ends with the thread that calls this."""
        leftovers.clean()
        self.folder = Path(tempfile.mkdtemp(prefix=ENGINE_FOLDER_PREFIX))
        claim(self.folder)
        self._note = shared_memory.Note(self.folder)
        self._held_port = hold_port()
        self.key = secrets.token_hex(24)
        key.leave(self.folder, self.key)
        self.port = self._held_port.getsockname()[1]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._log_begin = os.fstat(descriptor).st_size
        try:
            program = [sys.executable, "-m", serve.__name__, "--host", "127.0.0.1", "--port", str(self.port)]
            self._child = subprocess.Popen(
                [*program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        self._watch(self._child.pid, None)

    def environment(self) -> dict[str, str]:
        """The server's environment variables."""
        inherited = {name: value for name, value in os.environ.items() if not FOREIGN_VARIABLES.match(name)}
        return inherited | {
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            # a server that closes idle connections races with the next request on them
            "SGLANG_TIMEOUT_KEEP_ALIVE": "86400",
            # else log-probs are those of temperature 1, and silently not of the distribution drawn from
            "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
            "TMPDIR": str(self.folder),
            "SGLANG_EXTERNAL_MODEL_PACKAGE": MODEL_PACKAGE,
            "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED": "0",  # weights are loaded as they are named
            "PYTHONUNBUFFERED": "1",
            # The engine's own processes meet in a file and talk over loopback; torch's TCP store would
            # listen on all interfaces.
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{self.folder}/rendezvous",
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            **(_cuda_variables() if has_cuda() else _cpu_variables(self.ranks)),
            key.FILE_VARIABLE: str(self.folder / "key") if self.folder else "",
            serve.PARENT_VARIABLE: str(os.getpid()),
            protocol.SOCKET_VARIABLE: str(self.socket_path),
            protocol.DETERMINISTIC_VARIABLE: str(int(self.deterministic)),
        }

    def _watch(self, pid: int, name: str | None) -> None:
        """Sets `dead` at the end of this process, a child or not."""
        descriptor = os.pidfd_open(pid)
        self._watched.append(descriptor)
        asyncio.get_running_loop().add_reader(descriptor, self._member_ended, descriptor, name)

    def _member_ended(self, descriptor: int, name: str | None) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        if not self.dead.is_set():
            self._ended = name
            self.dead.set()

    def watch_members(self) -> None:
        """Watches SGLang's own processes too: the server would notice the end of one only after seconds."""
        # the server itself is gone: that is seen already
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            for member in psutil.Process(self.pid).children(recursive=True):
                title = " ".join(member.cmdline()[:1])
                if title.startswith("sglang::"):
                    self._watch(member.pid, title)

    def note_shared_memory(self, every: float = 0.0) -> None:
        """Records the segments of the engine's processes, unless done within the last `every` seconds."""
        if self._note is not None and time.monotonic() - self._note_time >= every:
            self._note.update(self.pid)
            self._note_time = time.monotonic()

    def last_log_line(self) -> str:
        """The last error that this life wrote into the log that all lives share."""
        return last_log_line(self.log, self._log_begin)

    def death(self) -> EngineDied:
        """What to raise when `dead` is set."""
        assert self._child is not None
        code = self._child.poll()
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        if self._ended:  # a process that is killed from outside logs nothing
            how = f"its process {self._ended} ended"
        return EngineDied(f"{self.name} died ({how}): {self.last_log_line()} (log: {self.log})")

    async def stop(self) -> None:
        """Ends the server and all its processes at once, and removes its files; at most some seconds."""
        for descriptor in self._watched:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)
        self._watched = []
        if self._child is not None:
            self.note_shared_memory()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
            try:
                await asyncio.to_thread(self._child.wait, 10)
            except subprocess.TimeoutExpired:
                raise LaminarError(
                    f"{self.name} (pid {self._child.pid}) did not end within 10 s of SIGKILL"
                ) from None
        if self._held_port is not None:
            self._held_port.close()
        if self.folder is not None:
            deadline = time.monotonic() + DYING_SECONDS
            while not folders.remove(self.folder) and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
