"""`laminar doctor [--clean]`: one line for each thing a run needs from this machine, with the cure where
something is wrong.

It reads package metadata and /proc instead of importing torch or SGLang, so it answers in a second and also
where an import would crash. The exit code is 1 when a line says FAIL. With --clean it removes what killed
runs have left in shared memory and in the folder for temporary files.
"""

from argparse import Namespace

from laminar_hpc.engine import leftovers
from laminar_hpc.launch.doctor import machine, packages
from laminar_hpc.launch.doctor.findings import CheckTable, MachineFinding, ok, report, size_text

CHECKS = CheckTable([*packages.CHECKS, *machine.CHECKS])


def main(options: Namespace) -> int:
    """Prints the findings; returns 1 if one of them is a FAIL."""
    for each in leftovers.clean() if options.clean else ():
        print(MachineFinding("removed", ok(f"{each.what} {each.path}, {size_text(each.size)}")), flush=True)
    return report(CHECKS.findings())
