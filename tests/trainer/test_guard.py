"""The divergence guard in the trainer: what is left out has no part in the update, a skipped update changes
nothing, and all ranks decide the same."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.made import Made
from helpers.trainer import tiny
from helpers.trainer.ranks import Ranks
from laminar_hpc.trainer.checkpoint import Checkpointer
from laminar_hpc.trainer.checkpointing.live_state import LiveState
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.step.learner import Learner

ON = {"guard__enabled": True, "guard__skip_share": 0.2}
LAYOUTS = {
    "dp2-distributed": {"trainer__data_parallel": 2, "trainer__distributed_optimizer": True},
    "tp2-pp2": {"trainer__tensor_parallel": 2, "trainer__pipeline_parallel": 2},
    "cp2-pp2": {"trainer__context_parallel": 2, "trainer__pipeline_parallel": 2},
    "tp2-dp2": {"trainer__tensor_parallel": 2, "trainer__data_parallel": 2},
}
FEW = ["dp2-distributed"]


def weights(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    return {name: t.cpu().clone() for name, t in policy.canonical_tensors()}


@pytest.fixture
def batch(untied_model: Path) -> list[Made]:
    return tiny.on_policy(untied_model, tiny.make_batch(seed=5))


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm__entropy_coefficient": 0.1, "algorithm__likelihood_coefficient": 0.1},
        {"algorithm__kl_coefficient": 0.1, "algorithm__proximal": "recomputed"},
        {"algorithm__loss": "gspo", "algorithm__loss_aggregation": "sequences"},
    ],
    ids=["entropy-likelihood", "kl-recomputed", "gspo"],
)
@pytest.mark.parametrize("damage", [-math.inf, math.nan, -9.0])
def test_what_is_left_out_has_no_part_in_the_update(
    damage: float, settings: dict, untied_model: Path, batch: list[Made], world: None
) -> None:
    """Whatever the engine's log-probs of one trajectory are, the update is the same, finite, and that of the
    others: nothing of it is pulled, while it counts in its group and in the denominator."""
    config = tiny.make_config(untied_model, optimizer__lr=1e-3, **settings, **ON)
    found = []
    for value in (damage, -30.0):
        bad = copy.deepcopy(batch)
        bad[5].logprobs = [value] * len(bad[5].logprobs)
        policy = MegatronPolicy(config)
        learner = Learner(config, policy)
        metrics = learner.train(tiny.step_batch(bad), 0, lambda: None)
        assert learner.guarded.left_out.keys() == {bad[5].trajectory_id} and not learner.guarded.skip
        assert metrics["guard_left_out"] == 1 and metrics["guard_skipped_updates"] == 0
        assert all(map(math.isfinite, metrics.values())) and metrics["skipped_updates"] == 0
        assert metrics["ratio_max"] < 2
        found.append(weights(policy))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    started = tiny.published(untied_model)
    assert max((found[0][n] - started[n]).abs().max() for n in started) > 5e-4


def test_the_update_is_that_of_the_others_by_plain_torch(
    untied_model: Path, batch: list[Made], world: None
) -> None:
    """The same with the defaults, against a plain loss in which the trajectory's terms are left away."""
    config = tiny.make_config(untied_model, optimizer__lr=1e-3, **ON)
    policy, bad = MegatronPolicy(config), copy.deepcopy(batch)
    bad[5].logprobs = [-9.0] * len(bad[5].logprobs)
    Learner(config, policy).train(tiny.step_batch(bad), 0, lambda: None)
    found, expected = weights(policy), plain_update(config, untied_model, batch, left_out=5)
    assert max((found[name] - expected[name]).abs().max() for name in found) < 2e-6


def plain_update(config, model: Path, batch: list[Made], left_out: int) -> dict[str, torch.Tensor]:
    plain, c = tiny.transformers_model(model), config.optimizer
    adam = torch.optim.AdamW(
        plain.parameters(), lr=c.lr, betas=(c.beta1, c.beta2), eps=c.eps, weight_decay=0.0
    )
    tiny.reference_loss(plain, batch, config, left_out).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), c.clip_grad)
    adam.step()
    return plain.state_dict()


def test_a_skipped_update_changes_nothing_and_the_third_ends_the_run(
    untied_model: Path, batch: list[Made], tmp_path: Path, world: None
) -> None:
    """Weights, optimizer and schedule are bit for bit what they were; the text says which figure and which
    trajectories; then the state of the guard is that of a fresh one."""
    config = tiny.make_config(untied_model, optimizer__lr=1e-3, optimizer__warmup_steps=9, **ON)
    config.run_dir = str(tmp_path)
    policy = MegatronPolicy(config)
    learner = Learner(config, policy)
    learner.train(tiny.step_batch(batch), 0, lambda: None)
    scaled = copy.deepcopy(batch)
    for t in scaled:
        t.logprobs = [2 * value for value in t.logprobs]
    before, rate = LiveState(policy, None).digest(), policy.learning_rate
    for step, stops in ((1, False), (2, False), (3, True)):
        metrics = learner.train(tiny.step_batch(scaled), step, lambda: None)
        assert metrics["guard_skipped_updates"] == 1 and metrics["skipped_updates"] == 0
        assert learner.guarded.skip.startswith("16 of 16 trajectories are left out: log-prob mismatch above")
        assert bool(learner.guarded.stop) == stops
    assert LiveState(policy, None).digest() == before and policy.learning_rate == rate
    assert learner.guarded.stop.startswith(
        "3 of the last 4 updates were skipped, the last at step 4: 16 of 16"
    )
    assert learner.state["guard"] == {"history": {}, "skipped": []}


def test_a_resume_goes_on_with_the_band(
    untied_model: Path, batch: list[Made], tmp_path: Path, world: None
) -> None:
    """It is in the checkpoint; one of a version without a guard is taken, too."""
    config = tiny.make_config(untied_model, optimizer__lr=1e-4, **ON)
    config.run_dir = str(tmp_path)
    policy = MegatronPolicy(config)
    learner = Learner(config, policy)
    for step in range(3):
        learner.train(tiny.step_batch(batch), step, lambda: None)
    Checkpointer(tmp_path, policy, learner).save(3)
    state = learner.state["guard"]
    assert len(state["history"]["entropy"]) == 3
    fresh = MegatronPolicy(config)
    resumed = Learner(config, fresh)
    Checkpointer(tmp_path, fresh, resumed).load(3)
    assert resumed.state["guard"] == json.loads(json.dumps(state))
    old = {name: value for name, value in learner.state.items() if name != "guard"}
    other = Learner(config, fresh)
    other.take_state(old)
    assert other.state["guard"] == {"history": {}, "skipped": []}


@pytest.mark.parametrize(
    "layout", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_all_ranks_decide_the_same_as_one(
    layout: str, ranks: Ranks, untied_model: Path, batch: list[Made]
) -> None:
    """Of a NaN, a large mismatch and a batch that is all but one bad, in two mini-batches a step: the same
    trajectories, metrics and state of the guard on every rank; decisions and weights of a single rank."""
    settings = {"optimizer__lr": 1e-3, "algorithm__minibatches_per_step": 2, **ON}
    model = str(untied_model)
    [one] = ranks.run(1, "cases:guarded", model=model, settings=settings)
    world = int(np.prod([value for key, value in LAYOUTS[layout].items() if key.endswith("parallel")]))
    found = ranks.run(world, "cases:guarded", model=model, settings={**settings, **LAYOUTS[layout]})
    assert [len(left) for left in one["left_out"]] == [2, 15, 0] and one["skipped"] == [0, 2, 0]
    for rank in found:
        assert rank["state"] == found[0]["state"] and rank["metrics"] == found[0]["metrics"]
        assert rank["left_out"] == found[0]["left_out"] and rank["skipped"] == one["skipped"]
        assert [sorted(left) for left in rank["left_out"]] == [sorted(left) for left in one["left_out"]]
    whole = next(rank["weights"] for rank in found if rank["weights"])
    assert max(np.abs(whole[n] - one["weights"][n]).max() for n in whole) < 5e-6
