"""What of the weights changes from one step to the next, and what sending only that costs, at several
learning rates.

    python bench/deltas.py --json deltas.json     the shipped task, bfloat16, at its learning rate and 1e-6
    python bench/deltas.py --replay runs/demo --steps 20 --rates 1e-5     on the batches of a finished run

One run of the experiment makes the batches, unless --replay names one. For each learning rate a real Megatron
trainer trains on them again and publishes every step with relay.delta=auto to a chain of two real relay
processes, which check the sums of what they make of it.

Figures: `changed_LR`, the fraction of elements whose bits changed in a step (mean over steps), and
`bytes_over_full_LR`, what left the trainer over what full copies would have been, layout, sums and heads of
frames included, of all publications: the anchors and the first one are full. `most_over_full`: the largest
publication; auto never sends more than full, but for 16 bytes per chunk.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import common
import publish_roles

RATES = ("5e-5", "1e-6")
COLUMNS = (
    "rate",
    "dtype",
    "publications",
    "changed",
    "least",
    "most",
    "bytes over full",
    "of changes",
    "largest",
    "send seconds",
)


def main() -> None:
    options = common.parser(__doc__ or "")
    options.add_argument(
        "--rates", type=lambda text: text.split(","), default=list(RATES), help=f"default {','.join(RATES)}"
    )
    options.add_argument(
        "--replay", type=Path, help="a finished run whose batches are taken (default: a new run)"
    )
    options.add_argument("--child", help=argparse.SUPPRESS)
    options = options.parse_args()
    if options.child:
        print(json.dumps(measure(options, options.child)))
        return
    with common.run_folder(options) as folder:
        if options.replay is None:
            common.train(options, folder, "batches", {})
        replay = options.replay or folder / "batches"
        rows = [child(options, rate, replay, folder) for rate in options.rates]
    figures = {f"changed_{row['rate']}": row["changed"] for row in rows}
    figures |= {f"bytes_over_full_{row['rate']}": row["bytes over full"] for row in rows}
    common.finish(options, figures | {"most_over_full": max(row["largest"] for row in rows)}, rows, COLUMNS)


def child(options: argparse.Namespace, rate: str, replay: Path, folder: Path) -> dict:
    """The row of a learning rate, from a process of its own."""
    place = folder / f"rate-{rate}"
    place.mkdir(exist_ok=True)
    words = [
        "--child",
        rate,
        "--replay",
        str(replay.resolve()),
        "--runs-dir",
        str(place),
        "--experiment",
        options.experiment,
    ]
    words += ["--steps", str(options.steps)] if options.steps else []
    print(f"  learning rate {rate}", file=sys.stderr, flush=True)
    command = [sys.executable, __file__, *words, *options.overrides]
    one = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command, env=one, stdout=subprocess.PIPE, timeout=options.run_seconds, check=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(options: argparse.Namespace, rate: str) -> dict:
    """Trains on the stored batches in order; each publication is complete before the next one."""
    import torch
    import torch.distributed as dist

    from laminar_hpc.config.load import load_config
    from laminar_hpc.line.messages.chain import RelayHas
    from laminar_hpc.line.messages.publication import Published
    from laminar_hpc.store.payload.whole import wholes
    from laminar_hpc.store.store import Store
    from laminar_hpc.trainer.megatron.policy import MegatronPolicy
    from laminar_hpc.trainer.publishing.publisher import Publisher
    from laminar_hpc.trainer.step.batch import in_memory
    from laminar_hpc.trainer.step.learner import Learner

    words = [
        f"experiment={options.experiment}",
        "model.dtype=bfloat16",
        "relay.delta=auto",
        f"optimizer.lr={rate}",
        "guard.enabled=false",  # what is measured are updates of any size
        *options.overrides,
    ]
    config, store = load_config(words), Store(options.replay)
    dist.init_process_group(
        "nccl" if torch.cuda.is_available() else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    script = publish_roles.Script(
        config, options.runs_dir
    )  # first, so that the relays are there when they are needed
    policy = MegatronPolicy(config)
    learner = Learner(config, policy)
    publisher = Publisher(
        publish_roles.context(config, "trainer", 0, script.trainer, options.runs_dir), policy
    )
    script.link()
    step = 0
    while True:
        publisher.publish(step)
        script.wait_for(RelayHas, publish_roles.RELAYS * (step + 1))
        batch = wholes(store.run_dir, store.rows.batch(store.rows.consumed_groups(step)))
        if not batch or step == options.steps:
            break
        learner.train(in_memory(batch), step, publisher.fence)
        step += 1
    publisher.close()
    told = script.wait_for(Published, step + 1)
    script.stop()
    changed, ratios = [p.changed for p in told[1:]], [p.bytes / p.full_bytes for p in told]
    return {
        "rate": rate,
        "dtype": config.model.dtype,
        "publications": len(told),
        "changed": statistics.fmean(changed),
        "least": min(changed),
        "most": max(changed),
        "bytes over full": sum(p.bytes for p in told) / sum(p.full_bytes for p in told),
        "of changes": statistics.fmean(ratio for ratio in ratios if ratio != 1.0),
        "largest": max(ratios),
        "send seconds": statistics.median(p.seconds for p in told[1:]),
        "all changed": changed,
        "all over full": ratios,
    }


if __name__ == "__main__":
    main()
