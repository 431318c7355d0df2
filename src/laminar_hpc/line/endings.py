"""How a worker's line to the controller ends: the exceptions that its role meets where it waits."""

from laminar_hpc.config.errors import LaminarError

RUN_FAILED = "the run has failed"  # reason of a Stop
SAME_VERSION = "install the same version of laminar_hpc on all machines"


class Terminated(LaminarError):
    """This process was told to end by a signal."""

    def __init__(self) -> None:
        super().__init__("it was told to end")


class ControllerLost(LaminarError):
    """The controller has said nothing for too long."""


class TrainersReplaced(LaminarError):
    """Other trainers take the place of this trainer generation: nothing that it still does may count."""


class MessageRefused(LaminarError):
    """The controller has sent what this worker cannot read, so the two no longer agree on what happens."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"a message from the controller was refused: {error}; {SAME_VERSION}")


class StopReceived(Exception):
    """The controller asks this worker to leave; `reason` says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
