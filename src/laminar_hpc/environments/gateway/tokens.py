"""Token ids in requests and answers. Pure.

Token in, token out: `POST /inference/v1/generate`, as vLLM has it and as the package `renderers` asks for it.
A prompt is the whole conversation so far, exactly, and what is new. Sampling is the run's, as in chat.py.

NeMo's fields of messages: an answer says which tokens were drawn and before which prompt; one that comes back
with them is compared with what was drawn.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from laminar_hpc.environments.gateway.chat import (
    UNUSED,
    DrawnTurn,
    Rejected,
    TokenClaim,
    common_rules,
    read,
    refuse,
    stops,
)


@dataclass(frozen=True)
class TokenPrompt:
    """One request to generate. `digest`: two of the same one are the same question."""

    token_ids: list[int]
    max_tokens: int | None
    stop: list[str]
    stop_token_ids: list[int]
    digest: bytes


class _Sampling(msgspec.Struct):
    max_tokens: float | None = None
    n: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None


class _PromptBody(msgspec.Struct):
    model: str
    token_ids: list[int]
    sampling_params: dict = msgspec.field(default_factory=dict)
    return_token_ids: bool | None = None  # the answer always has them
    stream: bool | None = None
    features: dict | None = None
    content_parts: list | None = None


# how a text would be made of the answer, which has none
_UNUSED = {*UNUSED, "skip_special_tokens", "spaces_between_special_tokens", "detokenize"}


def parse_prompt(raw: bytes) -> TokenPrompt:
    """Raises Rejected."""
    body = read(raw, _PromptBody)
    sampling = read(msgspec.json.encode(body.sampling_params), _Sampling, _UNUSED)
    limit = sampling.max_tokens
    refuse(
        *common_rules(body.model, sampling.n, limit),
        (bool(body.features or body.content_parts), "features, content_parts: token ids of text only"),
        (bool(body.stream), "stream: the answer comes whole; leave it out"),
        (sampling.logprobs not in (None, 0, 1), "logprobs: there are those of the drawn tokens only; say 1"),
        (sampling.prompt_logprobs is not None, "prompt_logprobs: there are none; leave it out"),
        (not body.token_ids, "token_ids: at least one"),
    )
    ends = stops(sampling.stop), sampling.stop_token_ids or []
    most = None if limit is None else int(limit)
    digest = hashlib.sha256(b"tokens" + msgspec.json.encode([body.token_ids, most, *ends])).digest()
    return TokenPrompt(body.token_ids, most, *ends, digest)


def continued(prompt: TokenPrompt, said: Sequence[int], begun: bool, vocabulary: int) -> list[int]:
    """The tokens of `prompt` behind `said`, all that was given and drawn before. `begun`: there was a turn.
    Raises Rejected where it does not begin with them."""
    tokens = prompt.token_ids
    at = next((i for i, (a, b) in enumerate(zip(tokens, said, strict=False)) if a != b), None)
    if at is not None and not begun:
        raise Rejected(f"token_ids[{at}] is {tokens[at]}: conversations of this model begin with {said[at]}")
    if at is not None:
        raise Rejected(
            f"token_ids[{at}] is {tokens[at]}, where {said[at]} was given or drawn: a session only grows, "
            "unless environment.history=branch"
        )
    if len(tokens) <= len(said):
        raise Rejected(f"token_ids: {len(tokens)}, of {len(said)} that were said: a session only grows")
    return known(tokens[len(said) :], vocabulary)


def known(tokens: list[int], vocabulary: int) -> list[int]:
    """Raises Rejected for tokens that the model does not have."""
    if wrong := [token for token in tokens if not 0 <= token < vocabulary]:
        raise Rejected(f"token_ids: the model has no token {wrong[0]}")
    return tokens


def generated(turn: DrawnTurn) -> dict:
    """The answer to a TokenPrompt."""
    content: list[dict] = [
        {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
        for token, value in zip(turn.tokens, turn.logprobs, strict=True)
    ]
    choice = {
        "index": 0,
        "token_ids": list(turn.tokens),
        "finish_reason": turn.finish_reason,
        "logprobs": {"content": content},
    }
    return {"request_id": f"generate-{turn.number}", "choices": [choice], "usage": turn.usage()}


def token_fields(turn: DrawnTurn) -> dict:
    """What NeMo has on a message that was drawn."""
    return {
        "prompt_token_ids": list(turn.prompt),
        "generation_token_ids": list(turn.tokens),
        "generation_log_probs": list(turn.logprobs),
    }


def confirm(
    claim: TokenClaim, prompt: Sequence[int], drawn: Sequence[int], logprobs: Sequence[float]
) -> None:
    """Raises Rejected for an answer that comes back with other tokens than it was given with."""
    name = f"messages[{claim.at}]"
    for field, ours, theirs in (
        ("prompt_token_ids", prompt, claim.prompt),
        ("generation_token_ids", drawn, claim.tokens),
        ("generation_log_probs", logprobs, claim.logprobs),
    ):
        if theirs is not None and list(theirs) != list(ours):
            raise Rejected(f"{name}.{field}: not what was drawn; send each answer back as it was given")
