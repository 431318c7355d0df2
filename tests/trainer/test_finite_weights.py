"""Weights that are not finite are refused where they are read, and neither published nor saved where training
made them."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.trainer import tiny
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.membership import Welcome
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.trainer import loop
from laminar_hpc.trainer.megatron.policy import MegatronPolicy
from laminar_hpc.trainer.publishing.publisher import Publisher
from laminar_hpc.weights.finite import all_finite, culprits

DOWN = "model.layers.1.mlp.down_proj.weight"


def test_a_model_with_one_nan_is_refused_by_name(untied_model: Path, tmp_path: Path, world: None) -> None:
    """Promise: one NaN in one tensor of model.path is one line that names directory, tensor and place, before
    any step."""
    model = tmp_path / "model"
    shutil.copytree(untied_model, model)
    tensors = load_file(model / "model.safetensors")
    tensors[DOWN][3, 7] = math.nan
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        LaminarError, match=r"down_proj\.weight \(1 of 1,536 values, the first at \[3, 7\]\) is NaN"
    ) as error:
        MegatronPolicy(tiny.make_config(model))
    assert (
        str(model) in str(error.value)
        and "download it again" in str(error.value)
        and "\n" not in str(error.value)
    )


class _Recorder:
    """In the place of the publisher."""

    weight_id = 0

    def __init__(self) -> None:
        self.published: list[int] = []

    def publish(self, step: int) -> None:
        self.published.append(step)


def test_weights_that_training_made_infinite_are_not_published(
    untied_model: Path, tmp_path: Path, world: None
) -> None:
    """Promise: the trainer's loop ends before they leave, with the tensor, the step and the learning rate in
    one line."""
    policy, taken = MegatronPolicy(tiny.make_config(untied_model, optimizer__lr=0.5)), _Recorder()
    context = RoleContext(
        policy.config,
        "trainer",
        0,
        "here",
        tmp_path,
        None,
        Welcome("run"),
        Trace(tmp_path, "trainer", 0),
    )
    loop._publish(context, policy, taken, 6)
    with torch.no_grad():
        next(own.view for own in policy.slices if own.name == DOWN).view(-1)[5:7] = math.inf
    with pytest.raises(
        LaminarError,
        match=r"after step 7 the weights are not finite: model\.layers\.1\.mlp\.down_proj\.weight \(2 of",
    ):
        loop._publish(context, policy, taken, 7)
    assert taken.published == [6]


def test_weights_too_large_to_compute_with_are_not_published(
    untied_model: Path, tmp_path: Path, world: None
) -> None:
    """Promise: finite weights with which the trainer itself gets no finite log-probs go to no engine."""
    policy = MegatronPolicy(tiny.make_config(untied_model))
    with torch.no_grad():
        for parameter in policy.gpt.parameters():
            parameter.fill_(1e37)
    policy.check_finite(3)
    context = RoleContext(
        policy.config,
        "trainer",
        0,
        "here",
        tmp_path,
        _Silent(),
        Welcome("run"),
        Trace(tmp_path, "trainer", 0),
    )
    publisher = Publisher(context, policy)
    with pytest.raises(
        LaminarError, match=r"the weights of step 3 are finite, but the log-probs .* lower optimizer\.lr"
    ):
        publisher.publish(3)
    publisher.close()


class _Silent:
    """A channel on which nothing comes."""

    def wait(self, *_: type, timeout: float) -> None:
        return None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_place_and_kind_is_found(dtype: torch.dtype) -> None:
    """NaN and both infinities at any place are found; the largest finite numbers, zeros and empty tensors are
    not taken for them."""
    limits = torch.finfo(dtype)
    fine = [
        torch.full((33, 65), limits.max, dtype=dtype),
        torch.full((7,), limits.min, dtype=dtype),
        torch.zeros(0, 4, dtype=dtype),
    ]
    assert all_finite(fine) and culprits([("a", fine[0])]) == "" and all_finite([])
    for value in (math.nan, math.inf, -math.inf):
        for place in ((0, 0), (16, 64), (32, 64)):
            bad = torch.ones(33, 65, dtype=dtype)
            bad[place] = value
            assert not all_finite([*fine, bad])
            assert (
                culprits([("fine", fine[0]), ("bad", bad)])
                == f"bad (1 of 2,145 values, the first at {list(place)})"
            )
