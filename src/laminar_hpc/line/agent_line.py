"""What an agent (launch/launch.py) and the ranks that it forks tell each other: orders at the start in one
environment variable, reports through a file in memory, and exit codes. A rank that a user's own torchrun
starts has neither orders nor anybody to report to."""

import os

import msgspec

VARIABLE = "LAMINAR_AGENT"
# exit codes of a rank: it was refused before the run began, failed and would fail again for sure, or ends
# because another one has failed, which says so
REFUSED, PERMANENT, FAILED_ELSEWHERE = 2, 3, 4


class RankOrders(msgspec.Struct, frozen=True):
    """What an agent tells each of its ranks.

    `one_terminal`: all roles of the run print to one terminal. There only the agent of a process says how it
    died; on several machines everybody who sees it does. `spare`: a controller that finds another one alive
    waits for its turn, and shows that by this file (store/turn.py); "" = it is refused."""

    report_to: int = -1  # descriptor of the file for reports
    one_terminal: bool = False
    deaf_to_term: bool = (
        False  # a Slurm may send TERM to all processes of a job; the agent says what it means
    )
    spare: str = ""
    starts_replicas: bool = False  # the agent starts rollouts when the controller asks for them


class RankReport(msgspec.Struct, omit_defaults=True):
    """What a rank tells its agent: an error, or a mistake in what it was asked for (`refused`), one line for
    each; `joined_as`: "rollout 3", when it has joined the run; of a controller when it has the run; `start`:
    it asks for so many rollouts more."""

    error: str = ""
    refused: bool = False
    joined_as: str = ""
    start: int = 0


def orders() -> RankOrders:
    """Those of this process."""
    return msgspec.json.decode(os.environ.get(VARIABLE, "{}"), type=RankOrders)


def report(said: RankReport) -> bool:
    """Returns False in a process that no agent has forked."""
    if (file := orders().report_to) < 0:
        return False
    os.write(file, msgspec.json.encode(said) + b"\n")
    return True


def reported(file: int, begin: int) -> tuple[list[RankReport], int]:
    """What stands in the file from byte `begin` on, and where that ends."""
    lines, newline, _ = os.pread(file, 1 << 20, begin).rpartition(b"\n")
    found = [msgspec.json.decode(line, type=RankReport) for line in lines.splitlines()]
    return found, begin + len(lines + newline)
