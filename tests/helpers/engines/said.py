"""What a part of a rollout says to the controller."""


class Line:
    """In a channel's place."""

    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)
