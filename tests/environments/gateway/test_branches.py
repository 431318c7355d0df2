"""docs/promises.md#branches: a trajectory whose history is rewritten, by its agent or by the model's
template, is several sequences, each of which the model has seen as it is trained; the model alone is stood in
for."""

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from test_agents import END, Rollout, never_moves, saying, with_agents

from helpers.models.chats import FORGETFUL, save
from laminar_hpc.environments.gateway.dialogues import Dialogues
from laminar_hpc.environments.turns.calls import ToolCall
from laminar_hpc.environments.turns.conversation import ToolResult
from laminar_hpc.environments.turns.model import Dialogue, conversation
from laminar_hpc.environments.turns.session import FunctionSession
from laminar_hpc.line.messages.data import Partial, VersionSpan
from laminar_hpc.rollout import episodes, turn_calls
from laminar_hpc.rollout.in_flight import Outcome, TrajectoryInFlight
from laminar_hpc.rollout.partial_response import tokens_of
from laminar_hpc.store.payload.layout import unpack

NEXT, ON = f"{END}\n<|assistant|>\n", f"{END}\n<|user|>\ngo on"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder, path = tmp_path_factory.mktemp("branches"), list(sys.path)

    async def no_tools(_: Dialogues) -> str:
        return ""  # SGLang's parsers take seconds, and these agents have no tools

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(Dialogues, "start", no_tools)
        yield folder
    sys.path[:] = path


def sequences(rollout: Rollout, work: TrajectoryInFlight) -> list[tuple[str, list[str]]]:
    """What the trainer makes of its payload: each branch as text, and what was drawn in it."""
    response, first = unpack(work.packed()), len(work.group.prompt_tokens)
    tokens = [*work.group.prompt_tokens, *response.tokens.tolist()]
    assert response.starts == work.starts and response.trained == work.partial.trained
    found = []
    for begin, end in pairwise([0, *(first + start for start in response.starts), len(tokens)]):
        spans = [s for s in response.spans if begin <= first + s.start < end]
        drawn = [rollout.text(tokens[first + s.start : first + s.end]) for s in spans]
        found.append((rollout.text(tokens[begin:end]), drawn))
    return found


async def test_an_agent_that_compacts(folder: Path) -> None:
    """A summary in place of earlier turns begins a branch, which then only grows; the prompt of each answer
    is what the branch has before it, and token ids that come back are compared with the branch's."""

    async def test(rollout: Rollout) -> None:
        work = rollout.works("compacts")
        assert await rollout.run(work, saying("one", "two", "three", "four")) == Outcome()
        begin = f"<pad><|system|>\nLook.{END}\n<|user|>\n{work.group.row['prompt']}{NEXT}"
        whole, short = sequences(rollout, work)
        assert whole == (f"{begin}one{ON}{NEXT}two{END}", [f"one{END}", f"two{END}"])
        assert short[0] == f"{begin}in short{ON}{NEXT}three{ON}{NEXT}four{END}"
        assert short[1] == [f"three{END}", f"four{END}"] and work.score is not None
        said = json.loads((folder / "compacted.json").read_text())
        asked = [rollout.text([*prompt, *drawn]) for prompt, drawn in said["seen"]]
        parts = zip((whole[0], short[0]), (f"one{END}", f"three{END}"), strict=True)
        ends = [(text, text[: text.index(word) + len(word)]) for text, word in parts]
        assert asked == [ends[0][1], ends[0][0], ends[1][1], ends[1][0]]
        assert "prompt_token_ids: not what was drawn" in said["refused"]
        assert work.episode is not None and work.episode.turns == 4 and len(work.starts) == 1

    await with_agents(folder, "run", test, history="branch")


async def test_a_template_that_forgets(folder: Path) -> None:
    """Thoughts of earlier turns are left out of the next branch, and stand where they were drawn; kept, the
    conversation is one sequence all the same; else an agent's second turn is refused with the ways out."""
    thoughts = saying("<think>1</think>one", "two", "three", "four")

    async def test(rollout: Rollout) -> None:
        save(rollout.model, "<pad>" + FORGETFUL, [END])
        work = rollout.works("compacts")
        assert await rollout.run(work, thoughts) == Outcome()
        texts = [text[text.index("<|assistant|>") :] for text, _ in sequences(rollout, work)]
        answer = "<|assistant|>\n"
        assert texts[0] == f"{answer}<think>1</think>one{END}"
        assert texts[1] == f"{answer}one{ON}{NEXT}two{END}" and len(texts) == 3

    async def kept(rollout: Rollout) -> None:
        save(rollout.model, "<pad>" + FORGETFUL, [END])
        work = rollout.works("nemo")
        assert await rollout.run(work, saying("<think>1</think>one", "two")) == Outcome()
        [(text, _)] = sequences(rollout, work)
        assert text.endswith(f"<|assistant|>\n<think>1</think>one{ON}{NEXT}two{END}")

    async def refused(rollout: Rollout) -> None:
        save(rollout.model, "<pad>" + FORGETFUL, [END])
        why = (await rollout.episodes.dialogues.of([])).no_user
        assert "rewrites earlier turns" in why and "environment.history=keep or branch" in why

    await with_agents(folder, "run", test, history="branch")
    await with_agents(folder, "run", kept, history="keep")
    await with_agents(folder, "run", refused)


async def test_an_agent_that_edits_token_ids(folder: Path) -> None:
    """What is not the continuation is a branch of exactly these tokens."""

    async def test(rollout: Rollout) -> None:
        first = [*rollout.encode("<pad>"), *rollout.encode("hello")]
        work = rollout.works("edits", ids=first)
        assert await rollout.run(work, saying("one", "two", "three")) == Outcome()
        (one, _), (rest, drawn) = sequences(rollout, work)
        assert one == f"<pad>helloone{END}" and drawn == [f"two{END}", f"three{END}"]
        ids = [*first, 9, *rollout.encode(f"two{END}"), 8, *rollout.encode(f"three{END}")]
        assert rollout.encode(rest) == ids

    await with_agents(folder, "run", test, history="branch")


class Parser:
    """In place of SGLang's: a turn that says CALL has one."""

    name = "of the test"

    def calls(self, text: str) -> list[ToolCall]:
        return [ToolCall("look", {})] if "CALL" in text else []


async def test_tools_behind_thoughts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two turns with tools: the branch repeats what the template leaves of the turns before, and the
    result. A trajectory that begins again has none of the branches of its first life."""
    rollout = Rollout(folder, "run", history="branch")
    save(rollout.model, FORGETFUL, [END])
    tool = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {}}}

    def dialogue(model: str, tools: list, grows: bool) -> Dialogue:
        assert not grows
        return Dialogue(conversation(model, tools, grows=grows), Parser())  # type: ignore[arg-type]

    async def look(session: FunctionSession, name: str, arguments: dict) -> str:
        return "found"

    monkeypatch.setattr(turn_calls, "dialogue", dialogue)
    monkeypatch.setattr(FunctionSession, "call", look)
    rollout.config.environment.agent, rollout.config.environment.tools = "", ["json.loads"]
    made = episodes.Episodes(rollout.episodes.context, [rollout.tokenizer.token_to_id(END)], never_moves)
    made.calls.dialogues[""] = dialogue(str(rollout.model), [tool], False)
    prompt = made.calls.dialogues[""].conversation.written([{"role": "user", "content": "go"}])
    words = ["<think>1</think>CALL", "CALL again", "<think>3</think>CALL", "<think>4</think>done"]
    left = iter(words)

    async def draw(work: TrajectoryInFlight) -> Outcome:
        said, before = rollout.encode(next(left) + END), work.partial
        work.finish_reason = "stop"
        zeros = np.full(len(said), -0.5, np.float32).tobytes()
        spans = [*before.spans, VersionSpan(7, before.count, before.count + len(said))]
        tokens = before.tokens + np.array(said, np.int32).tobytes()
        work.partial = Partial(tokens, before.logprobs + zeros, spans, 1.0)
        return Outcome()

    work = rollout.works("")
    work.group.prompt_tokens = rollout.encode(prompt)
    assert await made.run(work, draw) == Outcome() and work.bound
    result = f"{END}\n<|tool|>\nfound{NEXT}"
    texts = [text.removeprefix(prompt) for text, _ in sequences(rollout, work)]
    assert texts == [
        f"{words[0]}{END}",
        f"CALL{result}CALL again{result}{words[2]}{END}",
        f"CALL{result}CALL again{result}CALL{result}{words[3]}{END}",
    ]
    assert [drawn for _, drawn in sequences(rollout, work)][1] == [f"CALL again{END}", f"{words[2]}{END}"]
    work.begin_again()
    assert work.starts == [] and not len(tokens_of(work.partial)) and ToolResult("look", "x")
    await made.close()
