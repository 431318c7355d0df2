"""docs/promises.md#nothing-lost over histories of the controller by chance, message by message: replicas
generate, move, hang, leave, die and are taken for dead, controllers and trainers are replaced. When all is
well again, every group is trained, and nothing twice in the history that led to the weights."""

import random
from collections import defaultdict
from pathlib import Path

import pytest

from helpers.control.player import Player, World
from helpers.control.script import Script
from helpers.emulated.stand import small_config
from laminar_hpc.line.messages.chain import RelayHas
from laminar_hpc.line.messages.publication import NewWeightId
from laminar_hpc.line.messages.training import Batch, Restored, StepDone, TakeBatch
from laminar_hpc.policies.metrics import batch_metrics

REPLICAS, STEPS, GROUPS, SAMPLES = 3, 3, 4, 3
ROUNDS = 400  # in which a run without faults is over many times
TIMES = {"wait_seconds": 0.1, "train_seconds": 0.1}


class History:
    """A run of three players and one trainer."""

    def __init__(self, folder: Path, seed: int, refresh: str) -> None:
        chance = random.Random(seed)
        bound = chance.choice([1, 2, None])
        config = small_config(folder, replicas=REPLICAS, steps=STEPS, refresh=refresh, max_staleness=bound)
        algorithm = config.algorithm
        algorithm.prompts_per_step, algorithm.samples_per_prompt = GROUPS, SAMPLES
        if chance.random() < 0.3:
            algorithm.first_samples, algorithm.more_samples = SAMPLES - 1, 1
        algorithm.zero_variance = chance.choice(["keep", "filter"])
        config.rollout.increment_tokens, config.relay.slots = 10, chance.choice([2, 3])
        config.pipeline.repack = "reprefill" if refresh == "drained" else "off"
        config.pipeline.local_batch_groups, config.pipeline.repack_seconds = 2, 1e-4
        self.config, self.chance, self.lives, self.life = config, chance, 0, ""
        self.world = World(Script(config), chance, homes=chance.random() < 0.4)
        self.step, self.asked = 0, False
        self.trained: dict[int, list[int]] = defaultdict(list)  # group -> steps
        self.publish()
        self.players = [self._comes(index) for index in range(REPLICAS)]

    @property
    def controller(self):
        return self.world.script.controller

    def _comes(self, index: int) -> Player:
        self.lives += 1
        return Player(self.world, index, f"life{self.lives}")

    # ---- trainer and relay ---------------------------------------------------------------------------------

    def publish(self) -> None:
        trainer = f"trainer:0:{self.life}"
        self.world.hear(trainer, NewWeightId(self.step))
        self.controller.turn()
        self.world.slots = [*self.world.slots, max(self.controller.weights.steps)][-self.config.relay.slots :]
        self._relay_holds(1)

    def _relay_holds(self, size: int) -> None:
        weight_id = self.world.slots[-1]
        has = RelayHas(weight_id, self.controller.weights.steps[weight_id], size, 0.1, 0.0)
        self.world.hear("relay:0:", has)

    def trains(self) -> None:
        """Takes a batch that has come, or asks for one."""
        trainer = f"trainer:0:{self.life}"
        sent = self.world.script.hub.left.pop(trainer, [])
        batches = [m for m in sent if isinstance(m, Batch) and m.step == self.step]
        if not batches and not self.asked and self.step < STEPS:
            self.asked = True
            self.world.hear(trainer, TakeBatch(self.step))
        for batch in batches[:1]:
            records = [t for group in batch.groups for t in group.trajectories]
            assert len(batch.groups) == GROUPS and len({t.trajectory_id for t in records}) == len(records)
            for group in batch.groups:
                self.trained[group.group_id].append(self.step)
            self.world.hear(trainer, StepDone(self.step, batch_metrics(records, 0, self.step) | TIMES))
            self.step, self.asked = self.step + 1, False
            if self.step < STEPS:
                self.publish()

    def other_trainers(self) -> None:
        """They go back to a step that was trained, which is undone with all later ones."""
        self.lives += 1
        self.controller.trainer_generation.end("one of them has died")
        self.controller.turn()
        self.life, self.asked = f"life{self.lives}", False
        self.step = self.chance.randrange(self.step + 1)
        self.trained = defaultdict(
            list, {i: [s for s in steps if s < self.step] for i, steps in self.trained.items()}
        )
        self.world.script.trainer(self.life, Restored(self.step or None))
        self.publish()

    def other_controller(self) -> None:
        self.controller.turn()
        self.world.script.closes()
        self.world.script = Script(self.config, trainer=False)
        self.world.script.trainer_again(self.life)
        self.asked = False
        self._relay_holds(0)
        for player in self.players:
            player.joins_anew()

    # ---- by chance -----------------------------------------------------------------------------------------

    def happens(self) -> None:
        chance = self.chance
        index = chance.randrange(REPLICAS)
        player = self.players[index]
        if player.is_gone:
            self.players[index] = self._comes(index)
            return
        often = [player.reads, player.reads, player.goes_on, self.trains, player.scores]
        seldom = [player.hangs, player.dies, lambda: player.leaves(chance.randrange(6))]
        seldom += [lambda: self.taken_for_dead(player), self.other_controller, self.other_trainers]
        pings = [lambda: player.pings(chance.choice([0, 30, 5000]))]
        with_one = [lambda i: player.generates(i, chance.randrange(1, 20)), player.ends, player.ends]
        kind = chance.random()
        if kind < 0.6:
            chance.choice(often + pings)()
        elif kind < 0.8 and player.held:
            chance.choice(with_one)(chance.choice(sorted(player.held)))
        elif kind < 0.83 and player.held:
            player.loses(chance.choice(sorted(player.held)))
        elif kind > 0.85:
            chance.choice(seldom)()

    def taken_for_dead(self, player: Player) -> None:
        member = self.controller.members.of(player.identity)
        if member is not None:
            self.controller.membership._leave(member)
            self.controller.turn()
            player.joins_anew()

    def all_is_well(self) -> None:
        """Nothing fails any more, everybody answers, and those who have not come back are given up."""
        self.world.fails = 0.0
        self.controller.reattachment._until = 0.0
        for _ in range(ROUNDS):
            if self.step == STEPS:
                return
            for index, player in enumerate(self.players):
                while player.reads():
                    pass
                if player.is_gone:
                    self.players[index] = self._comes(index)
                    continue
                for trajectory_id in sorted(player.held):
                    player.ends(trajectory_id)
                player.pings(5000)
                player.scores()
                player.goes_on()
            self.trains()
            self.controller.turn()
        tracker, moving = self.controller.tracker, self.controller.migration.moving
        left = {i: g.samples for i, g in tracker.groups.items() if not g.finished}
        pytest.fail(f"step {self.step} waits: {self.controller.training.waits_for}; {left}, {moving}")


def run(folder: Path, seed: int, refresh: str, events: int) -> None:
    history = History(folder, seed, refresh)
    for _ in range(events):
        history.happens()
    history.all_is_well()
    assert sorted(map(len, history.trained.values()))[-1] == 1, "nothing is trained twice"
    assert len([i for i, steps in history.trained.items() if steps]) == STEPS * GROUPS
    history.world.script.closes()


@pytest.mark.parametrize("refresh", ["drained", "interrupt"])
def test_every_group_is_trained_once(tmp_path: Path, refresh: str) -> None:
    run(tmp_path, 0, refresh, events=100)


@pytest.mark.slow
@pytest.mark.parametrize("refresh", ["drained", "interrupt"])
@pytest.mark.parametrize("tens", range(1, 6))
def test_every_group_is_trained_once_over_many_histories(tmp_path: Path, tens: int, refresh: str) -> None:
    for seed in range(10 * tens, 10 * tens + 10):
        run(tmp_path / str(seed), seed, refresh, events=40 * (seed % 10 + 1))
