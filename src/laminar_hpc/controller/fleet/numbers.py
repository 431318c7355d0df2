"""The numbers of rollouts: in one world by their rank, else given here when they say Hello.

A number is given once in the life of a store, so that nothing of a replica that was lost, and wakes, is ever
taken for another's. Whoever has one says it in each later Hello, at this controller and at the next.
"""

from laminar_hpc.controller.fleet.members import Members
from laminar_hpc.line.messages.membership import UNNUMBERED, Hello
from laminar_hpc.store.store import Store

_KEY = "next_replica"


class ReplicaNumbers:
    """Called by controller/fleet/membership.py, in the transaction that lets the replica in."""

    def __init__(self, store: Store, members: Members) -> None:
        self._store = store
        self._members = members

    def of(self, identity: str, hello: Hello) -> int:
        """The number that this rollout has, or gets now."""
        member = self._members.of(identity)
        if hello.index == UNNUMBERED and member is not None:  # it has not had its Welcome
            return member.hello.index
        following = self._store.get(_KEY, 0)
        index = following if hello.index == UNNUMBERED else hello.index
        if index >= following:
            self._store.put(_KEY, index + 1)
        return index
