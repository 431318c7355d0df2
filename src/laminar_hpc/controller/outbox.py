"""What the controller sends when the transaction of its turn has committed."""

from laminar_hpc.controller.members import Member
from laminar_hpc.messages import Message


class Outbox:
    """Filled by the handlers of one turn, emptied by `Controller.turn` after its commit."""

    def __init__(self) -> None:
        self._messages: list[tuple[str, Message]] = []

    def send(self, member: Member | None, message: Message) -> None:
        """To nobody when `member` is None: it has left."""
        if member is not None:
            self._messages.append((member.identity, message))

    def send_to(self, identity: str, message: Message) -> None:
        """To a sender that need not be a member."""
        self._messages.append((identity, message))

    def take(self) -> list[tuple[str, Message]]:
        """All of it, as (identity, message) in order."""
        messages, self._messages = self._messages, []
        return messages
