"""How many files and sockets this process may have open. Imports no torch.

A shell's usual limit is 1,024, and in a large run a trainer rank or the controller has a connection to each
of many others: beyond the limit they fail one by one, far from the reason. A rollout has some to each of its
trajectories that has an environment.
"""

import resource

from laminar_hpc.config.errors import LaminarError

_OWN = 256  # files, pipes and libraries of a process without connections
# connections to the controller of who has not said who it is, where the hard limit allows them
_STRANGERS = 4096
_MESHES = 8  # groups of a trainer rank that are meshes: ours, Megatron's of the data-parallel ranks
_FEWEST = 3  # of them, those over all ranks


def allow_connections(others: int, meshes: bool) -> None:
    """Raises this process's limit where it is too low for connections to `others` processes, with `meshes`
    several to each. Raises LaminarError where the system does not let it."""
    wanted, needed = _OWN + others * (_MESHES if meshes else 1), _OWN + others * (_FEWEST if meshes else 1)
    wanted += 0 if meshes else _STRANGERS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise LaminarError(
            f"this process needs connections to {others} others and so about {needed} open files, and this "
            f"machine allows {hard}: raise its hard limit (ulimit -Hn, LimitNOFILE= of a service, "
            "--ulimit nofile= of a container)"
        )
    allow_files(wanted)


def allow_files(wanted: int) -> None:
    """Raises this process's limit to `wanted` where it is lower, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
