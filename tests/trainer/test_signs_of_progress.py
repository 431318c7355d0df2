"""A rank that does its part of a long step is not taken for stuck (policies/hangs.py): it gives a sign for
each micro-batch, on every pipeline stage and in every pass over the batch."""

import types

import torch

from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.fleet.trainer_generation import _floors
from laminar_hpc.line.messages.membership import TrainerProgress
from laminar_hpc.trainer.checkpointing import in_flight
from laminar_hpc.trainer.progress import Progress
from laminar_hpc.trainer.step.learner import Learner
from laminar_hpc.trainer.step.parallel import RankShare
from laminar_hpc.trainer.step.rescoring import own_logprobs

SHARE = RankShare([[], [], [], []], 0)


class FirstStage:
    """In the place of a MegatronPolicy: a pipeline stage before the last, which asks for each micro-batch in
    turn, and neither computes a loss nor collects anything."""

    device = torch.device("cpu")

    def accumulate(self, batches: object, loss: object) -> list:
        return self.score(batches)

    def score(self, batches: object) -> list:
        assert len(list(batches)) == len(SHARE.plan)
        return []


def test_a_stage_that_computes_no_loss_gives_a_sign_for_each_micro_batch() -> None:
    """When it asks for the next one: the one before has been handed on then."""
    signs = list[int]()
    learner = Learner(RunConfig(), FirstStage(), lambda: signs.append(1))
    assert learner._accumulate({}, SHARE, torch.zeros(2, 0)) == []
    assert len(signs) == len(SHARE.plan) - 1


def test_so_does_a_pass_over_the_batch_for_log_probs() -> None:
    """By the proximal policy or the reference model: as long as a quarter of the training, or longer."""
    signs = list[int]()
    assert own_logprobs(FirstStage(), {}, [SHARE], lambda: signs.append(1)) == {}
    assert len(signs) == len(SHARE.plan) - 1


def test_the_first_step_is_no_measure_of_the_others() -> None:
    """Kernels are compiled and groups of ranks meet in it: in each life it may take as long as loading may,
    also where the moment before it, or an earlier life, has shown how short training is."""
    signs = list[TrainerProgress]()
    progress = Progress(types.SimpleNamespace(tell_progress=signs.append))
    for phase in ("wait", "train", "wait", "train"):
        progress.enter(phase)
    progress.advance()
    progress.has_trained()
    progress.enter("train")
    assert [sign.phase for sign in signs] == ["load", "wait", "load", "wait", "load", "load", "train"]
    assert [sign.count for sign in signs] == list(range(1, 8))


def test_nor_is_one_that_waits_for_its_disk() -> None:
    """A checkpoint at the end of a run, after others of which only the copy took time: it may take as long as
    the rank itself waits."""
    config = RunConfig()
    longest = 2 * config.cluster.join_timeout_seconds + in_flight._MARGIN_SECONDS
    assert _floors(config.cluster, config.relay)["checkpoint"] >= longest
