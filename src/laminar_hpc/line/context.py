"""What every role's `run(context)` gets: its place in the run, its channel to the controller, its trace."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.messages.membership import Welcome

if TYPE_CHECKING:
    from laminar_hpc.line.channel import Channel
    from laminar_hpc.machine.observability.trace import Trace


@dataclass
class RoleContext:
    """What a rank knows when its role begins."""

    config: RunConfig
    role: str  # trainer | relay | rollout | controller
    index: int  # within the role, from 0
    machine: str  # names the host, that is, whose shared memory it sees
    run_dir: Path
    channel: "Channel"
    welcome: Welcome
    trace: "Trace"
