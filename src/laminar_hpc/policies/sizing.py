"""Which splits of GPUs between trainer and rollouts are worth a look; the simulator or a short run tells which is best. Pure."""

_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)


def trainer_splits(gpus: int, multiple: int) -> list[int]:
    """Trainer GPUs at every eighth of `gpus`, as multiples of `multiple`, at least one multiple left to either side; ascending."""
    found = {round(gpus * share / multiple) * multiple for share in _SHARES}
    return sorted(n for n in found if multiple <= n <= gpus - multiple)


def rollout_share(train_seconds: float, rollout_seconds: float) -> float:
    """Share of the GPUs for rollouts at which both sides take equally long, from the seconds that all GPUs would need for either."""
    return rollout_seconds / (train_seconds + rollout_seconds)
