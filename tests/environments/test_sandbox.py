"""The sandbox: what model-written Python can do is what it is there for, on every tier of this machine."""

import asyncio
import os
import socket
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from helpers.processes import living
from laminar_hpc.environments.isolation import seccomp, tiers
from laminar_hpc.environments.sandbox import Limits, Result, Sandbox, SandboxFailed
from laminar_hpc.environments.sandbox.output import BoundedOutput
from laminar_hpc.machine.files.folders import SANDBOX_FOLDER_PREFIX

SECRET = "a secret of the rollout"
LIMITS = Limits(memory_bytes=1 << 30, processes=24, output_bytes=4096, box_bytes=8 << 20, file_bytes=4 << 20)
ATTEMPTS = """
import ctypes, fcntl, os, resource, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
VICTIM, PARENT, PORT = {victim!r}, {parent}, {port}

def call(*words):
    if libc.syscall(*words) < 0:
        raise OSError(ctypes.get_errno(), "refused")

def write(path, how="w"):
    with open(path, how) as file:
        file.write("x")

def connect(family, address):
    with socket.socket(family) as made:
        made.connect(address)

def inherited():
    if not any(is_open(n) for n in range(3, 64)):
        raise OSError("none")

def is_open(n):
    try:
        os.fstat(n)
    except OSError:
        return False
    return True

def see_others():
    others = [n for n in os.listdir("/proc") if n.isdigit() and int(n) > 2 and int(n) != os.getpid()]
    if not others:
        raise OSError("none")

attempts = dict(
    passwd=lambda: open("/etc/passwd").read(),
    shadow=lambda: open("/etc/shadow").read(),
    victim=lambda: open(VICTIM).read(),
    overwrite=lambda: write(VICTIM),
    cut=lambda: os.truncate(VICTIM, 0),
    cut_by_opening=lambda: os.close(os.open(VICTIM, os.O_RDONLY | os.O_TRUNC)),
    chmod=lambda: os.chmod(VICTIM, 0o777),
    times=lambda: os.utime(VICTIM, (0, 0)),
    into_python=lambda: write(sys.prefix + "/escaped"),
    into_root=lambda: write("/escaped"),
    folder_of_victim=lambda: os.listdir(os.path.dirname(VICTIM)),
    others=see_others,
    environment_of_parent=lambda: open(f"/proc/{{PARENT}}/environ").read(),
    limits_of_parent=lambda: resource.prlimit(PARENT, resource.RLIMIT_CORE, (0, 0)),
    priority_of_parent=lambda: os.setpriority(os.PRIO_PROCESS, PARENT, 1),
    cores_of_parent=lambda: os.sched_setaffinity(PARENT, os.sched_getaffinity(0)),
    signals_by_a_pipe=lambda: fcntl.fcntl(1, fcntl.F_SETOWN, PARENT),
    signal_to_parent=lambda: os.kill(PARENT, 0),
    network=lambda: connect(socket.AF_INET, ("127.0.0.1", PORT)),
    network6=lambda: socket.socket(socket.AF_INET6),
    raw=lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1),
    local_socket=lambda: connect(socket.AF_UNIX, "\\0escaped"),
    netlink=lambda: socket.socket(socket.AF_NETLINK),
    trace=lambda: call({ptrace}, 16, PARENT, 0, 0),
    user_namespace=lambda: call({unshare}, 0x10000000),
    mount=lambda: call({mount}, b"tmpfs", b"/tmp", b"tmpfs", 0, 0),
    rings=lambda: call(425, 8, ctypes.create_string_buffer(256)),
    keys=lambda: call({keyctl}, 0, -3, 0),
    newer_calls=lambda: call(1000),
    shared_memory=lambda: call({shmget}, 0, 4096, 0o1600),
    privileges=lambda: os.setuid(0) or write("/proc/sys/kernel/hostname"),
    four_gib=lambda: bytearray(4 << 30),
    a_large_file=lambda: write_much(),
    inherited=inherited,
)

def write_much():
    with open("large", "wb") as file:
        for _ in range(64):
            file.write(bytes(1 << 20))

import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for name, attempt in attempts.items():
    try:
        attempt()
    except (OSError, MemoryError) as error:
        continue
    print("escaped:", name)
for name, value in os.environ.items():
    if {secret!r} in value or "SECRET" in name:
        print("escaped: environment", name)
write("mine")
print("allowed:", sorted(os.listdir(".")), open("mine").read())
"""
NUMBERS = {"ptrace": "ptrace", "unshare": "unshare", "mount": "mount", "keyctl": "keyctl", "shmget": "shmget"}
GRANDCHILDREN = """
import os, sys, time
for i in range(10):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.setsid()
            for n in range(3):
                os.close(n)
            time.sleep(1000 + MARK)
        os._exit(0)
print("started", flush=True)
if LINGER: time.sleep(1000)
"""


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A tier that this machine has; without preloaded modules it is there at once."""
    if reason := tiers.trouble(request.param):
        pytest.skip(f"this machine has no {request.param}: {reason}")
    os.environ["LAMINAR_TEST_SECRET"] = SECRET
    with Sandbox(request.param, preload=(), limits=LIMITS) as made:
        yield made
    del os.environ["LAMINAR_TEST_SECRET"]


def facts(path: Path) -> tuple[int, ...]:
    """What another process could change of a file, its content apart."""
    found = path.stat()
    return found.st_mode, found.st_size, found.st_mtime_ns, found.st_uid


def started_by(process: psutil.Process) -> list[psutil.Process]:
    """The sandbox's processes but for those that wait for calls and their own."""
    return living(process.children(recursive=True))


def settled(sandbox: Sandbox) -> int:
    """How many processes the sandbox has once the last call's are gone: the preloaded one, perhaps twice,
    and keepers, one more than cores, each with the process that waits for its next call."""
    process = psutil.Process(sandbox._process.pid)
    most = 4 + 2 * len(os.sched_getaffinity(0))
    for _ in range(400):
        if (count := 1 + len(started_by(process))) <= most:
            return count
        time.sleep(0.05)
    raise AssertionError(f"{count} processes, more than {most}: {process.children(recursive=True)}")


def test_ways_out_are_closed(sandbox: Sandbox, tmp_path: Path) -> None:
    """Files, processes, networks, kernel interfaces, memory, secrets: each attempt is refused, and what is
    allowed works."""
    victim = tmp_path / "victim"
    victim.write_text("intact")
    before = facts(victim)
    column = 0 if os.uname().machine == "x86_64" else 1
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        program = ATTEMPTS.format(
            victim=str(victim),
            parent=os.getpid(),
            port=listening.getsockname()[1],
            secret=SECRET,
            **{name: seccomp._REFUSED[call][column] for name, call in NUMBERS.items()},
        )
        result = sandbox.run_sync(program, timeout_seconds=60)
    assert result.stderr == "" and "escaped" not in result.stdout, result
    assert result.stdout == "allowed: ['large', 'mine'] x\n" and result.exit == 0
    assert victim.read_text() == "intact" and facts(victim) == before


def test_a_program_runs_as_by_python(sandbox: Sandbox) -> None:
    """Input, output, exit codes, signals, tracebacks, threads, last rites, and programs of its own."""
    said = sandbox.run_sync("print(int(input()) + int(input()))\nimport sys; sys.exit(3)", "20\n22\n")
    assert (said.stdout, said.stderr, said.exit, said.timed_out, said.truncated) == (
        "42\n",
        "",
        3,
        False,
        False,
    )
    failed = sandbox.run_sync("def f(x):\n    return 1 / x\nprint('é', flush=True)\nf(0)")
    assert failed.stdout == "é\n" and failed.exit == 1 and '  File "main.py", line 2, in f' in failed.stderr
    assert "return 1 / x" in failed.stderr and failed.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert "laminar_hpc" not in failed.stderr
    assert "SyntaxError" in sandbox.run_sync("def").stderr
    assert sandbox.run_sync("import os; os.abort()").exit < 0
    assert sandbox.run_sync("import sys; sys.exit('so')").stderr == "so\n"
    late = "import atexit, threading\natexit.register(print, 'last')\n"
    late += "threading.Thread(target=print, args=['thread']).start()"
    assert sorted(sandbox.run_sync(late).stdout.split()) == ["last", "thread"]
    own = "import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', 'print(6*7)']))"
    ran = sandbox.run_sync(own)
    counted = sandbox._isolation == "namespaces" or os.geteuid() != 0  # see docs/security.md
    assert "b'42\\n'" in ran.stdout if counted else "BlockingIOError" in ran.stderr


def test_calls_do_not_meet(sandbox: Sandbox) -> None:
    """What one writes, sets or imports the next one does not find."""
    sandbox.run_sync(
        "open('left', 'w').write('x'); import json; json.left = 1; import os; os.environ['LEFT'] = '1'"
    )
    look = "import os, json; print(os.listdir('.'), hasattr(json, 'left'), 'LEFT' in os.environ)"
    assert sandbox.run_sync(look).stdout == "[] False False\n"


@pytest.mark.parametrize("linger", [False, True])
def test_all_that_was_started_ends(sandbox: Sandbox, linger: bool) -> None:
    """Sessions of their own and double forks, when the program ends and when its time is over."""
    program = GRANDCHILDREN.replace("LINGER", str(linger)).replace("MARK", str(os.getpid()))
    result = sandbox.run_sync(program, timeout_seconds=2.0)
    if sandbox._isolation == "landlock" and os.geteuid() == 0:  # it may start none; see docs/security.md
        assert "BlockingIOError" in result.stderr
        settled(sandbox)
        return
    assert (result.stdout, result.timed_out, result.exit) == ("started\n", linger, -9 if linger else 0)
    settled(sandbox)


def test_a_fork_bomb_is_bounded(sandbox: Sandbox) -> None:
    """It stops at the limit of processes, and nothing of it is left."""
    bomb = """
    import os, time
    made = 0
    for _ in range(400):
        try:
            if os.fork() == 0:
                time.sleep(1000)
            made += 1
        except OSError:
            break
    print(made)
    """
    result = sandbox.run_sync(textwrap.dedent(bomb), timeout_seconds=20)
    assert int(result.stdout) < 350 and not result.timed_out
    if sandbox._isolation == "namespaces":
        assert int(result.stdout) < LIMITS.processes
    settled(sandbox)


def test_time_is_bounded_and_memory_too(sandbox: Sandbox) -> None:
    """A loop and a sleep end at the time limit; a program that takes too much memory gets a MemoryError."""
    for code in ("while True: pass", "import time; print('began', flush=True); time.sleep(1000)"):
        result = sandbox.run_sync(code, timeout_seconds=0.3)
        assert result.timed_out and result.exit == -9 and 0.3 <= result.seconds < 10
    assert result.stdout == "began\n"
    assert "MemoryError" in sandbox.run_sync("x = [bytearray(64 << 20) for _ in range(64)]").stderr


def test_output_is_cut_in_the_middle(sandbox: Sandbox) -> None:
    """Beginning and end are kept; who prints without end is ended at the time limit and costs no memory."""
    result = sandbox.run_sync("print('first'); print('x' * 1_000_000); print('last')")
    assert result.truncated and result.stdout.startswith("first\nxx") and result.stdout.endswith("xx\nlast\n")
    assert "bytes left out ...]" in result.stdout and len(result.stdout) < LIMITS.output_bytes + 100
    endless = sandbox.run_sync("while True: print('y' * 1000)", timeout_seconds=0.5)
    assert endless.timed_out and len(endless.stdout) < LIMITS.output_bytes + 100


async def test_calls_run_side_by_side_and_are_given_up(sandbox: Sandbox) -> None:
    """A call waits for a place without losing time of its own; one that nobody waits for is ended."""
    results = await asyncio.gather(
        *(sandbox.run("import time; time.sleep(0.2); print(1)", timeout_seconds=5) for _ in range(6))
    )
    assert [r.stdout for r in results] == ["1\n"] * 6 and not any(r.timed_out for r in results)
    waiting = [
        asyncio.create_task(sandbox.run("import time; time.sleep(1000)", timeout_seconds=1000))
        for _ in range(4)
    ]
    await asyncio.sleep(0.3)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert (await asyncio.wait_for(sandbox.run("print(2)"), 30)).stdout == "2\n"
    settled(sandbox)


def test_the_preloaded_process_is_started_again(sandbox: Sandbox) -> None:
    """Its death costs the next call nothing but time, and all keepers and calls die with it."""
    before = psutil.Process(sandbox._process.pid)
    sandbox.run_sync("")
    family = before.children(recursive=True)
    assert family
    before.kill()
    assert sandbox.run_sync("print(3)").stdout == "3\n"
    _, alive = psutil.wait_procs(family, timeout=20)
    assert living(alive) == []


def test_limits_only_is_for_who_asks() -> None:
    """`rlimits` is never chosen by itself; time, output and memory are bounded there too, all descendants
    end, and no secret is in the environment."""
    assert tiers.best() != "rlimits"
    os.environ["LAMINAR_TEST_SECRET"] = SECRET
    with Sandbox("rlimits", preload=(), limits=LIMITS) as sandbox:
        assert SECRET not in sandbox.run_sync("import os; print(dict(os.environ))").stdout
        assert "MemoryError" in sandbox.run_sync("bytearray(4 << 30)").stderr
        result = sandbox.run_sync(
            GRANDCHILDREN.replace("LINGER", "True").replace("MARK", "0"), timeout_seconds=1.0
        )
        assert result.timed_out and result.stdout == "started\n"
        settled(sandbox)
        folder = Path(sandbox._folder)
        assert folder.name.startswith(SANDBOX_FOLDER_PREFIX)
    assert not folder.exists()


def test_a_machine_without_isolation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line that says what the machine lacks; nothing runs with less than was asked for."""
    with pytest.raises(ValueError, match="must be one of auto, namespaces, landlock, rlimits"):
        Sandbox("none")
    from laminar_hpc.environments.sandbox import places
    from laminar_hpc.environments.sandbox.protocol import SandboxSetup

    monkeypatch.setattr(tiers, "trouble", lambda tier: "Operation not permitted")
    monkeypatch.setattr(tiers, "best", lambda: "")
    with pytest.raises(OSError, match=r"neither user namespaces nor Landlock.*isolation='rlimits'"):
        places.prepare(SandboxSetup("auto", [], "", LIMITS))
    with pytest.raises(OSError, match="does not have isolation='landlock': Operation not permitted"):
        places.prepare(SandboxSetup("landlock", [], "", LIMITS))
    with (
        Sandbox("auto", preload=("no_such_module",)) as sandbox,
        pytest.raises(SandboxFailed, match="no_such_module"),
    ):
        sandbox.run_sync("print(1)")


def test_numpy_and_sympy_are_there() -> None:
    """Preloaded, in one thread, and random numbers differ between calls."""
    with Sandbox() as sandbox:
        code = "import sys; print('sympy' in sys.modules)\n"
        code += "import numpy, sympy; print(numpy.random.random(), sympy.factorint(91))"
        first, second = sandbox.run_sync(code), sandbox.run_sync(code)
    assert first.stdout.startswith("True\n0.") and first.stdout.endswith("{7: 1, 13: 1}\n"), first
    assert first.stdout != second.stdout


def test_output_keeps_beginning_and_end() -> None:
    """By any division into chunks."""
    for size in (1, 7, 100, 1000):
        output, data = BoundedOutput(100), bytes(range(48, 58)) * 100
        for i in range(0, len(data), size):
            output.add(data[i : i + size])
        text = output.text()
        assert text == data[:50].decode() + "\n[... 900 bytes left out ...]\n" + data[-50:].decode()
    short = BoundedOutput(100)
    short.add(b"short")
    assert (short.text(), short.truncated) == ("short", False)


@pytest.mark.parametrize("own_pid", [0, 7])
def test_the_filter_is_well_formed(own_pid: int) -> None:
    """Every jump stays inside, and the last word is a verdict, for both architectures' tables."""
    import struct

    for shared in (False, True):
        code = seccomp.program(shared, shared, not shared, own_pid)
        lines = list(struct.iter_unpack("=HBBI", code))
        assert len(lines) < 4096 and lines[-1][0] == seccomp._RETURN
        for place, (kind, yes, no, _) in enumerate(lines):
            assert kind == seccomp._RETURN or place + 1 + max(yes, no) < len(lines)


def test_result_is_public() -> None:
    """What callers rely on."""
    assert Result.__struct_fields__ == ("stdout", "stderr", "exit", "timed_out", "truncated", "seconds")
    assert sys.modules["laminar_hpc.environments.sandbox"].__all__ == [
        "Limits",
        "Result",
        "Sandbox",
        "SandboxFailed",
        "run",
        "run_sync",
    ]


async def test_a_thousand_calls_may_wait() -> None:
    """More than the socket to the preloaded process holds."""
    with Sandbox(preload=("no_such_module",)) as sandbox:
        found = await asyncio.gather(*(sandbox.run("") for _ in range(1000)), return_exceptions=True)
    assert {str(error) for error in found if isinstance(error, SandboxFailed)} == {
        "the sandbox cannot import what it is to preload: No module named 'no_such_module'"
    }
    assert len([each for each in found if isinstance(each, SandboxFailed)]) == 1000
