"""Trajectories of five turns whose tools are slow, fail and hang, on emulated engines: what waiting costs.

    python bench/environments.py --json environments.json     seven runs of 1,800 emulated seconds: 23 minutes
    python bench/environments.py --only tools,batch --emulated-seconds 900

EMULATED: the engines (laminar_hpc/emulation) generate nothing. Real: controller, store, rollout workers,
environments in processes of their own, sockets, messages, moves. Costs are those of docs/simulator.md for
Qwen2.5-7B on one H800 per replica. A call takes log-normal time (slow_tools.py): median 2 s, 99th percentile
60 s, never more than 120 s; all of it at --scale times its speed, as the engines are.

    batch      all that a replica generates waits for the slowest call of each turn (waiting_fleet.py)
    tools      functions as tools, each trajectory on its own, with repack
    still      the same without repack
    faults     as tools: 10 % of the calls fail, 1 % hang
    shelves    environments with a state, a process each, half as many at once; with repack
    fixed      the same without repack
    broken     as shelves: 10 % end their process at some moment, 1 % hang

trajectory_over_batch_waiting   drawn tokens per second of what has ended, tools over batch; goal >= 2
with_faults_over_without        the lower of faults over tools and broken over shelves; goal >= 0.85
groups_lost                     of both runs with faults; goal 0

What faults cost at least: 11 % of the attempts come to nothing, on average half of one each, so 0.94 of the
tokens are left (1 / (1 + 0.11 / 0.89 / 2)). The rest is waiting: on each publication's weights the last
replica waits for its slowest call, at most 120 s without faults, and until --time-limit with them.
"""

import argparse
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import common
import slow_tools

from helpers.emulated.launch import Emulation, prepare
from laminar_hpc.config.directories import examples_directory
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.report import rundata

REPLICAS, CONCURRENT, TURN, TURNS = 4, 64, 200, slow_tools.CALLS + 1
CAP, PROMPTS = 2048, 20_000
CALL = '<tool_call>\n{"name": "look", "arguments": {"key": "k"}}\n</tool_call>'
HUNG = 180.0  # emulated seconds of --time-limit
STEPS = 10_000  # never reached: the run is cut off
RECORDS = {"lost": "lost", "moves": "move", "moves off": "move_off"}  # columns, and the run's records
COLUMNS = (
    "run",
    "tokens/s",
    "trajectories",
    "latency s",
    "longest s",
    "lost",
    "groups lost",
    "moves",
    "moves off",
    "of the first",
)


@dataclass(frozen=True)
class Kind:
    """One run. `sessions`: trajectories of a replica's local batch."""

    shelves: bool = False
    faults: bool = False
    batch: bool = False
    repack: str = "kv"
    sessions: int = CONCURRENT


KINDS = {
    "batch": Kind(batch=True, repack="off"),
    "tools": Kind(),
    "still": Kind(repack="off"),
    "faults": Kind(faults=True),
    "shelves": Kind(shelves=True, sessions=CONCURRENT // 2),
    "fixed": Kind(shelves=True, repack="off", sessions=CONCURRENT // 2),
    "broken": Kind(shelves=True, faults=True, sessions=CONCURRENT // 2),
}


def kind_named(name: str) -> Kind:
    """Raises ValueError."""
    if name not in KINDS:
        raise ValueError(f"'{name}' is none of {', '.join(KINDS)}")
    return KINDS[name]


class BatchEmulation(Emulation):
    """Its fleets wait as batches do."""

    def start(self, role: str, *numbers: str) -> subprocess.Popen[bytes]:
        if role != "fleet":
            return super().start(role, *numbers)
        words = [str(Path(__file__).with_name("waiting_fleet.py")), str(self.run_dir), *numbers]
        return subprocess.Popen([sys.executable, *words], stdout=self.log, stderr=self.log)


def settings(folder: Path, kind: Kind, scale: float, hung: float = HUNG) -> RunConfig:
    """The configuration of one run; `hung`: emulated seconds after which a call or an environment is given
    up."""
    config = prepare(folder, PROMPTS, 6, CAP)
    model = Path(config.model.path)
    shutil.copytree(examples_directory("calculator/base"), model, dirs_exist_ok=True)
    own = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**own, "max_position_embeddings": 2 * CAP}))
    config.steps, config.trainer.tokens_per_microbatch = STEPS, 2 * CAP
    config.data.chat_template, config.rollout.increment_tokens = True, 64
    config.rollout.replicas, config.rollout.max_concurrent = REPLICAS, CONCURRENT
    config.rollout.kv_cache_tokens, config.rollout.request_timeout_seconds = 400_000, 3600.0
    config.algorithm.prompts_per_step, config.algorithm.samples_per_prompt = 64, 4
    config.cluster.heartbeat_timeout_seconds = config.cluster.join_timeout_seconds = 120.0
    e, p, v = config.emulation, config.pipeline, config.environment
    e.model, e.time_scale, e.wire_share, e.turn_tokens, e.call = "7B", scale, 1e-4, TURN, CALL
    e.median_response_tokens, e.sigma = 2.0 * CAP, 0.0  # the turns end it
    p.max_staleness, p.repack, p.repack_seconds, p.repack_requests = (
        None,
        kind.repack,
        5.0 / scale,
        CONCURRENT,
    )
    p.local_batch_groups = kind.sessions // config.algorithm.samples_per_prompt
    v.max_turns, v.timeout_seconds, v.max_seconds = TURNS, hung / scale, 1e5
    if kind.shelves:
        v.factory, config.reward.function = "slow_tools.Shelf", ""
    else:
        v.tools, config.reward.function = ["slow_tools.look"], "slow_tools.reward"
    return config


def measured(options: argparse.Namespace, folder: Path, name: str) -> dict:
    """One run and its row."""
    kind = KINDS[name]
    shutil.rmtree(folder / name, ignore_errors=True)
    config = settings(folder / name, kind, options.scale, options.time_limit)
    os.environ |= {"BENCH_TIME_SCALE": str(options.scale), "BENCH_FAULTS": "1" if kind.faults else ""}
    print(f"  {name}: {options.emulated_seconds:g} emulated seconds", file=sys.stderr, flush=True)
    run = (BatchEmulation if kind.batch else Emulation)(config, 1e-5, options.per_process)
    try:
        began = first_grant(run)
        start, end = (began + s / options.scale for s in (options.warm_up, options.emulated_seconds))
        while time.time() < end:
            time.sleep(min(1.0, max(0.0, end - time.time())))
            if any(p.poll() is not None for p in (run.controller, run.stage, *run.fleets.values())):
                raise SystemExit(f"the run ended before its time; see {run.run_dir.with_suffix('.log')}")
    finally:
        run.stop(patience=0.0)
    return {"run": name, **row(config, start, end, options.scale)}


def first_grant(run: Emulation) -> float:
    """Seconds since the epoch."""
    store = run.run_dir / "store.sqlite"
    while run.controller.poll() is None:
        if store.exists():
            database = sqlite3.connect(f"file:{store}?mode=ro", uri=True)
            try:
                [(first,)] = database.execute("SELECT min(granted_at) FROM groups").fetchall()
            except sqlite3.OperationalError:  # it is being made
                first = None
            finally:
                database.close()
            if first is not None:
                return first
        time.sleep(0.5)
    raise SystemExit(f"the run did not begin; see {run.run_dir.with_suffix('.log')}")


def row(config: RunConfig, start: float, end: float, scale: float) -> dict:
    database = sqlite3.connect(f"file:{config.run_dir}/store.sqlite?mode=ro", uri=True)
    ended = database.execute(
        "SELECT trained, time_finished - time_started FROM trajectories WHERE time_finished BETWEEN ? AND ?",
        (start, end),
    ).fetchall()
    [(lost,)] = database.execute("SELECT count(*) FROM groups WHERE state = 'given_up'").fetchall()
    database.close()
    records = rundata.load(Path(config.run_dir)).records
    seconds = [found * scale for _, found in ended]
    return {
        "tokens/s": sum(tokens for tokens, _ in ended) / ((end - start) * scale),
        "trajectories": len(ended),
        "latency s": statistics.fmean(seconds),
        "longest s": max(seconds),
        "groups lost": lost,
        **{what: sum(start <= r["time"] <= end for r in records.get(of, [])) for what, of in RECORDS.items()},
    }


def figures(rows: dict[str, dict]) -> dict[str, float | None]:
    """Of the runs that were made."""

    def ratio(over: str, under: str) -> float | None:
        return rows[over]["tokens/s"] / rows[under]["tokens/s"] if {over, under} <= rows.keys() else None

    faults = [found for found in (ratio("faults", "tools"), ratio("broken", "shelves")) if found is not None]
    hurt = [rows[name]["groups lost"] for name in ("faults", "broken") if name in rows]
    return {
        "trajectory_over_batch_waiting": ratio("tools", "batch"),
        "without_repack_over_batch_waiting": ratio("still", "batch"),
        "with_faults_over_without": min(faults, default=None),
        "groups_lost": sum(hurt) if hurt else None,
    }


def find_tools() -> None:
    """Environment workers import `slow_tools`."""
    paths = [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def main() -> None:
    options = common.options_of(__doc__ or "")
    options.add_argument("--runs-dir", type=Path, help="keep the runs there (default: a temporary folder)")
    options.add_argument(
        "--emulated-seconds", type=float, default=1800.0, help="length of a run (default 1800)"
    )
    options.add_argument("--warm-up", type=float, default=300.0, help="of that, left out (default 300)")
    options.add_argument("--scale", type=float, default=10.0, help="emulated seconds per second (default 10)")
    limit = f"environment.timeout_seconds, emulated (default {HUNG:g})"
    options.add_argument("--time-limit", type=float, default=HUNG, help=limit)
    options.add_argument("--per-process", type=int, default=2, help="replicas per process (default 2)")
    options.add_argument("--only", type=common.words(kind_named), default=list(KINDS), help="of the runs")
    options = options.parse_args()
    find_tools()
    with common.run_folder(options) as folder:
        rows = {name: measured(options, folder, name) for name in options.only}
    first = next(iter(rows.values()))["tokens/s"]
    table = [{**found, "of the first": found["tokens/s"] / first} for found in rows.values()]
    common.finish(options, figures(rows), table, COLUMNS)


if __name__ == "__main__":
    main()
