"""Who starts replicas for a run on Slurm: slurm/scale.sh, unless the user names a program."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from laminar_hpc.config.directories import shipped_directory
from laminar_hpc.config.schema import RunConfig

ROLLOUTS = "rollouts.sbatch"


def comment(run_dir: Path) -> str:
    """The option of sbatch by which slurm/scale.sh finds the rollouts of a run."""
    return f"--comment=laminar {run_dir}"


def scale_words(config: RunConfig, gpus: int, options: Sequence[str], settings: Sequence[str]) -> list[str]:
    """The setting that a run with rollout.replicas=MIN:MAX lacks, else none. `gpus` of each node, 0 = run on
    the CPU; `options` of sbatch and `settings` of the run are those of its other rollouts."""
    if not config.rollout.scales or config.cluster.scale_command:
        return []
    of_gpus = [f"--gpus-per-node={config.rollout.tensor_parallel}"] if gpus else []
    folder = shipped_directory("slurm")
    words = ["bash", str(folder / "scale.sh"), *of_gpus, *options, str(folder / ROLLOUTS), *settings]
    return [f"cluster.scale_command={shlex.join(words)}"]
