"""A trajectory's limits, and what is said of it."""

from laminar_hpc.config.schema import EnvironmentConfig
from laminar_hpc.environments.turns.episode import Episode


def test_limits_on_turns_calls_and_time() -> None:
    """The first that is met ends it; calls of one turn are made all or not at all."""
    limits = EnvironmentConfig(max_turns=3, max_tool_calls=2, max_seconds=10.0)
    episode = Episode(limits, began=100.0)
    episode.reset(100.0, 0.5)
    episode.turn(0, 40, 0.5)
    assert episode.limit(["a"], 109.0) == "" and episode.limit(["a"], 110.0) == "time"
    assert episode.limit(["a"] * 3, 101.0) == "calls"
    episode.called(["a", "b"], 1, 1.5)
    episode.waited(0.25)
    episode.turn(80, 76, 2.0)
    assert episode.limit(["a"], 101.0) == "calls" and episode.limit([], 101.0) == ""
    episode.turn(120, 114, 0.0)
    assert episode.limit([], 101.0) == "turns"
    assert episode.figures(now=108.0) == {
        "environment.turns": 3.0,
        "environment.tool_calls": 2.0,
        "environment.failed_calls": 1.0,
        "environment.generate_seconds": 2.5,
        "environment.tool_seconds": 1.5,
        "environment.wait_seconds": 0.75,
        "environment.cached_share": 0.95,
        "environment.busy_share": 0.25,
    }
