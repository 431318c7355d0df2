"""Weights that must not be served: a real engine and its weight loader refuse them in one line, and name the
tensor."""

import math
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from helpers.engines.pair import Pair, fill_slot, make_model
from helpers.engines.prompts import PROMPTS, generate_all, judged, paused, sampling
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.models import WEIGHTS_FILE
from laminar_hpc.engine.sglang.plugin import protocol
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.machine.observability.trace import Trace
from laminar_hpc.rollout import weight_loader
from laminar_hpc.rollout.engine_lives import EngineLives
from laminar_hpc.rollout.weight_loader import EngineOverflows, EngineSumsDiffer, SlotRefused, WeightLoader
from laminar_hpc.weights.probe import probe_sequences
from laminar_hpc.weights.slots import SlotReader, SlotWriter


def new_loader(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WeightLoader:
    """A weight_loader on the second engine that takes the first mismatch for an error, so that this engine
    lives on."""
    monkeypatch.setattr(weight_loader, "TRIES", 0)
    made = WeightLoader(
        SlotReader(str(tmp_path), "run"),
        probe_sequences(500),
        Trace(tmp_path, "rollout", 1),
        EngineLives(lambda: pair.engines[1], lambda: 1),
    )
    return made


def test_a_flipped_bit_is_found_after_the_load(pair, slots, tmp_path, monkeypatch):
    """One bit of one weight: the sums of the live parameters differ from the manifest's, and the error names
    the tensor."""
    directory, manifest = fill_slot(slots, pair.models[1], 4, 2)
    entry = next(t for t in manifest.tensors if t.name == "model.layers.1.mlp.up_proj.weight")
    path = directory / WEIGHTS_FILE
    blob = bytearray(path.read_bytes())
    blob[len(blob) - manifest.data_bytes + entry.offset] ^= 1
    path.write_bytes(blob)
    refusal = r"weight id 4: 1 of \d+ tensors in the engine differ .* first model.layers.1.mlp.up_proj.weight"
    with pytest.raises(Exception, match=refusal):
        pair.loop.run(new_loader(pair, tmp_path, monkeypatch).pull())
    fill_slot(slots, pair.models[0], 5, 3)
    pulled = pair.loop.run(new_loader(pair, tmp_path, monkeypatch).pull())
    assert (pulled.weight_id, pulled.weight_step, len(pulled.probe_logprobs)) == (5, 3, 124)
    assert set(pulled.phases) == {"lock", "check", "load", "sums", "probe"}


def test_weights_with_which_the_engine_overflows_are_refused_at_once(pair, slots, tmp_path, monkeypatch):
    """The engine answers null for each log-prob that is not finite. A pull whose probe comes out so is
    refused with engine, step, cure and log, and without a fresh engine, which would do the same; a response
    is never trained on; the next weights mend it."""
    monkeypatch.setattr(weight_loader, "TRIES", 2)
    monkeypatch.setattr(EngineLives, "replace", lambda _: pytest.fail("a fresh engine was started"))
    made = WeightLoader(
        SlotReader(str(tmp_path), "run"),
        probe_sequences(500),
        Trace(tmp_path, "rollout", 1),
        EngineLives(lambda: pair.engines[1], lambda: 1),
    )
    spoilt = tmp_path / "spoilt"
    shutil.copytree(pair.models[1], spoilt)
    tensors = load_file(spoilt / WEIGHTS_FILE)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 5] = math.nan
    save_file(tensors, spoilt / WEIGHTS_FILE, {"format": "pt"})
    fill_slot(slots, spoilt, 6, 4)
    with pytest.raises(
        EngineOverflows,
        match=r"engine 1 holds the trainer's weights of step 4 .* set model\.dtype=.*engine1\.log",
    ):
        pair.loop.run(made.pull())
    generation = generate_all(pair, sampling(pair, 1.0, 4), "6", engine=1)[0]
    assert (
        math.isnan(generation.logprobs[0])
        and judged(generation, 6) == "the log-prob of response token 0 is not finite"
    )
    fill_slot(slots, pair.models[0], 7, 5)
    assert pair.loop.run(made.pull()).weight_id == 7


def test_a_missing_tensor_and_a_wrong_shape_are_found_before_the_load(pair, slots, tmp_path, monkeypatch):
    """SGLang would load the rest and answer success, and would end itself on a wrong shape: neither is ever
    given to it."""
    monkeypatch.setattr(SglangServer, "load_weights", lambda *_: pytest.fail("it was loaded"))
    directory, manifest = fill_slot(slots, pair.models[1], 4, 2)
    other = tmp_path / "other"
    shutil.copytree(directory, other)
    for change in (
        lambda t: t.pop("lm_head.weight"),
        lambda t: t.update({"lm_head.weight": t["lm_head.weight"][:400]}),
    ):
        tensors = dict(load_file(other / WEIGHTS_FILE))
        change(tensors)
        save_file(tensors, directory / WEIGHTS_FILE)  # the file differs from its manifest
        with pytest.raises(SlotRefused, match="not laid out as its manifest says"):
            pair.loop.run(new_loader(pair, tmp_path, monkeypatch).pull())
        save_file(tensors, other / "changed.safetensors")
        layout = pair.loop.run(
            pair.engines[1].layout()
        )  # file and manifest agree with each other, but not with the engine
        manifest.tensors = [t for t in manifest.tensors if t.name in tensors]
        for entry in manifest.tensors:
            entry.shape = list(tensors[entry.name].shape)
        with pytest.raises(SlotRefused, match="tensor lm_head"):
            weight_loader.check_layout(layout, manifest)


def test_a_load_is_refused_while_a_request_runs_and_for_another_model(pair, slots, tmp_path):
    """All or nothing: neither writes a byte, so the engine goes on with what it had."""
    engine, (directory, _) = pair.engines[1], fill_slot(slots, pair.models[1], 4, 0)
    before = pair.loop.run(engine.sums())

    async def busy() -> None:
        parameters = sampling(pair, 1.0, 400) | {"ignore_eos": True, "stop_token_ids": []}
        request = await paused(
            engine, "busy", lambda name: engine.generate(PROMPTS[3], parameters, name, "0")
        )
        with pytest.raises(LaminarError, match="requests are running"):
            load = protocol.LoadWeights(str(directory))
            await engine.port.call(load, protocol.LiveSums, 10)
        await engine.resume()
        await request

    pair.loop.run(busy())
    model = make_model(tmp_path / "tied", 3, tied=True)  # has no lm_head
    other = SlotWriter(str(tmp_path), "other", 1, model)
    with pytest.raises(LaminarError, match=r"differ in \['lm_head.weight'\]"):
        pair.loop.run(engine.load_weights(fill_slot(other, model, 5, 0)[0], 5))
    other.close()
    assert pair.loop.run(engine.sums()) == before


def test_sums_that_are_missing_count_as_different():
    """An engine that reports fewer tensors than the manifest lists is not verified by the others."""
    from laminar_hpc.weights.manifest import Manifest, TensorEntry

    manifest = Manifest(
        1,
        0,
        "float32",
        [TensorEntry("a", [1], "float32", sum_words=3, sum_indexed=3), TensorEntry("b", [1], "float32")],
    )
    with pytest.raises(EngineSumsDiffer, match=r"1 of 2 tensors .* first b"):
        weight_loader.check_sums({"a": (3, 3)}, manifest)
