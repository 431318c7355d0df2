"""Promises 1 and 2 over deaths of replicas whose weights nobody else generates with: a replica without work loads them from a slot.

Whoever is killed is killed at the worst time: while its trajectories are on older weights than the newest, alone with them.
"""

import time

import pytest
from stand import Stand, assert_every_one_ended_once, small_config

from laminar_hpc.controller.loop import Controller
from laminar_hpc.observability import rundata


class Killer:
    """Kills the engine of a replica that is alone with older weights, once enough of its work is known: `most` times."""

    def __init__(self, stand: Stand, most: int, tokens: int, every: float) -> None:
        self.stand, self.most, self.tokens, self.every = stand, most, tokens, every
        self.killed: list[tuple[int, set[int]]] = []  # weight id, trajectories of which something was known
        self._next = 0.0

    def __call__(self, controller: Controller) -> None:
        if len(self.killed) >= self.most or time.monotonic() < self._next or controller.trainer_done:
            return
        pool = controller.mover.pool
        owned = controller.book.in_progress()
        for replica, mine in owned.items():
            weight_id = controller.open_weights.get(replica, -1)
            alone = all(controller.open_weights.get(r) != weight_id for r in owned if r != replica)
            known = {i: part for _, i, sample in mine if (part := pool.get(i, sample.attempt))}
            if alone and 0 <= weight_id < controller.weights.newest[0] and sum(len(p.tokens) for p in known.values()) >= self.tokens:
                self.killed.append((weight_id, set(known)))
                self._next = time.monotonic() + self.every
                self.stand.loop.loop.call_soon_threadsafe(self.stand.engine(replica).die)
                return


def run(tmp_path, most: int, slots: int = 3, replicas: int = 3, **pipeline):
    config = small_config(tmp_path, replicas=replicas, steps=8, **pipeline)
    config.rollout.increment_tokens, config.relay.slots = 25, slots
    stand = Stand(config)
    killer = Killer(stand, most, tokens=500, every=0.5)
    stand._each_turn = killer
    stand.run(150)
    found = assert_every_one_ended_once(stand.config)
    records = rundata.load(tmp_path / "run")
    rescued = [move for move in records.records.get("move", []) if move["source"] == -1]
    return killer, found, rescued, sum(step["tokens_discarded"] for step in records.steps)


def test_trajectories_go_on_with_weights_loaded_from_an_older_slot(tmp_path):
    killer, found, rescued, discarded = run(tmp_path, most=4)
    print(killer.killed, rescued, discarded)
    loaded = [move for move in rescued if move.get("loaded")]
    assert len(killer.killed) >= 2 and loaded
    for move in rescued:
        t = found[move["trajectory_id"]]
        assert t.attempt >= 1


def test_without_a_slot_to_spare_they_start_again(tmp_path):
    """With two slots the older one is the one to be written."""
    killer, _, rescued, discarded = run(tmp_path, most=3, slots=2)
    assert killer.killed and not any(move["loaded"] for move in rescued) and discarded > 0
