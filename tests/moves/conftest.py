import pytest

from laminar_hpc.controller.trajectories.answers import Answers
from laminar_hpc.line.messages.moves import Answer


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
    """Those that the controller has heard."""
    heard, on_answer = list[Answer](), Answers.on_answer

    def noted(self: Answers, member: object, answer: Answer) -> None:
        heard.append(answer)
        on_answer(self, member, answer)  # type: ignore[arg-type]

    monkeypatch.setattr(Answers, "on_answer", noted)
    return heard
