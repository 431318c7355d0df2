"""`laminar slurm check [FOLDER]`, inside an allocation: starts launch/slurm/probe.py on all its nodes and
judges what they saw. One row for each thing, with the nodes that differ, and a cure. Less than a minute."""

import os
import secrets
import shutil
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.launch.doctor.findings import (
    CheckTable,
    MachineFinding,
    Verdict,
    fail,
    ok,
    report,
    size_text,
    warn,
)
from laminar_hpc.launch.slurm.probe import Seen, read_seen

_SECONDS = 55.0  # for all nodes
_SKEW_SECONDS = 2.0  # heartbeats are judged by each machine's own clock, files by the file server's
_NOFILE = 65_536
_MEMLOCK = 1 << 30
_SHM_SMALL = 64 << 20
_SYNC_SLOW = 0.1  # seconds; each turn of the controller waits for one
_NETWORK_SLOW = 100e6  # bytes/s: less than 1 Gbit Ethernet

Nodes = Sequence[Seen]
CHECKS = CheckTable()


def main(options: Namespace) -> int:
    """Prints the table; 1 if a row says FAIL. Raises LaminarError outside an allocation, or unanswered."""
    check, *folders = options.words
    if check != "check" or len(folders) > 1:
        raise LaminarError("usage: laminar slurm check [FOLDER], where FOLDER is one that all nodes share")
    folder = Path(*folders).absolute()
    return report(rows(*look(folder)))


def look(folder: Path) -> tuple[int, list[Seen], str]:
    """(nodes of the allocation, what each of them saw, srun's errors)."""
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        raise LaminarError(
            "laminar slurm check runs inside an allocation: salloc --nodes=2 laminar slurm check, or "
            "sbatch --nodes=2 --wrap 'laminar slurm check'"
        )
    nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    place = folder / f".laminar-check-{secrets.token_hex(4)}"
    try:
        place.mkdir(parents=True)
    except OSError as error:
        raise LaminarError(f"{folder} cannot be written ({error.strerror}); name another folder") from None
    try:
        text = probe_all(nodes, folder, place.name)
        seen = [found for n in range(nodes) if (found := read_seen(place / f"node{n}.json"))]
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if not seen:
        raise LaminarError(f"no node has answered: {text or 'srun said nothing'}")
    return nodes, seen, text


def probe_all(nodes: int, folder: Path, name: str) -> str:
    """Runs the probe on each node; what srun has said, in one line."""
    each = ["-N", str(nodes), "-n", str(nodes), "--ntasks-per-node=1", "--cpu-bind=none", "--overlap"]
    command = ["srun", *each, sys.executable, "-m", "laminar_hpc.launch.slurm.probe", str(folder), name]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        error = running.communicate(timeout=_SECONDS)[1]
    except subprocess.TimeoutExpired:
        running.terminate()
        error = running.communicate()[1] + f" not all nodes answered within {_SECONDS:.0f} s"
    return " ".join(error.split())


def rows(nodes: int, seen: Sequence[Seen], said: str) -> Iterator[MachineFinding]:
    """One finding for each thing."""
    if missing := sorted(set(range(nodes)) - {each.node for each in seen}):
        text = f"{len(missing)} of {nodes} did not answer: {missing[:8]}"
        yield MachineFinding("nodes", fail(text, f"look at these nodes: {said[:200]}"))
    else:
        names = ", ".join(each.host for each in seen[:4]) + (" ..." if len(seen) > 4 else "")
        yield MachineFinding("nodes", ok(f"{nodes}: {names}"))
    yield from CHECKS.findings(seen)


def _on(bad: Nodes) -> str:
    """The nodes that a row is about."""
    return f" on {', '.join(each.host for each in bad[:3])}" + (" and others" if len(bad) > 3 else "")


def _without(seen: Nodes, what: str) -> list[Seen]:
    return [each for each in seen if what in each.wrong]


def _kinds(values: Iterable[str]) -> str:
    return ", ".join(f"{name} ({number} nodes)" for name, number in Counter(values).most_common())


@CHECKS.row(
    "rendezvous",
    "name the interface that the nodes share (LAMINAR_INTERFACE in slurm/site.sh); open its ports",
)
def rendezvous(seen: Nodes) -> Verdict:
    if bad := _without(seen, "network"):
        return fail(bad[0].wrong["network"] + _on(bad))
    trip = max(each.round_trip_seconds for each in seen)
    return ok(f"the first node is reached from all, in {trip * 1e3:.1f} ms at most")


@CHECKS.row("interface", "set LAMINAR_INTERFACE in slurm/site.sh to one that all nodes have")
def interface(seen: Nodes) -> Verdict | None:
    if _without(seen, "network"):
        return None
    names = [each.interface for each in seen]
    text = f"{_kinds(names)}, {seen[0].address} on {seen[0].host}"
    return ok(text) if len(set(names)) == 1 else warn(text)


@CHECKS.row("clocks", "let NTP or chrony run there")
def clocks(seen: Nodes) -> Verdict | None:
    timed = [each for each in seen if each.round_trip_seconds >= 0]
    if not timed:
        return None
    worst = max(timed, key=lambda each: abs(each.clock_seconds))
    text = f"{abs(worst.clock_seconds) * 1e3:.1f} ms apart at most"
    return warn(text + _on([worst])) if abs(worst.clock_seconds) > _SKEW_SECONDS else ok(text)


@CHECKS.row("open files", "raise nofile (limits.conf, or LimitNOFILE of slurmd)")
def open_files(seen: Nodes) -> Verdict:
    small = [each for each in seen if 0 <= each.nofile < _NOFILE]
    return warn(f"{small[0].nofile:,}{_on(small)}") if small else ok("enough on all nodes")


@CHECKS.row(
    "locked memory",
    "raise memlock (LimitMEMLOCK=infinity of slurmd, PropagateResourceLimitsExcept=MEMLOCK): pinned memory "
    "and InfiniBand need it",
)
def locked_memory(seen: Nodes) -> Verdict:
    small = [each for each in seen if 0 <= each.memlock < _MEMLOCK]
    return warn(f"{size_text(small[0].memlock)}{_on(small)}") if small else ok("enough on all nodes")


@CHECKS.row(
    "/dev/shm",
    "a container's default: more with --shm-size; rollouts need relay.slots times the model's bytes",
)
def shm(seen: Nodes) -> Verdict:
    small = [each for each in seen if each.shm_bytes <= _SHM_SMALL]
    text = f"{size_text(min(each.shm_bytes for each in seen))} free at least"
    return warn(text + _on(small)) if small else ok(text)


@CHECKS.row("versions", "use one environment or image on all nodes")
def versions(seen: Nodes) -> Verdict:
    kinds = Counter(tuple(sorted(each.versions.items())) for each in seen)
    common = dict(kinds.most_common(1)[0][0])
    odd = [each for each in seen if each.versions != common]
    if not odd:
        return ok(", ".join(f"{name} {value}" for name, value in common.items()))
    theirs = [(name, odd[0].versions.get(name), value) for name, value in common.items()]
    text = ", ".join(f"{name} {one}, elsewhere {value}" for name, one, value in theirs if one != value)
    return fail(text + _on(odd))


@CHECKS.row(
    "GPUs", "ask for the same on each node (--gpus-per-node, --constraint), or look at nvidia-smi there"
)
def gpus(seen: Nodes) -> Verdict:
    found = [f"{len(each.gpus)} x {each.gpus[0]}" if each.gpus else "none" for each in seen]
    return ok(_kinds(found)) if len(set(found)) == 1 else warn(_kinds(found))


@CHECKS.row("shared storage", "put run_dir on a file system that has these (NFS, Lustre, GPFS)")
def storage(seen: Nodes) -> Verdict:
    if bad := [each for each in seen if "storage" in each.wrong or each.storage]:
        broken = bad[0].wrong.get("storage") or ", ".join(f"{k}: {v}" for k, v in bad[0].storage.items())
        return fail(broken + _on(bad))
    slowest = max(seen, key=lambda each: each.sync_seconds)
    text = f"{slowest.file_system}, a sync in {slowest.sync_seconds * 1e3:.1f} ms at most"
    if slowest.sync_seconds <= _SYNC_SLOW:
        return ok(text)
    cure = "the controller waits for one in each turn: another file system for run_dir"
    return warn(text + _on([slowest]), cure)


@CHECKS.row("gloo broadcast", "see rendezvous; gloo takes the interface of GLOO_SOCKET_IFNAME")
def broadcast(seen: Nodes) -> Verdict | None:
    if bad := _without(seen, "broadcast"):
        return fail(bad[0].wrong["broadcast"][:200] + _on(bad))
    rates = [each.broadcast_bytes_per_second for each in seen if each.broadcast_bytes_per_second > 0]
    if not rates:
        return None
    text = f"64 MiB to {len(seen)} nodes at {min(rates) / 1e9:.2f} GB/s"
    slow = min(rates) < _NETWORK_SLOW
    return warn(text, "LAMINAR_INTERFACE in slurm/site.sh: a faster one") if slow else ok(text)
