"""Rollouts in other places: what links carry, how weights get there, hand-over after a notice, the cheapest
that keep a trainer busy."""

import dataclasses
import math

import pytest
import yaml

from laminar_hpc.launch import cli
from laminar_hpc.simulator import plan
from laminar_hpc.simulator.clock import Clock
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.plan import search
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.settings import load_plan, load_simulation
from laminar_hpc.simulator.setup import Rollout, setup
from laminar_hpc.simulator.sweep import point, split
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.wide_area.link import Deliveries, Site, WanLink, chained

SMALL = [
    "workload.prompts_per_step=32",
    "workload.samples_per_prompt=8",
    "workload.updates_per_step=2",
    "workload.mean_response_tokens=2000",
    "workload.max_response_tokens=8000",
]


def test_a_link_carries_its_bandwidth_or_what_tcp_gets_through():
    """Promise: bandwidth without loss; with loss sqrt(3/2) segments per round trip and sqrt(loss), of each of
    the connections."""
    assert WanLink(1e9, 0.1).rate(DEFAULT) == 1e9
    assert WanLink(1e6, 0.01, 1e-4).rate(DEFAULT) == pytest.approx(1e6 * (1 - 1e-4))
    one = dataclasses.replace(DEFAULT, wan_streams=1.0)
    slow = WanLink(1e9, 0.1, 0.01).rate(one)
    assert slow == pytest.approx(math.sqrt(1.5) * 1448 / (0.1 * 0.1))
    assert WanLink(1e9, 0.1, 0.01).rate(dataclasses.replace(one, wan_streams=4.0)) == pytest.approx(4 * slow)


def test_sites_pass_weights_on_so_that_one_copy_leaves_the_trainer():
    """Promise: ten equal sites have a copy hardly later than one; a slow one holds up none that is faster."""
    fast, slow = (WanLink(1e9, 0.02), 0.0), (WanLink(1e7, 0.2), 0.5)
    (alone,) = chained(30e9, [fast], DEFAULT)
    ten = chained(30e9, [fast] * 10, DEFAULT)
    assert alone.seconds(99) == pytest.approx(30, rel=0.01)
    assert max(site.seconds(99) for site in ten) < 1.1 * alone.seconds(99)
    late, first = chained(30e9, [slow, fast], DEFAULT)
    assert first == alone and late.seconds(99) > 100 * 30
    assert late.latency == pytest.approx(0.01 + 0.1 + 0.5)
    assert late.seconds(1) - late.latency == pytest.approx(DEFAULT.changed_bytes_share * late.copy)
    assert late.seconds(2) - late.latency == pytest.approx(2 * DEFAULT.changed_bytes_share * late.copy)


def test_all_of_the_gpus_train_where_others_generate():
    """Promise: trainer_share=1 is taken with sites, and nobody beside the trainer generates."""
    words = [*SMALL, "steps=2", "warmup_steps=1", "trainer_share=1", "gpus=[8]"]
    config = load_simulation("wide_area", words)
    trainer = split(config, "laminar", 8)
    figures = point(config, "laminar", 8, trainer, 2).figures
    assert trainer == figures["trainer_gpus"] == 8 and figures["gpus"] == 8 + 32 + 32 + 8


def test_what_is_published_meanwhile_goes_together():
    """Promise: one publication at a time is under way to a site; the next is the newest, as all that has
    changed since the one it has."""
    clock, seen = Clock(), []
    site = Site(1.0, 100.0, 0.04)  # 5 s for one step's changes
    deliveries = Deliveries(clock, [site], lambda number, step: seen.append((clock.now, number, step)))
    for step in (1, 2, 3):
        clock.at(2.0 * step, deliveries.publish, step)
    clock.run()
    assert seen == [(7.0, 1, 1), (16.0, 1, 3)] and deliveries.seconds == [5.0, 9.0]


def rate_with(*words: str, trainer: int = 8, **site: object) -> dict[str, float]:
    """Figures of a trainer whose rollouts are all at one site."""
    text = ", ".join(f"{key}: {value}" for key, value in site.items())
    sites = f"sites=[{{gpu: H800, {text}}}]"
    config = load_simulation("wide_area", ["model=7B", *SMALL, sites, *words])
    return point(config, "laminar", trainer, trainer, 6).figures


def test_a_site_behind_a_fast_link_is_as_good_as_one_beside_the_trainer():
    """Promise: as bandwidth grows and the round trip shrinks, a run comes to that in one place; behind a slow
    link the trainer waits, and no trajectory is too late."""
    home = rate_with(count=8)
    near = rate_with(count=8, wan_gbps=100_000)
    assert near["tokens_per_second"] == pytest.approx(home["tokens_per_second"], rel=0.03)
    far = rate_with(count=8, wan_gbps=0.02, wan_milliseconds=100)
    assert far["tokens_per_second"] < 0.8 * home["tokens_per_second"]
    assert far["staleness_training_max"] <= 3 and far["site_delivery_seconds_mean"] > 100


def test_equal_pools_in_two_places_are_two_places():
    """Promise: each pool has its own link, also where two are alike; one without a link is beside the
    trainer."""
    gpu = GPUS["H800"]
    far = Rollout(gpu, 4, 1, None, 0.0, WanLink(1e9))
    rollouts = [far, Rollout(gpu, 4, 1), far]
    settings = {"steps": 2, "warmup_steps": 1}
    made = setup(PIPELINES["laminar"], MODELS["7B"], gpu, 4, rollouts, WorkloadConfig(), DEFAULT, **settings)
    assert [kind.site for kind in made.engines] == [1, 0, 2] and len(made.sites) == 2


def test_a_notice_saves_prefill():
    """Promise: replicas that are taken away after a notice hand their trajectories over with their KV caches;
    without one all are prefilled again. Nothing is generated twice in either."""
    taken = {"count": 8, "preemptible": "true", "mtbf_hours": 0.25}
    words = ["constants.replica_restart=20", "workload.mean_response_tokens=4000"]
    without, with_ = rate_with(*words, **taken), rate_with(*words, **taken, grace_seconds=60)
    assert without["replica_deaths"] >= 3 and with_["notices"] >= 3
    assert not without["trajectories_handed_over"] and with_["trajectories_handed_over"] > 10
    assert without["trajectories_redirected"] > 5 * with_["trajectories_redirected"]
    assert with_["prefilled_tokens"] < without["prefilled_tokens"]


@pytest.mark.slow
def test_the_cheapest_far_rollouts_that_keep_the_trainer_busy(tmp_path, capsys, monkeypatch):
    """Promise: cheap GPUs elsewhere are bought where their link lets them keep the trainer busy, and not
    where it does not; the files say what was simulated, one line what all places must share."""
    monkeypatch.setattr(plan, "_THOROUGH_SECONDS", 0.0)
    pools = "pools=[{{gpu: H800, count: 16}}, {{gpu: H800, count: 8, price: 0.5, wan_gbps: {}}}]"
    words = ["model=7B", *SMALL, "trainer_busy=0.1", "max_staleness=1", "steps=4", "warmup_steps=1"]
    config = load_plan("wide_area", [*words, pools.format(100)])
    best = search(config).best
    assert best.candidate.trainer_pool == 0 and [pool for pool, *_ in best.candidate.rollouts] == [1]
    slow = search(load_plan("wide_area", [*words, pools.format(0.02)])).best
    assert [pool for pool, *_ in slow.candidate.rollouts] == [0] and slow.price > best.price
    cli.run(["plan", "wide_area", *words, pools.format(100), f"out_dir={tmp_path}"])
    written = yaml.safe_load((tmp_path / "experiment" / "wide_area.yaml").read_text())
    assert written["relay"]["delta"] == "auto" and written["relay"]["publish_timeout_seconds"] >= 60
    assert written["pipeline"]["repack"] == "auto"  # all replicas are in one place
    said = capsys.readouterr().out
    assert said.count("one file system that the machines of all") == 1 and "laminar submit" not in said
