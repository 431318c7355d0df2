"""Several adapters live in one real engine: each request is drawn by the one that it names, as if that were
merged into the weights; what is not there, or does not fit, or does not act, is one line."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from helpers.engines.adapters import (
    ALPHA,
    ATTENTION,
    RANK,
    Tensors,
    adapter_of,
    fill_adapter_slot,
    manifest_sums,
    merged,
    slot_writer,
)
from helpers.engines.pair import EOS, engine_config, file_sums, hf_logprobs, make_model, reference
from helpers.engines.prompts import PROMPTS, Ended, before_its_end, judged, until_decoding
from helpers.processes import LoopThread
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.engine.interface import BASE, Generation, RequestFailed, sampling_parameters
from laminar_hpc.engine.kv.errors import KvRefused
from laminar_hpc.engine.sglang import adapter_calls
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.rollout import weight_loader
from laminar_hpc.rollout.adapter_loader import AdapterLoader, AdapterLost
from laminar_hpc.rollout.engine_lives import EngineLives
from laminar_hpc.weights.probe import probe_sequences
from laminar_hpc.weights.slots import SlotReader


class Stand:
    """An engine with adapters on a tiny model, places for five, and their slots. Weight id i is the adapter
    of seed i."""

    def __init__(self, folder: Path, tensor_parallel: int, speculation: str) -> None:
        self.folder, self.loop = folder, LoopThread()
        self.model = make_model(folder / "model", 0)
        self.config = engine_config(self.model)
        self.config.model.lora.rank, self.config.model.lora.alpha = RANK, ALPHA
        self.config.rollout.tensor_parallel = tensor_parallel
        self.config.rollout.speculation = speculation
        self.writer = slot_writer(folder, self.model, 5)
        self.engine = SglangServer(self.config, 0, folder)
        self.loop.run(self.engine.start(self.model, None, 1), seconds=250)
        self.names = 0

    def sampling(self, temperature: float = 1.0, length: int = 24) -> dict:
        return sampling_parameters(self.config.sampling, temperature, length, [EOS])

    async def load(self, weight_id: int, tensors: Tensors | None = None) -> None:
        """From a slot, verified."""
        directory, manifest = fill_adapter_slot(
            self.writer, tensors or adapter_of(self.model, weight_id), weight_id
        )
        assert await self.engine.load_adapter(directory, weight_id) == manifest_sums(manifest)

    async def drawn(self, prompt: list[int], weight_id: int, sampling: dict | None = None) -> Generation:
        self.names += 1
        parameters = sampling or self.sampling()
        return await self.engine.generate(prompt, parameters, f"r{self.names}", str(weight_id))

    def stop(self) -> None:
        self.loop.run(self.engine.stop())
        self.loop.close()
        self.writer.close()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, "off"), id="1"),
        pytest.param((2, "off"), id="2", marks=pytest.mark.slow),
        pytest.param((1, "suffix"), id="speculating", marks=pytest.mark.slow),
    ],
)
def stand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    stand = Stand(tmp_path_factory.mktemp("adapters"), *request.param)
    yield stand
    stand.stop()


@pytest.fixture(autouse=True)
def empty(stand: Stand) -> Iterator[None]:
    """Each test begins without adapters."""
    yield
    for weight_id in list(stand.engine.adapters or ()):
        stand.loop.run(stand.engine.unload_adapter(weight_id))


def test_adapters_in_one_batch_are_merged_weights(stand: Stand, tmp_path: Path) -> None:
    """Promise: log-probs are those of transformers on W + alpha / rank B A, for three adapters in one batch;
    each answer names its own, and the model's own parameters are as they were."""
    ids = [(5, 6, 7)[i % 3] for i in range(len(PROMPTS))]

    async def run() -> list[Generation]:
        for weight_id in (5, 6, 7):
            await stand.load(weight_id)
        return await asyncio.gather(*(stand.drawn(p, i) for p, i in zip(PROMPTS, ids, strict=True)))

    answers = stand.loop.run(run())
    models = {
        i: reference(merged(stand.model, adapter_of(stand.model, i), tmp_path / str(i))) for i in set(ids)
    }
    for prompt, weight_id, answer in zip(PROMPTS, ids, answers, strict=True):
        expected = hf_logprobs(models[weight_id], prompt, answer.tokens)
        torch.testing.assert_close(torch.tensor(answer.logprobs), expected, atol=1e-5, rtol=0)
        assert judged(answer, weight_id) is None
    assert stand.loop.run(stand.engine.sums()) == file_sums(stand.model)
    plain = stand.loop.run(stand.engine.score([PROMPTS[5]], BASE))[0]
    expected = hf_logprobs(reference(stand.model), PROMPTS[5][:1], PROMPTS[5][1:])
    torch.testing.assert_close(torch.tensor(plain), expected, atol=1e-5, rtol=0)


def test_an_adapter_of_some_layers_leaves_the_others(stand: Stand) -> None:
    """Promise: an adapter that does not fit the run's targets is refused by name, and nothing is served."""

    async def run() -> None:
        with pytest.raises(LaminarError, match=r"weight id 8 and the engine differ in .*down_proj"):
            await stand.load(8, adapter_of(stand.model, 8, ATTENTION))
        with pytest.raises(RequestFailed, match="no adapter of weight id '8'; loaded: none"):
            await stand.drawn(PROMPTS[0], 8)

    stand.loop.run(run())


def test_what_is_not_loaded_is_refused_and_others_go_on(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: a request of an id that is not there fails, never on the base; one that draws is not unloaded;
    an id is loaded once; there are as many places as may be needed, and an unloaded one is free."""
    long = stand.sampling(length=200) | {"ignore_eos": True, "stop_token_ids": []}

    async def kept(number: int) -> Generation:
        name = f"long-{number}"
        call = asyncio.ensure_future(stand.engine.generate(PROMPTS[1], long, name, "1"))
        await until_decoding(stand.engine, name, call)
        try:
            with pytest.raises(LaminarError, match="weight id 1 stays: 1 requests of it run"):
                await stand.engine.unload_adapter(1)
        except pytest.fail.Exception:
            await call
            await stand.load(1)
            raise Ended from None
        return await call

    async def run() -> None:
        for weight_id in range(1, 6):
            await stand.load(weight_id)
        with pytest.raises(LaminarError, match="no place for the adapter of weight id 6: 1, 2, 3, 4, 5 are"):
            await stand.load(6)
        with pytest.raises(LaminarError, match="weight id 5 is loaded already"):
            await stand.load(5)
        with pytest.raises(RequestFailed, match="no adapter of weight id '9'; loaded: 1, 2, 3, 4, 5"):
            await stand.drawn(PROMPTS[0], 9)
        monkeypatch.setattr(adapter_calls, "UNLOAD_SECONDS", 0.0)
        assert judged(await before_its_end(kept), 1) is None
        monkeypatch.undo()
        await stand.engine.unload_adapter(1)
        await stand.load(6)
        with pytest.raises(RequestFailed, match="no adapter of weight id '1'; loaded: 2, 3, 4, 5, 6"):
            await stand.drawn(PROMPTS[0], 1)
        assert judged(await stand.drawn(PROMPTS[0], 6), 6) is None

    stand.loop.run(run())


def test_an_aborted_answer_names_its_adapter(stand: Stand) -> None:
    """Promise: what an abort leaves is of one policy by the engine's report, also of a request that waits."""
    long = stand.sampling(length=1000) | {"ignore_eos": True, "stop_token_ids": []}

    async def run() -> Generation:
        await stand.load(3)
        call = asyncio.ensure_future(stand.engine.generate(PROMPTS[2], long, "aborted", "3"))
        await asyncio.sleep(0.05)
        while not call.done():
            await stand.engine.abort("aborted")
            await asyncio.sleep(0.02)
        return await call

    answer = stand.loop.run(run())
    assert {span.weight_id for span in answer.spans} == {3}


def test_cache_and_moves_are_of_one_adapter(stand: Stand) -> None:
    """Promise: an adapter hits no KV of another; KV moves under its id, and a destination without the id
    refuses by name."""
    prompt, room = [3 * i % 250 for i in range(64)], stand.config.rollout.kv_cache_tokens
    one = stand.sampling(0.0, 8)

    async def run() -> None:
        engine = stand.engine
        await stand.load(1)
        await stand.load(2)
        first = await stand.drawn(prompt, 1, one)
        assert (await stand.drawn(prompt, 2, one)).cached_tokens == 0
        assert (await stand.drawn(prompt, 1, one)).cached_tokens >= len(prompt) - 1
        with pytest.raises(KvRefused, match="it is of weight id 4, this engine serves 1, 2"):
            await engine.kv_reserve("wrong", 4, len(prompt))
        address = await engine.kv_reserve("in", 1, len(prompt))
        sent = await engine.kv_send_kept("out", prompt, "1", address)
        await engine.kv_commit("out")
        await engine.kv_reserve("all", 1, room - len(prompt))  # nothing else stays in the cache
        await engine.kv_abort("all")
        assert await engine.kv_import("in", prompt) == sent == len(prompt)
        again = await stand.drawn([*prompt, *first.tokens[:1].tolist()], 1, one)
        assert again.cached_tokens == len(prompt) and again.tokens[:-1].tolist() == first.tokens[1:].tolist()
        assert (await stand.drawn(prompt, 2, one)).cached_tokens == 0
        await engine.kv_commit("in")

    stand.loop.run(run())


def loader_of(stand: Stand, folder: Path) -> AdapterLoader:
    lives = EngineLives(lambda: stand.engine, lambda: 1)
    reader = SlotReader(str(stand.folder), "adapters")
    return AdapterLoader(reader, probe_sequences(500), Trace(folder, "rollout", 0), lives, stand.config)


def test_a_pull_serves_the_newest_and_lets_the_older_go(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: a drained replica serves one adapter, verified by its live sums; one bit that differs from the
    manifest is found and named; an adapter that begins at zero acts as none and is no error."""
    monkeypatch.setattr(weight_loader, "TRIES", 0)
    loader = loader_of(stand, tmp_path)
    new = {n: t if ".lora_A." in n else t.zero_() for n, t in adapter_of(stand.model, 20).items()}

    async def run() -> None:
        fill_adapter_slot(stand.writer, new, 20)
        first = await loader.pull()
        assert first.weight_id == 20 and stand.engine.adapters == [20]
        plain = await stand.engine.score(loader.probe, BASE)
        assert first.probe_logprobs == [value for values in plain for value in values]
        fill_adapter_slot(stand.writer, adapter_of(stand.model, 21), 21)
        second = await loader.pull()
        assert second.weight_id == 21 and stand.engine.adapters == [21] and loader.loaded == {21}
        assert second.probe_logprobs != first.probe_logprobs
        directory, _ = fill_adapter_slot(stand.writer, adapter_of(stand.model, 22), 22)
        with open(directory / "adapter_model.safetensors", "r+b") as file:
            file.seek(-3, 2)
            file.write(b"\x07")
        with pytest.raises(LaminarError, match="weight id 22: 1 of 28 tensors in the engine differ"):
            await loader.pull()

    stand.loop.run(run())


def test_an_adapter_that_does_not_act_ends_the_run(
    stand: Stand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: an engine that holds the adapter and draws from the model without it is found at the load."""
    loader = loader_of(stand, tmp_path)
    fill_adapter_slot(stand.writer, adapter_of(stand.model, 30), 30)
    monkeypatch.setattr(stand.engine, "naming", lambda namespace: {"extra_key": namespace})
    with pytest.raises(AdapterLost, match=r"the adapter of weight id 30 bit for bit.*does not act"):
        stand.loop.run(loader.pull())


@pytest.mark.slow
def test_loads_stand_nobody_still(stand: Stand) -> None:
    """Promise: requests go on while others' adapters come and go, and are drawn by their own."""
    sampling = stand.sampling(length=200) | {"ignore_eos": True, "stop_token_ids": []}

    async def run() -> None:
        await stand.load(1)
        until, answers = time.monotonic() + 5, []
        calls = [asyncio.ensure_future(stand.drawn(p, 1, sampling)) for p in PROMPTS]
        number = 2
        while time.monotonic() < until or not all(call.done() for call in calls):
            await stand.load(number)
            answers.append(await stand.drawn(PROMPTS[0], number))
            assert judged(answers[-1], number) is None
            await stand.engine.unload_adapter(number)
            number += 1
        assert [judged(await call, 1) for call in calls] == [None] * len(calls)

    stand.loop.run(run())
