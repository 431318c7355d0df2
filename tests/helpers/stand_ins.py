"""Ranks that are programs of a test: where laminar_hpc.launch.ranks._RANK is STAND_IN, the first word of a
group is the Python code that its ranks run."""

import sys
from pathlib import Path

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.launch.launch_role import RoleGroup
from laminar_hpc.launch.ranks import Ranks
from laminar_hpc.line.agent_line import RankOrders
from laminar_hpc.policies.restarts import Restarts

# code of a rank that has joined the run
JOINED = """import os
from laminar_hpc.line.agent_line import RankReport, report
report(RankReport(joined_as="one"))
"""
STAND_IN = (sys.executable, "-c", "import sys; exec(sys.argv.pop(1))")


def one_rank(
    role: str, run_dir: Path, code: str, *words: str, per_hour: int = 0, first: int = 0
) -> RoleGroup:
    """A started group."""
    config = RunConfig(run_dir=str(run_dir), role=role, first_index=first)
    return RoleGroup(config, [code, *words], Ranks([0], 1), Restarts(per_hour), RankOrders())
