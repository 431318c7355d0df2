"""What `laminar plan` writes for a candidate: the experiment file, and for more than one machine a script
that starts each machine's part and a Slurm job that runs it on all of them. Everything that was simulated
stands in the file."""

import dataclasses
import json
import math
from dataclasses import dataclass

from laminar_hpc.config.directories import conf_directory
from laminar_hpc.config.schema import EnvironmentConfig, LoraConfig
from laminar_hpc.config.yaml_text import load_yaml
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.divisions import (
    Candidate,
    away,
    describe,
    kv_cache_tokens,
    machine_size,
    repack_of,
    rooms,
    trainer_settings,
    trainer_spread,
)
from laminar_hpc.simulator.plan_memory import lanes
from laminar_hpc.simulator.schema import PlanConfig
from laminar_hpc.simulator.tables import GPUS, MODELS

_RELAY_THREADS = 8  # of a relay, each of which copies some 4 GB/s, as in conf/experiment
_RATE, _ADAPTER_RATE = 1e-6, 1e-5  # of learning, as in conf/experiment; the default is the demo's
_SELDOM = ("context_parallel", "expert_parallel", "virtual_stages")  # written where they are above 1
_PATIENCE = 4  # time limits of requests and batches, over the longest that was simulated


@dataclass(frozen=True)
class Machines:
    """Machines of one pool that do the same: `gpus` used and processes on each. `beside`: they are the
    trainer's, which uses the others of their GPUs."""

    pool: int
    gpus: int
    processes: tuple[int, ...]
    beside: bool = False

    @property
    def count(self) -> int:
        return len(self.processes)


def trainer_machines(config: PlanConfig, candidate: Candidate) -> Machines:
    count, each = trainer_spread(config.pools[candidate.trainer_pool], candidate.trainer_gpus)
    return Machines(candidate.trainer_pool, each, (each,) * count)


def rollout_machines(config: PlanConfig, candidate: Candidate) -> list[Machines]:
    """Of each pool, those without a trainer first; `processes` are replicas, and the last machine may have
    fewer."""
    found, trainers = list[Machines](), trainer_machines(config, candidate)
    if candidate.shared:
        return [Machines(candidate.trainer_pool, 1, (1,), beside=True)]
    for pool, gpus, tp in candidate.rollouts:
        trains = pool == candidate.trainer_pool
        room, left = rooms(config.pools[pool], trains * candidate.trainer_gpus, tp), gpus // tp
        whole = len(room) - trains * trainers.count
        for beside, part in ((False, room[:whole]), (True, room[whole:])):
            counts = list[int]()
            for free in part:
                counts.append(min(free // tp, left))
                left -= counts[-1]
            if counts := [n for n in counts if n]:
                size = machine_size(config.pools[pool])
                taken = counts[0] * tp if beside else min(size, gpus)
                found.append(Machines(pool, taken, tuple(counts), beside))
    return found


def beside_trainers(machines: list[Machines]) -> range:
    """Which of the rollout machines, as they are numbered, are trainer machines 0, 1, ... too."""
    first = 0
    for part in machines:
        if part.beside:
            return range(first, first + part.count)
        first += part.count
    return range(0)


def numbers(machines: range) -> str:
    """As `0 to 3`."""
    return f"{machines[0]} to {machines[-1]}" if len(machines) > 1 else str(machines[0])


def on_one_machine(config: PlanConfig) -> bool:
    """Whether one machine holds all GPUs of the only pool."""
    return len(config.pools) == 1 and config.pools[0].count <= GPUS[config.pools[0].gpu].machine


def _yaml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_yaml(each)}" for key, each in value.items()) + "}"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    # a word that YAML reads as something else: off is false
    return json.dumps(text) if isinstance(value, str) and load_yaml(text) != value else text


def experiment(config: PlanConfig, candidate: Candidate, figures: dict) -> str:
    """DIR/experiment/NAME.yaml for `--config-dir DIR`. `figures`: of the simulated run, for time limits."""
    lines = ["# @package _global_", f"# laminar plan {config.name}: {describe(config, candidate)}."]
    lines += ["# Give data.train and reward.function on the command line.", *_of_turns(config)]
    lines += [f"run_dir: runs/{config.name}"]
    for name, keys in _sections(config, candidate, figures).items():
        lines += [f"{name}:", *(f"  {key}: {_yaml(value)}" for key, value in keys.items())]
    return "\n".join(lines) + "\n"


def _sections(config: PlanConfig, candidate: Candidate, figures: dict) -> dict[str, dict[str, object]]:
    t, w, tp = trainer_settings(config, candidate), config.workload, candidate.tensor_parallel
    memory = min(GPUS[config.pools[pool].gpu].memory for pool, *_ in candidate.rollouts) / 1e9
    slowest = math.ceil(_PATIENCE * max(figures["latency_max"], figures["step_seconds"], 450.0) / 600) * 600
    ready = 600 if on_one_machine(config) else 1800
    devices: dict[str, object] = {"devices": t.devices} if candidate.shared else {}
    return {
        "model": {"path": MODELS[config.model].path, "dtype": "bfloat16", **_adapter(config)},
        "sampling": {"max_response_tokens": w.max_response_tokens},
        "algorithm": {
            "prompts_per_step": w.prompts_per_step,
            "samples_per_prompt": w.samples_per_prompt,
            "minibatches_per_step": w.updates_per_step,
        },
        "optimizer": {"lr": _ADAPTER_RATE if config.lora.rank else _RATE},
        "trainer": {
            "tensor_parallel": t.tensor_parallel,
            "pipeline_parallel": t.pipeline_parallel,
            "data_parallel": t.data_parallel,
            **{key: value for key in _SELDOM if (value := getattr(t, key)) > 1},
            "distributed_optimizer": t.distributed_optimizer,
            "recompute_activations": t.recompute_activations,
            "tokens_per_microbatch": t.tokens_per_microbatch,
            "gpu_memory_gigabytes": t.gpu_memory_gigabytes,
            **devices,
        },
        "relay": {
            "lanes": lanes(config),
            "threads": _RELAY_THREADS,
            **_over_wide_area(config, candidate, figures),
        },
        "rollout": {
            "replicas": candidate.replicas,
            "tensor_parallel": tp,
            "max_concurrent": config.max_concurrent,
            "kv_cache_tokens": kv_cache_tokens(config, candidate),
            "gpu_memory_gigabytes": memory,
            **devices,
            "engine_start_seconds": ready,
            "request_timeout_seconds": slowest,
        },
        "pipeline": {
            "name": "laminar",
            "refresh": "drained",
            "consumption": "batch",
            "max_staleness": config.max_staleness,
            "repack": repack_of(config, candidate),
            "repack_seconds": DEFAULT.repack_period,
        },
        "cluster": {"join_timeout_seconds": ready, "batch_timeout_seconds": slowest},
        **_limits(config, slowest),
    }


def _adapter(config: PlanConfig) -> dict[str, object]:
    """`lora` with what is not by default."""
    given, usual = dataclasses.asdict(config.lora), dataclasses.asdict(LoraConfig())
    changed = {key: value for key, value in given.items() if value != usual[key]}
    return {"lora": changed} if config.lora.rank else {}


def _of_turns(config: PlanConfig) -> list[str]:
    """What several turns were simulated with, as comments: the run's own tools decide."""
    w = config.workload
    if w.turns == 1:
        return []
    return [
        "# Give environment.tools, factory, agent or verifiers too.",
        f"# Simulated: up to {w.turns} turns, calls of {w.turn_seconds:g} s (median), sigma {w.turn_sigma:g} "
        f"of the log, {w.turn_tokens} tokens after each.",
    ]


def _limits(config: PlanConfig, slowest: int) -> dict[str, dict[str, object]]:
    """The limits on several turns that were simulated, and the batch's on the time of a trajectory."""
    turns = config.workload.turns
    if turns == 1:
        return {}
    limits = EnvironmentConfig(max_turns=turns, max_tool_calls=turns, max_seconds=float(slowest))
    keys = ("max_turns", "max_tool_calls", "timeout_seconds", "max_seconds")
    return {"environment": {key: getattr(limits, key) for key in keys}}


def _over_wide_area(config: PlanConfig, candidate: Candidate, figures: dict) -> dict[str, object]:
    """Relay settings where rollouts are in other places: changes only, and time for a copy in full."""
    if not away(config, candidate):
        return {}
    longest = math.ceil(_PATIENCE * max(figures["site_copy_seconds_max"], 15.0))
    return {"delta": "auto", "publish_timeout_seconds": longest}


def launch_script(config: PlanConfig, candidate: Candidate) -> str:
    """NAME.sh: what one machine starts. Machines of a role are numbered from 0, across pools in order."""
    trainers, rollouts = trainer_machines(config, candidate), rollout_machines(config, candidate)
    counts = [n for machines in rollouts for n in machines.processes]
    beside = beside_trainers(rollouts)
    return _LAUNCH.format(
        name=config.name,
        what=describe(config, candidate),
        launch=conf_directory().parent / "launch",
        lanes=lanes(config),
        trainers=trainers.processes[0],
        trainer_machines=trainers.count,
        last_trainer=trainers.count - 1,
        last_rollout=len(counts) - 1,
        replicas=" ".join(map(str, counts)),
        beside=f"\n#                              N = {numbers(beside)}: on trainer machines"
        if beside
        else "",
    )


_LAUNCH = r"""#!/usr/bin/env bash
# {name}.sh ROLE MACHINE [overrides]   Starts one machine's part of: {what}
#
#   {name}.sh controller 0     once, first, on the first trainer machine
#   {name}.sh trainer N        on each trainer machine, N = 0 to {last_trainer}
#   {name}.sh rollout N        on each rollout machine, N = 0 to {last_rollout}: relays and replicas{beside}
#   {name}.sh stop 0           anywhere: the step is finished, a checkpoint written, exit code 0
#
# Run it in the same folder on all machines, one that they share. Environment:
#   RUN_DIR   of the run, on a file system that all machines share (default runs/{name})
#   HOST      an address of this machine that the others can reach (default: its first one)
#   STORE     a folder on a local disk of the controller's machine, for its store (default: RUN_DIR)
#   LAUNCH    the project's launch/ folder
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[ $# -ge 2 ] || {{ sed -n '2,/^[^#]/{{/^#/s/^# \{{0,1\}}//p}}' "$0"; exit 2; }}
role=$1 machine=$2; shift 2
refuse() {{ echo "{name}.sh: $1" >&2; exit 2; }}
LAUNCH=${{LAUNCH:-{launch}}} RUN_DIR=${{RUN_DIR:-runs/{name}}}
HOST=${{HOST:-$(hostname -I | awk '{{print $1}}')}}
[ -f "$LAUNCH/common.sh" ] || refuse "LAUNCH=$LAUNCH is not the project's launch/ folder"
replicas=({replicas})         # of each rollout machine
declare -A machines=([controller]=1 [stop]=1 [trainer]={trainer_machines} [rollout]=${{#replicas[@]}})
[ -n "${{machines[$role]:-}}" ] || refuse "no role $role: controller, trainer, rollout or stop"
[[ $machine =~ ^[0-9]+$ ]] && [ "$machine" -lt "${{machines[$role]}}" ] ||
  refuse "no $role machine $machine: they are 0 to $((machines[$role] - 1))"
common=("$RUN_DIR" --config-dir "$here" experiment={name} cluster.host="$HOST" ${{STORE:+store_dir="$STORE"}})
case $role in
  controller) exec "$LAUNCH/controller.sh" "${{common[@]}}" "$@" ;;
  trainer)
    first=$((machine * {trainers}))
    TRAINERS={trainers} exec "$LAUNCH/trainer.sh" "${{common[@]}}" first_index=$first "$@" ;;
  rollout)
    relay= rollout= signalled=
    trap 'signalled=1; kill -TERM $relay $rollout 2>/dev/null || true' TERM INT
    LANES={lanes} "$LAUNCH/relay.sh" "${{common[@]}}" first_index=$((machine * {lanes})) "$@" & relay=$!
    ROLLOUTS=${{replicas[machine]}} "$LAUNCH/rollout.sh" "${{common[@]}}" "$@" & rollout=$!
    end_of() {{
      local code=0; wait "$1" || code=$?
      # a trapped signal ends a wait, not what is waited for
      while [ -n "$signalled" ]; do signalled=; code=0; wait "$1" || code=$?; done
      return $code
    }}
    failed=0
    end_of $rollout || failed=1
    end_of $relay || failed=1
    exit $failed ;;
  stop) . "$LAUNCH/common.sh"; exec laminar stop "$RUN_DIR" ;;
esac
"""


def sbatch(config: PlanConfig, candidate: Candidate) -> str:
    """NAME.sbatch: a heterogeneous Slurm job with one component for the trainer and one per rollout pool."""
    parts = [
        ("trainer", trainer_machines(config, candidate)),
        *(("rollout", machines) for machines in rollout_machines(config, candidate)),
    ]
    head, steps, begin = [], [], 0
    for index, (role, machines) in enumerate(parts):
        pool = config.pools[machines.pool]
        head += ["#SBATCH hetjob"] if index else []
        gpus = f"{pool.gpu.lower()}:{machines.gpus}"
        head.append(f"#SBATCH --nodes={machines.count} --ntasks-per-node=1 --gpus-per-node={gpus}")
        head.append(f"# ^ {role}" + (", preemptible" if pool.preemptible else ""))
        first = begin if role == "rollout" else 0
        begin += machines.count if role == "rollout" else 0
        steps.append(f'start {index} {role} {first} "$@"' + ("; trainer=$!" if role == "trainer" else ""))
    return _SBATCH.format(name=config.name, head="\n".join(head), steps="\n".join(steps))


_SBATCH = """#!/usr/bin/env bash
# sbatch {name}.sbatch [overrides]   All machines of the plan in one heterogeneous Slurm job.
# Add --account, --partition and --time.
# USR1, two minutes before the time limit, ends the run in order; a requeued job goes on from its checkpoint.
#SBATCH --job-name={name}
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
#SBATCH --open-mode=append
#SBATCH --output={name}-%j.log
{head}
set -euo pipefail
script=${{SCRIPT:-$SLURM_SUBMIT_DIR/{name}.sh}}   # submit in the folder that holds both, or name {name}.sh
export RUN_DIR=${{RUN_DIR:-$SLURM_SUBMIT_DIR/runs/{name}}}
set -- resume=auto "$@"

signalled=
start() {{ # COMPONENT ROLE FIRST_MACHINE [overrides]
  local component=$1; shift
  srun --het-group="$component" bash -c 'script=$1 role=$2 machine=$(($3 + SLURM_NODEID)); shift 3
    exec "$script" "$role" "$machine" "$@"' {name} "$script" "$@" &
}}
ended() {{ # PROCESS: its exit code; a trapped signal ends a wait, not the process
  local code=0; wait "$1" || code=$?
  while [ -n "$signalled" ]; do signalled=; code=0; wait "$1" || code=$?; done
  return $code
}}
stop() {{ signalled=1; "$script" stop 0 || true; }}
trap stop USR1 TERM

"$script" controller 0 "$@" & controller=$!
{steps}
code=0
ended $trainer || {{ code=1; "$script" stop 0 || true; }}
ended $controller || code=1
exit $code                                      # Slurm ends what is left
"""
