"""docs/promises.md#agents on a real engine: what an agent with OpenAI's client has said and read is,
token by token, what the engine saw, on one policy."""

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.engines.pair import EOS, hf_logprobs, reference
from helpers.engines.replica_stand import Replica, replica_of_turns
from helpers.models.chats import SEPARATED
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.line.messages.data import PromptGroup, Sample
from laminar_hpc.line.messages.rollouts import Generated, Grant, Scored, WeightsOpened
from laminar_hpc.store.payload.reader import read

pytestmark = pytest.mark.slow
STOPS = [*range(0, 60), EOS]  # so that a random model ends its turns
START = 257  # <|im_start|>, with which every conversation begins
TEMPLATE = "<|im_start|>" + SEPARATED.replace("<|end|>", "<|im_end|>")
AGENT = """
import asyncio, json, os
from openai import AsyncOpenAI

async def run(row, base_url, api_key, model):
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages, asked = [{"role": "user", "content": row["prompt"]}], []
    extras = {"return_token_ids": True}
    for turn in range(3):
        answer = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=40, logprobs=True, extra_body=extras)
        choice = answer.choices[0]
        logprobs = [one.logprob for one in choice.logprobs.content]
        asked.append([answer.prompt_token_ids, choice.token_ids, logprobs])
        messages += [choice.message, {"role": "user", "content": "on"}]
        open("asked", "a").write(".")
        while not os.path.exists("gate"):
            await asyncio.sleep(0.02)
    with open(f"of-{row['number']}.json", "w") as file:
        json.dump(asked, file)
    return {"reward": 0.25, "accuracy": 1.0}
"""


COMPACTS = AGENT.replace(
    "    with open",
    """
    messages = [messages[0], {"role": "assistant", "content": "so far so good"}, messages[-1]]
    for turn in range(2):
        answer = await client.chat.completions.create(
            model=model, messages=messages, max_tokens=40, logprobs=True, extra_body=extras)
        choice = answer.choices[0]
        logprobs = [one.logprob for one in choice.logprobs.content]
        asked.append([answer.prompt_token_ids, choice.token_ids, logprobs])
        messages += [choice.message, {"role": "user", "content": "on"}]
    with open""",
)


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """A replica on weights 0 whose trajectories are an agent's."""
    folder = tmp_path_factory.mktemp("agents")
    (folder / "agent_of_real_test.py").write_text(AGENT)

    def adjust(config: RunConfig) -> None:
        config.environment.agent = "agent_of_real_test.run"
        config.environment.timeout_seconds = 120.0
        config.reward.function = ""

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        with replica_of_turns(folder, TEMPLATE, STOPS, adjust) as made:
            yield made


def test_an_agent_on_a_real_engine(replica: Replica) -> None:
    """Eight agents at once, and weights that are published while they think: all turns are of the weights
    that they began with; each answer's token ids and log-probs are those that are stored and trained on, and
    those of transformers; what stood before was in the prefix cache; the reward is what the agent returned.
    """
    controller = replica.controller
    while controller.received.empty():
        assert not replica.ended(0.1), replica.error
    controller.get(WeightsOpened)
    controller.until_asked(0)
    groups = [
        PromptGroup(g, [START], "", {"prompt": f"prompt {g}", "number": g}, [Sample(g, 0)]) for g in range(8)
    ]
    controller.tell(Grant(1, 0, 0, groups, 1.0, 600, ""))
    while not (replica.folder / "asked").exists():
        assert not replica.ended(0.05)
    replica.publish(1, 1)
    (replica.folder / "gate").touch()
    messages = controller.collect(16, Generated, Scored)
    controller.get(WeightsOpened)  # only now
    model, shares = reference(replica.models[0]), []
    scored = {m.trajectory_id: m for m in messages if isinstance(m, Scored)}
    for t in (m.trajectory for m in messages if isinstance(m, Generated)):
        figures, place = scored[t.trajectory_id].parts, t.place
        assert scored[t.trajectory_id].reward == 0.25 and figures["accuracy"] == 1.0 and place is not None
        [response] = read(replica.folder, [(t.trajectory_id, place)])
        mask, whole = response.loss_mask, [START, *response.tokens.tolist()]
        assert t.policies == 1 and t.turns == 3 == len(response.spans) and t.trained == mask.sum()
        asked = json.loads((replica.folder / f"of-{t.trajectory_id}.json").read_text())
        for span, (prompt, drawn, logprobs) in zip(response.spans, asked, strict=True):
            assert span.weight_id == 0 and [*prompt, *drawn] == whole[: span.end + 1]
            assert len(prompt) == span.start + 1 and len(drawn) <= 40
            assert logprobs == response.logprobs[span.start : span.end].tolist()
        expected = hf_logprobs(model, [START], response.tokens.tolist())
        gap = (torch.tensor(response.logprobs) - expected)[torch.tensor(mask)].abs().max()
        assert gap < 1e-3 and not response.logprobs[~mask].any()
        shares.append(figures["environment.cached_share"])
    print(f"share of earlier turns in the cache: {np.mean(shares):.3f}")
    assert len(shares) == 8 and np.mean(shares) > 0.9


def test_an_agent_that_compacts_on_a_real_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/promises.md#branches: what an agent has compacted begins a branch, whose tokens have the
    log-probs that transformers gives them in the branch alone; the payload has both, each as the agent saw
    it."""
    (tmp_path / "compacting_of_real_test.py").write_text(COMPACTS)
    (tmp_path / "gate").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def adjust(config: RunConfig) -> None:
        config.environment.agent, config.environment.history = "compacting_of_real_test.run", "branch"
        config.environment.timeout_seconds = 120.0
        config.reward.function = ""

    with replica_of_turns(tmp_path, TEMPLATE, STOPS, adjust) as replica:
        controller = replica.controller
        while controller.received.empty():
            assert not replica.ended(0.1), replica.error
        controller.get(WeightsOpened)
        controller.until_asked(0)
        rows = [{"prompt": f"prompt {g}", "number": g} for g in range(4)]
        groups = [PromptGroup(g, [START], "", row, [Sample(g, 0)]) for g, row in enumerate(rows)]
        controller.tell(Grant(1, 0, 0, groups, 1.0, 900, ""))
        messages, model = controller.collect(8, Generated, Scored), reference(replica.models[0])
        for t in (m.trajectory for m in messages if isinstance(m, Generated)):
            assert t.place is not None and t.policies == 1 and t.turns == 5
            [response] = read(replica.folder, [(t.trajectory_id, t.place)])
            whole, starts = [START, *response.tokens.tolist()], [1 + start for start in response.starts]
            branches = [(a, b, whole[a:b]) for a, b in pairwise([0, *starts, len(whole)])]
            asked = json.loads((tmp_path / f"of-{t.trajectory_id}.json").read_text())
            for span, (prompt, drawn, logprobs) in zip(response.spans, asked, strict=True):
                [(begin, tokens)] = [(a, tokens) for a, b, tokens in branches if a <= span.start + 1 < b]
                assert [*prompt, *drawn] == tokens[: 1 + span.end - begin]
                assert logprobs == response.logprobs[span.start : span.end].tolist()
            compacted = [1 + response.spans[n].start - len(asked[n][0]) for n in (2, 3)]
            assert compacted[0] < compacted[1] and compacted[1] in starts
            first = torch.zeros(1)
            expected = torch.cat(
                [torch.cat([first, hf_logprobs(model, b[:1], b[1:])]) for _, _, b in branches]
            )
            gap = (torch.tensor(response.logprobs) - expected[1:])[torch.tensor(response.loss_mask)]
            assert gap.abs().max() < 1e-3
