import pytest

from laminar_hpc.controller.trajectories.answers import AnswerRouting
from laminar_hpc.line.messages.moves import Answer


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Answer]:
    """Those that the controller has heard."""
    heard, on_answer = list[Answer](), AnswerRouting.on_answer

    def noted(self: AnswerRouting, member: object, answer: Answer) -> None:
        heard.append(answer)
        on_answer(self, member, answer)  # type: ignore[arg-type]

    monkeypatch.setattr(AnswerRouting, "on_answer", noted)
    return heard
