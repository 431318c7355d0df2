"""What becomes of a group that cannot teach anything. Pure.

Rewards that are all equal give no advantage, so the group is trained, estimated, or given up. One with a
trajectory that no environment can grade is given up: its rewards without that one would have another mean.
"""

from collections.abc import Sequence

# A run that filters ends when so many groups in a row were all given up: nothing is learned from these
# prompts, and it would generate for ever. Where nine groups in ten are equal, a hundred of them without a
# single other one happen once in 40,000 times.
PATIENCE_GROUPS = 100
PATIENCE_BATCHES = 10  # and at least so many global batches


# failures of one trajectory's environments: twice the TRIES of environments/turns/episode.py at one replica
UNGRADED_LIMIT = 6
UNGRADED = "an environment failed"  # what the reasons of such groups begin with


def zero_variance(rewards: Sequence[float]) -> bool:
    """Whether all rewards of a group are equal, so that every group-relative advantage is 0."""
    return all(reward == rewards[0] for reward in rewards)


def reason(rewards: Sequence[float]) -> str:
    """Why a group is given up, for store and metrics."""
    return f"all {len(rewards)} rewards are {rewards[0]:g}"


def ungraded(reason: str) -> str:
    """Why a group is given up of which one trajectory has no grade, for store and metrics."""
    return f"{UNGRADED}: {reason}"


def environments_fail(ungraded_in_a_row: int, groups_per_step: int) -> bool:
    """Whether a whole global batch of groups was given up for that, without one that had all its grades."""
    return ungraded_in_a_row >= groups_per_step


def exhausted(filtered_in_a_row: int, groups_per_step: int) -> bool:
    """Whether filtering has gone on for too long without one group to train on."""
    return filtered_in_a_row >= max(PATIENCE_GROUPS, PATIENCE_BATCHES * groups_per_step)
