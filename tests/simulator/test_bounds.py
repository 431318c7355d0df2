"""Every number of `laminar sim` and `laminar plan` has bounds, all that is wrong is said at once, and every
simulation ends."""

import gc
import math
import time
import typing

import pytest

from laminar_hpc.config.bounds import Bounds, all_fields, allowed, plain_type, wrong_values
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.simulator import clock
from laminar_hpc.simulator.constants import DEFAULT, Constants
from laminar_hpc.simulator.plan import search
from laminar_hpc.simulator.rules import PIPELINES
from laminar_hpc.simulator.run import simulate
from laminar_hpc.simulator.schema import PlanConfig, PoolConfig, SimulationConfig, WorkloadConfig
from laminar_hpc.simulator.settings import check, check_plan, experiments, load_plan, load_simulation
from laminar_hpc.simulator.setup import setup
from laminar_hpc.simulator.tables import GPUS, MODELS

KINDS = (WorkloadConfig, SimulationConfig, PlanConfig, PoolConfig, Constants)


def numeric(kind: type) -> dict[str, object]:
    """Key -> what it may be, of every field that holds a number, a list or a table of numbers."""
    fields = {key: field for key, field in all_fields(kind) if not key.startswith("workload.")}
    return {
        key: allowed(field)
        for key, field in fields.items()
        if {int, float} & {plain_type(field)[0], *typing.get_args(plain_type(field)[0])}
        and key != "constants"
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_number_has_bounds_and_its_default_is_within(kind):
    """Promise: a new number cannot be forgotten."""
    assert numeric(kind) and not [
        key for key, limits in numeric(kind).items() if not isinstance(limits, Bounds)
    ]
    assert not wrong_values(kind())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0])
def test_no_number_is_endless_or_negative(value):
    """Promise: no simulation is asked for with a number that cannot be meant."""
    for kind in KINDS:
        for key, limits in numeric(kind).items():
            assert isinstance(limits, Bounds) and not limits.hold(value), key


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["sim", "dora", "max_staleness=-1"], ["max_staleness=-1: must be at least 0"]),
        (
            ["sim", "dora", "constants.prefill_mfu=0"],
            ["constants.prefill_mfu=0: must be at least 0.0001"],
        ),
        (
            ["sim", "dora", "constants.prefill_mfu=nan", "constants.repack_period=0"],
            ["prefill_mfu=nan", "repack_period=0"],
        ),
        (
            ["sim", "dora", "gpus=[-5]", "pipelines=[]", "workload.sigma=0", "checkpoint_every=0"],
            ["gpus=-5", "pipelines is empty", "sigma=0", "checkpoint_every=0"],
        ),
        (["sim", "dora", "gpus=[]"], ["gpus is empty"]),
        (["sim", "dora", "splits.laminarr=0.5"], ["splits=laminarr", "did you mean laminar"]),
        (["sim", "dora", "rollout_mtbf_hours=0"], ["rollout_mtbf_hours=0: must be at least 0.05"]),
        (["sim", "dora", "steps=9999", "workload.prompts_per_step=100000"], ["more than the 20,000,000"]),
        (
            ["sim", "laminar", "sites=[{gpu: L40S, count: 3, wan_loss: 0.1}]", "pipelines=[sync,laminar]"],
            ["sync has none of", "sites[0].count=3", "sites[0]: wan_milliseconds"],
        ),
        (["sim", "laminar", "trainer_groups=48"], ["gpus=64: at least 8 for each", "gpus=1024: must be a m"]),
        (
            ["plan", "node", "pools=[{gpu: H100, count: 8}, {gpu: H20, count: 8, grace_seconds: 30}]"],
            ["pools[1].grace_seconds=30: a notice comes before a preemption"],
        ),
        (["sim", "dora", "tensor_parallel=3"], ["tensor_parallel=3 does not divide the heads"]),
        (
            ["plan", "mixed", "max_staleness=-1", "model=33b"],
            ["max_staleness=-1", "model=33b", "did you mean 3B"],
        ),
        (
            ["plan", "mixed", "pools=[{gpu: H10, count: 0, price: -1}]"],
            ["pools[0].gpu=H10", "pools[0].count=0", "pools[0].price=-1"],
        ),
        (["plan", "mixed", "pools=[]"], ["pools is empty"]),
        (["plan", "mixed", "pools=[{gpu: H100, count: 12}]"], ["count=12: machines have 8 GPUs"]),
        (
            ["plan", "node", "pools=[{gpu: H100, count: 1}]"],
            ["one GPU cannot be divided", "experiment=one_gpu"],
        ),
        (["plan", "node", "name=demo"], ["conf/experiment has one of that name"]),
        (["plan", "node", "name=a/b"], ["name='a/b'"]),
        (["plan", "node", "workload.samples_per_prompt=1"], ["a run needs at least 2"]),
        (["plan", "node", "workload.updates_per_step=3"], ["does not divide"]),
        (["plan", "node", "workload.max_response_tokens=131072"], ["positions of 7B"]),
        (["plan", "nod"], ["did you mean node?"]),
        (["sim", "small", "workload.turns=8"], ["workload.turns=8: nothing happens between turns"]),
        (
            ["sim", "tools", "workload.turns=1"],
            ["workload.turn_seconds, workload.turn_sigma, workload.turn_tokens: of the calls between turns"],
        ),
        (["sim", "tools", "workload.turn_seconds=0"], ["turn_sigma=1: the spread of workload.turn_seconds"]),
        (
            ["plan", "node", "workload.turns=2", "workload.turn_sigma=1"],
            ["workload.turns=2: nothing happens"],
        ),
        (
            ["sim", "small", "pipelines=[sync,sync_split]", "max_staleness=2"],
            ["max_staleness=2: that of sync, sync_split is always 0"],
        ),
        (
            [
                "sim",
                "small",
                "pipelines=[laminar]",
                "sites=[{gpu: H20, count: 8, price: 1, preemptible: true}]",
            ],
            [
                "sites[0].price=1: a simulation has no prices",
                "sites[0].preemptible=true: give mtbf_hours too",
            ],
        ),
        (
            ["plan", "node", "trainer_busy=0.5", "least_throughput=9"],
            ["trainer_busy=0.5: says what", "least_throughput=9: says what"],
        ),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_wrong_words_are_refused_in_one_line_at_once(words, texts):
    """Promise: key, bound and cure of everything that is wrong, before anything is simulated."""
    gc.collect()
    gc.disable()  # to collect what other tests have left takes as long as all that is measured here
    begin = time.thread_time()
    try:
        with pytest.raises(LaminarError) as error:
            (load_simulation if words[0] == "sim" else load_plan)(words[1], words[2:])
        assert time.thread_time() - begin < 1.0
    finally:
        gc.enable()
    assert all(text in str(error.value) for text in texts), str(error.value)


def test_null_is_no_number():
    """Keys that may be null pass the check of bounds."""
    check(SimulationConfig(max_staleness=None, rollout_mtbf_hours=None))
    check_plan(PlanConfig(name="some", pools=[PoolConfig(price=None)]))


def test_a_simulation_that_finishes_nothing_ends(monkeypatch):
    """Promise: replicas that die faster than they work end the simulation with a line that says so."""
    monkeypatch.setattr(clock, "PATIENCE", 20_000)
    gpu, work = GPUS["H800"], WorkloadConfig(prompts_per_step=8, samples_per_prompt=4, updates_per_step=2)
    made = setup(
        PIPELINES["laminar"], MODELS["7B"], gpu, 4, [(gpu, 4, 1, 0.1)], work, DEFAULT, steps=3, warmup_steps=1
    )
    with pytest.raises(LaminarError, match=r"stuck after .* simulated hours, nothing is finished any more"):
        simulate(made)


def test_a_simulation_whose_trainer_never_catches_up_ends(monkeypatch):
    """Promise: without a staleness bound, rollouts that are far ahead of the trainer end the simulation
    too."""
    monkeypatch.setattr(clock, "FINISHED", 2_000)
    gpu, work = GPUS["H800"], WorkloadConfig(prompts_per_step=8, samples_per_prompt=4, updates_per_step=2)
    made = setup(
        PIPELINES["laminar_unbounded"],
        MODELS["7B"],
        gpu,
        1,
        [(gpu, 64, 1, None)],
        work,
        DEFAULT,
        steps=1000,
        warmup_steps=1,
    )
    with pytest.raises(LaminarError, match="far more than are trained"):
        simulate(made)


def test_a_search_is_cut_off_and_says_so(monkeypatch):
    """Promise: however many candidates there are, the search ends, and its plan says that it is not proven
    the best."""
    from laminar_hpc.simulator import plan

    words = [
        "workload.prompts_per_step=32",
        "workload.samples_per_prompt=4",
        "workload.updates_per_step=4",
        "steps=2",
        "warmup_steps=1",
    ]
    config = load_plan("mixed", [*words, "pools=[{gpu: H800, count: 24}, {gpu: H20, count: 16}]"])
    monkeypatch.setattr(plan, "_SIMULATED", 1)
    found = search(config)
    assert found.simulated == 1 and not found.ended
    monkeypatch.setattr(plan, "_CANDIDATES", 2)
    with pytest.raises(LaminarError, match="more than 2 ways to divide these pools"):
        search(config)


def test_runs_and_simulations_are_configured_in_turn():
    """Promise: a process may read a run's configuration after a simulation's, and the other way round."""
    for _ in range(2):
        assert load_config(["experiment=demo"]).steps == 30
        assert load_simulation(experiments()[0], []).name
