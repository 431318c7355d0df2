"""A teacher behind a URL: log-probs of given tokens from an SGLang or vLLM server, at temperature 1.

| server | asked by | log-probs in the reply |
|---|---|---|
| SGLang | `/generate`, `logprob_start_len` | `meta_info.input_token_logprobs`: [log-prob, token id, ...] |
| vLLM | `/v1/completions`, `prompt_logprobs=0` | `choices[0].prompt_logprobs`: {token id: {logprob}} |

Of the ranks that hold the same texts one asks, and all hear the answers. What fails is tried again, with
growing pauses, until teacher.timeout_seconds are over; an answer below 500 other than 408 and 429 is final.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import aiohttp
import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.rewards import shown_url
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.data.tokens import load_tokenizer
from laminar_hpc.machine.own_time import within
from laminar_hpc.machine.replies import read_bounded
from laminar_hpc.trainer.control import all_frames
from laminar_hpc.trainer.step.microbatch import Text, branches

AT_ONCE = 64  # requests in flight of one rank
FIRST_PAUSE, MAX_PAUSE = 0.2, 5.0  # seconds between tries
_MARGIN_SECONDS = 30.0  # that ranks wait longer for each other than for the server
_AGAIN = (408, 429)
_REPLY, _REPLY_PER_TOKEN = 1 << 20, 4 << 10  # bytes
_PROBE = "Let x = 12+34; then x is 46, déjà vu: π ≈ 3.14159.\n\n\tfor i in range(10): print(i)"
_Answers: TypeAlias = dict[int, bytes]  # float32, little-endian, by the text's place in the batch
_told = msgspec.msgpack.Decoder(tuple[str, _Answers])


class _Final(Exception):
    """The server will not answer otherwise."""


class TeacherServer:
    """All methods are collective over the trainer world."""

    def __init__(self, url: str, config: RunConfig) -> None:
        """Raises LaminarError where the server cannot be reached, is of neither kind, or has other tokens
        than model.path."""
        self._url = url.rstrip("/")
        self._key_name = config.teacher.api_key_env
        self._seconds = config.teacher.timeout_seconds
        self._vllm_model = ""
        self._model_path = config.model.path
        found = self._agreed(self._meet, dist.get_rank() == 0)
        self._vllm_model = next(iter(found.values()), b"").decode()

    def logprobs(self, texts: Mapping[int, Text], progress: Callable[[], None]) -> dict[int, torch.Tensor]:
        """Of this rank's texts, by place in the batch: float32 [trained tokens] each. Raises LaminarError on
        all ranks when one could not get them."""

        async def ask(session: aiohttp.ClientSession) -> _Answers:
            gate = asyncio.Semaphore(AT_ONCE)

            async def one(place: int, text: Text) -> tuple[int, bytes]:
                async with gate:
                    answer = await self._of(session, text)
                progress()
                return place, answer.astype("<f4").tobytes()

            return dict(await asyncio.gather(*(one(i, text) for i, text in texts.items())))

        told = self._agreed(ask, _asks())
        return {i: torch.from_numpy(np.frombuffer(told[i], "<f4").copy()) for i in texts}

    # ---- the ranks -----------------------------------------------------------------------------------------

    def _agreed(self, ask: Callable[[aiohttp.ClientSession], Any], asks: bool) -> _Answers:
        """What the ranks that ask have heard, on all ranks."""
        why, answers = "", _Answers()
        if asks:
            try:
                answers = asyncio.run(self._within_limit(ask))
            except LaminarError as error:
                why = str(error)
        said = msgspec.msgpack.encode((why, answers))
        seconds = self._seconds + _MARGIN_SECONDS
        told = [_told.decode(frame) for frame in all_frames(said, seconds, f"the answers of {self._shown}")]
        if why := next((why for why, _ in told if why), ""):
            raise LaminarError(why)
        return {place: answer for _, of_rank in told for place, answer in of_rank.items()}

    async def _within_limit(self, ask: Callable[[aiohttp.ClientSession], Any]) -> _Answers:
        self._last_fault = "no reply"
        timeout, connector = aiohttp.ClientTimeout(), aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            try:
                async with within(self._seconds):
                    found: _Answers = await ask(session)
                    return found
            except TimeoutError:
                raise LaminarError(
                    f"the teacher {self._shown} has not answered within {self._seconds:g} s "
                    f"({self._last_fault}): look at its log, or raise teacher.timeout_seconds"
                ) from None
            except _Final as error:
                raise LaminarError(f"the teacher {self._shown}: {error}") from None

    @property
    def _shown(self) -> str:
        return shown_url(self._url)

    # ---- the server ----------------------------------------------------------------------------------------

    async def _meet(self, session: aiohttp.ClientSession) -> _Answers:
        """Finds out which kind it is; the answer is vLLM's name of its model, empty for SGLang."""
        served = (await self._call(session, "/v1/models", None)).get("data") or [{}]
        name = str(served[0].get("id", ""))
        tokens = (await self._call(session, "/tokenize", self._tokenizing(name))).get("tokens")
        own = load_tokenizer(self._model_path).encode(_PROBE, add_special_tokens=False).ids
        if tokens != own:
            raise _Final(
                "it reads a text as other tokens than model.path; a teacher needs the same tokenizer"
            )
        is_vllm = str(served[0].get("owned_by", "")) == "vllm"
        return {0: name.encode() if is_vllm else b""}

    @staticmethod
    def _tokenizing(name: str) -> dict[str, Any]:
        return {"model": name, "prompt": _PROBE, "add_special_tokens": False}

    async def _of(self, session: aiohttp.ClientSession, text: Text) -> np.ndarray:
        """Log-probs of the trained tokens [trained]."""
        parts = [await self._of_sequence(session, ids.tolist(), drawn) for ids, drawn in branches(text)]
        return np.concatenate(parts)

    async def _of_sequence(
        self, session: aiohttp.ClientSession, ids: list[int], wanted: NDArray[np.int64]
    ) -> np.ndarray:
        if not len(wanted):
            return np.zeros(0, np.float32)
        start = int(wanted[0])
        if self._vllm_model:
            body = {"model": self._vllm_model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
            reply = await self._call(session, "/v1/completions", {**body, "temperature": 0}, len(ids))
            entries = reply["choices"][0]["prompt_logprobs"][start:]
        else:
            body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": start - 1}
            sampling = {"max_new_tokens": 1, "temperature": 0}
            reply = await self._call(session, "/generate", {**body, "sampling_params": sampling}, len(ids))
            entries = reply["meta_info"]["input_token_logprobs"][1:]
        read = _of_vllm if self._vllm_model else _of_sglang
        found = [read(entry, token) for entry, token in zip(entries, ids[start:], strict=True)]
        values = np.array(found, np.float32)[wanted - start]
        if np.isnan(values).any():
            raise _Final("it gave a log-prob that is not a number")
        return values

    async def _call(
        self, session: aiohttp.ClientSession, path: str, body: dict | None, tokens: int = 0
    ) -> Any:
        """The JSON of a reply with status 200, asked for again until there is one."""
        pause, most = FIRST_PAUSE, _REPLY + _REPLY_PER_TOKEN * tokens
        headers = {"Content-Type": "application/json"}
        if self._key_name:
            headers["Authorization"] = f"Bearer {os.environ.get(self._key_name, '')}"
        data = None if body is None else msgspec.json.encode(body)
        while True:
            try:
                method = "GET" if body is None else "POST"
                async with session.request(
                    method, self._url + path, data=data, headers=headers, allow_redirects=False
                ) as reply:
                    text = await read_bounded(reply.content, most)
                    if len(text) > most:
                        raise _Final(f"it sent more than {most:,} bytes")
                    if reply.status == 200:
                        return msgspec.json.decode(text)
                    self._last_fault = f"{path} gave HTTP {reply.status}"
                    if reply.status < 500 and reply.status not in _AGAIN:
                        said = " ".join(text[:200].decode("utf-8", "replace").split())
                        raise _Final(f"{self._last_fault}: {said}; name an SGLang or vLLM server")
            except msgspec.DecodeError:
                raise _Final(f"{path} gave no JSON; name an SGLang or vLLM server") from None
            except (aiohttp.ClientError, OSError) as error:
                self._last_fault = str(error) or type(error).__name__
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)


def _asks() -> bool:
    """One rank of those that hold the same texts: they differ between data-parallel ranks alone."""
    return (
        parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0
        and parallel_state.is_pipeline_last_stage()
    )


def _of_sglang(entry: Any, token: int) -> float:
    if entry[1] != token:
        raise _Final(f"it gave the log-prob of token {entry[1]} for token {token}")
    return float("nan") if entry[0] is None else float(entry[0])


def _of_vllm(entry: Any, token: int) -> float:
    found = (entry or {}).get(str(token))
    if found is None:
        raise _Final(f"it gave no log-prob of token {token}")
    return float(found["logprob"])
