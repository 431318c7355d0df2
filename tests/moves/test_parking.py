"""docs/kv.md#machines-that-are-taken-back: when every replica goes, no token is generated twice, and none is
prefilled again where its KV cache was parked."""

import pytest

from helpers.emulated.spot import Ledger, TakenBack
from helpers.emulated.stand import Stand, assert_every_one_ended_once, small_config
from laminar_hpc.controller.loop import Controller
from laminar_hpc.line import worker_line
from laminar_hpc.line.messages.membership import Goodbye
from laminar_hpc.report import rundata, summary
from laminar_hpc.rollout import reporting, shutdown

REPLICAS, UNDER_WAY = 2, 16


class LosesItsRelay(TakenBack):
    """The relay is taken for dead as well, as soon as a KV cache is there; it comes back without any."""

    lost = False

    def __call__(self, controller: Controller) -> None:
        super().__call__(controller)
        relay, held = controller.members.at("relay"), controller.pool._held.values()
        if relay is not None and not self.lost and any(partial.parked for _, partial in held):
            self.lost = True
            controller.membership.on_goodbye(relay, Goodbye())


def run(
    tmp_path, monkeypatch, taken_back: type[TakenBack] = TakenBack, **relay: object
) -> tuple[Ledger, dict[str, list[dict]], int, dict]:
    """To its end; what engines did, the metrics, the tokens of all responses, and the summary's figures."""
    monkeypatch.setattr(reporting, "REPORT_SECONDS", 0.05)
    monkeypatch.setattr(worker_line, "PING_SECONDS", 0.05)
    config = small_config(tmp_path, replicas=REPLICAS, steps=1, prompts=8, repack="kv", repack_seconds=600.0)
    # all are as long as they may be: none ends while the replicas are told
    config.emulation.median_response_tokens = 2.0 * config.sampling.max_response_tokens
    config.emulation.sigma = 0.1
    config.emulation.time_scale = 8.0
    for name, value in relay.items():
        setattr(config.relay, name, value)
    ledger = Ledger()
    stand = Stand(config, new_worker=ledger.new_worker)
    taken = stand.each_turn = taken_back(stand, UNDER_WAY)
    stand.run(60)
    assert taken.told and stand.lives == 2 * REPLICAS
    found = assert_every_one_ended_once(config)
    records = rundata.load(tmp_path / "run").records
    return ledger, records, sum(t.length for t in found.values()), summary.build(tmp_path / "run")


def test_every_replica_is_taken_back(tmp_path, monkeypatch):
    ledger, records, tokens, figures = run(tmp_path, monkeypatch)
    parked, taken = records["parked"], records["taken_up"]
    assert len(parked) >= UNDER_WAY and all(each["bytes"] > 0 for each in parked)
    assert {each["trajectory_id"] for each in taken} == {each["trajectory_id"] for each in parked}
    assert not any(each["reason"] for each in taken)
    assert ledger.drawn == tokens and figures["tokens_discarded"] == 0, "a token was generated twice"
    assert ledger.prefilled <= len(taken), "but for the newest token of each nothing is prefilled again"


@pytest.mark.slow
def test_without_room_it_is_prefilled_again(tmp_path, monkeypatch):
    """As before there were places to park: no token is drawn twice, but their KV is computed anew."""
    monkeypatch.setattr(shutdown, "DRAIN_SECONDS", 0.0)
    ledger, records, tokens, _ = run(tmp_path, monkeypatch, parked_gigabytes=0.0)
    assert "parked" not in records and ledger.drawn == tokens
    handed = sum(move["tokens"] for move in records["move"] if move["source"] is None)
    assert ledger.prefilled > handed > 0


def test_kv_caches_are_lost_with_their_relay(tmp_path, monkeypatch):
    """Nothing waits for them and no token is drawn twice: their trajectories are prefilled again, and the
    figures say so."""
    ledger, records, tokens, figures = run(tmp_path, monkeypatch, LosesItsRelay)
    again = [each for each in records["taken_up"] if not each["tokens"]]
    assert again and figures["parked_trajectories_prefilled"] == len(again)
    said = [each["reason"] for each in again]
    assert all(reason == "its relay is gone" or "is not kept here" in reason for reason in said), said
    assert ledger.drawn == tokens and figures["tokens_discarded"] == 0, "a token was generated twice"
    assert ledger.prefilled > len(records["taken_up"])
