"""What can be said of a batch of trajectories without the policy. Pure."""

from collections.abc import Iterable, Mapping, Sequence

from laminar_hpc.line.messages.data import Trajectory

ENVIRONMENT = "environment."  # what reward parts begin with that environments/turns/episode.py gives
REWARD_PREFIX = "reward_mean/"  # of a step's field, before the name of a reward function
_COUNTS = frozenset(
    {
        "trajectories",
        "reward_error_count",
        "prompt_tokens",
        "response_tokens",
        "skipped_updates",
        "critic_skipped_updates",
        "kl_bounded_tokens",
        "guard_left_out",
        "guard_skipped_updates",
    }
)


def accuracy(reward: float, parts: Mapping[str, float]) -> float:
    """Of one trajectory: what its reward calls accuracy, else 1 for a positive reward."""
    return parts.get("accuracy", float(reward > 0))


def batch_metrics(trajectories: list[Trajectory], prompt_tokens: int, step: int) -> dict[str, float]:
    """What can be said of a batch without the policy; `prompt_tokens`: of all its trajectories. Staleness is
    in trainer steps: at generation, finished minus weights; at training, `step` minus weights."""
    n, lengths = len(trajectories), [t.length for t in trajectories]
    generation = [t.step_finished - t.weight_step for t in trajectories]
    training = [step - t.weight_step for t in trajectories]
    return {
        "trajectories": n,
        "reward_mean": sum(t.reward for t in trajectories) / n,
        "accuracy_mean": sum(accuracy(t.reward, t.reward_parts) for t in trajectories) / n,
        "reward_error_count": sum(bool(t.reward_error) for t in trajectories),
        "truncated_fraction": sum(t.finish_reason != "stop" for t in trajectories) / n,
        "prompt_tokens": prompt_tokens,
        "response_tokens": sum(lengths),
        "response_length_mean": sum(lengths) / n,
        "response_length_max": max(lengths),
        "staleness_generation_mean": sum(generation) / n,
        "staleness_generation_max": max(generation),
        "staleness_training_mean": sum(training) / n,
        "staleness_training_max": max(training),
        "versions_per_trajectory_max": max(t.policies for t in trajectories),
        **_environment_means(trajectories),
    }


def _environment_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Of turns, tool calls and their seconds per trajectory, and of the cached share of later turns' prompts;
    nothing where there was one turn only."""
    found: dict[str, list[float]] = {}
    for t in trajectories:
        for name, value in t.reward_parts.items():
            if name.startswith(ENVIRONMENT):
                found.setdefault(name.removeprefix(ENVIRONMENT), []).append(value)
    return {f"{name}_mean": sum(values) / len(values) for name, values in found.items()}


def reward_means(trajectories: Sequence[Trajectory], names: Iterable[str]) -> dict[str, float]:
    """Mean of each reward function over the trajectories that it gave a reward to; nothing for one that
    gave none."""
    given = {name: [t.reward_parts[name] for t in trajectories if name in t.reward_parts] for name in names}
    return {f"{REWARD_PREFIX}{name}": sum(values) / len(values) for name, values in given.items() if values}


def merged(parts: list[dict[str, float]]) -> dict[str, float]:
    """The metrics of a step from those of its mini-batches: sums of counts, largest values, means over
    trajectories."""
    if len(parts) == 1:
        return parts[0]
    combined = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        # a reward function may have given none to a mini-batch
        having = [part for part in parts if name in part]
        values = [part[name] for part in having]
        if name in _COUNTS:
            combined[name] = sum(values)
        elif name.endswith("_max"):
            combined[name] = max(values)
        else:
            weight = sum(part["trajectories"] for part in having)
            combined[name] = sum(part[name] * part["trajectories"] for part in having) / weight
    return combined
