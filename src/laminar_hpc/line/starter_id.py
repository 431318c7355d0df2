"""What whoever has started a replica calls it: `cluster.scale_command stop ID` gets this word."""

import os
import re

from laminar_hpc.config.errors import LaminarError

VARIABLE = "LAMINAR_REPLICA_ID"
PATTERN = r"^([A-Za-z0-9][\w.:@/-]{0,127})?\Z"  # no option of a program, no word of a shell


def own_starter_id() -> str:
    """The variable LAMINAR_REPLICA_ID, else the Slurm job as scancel takes it, else "": also in a
    heterogeneous job, which scancel would end with its controller. Raises LaminarError for a value that is no
    single word."""
    environment = os.environ
    if (given := environment.get(VARIABLE, "")) and not re.search(PATTERN, given):
        raise LaminarError(
            f"{VARIABLE}={given!r}: use up to 128 letters, digits and _.:@/-, the first a letter or digit"
        )
    if "SLURM_HET_SIZE" in environment:
        return given
    array, element = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return given or (f"{array}_{element}" if array and element else environment.get("SLURM_JOB_ID", ""))
