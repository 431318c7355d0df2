"""Reward errors are counted, the first is said, and a whole batch of them in a row ends the run."""

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.trajectories.rewards import RewardErrors
from laminar_hpc.line.messages.rollouts import Scored


def errors(samples: int = 4) -> tuple[RewardErrors, list[str]]:
    lines: list[str] = []
    config = RunConfig()
    config.algorithm.prompts_per_step, config.algorithm.samples_per_prompt = 2, samples
    config.reward.function, config.reward.score_on_failure = "mine.f", -1.0
    return RewardErrors(config, lines.append), lines


def scored(error: str, number: int = 7, evaluation: str = "") -> Scored:
    return Scored(number, 0, 0.0, {}, error, 1.0, evaluation)


def test_the_first_error_is_said_once():
    """The user sees the first reward error; all are counted."""
    watch, lines = errors()
    for error in ("", "KeyError: 'a'", "", "KeyError: 'b'"):
        assert watch.take(scored(error)) == ""
    assert lines == ["reward       the first error, trajectory 7: KeyError: 'a' (it counts as -1)"]
    assert (watch.scored, watch.count, watch.first) == (4, 2, "KeyError: 'a'")


def test_a_whole_first_batch_of_failures_ends_the_run():
    """Evaluations count too. The line has the error, the key and where to read on."""
    watch, lines = errors()
    assert [watch.take(scored("TypeError: x", i, "before-greedy-0" if i < 3 else "")) for i in range(7)] == [
        ""
    ] * 7
    why = watch.take(scored("TypeError: y"))
    assert why.startswith(
        "the rewards of the first 8 responses, a whole batch, all failed, the last with: TypeError: y; m"
    )
    assert "of an evaluation" in lines[0]


def test_one_success_is_enough_to_go_on():
    """The failures must come in a row: 7 of 8 are no reason to end a run."""
    watch, _ = errors()
    assert not any(watch.take(scored("" if i % 8 == 0 else "TypeError: x")) for i in range(64))
    assert [bool(watch.take(scored("HTTP 503"))) for _ in range(8)] == [True, *[True] * 7], (
        "seven of the 64 were at the end"
    )
    assert watch.take(scored("HTTP 503")).startswith("the rewards of the last 16 responses")
