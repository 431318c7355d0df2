"""A run on machines that are taken back, for bench/anywhere.py: emulated replicas in processes of their own
(spot_replica.py), each noticed once and followed by another."""

import itertools
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from common import ROOT

from helpers.emulated.launch import Emulation, prepare
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.report import rundata, summary

GRACE_SECONDS = 10.0
EVERY_SECONDS, AWAY_SECONDS = 10.0, 15.0  # between two notices, and from a machine's end to the next one
REPLICAS, STEPS, PROMPTS, SAMPLES = 4, 6, 16, 4
RUN_SECONDS = 600.0


def spot_config(folder: Path, parked_gigabytes: float | None) -> RunConfig:
    """Responses of some thousand tokens, each some twenty seconds long."""
    config = prepare(folder, prompts=64, prompt_tokens=10, max_response_tokens=4000)
    config.steps = STEPS
    config.algorithm.prompts_per_step = PROMPTS
    config.algorithm.samples_per_prompt = SAMPLES
    config.rollout.replicas = REPLICAS
    config.rollout.kv_cache_tokens = 3000 * PROMPTS * SAMPLES // REPLICAS
    config.rollout.increment_tokens = 0
    config.emulation.time_scale = 4.0
    config.emulation.wire_share = 1e-3
    config.emulation.median_response_tokens = 3000.0
    config.emulation.sigma = 0.5
    config.pipeline.max_staleness = 2
    config.pipeline.repack = "kv"
    config.pipeline.repack_requests = 1  # no other moves than those of machines that go
    config.relay.parked_gigabytes = parked_gigabytes
    return config


class SpotFleet:
    """The replicas of one run: each is noticed once, and followed by another."""

    def __init__(self, emulation: Emulation, folder: Path) -> None:
        self._emulation = emulation
        self._folder = folder
        self._numbers = itertools.count()
        self.leave_seconds: list[float] = []
        self.killed = 0

    def start(self) -> tuple[subprocess.Popen, Path]:
        """One more replica, and the file of its notice."""
        index = next(self._numbers)
        ledger, notice = self._folder / f"ledger-{index}.json", self._folder / f"notice-{index}"
        words = [ROOT / "bench" / "spot_replica.py", self._emulation.run_dir, index, ledger, notice]
        log = self._emulation.log
        command = [sys.executable, *map(str, words)]
        process = self._emulation.fleets[index] = subprocess.Popen(command, stdout=log, stderr=log)
        return process, notice

    def start_due(self, due: list[float]) -> None:
        """Starts a replica for each time that has come."""
        while due and due[0] < time.monotonic():
            del due[0]
            self.start()

    def take_back(self, process: subprocess.Popen, notice: Path) -> None:
        """Its machine goes."""
        begun = time.monotonic()
        notice.write_text(f"{GRACE_SECONDS:g}")
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            self.killed += 1
        self.leave_seconds.append(time.monotonic() - begun)

    def counted(self) -> dict[str, int]:
        """What all engines have drawn and prefilled."""
        engines = [one for path in self._folder.glob("ledger-*.json") for one in json.loads(path.read_text())]
        return {name: sum(one[name] for one in engines) for name in ("drawn", "prefilled")}


def spot_run(folder: Path, parked_gigabytes: float | None) -> dict[str, object]:
    """One run to its end."""
    config = spot_config(folder, parked_gigabytes)
    emulation = Emulation(config, 1e-6, per_process=1, kinds=[(config, 0)])  # replicas are started below
    fleet = SpotFleet(emulation, folder)
    try:
        living = [fleet.start() for _ in range(REPLICAS)]
        metrics = emulation.run_dir / "metrics.jsonl"
        while not metrics.exists() or len(rundata.load(emulation.run_dir).records.get("pull", [])) < REPLICAS:
            time.sleep(0.2)
        begun, due = time.monotonic(), list[float]()  # when replicas come in the place of others
        for number, (process, notice) in enumerate(living, start=1):
            while time.monotonic() < begun + number * EVERY_SECONDS:
                fleet.start_due(due)
                time.sleep(0.1)
            fleet.take_back(process, notice)
            due.append(time.monotonic() + AWAY_SECONDS)
        within = time.monotonic() - begun - EVERY_SECONDS
        while due:
            fleet.start_due(due)
            time.sleep(0.1)
        if emulation.wait(RUN_SECONDS) != 0:
            raise SystemExit(f"the run has not ended well: see {emulation.run_dir}.log")
    finally:
        emulation.stop()
    run, counted = rundata.load(emulation.run_dir), fleet.counted()
    audit = subprocess.run(
        [sys.executable, "-m", "laminar_hpc.launch.cli", "audit", str(emulation.run_dir)],
        capture_output=True,
        text=True,
    )
    figures = summary.figures(run)
    return {
        "parks": parked_gigabytes != 0,
        "tokens_again": counted["drawn"] - sum(of.response_tokens for of in run.totals),
        "tokens_discarded": figures["tokens_discarded"],
        "prefilled_again": counted["prefilled"],
        "trajectories_moved": figures["trajectories_moved"],
        "trajectories_parked": figures["trajectories_parked"],
        "tokens_parked": figures["tokens_parked"],
        "parked_bytes": figures["bytes_parked"],
        "parked_tokens_taken_up": figures["parked_tokens_taken_up"],
        "leave_seconds": statistics.fmean(fleet.leave_seconds),
        "within_seconds": within,
        "killed": fleet.killed,
        "wall_seconds": figures["wall_seconds"],
        "audit": "clean" if audit.returncode == 0 else audit.stdout + audit.stderr,
    }
