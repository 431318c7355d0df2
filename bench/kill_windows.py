"""SIGKILL in named windows of the life of a trajectory, a step and a weight id; `laminar audit` after it.

    python bench/kill_windows.py --kills 20 --seconds 2400 --json windows.json

A run with roles apart; bench/windows/sitecustomize.py has each rank die in the next window of its
role, no window far ahead of the others, until every window has had `--kills` deaths or the time is over.
Whatever has died is started again by its script; `--between` seconds after a death the next may come, which
is mostly before that is done. Then the roles are left alone for `--calm` seconds, in which the run
has to train on, and stopped. With --runs-dir another call goes on with the same run and its counts.

Figures: `deaths`, and `windows` of which each had `--kills` of them; `audit_culprits` and `responses_lost`
(responses that were stored and then given up): goals 0; `steps` trained, `calm_steps` after the last death.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import common
from roles import Roles, audited, customize_roles, steps_done

COLUMNS = ("window", "role", "function", "at", "deaths")
# name -> role, module, function, and whether the rank dies when it is called or when it has returned
WINDOWS = {
    "group-drawn": ("controller", "store.rows", "Rows.add_group", "return"),
    "turn-done": ("controller", "store.store", "Store.commit", "call"),
    "turn-committed": ("controller", "controller.loop", "Controller.send_all", "call"),
    "response-stored": ("controller", "store.rows", "Rows.store_response", "return"),
    "score-stored": ("controller", "store.rows", "Rows.finish_trajectory", "return"),
    "batch-consumed": ("controller", "store.rows", "Rows.consume", "return"),
    "weight-id-asked": ("controller", "controller.weights.weight_ids", "Weights.on_new_weight_id", "call"),
    "weight-id-given": ("controller", "controller.weights.weight_ids", "Weights.on_new_weight_id", "return"),
    "step-recorded": ("controller", "controller.training", "Training.on_step_done", "return"),
    "batch-taken": ("trainer", "trainer.inbox", "BatchInbox.take", "return"),
    "step-trained": ("trainer", "trainer.inbox", "BatchInbox.report", "call"),
    "publication-begun": ("trainer", "trainer.publishing.leader", "PublishingLeader._send", "call"),
    "checkpoint-copied": ("trainer", "trainer.checkpoint", "Checkpointer.begin", "return"),
    "checkpoint-written": ("trainer", "trainer.checkpoint", "Checkpointer._check_fence", "call"),
    "checkpoint-named": ("trainer", "trainer.checkpoint", "Checkpointer._complete", "return"),
    "grant-come": ("rollout", "rollout.worker", "RolloutWorker._granted", "call"),
    "response-whole": ("rollout", "rollout.batch", "LocalBatch._judged", "return"),
    "score-begun": ("rollout", "rollout.scoring", "Scoring.begin", "return"),
    "pull-unverified": ("rollout", "rollout.weight_loader", "check_sums", "call"),
    "slot-begun": ("relay", "weights.relay.run", "Relay._begin", "return"),
    "slot-whole": ("relay", "weights.slots", "SlotWriter.commit", "return"),
}


def window(name: str) -> tuple[str, str, str, str]:
    if name not in WINDOWS:
        raise ValueError(f"there is no window {name}; there are {', '.join(WINDOWS)}")
    return WINDOWS[name]


def deaths(folder: Path, names: Iterable[str]) -> dict[str, int]:
    return {name: len(list(folder.glob(f"{name}.*.death"))) for name in names}


@contextmanager
def running(options: argparse.Namespace, folder: Path, plan: Path) -> Iterator[Roles]:
    words = [f"experiment={options.experiment}", f"steps={10**6}", "checkpoint.every=1", "restarts=0"]
    customize_roles("windows")
    os.environ["KILL_WINDOWS"] = str(plan)
    roles = Roles(folder / "run", [*words, "evaluation.files=[]", *options.overrides], folder / "run.log")
    try:
        yield roles
    finally:
        (plan / "plan.json").unlink(missing_ok=True)
        late = roles.end()
        print(f"  {late} roles did not end by themselves", file=sys.stderr, flush=True)


def until_all_had_theirs(roles: Roles, options: argparse.Namespace, plan: Path) -> None:
    until, said = time.monotonic() + options.seconds, 0
    while time.monotonic() < until:
        roles.tend_for(1.0)
        counts = deaths(plan, options.windows)
        if min(counts.values()) >= options.kills:
            return
        if sum(counts.values()) >= said + 20:
            said = sum(counts.values())
            left = until - time.monotonic()
            print(f"  {said} deaths, {left:.0f} s left, step {steps_done(roles.run_dir)}", file=sys.stderr)


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--kills", type=int, default=20, help="in each window (default 20)")
    parser.add_argument("--seconds", type=float, default=2400.0, help="at most (default 2400)")
    parser.add_argument("--calm", type=float, default=90.0, help="without deaths, at the end (default 90)")
    parser.add_argument("--between", type=float, default=8.0, help="seconds from death to death (default 8)")
    parser.add_argument(
        "--windows",
        type=common.words(window),
        default=list(WINDOWS),
        help="some of them, with commas (default all)",
    )
    options = parser.parse_args()
    names = ("role", "module", "function", "when")
    windows = {name: dict(zip(names, window(name), strict=True)) for name in options.windows}
    for each in windows.values():
        each["module"] = f"laminar_hpc.{each['module']}"
    with common.run_folder(options) as folder:
        plan = folder / "windows"
        plan.mkdir(parents=True, exist_ok=True)
        content = {"windows": windows, "between": options.between, "kills": options.kills}
        (plan / "plan.json").write_text(json.dumps(content))
        with running(options, folder, plan) as roles:
            until_all_had_theirs(roles, options, plan)
            (plan / "plan.json").unlink()
            before = steps_done(roles.run_dir)
            roles.tend_for(options.calm)
        counts = deaths(plan, options.windows)
        culprits, lost = audited(folder / "run")
        steps = steps_done(folder / "run")
    rows = [
        {"window": n, "role": w["role"], "function": w["function"], "at": w["when"], "deaths": counts[n]}
        for n, w in windows.items()
    ]
    figures: dict[str, float | None] = {
        "deaths": sum(counts.values()),
        "windows": sum(count >= options.kills for count in counts.values()),
        "audit_culprits": len(culprits),
        "responses_lost": lost,
        "steps": steps,
        "calm_steps": steps - before,
    }
    common.finish(options, figures, rows, COLUMNS)


if __name__ == "__main__":
    main()
