"""Responses as columns in SGLang's replies: in its HTTP server, tokens and log-probs of a request become
bytes, before SGLang makes a JSON list of each token. Hooked by hooks.py, read by ../replies.py.

A request for log-probs of what it generates alone gets two texts in its `meta_info`, in base64: TOKENS, int32
each, and LOGPROBS, float32 each, as SGLang computes them, both little-endian. Its `output_ids` stay empty. An
event of a stream holds what has not been sent, any other reply holds all of it. A log-prob of a token that is
not the response's is left out, so that the columns differ in length and the reader refuses them.
"""

import base64
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

TOKENS, LOGPROBS = "laminar_tokens", "laminar_logprobs"


def wants_columns(request: Any) -> bool:
    """Not one for log-probs of its prompt, or of tokens that were not drawn."""
    return request.logprob_start_len < 0 and not request.top_logprobs_num and not request.token_ids_logprob


def collect(
    original: Callable, manager: Any, meta_info: dict, state: Any, top: int, ids: Any, text: bool, *new: Any
) -> None:
    """Around TokenizerManager.convert_logprob_style: takes what is new of a request out of a message."""
    if not wants_columns(state.obj):
        original(manager, meta_info, state, top, ids, text, *new)
        return
    message, index = new
    _forget_sent(state)
    tokens = np.array(message.output_ids[index], "<i4")
    drawn = message.output_token_logprobs_idx  # None of one that is refused before it runs
    if drawn is not None and np.array_equal(tokens, drawn[index]):
        logprobs = np.array(message.output_token_logprobs_val[index], "<f4")
        _column(state, LOGPROBS).extend(logprobs.tobytes())
    _column(state, TOKENS).extend(tokens.tobytes())
    message.output_ids[index] = array("q")
    _write(meta_info, state)


def show(original: Callable, manager: Any, meta_info: dict, state: Any, *arguments: Any) -> None:
    """Around TokenizerManager.add_logprob_to_meta_info: the same reply with columns."""
    if wants_columns(state.obj):
        _forget_sent(state)
        _write(meta_info, state)
    else:
        original(manager, meta_info, state, *arguments)


def _write(meta_info: dict, state: Any) -> None:
    if meta_info["finish_reason"] is None and not state.obj.stream:
        return  # nobody is told yet
    for name in (TOKENS, LOGPROBS):
        meta_info[name] = base64.b64encode(_column(state, name)).decode("ascii")


def _forget_sent(state: Any) -> None:
    """Of events that wait in `out_list` SGLang sends the last one's texts only (tokenizer_manager.py:1778):
    it has to hold those of all."""
    if state.obj.stream and not state.out_list:
        for name in (TOKENS, LOGPROBS):
            _column(state, name).clear()


def _column(state: Any, name: str) -> bytearray:
    """What is gathered of the request, and lives with it."""
    return state.__dict__.setdefault(name, bytearray())
