"""`laminar slurm check [FOLDER]`, inside an allocation: starts jobs/probe.py on all its nodes and judges what
they saw. One row for each thing, with the nodes that differ, and a cure. Less than a minute."""

import os
import secrets
import shutil
import subprocess
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.doctor.findings import Finding, size_text
from laminar_hpc.jobs.probe import Seen, read_seen

_SECONDS = 55.0  # for all nodes
_SKEW_SECONDS = 2.0  # heartbeats are judged by each machine's own clock, files by the file server's
_NOFILE = 65_536
_MEMLOCK = 1 << 30
_SHM_SMALL = 64 << 20
_SYNC_SLOW = 0.1  # seconds; each turn of the controller waits for one
_NETWORK_SLOW = 100e6  # bytes/s: less than 1 Gbit Ethernet

Rows = Iterator[Finding]


def main(options: Namespace) -> int:
    """Prints the table. Exit code 1 if a row says FAIL. Raises LaminarError outside an allocation, or where
    no node answers."""
    check, *folders = options.words
    if check != "check" or len(folders) > 1:
        raise LaminarError("usage: laminar slurm check [FOLDER], where FOLDER is one that all nodes share")
    folder = Path(*folders).absolute()
    failed = False
    for finding in rows(*look(folder)):
        print(finding, flush=True)
        failed |= finding.level == "FAIL"
    return int(failed)


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
    command = ["srun", *each, sys.executable, "-m", "laminar_hpc.jobs.probe", str(folder), name]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        error = running.communicate(timeout=_SECONDS)[1]
    except subprocess.TimeoutExpired:
        running.terminate()
        error = running.communicate()[1] + f" not all nodes answered within {_SECONDS:.0f} s"
    return " ".join(error.split())


def rows(nodes: int, seen: Sequence[Seen], said: str) -> Rows:
    """One finding for each thing."""
    missing = sorted(set(range(nodes)) - {each.node for each in seen})
    names = ", ".join(each.host for each in seen[:4]) + (" ..." if len(seen) > 4 else "")
    if missing:
        cure = f"look at these nodes: {said[:200]}"
        yield Finding("FAIL", "nodes", f"{len(missing)} of {nodes} did not answer: {missing[:8]}", cure)
    else:
        yield Finding("ok", "nodes", f"{nodes}: {names}")
    for part in (_network, _clock, _limits, _shm, _versions, _gpus, _storage, _broadcast):
        yield from part(seen)


def _where(bad: Sequence[Seen]) -> str:
    """The nodes that a row is about."""
    return f" on {', '.join(each.host for each in bad[:3])}" + (" and others" if len(bad) > 3 else "")


def _network(seen: Sequence[Seen]) -> Rows:
    bad = [each for each in seen if "network" in each.wrong]
    if bad:
        cure = "name the interface that the nodes share (LAMINAR_INTERFACE in slurm/site.sh); open its ports"
        yield Finding("FAIL", "rendezvous", bad[0].wrong["network"] + _where(bad), cure)
        return
    trip = max(each.round_trip_seconds for each in seen)
    yield Finding("ok", "rendezvous", f"the first node is reached from all, in {trip * 1e3:.1f} ms at most")
    kinds = Counter(each.interface for each in seen)
    text = ", ".join(f"{name} ({number} nodes)" for name, number in kinds.most_common())
    same = len(kinds) == 1
    cure = "" if same else "set LAMINAR_INTERFACE in slurm/site.sh to one that all nodes have"
    yield Finding("ok" if same else "warn", "interface", f"{text}, {seen[0].address} on {seen[0].host}", cure)


def _clock(seen: Sequence[Seen]) -> Rows:
    timed = [each for each in seen if each.round_trip_seconds >= 0]
    if not timed:
        return
    worst = max(timed, key=lambda each: abs(each.clock_seconds))
    off = abs(worst.clock_seconds) > _SKEW_SECONDS
    text = f"{abs(worst.clock_seconds) * 1e3:.1f} ms apart at most" + (_where([worst]) if off else "")
    yield Finding("warn" if off else "ok", "clocks", text, "let NTP or chrony run there" if off else "")


def _limits(seen: Sequence[Seen]) -> Rows:
    for name, least, value, cure in (
        (
            "open files",
            _NOFILE,
            lambda each: each.nofile,
            "raise nofile (limits.conf, or LimitNOFILE of slurmd)",
        ),
        (
            "locked memory",
            _MEMLOCK,
            lambda each: each.memlock,
            "raise memlock (LimitMEMLOCK=infinity of slurmd, PropagateResourceLimitsExcept=MEMLOCK): pinned "
            "memory and InfiniBand need it",
        ),
    ):
        yield _at_least(seen, name, least, value, cure)


def _at_least(
    seen: Sequence[Seen], name: str, least: int, value: Callable[[Seen], int], cure: str
) -> Finding:
    small = [each for each in seen if 0 <= value(each) < least]
    if not small:
        return Finding("ok", name, "enough on all nodes")
    shown = size_text(value(small[0])) if name == "locked memory" else f"{value(small[0]):,}"
    return Finding("warn", name, f"{shown}{_where(small)}", cure)


def _shm(seen: Sequence[Seen]) -> Rows:
    small = [each for each in seen if each.shm_bytes <= _SHM_SMALL]
    least = min(each.shm_bytes for each in seen)
    cure = "a container's default: more with --shm-size; rollouts need relay.slots times the model's bytes"
    yield Finding(
        "warn" if small else "ok",
        "/dev/shm",
        f"{size_text(least)} free at least" + (_where(small) if small else ""),
        cure if small else "",
    )


def _versions(seen: Sequence[Seen]) -> Rows:
    kinds = Counter(tuple(sorted(each.versions.items())) for each in seen)
    common = dict(kinds.most_common(1)[0][0])
    odd = [each for each in seen if each.versions != common]
    if odd:
        different = {
            name: odd[0].versions.get(name) for name in common if odd[0].versions.get(name) != common[name]
        }
        text = ", ".join(f"{name} {value}, elsewhere {common[name]}" for name, value in different.items())
        yield Finding("FAIL", "versions", text + _where(odd), "use one environment or image on all nodes")
    else:
        text = ", ".join(f"{name} {value}" for name, value in common.items())
        yield Finding("ok", "versions", text)


def _gpus(seen: Sequence[Seen]) -> Rows:
    kinds = Counter(f"{len(each.gpus)} x {each.gpus[0]}" if each.gpus else "none" for each in seen)
    text = ", ".join(f"{name} ({number} nodes)" for name, number in kinds.most_common())
    same = len(kinds) == 1
    cure = (
        ""
        if same
        else "ask for the same on each node (--gpus-per-node, --constraint), or look at nvidia-smi there"
    )
    yield Finding("ok" if same else "warn", "GPUs", text, cure)


def _storage(seen: Sequence[Seen]) -> Rows:
    bad = [each for each in seen if "storage" in each.wrong or each.storage]
    if bad:
        broken = bad[0].wrong.get("storage") or ", ".join(f"{k}: {v}" for k, v in bad[0].storage.items())
        cure = "put run_dir on a file system that has these (NFS, Lustre, GPFS)"
        yield Finding("FAIL", "shared storage", broken + _where(bad), cure)
        return
    slowest = max(seen, key=lambda each: each.sync_seconds)
    slow = slowest.sync_seconds > _SYNC_SLOW
    text = f"{slowest.file_system}, a sync in {slowest.sync_seconds * 1e3:.1f} ms at most"
    cure = "the controller waits for one in each turn: another file system for run_dir" if slow else ""
    yield Finding(
        "warn" if slow else "ok", "shared storage", text + (_where([slowest]) if slow else ""), cure
    )


def _broadcast(seen: Sequence[Seen]) -> Rows:
    bad = [each for each in seen if "broadcast" in each.wrong]
    rates = [each.broadcast_bytes_per_second for each in seen if each.broadcast_bytes_per_second > 0]
    if bad:
        cure = "see rendezvous; gloo takes the interface of GLOO_SOCKET_IFNAME"
        yield Finding("FAIL", "gloo broadcast", bad[0].wrong["broadcast"][:200] + _where(bad), cure)
    elif rates:
        slow = min(rates) < _NETWORK_SLOW
        cure = "LAMINAR_INTERFACE in slurm/site.sh: a faster one" if slow else ""
        text = f"64 MiB to {len(seen)} nodes at {min(rates) / 1e9:.2f} GB/s"
        yield Finding("warn" if slow else "ok", "gloo broadcast", text, cure)
