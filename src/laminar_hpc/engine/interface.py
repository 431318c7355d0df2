"""What the rollout role needs of an engine. `Engine` is implemented by sglang/server.py and
emulated/engine.py, and chosen in factory.py; no role names an implementation.

All methods run in the rollout worker's event loop. Every wait is bounded. A dead engine raises EngineDied.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias, TypedDict

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import SamplingConfig
from laminar_hpc.line.messages.data import VersionSpan
from laminar_hpc.store.payload.layout import Logprobs, Tokens

Sums = dict[
    str, tuple[int, int]
]  # Hugging Face name -> (sum_words, sum_indexed), see weights/kernels/sums.py
Prompt: TypeAlias = Sequence[int] | Tokens
OnTokens = Callable[[Tokens, Logprobs], None]  # tokens and their log-probs, as they are generated
BASE = "base"  # namespace of what is scored by the base alone, beside adapters
UNKNOWN_WEIGHTS = -1  # weight id, in a message, of a span that the engine drew on weights without an id


class EngineDied(LaminarError):
    """The engine's process has ended."""


class EngineHangs(LaminarError):
    """The engine makes no progress with its requests."""


class RequestFailed(LaminarError):
    """The engine refused or dropped this one request; it goes on with others."""


class SamplingParameters(TypedDict, total=False):
    """By SGLang's names. Log-probs are of the distribution at `temperature`, before top-k, top-p, min-p.
    `guess_from`: tokens that a speculating engine may guess from; -1 stands between two texts."""

    temperature: float
    max_new_tokens: int
    stop_token_ids: list[int]
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    ignore_eos: bool
    sampling_seed: int
    guess_from: list[int]


def sampling_parameters(
    sampling: SamplingConfig, temperature: float, max_tokens: int, stop_token_ids: list[int]
) -> SamplingParameters:
    """Those of one request for up to `max_tokens` tokens."""
    return {
        "temperature": temperature,
        "max_new_tokens": max_tokens,
        "stop_token_ids": stop_token_ids,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }


@dataclass(frozen=True, eq=False)
class Generation:
    """One response: tokens with the end-of-sequence token, the log-probs of exactly these tokens (perhaps not
    finite), and which weights drew them. Who gets the arrays must not write to them."""

    tokens: Tokens
    logprobs: Logprobs
    finish_reason: str  # stop | length | abort | moved
    spans: list[VersionSpan]  # weight_id is UNKNOWN_WEIGHTS where the engine names no weight id
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache
    routes: bytes | None = None  # of those that `generate` was asked for


@dataclass(frozen=True)
class Utilization:
    """How full the engine is: requests, and tokens of the KV cache."""

    running: int
    queued: int
    kv_tokens: int
    kv_capacity: int


@dataclass(frozen=True)
class TensorLayout:
    """A whole tensor of the engine's parameters under its Hugging Face name; `dtype` as torch names it."""

    name: str
    shape: list[int]
    dtype: str


class Engine(Protocol):
    """One life of one engine: `start`, use, `stop`; a second start needs a new object."""

    name: str  # for errors and logs
    log: Path

    # ---- life ----------------------------------------------------------------------------------------------

    async def start(self, directory: Path, weight_id: int | None, seed: int) -> float:
        """Starts on the weights in the Hugging Face directory `directory`, whose id is None until they are
        verified. Returns the seconds until it answered. Raises EngineDied or LaminarError."""

    async def stop(self) -> None:
        """Ends it at once with all that it started, whatever its state."""

    async def died(self) -> EngineDied:
        """Waits for the engine's death, without a limit; returns what to raise. `stop` is no death."""

    # ---- requests ------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_tokens: Prompt,
        sampling: SamplingParameters,
        request_id: str,
        namespace: str,
        on_tokens: OnTokens | None = None,
        routes_from: int | None = None,
    ) -> Generation:
        """One response. KV is reused inside a `namespace` only; the rollout gives its weight id, which with
        adapters is the one that draws: RequestFailed where it is not loaded, never the base. `on_tokens`
        is called every rollout.increment_tokens tokens, but not for the rest at the end. With
        `routes_from`, at most the prompt's length, it brings the routes (config/routing.py) of prompt and
        response from that token on, but of the last token, which the engine sends to no expert; each is that
        of the pass that made the token's KV. Raises RequestFailed, EngineDied."""

    async def abort(self, request_id: str | None = None) -> None:
        """Ends one request, or all of them; each returns what it has, with finish_reason "abort"."""

    async def score(self, sequences: list[list[int]], namespace: str) -> list[list[float]]:
        """Log-probs of tokens 1.. of each sequence given the prefix, at temperature 1; NaN for one that is
        not finite. With adapters `namespace` names one, as for `generate`, or is BASE. Raises RequestFailed,
        EngineDied."""

    async def decode_curve(self, max_requests: int, context: int) -> list[tuple[int, float]]:
        """(requests, seconds per decode step) for 1, 2, 4 ... `max_requests` of `context` tokens, idle."""

    async def profile(self, folder: Path) -> None:
        """Begins a profile of what the engine does next, which ends by itself after PROFILED_PASSES forward
        passes and is written to `folder`. Raises RequestFailed, EngineDied."""

    async def utilization(self) -> Utilization | None:
        """How full the engine is; None when it does not say. Never raises, never disturbs the engine."""

    # ---- weights -------------------------------------------------------------------------------------------

    async def layout(self) -> list[TensorLayout]:
        """The live parameters, each tensor whole. Raises LaminarError."""

    async def sums(self) -> Sums:
        """Checksums over the live parameters. Raises LaminarError."""

    async def load_weights(self, directory: Path, weight_id: int, paused: bool = False) -> Sums:
        """Copies the weights of a slot in place, and serves them as `weight_id` from then on; returns the
        sums of the live parameters afterwards. The caller has drained the engine, or paused it: then requests
        keep their KV. After an error the parameters may be of two ids, and the caller must stop it."""

    # With model.lora the engine starts on the base and serves no weight id; each adapter is one.

    async def load_adapter(self, directory: Path, weight_id: int) -> Sums:
        """Serves the adapter in the PEFT directory `directory` as `weight_id`, beside those that are loaded;
        requests go on meanwhile. Returns the sums of the adapter's live buffers under PEFT names, which the
        caller compares with the manifest's. Raises LaminarError, and then serves what it did before, where
        the id is loaded already, there is no place, or the adapter does not fit."""

    async def unload_adapter(self, weight_id: int) -> None:
        """Serves `weight_id` no more; its place is free. Raises LaminarError, and goes on serving it, while
        requests of it run; an id that is not loaded is no error."""

    async def pause(self) -> None:
        """All requests stand still, with their KV, until `resume`."""

    async def resume(self) -> None:
        """Paused requests go on."""

    # ---- moves of a running request's KV cache to another engine on the same weights -----------------------
    #
    #     destination                       source
    #     kv_reserve -> address
    #                                       kv_send      while the request decodes on
    #                                       kv_detach    its generate returns, finish_reason "moved"
    #                                       (kv_send_kept in place of both: of one between two requests)
    #     kv_import                                      held against eviction
    #     generate(prompt + response)
    #     kv_commit                         kv_commit    or kv_abort on both wherever it fails
    #
    # Whatever fails raises KvRefused of one line, and the trajectory goes on by re-prefill from its tokens.

    async def kv_reserve(self, move_id: str, weight_id: int, tokens: int) -> str:
        """The destination makes room for `tokens` tokens; returns the address for the source, a secret."""

    async def kv_send(self, move_id: str, request_id: str, address: str) -> None:
        """The source sends the KV of all full pages that the request has now; it decodes on."""

    async def kv_detach(self, move_id: str, request_id: str) -> int:
        """The source ends the request after its current step and sends the rest; returns the number of tokens
        whose KV is at the destination. Refused when that step was the request's last one."""

    async def kv_send_kept(self, move_id: str, tokens: list[int], namespace: str, address: str) -> int:
        """The source sends the KV of the longest prefix of `tokens` that its prefix cache has, and keeps it
        until the move is over; returns that prefix's length. Nothing of it need be running."""

    async def kv_import(self, move_id: str, tokens: list[int], routes: bytes = b"") -> int:
        """The destination takes the KV of a prefix of `tokens` into its cache; returns its length. `routes`:
        of these tokens, packed one after the other; an engine that returns routes refuses KV without."""

    async def kv_commit(self, move_id: str) -> None:
        """Releases what is held for the move; its KV stays in the prefix cache until the room is needed."""

    async def kv_abort(self, move_id: str) -> None:
        """Calls the move off and gives back what is reserved. An unknown move is no error."""


PROFILED_PASSES = 100
EngineFactory = Callable[[], Engine]
