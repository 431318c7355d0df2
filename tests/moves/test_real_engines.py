"""docs/promises.md#ownership, and #nothing-lost over moves, on real SGLang engines: what test_faults.py
pins on emulated ones, and that what moved is the model's own.

Two or three replicas serve a tiny random model, whose responses are long; the stage publishes its weights
under each new id.
"""

import os
import queue
import signal
import sqlite3
from pathlib import Path

import pytest
import torch

from helpers.control.sabotage import Killer, Saboteur, sabotaged
from helpers.emulated.spot import Ledger, TakenBack
from helpers.emulated.stand import Shuffler, Stand, small_config
from helpers.engines.pair import fill_slot, make_model, reference
from laminar_hpc.config.models import WEIGHTS_FILE
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.trajectories import migration
from laminar_hpc.engine.sglang.server import SglangServer
from laminar_hpc.line.endings import StopReceived
from laminar_hpc.line.messages.chain import RelayHas
from laminar_hpc.line.messages.membership import Stop
from laminar_hpc.report import rundata, summary
from laminar_hpc.rollout import move_source
from laminar_hpc.simulator.emulation import stage
from laminar_hpc.store.payload.whole import Whole, wholes
from laminar_hpc.store.rows import stored_trajectories
from laminar_hpc.weights.kernels.sums import tensor_sums
from laminar_hpc.weights.manifest import Manifest, layout
from laminar_hpc.weights.slots import SlotWriter

FAULTS, PHASE_SECONDS, AGAIN_SECONDS, HANG_SECONDS = 20, 6.0, 0.5, 8.0
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Mortal(SglangServer):
    def die(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)


def real_config(folder, steps: int, repack: str) -> RunConfig:
    config = small_config(folder, replicas=3, steps=steps, repack=repack)
    config.model.path = str(make_model(folder / "tiny", 0))
    config.rollout.engine, config.rollout.kv_cache_tokens = "sglang", 32768
    config.sampling.max_response_tokens = 400
    return config


def publish_real_sums(monkeypatch, config: RunConfig) -> None:
    """The stage's relay knows no torch; real engines compare sums with the manifest."""
    from safetensors.torch import load_file

    sums = {
        name: tensor_sums(tensor) for name, tensor in load_file(f"{config.model.path}/{WEIGHTS_FILE}").items()
    }

    def with_sums(tensors, weight_id: int, step: int) -> Manifest:
        manifest = layout(tensors, weight_id, step)
        for entry in manifest.tensors:
            entry.sum_words, entry.sum_indexed = sums[entry.name]
        return manifest

    monkeypatch.setattr(stage, "layout", with_sums)


def assert_is_the_models(model: torch.nn.Module, t: Whole) -> None:
    """Its log-probs are the model's for exactly its tokens, whatever engines they come from."""
    with torch.no_grad():
        text = torch.tensor([t.prompt.tolist() + t.response.tokens.tolist()])
        logits = model(text).logits[0, len(t.prompt) - 1 : -1].float()
    expected = torch.log_softmax(logits, -1).gather(1, text[0, len(t.prompt) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(t.response.logprobs), expected, atol=1e-4, rtol=0)


def assert_every_one_ended_once(config: RunConfig) -> list[Whole]:
    """All that was ever granted is finished or consumed, in whole, under one policy."""
    with sqlite3.connect(f"file:{config.run_dir}/store.sqlite?mode=ro", uri=True) as database:
        rows = database.execute("SELECT id, state FROM trajectories").fetchall()
        stored = stored_trajectories(database, [i for i, _ in rows])
    assert {state for _, state in rows} <= {"consumed", "finished"}, "a trajectory was lost"
    wanted = config.steps * config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt
    assert len(rows) == len({i for i, _ in rows}) == wanted
    found = wholes(Path(config.run_dir), stored)
    assert len(found) == wanted
    for t in found:
        n = len(t.response.tokens)
        assert 0 < n == t.record.length <= config.sampling.max_response_tokens
        assert t.record.finish_reason in ("stop", "length")
        assert [(s.weight_id, s.start, s.end) for s in t.response.spans] == [(t.record.weight_id, 0, n)]
    return found


def run(tmp_path, monkeypatch, steps: int, repack: str, saboteur: Saboteur) -> tuple[list[Whole], list[dict]]:
    """To its end; every trajectory, and every move."""
    config = real_config(tmp_path, steps, repack)
    publish_real_sums(monkeypatch, config)
    Stand(config, sabotaged(saboteur, Mortal), Shuffler(seed=1)).run(840)
    found, model = assert_every_one_ended_once(config), reference(config.model.path)
    moved = [t for t in found if t.record.moves]
    for t in moved[:100]:
        assert_is_the_models(model, t)
    return found, rundata.load(tmp_path / "run").records.get("move", [])


@pytest.mark.parametrize("repack", ["kv", "reprefill"])
def test_trajectories_move_between_real_engines(tmp_path, monkeypatch, repack):
    """No fault: every move's KV arrives but for the newest token's, and with `reprefill` none does."""
    _, moves = run(tmp_path, monkeypatch, 3, repack, Saboteur(0, 0, 0.0, 0.0))
    assert len(moves) >= 10
    hits = [
        move["prefix_tokens"] / (move["tokens"] + 10) for move in moves
    ]  # prompts are of 10 digits, a token each
    assert sum(hits) / len(hits) > 0.9 if repack == "kv" else not any(hits), hits


def test_kv_caches_wait_in_a_relay_s_memory(tmp_path, monkeypatch):
    """docs/kv.md#machines-that-are-taken-back: both replicas are taken back at once. No token is drawn twice,
    the next engines prefill the newest token of each response alone, and log-probs are the model's."""
    config = real_config(tmp_path, 1, "kv")
    config.rollout.replicas, config.algorithm.prompts_per_step = 2, 8
    config.pipeline.repack_seconds = 600.0
    publish_real_sums(monkeypatch, config)
    ledger = Ledger(SglangServer)
    stand = Stand(config, new_worker=ledger.new_worker)
    taken = stand.each_turn = TakenBack(stand, 12)
    stand.run(840)
    found, model = assert_every_one_ended_once(config), reference(config.model.path)
    records, figures = rundata.load(tmp_path / "run").records, summary.build(tmp_path / "run")
    parked = [each for each in records["parked"] if each["tokens"]]
    came = [each for each in records["taken_up"] if each["tokens"]]
    print(f"{len(parked)} parked, {figures['tokens_parked']} tokens, {figures['bytes_parked']} bytes")
    assert taken.told and len(parked) >= 8 and len(parked) == len(came)
    assert sum(each["tokens"] for each in came) == figures["tokens_parked"]
    assert ledger.drawn == sum(t.record.length for t in found) and figures["tokens_discarded"] == 0
    print(f"{ledger.prefilled} tokens prefilled again")
    assert ledger.prefilled <= len(came), "of each the newest token has no KV yet"
    moved = [t for t in found if t.record.moves]
    assert len(moved) >= len(parked)
    for t in moved:
        assert_is_the_models(model, t)


def test_20_faults_on_real_engines(tmp_path, monkeypatch):
    """Engines are killed, refuse and hang, and messages are lost, over the phases of a move."""
    monkeypatch.setattr(migration, "PHASE_SECONDS", PHASE_SECONDS)
    monkeypatch.setattr(move_source, "AGAIN_SECONDS", AGAIN_SECONDS)
    saboteur = Saboteur(1, FAULTS, 0.15, HANG_SECONDS)
    found, _ = run(tmp_path, monkeypatch, 16, "kv", saboteur)
    where = {place for place, _ in saboteur.struck}
    assert saboteur.struck.total() == FAULTS and len(where) >= 8, saboteur.struck
    assert any(t.record.moves for t in found)


def relay_of(models: list[Path]):
    """A relay whose odd ids are other weights than the even ones, with true sums."""

    def relay(config: RunConfig, handed: queue.SimpleQueue) -> None:
        channel = stage.join(config, "relay")
        writer = SlotWriter(config.relay.shm_dir, channel.welcome.run_id, config.relay.slots, models[0])
        try:
            while True:
                channel.wait(Stop, timeout=0.0)
                try:
                    given = handed.get(timeout=0.1)
                except queue.Empty:
                    continue
                _, manifest = fill_slot(writer, models[given.weight_id % 2], given.weight_id, given.step)
                channel.send(RelayHas(given.weight_id, given.step, manifest.data_bytes, 0.1, 0.0))
        except StopReceived:
            channel.close()
        finally:
            writer.close()

    return relay


def test_the_work_of_a_killed_engine_goes_on_with_older_weights(tmp_path, monkeypatch):
    """Engines are killed while their trajectories are on an older id that nobody else generates with: a
    replica loads that id from a slot, and every token of what it finishes is of that id's own model, those
    from before the death included. The odd ids are another model."""
    config = real_config(tmp_path, 8, "off")
    config.rollout.replicas, config.algorithm.prompts_per_step, config.rollout.increment_tokens = 2, 8, 10
    models = [Path(config.model.path), make_model(tmp_path / "other", 1)]
    monkeypatch.setattr(stage, "relay", relay_of(models))
    stand = Stand(config, sabotaged(Saboteur(0, 0, 0.0, 0.0), Mortal))
    killer = stand.each_turn = Killer(stand.kill, most=2, tokens=800, every=5.0)
    stand.run(840)
    found = {t.record.trajectory_id: t for t in assert_every_one_ended_once(config)}
    records, references = rundata.load(tmp_path / "run"), [reference(model) for model in models]
    moves = [move for move in records.records.get("move", []) if move["source"] is None]
    by_load = [move for move in moves if move["loaded"]]
    figures = summary.build(tmp_path / "run")
    tokens = sum(move["tokens"] for move in by_load)
    print(
        f"killed {[(w, len(known), sum(known.values())) for w, known in killer.killed]}, "
        f"rescued {len(moves)}, of these by a load {len(by_load)} with {tokens} tokens, "
        f"{figures['tokens_discarded']} tokens discarded"
    )
    assert killer.killed and by_load
    whole = [
        found[move["trajectory_id"]]
        for move in by_load
        if found[move["trajectory_id"]].record.weight_id == move["weight_id"]
    ]
    assert whole
    for t in whole:
        assert t.record.attempt >= 1 and t.record.moves >= 1
        assert_is_the_models(references[t.record.weight_id % 2], t)
    for t in list(found.values())[::10]:
        assert_is_the_models(references[t.record.weight_id % 2], t)
    lost = killer.lost(moves, {i: t.record for i, t in found.items()})
    assert figures["tokens_discarded"] >= lost and figures["max_versions_per_trajectory"] == 1
    for move in by_load:
        pulls = [
            pull["weight_id"] for pull in records.records["pull"] if pull["replica"] == move["destination"]
        ]
        assert move["weight_id"] in pulls
