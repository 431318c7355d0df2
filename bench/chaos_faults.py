"""The faults of bench/chaos.py: a word is what happens and to whom, as `power-trainer`.

kill, stop  SIGKILL; SIGSTOP for 13 s, then SIGCONT, of controller, relay, rollout, trainer or engine.
cable       The node's cable is out for 20 s: packets vanish both ways.
power       The node's power is off until Slurm takes it for dead, and 10 s longer: its processes and what
            lay in its memory are gone.
usr1        Slurm's signal before a time limit, to the batch script.
preempt     A job of a higher tier takes the node for 10 s, after the grace time.
clock       The node's clock is 600 s ahead for 20 s, then right again: Python's, in our processes and
            SGLang's (bench/clock); of the kernel's no node has its own.
slow        Each sync of files takes the process 0.5 s longer, for 20 s, by strace.
full        disk: the folder that all nodes share has no room for 15 s. shm: a rollout node's /dev/shm.

Not to be had on one machine, and not imitated: a disk that reads slowly or returns errors, a GPU that falls
off its bus, a clock that drifts, a switch that drops a part of the packets.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass

import common
import psutil
from roles import ENGINE, ROLES
from slurm_jobs import JOBS, Element, SlurmRun

SECONDS = {"stop": 13.0, "cable": 20.0, "clock": 20.0, "slow": 20.0, "full": 15.0, "preempt": 10.0}
_TARGETS = {
    "kill": (*ROLES, ENGINE),
    "stop": (*ROLES, ENGINE),
    "cable": JOBS,
    "power": JOBS,
    "usr1": JOBS,
    "preempt": JOBS,
    "clock": JOBS,
    "slow": JOBS,
    "full": ("disk", "shm"),
}
KINDS = tuple(f"{how}-{target}" for how, targets in _TARGETS.items() for target in targets)
POWER_OFF_SECONDS = 120.0  # at most, until Slurm has noticed
POWER_MORE_SECONDS = 10.0
CLOCK_FILE, CLOCK_AHEAD = "/dev/shm/laminar-clock", 600
_SYNCS = "fsync,fdatasync"
_SYNC_MICROSECONDS = 500_000


def what_lacks(kind: str) -> str:
    """What must be installed for this kind of fault; "" if nothing."""
    return "apt-get install strace" if kind.startswith("slow-") and shutil.which("strace") is None else ""


def environment() -> dict[str, str]:
    """Of the jobs, so that a node's clock can be set."""
    return {"PYTHONPATH": str(common.ROOT / "bench" / "clock"), "LAMINAR_CLOCK": CLOCK_FILE}


@dataclass(frozen=True)
class Fault:
    """What happens (`how`) to whom (`target`)."""

    how: str
    target: str

    @classmethod
    def read(cls, kind: str) -> "Fault":
        """Raises ValueError with what is wrong with the word."""
        how, _, target = kind.partition("-")
        if target not in _TARGETS.get(how, ()):
            raise ValueError(f"{kind} is none of {', '.join(KINDS)}")
        return cls(how, target)

    def strike(self, run: SlurmRun, draw: random.Random) -> dict | None:
        """Returns when it is over, with what is known of it: `node`, `over` (seconds that it lasted), of a
        power cut `noticed` (seconds until Slurm had). None while there is nobody to be struck."""
        if self.target == "disk":
            begun = time.monotonic()
            with_full_folder(run)
            return {"node": "", "over": time.monotonic() - begun}
        element = run.where("rollout" if self.target == "shm" else self.target, draw)
        if element is None:
            return None
        begun = time.monotonic()
        more = STRIKES[self.how](run, self.target, element)
        return None if more is None else {"node": element.node, "over": time.monotonic() - begun, **more}


def _kill(run: SlurmRun, target: str, element: Element) -> dict | None:
    struck = run.processes(target, element.node)
    for process in struck:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return {} if struck else None


def _stop(run: SlurmRun, target: str, element: Element) -> dict | None:
    struck = run.processes(target, element.node)
    for process in struck:
        with suppress(psutil.NoSuchProcess):
            process.suspend()
    try:
        run.tend_for(SECONDS["stop"] if struck else 0.0)
    finally:
        for process in struck:
            with suppress(psutil.NoSuchProcess):  # it was replaced meanwhile
                process.resume()
    return {} if struck else None


def _cable(run: SlurmRun, target: str, element: Element) -> dict:
    run.cluster.node("cut", element.node)
    try:
        run.tend_for(SECONDS["cable"])
    finally:
        run.cluster.node("mend", element.node)
    return {}


def _power(run: SlurmRun, target: str, element: Element) -> dict:
    begun = time.monotonic()
    run.cluster.node("off", element.node)
    noticed = None
    while noticed is None and time.monotonic() - begun < POWER_OFF_SECONDS:
        run.tend_for(0.5)
        noticed = None if run.cluster.is_up(element.node) else time.monotonic() - begun
    run.tend_for(POWER_MORE_SECONDS)
    run.cluster.node("on", element.node)
    return {"noticed": noticed}


def _usr1(run: SlurmRun, target: str, element: Element) -> dict | None:
    if not run.hears(element):
        return None
    run.cluster.command("scancel", "--batch", "--signal=USR1", element.job)
    return {}


def _preempt(run: SlurmRun, target: str, element: Element) -> dict:
    """Whoever else is on the node is preempted as well. Over when the other job has begun."""
    words = ["--parsable", "--partition=urgent", f"--nodelist={element.node}", "--exclusive", "--mem=0"]
    job = run.cluster.command(
        "sbatch", *words, "--output=/dev/null", f"--wrap=sleep {SECONDS['preempt']:.0f}"
    ).strip()
    until = time.monotonic() + POWER_OFF_SECONDS
    while time.monotonic() < until:
        if run.cluster.command("squeue", "-h", "-j", job, "-t", "all", "-o", "%T").strip() != "PENDING":
            return {}
        run.tend_for(0.5)
    raise SystemExit(f"job {job} did not get {element.node} within {POWER_OFF_SECONDS:.0f} s")


def _clock(run: SlurmRun, target: str, element: Element) -> dict:
    run.cluster.node("exec", element.node, "sh", "-c", f"echo {CLOCK_AHEAD} > {CLOCK_FILE}")
    try:
        run.tend_for(SECONDS["clock"])
    finally:
        run.cluster.node("exec", element.node, "sh", "-c", f"echo 0 > {CLOCK_FILE}")
    return {}


def _slow(run: SlurmRun, target: str, element: Element) -> dict | None:
    struck = run.processes(target, element.node)
    if not struck:
        return None
    inject = f"inject={_SYNCS}:delay_enter={_SYNC_MICROSECONDS}"
    command = ["strace", "-qq", "-f", "-o", "/dev/null", "-e", f"trace={_SYNCS}", "-e", inject]
    tracer = subprocess.Popen([*command, "-p", str(struck[0].pid)], stderr=subprocess.DEVNULL)
    try:
        run.tend_for(SECONDS["slow"])
    finally:
        tracer.send_signal(signal.SIGINT)
        try:
            tracer.wait(20)
        except subprocess.TimeoutExpired:
            tracer.kill()
    return {}


def _full_shm(run: SlurmRun, target: str, element: Element) -> dict:
    fill = "fallocate -l $(df --output=avail -B1 /dev/shm | tail -n 1) /dev/shm/filler || true"
    run.cluster.node("exec", element.node, "sh", "-c", fill)
    try:
        run.tend_for(SECONDS["full"])
    finally:
        run.cluster.node("exec", element.node, "rm", "-f", "/dev/shm/filler")
    return {}


def with_full_folder(run: SlurmRun) -> None:
    """No byte is left in the folder that all nodes share."""
    filler = run.cluster.shared / "filler"
    until = time.monotonic() + SECONDS["full"]
    try:
        with open(filler, "ab") as file:
            while time.monotonic() < until:
                room = os.statvfs(run.cluster.shared)
                if size := room.f_bavail * room.f_frsize:
                    with suppress(OSError):
                        os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, size)
                time.sleep(0.2)
    finally:
        filler.unlink(missing_ok=True)


STRIKES = {
    "kill": _kill,
    "stop": _stop,
    "cable": _cable,
    "power": _power,
    "usr1": _usr1,
    "preempt": _preempt,
    "clock": _clock,
    "slow": _slow,
    "full": _full_shm,
}
