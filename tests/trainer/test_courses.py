"""What changes over a run: the learning rate's schedule, the moving reference and the steered KL coefficient;
each goes on over a resume as if there had been none."""

import math
from pathlib import Path

import pytest
import torch

from helpers.trainer.checkpointing import Trainer
from helpers.trainer.ranks import Ranks
from laminar_hpc.config.rules import broken_rules
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.store.checkpoints import checkpoint_path, read_state
from laminar_hpc.trainer.algorithms.kl import steered

STEPS, WARMUP, UPDATES = 12, 3, 2
LR, END = 1e-3, 1e-4


def expected(schedule: str, decay_steps: int | None, update: int) -> float:
    """The learning rate of an update, counted from 0, written out."""
    rise = WARMUP * UPDATES
    if update <= rise:
        first = LR / (rise + 1)
        return first + (LR - first) * update / rise
    if schedule == "constant":
        return LR
    length = (STEPS - WARMUP if decay_steps is None else decay_steps) * UPDATES
    start = STEPS * UPDATES - length if schedule == "wsd" else rise
    done = min(1.0, max(0.0, (update - start) / length))
    left = (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1 - done
    return END + (LR - END) * left


SCHEDULES = [("constant", None), ("linear", None), ("linear", 5), ("cosine", None), ("cosine", 5), ("wsd", 4)]


def settings_of(schedule: str, decay_steps: int | None) -> dict[str, object]:
    return {
        "steps": STEPS,
        "optimizer__lr": LR,
        "optimizer__warmup_steps": WARMUP,
        "optimizer__schedule": schedule,
        "optimizer__decay_steps": decay_steps,
        "optimizer__min_lr": 0.0 if schedule == "constant" else END,
    }


@pytest.mark.parametrize(("schedule", "decay_steps"), SCHEDULES)
def test_the_learning_rate_of_every_update(
    schedule: str, decay_steps: int | None, tied_model: Path, tmp_path: Path, world: None
) -> None:
    """Of all updates of a run and some more, and of all from the middle on after a resume: weight decay and
    the rest of a group's settings stay."""
    settings = settings_of(schedule, decay_steps)
    trainer = Trainer(tied_model, tmp_path, **settings)
    assert not broken_rules(trainer.config, None) or schedule
    policy, found = trainer.policy, []
    for update in range(STEPS * UPDATES + 3):
        if update == 9:
            policy.optimizer.prepare_grads()
            trainer.checkpointer.save(4)
        found.append(policy.learning_rate)
        policy.scheduler.step(increment=1)
    wanted = [expected(schedule, decay_steps, update) for update in range(len(found))]
    assert found == pytest.approx(wanted, rel=1e-9)
    assert found[WARMUP * UPDATES] == pytest.approx(LR)
    again = Trainer(tied_model, tmp_path, **settings)
    again.checkpointer.load(4)
    rest = []
    for _ in found[9:]:
        rest.append(again.policy.learning_rate)
        again.policy.scheduler.step(increment=1)
    assert rest == found[9:]
    assert {group["weight_decay"] for group in again.policy.optimizer.param_groups} == {0.0, 0.1}


REFUSED = {
    "schedule=wsd": "needs optimizer.decay_steps",
    "decay_steps=3": "belongs to a fall",
    "schedule=linear min_lr=1.0": "must be at most @optimizer.lr".replace("@", ""),
    "schedule=cosine warmup_steps=60": "is too few for",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_schedule_that_cannot_be_is_refused(words: str) -> None:
    """In one line."""
    config = RunConfig()
    for word in words.split():
        key, _, value = word.partition("=")
        kind = int if key in ("decay_steps", "warmup_steps") else type(getattr(config.optimizer, key))
        setattr(config.optimizer, key, kind(value))
    assert any(REFUSED[words] in line for line in broken_rules(config, None))


MOVING = {
    "algorithm__kl_coefficient": 0.1,
    "algorithm__kl_target": 1e-4,
    "algorithm__reference_every": 2,
    "algorithm__proximal": "recomputed",
    "optimizer__lr": 5e-3,
    "optimizer__schedule": "cosine",
    "steps": 6,
}


@pytest.mark.parametrize(
    "settings",
    [{}, {"trainer__distributed_optimizer": True, "model__dtype": "bfloat16"}],
    ids=["float32", "bfloat16-distributed"],
)
def test_reference_and_coefficient_go_on_over_a_resume(
    settings: dict, tied_model: Path, tmp_path: Path, world: None
) -> None:
    """Between two moves of the reference and bit for bit: metrics, weights, and the state hash, which knows
    of the reference. The KL is 0 in the first update behind each move, and the coefficient changes."""
    settings = {**MOVING, **settings}
    straight = Trainer(tied_model, tmp_path / "straight", **settings)
    metrics = straight.train(0, 6)
    before = Trainer(tied_model, tmp_path / "run", **settings)
    before.train(0, 3)
    _, saved = before.checkpointer.save(3)
    after = Trainer(tied_model, tmp_path / "run", **settings)
    after.checkpointer.load(3)
    assert after.checkpointer.state_hash() == saved
    assert after.train(3, 6) == metrics[3:]
    assert after.checkpointer.state_hash() == straight.checkpointer.state_hash()
    coefficients = [step["kl_coefficient"] for step in metrics]
    assert coefficients[0] == 0.1 and len(set(coefficients)) > 3
    assert read_state(checkpoint_path(tmp_path / "run", 3))["kl_coefficient"] == coefficients[3]
    kl = [step["kl"] for step in metrics]
    assert kl[3] > 2 * kl[2] and kl[5] > 2 * kl[4], "the reference is one step older there"


def test_a_checkpoint_without_a_reference_is_loaded(tied_model: Path, tmp_path: Path, world: None) -> None:
    """A run that turns reference_every on goes on from what it has, with the reference of model.path until
    the first move; one that turns it off needs nothing of the checkpoint's."""
    fixed = {**MOVING, "algorithm__reference_every": None}
    for first, then in ((fixed, MOVING), (MOVING, fixed)):
        folder = tmp_path / f"run{first is fixed}"
        before = Trainer(tied_model, folder, **first)
        before.train(0, 3)
        before.checkpointer.save(3)
        after = Trainer(tied_model, folder, **then)
        assert after.checkpointer.restore().step == 3
        initial = Trainer(tied_model, folder, **then).learner._reference
        assert all(
            torch.equal(a, b) for a, b in zip(after.learner._reference._frozen, initial._frozen, strict=True)
        )
        assert after.train(3, 4)[0]["kl"] > 1e-4


def test_the_coefficient_is_steered_within_a_fiftieth() -> None:
    """By a tenth of the relative error, which is bounded by 20 %; a KL that is NaN changes nothing."""
    assert steered(0.1, 0.011, 0.01) == pytest.approx(0.1 * 1.01)
    assert steered(0.1, 1e9, 0.01) == pytest.approx(0.1 * 1.02)
    assert steered(0.1, 0.0, 0.01) == pytest.approx(0.1 * 0.98)
    assert steered(0.1, math.nan, 0.01) == 0.1 == steered(0.1, math.inf, 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("after", ["trainer__tensor_parallel", "trainer__pipeline_parallel"])
def test_the_reference_is_read_at_another_layout(
    after: str, tied_model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """Saved with two tensor-parallel ranks between two moves; losses, KL and the coefficient go on as without
    a restart."""
    arguments = {"model": str(tied_model), "texts": [[1, 2, 3, 4]]}
    moving = {**MOVING, "checkpoint__state_hash": True, "trainer__tokens_per_microbatch": 2048}
    split = {**moving, "trainer__tensor_parallel": 2}
    straight = ranks.run(
        2, "cases:train", **arguments, settings=split, steps=(0, 5), run_dir=str(tmp_path / "straight")
    )
    folder = {"run_dir": str(tmp_path / "run")}
    ranks.run(2, "cases:train", **arguments, **folder, settings=split, steps=(0, 3))
    resumed = ranks.run(
        2, "cases:train", **arguments, **folder, settings={**moving, after: 2}, steps=(3, 5), resume=True
    )
    for mine, theirs in zip(resumed[0]["metrics"], straight[0]["metrics"][3:], strict=True):
        for name in ("loss", "kl", "kl_coefficient"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
    assert [m["kl"] > 1e-6 for m in resumed[0]["metrics"]] == [True, False], "it moves before step 4"
