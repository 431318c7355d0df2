"""What a run's files say of its work and of what each part of it cost, and what came of it.

Everything is taken from the launch with the most steps, of a run that was cut off and went on, and there from
the newest steps, as many as are simulated in seconds; of a run that changed its number of replicas, from the
longest time without a change. Seconds are the run's own, those of emulated engines too.
"""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import read_config
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.machine.observability.trace import TraceSpan
from laminar_hpc.policies.sizing import saturation_requests
from laminar_hpc.report import rundata
from laminar_hpc.report.idle import busy, overlap
from laminar_hpc.report.rundata import Consumed, Run
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.finished.courses import Turns, read_turns
from laminar_hpc.simulator.finished.decode import (
    DecodeCurve,
    MeasuredBatch,
    Queue,
    decode_curve,
    local_batches,
    not_negative,
    speeds,
)
from laminar_hpc.simulator.finished.length_trend import lengths_ahead
from laminar_hpc.simulator.finished.turn_decode import turn_curve, turn_speeds
from laminar_hpc.simulator.request import EngineAdmission
from laminar_hpc.simulator.trainer_cost import only_training, updates_seconds
from laminar_hpc.simulator.trainer_fit import layout_of

WARMUP_STEPS = 2
SPLIT = ("generate", "tool", "wait")  # what the seconds of a trajectory with several turns are spent on
_BATCHES_MIN = 6  # local batches that a curve of four numbers is taken from
_TRAJECTORIES_MAX = 100_000  # that are simulated, some 20 us each
_GENERATING = ("generate", "evaluate")
_SPREAD_MIN = 0.05  # of the tokens of a step; with less a fixed part cannot be told from one per token


@dataclass(frozen=True)
class Split:
    """Seconds of a trajectory in the engine, at its tools, and for its reset and a place in the engine."""

    generate: float
    tool: float
    wait: float

    @property
    def seconds(self) -> float:
        return self.generate + self.tool + self.wait

    @property
    def shares(self) -> tuple[float, float, float]:
        whole = self.seconds or 1.0
        return self.generate / whole, self.tool / whole, self.wait / whole

    @staticmethod
    def of(parts: Sequence[float | None]) -> "Split | None":
        """None where one is not known."""
        known = [part for part in parts if part is not None]
        return Split(*known) if len(known) == len(SPLIT) else None


@dataclass(frozen=True)
class Figures:
    """What came of a run after its first WARMUP_STEPS steps, as happened and as simulated alike. A rollout is
    idle while it generates nothing for training."""

    tokens_per_second: float
    step_seconds: float
    trainer_wait_share: float
    rollout_idle_share: float
    staleness_mean: float
    split: Split | None = None  # of trajectories with several turns


@dataclass(frozen=True)
class TrainerCosts:
    """Seconds: of a step beside its tokens, of each token of the rank that has the most (`token`), of a
    publication that the trainer waits for, of what follows until relays have it, of a checkpoint."""

    step: float
    token: float
    publish: float
    relay: float
    checkpoint: float


@dataclass(frozen=True)
class Measured:
    """`lengths`: of each group that was trained, in the order in which they were granted. `score`: seconds
    from the last token of a group to its last reward. `speeds`: of each replica beside the curve. `turns`:
    what its trajectories did, where they had several. `growth`: the mean of `lengths` over that of what was
    trained."""

    config: RunConfig
    steps: int
    lengths: list[list[int]]
    queue: Queue
    curve: DecodeCurve
    speeds: list[float]
    trainer: TrainerCosts
    pull: float
    score: float
    move: float
    happened: Figures
    turns: Turns | None = None
    scales: str = ""  # rollout.replicas, where it is MIN:MAX; `config` has the number that is simulated
    growth: float = 1.0


def measure(run_dir: Path) -> Measured:
    """Raises LaminarError when `run_dir` is no run, when it is too short to measure a decode curve from, or
    its rollouts are interrupted in the middle of local batches."""
    run = rundata.load(run_dir)
    return measure_run(run, read_config(run_dir / "config.yaml"))


def measure_run(run: Run, config: RunConfig, ahead: int = 0) -> Measured:
    """The same of a loaded run with its configuration; with responses as long as those of the next `ahead`
    steps will be (length_trend.py)."""
    if config.pipeline.refresh == "interrupt":
        raise LaminarError(
            f"{run.directory}: a run with pipeline.refresh=interrupt cannot be predicted, its local batches "
            "are spread over several weights; one with drained or barrier can"
        )
    steps = _steps(run, config)
    if len(steps) <= WARMUP_STEPS + 2:
        raise LaminarError(
            f"{run.directory}: {len(steps)} steps are too few to learn from; let it run for longer"
        )
    first, last = steps[0], steps[-1]
    begin, end = first["time"] - first["seconds"], last["time"]
    trained = [t for t in run.consumed if first["step"] <= t.consumed_step + 1 <= last["step"]]
    queue = _queue(steps, config)
    batches, rollouts = local_batches(run, begin, end), _rollouts(run, begin, end)
    for path, found in ((run.store, trained), (run.directory / "trace", rollouts)):
        if not found:
            raise LaminarError(f"{path} has nothing of the run's newest steps; copy the run again with it")
    if len(batches) < _BATCHES_MIN:
        raise LaminarError(
            f"{run.directory}: {len(batches)} local batches in its traces, all of them trained, are too few "
            "to measure a decode curve from; let it run for longer"
        )
    turns = _turns_of(run, config, trained)
    if turns is None:
        curve = decode_curve(batches, queue)
        known = speeds(batches, curve, queue)
    else:
        curve, known = _curve_of_turns(run, config, batches, turns, queue)
    longer = lengths_ahead(trained, ahead, config.sampling.max_response_tokens)
    if turns is not None and longer:
        turns = turns.scaled({t.id: longer[t.id] / max(1, t.response_length) for t in trained})
    scales = str(config.rollout.replicas) if config.rollout.scales else ""
    config.rollout.replicas = len(rollouts)
    return Measured(
        config,
        len(steps),
        _lengths(trained, longer),
        queue,
        curve,
        [known.get(replica, 1.0) for replica in rollouts],
        _trainer_costs(run, config, steps, trained),
        _pull_seconds(rollouts, steps),
        _score_seconds(trained),
        _move_seconds(run, config),
        _figures(rollouts, steps),
        turns,
        scales,
        sum(longer.values()) / sum(t.response_length for t in trained) if longer else 1.0,
    )


def _turns_of(run: Run, config: RunConfig, trained: list[Consumed]) -> Turns | None:
    environment = config.environment
    if not environment.several or environment.history == "branch":
        return None  # the turns of branches are not one conversation: their lengths are replayed
    return read_turns(run, trained, environment, config.sampling.max_response_tokens)


def _curve_of_turns(
    run: Run, config: RunConfig, batches: list[MeasuredBatch], turns: Turns, queue: Queue
) -> tuple[DecodeCurve, dict[int, float]]:
    """With the speed of each replica."""
    played = [[turns.played[i] for i in batch.ids if i in turns.played] for batch in batches]
    whole = [
        (batch, of)
        for batch, of in zip(batches, played, strict=True)
        if batch.seconds is not None and len(of) == len(batch.ids) and all(each.turns for each in of)
    ]
    if len(whole) < _BATCHES_MIN:
        raise LaminarError(
            f"{run.directory}: of {len(whole)} local batches all turns are known, too few to measure a "
            "decode curve from; let it run for longer"
        )
    curve = turn_curve([of for _, of in whole], queue)
    return curve, turn_speeds(whole, curve, queue, config.environment.timeout_seconds)


def _queue(steps: list[dict], config: RunConfig) -> Queue:
    prompt = sum(s["prompt_tokens"] for s in steps) / sum(s["trajectories"] for s in steps)
    admission = EngineAdmission.of(config.sampling.max_response_tokens, DEFAULT)
    r = config.rollout
    return Queue(max(1, round(prompt)), r.kv_cache_tokens, r.max_concurrent, admission)


def _steps(run: Run, config: RunConfig) -> list[dict]:
    """The newest ones of the longest launch, in order."""
    longest = max((launch.steps for launch in run.launches), key=len, default=[])
    if config.rollout.scales:
        longest = _unchanged(run, longest)
    of_step = config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt
    return longest[-max(WARMUP_STEPS + 3, _TRAJECTORIES_MAX // of_step) :]


def _unchanged(run: Run, steps: list[dict]) -> list[dict]:
    """The longest part of the steps in which no replica came or went."""
    here = {
        name: (min(s.t0 for s in spans), max(s.t1 for s in spans))
        for name, all_spans in run.spans.items()
        if name.startswith("rollout") and (spans := [s for s in all_spans if s.kind == "generate"])
    }

    def replicas(step: dict) -> set[str]:
        begin, end = step["time"] - step["seconds"], step["time"]
        return {name for name, (came, went) in here.items() if came < end and went > begin}

    parts = [list(part) for _, part in itertools.groupby(steps, replicas)]
    return max(parts, key=len, default=[])


def _lengths(trained: list[Consumed], longer: dict[int, int]) -> list[list[int]]:
    groups = defaultdict[int, list[int]](list)
    for t in sorted(trained, key=lambda t: t.id):
        groups[t.group_id].append(longer.get(t.id, t.response_length))
    return [groups[group] for group in sorted(groups)]


def _rollouts(run: Run, begin: float, end: float) -> dict[int, list[TraceSpan]]:
    """The spans of each replica that generated between two times."""
    found = {
        int(name.removeprefix("rollout")): spans
        for name, spans in run.spans.items()
        if name.startswith("rollout")
    }
    return {
        replica: spans
        for replica, spans in sorted(found.items())
        if any(s.kind == "generate" and s.t1 > begin and s.t0 < end for s in spans)
    }


def _window(steps: list[dict]) -> tuple[float, float]:
    """From the end of the warm-up to that of the last step."""
    return steps[WARMUP_STEPS - 1]["time"], steps[-1]["time"]


def _figures(rollouts: dict[int, list[TraceSpan]], steps: list[dict]) -> Figures:
    (begin, end), counted = _window(steps), steps[WARMUP_STEPS:]
    seconds, trajectories = end - begin, sum(s["trajectories"] for s in counted)
    generating = sum(overlap(busy(spans, ("generate",)), [(begin, end)]) for spans in rollouts.values())
    return Figures(
        sum(s["prompt_tokens"] + s["response_tokens"] for s in counted) / seconds,
        seconds / len(counted),
        min(1.0, sum(s["wait_seconds"] for s in counted) / seconds),
        1.0 - generating / (seconds * len(rollouts)),
        sum(s["staleness_training_mean"] * s["trajectories"] for s in counted) / trajectories,
        Split.of([_mean_of(counted, f"{kind}_seconds_mean") for kind in SPLIT]),
    )


def _mean_of(steps: list[dict], name: str) -> float | None:
    """Per trajectory; None where a step has none."""
    if any(step.get(name) is None for step in steps):
        return None
    return float(sum(s[name] * s["trajectories"] for s in steps) / sum(s["trajectories"] for s in steps))


def _trainer_costs(run: Run, config: RunConfig, steps: list[dict], trained: list[Consumed]) -> TrainerCosts:
    """Of the steps after the warm-up. What a step takes beside waiting and training is its publication and,
    where one was written, its checkpoint."""
    by_step, prompt = defaultdict[int, list[int]](list), _queue(steps, config).prompt_tokens
    for t in trained:
        by_step[t.consumed_step + 1].append(t.response_length + prompt)
    updates, layout = config.algorithm.minibatches_per_step, layout_of(config.trainer)
    random, unit = np.random.default_rng(0), only_training(1.0 / layout.ranks)
    counted = [s for s in steps[WARMUP_STEPS:] if by_step[s["step"]]]
    if not counted:
        raise LaminarError(f"{run.directory}: its store knows nothing of what its newest steps trained")
    work = [updates_seconds(by_step[s["step"]], updates, unit, layout, random) for s in counted]
    seconds = [s["train_seconds"] for s in counted]
    fixed, token = 0.0, sum(seconds) / sum(work)
    if statistics.pstdev(work) > _SPREAD_MIN * statistics.fmean(work):
        fixed, token = not_negative(np.array([[1.0, w] for w in work]), np.array(seconds))
    relayed = {r["step"]: r["time"] for r in run.records.get("relay", [])}
    saved = {r["step"] for r in run.records.get("checkpoint", [])}
    rest = {s["step"]: max(0.0, s["seconds"] - s["wait_seconds"] - s["train_seconds"]) for s in counted}
    publish = _mean([x for step, x in rest.items() if step not in saved])
    late = [relayed[s["step"]] - s["time"] for s in counted if {s["step"]} & relayed.keys() - saved]
    checkpoint = max(0.0, _mean([x for step, x in rest.items() if step in saved]) - publish)
    return TrainerCosts(fixed, token, publish, max(0.0, _mean(late)), checkpoint)


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _pull_seconds(rollouts: dict[int, list[TraceSpan]], steps: list[dict]) -> float:
    """From the begin of a pull to that of the local batch that follows it: the pull, its announcement and the
    grant. With a share of the time in which evaluations were generated."""
    begin, end = _window(steps)
    pulls, evaluated, until_work = list[float](), 0.0, list[float]()
    for spans in rollouts.values():
        inside = [s for s in spans if s.t0 >= begin and s.t1 <= end and s.kind in ("pull", *_GENERATING)]
        pulls += [s.t1 - s.t0 for s in inside if s.kind == "pull"]
        evaluated += sum(s.t1 - s.t0 for s in inside if s.kind == "evaluate")
        pairs = itertools.pairwise(inside)
        until_work += [b.t0 - a.t1 for a, b in pairs if (a.kind, b.kind) == ("pull", "generate")]
    # the median: some wait for admission too, which is simulated
    granted = statistics.median(until_work) if until_work else 0.0
    return _mean(pulls) + granted + evaluated / max(1, len(pulls))


def _score_seconds(trained: list[Consumed]) -> float:
    ends = defaultdict[int, list[tuple[float, float]]](list)
    for t in trained:
        ends[t.group_id].append((t.time_finished, t.time_scored))
    return _mean([max(0.0, max(s for _, s in rows) - max(f for f, _ in rows)) for rows in ends.values()])


def _move_seconds(run: Run, config: RunConfig) -> float:
    """Of a trajectory to another replica: as in the run, else what the simulator takes."""
    moves = [r["seconds"] for r in run.records.get("move", []) if r["source"] is not None]
    if moves:
        return _mean(moves)
    scale = config.emulation.time_scale if config.rollout.engine == "emulated" else 1.0
    return DEFAULT.kv_move_latency / scale


def repack_requests(measured: Measured) -> int:
    """Requests up to which repack fills a replica: configured, else from the curve, as a run does."""
    given = measured.config.pipeline.repack_requests
    if given is not None:
        return given
    at_most = measured.config.rollout.max_concurrent
    curve = measured.curve
    points = [(n, curve.step + n * curve.token) for n in (1, at_most)]
    return max(1, saturation_requests(points)) if points[0][1] > 0 else at_most
