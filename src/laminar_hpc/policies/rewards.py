"""What a batch's rewards come to, function by function. Pure."""

from collections.abc import Iterable, Sequence

from laminar_hpc.messages import Trajectory


def reward_means(trajectories: Sequence[Trajectory], names: Iterable[str]) -> dict[str, float]:
    """Mean of each reward function over the trajectories that it gave a reward to; nothing for one that
    gave none."""
    given = {name: [t.reward_parts[name] for t in trajectories if name in t.reward_parts] for name in names}
    return {f"reward_mean/{name}": sum(values) / len(values) for name, values in given.items() if values}
