"""docs/promises.md#agents: one conversation, one question at a time, each drawn once."""

import asyncio
import json

import pytest

from laminar_hpc.environments.gateway.chat import Chat, Rejected, parse
from laminar_hpc.environments.gateway.session import Door

USER, MORE = {"role": "user", "content": "go"}, {"role": "user", "content": "on"}


def chat(*messages: dict, **given: object) -> Chat:
    return parse(json.dumps({"model": "policy", "messages": messages, **given}).encode())


def call(arguments: str) -> dict:
    function = {"name": "look", "arguments": arguments}
    said = {"id": "call00001", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [said]}


async def test_a_question_is_drawn_once() -> None:
    """Whoever asks the same while it is drawn, or later, has the same answer; another question waits for
    nobody, and is refused; one that was refused may be asked again; who asks at the end is told."""
    session = Door("url", "key")
    asking = [asyncio.create_task(session.ask(chat(USER, temperature=t))) for t in (0.5, 1.0)]
    question = await session.question()
    with pytest.raises(Rejected, match="ask one after the other"):
        await session.ask(chat(USER, MORE))
    session.refuse(Rejected("not now"))
    assert [str(e) for e in await asyncio.gather(*asking, return_exceptions=True)] == ["not now"] * 2
    asking = [asyncio.create_task(session.ask(chat(USER, stream=s))) for s in (False, True)]
    assert (await session.question()).more == question.more == [USER]
    session.answer({"n": 1}, {"role": "assistant", "content": "one"})
    assert await asyncio.gather(*asking) == [{"n": 1}] * 2 and await session.ask(chat(USER)) == {"n": 1}
    last = asyncio.create_task(session.ask(chat(USER, {"role": "assistant", "content": " one\n"}, MORE)))
    assert (await session.question()).more == [MORE]
    session.end("over")
    with pytest.raises(Rejected, match="over") as error:
        await last
    assert error.value.status == 503 and await session.ask(chat(USER)) == {"n": 1}
    with pytest.raises(Rejected, match="over"):
        await session.ask(chat(MORE))


async def test_calls_come_back_as_they_were_meant() -> None:
    """JSON that was written anew is the same call, and the call's name is found for its result; other
    arguments are another history."""
    session = Door("url", "key")
    asking = asyncio.create_task(session.ask(chat(USER)))
    await session.question()
    session.answer({}, chat(USER, call('{"key": "k", "n": 1}'), MORE).messages[1])
    await asking
    result = {"role": "tool", "tool_call_id": "call00001", "content": "v"}
    with pytest.raises(Rejected, match=r"messages\[1\] \(assistant\) is not what it was"):
        await session.ask(chat(USER, call('{"key": "l", "n": 1}'), result))
    again = asyncio.create_task(session.ask(chat(USER, call('{"n":1,"key":"k"}'), result)))
    [more] = (await session.question()).more
    assert more == {"role": "tool", "content": "v", "tool_call_id": "call00001", "name": "look"}
    session.end("over")
    await asyncio.gather(again, return_exceptions=True)


@pytest.mark.parametrize(
    "came",
    [
        {"content": "yes"},
        {"content": "yes", "reasoning_content": "hm"},
        {"content": "<think>hm</think>yes"},
        {"content": " <think>\n hm \n</think>\n\n\nyes "},
        {"content": [{"type": "text", "text": "yes"}]},
        {"content": [{"type": "refusal", "refusal": "yes"}]},
    ],
)
async def test_a_thought_may_be_left_out(came: dict) -> None:
    """Or moved, or set otherwise, as litellm and pydantic-ai do: the answer is the one that was drawn, whose
    tokens and text stand; another answer behind it is another history."""
    session, drawn = Door("url", "key"), {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
    asking = asyncio.create_task(session.ask(chat(USER)))
    await session.question()
    session.answer({}, drawn)
    await asking
    with pytest.raises(Rejected, match=r"messages\[1\] \(assistant\) is not what it was"):
        await session.ask(chat(USER, {"role": "assistant", "content": "no"}, MORE))
    again = asyncio.create_task(session.ask(chat(USER, {"role": "assistant", **came}, MORE)))
    async with asyncio.timeout(10):
        question = await session.question()
    assert question.more == [MORE] and not question.anew and isinstance(question.chat, Chat)
    assert question.chat.messages == [USER, drawn, MORE]
    session.end("over")
    await asyncio.gather(again, return_exceptions=True)


def test_what_clients_send_beside_it() -> None:
    """What openai, openai-agents, pydantic-ai, langgraph, litellm and smolagents send and nothing here heeds
    is taken, and so is null; and numbers, arguments and keys in the ways that they are written."""
    sampling = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "presence_penalty", "seed"), 1)
    sampling |= dict.fromkeys(("frequency_penalty", "repetition_penalty"), 1.0)
    books: dict = {"metadata": {"a": "b"}, "store": False, "priority": 1}
    for name in ("user", "safety_identifier", "service_tier", "prompt_cache_key", "prompt_cache_retention"):
        books |= {name: "x", "cache_salt": "y", "request_id": "r"}
    same = {"n": 1, "modalities": ["text"], "response_format": {"type": "text"}, "top_logprobs": 0}
    null = {"reasoning_effort": None, "functions": None, "logit_bias": {}, "ignore_eos": False}
    more = {"parallel_tool_calls": False, "prediction": {"type": "content", "content": ""}}
    stream = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    given = sampling | books | same | null | more | stream
    asked = chat(USER, tool_choice="required", max_tokens=5.0, stop="Observation:", **given)
    assert (asked.max_tokens, asked.stop, asked.stream_usage) == (5, ["Observation:"], True)
    for arguments, read in (({"a": [1]}, {"a": [1]}), (None, {}), ("", {}), ('{"b": 2}', {"b": 2})):
        said = call(arguments)  # type: ignore[arg-type]
        [_, found, _] = chat(USER, said, MORE).messages
        assert found["tool_calls"][0]["function"]["arguments"] == read


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b'{"model": 1}', b'{"messages": []}', b"[" * 100_000, b'"\\ud800"', b'{"model": "\xff"}'],
)
def test_any_bytes_are_a_request_or_refused(raw: bytes) -> None:
    """In one line."""
    with pytest.raises(Rejected, match="the request cannot be read: ") as error:
        parse(raw)
    assert "\n" not in str(error.value)
