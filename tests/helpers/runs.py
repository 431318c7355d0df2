"""Starting and watching real runs of the demo, as a user does: `laminar train ...` in a process of its
own."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import ClassVar

import psutil

from laminar_hpc.store.audit.checks import audit
from laminar_hpc.store.audit.records import read

SHORT = ["experiment=demo", "sampling.max_response_tokens=48", "evaluation.problems=32"]


class Run:
    """One `laminar train`; `lines` is what the user sees."""

    started: ClassVar[list["Run"]] = []  # by the tests so far

    def __init__(
        self, run_dir: Path, *words: str, short: bool = True, experiment: str = "experiment=demo"
    ) -> None:
        self.run_dir, self.lines = run_dir, []
        command = [
            sys.executable,
            "-m",
            "laminar_hpc.launch.cli",
            "train",
            *(SHORT if short else [experiment]),
            f"run_dir={run_dir}",
            *words,
        ]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        self.started.append(self)
        self.tree: set[psutil.Process] = set()
        self.run_ids: set[str] = set()  # one per launch: other runs on this machine may have the same name
        self._seen = 0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def read_until(self, words: str, seconds: float = 150) -> str:
        """The next line that holds `words`. Fails with all lines when the run ends or time runs out
        before."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            ended = not self._reader.is_alive()
            while self._seen < len(self.lines):
                self._seen += 1
                if words in self.lines[self._seen - 1]:
                    return self.lines[self._seen - 1]
            if ended:
                break
            time.sleep(0.02)
        raise AssertionError(f"'{words}' did not come within {seconds} s:\n" + "\n".join(self.lines))

    def read_next(self, words: str, seconds: float = 150) -> str:
        """As `read_until`, of what comes from now on."""
        self._seen = len(self.lines)
        return self.read_until(words, seconds)

    def members(self) -> list[psutil.Process]:
        """All processes of the run as of now."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        self.tree.update(found)
        if (address := self.run_dir / "controller.json").exists():
            self.run_ids.add(json.loads(address.read_text())["run_id"])
        return found

    def rank(self, role: str) -> psutil.Process:
        """The rank of a role, by torchrun's RANK in a world of four."""
        number = {"trainer": "0", "controller": "1", "relay": "2", "rollout": "3"}[role]
        for process in self.members():
            if (
                "laminar_hpc" in process.cmdline()
                and "torch.distributed.run" not in process.cmdline()
                and process.environ().get("RANK") == number
            ):
                return process
        raise AssertionError(f"no {role} among the processes of the run")

    def engine(self) -> psutil.Process:
        """The engine server of the rollout rank."""
        return self._engines()[0]

    def _engines(self) -> list[psutil.Process]:
        try:
            return [
                p for p in self.rank("rollout").children() if any("sglang" in word for word in p.cmdline())
            ]
        except (AssertionError, psutil.Error):  # the rank has gone
            return []

    def has_another_engine(self, than: psutil.Process, seconds: float) -> bool:
        """Waits until the run has ended (False) or a fresh engine has taken the place of a dead one
        (True)."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            if any(p.pid != than.pid for p in self._engines()):
                return True
            time.sleep(0.05)
        return False

    def finish(self, seconds: float = 240) -> int:
        """Waits for the end, audits the run's records; returns the exit code and keeps the lines."""
        if self.process.poll() is None:
            self.members()
        code = self.process.wait(timeout=seconds)
        self._reader.join(5)
        assert_clean(self.run_dir)
        return code

    def assert_gone(self, seconds: float = 20) -> None:
        """Every process of the run has ended and its shared memory is clean."""
        _, alive = psutil.wait_procs([p for p in self.tree if p.is_running()], timeout=seconds)
        assert not alive, [p.cmdline() for p in alive]
        assert not self.slots()

    def slots(self) -> list[Path]:
        """The weight slots of the run, in shared memory."""
        return [path for run_id in self.run_ids for path in Path("/dev/shm").glob(f"laminar-{run_id}*")]

    def listens_beyond_loopback(self) -> list[str]:
        """Addresses at which a process of the run listens and other machines reach it."""
        listening = [
            c for p in self.members() for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN
        ]
        assert listening, "nobody listens at all"
        return [f"{c.laddr.ip}:{c.laddr.port}" for c in listening if not c.laddr.ip.startswith("127.")]

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.members()
        self.process.send_signal(number)

    @property
    def errors(self) -> list[str]:
        return [line for line in self.lines if "error" in line]


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


def metrics(run_dir: Path, kind: str) -> list[dict]:
    return [
        r for r in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()) if r["kind"] == kind
    ]


def steps_done(run_dir: Path) -> int:
    """So far, of a run that may be writing its next line."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return max((line["step"] for line in lines if line["kind"] == "step"), default=0)


def consumed(run_dir: Path) -> dict[int, list[int]]:
    """Trajectories by the step that trained on them."""
    found: dict[int, list[int]] = {}
    database = sqlite3.connect(f"file:{run_dir / 'store.sqlite'}?mode=ro", uri=True)
    for step, trajectory_id in database.execute(
        "SELECT consumed_step, id FROM trajectories WHERE state = 'consumed' ORDER BY id"
    ):
        found.setdefault(step, []).append(trajectory_id)
    database.close()
    return found


def assert_clean(run_dir: Path) -> None:
    """As `laminar audit` with exit code 0; of a run that was refused before it began there is nothing to
    audit."""
    if (run_dir / "metrics.jsonl").is_file():
        with read(run_dir) as records:
            culprits = [f"{finding.name}: {text}" for finding in audit(records) for text in finding.culprits]
        assert not culprits, culprits
