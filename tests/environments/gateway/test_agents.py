"""docs/promises.md#agents: agents that know OpenAI's client only, in their processes, by the gateway; the
model alone is stood in for, by a script of what it says."""

import asyncio
import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from helpers.models.chats import SEPARATED, save
from helpers.paths import HELPERS
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import EnvironmentConfig, RunConfig
from laminar_hpc.data.tokens import TextDecoder, load_tokenizer
from laminar_hpc.environments.turns.model import check_first_token
from laminar_hpc.line.context import RoleContext
from laminar_hpc.line.messages.data import Partial, PromptGroup, VersionSpan
from laminar_hpc.line.messages.membership import Welcome
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.rollout.agents import AgentEpisodes
from laminar_hpc.rollout.in_flight import Outcome, TrajectoryInFlight
from laminar_hpc.rollout.partial_response import logprobs_of, tokens_of

CALL = '<tool_call>{"name": "look", "arguments": {"key": "k"}}</tool_call>'
END = "<|end|>"
SHORT = 0.3  # seconds that an agent has which was told to hang
Script = Callable[[str], str]  # the conversation so far -> what the model says next


async def never_moves(_: TrajectoryInFlight) -> bool:
    return False


class Rollout:
    """Agents of a replica whose model says what a script says."""

    def __init__(self, folder: Path, function: str, **environment: object) -> None:
        shutil.copy(HELPERS / "environments/agents_by_url.py", folder / "agents_by_url.py")
        self.model = save(folder / "model", "<pad>" + SEPARATED, [END])
        config = RunConfig(run_dir=str(folder))
        config.model.path = str(self.model)
        config.environment.agent = function and f"agents_by_url.{function}"
        config.environment.timeout_seconds, config.reward.score_on_failure = 60.0, -1.0
        for key, value in environment.items():
            setattr(config.environment, key, value)
        config.sampling.max_response_tokens = 2000
        trace = Trace(folder, "rollout", 0)
        channel = SimpleNamespace(send=lambda message: None)
        context = RoleContext(config, "rollout", 0, "here", folder, channel, Welcome("run"), trace)  # type: ignore
        self.config = config
        self.tokenizer, self.decoder = load_tokenizer(str(self.model)), TextDecoder(self.model)
        self.episodes = AgentEpisodes(context, [self.tokenizer.token_to_id(END)], never_moves)
        self.numbers = itertools.count()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, tokens: object) -> str:
        return self.decoder.text(list(tokens), specials=True)  # type: ignore

    def works(self, kind: str, room: int = 2000, **row: object) -> TrajectoryInFlight:
        number = next(self.numbers)
        group = PromptGroup(
            number, self.encode("<pad>"), "p", {"prompt": f"p{number}", "kind": kind, **row}, []
        )
        return TrajectoryInFlight(number, 0, group, 7, 3, 1.0, room)

    async def draw(self, work: TrajectoryInFlight, script: Script) -> Outcome:
        """One turn."""
        answer = script(self.text([*work.group.prompt_tokens, *tokens_of(work.partial)]))
        if answer == f"hang{END}" and work.episode is not None:
            work.episode.limits = replace(work.episode.limits, timeout_seconds=SHORT)
        said = self.encode(answer)
        cut, before = said[: work.room], work.partial
        work.finish_reason = "length" if len(cut) < len(said) or cut[-1:] != self.encode(END) else "stop"
        tokens = np.array(cut, np.int32).tobytes()
        logprobs = (-np.arange(1, len(cut) + 1) / 8).astype(np.float32).tobytes()
        spans = [*before.spans, VersionSpan(7, before.count, before.count + len(cut))]
        work.partial = Partial(before.tokens + tokens, before.logprobs + logprobs, spans, before.time_started)
        return Outcome()

    async def run(self, work: TrajectoryInFlight, script: Script) -> Outcome:
        """All of its lives."""
        return await self.episodes.run(work, lambda work: self.draw(work, script))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder, path = tmp_path_factory.mktemp("agents"), list(sys.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder
    sys.path[:] = path


async def with_agents(folder: Path, function: str, test: Callable, **environment: object) -> None:
    rollout = Rollout(folder, function, **environment)
    await rollout.episodes.start()
    try:
        await test(rollout)
    finally:
        await rollout.episodes.close()


def looking(times: int) -> Script:
    def script(text: str) -> str:
        return f"so {CALL}{END}" if text.count("<tool_call>") < times else f"done{END}"

    return script


def saying(*words: str) -> Script:
    """One after the other, whatever was asked."""
    left = iter(words)
    return lambda text: next(left) + END


async def test_a_trajectory_of_an_agent(folder: Path) -> None:
    """Two at once, each with a conversation of its own: what the model has drawn stands where it was drawn,
    the rest is what the template writes around it, and its last word is the agent's reward."""

    async def test(rollout: Rollout) -> None:
        works = [rollout.works("looks") for _ in range(2)]
        outcomes = await asyncio.gather(
            *(rollout.run(w, looking(n)) for n, w in zip((0, 2), works, strict=True))
        )
        assert outcomes == [Outcome(), Outcome()] and all(work.bound for work in works)
        for work, times in zip(works, (0, 2), strict=True):
            assert work.score is not None and work.episode is not None and work.finish_reason == "stop"
            assert work.score.reward == times and work.score.parts == {"accuracy": 1.0, "said": 3 + 2 * times}
            text = rollout.text([*work.group.prompt_tokens, *tokens_of(work.partial)])
            tools, _, talk = text.partition(f"<|system|>\nLook.{END}\n")
            looked = f"so {CALL}{END}\n<|tool|>\nvk{END}\n<|assistant|>\n"
            assert tools.startswith("<pad><|system|>{") and '"name": "look"' in tools
            first = f"<|user|>\n{work.group.row['prompt']}{END}\n<|assistant|>\n"
            assert talk == first + looked * times + f"done{END}"
            drawn = [rollout.text(tokens_of(work.partial)[s.start : s.end]) for s in work.partial.spans]
            assert drawn == [f"so {CALL}{END}"] * times + [f"done{END}"]
            given = np.ones(work.partial.count, bool)
            for span in work.partial.spans:
                given[span.start : span.end] = False
            assert not logprobs_of(work.partial)[given].any() and logprobs_of(work.partial)[~given].all()
            figures = work.episode.figures(time.time())
            assert (figures["environment.turns"], figures["environment.tool_calls"]) == (times + 1, times)

        limits = rollout.episodes.limits
        limits.max_turns = 2
        stopped = rollout.works("looks")
        assert await rollout.run(stopped, looking(9)) == Outcome()
        assert stopped.finish_reason == "turns" and len(stopped.partial.spans) == 2
        limits.max_turns, limits.max_tool_calls = 8, 0
        assert await rollout.run(stopped := rollout.works("looks"), looking(9)) == Outcome()
        assert stopped.finish_reason == "calls" and stopped.score is not None
        assert stopped.score.reward == -1 and "environment.max_tool_calls" in stopped.score.error
        limits.max_tool_calls, limits.max_seconds = 16, 0.0
        assert await rollout.run(late := rollout.works("looks"), looking(9)) == Outcome()
        assert late.finish_reason == "time" and len(late.partial.spans) == 1
        limits.max_seconds = 600.0
        cut = rollout.works("looks", room=420)
        assert await rollout.run(cut, lambda text: CALL + "x" * 60 + END) == Outcome()
        assert cut.finish_reason == "length" and cut.score is not None and cut.score.reward == -1
        full = await rollout.run(rollout.works("looks", room=50), looking(0))
        assert "sampling.max_response_tokens leaves 50" in (full.lost or "")

    await with_agents(folder, "run", test)


async def test_an_agent_that_fails_begins_again(folder: Path) -> None:
    """One that raises, hangs or dies, or returns nothing, is nobody's answer: it begins again in a fresh
    session; one that fails always is lost with its reason, and others that run beside it are not."""

    async def test(rollout: Rollout) -> None:
        words = [("hang", "done"), ("no", "hang", "done"), ("nothing", "done"), ("no", "no", "no")]
        works = [rollout.works("obeys") for _ in words]
        lives = (rollout.run(work, saying(*w)) for work, w in zip(works, words, strict=True))
        outcomes = await asyncio.gather(*lives)
        assert outcomes[:3] == [Outcome()] * 3 and [w.score and w.score.reward for w in works[:3]] == [1] * 3
        assert all(len(work.partial.spans) == 1 for work in works[:3]), "of earlier lives nothing is left"
        assert "3 times, at last: the agent: ValueError: unlucky after no" in (outcomes[3].lost or "")
        assert outcomes[3].ungraded == 3 and not outcomes[0].ungraded
        dies = rollout.works("obeys")
        assert await rollout.run(dies, saying("die", "done")) == Outcome() and dies.score is not None
        short = await rollout.run(rollout.works("obeys", short=1), saying("no", "no", "no"))
        assert "unlucky after n" in (short.lost or ""), "a turn that the agent itself has cut is no limit"
        nothing = await rollout.run(rollout.works("obeys"), saying("nothing", "nothing", "nothing"))
        assert "no reward, and reward.function is not set" in (nothing.lost or "")

    await with_agents(folder, "run", test)


async def test_turns_that_an_agent_ends(folder: Path) -> None:
    """By its stop texts, by tokens, or by max_tokens: what was drawn up to there is trained, the token that
    completes the text included, and the next turn follows on it; the trajectory was not cut. What there is
    not is answered with what there is."""

    async def test(rollout: Rollout) -> None:
        letter = rollout.tokenizer.token_to_id("l")
        turns = [
            {"stop": ["no", "Observation:"]},
            {"stop": "call"},
            {"extra_body": {"stop_token_ids": [letter]}},
            {"stop": ["nowhere"]},
            {"max_tokens": 3},
        ]
        work = rollout.works("stops", turns=turns)
        assert await rollout.run(work, saying(*["I call Observation: 4"] * len(turns))) == Outcome()
        seen = json.loads((folder / "stopped.json").read_text())
        whole = ["I call ", "stop"], ["I ", "stop"], ["I cal", "stop"], ["I call Observation: 4", "stop"]
        assert seen["turns"] == [*whole, ["I c", "length"]] and seen["key"] == 200
        spans, tokens = work.partial.spans, tokens_of(work.partial)
        drawn = [rollout.text(tokens[span.start : span.end]) for span in spans]
        ends = ["Observation:", "call", "cal", f"call Observation: 4{END}", "c"]
        assert drawn == ["I call Observation:", *(f"I {end}" for end in ends[1:])]
        assert np.count_nonzero(logprobs_of(work.partial)) == sum(span.end - span.start for span in spans)
        text = rollout.text(tokens)
        assert all(f"{end.removesuffix(END)}{END}\n<|user|>\ngo on" in text for end in ends[:-1])
        assert work.finish_reason == "stop", "a turn that the agent has cut is no trajectory that was"
        for path, words in {
            "responses": "only chat completions: say set_default_openai_api('chat_completions')",
            "completions": "no legacy completions; there is POST chat/completions",
            "v1/chat/completions": "there is POST chat/completions and GET models under base_url",
            "embeddings": "there is POST chat/completions and GET models under base_url",
        }.items():
            status, said = seen["elsewhere"][path]
            assert status == 404 and words in said and "\n" not in said, said

    await with_agents(folder, "run", test)


async def test_refused_requests_are_counted(folder: Path) -> None:
    """Of an agent that says nothing of them and returns a reward, with the first reason; those that meet a
    limit of the run are told by that. One that was refused all it asked for is lost with the last reason."""

    async def test(rollout: Rollout) -> None:
        more = [{"messages": [{"role": "user", "content": word}]} for word in ("a", "b")]
        work = rollout.works("careless", asks=[{}, {"n": 2}, *more, {"model": "gpt"}])
        assert await rollout.run(work, saying("one")) == Outcome()
        assert work.score is not None and work.score.reward == 0.0 and work.episode is not None
        reasons = ["n: one answer", "messages[0] (system) is not", "messages[0] (sys", "there is no model"]
        for reason, said in zip(reasons, work.episode.refusals, strict=True):
            assert said.startswith(reason)
        assert work.episode.figures(time.time())["environment.refused_requests"] == 4
        rollout.episodes.limits.max_turns = 1
        begun = [{"role": "user", "content": "a"}]
        on = [*begun, {"role": "assistant", "content": "one"}, *begun]
        limited = rollout.works("careless", asks=[{"messages": begun}, {"messages": on}])
        assert await rollout.run(limited, saying("one")) == Outcome()
        assert limited.episode is not None and not limited.episode.refusals
        assert limited.finish_reason == "turns"
        none = await rollout.run(rollout.works("careless", asks=[{"n": 2}, {"model": "gpt"}]), saying())
        assert "for nothing; its last request that was refused: there is no model 'gpt'" in (none.lost or "")

    await with_agents(folder, "run", test)


async def test_a_rollout_that_was_stopped_hears_its_agents(folder: Path) -> None:
    """An agent that has asked again, and one that has returned, while this process stood still for longer
    than an agent may be silent."""

    lives, limits = list[str](), EnvironmentConfig()

    def held(text: str) -> str:
        lives.append(text)
        limits.timeout_seconds = 3.0
        asyncio.get_running_loop().call_later(0.0, time.sleep, 4.0)
        return looking(1)(text)

    async def test(rollout: Rollout) -> None:
        nonlocal limits
        limits = rollout.episodes.limits
        outcome = await rollout.run(work := rollout.works("looks"), held)
        assert outcome == Outcome() and work.score is not None and work.score.reward == 1
        assert len(lives) == 2, "it has not begun again"

    await with_agents(folder, "run", test)


async def test_plain_agents_have_a_process_each(folder: Path) -> None:
    """One that computes for ever is ended, and the one beside it is not held up."""

    async def test(rollout: Rollout) -> None:
        hangs, good = rollout.works("plain"), rollout.works("plain")
        lives = rollout.run(hangs, saying("hang", "hang", "hang")), rollout.run(good, saying("done"))
        outcomes = await asyncio.gather(*lives)
        assert outcomes[1] == Outcome() and good.score is not None and good.score.reward == 4
        assert f"the agent neither asked nor returned for {SHORT:g} s" in (outcomes[0].lost or "")

    await with_agents(folder, "plain", test)


def called(arguments: str) -> list[dict]:
    """Messages with a call that was made before the session."""
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [{"role": "user", "content": "p"}, said, {"role": "tool", "tool_call_id": "c", "content": "v"}]


def nested(levels: int) -> dict:
    value: dict = {}
    for _ in range(levels):
        value = {"properties": value}
    return value


DEEP_TOOL = {"type": "function", "function": {"name": "look", "parameters": nested(90)}}
REFUSED = {
    "model": ({"model": "gpt"}, "there is no model 'gpt' here; it is called 'policy'"),
    "stop": ({"stop": ["\n", ""]}, "stop: an empty text stands everywhere"),
    "n": ({"n": 2}, "n: one answer at a time"),
    "least": ({"extra_body": {"min_tokens": 9}}, "min_tokens: the policy is drawn from as it is"),
    "functions": ({"functions": [{"name": "look"}]}, "functions: write them as tools"),
    "format": ({"response_format": {"type": "json_object"}}, "response_format: only text"),
    "choice": ({"tool_choice": {"type": "function"}}, "tool_choice: auto, none or required"),
    "few": ({"max_tokens": 0}, "max_tokens: a whole number, at least 1"),
    "half a token": ({"max_tokens": 1.5}, "max_tokens: a whole number, at least 1"),
    "sound": ({"modalities": ["text", "audio"]}, "modalities: only text"),
    "none": ({"messages": []}, "messages: at least one"),
    "role": ({"messages": [{"role": "ghost", "content": ""}]}, "no role 'ghost'; there is: system"),
    "begun": ({"messages": [{"role": "assistant", "content": "I"}]}, "never begun by others"),
    "picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0]: text only",
    ),
    "no call": ({"messages": called("{")}, "messages[1]: the arguments of look are no JSON"),
    **{
        name: ({"extra_body": {name: value}}, f"{name}: the policy is drawn from as it is")
        for name, value in {
            "guided_json": {"type": "object"},
            "guided_choice": ["a", "b"],
            "guided_regex": "a+",
            "regex": "a+",
            "ebnf": "root ::= a",
            "json_schema": "{}",
            "continue_final_message": True,
            "logit_bias": {"5": 1},
        }.items()
    },
    **{
        name: ({"extra_body": {name: value}}, f"'{name}': there is no such field here; leave it out")
        for name, value in {
            "chat_template_kwargs": {"enable_thinking": False},
            "reasoning_effort": "low",
            "web_search_options": {},
            "nobody_knows": 0,
        }.items()
    },
    "half": ({"messages": called('{"key": "\\ud800"}')}, "are JSON with half of a surrogate pair"),
    "deep": ({"messages": called("[" * 5000 + "]" * 5000)}, "are nested deeper than 64 levels"),
    "deep tool": ({"tools": [DEEP_TOOL]}, "tools: nested deeper than 64 levels"),
    "tool": ({"tools": [{"type": "function"}]}, "tools: each is {'type': 'function', 'function'"),
    "type": ({"messages": [{"role": 3}]}, "Expected `str`, got `int` - at `$.messages[0].role`"),
}


async def test_what_a_session_answers(folder: Path) -> None:
    """The same question has the same answer and is drawn once; a rewritten history, another key, and what
    would bend the distribution are refused in one line; log-probs, token ids, streams and shorter answers as
    asked for."""
    asked: list[str] = []

    def script(text: str) -> str:
        asked.append(text)
        return f"(again){END}"

    async def test(rollout: Rollout) -> None:
        work = rollout.works("tries", refused={name: given for name, (given, _) in REFUSED.items()})
        assert await rollout.run(work, script) == Outcome()
        assert work.score is not None and work.score.reward == 0.5
        seen = json.loads((folder / "seen.json").read_text())
        for name, (_, words) in REFUSED.items():
            assert seen[name][0] == 400 and words in seen[name][1] and "\n" not in seen[name][1], seen[name]
        assert seen["key"] == [
            401,
            "no session with this key is here: give base_url and api_key as they came",
        ]
        assert seen["models"] == ["policy"] and seen["same"] == 1
        grows = "a session's conversation only grows"
        for name, words in {
            "rewritten": "the last one is the assistant's",
            "shorter": f"messages: 1, of 3 that were said: {grows}",
            "changed": f"messages[2] (assistant) is not what it was: {grows}",
            "own": "not the system's",
            "tools": "tools: they are not those of the request before",
        }.items():
            assert seen[name][0] == 400 and words in seen[name][1], seen[name]
        assert "alike" not in seen and len(asked) == 4 == len(work.partial.spans)
        assert seen["stream"] == ["(ag", None] and seen["finish"] == [None, "length"]
        assert seen["logprobs"] == ["(", "a", "g"]
        ids, drawn = seen["ids"]
        assert [*ids, *drawn] == [*work.group.prompt_tokens, *tokens_of(work.partial)]
        assert rollout.text(drawn) == f"(again){END}" and rollout.text(ids) == asked[-1]
        assert f"(ag{END}\n<|user|>\ngo on{END}\n<|assistant|>\n" in asked[-1], (
            "a turn that was cut is closed"
        )
        assert seen["usage"]["prompt_tokens"] == len(ids) and seen["usage"]["completion_tokens"] == 8

    await with_agents(folder, "run", test)


async def test_what_is_no_agent(folder: Path) -> None:
    """A function with other parameters, and a template whose conversations begin with different tokens: one
    line before anything starts."""
    with pytest.raises(LaminarError, match="is called as run\\(row=, base_url=, api_key=, model=\\)"):
        await Rollout(folder, "other").episodes.pool.start()
    model = save(folder / "unlike", SEPARATED, [END])
    with pytest.raises(LaminarError, match="begins conversations with several tokens"):
        check_first_token(str(model))
    check_first_token(str(Rollout(folder, "run").model))
