"""Agents as users write them, with OpenAI's own client and nothing of ours; the row says which. Copied into
the folder of a test, and imported there by environment workers."""

import asyncio
import contextlib
import json
import os

from httpx import AsyncClient, Response
from openai import APIStatusError, AsyncOpenAI, OpenAI

LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks it up.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


def begin(row: dict) -> list[dict]:
    return [{"role": "system", "content": "Look."}, {"role": "user", "content": row["prompt"]}]


def went_on(messages: list, message: object) -> bool:
    """Its calls are made; whether there were any."""
    messages.append(message.model_dump())
    for call in message.tool_calls or []:
        key = json.loads(call.function.arguments)["key"]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "v" + key})
    return bool(message.tool_calls)


async def looks(row: dict, client: AsyncOpenAI, model: str) -> dict:
    """Goes on as long as the model calls."""
    messages, looked = begin(row), 0
    while True:
        answer = await client.chat.completions.create(model=model, messages=messages, tools=[LOOK])
        if not went_on(messages, answer.choices[0].message):
            return {"reward": looked, "accuracy": 1.0, "said": len(messages)}
        looked += 1


async def obeys(row: dict, client: AsyncOpenAI, model: str) -> float | None:
    """One turn, and then what the model has said."""
    given = {"model": model, "messages": begin(row), "temperature": 0.2, "max_tokens": row.get("short")}
    said = (await client.chat.completions.create(**given)).choices[0].message.content
    if said == "die":
        os._exit(5)
    if said == "hang":
        await asyncio.Event().wait()
    if said in ("no", "n"):
        raise ValueError(f"unlucky after {said}")
    return None if said == "nothing" else 1.0


async def careless(row: dict, client: AsyncOpenAI, model: str) -> float:
    """What is refused is no reason for it to do otherwise, or to say so."""
    for given in row["asks"]:
        with contextlib.suppress(APIStatusError):
            await client.chat.completions.create(**{"model": model, "messages": begin(row)} | given)
    return 0.0


async def stops(row: dict, client: AsyncOpenAI, model: str) -> float:
    """Ends its turns by itself, writes its key as it likes, and asks where nothing is; what it saw goes into
    a file."""
    messages, seen = begin(row), {"turns": [], "elsewhere": {}}
    for given in row["turns"]:
        answer = await client.chat.completions.create(model=model, messages=messages, **given)
        [choice] = answer.choices
        seen["turns"].append([choice.message.content, choice.finish_reason])
        messages += [choice.message.model_dump(), USER]
    for path in ("responses", "completions", "v1/chat/completions", "embeddings"):
        try:
            await client.post(f"/{path}", cast_to=Response, body={})
        except APIStatusError as error:
            seen["elsewhere"][path] = [error.status_code, error.body["message"]]
    async with AsyncClient(headers={"Authorization": f"bearer {client.api_key}"}) as plain:
        seen["key"] = (await plain.get(f"{client.base_url}models")).status_code
    with open("stopped.json", "w") as file:
        json.dump(seen, file)
    return 1.0


async def tries(row: dict, client: AsyncOpenAI, model: str) -> dict:
    """What is refused, and what is the same question; all it saw goes into a file."""
    create, seen = client.chat.completions.create, {}

    async def refused(name: str, **given: object) -> None:
        try:
            await create(**{"model": model, "messages": begin(row)} | given)
        except APIStatusError as error:
            seen[name] = [error.status_code, error.body["message"]]

    seen["models"] = [one.id for one in (await client.models.list()).data]
    wrong = client.with_options(api_key="no")
    try:
        await wrong.models.list()
    except APIStatusError as error:
        seen["key"] = [error.status_code, error.body["message"]]
    for name, given in row["refused"].items():
        await refused(name, **given)
    both = await asyncio.gather(*(create(model=model, messages=begin(row)) for _ in range(2)))
    again = await create(model=model, messages=begin(row), temperature=0.5)
    seen["same"] = len({answer.model_dump_json() for answer in [*both, again]})
    said = both[0].choices[0].message
    await refused("rewritten", messages=[begin(row)[0], {"role": "user", "content": "else"}, said])
    await refused("shorter", messages=begin(row)[:1])
    await refused("changed", messages=[*begin(row), {"role": "assistant", "content": "no"}, USER])
    await refused("own", messages=[*begin(row), said, {"role": "system", "content": "!"}, USER])
    await refused("tools", messages=[*begin(row), said, USER], tools=[LOOK])
    await refused("alike", messages=[*begin(row), said, USER])  # it is taken, and drawn
    extras = {"return_token_ids": True}
    messages = [*begin(row), said, USER, {"role": "assistant", "content": "(again)  "}, USER]
    stream = await create(model=model, messages=messages, stream=True, max_tokens=3, logprobs=True)
    chunks = [chunk async for chunk in stream]
    seen["stream"] = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    seen["finish"] = [chunk.choices[0].finish_reason for chunk in chunks]
    seen["logprobs"] = [one.token for one in chunks[0].choices[0].logprobs.content]
    messages += [{"role": "assistant", "content": seen["stream"][0]}, USER]
    last = await create(model=model, messages=messages, extra_body=extras)
    seen["ids"] = [last.prompt_token_ids, last.choices[0].token_ids]
    seen["usage"] = last.usage.model_dump()
    with open("seen.json", "w") as file:
        json.dump(seen, file)
    return {"reward": 0.5}


async def generates(row: dict, client: AsyncOpenAI, model: str) -> float:
    """In token ids, as the package renderers asks; the answers, and what was refused, go into a file."""
    url, seen, said = str(client.base_url).removesuffix("/v1/") + "/inference/v1/generate", {}, row["ids"]
    sampling = {"stop_token_ids": [1], "logprobs": 1, "skip_special_tokens": False, "temperature": 0.5}

    async def post(**given: object) -> dict:
        body = {"model": model, "token_ids": said, "sampling_params": sampling} | given
        return (await client.post(url, cast_to=Response, body=body)).json()

    async def refused(name: str, **given: object) -> None:
        try:
            await post(**given)
        except APIStatusError as error:
            seen[name] = [error.status_code, error.body["message"]]

    for name, given in row["refused"].items():
        await refused(name, **given)
    seen["answers"] = [await post(), await post(priority=1)]  # the second is the first again
    said = [*said, *seen["answers"][0]["choices"][0]["token_ids"]]
    await refused("nothing new")
    await refused("other", token_ids=[*said[:-1], said[-1] + 1, 5])
    await refused("unknown", token_ids=[*said, 1 << 20])
    said = [*said, 7, 8]
    seen["answers"].append(await post(sampling_params=sampling | {"max_tokens": 2}))
    try:
        await client.chat.completions.create(model=model, messages=[USER])
    except APIStatusError as error:
        seen["messages"] = [error.status_code, error.body["message"]]
    with open("generated.json", "w") as file:
        json.dump(seen, file)
    return 1.0


async def nemo(row: dict, client: AsyncOpenAI, model: str) -> float:
    """Sends each answer back with its token ids; and once with others."""
    seen, messages = {}, begin(row)
    create = client.chat.completions.create
    first = await create(model=model, messages=messages, extra_body={"return_token_ids": True})
    said = first.choices[0].message.model_dump(exclude_none=True)
    messages += [said, USER]
    for field in ("prompt_token_ids", "generation_token_ids", "generation_log_probs"):
        wrong = {**said, field: [*said[field][:-1], said[field][-1] + 1]}
        try:
            await create(model=model, messages=[*messages[:2], wrong, USER])
        except APIStatusError as error:
            seen[field] = error.body["message"]
    second = await create(model=model, messages=messages)
    seen["answers"] = [said, second.choices[0].message.model_dump(exclude_none=True)]
    with open("nemo.json", "w") as file:
        json.dump(seen, file)
    return 1.0


async def compacts(row: dict, client: AsyncOpenAI, model: str) -> dict:
    """Two turns; then a summary in place of them, and two turns behind it, whose token ids come back."""
    messages, extras, seen = begin(row), {"return_token_ids": True}, []

    async def turn() -> dict:
        answer = await client.chat.completions.create(model=model, messages=messages, extra_body=extras)
        seen.append([answer.prompt_token_ids, answer.choices[0].token_ids])
        said = answer.choices[0].message.model_dump(exclude_none=True)
        messages.extend((said, USER))
        return said

    await turn()
    await turn()
    messages[2:] = [{"role": "assistant", "content": "in short"}, USER]
    said = await turn()
    messages[-2] = {**said, "prompt_token_ids": said["prompt_token_ids"][1:]}
    try:
        await turn()
    except APIStatusError as error:
        refused = error.body["message"]
    messages[-2] = said
    await turn()
    with open("compacted.json", "w") as file:
        json.dump({"seen": seen, "refused": refused}, file)
    return {"reward": 1.0}


async def edits(row: dict, client: AsyncOpenAI, model: str) -> float:
    """In token ids: a second request that is not the first one's continuation, and one that is its own."""
    url, said = str(client.base_url).removesuffix("/v1/") + "/inference/v1/generate", row["ids"]

    async def drawn(ids: list[int]) -> list[int]:
        body = {"model": model, "token_ids": ids, "sampling_params": {}}
        answer = (await client.post(url, cast_to=Response, body=body)).json()
        return [*ids, *answer["choices"][0]["token_ids"]]

    await drawn(said)
    await drawn([*await drawn([*said, 9]), 8])
    return 1.0


USER = {"role": "user", "content": [{"type": "text", "text": "go on"}]}


async def run(row: dict, base_url: str, api_key: str, model: str) -> float | dict | None:
    """All of the above."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        kinds = {"looks": looks, "tries": tries, "obeys": obeys, "generates": generates, "nemo": nemo}
        kinds |= {"careless": careless, "stops": stops, "compacts": compacts, "edits": edits}
        return await kinds[row["kind"]](row, client, model)


def plain(row: dict, base_url: str, api_key: str, model: str) -> float:
    """Without a loop; a process of its own."""
    with OpenAI(base_url=base_url, api_key=api_key) as client:
        said = client.chat.completions.create(model=model, messages=begin(row)).choices[0].message.content
    while said == "hang":
        pass
    return float(len(said))


def other(row: dict, url: str) -> float:
    """No agent: it wants something else."""
    return 0.0
