"""Chat completions as OpenAI's API has them: requests from JSON, answers as JSON or as events. Pure.

What would bend the distribution that is trained on is refused by name, and so is what we cannot give; UNUSED
is all that is taken and not looked at.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from laminar_hpc.environments.turns.conversation import Messages
from laminar_hpc.environments.turns.json_values import TOO_DEEP, json_value, too_deep

T = TypeVar("T", bound=msgspec.Struct)
MODEL = "policy"  # the only model that there is
LIMITS = ("laminar_limit", "context_length_exceeded")  # codes of refusals by limits of the run
_CHOICES = (None, "auto", "none", "required")  # the last as auto: no call is forced
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Rejected(Exception):
    """A request that is not answered; `status` and `code` as OpenAI's clients know them. They try again after
    5xx, and not after 400."""

    def __init__(self, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def body(self) -> dict:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True)
class TokenClaim:
    """What a message that comes back says of its tokens; `at`: its place. None: nothing."""

    at: int
    prompt: list[int] | None
    tokens: list[int] | None
    logprobs: list[float] | None


@dataclass(frozen=True)
class Chat:
    """One request. `messages` and `tools` as the model's template takes them; `token_fields`: the answer's
    message has NeMo's; `digest`: two requests of the same one are the same question."""

    messages: Messages
    claims: list[TokenClaim]
    tools: list[dict]
    calls: bool  # tool calls are looked for
    max_tokens: int | None
    stop: list[str]
    stop_token_ids: list[int]
    logprobs: bool
    token_ids: bool
    token_fields: bool
    stream: bool
    stream_usage: bool
    digest: bytes


@dataclass(frozen=True)
class DrawnTurn:
    """What the model has drawn. `texts`: of each token, where log-probs were asked for."""

    number: int
    created: int  # seconds since the epoch
    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    texts: Sequence[str]
    message: dict  # as OpenAI's API has it
    finish_reason: str
    cached_tokens: int

    def usage(self) -> dict:
        prompt, drawn = len(self.prompt), len(self.tokens)
        return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


# ---- requests ----------------------------------------------------------------------------------------------


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str = ""


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    prompt_token_ids: list[int] | None = None
    generation_token_ids: list[int] | None = None
    generation_log_probs: list[float] | None = None


class _ChatBody(msgspec.Struct):
    model: str
    messages: list[_Message]
    tools: list[dict] | None = None
    tool_choice: str | dict | None = None
    max_tokens: float | None = None  # some clients write 5.0
    max_completion_tokens: float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: dict | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    n: int | None = None
    response_format: dict | None = None
    modalities: list | None = None
    functions: list | None = None


# taken unless they ask for something
BENDING = (
    *("logit_bias", "min_tokens", "ignore_eos", "bad_words", "allowed_token_ids", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structural_tag"),
    *("regex", "ebnf", "json_schema", "use_beam_search", "echo", "continue_final_message"),
)
UNUSED = {
    # the run has its own sampling
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    # a provider's book-keeping and caches
    *("user", "safety_identifier", "metadata", "store", "service_tier", "request_id", "priority"),
    *("prompt_cache_key", "prompt_cache_retention", "cache_salt"),
    "prediction",  # makes the same answer faster
    "parallel_tool_calls",  # the model makes as many as it draws
}


def parse(raw: bytes) -> Chat:
    """Raises Rejected."""
    body = read(raw, _ChatBody)
    _check(body)
    messages, claims = _messages(body.messages), _claims(body.messages)
    tools = [_tool(tool) for tool in body.tools or []]
    limits = [int(n) for n in (body.max_tokens, body.max_completion_tokens) if n is not None]
    options = msgspec.structs.replace(body, stream=None, stream_options=None)
    return Chat(
        messages,
        claims,
        tools,
        calls=bool(tools) and body.tool_choice != "none",
        max_tokens=min(limits, default=None),
        stop=stops(body.stop),
        stop_token_ids=body.stop_token_ids or [],
        logprobs=bool(body.logprobs),
        token_ids=bool(body.return_token_ids),
        token_fields=bool(body.return_token_ids or body.return_tokens_as_token_ids or claims),
        stream=bool(body.stream),
        stream_usage=bool((body.stream_options or {}).get("include_usage")),
        digest=hashlib.sha256(msgspec.json.encode(options, order="sorted")).digest(),
    )


def read(raw: bytes, kind: type[T], unused: Collection[str] = UNUSED) -> T:
    """The body of a request; null is absent. Raises Rejected, also for a field neither known nor `unused`."""
    try:
        given = msgspec.json.decode(raw)
        body = msgspec.convert(given, kind)
    except (ValueError, RecursionError) as error:  # the former: also bytes that are no UTF-8
        raise Rejected(f"the request cannot be read: {error}") from None
    for name, value in given.items():
        if name in BENDING and value:
            raise Rejected(f"{name}: the policy is drawn from as it is; leave it out")
        if value is not None and name not in (*kind.__struct_fields__, *unused, *BENDING):
            raise Rejected(f"{name!r:.60}: there is no such field here; leave it out")
    return body


def stops(given: str | list[str] | None) -> list[str]:
    """Raises Rejected."""
    found = [given] if isinstance(given, str) else given or []
    if "" in found:
        raise Rejected("stop: an empty text stands everywhere; leave it out")
    return found


def _check(body: _ChatBody) -> None:
    text = {"type": "text"}
    refuse(
        *common_rules(body.model, body.n, body.max_tokens, body.max_completion_tokens),
        (bool(body.functions), "functions: write them as tools"),
        (bool(body.top_logprobs), "top_logprobs: there are those of the drawn tokens only; leave it out"),
        ((body.response_format or text) != text, "response_format: only text; say it in a message instead"),
        (body.modalities not in (None, ["text"]), "modalities: only text"),
        (body.tool_choice not in _CHOICES, "tool_choice: auto, none or required; the model chooses"),
        (not body.messages, "messages: at least one"),
    )


def common_rules(model: str, n: int | None, *limits: float | None) -> list[tuple[bool, str]]:
    """What requests of both kinds are refused for, as `refuse` takes it."""
    return [
        (model != MODEL, f"there is no model {model[:80]!r} here; it is called {MODEL!r}"),
        (n not in (None, 1), "n: one answer at a time; leave it out"),
        (any(x is not None and (x < 1 or x % 1) for x in limits), "max_tokens: a whole number, at least 1"),
    ]


def refuse(*rules: tuple[bool, str]) -> None:
    """Raises Rejected with the reason of the first rule that is broken."""
    for broken, why in rules:
        if broken:
            raise Rejected(why)


def _messages(given: list[_Message]) -> Messages:
    found: Messages = []
    names: dict[str, str] = {}  # of the tools that were called, by the call's id
    for at, message in enumerate(given):
        role = _ROLES.get(message.role)
        if role is None:
            raise Rejected(f"messages[{at}]: no role {message.role[:40]!r}; there is: {', '.join(_ROLES)}")
        one: dict = {"role": role, "content": _text(message.content, at)}
        if role == "assistant" and message.tool_calls:
            one["tool_calls"] = [_call(call, at) for call in message.tool_calls]
            names |= {call.id: call.function.name for call in message.tool_calls}
        if role == "tool":
            one["tool_call_id"] = message.tool_call_id or ""
            one["name"] = message.name or names.get(one["tool_call_id"], "")
        found.append(one)
    if found[-1]["role"] == "assistant":
        raise Rejected("messages: the last one is the assistant's; an answer is never begun by others")
    return found


def _claims(given: list[_Message]) -> list[TokenClaim]:
    found = []
    for at, message in enumerate(given):
        fields = message.prompt_token_ids, message.generation_token_ids, message.generation_log_probs
        if message.role == "assistant" and any(field is not None for field in fields):
            found.append(TokenClaim(at, *fields))
    return found


def _text(content: str | list[dict] | None, at: int) -> str:
    if isinstance(content, list):
        kinds = ("text", "refusal")  # of parts, each in the field of its name
        parts = [part.get(part["type"]) if part.get("type") in kinds else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise Rejected(f"messages[{at}]: text only")
        return "".join(part or "" for part in parts)
    return content or ""


def _call(call: _Call, at: int) -> dict:
    try:
        given = call.function.arguments or "{}"
        arguments = json_value(given if isinstance(given, str) else json.dumps(given))
    except (ValueError, RecursionError) as error:
        raise Rejected(f"messages[{at}]: the arguments of {call.function.name[:80]} are {error}") from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool(tool: dict) -> dict:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise Rejected("tools: each is {'type': 'function', 'function': {...}}")
    if too_deep(function):
        raise Rejected(f"tools: {TOO_DEEP}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not name or not isinstance(parameters, dict | None):
        raise Rejected("tools: each function has a name, and parameters as a JSON schema")
    return {"type": "function", "function": {key: v for key, v in function.items() if key != "strict"}}


# ---- answers -----------------------------------------------------------------------------------------------


def completion(turn: DrawnTurn, chat: Chat) -> dict:
    """The answer, with the extras that were asked for."""
    choice: dict = {"index": 0, "message": turn.message, "finish_reason": turn.finish_reason}
    choice["logprobs"] = _logprobs(turn) if chat.logprobs else None
    usage = turn.usage() | {"prompt_tokens_details": {"cached_tokens": turn.cached_tokens}}
    named = {"id": f"chatcmpl-{turn.number}", "object": "chat.completion", "created": turn.created}
    body = named | {"model": MODEL, "choices": [choice], "usage": usage}
    if chat.token_ids:
        choice["token_ids"] = list(turn.tokens)
        body["prompt_token_ids"] = list(turn.prompt)
    return body


def _logprobs(turn: DrawnTurn) -> dict:
    both = zip(turn.texts, turn.logprobs, strict=True)
    return {
        "content": [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in both
        ],
        "refusal": None,
    }


def events(body: dict, usage: bool) -> Iterator[bytes]:
    """The answer as server-sent events, the whole text in the first of them."""
    choice, message = body["choices"][0], body["choices"][0]["message"]
    calls = [{"index": at, **call} for at, call in enumerate(message.get("tool_calls") or [])]
    delta = {"role": "assistant", "content": message["content"]} | ({"tool_calls": calls} if calls else {})
    first = {key: v for key, v in choice.items() if key != "message"}
    first |= {"delta": delta, "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"], "logprobs": None}
    common = {k: v for k, v in body.items() if k not in ("choices", "usage")}
    common["object"] = "chat.completion.chunk"
    chunks = [common | {"choices": [first]}, common | {"choices": [last]}]
    chunks += [common | {"choices": [], "usage": body["usage"]}] if usage else []
    for chunk in chunks:
        yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"


def models(max_tokens: int) -> dict:
    """The list of the one model; `max_tokens` of a whole conversation."""
    one = {"id": MODEL, "object": "model", "created": 0, "owned_by": "laminar_hpc"}
    return {"object": "list", "data": [one | {"max_model_len": max_tokens}]}
