"""The array of rollouts of a run of Slurm jobs is doubled in mid-run, then halved by preemption.

    python bench/slurm_array.py --json slurm_array.json      about six minutes; needs root

The nodes are those of a real Slurm on this machine (bench/slurm_cluster.py), the jobs those of
`laminar submit --apart`, the trainer Megatron. EMULATED: the engines (`rollout.engine=emulated`) generate
nothing, as two cores cannot show how two nodes of engines share their work.

joined_seconds     from `sbatch` of the second element to its replica's first weights
local_batch        seconds that one took before, median
rate_doubled       generated tokens per second over --window seconds, beginning one local batch after those
                   weights, over those before; goal 2
step_rate_doubled  the same of tokens that were trained
rate_halved        generated, over --window seconds after the preemption, over those before; goal 0.5
audit_culprits, responses_lost     goal 0
tokens_discarded   of the whole run; with the grace time that docs/slurm.md asks for what an element generates
                   moves on
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import common
from chaos_faults import Fault
from faults import tokens_per_second
from roles import audited, steps_done
from slurm_cluster import SlurmCluster, missing
from slurm_jobs import SlurmRun

from laminar_hpc.machine.observability.trace import TraceSpan
from laminar_hpc.report import rundata, summary
from laminar_hpc.report.rundata import Run

NODES, SLURMD_TIMEOUT = 4, 60
START_SECONDS = 400.0
WORDS = (
    *("rollout.engine=emulated", "emulation.model=7B", "emulation.gpu=H100", "emulation.tensor_parallel=1"),
    *("emulation.median_response_tokens=100", "emulation.sigma=0.5", "evaluation.files=[]"),
    *("checkpoint.every=20", f"steps={10**6}"),
)


def local_batches(run: Run) -> list[TraceSpan]:
    named = [spans for name, spans in run.spans.items() if name.startswith("rollout")]
    return [s for spans in named for s in spans if s.kind == "generate" and s.fields.get("tokens")]


def generated_per_second(run: Run, start: float, end: float) -> float:
    """Tokens of local batches, each spread over its time."""
    shares = (
        span.fields["tokens"] * max(0.0, min(span.t1, end) - max(span.t0, start)) / (span.t1 - span.t0)
        for span in local_batches(run)
    )
    return sum(shares) / (end - start)


def first_weights(run: Run, since: float) -> float:
    """When a replica that came after `since` got its first weights."""
    pulls = run.records["pull"]
    before = {pull["replica"] for pull in pulls if pull["time"] <= since}
    return min(pull["time"] for pull in pulls if pull["replica"] not in before)


def wait_for_another(run: SlurmRun, since: float) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        found = rundata.load(run.run_dir)
        if len({pull["replica"] for pull in found.records.get("pull", [])}) > 1:
            return
        run.tend_for(1.0)
    raise SystemExit(f"no replica of the second element within {START_SECONDS:.0f} s: {run.elements()}")


def measured(options: argparse.Namespace, cluster: SlurmCluster) -> dict[str, float | None]:
    window = options.window
    words = [f"experiment={options.experiment}", *WORDS, f"emulation.time_scale={options.time_scale}"]
    run = SlurmRun(cluster, "array", [*words, *options.overrides], rollouts=1)
    try:
        run.submit()
        run.until_step(3, START_SECONDS)
        run.tend_for(window)
        doubled = time.time()
        run.add_rollouts("1-1")
        wait_for_another(run, doubled)
        run.tend_for(2 * window)
        halved = time.time()
        Fault.read("preempt-rollout").strike(run, random.Random(options.seed))
        run.tend_for(2 * window)
        run.until_step(steps_done(run.run_dir) + 1, START_SECONDS)
    finally:
        print(f"  {run.end()} jobs did not end by themselves", file=sys.stderr, flush=True)
    found = rundata.load(run.run_dir)
    batch = statistics.median(s.t1 - s.t0 for s in local_batches(found) if s.t1 < doubled)
    came = first_weights(found, doubled)
    before, after = (doubled - window, doubled), (came + batch, came + batch + window)
    last, left = (halved - window, halved), (halved + batch, halved + batch + window / 2)
    culprits, lost = audited(run.run_dir)
    return {
        "joined_seconds": came - doubled,
        "local_batch": batch,
        "tokens_per_second": generated_per_second(found, *before),
        "rate_doubled": generated_per_second(found, *after) / generated_per_second(found, *before),
        "step_rate_doubled": tokens_per_second(found, *after) / tokens_per_second(found, *before),
        "rate_halved": generated_per_second(found, *left) / generated_per_second(found, *last),
        "audit_culprits": len(culprits),
        "responses_lost": lost,
        "tokens_discarded": summary.build(run.run_dir)["tokens_discarded"],
    }


def main() -> None:
    parser = common.parser(__doc__ or "")
    parser.add_argument("--window", type=float, default=40.0, help="seconds of each measurement (default 40)")
    parser.add_argument("--time-scale", type=float, default=0.5, help="emulated seconds per second")
    parser.add_argument("--seed", type=int, default=0, help="which element is preempted")
    options = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    with tempfile.TemporaryDirectory(prefix="array", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with SlurmCluster(Path(folder), NODES, SLURMD_TIMEOUT) as cluster:
            figures = measured(options, cluster)
        common.finish(options, figures, [figures], tuple(figures))


if __name__ == "__main__":
    main()
