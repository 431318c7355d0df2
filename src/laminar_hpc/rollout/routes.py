"""Routes of a response so far (config/routing.py): which the engine is asked for, and what becomes of them.

`Partial.routes` has one row for each token of prompt and response from the first on. Each row is that of the
pass after which the next token was drawn, so that the log-prob of each drawn token stands beside the route
that it was computed with. The engine is asked for the rows that are not known yet: what is prefilled again,
after a move without its KV cache or on newer weights, keeps the routes under which it was drawn.

                     prompt            response so far
    tokens      p0 p1 p2 ... pn   r0 r1 ... rk-1  rk
    rows        known: all of these             | the next request begins here

A response whose drawn tokens have no rows begins again from its prompt: an engine that dies takes the rows of
its requests along. Rows are never guessed.
"""

import msgspec
import numpy as np

from laminar_hpc.config.routing import RouteShape
from laminar_hpc.engine.interface import Generation
from laminar_hpc.line.messages.data import Partial
from laminar_hpc.store.payload.layout import DamagedResponse, Routes


def asked_from(partial: Partial, prompt: int, start: int, shape: RouteShape) -> tuple[Partial, int]:
    """The response with rows up to its present branch, which begins with its token `start` (0: with the
    prompt), and the first token of the branch whose row is not known. `prompt`: tokens of the prompt."""
    first = prompt + start if start else 0
    filled = _filled(partial, first, shape)
    return filled, len(filled.routes) // shape.token_bytes - first


def with_routes(partial: Partial, prompt: int, generation: Generation, shape: RouteShape) -> Partial:
    """`partial`, which has the tokens of `generation`, with their rows. Raises DamagedResponse where the
    engine has not given one for each token that it was asked for."""
    if not len(generation.tokens):
        return partial
    due = prompt + partial.count - 1 - len(partial.routes) // shape.token_bytes
    came = len(generation.routes or b"") / shape.token_bytes
    if generation.routes is None or came != due:
        raise DamagedResponse(f"the engine gave the routes of {came:g} tokens, and {due} are due")
    if why := unwritten(as_rows(generation.routes, shape), shape):
        raise DamagedResponse(f"the engine gave a route that is none: {why}")
    return msgspec.structs.replace(partial, routes=partial.routes + generation.routes)


def whole_routes(partial: Partial, prompt: int, shape: RouteShape) -> Routes:
    """[tokens of prompt and response - 1, layers, experts per token] of a response that has ended."""
    return as_rows(_filled(partial, prompt + partial.count - 1, shape).routes, shape)


def cut_routes(partial: Partial, prompt: int, shape: RouteShape) -> Partial:
    """Without the rows of tokens that were cut off."""
    end = max(0, prompt + partial.count - 1) * shape.token_bytes
    return msgspec.structs.replace(partial, routes=partial.routes[:end])


def taken_up(partial: Partial, prompt: int, shape: RouteShape) -> Partial:
    """What can be gone on with of a response that comes from elsewhere: all of it, or nothing."""
    drawn = partial.spans[-1].end if partial.spans else 0
    if not drawn or len(partial.routes) >= (prompt + drawn - 1) * shape.token_bytes:
        return partial
    return Partial(moves=partial.moves)


def as_rows(routes: bytes, shape: RouteShape) -> Routes:
    """A read-only view [tokens, layers, experts per token]."""
    found = np.frombuffer(routes, np.dtype(shape.dtype).newbyteorder("<"))
    return found.reshape(-1, len(shape.layers), shape.per_token)


def unwritten(rows: Routes, shape: RouteShape) -> str:
    """Why some row is none, "" where all may be: an expert that is not there, or one of memory that nobody
    has written, which has the same expert everywhere."""
    if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < shape.experts:
        return f"its numbers are not all below the model's {shape.experts} experts"
    if shape.per_token > 1 and len(twice := np.argwhere(rows[..., 0] == rows[..., 1])):
        token, layer = map(int, twice[0])
        return f"token {token} has the same expert twice in layer {shape.layers[layer]}"
    return ""


def _filled(partial: Partial, count: int, shape: RouteShape) -> Partial:
    """With at least `count` rows. Those that no engine was asked for are of tokens behind the last one drawn
    in their branch, so that nothing that is trained depends on them: they get the first experts."""
    missing = count - len(partial.routes) // shape.token_bytes
    if missing <= 0:
        return partial
    first = np.arange(shape.per_token, dtype=np.dtype(shape.dtype).newbyteorder("<"))
    more = np.tile(first, missing * len(shape.layers)).tobytes()
    return msgspec.structs.replace(partial, routes=partial.routes + more)
