"""`laminar doctor [--clean]`: one line for each thing a run needs from this machine, with the cure where
something is wrong.

It reads package metadata and /proc instead of importing torch or SGLang, so it answers in a second and also
where an import would crash. Each line is `ok|warn|FAIL  what: value  (cure)`; the exit code is 1 when a line
says FAIL. With --clean it removes what killed runs have left in shared memory and in the folder for temporary
files.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator

from laminar_hpc.doctor.findings import Finding
from laminar_hpc.doctor.machine import demo, left_behind, machine, network, sandbox, slurm, trust
from laminar_hpc.doctor.packages import engines, python_and_compiler, torch_and_gpus

CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    python_and_compiler,
    torch_and_gpus,
    engines,
    left_behind,
    machine,
    sandbox,
    network,
    trust,
    slurm,
    demo,
)


def main(options: Namespace) -> int:
    """Prints the findings; returns 1 if one of them is a FAIL."""
    failed = False
    for check in CHECKS:
        for finding in check(True) if options.clean and check is left_behind else check():
            print(finding, flush=True)
            failed |= finding.level == "FAIL"
    return int(failed)
