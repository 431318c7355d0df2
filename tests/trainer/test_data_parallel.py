"""The whole trainer role, trainer/loop.py, as two real processes (gloo): two data-parallel ranks train what
one trains."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.paths import HELPERS, environment
from laminar_hpc.machine.observability.trace import read_spans
from laminar_hpc.store.checkpoints import checkpoint_path, read_state, steps

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two ranks of NCCL need two GPUs")
SETTINGS = {
    "steps": 4,
    "algorithm__minibatches_per_step": 2,
    "optimizer__lr": 1e-3,
    "optimizer__weight_decay": 0.1,
    "checkpoint__every": 2,
    "checkpoint__state_hash": True,
}
BATCH = {
    "groups": 3,
    "samples": 4,
    "longest": 30,
}  # 12 trajectories, 6 per update, 3 per rank: of uneven length, so of uneven micro-batches


class Finished:
    """What a run of `ranks` trainer ranks told the controller, and left on the disk."""

    def __init__(self, run_dir: Path) -> None:
        told = [json.loads(line) for line in (run_dir / "told.jsonl").read_text().splitlines()]
        self.messages = [t["type"] for t in told]
        self.metrics = [t["metrics"] for t in told if t["type"] == "StepDone"]
        self.checkpoints = [t for t in told if t["type"] == "Checkpointed"]
        newest = checkpoint_path(run_dir, steps(run_dir)[-1])
        self.weights = load_file(newest / "hf" / "model.safetensors")
        self.hash = read_state(newest)["state_hash"]


def run(
    run_dir: Path,
    model: Path,
    ranks: int,
    leave_after: int = -1,
    **settings: object,
) -> Finished:
    """Runs the trainer role to its end; every rank must leave with exit code 0."""
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "told.jsonl").unlink(missing_ok=True)
    job = {
        "model": str(model),
        "run_dir": str(run_dir),
        "batch": BATCH,
        "leave_after": leave_after,
    }
    job["settings"] = {**SETTINGS, "trainer__data_parallel": ranks, **settings}
    (run_dir / "job.json").write_text(json.dumps(job))
    here = environment(WORLD_SIZE=str(ranks), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    processes = [
        subprocess.Popen(
            [sys.executable, HELPERS / "trainer/rank.py", run_dir / "job.json"],
            env={**here, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [p.communicate(timeout=180)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert [p.returncode for p in processes] == [0] * ranks, "\n".join(outputs)[-4000:]
    return Finished(run_dir)


def assert_same_training(one: Finished, two: Finished) -> None:
    """Sums over ranks are added in another order, so equal but for float32's rounding."""
    for a, b in zip(one.metrics, two.metrics, strict=True):
        exact = [
            k
            for k in a
            if k.startswith(
                (
                    "reward",
                    "response",
                    "prompt",
                    "stale",
                    "traj",
                    "accuracy",
                    "skipped",
                    "versions",
                    "learning",
                )
            )
        ]
        assert {k: a[k] for k in exact} == {k: b[k] for k in exact}
        for key in ("loss", "grad_norm", "ratio_mean", "ratio_max", "clip_fraction", "entropy"):
            assert b[key] == pytest.approx(a[key], rel=1e-4, abs=1e-5), key
    assert max((one.weights[name] - two.weights[name]).abs().max().item() for name in one.weights) < 1e-5


@pytest.fixture(scope="module")
def one_rank(tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run(tmp_path_factory.mktemp("one") / "run", tied_model, ranks=1)


def assert_protocol(one: Finished, two: Finished, run_dir: Path) -> None:
    """Batch, step, checkpoints, done, by one rank and by two."""
    for each, first in ((one, []), (two, ["TrainersMeet"])):  # a checkpoint is told of when it has its name
        others = [message for message in each.messages if message != "Checkpointed"]
        assert others == [*first, "Restored", *["TakeBatch", "StepDone"] * 4, "TrainerDone"]
        assert each.messages[-2:] == ["Checkpointed", "TrainerDone"]
    assert steps(run_dir) == [2, 4] and [c["step"] for c in two.checkpoints] == [2, 4]
    assert two.checkpoints[-1]["state_hash"] == two.hash
    assert all(
        m["train_seconds"] > 0 and m["seconds"] >= m["train_seconds"] + m["wait_seconds"] for m in two.metrics
    )
    spans = read_spans(run_dir)
    assert {s.kind for s in spans["trainer1"]} == {"load", "publish", "wait", "train", "checkpoint"}


@pytest.mark.slow
def test_two_ranks_train_what_one_trains(one_rank: Finished, tied_model: Path, tmp_path: Path) -> None:
    """Losses, gradient norms and weights over 4 steps, with the default algorithm."""
    two = run(tmp_path / "run", tied_model, ranks=2)
    assert_same_training(one_rank, two)
    assert_protocol(one_rank, two, tmp_path / "run")


CORRECTED = {
    "algorithm__proximal": "recomputed",
    "algorithm__importance_weight_cap": 1.5,
    "algorithm__advantage": "reinforce_pp",
    "algorithm__kl_coefficient": 0.05,
    "algorithm__kl_in_reward": True,
    "algorithm__sequence_ratio_max": 1.2,
    "algorithm__loss_aggregation": "sequences",
}


def test_two_ranks_recompute_normalise_and_divide_as_one(tied_model: Path, tmp_path: Path) -> None:
    """Losses, gradient norms and weights over 4 steps, with log-probs of the reference and at the start of a
    step, advantages over the whole batch, a mean over trajectories: what any rank computes alone must be put
    together from all. And the role keeps to the protocol."""
    one = run(tmp_path / "one", tied_model, ranks=1, **CORRECTED)
    two = run(tmp_path / "two", tied_model, ranks=2, trainer__distributed_optimizer=True, **CORRECTED)
    assert_same_training(one, two)
    assert_protocol(one, two, tmp_path / "two")
    assert [m["kl"] for m in two.metrics] == pytest.approx([m["kl"] for m in one.metrics], rel=1e-3, abs=1e-6)
    assert one.metrics[-1]["kl"] > 0 and 0 < one.metrics[-1]["left_out_fraction"] < 1


@pytest.mark.slow
def test_two_ranks_with_the_distributed_optimizer(
    one_rank: Finished, tied_model: Path, tmp_path: Path
) -> None:
    """Optimizer state sharded over the ranks changes nothing in the training."""
    assert_same_training(
        one_rank, run(tmp_path / "run", tied_model, ranks=2, trainer__distributed_optimizer=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("distributed", [False, True], ids=["replicated", "distributed"])
def test_two_ranks_leave_and_resume_bit_exact(distributed: bool, tied_model: Path, tmp_path: Path) -> None:
    """Told to leave after step 3, off the checkpoint interval, they save and end; a second launch gives the
    state of 4 straight steps."""
    straight = run(tmp_path / "straight", tied_model, ranks=2, trainer__distributed_optimizer=distributed)
    left = run(
        tmp_path / "run", tied_model, ranks=2, leave_after=3, trainer__distributed_optimizer=distributed
    )
    assert left.messages[-3:] == ["StepDone", "Checkpointed", "TrainerDone"] and steps(tmp_path / "run") == [
        2,
        3,
    ]
    resumed = run(tmp_path / "run", tied_model, ranks=2, trainer__distributed_optimizer=distributed)
    assert resumed.hash == straight.hash
    assert resumed.metrics[0]["loss"] == straight.metrics[3]["loss"]


@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_resumes_on_one(
    one_rank: Finished, tied_model: Path, tmp_path: Path
) -> None:
    """The number of ranks may change between launches; the training goes on the same but for rounding."""
    run(tmp_path / "run", tied_model, ranks=2, leave_after=2, trainer__distributed_optimizer=True)
    resumed = run(tmp_path / "run", tied_model, ranks=1, trainer__distributed_optimizer=True)
    one_rank_rest = Finished.__new__(Finished)
    one_rank_rest.metrics, one_rank_rest.weights = one_rank.metrics[2:], one_rank.weights
    assert_same_training(one_rank_rest, resumed)
