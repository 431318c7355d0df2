"""Faults while trajectories of several turns wait for a tool, each so many times, on emulated engines.

    python bench/environment_faults.py --json environment_faults.json      ten minutes

EMULATED: the engines (laminar_hpc/emulation) generate nothing, and die when they are told. Real: controller,
store, rollout workers, environments in processes of their own, sockets, messages, moves. Each run goes to its
end, and its records are audited.

    publications   new weights while tools are called: a trajectory that was in a call has one policy
    engines        an engine dies while its replica calls tools: what waited goes on, no call is made twice
    repack         a trajectory moves while it waits: the same
    graders        an environment dies when it is asked for its reward: the trajectory is graded by another
                   one, or given up with its group; never trained without a grade

A call is told by what it has returned, which is never the same: it must stand in one response, once. (A
turn that goes on in another emulated engine may end with half a call, which is answered as such.)

publications_right, engines_right, repack_right, graders_right     the share that went right; goal 1
times                                                              the fewest of a fault; goal >= 20
"""

import argparse
import asyncio
import json
import logging
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import common

import environments
from helpers.emulated.launch import Emulation
from laminar_hpc.config.load import read_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.data.tokens import TextDecoder
from laminar_hpc.environments.reward_pool import RewardPool
from laminar_hpc.machine.processes import die_with_parent
from laminar_hpc.report import rundata
from laminar_hpc.report.rundata import Run
from laminar_hpc.rollout.in_flight import State
from laminar_hpc.simulator.emulated.engine import EmulatedEngine
from laminar_hpc.simulator.emulation.fleet import EmulatedReplica
from laminar_hpc.store.audit.checks import audit
from laminar_hpc.store.audit.records import read
from laminar_hpc.store.payload.whole import Whole, wholes
from laminar_hpc.store.rows import stored_groups

KINDS = ("publications", "engines", "repack", "graders")
SESSIONS, GROUPS = 16, 8  # trajectories of a local batch; groups of a step
SCALE = 30.0
DEATHS = "deaths.jsonl"
RESULT = re.compile(r"<\|im_start\|>tool\n(.*?)<\|im_end\|>")  # a number, or that a call could not be read
COLUMNS = ("fault", "times", "right", "trajectories", "calls", "doubled", "lost results", "seconds")


# ---- the runs ----------------------------------------------------------------------------------------------


class Hurt(Emulation):
    """One whose engines die."""

    def start(self, role: str, *numbers: str) -> subprocess.Popen[bytes]:
        if role != "fleet":
            return super().start(role, *numbers)
        words = [sys.executable, __file__, "fleet", str(self.run_dir), *numbers]
        return subprocess.Popen(words, stdout=self.log, stderr=self.log)


def settings(folder: Path, kind: str, steps: int) -> RunConfig:
    """The configuration of one run."""
    own = environments.Kind(sessions=SESSIONS, repack="kv" if kind == "repack" else "off")
    config = environments.settings(folder, own, SCALE)
    config.steps, config.algorithm.prompts_per_step = steps, GROUPS
    config.environment.tools = ["slow_tools.told"]
    config.emulation.call = config.emulation.call.replace("look", "told")
    if kind == "graders":
        config.environment.tools, config.environment.factory = [], "slow_tools.Graded"
        config.emulation.call = environments.CALL
        config.reward.function = ""
    return config


async def fleet(config: RunConfig, first: int, count: int) -> None:
    """Replicas whose engines die while they wait for tools, until the last one has left."""
    pool = RewardPool(config.reward, config.data.prompt_field)
    await pool.start()
    replicas = [EmulatedReplica(config, index, pool) for index in range(first, first + count)]
    killer = asyncio.create_task(kill(Path(config.run_dir), replicas))
    try:
        await asyncio.gather(*(replica.run() for replica in replicas))
    finally:
        killer.cancel()
        await pool.close()


async def kill(run_dir: Path, replicas: list[EmulatedReplica]) -> None:
    """The engines, by turns, each in every second of its local batches, as one that dies in three in a row
    ends its replica: when some of its trajectories wait and others do not."""
    batches: dict[int, list[int | None]] = {replica.index: [] for replica in replicas}
    struck = set[tuple[int, int | None]]()
    while True:
        await asyncio.sleep(0.05)
        for replica in replicas:
            if (worker := replica.worker) is None:
                continue
            seen = batches[replica.index]
            if worker.grants.newest_batch not in seen:
                seen.append(worker.grants.newest_batch)
            works, engine = list(worker.batch.trajectories.values()), worker.engines.current
            waiting = [work.trajectory_id for work in works if work.state is State.WAITING]
            asking = [work.trajectory_id for work in works if work.request_id]
            due = len(seen) % 2 == 0 and (replica.index, seen[-1]) not in struck
            if due and len(waiting) > 1 and len(asking) > 1 and isinstance(engine, EmulatedEngine):
                struck.add((replica.index, seen[-1]))
                record = {"time": time.time(), "replica": replica.index, "waiting": waiting}
                with open(run_dir / DEATHS, "a") as file:
                    file.write(json.dumps(record) + "\n")
                engine.die()
                await asyncio.sleep(1.0)


# ---- what came of it ---------------------------------------------------------------------------------------


def stored(config: RunConfig) -> list[Whole]:
    """All trajectories that were scored."""
    database = sqlite3.connect(f"file:{config.run_dir}/store.sqlite?mode=ro", uri=True)
    groups = [i for (i,) in database.execute("SELECT id FROM groups WHERE state <> 'given_up'")]
    found = wholes(Path(config.run_dir), stored_groups(database, groups))
    database.close()
    return found


def noted(what: str) -> list[str]:
    file = Path(os.environ["BENCH_NOTES"], what)
    return file.read_text().split() if file.exists() else []


class Outcome:
    """Of one run: which of its trajectories are right."""

    def __init__(self, config: RunConfig) -> None:
        self.run: Run = rundata.load(Path(config.run_dir))
        self.wholes = {whole.record.trajectory_id: whole for whole in stored(config)}
        decoder = TextDecoder(Path(config.model.path))
        self.said = {i: self._said(decoder, whole) for i, whole in self.wholes.items()}
        counted = Counter(each for said in self.said.values() for each in said if each.isdigit())
        self.begun = noted("begun")
        self.doubled = {each for each, count in counted.items() if count > 1}
        self.lost = len(self.begun) - len(set(self.begun) & counted.keys())
        with read(Path(config.run_dir)) as records:
            self.culprits = [text for finding in audit(records) for text in finding.culprits]

    def _said(self, decoder: TextDecoder, whole: Whole) -> list[str]:
        return RESULT.findall(decoder.text(whole.response.tokens.tolist(), specials=True))

    def right(self, trajectory_id: int) -> bool:
        """It has ended, on one policy, with one result behind each call, and no call of it was made twice."""
        whole, said = self.wholes.get(trajectory_id), self.said.get(trajectory_id, [])
        if whole is None:
            return False
        one = {span.weight_id for span in whole.response.spans} == {whole.record.weight_id}
        calls = len(said) == len(whole.response.spans) - 1
        return one and whole.record.policies == 1 and calls and not self.doubled & set(said)

    def publications(self) -> list[bool]:
        calls = [
            (span.t0, span.t1, span.fields["trajectory_id"])
            for spans in self.run.spans.values()
            for span in spans
            if span.kind == "tool"
        ]
        found = []
        for record in self.run.records.get("publish", []):
            meant = {i for t0, t1, i in calls if t0 < record["time"] < t1}
            if meant:
                found.append(all(map(self.right, meant)))
        return found

    def engines(self) -> list[bool]:
        """None of those that waited has begun again."""
        deaths = [json.loads(line) for line in (self.run.directory / DEATHS).read_text().splitlines()]
        lost = [(record["time"], record["trajectory_id"]) for record in self.run.records.get("lost", [])]
        return [
            all(map(self.right, death["waiting"]))
            and not any(i in death["waiting"] and t > death["time"] for t, i in lost)
            for death in deaths
        ]

    def repack(self) -> list[bool]:
        moves = [record for record in self.run.records.get("move", []) if record.get("waiting")]
        lost = {record["trajectory_id"] for record in self.run.records.get("lost", [])}
        return [self.right(m["trajectory_id"]) and m["trajectory_id"] not in lost for m in moves]

    def graders(self) -> list[bool]:
        """Of each death: what is stored of its trajectory has a grade that an environment gave, or its group
        was given up."""
        given = Counter(noted("graded"))
        grades = {i: str(w.record.reward_parts["grade"]) for i, w in self.wholes.items()}
        used = Counter(grades.values())
        deaths = [r["trajectory_id"] for r in self.run.records.get("lost", []) if "get_reward" in r["reason"]]
        short = len(noted("died")) - len(deaths)
        sound = [i not in grades or (given[grades[i]] == 1 and used[grades[i]] == 1) for i in deaths]
        return sound + [False] * short


def measured(options: argparse.Namespace, folder: Path, kind: str) -> dict:
    """One run and its row."""
    shutil.rmtree(folder / kind, ignore_errors=True)
    config = settings(folder / kind, kind, options.steps)
    (folder / kind / "notes").mkdir()
    os.environ |= {"BENCH_TIME_SCALE": str(SCALE), "BENCH_NOTES": str(folder / kind / "notes")}
    print(f"  {kind}: {options.steps} steps", file=sys.stderr, flush=True)
    began = time.time()
    run = (Hurt if kind == "engines" else Emulation)(config, 1e-5, 2)
    try:
        code = run.wait(options.run_seconds)
    finally:
        run.stop()
    if code != 0:
        raise SystemExit(f"{kind} ended with {code}; see {run.run_dir.with_suffix('.log')}")
    found = Outcome(config)
    if found.culprits:
        raise SystemExit(f"{kind}: laminar audit says: {found.culprits[0]}")
    times = getattr(found, kind)()
    return {
        "fault": kind,
        "times": len(times),
        "right": sum(times),
        "trajectories": len(found.wholes),
        "calls": len(found.begun),
        "doubled": len(found.doubled),
        "lost results": found.lost,
        "seconds": time.time() - began,
    }


def main() -> None:
    if sys.argv[1:2] == ["fleet"]:
        die_with_parent()
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        config = read_config(Path(sys.argv[2]) / "config.yaml")
        return asyncio.run(fleet(config, int(sys.argv[3]), int(sys.argv[4])))
    options = common.options_of(__doc__ or "")
    options.add_argument("--runs-dir", type=Path, help="keep the runs there (default: a temporary folder)")
    options.add_argument("--run-seconds", type=float, default=900.0, help="limit of one run (default 900)")
    options.add_argument("--steps", type=int, default=25, help="trainer steps of a run (default 25)")
    options.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="of the faults")
    options = options.parse_args()
    environments.find_tools()
    with common.run_folder(options) as folder:
        rows = [measured(options, folder, kind) for kind in options.only]
    figures = {f"{row['fault']}_right": row["right"] / row["times"] if row["times"] else None for row in rows}
    return common.finish(options, figures | {"times": min(row["times"] for row in rows)}, rows, COLUMNS)


if __name__ == "__main__":
    main()
