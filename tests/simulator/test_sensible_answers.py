"""`laminar sim` beyond the settings of the validation page: whatever the model, GPU type, number of GPUs and
length, an answer is a number that can be, or one line that says why there is none."""

import dataclasses
import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.simulator import sweep
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.cost import EngineCosts, engine_costs
from laminar_hpc.simulator.published_layout import layouts, offloaded_layout, trainer_layout
from laminar_hpc.simulator.replica import SimulatedReplica
from laminar_hpc.simulator.request import EngineAdmission, SimulatedRequest
from laminar_hpc.simulator.schema import WorkloadConfig
from laminar_hpc.simulator.settings import load_simulation
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.trainer_cost import Layout, batch_sample, job_costs, peak_rate, step_seconds
from laminar_hpc.simulator.uncertainty import Rates

WORK = ["workload.prompts_per_step=32", "workload.samples_per_prompt=8", "workload.updates_per_step=4"]
SHORT = [*WORK, "steps=3", "warmup_steps=1", "draws=0"]
MEANS = {1024: 300, 16384: 2600, 65536: 12000}
PIPELINES = ("sync", "one_step", "partial", "laminar")


def asked(model: str, gpu: str, gpus: int, longest: int, *more: str):
    """The configuration, checked as the command checks it."""
    lengths = [f"workload.max_response_tokens={longest}", f"workload.mean_response_tokens={MEANS[longest]}"]
    words = [f"model={model}", f"trainer_gpu={gpu}", f"rollout_gpu={gpu}", f"gpus=[{gpus}]"]
    return load_simulation("small", [*words, *lengths, *SHORT, *more])


def rate_of(model: str, gpu: str, gpus: int, longest: int, pipeline: str) -> float:
    """Tokens/s, once all figures are finite and below what the datasheet allows."""
    config = asked(model, gpu, gpus, longest, f"pipelines=[{pipeline}]", "trainer_share=0.5")
    trainer = sweep.split(config, pipeline, gpus)
    figures = sweep.point(config, pipeline, gpus, trainer, config.steps).figures
    assert all(math.isfinite(value) and value >= 0 for value in figures.values()), figures
    shares = [value for name, value in figures.items() if name.endswith("_share")]
    assert all(share <= 1 + 1e-9 for share in shares)
    rate = figures["tokens_per_second"]
    assert 0 < rate < peak_rate(MODELS[model], GPUS[gpu], trainer, config.lora, DEFAULT)
    return rate


def believable(model: str, gpu: str, few: int, longest: int) -> None:
    """Of all pipelines on so many GPUs and on four times as many."""
    for pipeline in PIPELINES:
        first, more = (rate_of(model, gpu, n, longest, pipeline) for n in (few, 4 * few))
        assert more > 0.95 * first, f"{pipeline}: more GPUs are slower"


@pytest.mark.parametrize(
    ("model", "gpu", "few"),
    [("Qwen3-0.6B", "RTX4090", 2), ("Qwen3-Next-80B-A3B", "H100", 16), ("Kimi-K2", "H20", 64)],
)
def test_a_few_settings_have_believable_answers(model, gpu, few):
    """Promise: finite, below the datasheet, and more GPUs are no slower."""
    believable(model, gpu, few, 16384)


@pytest.mark.slow
@pytest.mark.parametrize("longest", [1024, 65536])
@pytest.mark.parametrize(
    ("model", "gpu", "few"),
    itertools.chain(
        itertools.product(("0.5B", "1.5B", "7B"), ("A100", "H20", "L40S", "RTX4090"), (2, 8)),
        itertools.product(("32B", "72B"), ("H100", "H200", "B200", "MI300X"), (16, 128)),
        itertools.product(("Qwen3-30B-A3B", "Qwen3.5-35B-A3B", "Mixtral-8x7B"), ("H800", "A100"), (8, 256)),
        itertools.product(("DeepSeek-V3", "Kimi-K2", "Llama-3.1-405B"), ("H20", "H200"), (128, 512)),
    ),
)
def test_many_settings_have_believable_answers(model, gpu, few, longest):
    """Promise: as of the few, over models, GPU types, lengths of 1K to 64K and up to 2,048 GPUs."""
    try:
        believable(model, gpu, few, longest)
    except LaminarError as refusal:
        assert "room for" in str(refusal) and "\n" not in str(refusal)


# ---- trainers ----------------------------------------------------------------------------------------------


def test_experts_are_shared_beyond_a_machine():
    """Promise: 1T parameters fit 512 H800 as 32 or 64 share each layer's experts; a pipeline has no more
    stages than layers in any layout; NVLink joins 72 GB200."""
    found = layouts(MODELS["Kimi-K2"], GPUS["H800"], 512, DEFAULT)
    assert {layout.experts for layout in found} == {32, 64} and all(layout.stages <= 16 for layout in found)
    assert layouts(MODELS["Qwen3-30B-A3B"], GPUS["H800"], 64, DEFAULT)[0].experts == 8
    rack = layouts(MODELS["Qwen3-235B-A22B"], GPUS["GB200"], 64, DEFAULT)
    assert {layout.experts for layout in rack} == {32, 64}


@pytest.mark.parametrize(
    ("model", "gpu"), [("Kimi-K2", "H20"), ("Qwen3.5-35B-A3B", "H100"), ("32B", "GB200"), ("72B", "GB200")]
)
def test_more_gpus_train_no_slower(model, gpu):
    """Promise: beyond the GPUs of a rack, with numbers that the experts do not divide, and with more than an
    update has trajectories."""
    work = WorkloadConfig(prompts_per_step=64, samples_per_prompt=4, updates_per_step=4)
    work = dataclasses.replace(work, mean_response_tokens=300, max_response_tokens=1024)
    sample, seconds = batch_sample(work), []
    for gpus in (16, 24, 64, 128, 512, 1024, 2048):
        asked_of = MODELS[model], GPUS[gpu], gpus
        layout = trainer_layout(*asked_of, work, DEFAULT) or offloaded_layout(*asked_of, work, DEFAULT)
        seconds.append(step_seconds(*asked_of, layout, work, sample, DEFAULT))
    assert all(more < 1.1 * fewer for fewer, more in itertools.pairwise(seconds)), seconds


def test_more_gpus_than_trajectories_leave_some_without_work():
    """Promise: and the trainer is as fast as with as many GPUs as trajectories, not a pipeline of hundreds of
    stages."""
    work = WorkloadConfig(prompts_per_step=8, samples_per_prompt=8, updates_per_step=4)
    few, many = (trainer_layout(MODELS["7B"], GPUS["H800"], gpus, work, DEFAULT) for gpus in (64, 2048))
    assert few is not None and many is not None and many.stages <= 2
    assert many.tensor * many.stages * many.ranks == 2048


@pytest.mark.parametrize(
    ("model", "gpu", "gpus"), [("32B", "H800", 8), ("7B", "RTX4090", 1), ("72B", "L4", 6)]
)
def test_what_does_not_fit_costs_nothing_and_is_no_odd_pipeline(model, gpu, gpus):
    """Promise: the optimizer is offloaded first, and weights only where these do not fit either."""
    work = WorkloadConfig()
    assert trainer_layout(MODELS[model], GPUS[gpu], gpus, work, DEFAULT) is None
    found = offloaded_layout(MODELS[model], GPUS[gpu], gpus, work, DEFAULT)
    assert found.tensor * found.stages * found.ranks == gpus
    held = 6 * MODELS[model].parameters / (found.tensor * found.stages)
    assert (held <= 0.6 * GPUS[gpu].memory) == (model == "32B")


def test_a_trainer_without_memory_is_said():
    """Promise: a sweep that leaves out what offloading costs says so, and only then."""
    for gpu, notices in (("H100", 1), ("B200", 0)):
        said = list[str]()
        sweep.sweep(asked("32B", gpu, 8, 1024, "pipelines=[sync]", "tensor_parallel=2"), said.append)
        found = [line for line in said if "offloading" in line]
        assert len(found) == notices and all("on 8 H100 holds" in line for line in found)


# ---- rates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", ["H20", "H100", "RTX4090", "B200"])
def test_no_draw_of_the_constants_beats_the_datasheet(gpu):
    """Promise: however much less an engine or a trainer is drawn to take, products take their FLOPs, and
    reads their bytes."""
    model, quick = MODELS["7B"], dataclasses.replace(DEFAULT, generation_error=0.1, training_error=0.1)
    costs, of = engine_costs(model, GPUS[gpu], 1, quick), GPUS[gpu]
    assert costs.weights >= 2 * model.read_parameters / of.hbm * (1 - 1e-9)
    assert costs.kv_token >= model.kv_bytes / of.hbm * (1 - 1e-9)
    assert min(costs.compute, costs.prefill_token) >= 2 * model.active_parameters / of.flops * (1 - 1e-9)
    job = job_costs(model, of, 8, Layout(1, 1, 8, recompute=0.0), 8, 4096, quick)
    assert job.train_token + job.logprob_token > 8 * model.active_parameters / of.flops / 8 * (1 - 1e-9)


def test_a_range_ends_where_the_datasheet_does():
    """Promise: it holds the prediction, and not what no trainer can do; on an H20 the prediction is near."""
    config = asked("7B", "H20", 8, 1024, "pipelines=[laminar]", "draws=4")
    config = dataclasses.replace(config, trainer_share=0.25)
    middle = sweep.point(config, "laminar", 8, 2, config.steps).figures["tokens_per_second"]
    low, high = sweep.rate_range(config, "laminar", 8, 2, middle, Rates(), lambda line: None)
    assert low < middle < high <= peak_rate(MODELS["7B"], GPUS["H20"], 2, config.lora, DEFAULT)


# ---- engines -----------------------------------------------------------------------------------------------


def test_an_engine_that_waits_for_its_host_pays_for_each_request():
    """Promise: launches hide what the GPU does, and neither hides what vLLM's host does between two steps;
    SGLang's does it meanwhile, and without graphs beside the launches."""
    free, of = dataclasses.replace(DEFAULT, decode_request_seconds=0.0), (MODELS["32B"], GPUS["H800"], 4)
    assert engine_costs(*of, DEFAULT) == engine_costs(*of, free) == engine_costs(*of, free, engine="vllm")
    for graphs, requests, kv in itertools.product((True, False), (1, 256), (1000, 850_000)):
        plain = engine_costs(*of, free, graphs).step(requests, kv)
        more = engine_costs(*of, DEFAULT, graphs, "vllm").step(requests, kv) - plain
        assert more == pytest.approx(requests * 29e-6)
        launches = 0.0 if graphs else 64 * DEFAULT.eager_layer_seconds + requests * 29e-6
        assert engine_costs(*of, DEFAULT, graphs).step(requests, kv) == pytest.approx(max(plain, launches))


@given(
    requests=st.integers(1, 40),
    steps=st.floats(0.01, 3000.0),
    floor=st.sampled_from([0.0, 0.02]),
    host=st.sampled_from([0.0, 1e-3]),
)
def test_steps_and_seconds_are_inverse(requests, steps, floor, host):
    """Promise: with launches and with a host, the time of so many steps is that of so many."""
    costs = EngineCosts(overhead=0.004, kv_token=2e-7, request=1e-5, floor=floor, host=host)
    replica = SimulatedReplica(0, costs, 1e9, 64, EngineAdmission(9999, 0.0), 1)
    replica.waiting.extend(SimulatedRequest(i, None, [9000], 100, 0) for i in range(requests))
    replica.fill()
    assert replica.steps_in(replica.seconds_of(steps)) == pytest.approx(steps)
    assert replica.seconds_of(1e-6) == pytest.approx(1e-6 * costs.step(requests, replica.kv), rel=1e-4)


def test_a_group_larger_than_an_engines_places_is_generated():
    """Promise: of AReaL's continuous filling, whose replicas take whole groups."""
    config = asked("1.5B", "H100", 4, 1024, "pipelines=[partial]", "trainer_share=0.5", "max_concurrent=4")
    assert sweep.point(config, "partial", 4, 2, config.steps).figures["tokens_per_second"] > 0


# ---- what is asked -----------------------------------------------------------------------------------------


def test_one_gpu_trains_and_generates_in_turns():
    """Promise: `sync` runs where one replica fits; others need GPUs of their own to train."""
    config = asked("0.5B", "RTX4090", 1, 1024, "pipelines=[sync]")
    assert sweep.point(config, "sync", 1, sweep.split(config, "sync", 1), 3).figures["gpus"] == 1
    with pytest.raises(LaminarError, match=r"^gpus=1: at least 2, one replica of 1 and as many to train$"):
        asked("0.5B", "RTX4090", 1, 1024, "pipelines=[sync,laminar]")
    with pytest.raises(LaminarError, match=r"^gpus=4: at least 8, one replica of 8, which trains too$"):
        asked("72B", "H100", 4, 1024, "pipelines=[sync]")


def test_gpus_of_two_types_do_not_do_both():
    """Promise: with another type to generate, a synchronous run has its GPUs apart too."""
    config = load_simulation("mixed", ["pipelines=[sync,sync_split]", "gpus=[32]", "model=7B", *SHORT])
    rates = [
        sweep.point(config, name, 32, sweep.split(config, name, 32), 3).figures["tokens_per_second"]
        for name in ("sync", "sync_split")
    ]
    assert sweep.split(config, "sync", 32) == 16 and rates[0] == rates[1]


def test_states_of_requests_are_counted_before_anything_is_simulated():
    """Promise: where the layers of linear attention leave no KV cache, the line says which key is too
    high."""
    words = ["pipelines=[laminar]", "tensor_parallel=2"]
    assert asked("Qwen3-Next-80B-A3B", "H200", 8, 16384, *words, "max_concurrent=256")
    with pytest.raises(LaminarError, match="beside the states of max_concurrent=2000 requests"):
        asked("Qwen3-Next-80B-A3B", "H200", 8, 16384, *words, "max_concurrent=2000")


def test_a_division_that_ends_in_nothing_is_not_chosen(monkeypatch):
    """Promise: the search for the best split goes on past it."""
    config, simulated = asked("1.5B", "H100", 8, 1024, "pipelines=[laminar]"), sweep.point

    def one_fails(config, pipeline, gpus, trainer, steps):
        if trainer == 4:
            raise LaminarError("simulation: stuck")
        return simulated(config, pipeline, gpus, trainer, steps)

    monkeypatch.setattr(sweep, "point", one_fails)
    said = list[str]()
    assert sweep.split(config, "laminar", 8, said.append) not in (0, 4)
    assert "4 of 8 GPUs train: simulation: stuck" in said


def test_layers_of_another_kind_are_refused(tmp_path):
    """Promise: a hybrid whose layers are not known is not taken for a model with attention alone; of a model
    that sees too the part that writes is taken."""
    shape = {key: value for key, value in MODELS["Qwen3-8B"].config.items()}
    words = [f"model={tmp_path}", "gpus=[8]", *SHORT]
    for other in ({"hybrid_override_pattern": "M-M*"}, {"layer_types": ["mamba", "full_attention"] * 18}):
        (tmp_path / "config.json").write_text(json.dumps(shape | other))
        with pytest.raises(LaminarError, match="layers of another kind than attention are not simulated"):
            load_simulation("small", words)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "sees_too", "text_config": shape}))
    assert load_simulation("small", words)
    assert MODELS[str(tmp_path)].parameters == MODELS["Qwen3-8B"].parameters
    MODELS.pop(str(tmp_path))
