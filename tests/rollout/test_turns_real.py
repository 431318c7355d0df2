"""Turns on a real engine: the tokens that are stored are those that it saw, on one policy, and what it saw
before it does not compute again. The parser is stood in for, as a random model writes no calls."""

import itertools
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from chats import SEPARATED
from replica_stand import Replica, replica_of_turns

from engines import EOS, hf_logprobs, reference
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.messages.data import Trajectory
from laminar_hpc.messages.rollouts import Generated, Scored, WeightsOpened
from laminar_hpc.payload.layout import Response
from laminar_hpc.payload.reader import read
from laminar_hpc.turns.calls import ToolCall

pytestmark = pytest.mark.slow
STOPS = [*range(0, 60), EOS]  # so that a random model ends its turns
TEMPLATE = SEPARATED.replace("<|end|>", "<|im_end|>")
TOOLBOX = """
import os, time

def wait(key: str) -> str:
    "Waits for the gate."
    open("called", "a").write(key)
    while not os.path.exists("gate"):
        time.sleep(0.01)
    return "it is open, " + key
"""


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """A replica on weights 0, all of whose turns but the third call `wait`."""
    folder = tmp_path_factory.mktemp("turns")
    (folder / "toolbox_of_turns_test.py").write_text(TOOLBOX)

    def adjust(config: RunConfig) -> None:
        config.environment.tools = ["toolbox_of_turns_test.wait"]
        config.environment.max_turns = 3

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        with replica_of_turns(folder, TEMPLATE, STOPS, adjust) as made:
            yield made


def response_of(replica: Replica, trajectory: Trajectory) -> Response:
    assert trajectory.place is not None
    return read(replica.folder, [(trajectory.trajectory_id, trajectory.place)])[0]


def test_one_policy_over_turns_and_a_publication(replica: Replica) -> None:
    """Weights are published while every trajectory waits for its tool: all turns are of the weights that it
    began with; re-scored by transformers from prompt and stored tokens the log-probs of what was drawn are
    the engine's; those of later turns' prompts were in the prefix cache."""
    controller = replica.controller
    while controller.received.empty():
        assert not replica.ended(0.1), replica.error
    controller.get(WeightsOpened)
    controller.until_asked(0)
    episodes = replica.worker.episodes
    assert episodes is not None and episodes._parser is not None
    numbers = itertools.count()
    episodes._parser.calls = lambda text: [ToolCall("wait", {"key": str(next(numbers))})]  # type: ignore
    grant = controller.grant(0, groups=4, length=400)
    while not (replica.folder / "called").exists():
        assert not replica.ended(0.05)
    replica.publish(1, 1)
    (replica.folder / "gate").touch()
    messages = controller.collect(32, Generated, Scored)
    controller.get(WeightsOpened)  # only now
    scored = {m.trajectory_id: m for m in messages if isinstance(m, Scored)}
    groups = {sample.trajectory_id: group for group in grant.groups for sample in group.samples}
    model, shares, several = reference(replica.models[0]), [], 0
    for t in (m.trajectory for m in messages if isinstance(m, Generated)):
        response, figures = response_of(replica, t), scored[t.trajectory_id].parts
        mask = response.loss_mask
        assert t.policies == 1 and {s.weight_id for s in response.spans} == {0} and t.trained == mask.sum()
        expected = hf_logprobs(model, groups[t.trajectory_id].prompt_tokens, response.tokens.tolist())
        gap = (torch.tensor(response.logprobs) - expected)[torch.tensor(mask)].abs().max()
        assert gap < 1e-3 and not response.logprobs[~mask].any()
        assert t.turns == figures["environment.turns"] == len(response.spans) <= 3
        assert t.finish_reason in ("turns", "length")
        if t.turns > 1:
            several += 1
            shares.append(figures["environment.cached_share"])
            starts = [s.start for s in response.spans[1:]]
            ends = np.array([s.end for s in response.spans])
            assert all(response.tokens[end - 1] in STOPS for end in ends[:-1]) and starts == sorted(starts)
    share = np.mean(shares)
    print(f"{several} of 16 of several turns; share of earlier turns in the cache: {share:.3f}")
    assert several > 8 and share > 0.9 and (replica.folder / "called").stat().st_size >= several
