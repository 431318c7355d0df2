"""Environments that stay where they were made while their trajectories move: what their trajectory's present
replica asks of them, by way of the controller. Their home, a replica, answers with Answer (moves.py), and
grades by a ScoreOrder that names them."""

from laminar_hpc.line.messages.data import Message


def replica_of(name: str) -> int:
    """Where it is: of the name of an environment that stays. -1 for what is none."""
    first = name.partition(":")[0]
    return int(first) if first.isascii() and first.isdecimal() and len(first) < 10 else -1


class Ask(Message):
    """To the controller, and from it to the home: make these calls, one after the other. Answer: Answer,
    under `name`; the same name may be asked again, and is called once. `home`: of Partial; `calls`: tools and
    their arguments, as JSON; `last`: the token behind which what they come to shall stand."""

    trajectory_id: int
    home: str
    name: str
    calls: list[tuple[str, str]]
    last: int


class LetGo(Message):
    """Controller to the home: the trajectory of this environment has ended, or begins again without it."""

    home: str
