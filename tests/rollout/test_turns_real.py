"""Turns on a real engine: the tokens that are stored are those that it saw, on one policy, and what it saw
before it does not compute again. The parser is stood in for, as a random model writes no calls."""

import itertools
import sys
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import torch

from helpers.engines.pair import EOS, hf_logprobs, reference
from helpers.engines.replica_stand import Replica, replica_of_turns
from helpers.models.chats import SEPARATED
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.environments.turns.calls import ToolCall
from laminar_hpc.line.messages.data import Partial, Sample, Trajectory
from laminar_hpc.line.messages.moves import Answer
from laminar_hpc.line.messages.rollouts import EngineHung, Generated, Grant, Scored, Unfinished, WeightsOpened
from laminar_hpc.store.payload.layout import Response
from laminar_hpc.store.payload.reader import read

pytestmark = pytest.mark.slow
STOPS = [*range(0, 60), EOS]  # so that a random model ends its turns
TEMPLATE = SEPARATED.replace("<|end|>", "<|im_end|>")
TOOLBOX = """
import os, time

def wait(key: str) -> str:
    "Waits for the gate."
    open("called", "a").write(key + " ")
    while not os.path.exists("gate") and not os.path.exists("gate" + key):
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


def always_calls(replica: Replica) -> None:
    """Each turn of its model has a call with a key of its own."""
    assert replica.worker.episodes is not None
    (talk,) = replica.worker.episodes.calls.dialogues.values()
    numbers = itertools.count()
    talk.parser.calls = lambda text: [ToolCall("wait", {"key": str(next(numbers))})]  # type: ignore


def keys_called(replica: Replica) -> list[str]:
    file = replica.folder / "called"
    return file.read_text().split() if file.exists() else []


def test_one_policy_over_turns_and_a_publication(replica: Replica) -> None:
    """Weights are published while every trajectory waits for its tool: all turns are of the weights that it
    began with; re-scored by transformers from prompt and stored tokens the log-probs of what was drawn are
    the engine's; those of later turns' prompts were in the prefix cache."""
    controller = replica.controller
    while controller.received.empty():
        assert not replica.ended(0.1), replica.error
    controller.get(WeightsOpened)
    controller.until_asked(0)
    always_calls(replica)
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
    assert several > 8 and share > 0.9 and len(keys_called(replica)) >= several


def test_the_engine_dies_while_tools_are_called(replica: Replica) -> None:
    """What waits goes on behind its call, which is made once: the replica hands all over, starts another
    engine, and tells what the calls came to. From that it goes on, as any replica would, and the log-probs of
    what it then draws are the engine's own."""
    controller, folder = replica.controller, replica.folder
    (folder / "gate").unlink()
    (folder / "called").unlink()
    always_calls(replica)
    controller.until_asked(1)
    grant = controller.grant(1, groups=2, length=400)
    groups = {sample.trajectory_id: group for group in grant.groups for sample in group.samples}
    while len(keys_called(replica)) < len(groups):  # a call has its process some time after it is asked for
        assert not replica.ended(0.05)
    keys = keys_called(replica)
    assert len(set(keys)) == len(keys) == len(groups) == 8
    replica.scheduler().kill()
    (folder / f"gate{keys[0]}").touch()  # whose next turn meets the dead engine
    controller.get(EngineHung)
    parts = {
        m.trajectory_id: m.partial for m in controller.collect(8, Unfinished) if isinstance(m, Unfinished)
    }
    awaited = {part.awaits for part in parts.values() if part.called}
    assert parts.keys() == groups.keys() and len(awaited) == 7 and "" not in awaited
    (folder / "gate").touch()
    answers = [m for m in controller.collect(7, Answer) if isinstance(m, Answer)]
    assert {answer.name for answer in answers} == awaited and not any(answer.error for answer in answers)
    assert keys_called(replica) == keys, "no call is made twice"
    for answer in answers:
        controller.tell(answer)
    controller.until_asked(1)
    controller.tell(again(grant, parts))
    messages = controller.collect(16, Generated, Scored)
    model, given = reference(replica.models[1]), {answer.trajectory_id: answer.tokens for answer in answers}
    for t in (m.trajectory for m in messages if isinstance(m, Generated)):
        response, part = response_of(replica, t), parts[t.trajectory_id]
        assert response.tokens.tobytes().startswith(part.tokens + given.get(t.trajectory_id, b""))
        assert t.policies == 1 and {s.weight_id for s in response.spans} == {1} and t.turns > 1
        expected = hf_logprobs(model, groups[t.trajectory_id].prompt_tokens, response.tokens.tolist())
        mask = torch.tensor(response.loss_mask)
        assert (torch.tensor(response.logprobs) - expected)[mask].abs().max() < 1e-3


def again(grant: Grant, parts: dict[int, Partial]) -> Grant:
    """The same groups, from what is known of them, under the next attempt."""
    groups = [
        msgspec.structs.replace(group, samples=[Sample(s.trajectory_id, 1) for s in group.samples])
        for group in grant.groups
    ]
    return msgspec.structs.replace(grant, batch_id=grant.batch_id + 1, groups=groups, parts=parts)
