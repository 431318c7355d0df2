"""Who tells the user of a death, when every role has a torchrun of its own.

On several machines everybody who sees it does: who started the process, the controller, and whoever waits for
it. Under launch/all_roles.sh they all print to one terminal: there only who started the process does, and
knows most about it.
"""

import os

SHARED_VARIABLE = "LAMINAR_ONE_TERMINAL"
FAILED_ELSEWHERE = 4  # exit code of a rank that ends because another one has failed, and says so


def shared() -> bool:
    """Whether all roles of the run print to one terminal."""
    return os.environ.get(SHARED_VARIABLE) == "1"
