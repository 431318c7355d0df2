"""Writes folders that look like runs, in the formats that a run's files have, without running anything: for
tests of what reads them.

`write` simulates a small laminar run: replicas that generate and pull, a trainer that trains in grant order
under a staleness bound. Every number that a test needs is either given by the caller or can be recomputed
from the rows returned.
"""

import json
import random
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from helpers.made import Made, stored
from laminar_hpc.line.messages.data import ScorePart, VersionSpan
from laminar_hpc.machine.files import jsonl
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.store.store import Store

CHARACTERS = "0123456789+=;>"
EPOCH = 1_800_000_000.0


@dataclass
class Written:
    """What `write` made: the step records in order, and (id, consumed_step, response_length) of every
    consumed trajectory."""

    steps: list[dict] = field(default_factory=list)
    consumed: list[tuple[int, int, int]] = field(default_factory=list)
    start: float = EPOCH
    end: float = EPOCH


@dataclass
class Replica:
    index: int
    trace: Trace
    clock: float
    version: int = 0


def write_model(directory: Path) -> Path:
    """A folder with a tokenizer.json that knows CHARACTERS, one token each."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token=CHARACTERS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def write(
    run_dir: Path,
    *,
    steps: int = 12,
    start_step: int = 0,
    start: float = EPOCH,
    replicas: int = 2,
    groups: int = 8,
    samples: int = 4,
    bound: int = 2,
    crash: bool = False,
    evaluate: bool = True,
    seed: int = 0,
) -> Written:
    """One launch that does steps start_step+1 .. steps, appended to `run_dir`; start_step > 0 is a resume.
    `crash`: it has no end."""
    run_dir.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    metrics = jsonl.Appender(run_dir / "metrics.jsonl")

    def log(kind: str, time: float, **fields: object) -> dict:
        record = {"kind": kind, "time": time, **fields}
        metrics.write(record)
        return record

    def log_evaluation(time: float, name: str, label: str, step: int, accuracy: float) -> None:
        workers[0].trace.record("evaluate", time - 1.0, time)
        for file, share in (("heldout", 1.0), ("harder", 0.5)):
            found = {
                "name": name,
                "file": file,
                "label": label,
                "step": step,
                "weight_id": step,
                "accuracy": accuracy * share,
            }
            log("evaluation", time, **found, problems=64, samples=1, seconds=1.0, response_length_mean=20.0)

    model = write_model(run_dir.parent / "model")
    config = {
        "run_dir": str(run_dir),
        "seed": seed,
        "steps": steps,
        "source": "rollout",
        "model": {"path": str(model)},
        "pipeline": {"name": "laminar", "max_staleness": bound},
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    store = Store(run_dir)
    store.rows.restore(start_step)
    derived = {"trajectories_per_step": groups * samples, "publish_bytes": 3_100_000, "max_staleness": bound}
    log("start", start, restored_step=start_step or None, pipeline="laminar", derived=derived)

    trainer, relay = Trace(run_dir, "trainer", 0), Trace(run_dir, "relay", 0)
    controller = Trace(run_dir, "controller", 0)
    ready = start + 8.0
    trainer.record("load", start + 2.0, start + 5.0)
    workers = [Replica(i, Trace(run_dir, "rollout", i), ready, start_step) for i in range(replicas)]
    for worker in workers:
        worker.trace.record("load", start + 2.0, ready)
    if evaluate and start_step == 0:
        for name, value in (("greedy", 0.21), ("sampled", 0.17)):
            ready += 1.0
            log_evaluation(ready, name, "before", 0, value)
        for worker in workers:
            worker.clock = ready

    written = Written(start=start)
    available = {start_step: ready}  # weight step -> since when the relay has it
    finished: list[tuple[float, int, int]] = []  # (time, replica, weight step) of groups, in grant order
    clock = last_end = ready
    step, granted = start_step, start_step * groups
    _, next_group, next_id = store.next_ids()
    controller.record("wait", start, ready)
    while step < steps:
        if len(finished) >= groups:
            batch, finished = finished[:groups], finished[groups:]
            begin = max(clock, max(time for time, *_ in batch))
            trainer.record("wait", clock, begin, step=step)
            train = begin + rng.uniform(0.5, 0.7)
            trainer.record("train", begin, train, step=step)
            trainer.record("publish", train, train + 0.03, step=step + 1)
            trainer.record("send", train + 0.03, train + 0.15, step=step + 1)
            relay.record("relay", train + 0.03, train + 0.2, step=step + 1)
            done = train + 0.04
            rows = make_rows(rng, batch, step, steps, samples, next_group, next_id, available)
            next_group, next_id = next_group + groups, next_id + len(rows)
            store_rows(store, rows, step)
            record = step_record(rows, step, begin - clock, train - begin, done - last_end)
            written.steps.append(log("step", done, **record))
            written.consumed += [(r.trajectory_id, step, len(r.response_tokens)) for r in rows]
            for worker in workers:
                for row in (r for r in rows if r.replica == worker.index):
                    worker.trace.record("score", row.time_finished, row.time_scored)
            step += 1
            available[step] = train + 0.2
            log(
                "publish",
                train + 0.15,
                weight_id=step,
                step=step,
                stall_seconds=0.03,
                seconds=0.15,
                bytes=3_100_000,
            )
            log("relay", train + 0.2, index=0, weight_id=step, step=step, seconds=0.17, bytes=3_100_000)
            mismatch = rng.uniform(1.6e-7, 2.4e-7)
            log(
                "logprob_mismatch",
                train + 0.3,
                weight_id=step,
                step=step,
                replica="rollout0",
                mean=mismatch,
                max=15 * mismatch,
            )
            clock = last_end = done
            continue
        worker = min(workers, key=lambda w: w.clock)
        newest = max(v for v, since in available.items() if since <= worker.clock)
        if newest > worker.version:
            pull = rng.uniform(0.08, 0.14)
            worker.trace.record("pull", worker.clock, worker.clock + pull, weight_id=newest)
            worker.clock, worker.version = worker.clock + pull, newest
            parts = {"lock": 0.001, "load": pull / 2}
            log(
                "pull",
                worker.clock,
                replica=worker.index,
                weight_id=newest,
                step=newest,
                seconds=pull,
                parts=parts,
            )
        share = -(-groups // replicas)
        if (granted + share - 1) // groups <= worker.version + bound:
            end = worker.clock + rng.uniform(0.9, 1.5)
            worker.trace.record(
                "generate", worker.clock, end, weight_id=worker.version, trajectories=share * samples
            )
            finished += [(end - rng.uniform(0, 0.3), worker.index, worker.version) for _ in range(share)]
            granted, worker.clock = granted + share, end
        else:
            later = min(since for since in available.values() if since > worker.clock)
            worker.trace.record("wait", worker.clock, later)
            worker.clock = later
    log("regranted", clock, trajectories=[3], reason="engine error")
    if not crash:
        trainer.record("checkpoint", clock, clock + 0.4)
        log("checkpoint", clock + 0.4, step=step, path="checkpoints/last", seconds=0.4, state_hash="0" * 64)
        clock += 0.5
        for name, value in (("greedy", 0.93), ("sampled", 0.88)) if evaluate else ():
            clock += 1.0
            log_evaluation(clock, name, "after", step, value)
        log("end", clock + 0.5, reason="finished", step=step)
        clock += 0.5
    store.close()
    for trace in (trainer, relay, controller, *(worker.trace for worker in workers)):
        trace.close()
    metrics.close()
    written.end = clock
    return written


def trajectory(
    trajectory_id: int,
    group: int,
    *,
    prompt: str,
    response: str,
    versions: tuple[int, ...],
    replica: int = 0,
    end: float = EPOCH,
) -> Made:
    """A wrong answer, generated in equal parts with `versions` as weight ids and steps."""
    tokens = [CHARACTERS.index(c) for c in response]
    cuts = [len(tokens) * i // len(versions) for i in range(len(versions) + 1)]
    return Made(
        trajectory_id=trajectory_id,
        group_id=group,
        attempt=1,
        replica=replica,
        weight_id=versions[0],
        weight_step=versions[0],
        prompt_tokens=[CHARACTERS.index(c) for c in prompt],
        response_tokens=tokens,
        logprobs=[-0.1] * len(tokens),
        finish_reason="stop",
        time_started=end - 0.8,
        time_finished=end,
        step_finished=versions[0],
        version_spans=[
            VersionSpan(v, start, stop) for v, start, stop in zip(versions, cuts, cuts[1:], strict=False)
        ],
        time_scored=end,
        reward_parts={"accuracy": 0.0},
    )


def make_rows(rng, batch, step, steps, samples, first_group, first_id, available) -> list[Made]:
    """The trajectories of one batch: answers get better and shorter with `step`."""
    rows = []
    skill = 0.2 + 0.75 * step / max(1, steps)
    for group, (end, replica, version) in enumerate(batch, first_group):
        a, b = rng.randrange(10, 99), rng.randrange(10, 99)
        finished_at = (
            max(v for v, since in available.items() if since <= end)
            if min(available.values()) <= end
            else version
        )
        for _ in range(samples):
            right = rng.random() < skill
            text = (
                "1+2+0=03;" * rng.randrange(0, 6) if rng.random() > skill / 2 else ""
            ) + f">{a + b if right else a + b + 1}"
            if rng.random() < 0.03:
                text = "9+9+1=19;" * rng.randrange(8, 20) + text
            row = trajectory(
                first_id + len(rows),
                group,
                prompt=f"{a}+{b}=",
                response=text,
                versions=(version,),
                replica=replica,
                end=end,
            )
            row.step_finished = max(version, finished_at)
            row.time_scored = end + rng.uniform(0.01, 0.05)
            row.reward = row.reward_parts["accuracy"] = float(right)
            row.reward_error = "" if rng.random() < 0.98 else "ValueError: no"
            rows.append(row)
    for row in rows:
        row.step_finished = min(row.step_finished, step)
    return rows


def finish(store: Store, row: Made, accuracy: float) -> None:
    """Generated, then scored."""
    score = ScorePart(row.time_scored, row.reward, row.reward_parts, row.reward_error)
    store.rows.store_response(stored(store.path.parent, row))
    store.rows.finish_trajectory(row.trajectory_id, score, accuracy)


def store_rows(store: Store, rows: list[Made], consumed_step: int) -> None:
    """Puts the trajectories into the store as the controller does: granted, finished, consumed with the
    weights of `consumed_step`."""
    groups = sorted({r.group_id for r in rows})
    for group in groups:
        members = [r for r in rows if r.group_id == group]
        store.rows.add_group(
            group, 0, members[0].weight_id, members[0].weight_step, group, members[0].time_started
        )
        store.rows.add_prompt(group, members[0].prompt_tokens)
        for index, row in enumerate(members):
            ids = range(row.trajectory_id, row.trajectory_id + 1)
            store.rows.add_trajectories(ids, group, index, row.replica, row.weight_id, row.weight_step)
            finish(store, row, row.reward_parts["accuracy"])
        store.rows.finish_group(group, members[0].weight_step, group, members[0].time_scored)
    store.rows.consume(groups, consumed_step)
    store.rows.note_mismatches(
        {
            r.trajectory_id: (0.25 * (consumed_step - r.weight_step) + 1e-6, consumed_step - r.weight_step)
            for r in rows
        }
    )
    store.commit()


def step_record(rows: list[Made], step: int, wait: float, train: float, seconds: float) -> dict:
    """The fields of a metrics line of kind step."""
    lengths = [len(r.response_tokens) for r in rows]
    generation = [r.step_finished - r.weight_step for r in rows]
    training = [step - r.weight_step for r in rows]
    mean = statistics.fmean
    return {
        "step": step + 1,
        "reward_mean": mean([r.reward for r in rows]),
        "accuracy_mean": mean([r.reward_parts["accuracy"] for r in rows]),
        "reward_error_count": sum(bool(r.reward_error) for r in rows),
        "ratio_mean": 1.001,
        "ratio_max": 1.8,
        "clip_fraction": 0.004,
        "entropy": 0.6 / (1 + step),
        "grad_norm": 0.4,
        "loss": -0.01,
        "learning_rate": 1e-4,
        "skipped_updates": 0,
        "truncated_fraction": 0.0,
        "response_tokens": sum(lengths),
        "response_length_mean": mean(lengths),
        "response_length_max": max(lengths),
        "prompt_tokens": sum(len(r.prompt_tokens) for r in rows),
        "trajectories": len(rows),
        "staleness_generation_mean": mean(generation),
        "staleness_generation_max": max(generation),
        "staleness_training_mean": mean(training),
        "staleness_training_max": max(training),
        "versions_per_trajectory_max": 1,
        "wait_seconds": wait,
        "train_seconds": train,
        "seconds": seconds,
        "groups_filtered": 2,
        "tokens_generated": 2 * sum(lengths),
        "samples_saved": 8,
        "tokens_saved": 8 * mean(lengths),
    }


def replay_of(run_dir: Path, source: Written) -> None:
    """A replay run: the same steps trained again, with neither store, rollouts nor evaluations."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(
        yaml.safe_dump({"source": "replay:elsewhere", "pipeline": {"name": "laminar"}})
    )
    lines = [
        {"kind": "start", "time": source.start, "restored_step": None, "pipeline": "laminar", "derived": {}},
        *source.steps,
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = Trace(run_dir, "trainer", 0)
    for step in source.steps:
        trace.record("train", step["time"] - step["train_seconds"], step["time"], step=step["step"] - 1)
    trace.close()
