"""Who tells the user of a death, when every role has a torchrun of its own.

Apart, on several machines, each tells it where it is seen: the one who started the process, the controller, and whoever waits for it.
Under launch/all_roles.sh all of them print to one terminal: there only the one who started the process does, who knows most of it.
"""

import os

SHARED_VARIABLE = "LAMINAR_ONE_TERMINAL"
FAILED_ELSEWHERE = 4  # exit code of a rank that ends because another one has failed, and says so


def shared() -> bool:
    """Whether all roles of the run print to one terminal."""
    return os.environ.get(SHARED_VARIABLE) == "1"
