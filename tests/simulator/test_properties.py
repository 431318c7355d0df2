"""What must hold in any simulated run, whatever the pipeline, the hardware, the lengths and the failures."""

import dataclasses
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.policies import remaining, repack
from laminar_hpc.simulator import run as module
from laminar_hpc.simulator.ahead import Appointments
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.cost import engine_costs, faster
from laminar_hpc.simulator.replica import SimulatedReplica
from laminar_hpc.simulator.request import EngineAdmission, SimulatedRequest
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.run import simulate
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.settings import load_simulation
from laminar_hpc.simulator.setup import SimulationSetup, setup
from laminar_hpc.simulator.sweep import setup_of
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.wide_area.link import Site
from laminar_hpc.simulator.workload import Workload

SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def setups(draw, names=tuple(PIPELINES)) -> SimulationSetup:
    """Small runs: 4 to 12 groups of 2 or 4, of prompts that come again or not, up to 6 replicas, tight or
    ample KV, with turns, failures and replicas in another place now and then."""
    rules = PIPELINES[draw(st.sampled_from(names))]
    cap = draw(st.sampled_from([64, 2000]))
    work = WorkloadConfig(
        prompts=draw(st.sampled_from([0, 7])),
        prompts_per_step=4 * draw(st.integers(1, 3)),
        samples_per_prompt=draw(st.sampled_from([2, 4])),
        updates_per_step=draw(st.sampled_from([1, 2, 4])),
        prompt_tokens=draw(st.integers(1, 50)),
        mean_response_tokens=cap * 0.4,
        max_response_tokens=cap,
        sigma=draw(st.floats(0.1, 2.0)),
        turns=draw(st.sampled_from([1, 1, 3])),
        turn_seconds=draw(st.floats(0.0, 5.0)),
        turn_sigma=1.0,
        turn_tokens=draw(st.integers(0, 20)),
        growth=draw(st.sampled_from([0.0, 0.5])),
    )
    gpu = GPUS["H800"]
    made = setup(
        rules,
        MODELS["7B"],
        gpu,
        4,
        [(gpu, draw(st.integers(1, 6)), 1, draw(st.sampled_from([None, None, 600.0])))],
        work,
        DEFAULT,
        steps=draw(st.integers(2, 6)),
        warmup_steps=1,
        seed=draw(st.integers(0, 99)),
        max_concurrent=draw(st.sampled_from([1, 3, 64])),
        checkpoint_every=2,
        trainer_mtbf=draw(st.sampled_from([None, None, 300.0])),
    )
    return varied(draw, made, work.prompt_tokens + cap + 2 * work.turn_tokens + 1)


def varied(draw, made: SimulationSetup, longest: int) -> SimulationSetup:
    """With another KV cache, admission, and replicas in another place. `longest`: tokens of a trajectory."""
    capacity = draw(st.sampled_from([longest, 3 * longest, made.engines[0].capacity]))
    engines = tuple(
        dataclasses.replace(kind, capacity=capacity, costs=dataclasses.replace(kind.costs, restart=5.0))
        for kind in made.engines
    )
    clip = draw(st.sampled_from([0.0, made.admission.clip]))
    sites: tuple[Site, ...] = ()
    if made.rules.relays and draw(st.booleans()):
        sites = (Site(draw(st.floats(0.0, 2.0)), draw(st.sampled_from([0.0, 300.0])), 0.03),)
        grace, mtbf = draw(st.sampled_from([(0.0, None), (0.0, 600.0), (0.1, 100.0), (20.0, 100.0)]))
        away = dataclasses.replace(engines[0], count=draw(st.integers(1, 3)), site=1, grace=grace, mtbf=mtbf)
        engines = (*engines, away)
    return dataclasses.replace(
        made,
        engines=engines,
        sites=sites,
        admission=dataclasses.replace(made.admission, clip=clip),
        job=dataclasses.replace(made.job, job_restart=9.0),
    )


def run(made: SimulationSetup, patch: pytest.MonkeyPatch) -> tuple[module.Simulation, list[float]]:
    """The simulation at its end, and every time that its clock showed. At each of them no replica exceeds its
    KV or its places."""
    times: list[float] = []

    class WatchedClock(module.Clock):
        def at(self, time, call, *arguments):
            def watched(*inner):
                times.append(self.now)
                call(*inner)
                for replica in simulation.replicas:
                    assert replica.kv + replica.parked_kv <= replica.capacity * (1 + 1e-6)
                    assert len(replica.running) <= replica.max_concurrent
                    held = sum(q.offset + replica.steps for q in replica.running.values())
                    assert math.isclose(replica.kv, held, abs_tol=1e-3)

            super().at(time, watched, *arguments)

    patch.setattr(module, "Clock", WatchedClock)
    simulation = module.Simulation(made)
    simulation.clock.run()
    return simulation, times


@SLOW
@given(setups(("laminar", "laminar_no_repack", "laminar_unbounded", "dora")), st.booleans())
def test_ends_that_concern_nobody_else(made, watch):
    """Promise: what replicas get past alone changes no figure to the last bit, nor time lines and samples;
    it takes no more events."""
    kinds = tuple(dataclasses.replace(kind, mtbf=None) for kind in made.engines)
    known = dataclasses.replace(made, engines=kinds, trainer_mtbf=None, watch=watch)
    outcomes = [simulate(known)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Appointments, "next", lambda self, replica: 0.0)
        outcomes.append(simulate(known))
    alone, each = (outcome.figures.pop("events") for outcome in outcomes)
    assert outcomes[0] == outcomes[1] and alone <= each


def test_lengths_count_in_the_order_of_time(monkeypatch):
    """Promise: repack goes by the newest lengths, however far a replica went on by itself meanwhile."""
    monkeypatch.setattr(remaining, "_KEPT", 64)
    made = setup_of(load_simulation("small", ["steps=2", "warmup_steps=1"]), "laminar_unbounded", 32, 8, 2)
    alone = simulate(made).figures
    monkeypatch.setattr(Appointments, "next", lambda self, replica: 0.0)
    assert {**alone, "events": 0} == {**simulate(made).figures, "events": 0}


@SLOW
@given(data=st.data())
def test_work_kv_and_time(data):
    """Tokens generated = finished + in progress + thrown away. No replica exceeds its KV. Time never runs
    back. All steps end."""
    made = data.draw(setups())
    with pytest.MonkeyPatch.context() as patch:
        simulation, times = run(made, patch)
    tracker, replicas, figures = simulation.tracker, simulation.replicas, simulation.outcome().figures
    unfinished = 0.0
    for group in tracker.live.values():
        for request in group.requests.values():
            if request.turn < len(request.turns):
                home = request.home
                running = home is not None and home.running.get(request.ticket) is request
                remaining = request.end - home.steps if running else request.remaining
                unfinished += sum(request.turns[: request.turn]) + request.turns[request.turn] - remaining
    generated = sum(replica.generated for replica in replicas)
    assert math.isclose(
        generated, tracker.finished_tokens + unfinished + tracker.discarded_tokens, rel_tol=1e-6, abs_tol=0.5
    )
    assert times == sorted(times)
    assert (
        sum(tracker.training_staleness.values())
        == made.steps * made.workload.prompts_per_step * made.workload.samples_per_prompt
    )
    booked = [sum(replica.seconds.values()) for replica in replicas]
    assert all(math.isclose(seconds, figures["seconds"], rel_tol=1e-6) for seconds in booked), (
        "every replica's time is booked under a cause"
    )


@SLOW
@given(made=setups())
def test_same_seed_same_result(made):
    """A simulation is a function of its setup and seed."""
    assert simulate(made) == simulate(made)


@SLOW
@given(
    made=setups(
        (
            "laminar",
            "laminar_no_repack",
            "laminar_reprefill",
            "dora",
            "versions",
            "one_step",
            "stream",
            "sync",
            "sync_split",
        )
    )
)
def test_one_policy_per_trajectory_and_the_bound(made):
    """One weight id per trajectory, and none is trained later than `max_staleness` steps after it (without
    failures: versions restart)."""
    figures = simulate(made).figures
    assert figures["versions_max"] == 1
    assert figures["staleness_training_max"] <= made.rules.max_staleness
    assert (
        figures["staleness_generation_max"] <= figures["staleness_training_max"]
        or made.steps - made.warmup_steps < 4
    )


def longest_wait(made: SimulationSetup) -> float:
    """Seconds of the slowest answer of an environment."""
    groups = made.workload.prompts_per_step * made.steps
    workload = Workload(made.workload, made.seed, groups)
    waits = (wait for i in range(groups) for sample in workload.group(i).waits for wait in sample)
    return max(waits, default=0.0)


@SLOW
@given(
    made=setups(("laminar", "laminar_no_repack", "laminar_reprefill", "laminar_unbounded")),
    mtbf=st.sampled_from([15.0, 60.0]),
)
def test_deaths_mix_no_weights(made, mtbf):
    """With replicas that die all the time and work that goes on where older weights are loaded: every request
    runs on those that it began with, the bound holds, and all steps end, unless an environment answers so
    late that hardly a replica lives to hear it: then the simulation says that it is stuck."""
    engines = tuple(dataclasses.replace(kind, mtbf=mtbf) for kind in made.engines)
    fill = SimulatedReplica.fill

    def watched(self: SimulatedReplica) -> None:
        fill(self)
        assert all(request.weight_step == self.weight_id for request in self.running.values())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatedReplica, "fill", watched)
        try:
            figures = simulate(dataclasses.replace(made, engines=engines, trainer_mtbf=None)).figures
        except LaminarError as stuck:
            assert "failures that come faster than work is done" in str(stuck)
            assert longest_wait(made) > 5 * mtbf, "one attempt in 150 outlives this wait"
            return
    assert figures["versions_max"] == 1
    assert made.rules.max_staleness is None or figures["staleness_training_max"] <= made.rules.max_staleness


def test_work_of_dead_replicas_is_saved_by_loads_of_older_weights():
    """Long responses on three replicas, each dead every minute or so: some of them only a load can save."""
    work = WorkloadConfig(
        prompts_per_step=12,
        samples_per_prompt=4,
        updates_per_step=2,
        prompt_tokens=50,
        mean_response_tokens=800,
        max_response_tokens=2000,
        sigma=1.5,
    )
    gpu, made = GPUS["H800"], []
    for seed in range(8):
        one = setup(
            PIPELINES["laminar_no_repack"],
            MODELS["7B"],
            gpu,
            4,
            [(gpu, 3, 1, 60.0)],
            work,
            DEFAULT,
            steps=12,
            warmup_steps=1,
            seed=seed,
        )
        engines = tuple(
            dataclasses.replace(kind, costs=dataclasses.replace(kind.costs, restart=5.0))
            for kind in one.engines
        )
        made.append(simulate(dataclasses.replace(one, engines=engines)).figures)
    totals = {
        name: sum(figures[f"trajectories_{name}"] for figures in made)
        for name in ("rescued_by_load", "redirected", "restarted")
    }
    assert totals["rescued_by_load"] > 30 > totals["restarted"], totals


def faster_setup(made: SimulationSetup, factor: float) -> SimulationSetup:
    """The same run with all rates `factor` times as high."""
    kinds = tuple(
        dataclasses.replace(
            kind,
            costs=faster(kind.costs, factor),
            mtbf=kind.mtbf and kind.mtbf / factor,
            grace=kind.grace / factor,
        )
        for kind in made.engines
    )
    sites = tuple(faster(site, factor) for site in made.sites)
    mtbf = made.trainer_mtbf and made.trainer_mtbf / factor
    return dataclasses.replace(
        made, engines=kinds, job=faster(made.job, factor), sites=sites, trainer_mtbf=mtbf
    )


@SLOW
@given(made=setups(), factor=st.sampled_from([2.0, 4.0]))
def test_doubling_every_rate_halves_the_time(made, factor):
    """Powers of two are exact in floating point, so the histories are the same but for the unit of time; also
    of what a move is taken to cost before the first one."""
    slow = simulate(made)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repack, "FIRST_MOVE_SECONDS", repack.FIRST_MOVE_SECONDS / factor)
        fast = simulate(faster_setup(made, factor))
    assert math.isclose(slow.figures["seconds"], factor * fast.figures["seconds"], rel_tol=1e-9)
    assert (
        slow.staleness_training == fast.staleness_training
        and slow.figures["preemptions"] == fast.figures["preemptions"]
    )


@given(
    n=st.integers(1, 400),
    kv=st.floats(0, 9e5),
    seconds=st.floats(1e-6, 1e4),
    gpu=st.sampled_from(["H800", "H20", "L40S"]),
)
def test_time_of_steps_and_steps_in_time_are_inverse(n, kv, seconds, gpu):
    """The closed forms, across the change from compute-bound to memory-bound."""
    replica = SimulatedReplica(
        0, engine_costs(MODELS["32B"], GPUS[gpu], 4, DEFAULT), 1e9, 999, EngineAdmission.of(16384, DEFAULT), 4
    )
    replica.running = dict.fromkeys(range(n))
    replica.kv = kv
    assert math.isclose(replica.seconds_of(replica.steps_in(seconds)), seconds, rel_tol=1e-6)


def test_closed_form_is_the_sum_over_steps():
    """Against a loop over single decode steps with the roofline formula; the continuous time differs by half
    a step of growth."""
    costs = engine_costs(MODELS["32B"], GPUS["H800"], 4, DEFAULT)
    replica = SimulatedReplica(0, costs, 1e9, 999, EngineAdmission.of(16384, DEFAULT), 4)
    for i, length in enumerate((100, 700, 1500)):
        replica.waiting.append(SimulatedRequest(i, None, [length], 1000, 0))
    replica.fill()
    looped, kv, lengths = replica.stall_until, 3000.0, [100, 700, 1500]
    for step in range(1500):
        running = sum(step < n for n in lengths)
        kv = sum(1000 + step for n in lengths if step < n)
        looped += costs.step(running, kv)
    time = 0.0
    while replica.running:
        time = replica.next_time()
        replica.advance(time, at_event=True)
        replica.pop_finished()
    assert math.isclose(time, looped, rel_tol=1e-4)
