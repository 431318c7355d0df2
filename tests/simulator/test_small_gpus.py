"""`laminar plan` for small GPUs and few of them: one that trainer and engine share, and adapters."""

import dataclasses

import pytest
import yaml

from helpers.plan_questions import LORA, QUESTIONS, SHORT, pool
from laminar_hpc.config.check import check, memory_need
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.config.memory import USABLE, shared_bytes
from laminar_hpc.config.schema import LoraConfig
from laminar_hpc.simulator import plan_command
from laminar_hpc.simulator.constants import DEFAULT
from laminar_hpc.simulator.divisions import candidates, describe, price
from laminar_hpc.simulator.lora import adapter_values, trained_part
from laminar_hpc.simulator.plan import Plan, RatedCandidate, evaluate, search, setup_of
from laminar_hpc.simulator.run import simulate
from laminar_hpc.simulator.settings import load_plan, load_simulation
from laminar_hpc.simulator.sweep import setup_of as swept
from laminar_hpc.simulator.tables import GPUS, MODELS
from laminar_hpc.simulator.trainer_cost import Layout, job_costs

WORK = ["workload.prompts_per_step=32", "workload.samples_per_prompt=8", "steps=4", "warmup_steps=2"]
FIGURES = {"latency_max": 1.0, "step_seconds": 1.0}  # of a run, for time limits
ADAPTER = LoraConfig(rank=16)


def started(config, candidate, folder):
    """The written run of a division, once its dry run has passed."""
    plan_command.write(config, Plan(RatedCandidate(candidate, 0.0, figures=FIGURES), None, 1, 1), folder)
    return load_config(["--config-dir", str(folder), f"experiment={config.name}", "dry_run=true"])


@pytest.mark.parametrize("name", ["0.5B on one 4090", "3B LoRA on one 3090", "7B LoRA on two 4090"])
def test_small_gpus_get_a_plan_that_starts(name, tmp_path, capsys):
    """Promise: the answer's own file passes its dry run, and asks for the adapter that was planned; on one
    GPU both roles are on device 0 and fit there together."""
    config = load_plan(QUESTIONS[name][0], [*QUESTIONS[name][1:], *WORK])
    found = search(config)
    assert "dry_run=true" in "\n".join(plan_command.write(config, found, tmp_path))
    run = load_config(["--config-dir", str(tmp_path), f"experiment={config.name}", "dry_run=true"])
    assert run.model.lora == config.lora and run.optimizer.lr == (1e-5 if config.lora.rank else 1e-6)
    if config.pools[0].count == 1:
        need = memory_need(run, check(run))
        assert run.trainer.devices == run.rollout.devices == [0]
        assert shared_bytes(need, 1) < USABLE * GPUS[config.pools[0].gpu].memory
        assert "share" in plan_command.expectations(config, found)[0]
        assert found.best.price == price(config, found.best.candidate) == GPUS[config.pools[0].gpu].price


@pytest.mark.slow
@pytest.mark.parametrize("name", QUESTIONS)
def test_every_division_of_twenty_questions_starts(name, tmp_path):
    """Promise: whichever division of them is the best, its file passes the dry run."""
    config = load_plan(QUESTIONS[name][0], QUESTIONS[name][1:])
    divisions = list(candidates(config))
    assert divisions
    for number, candidate in enumerate(divisions[:: max(1, len(divisions) // 40)]):
        run = started(config, candidate, tmp_path / str(number))
        assert run.trainer.ranks == candidate.trainer_gpus, describe(config, candidate)


def test_what_would_fit_fits():
    """Promise: a refusal names an adapter, a model and a number of GPUs, each of which is planned."""
    words = ["model=1.5B", *WORK]
    with pytest.raises(LaminarError, match=r"fits: lora.rank=16, or model=0.5B, or 3 RTX4090$"):
        load_plan("node", [*words, pool("RTX4090", 1)])
    for change in (["lora.rank=16"], ["model=0.5B"]):
        assert list(candidates(load_plan("node", [*words, pool("RTX4090", 1), *change])))
    assert list(candidates(load_plan("node", [*words, pool("RTX4090", 3)])))
    assert not list(candidates(load_plan("node", [*words, pool("RTX4090", 2)])))


def test_adapters_of_experts_are_refused():
    """Promise: as the run refuses it, by the key that was given."""
    for load, words in ((load_plan, ["node"]), (load_simulation, ["small"])):
        with pytest.raises(LaminarError, match=r"^(plan: )?lora.rank=16: a mixture of experts"):
            load(words[0], ["model=Qwen3-30B-A3B", "lora.rank=16"])


@pytest.mark.parametrize("staleness", [0, 3])
def test_one_gpu_does_the_work_of_both(staleness):
    """Promise: a step on a shared GPU takes what training and generation take together, whether they
    overlap or one waits for the other."""
    config = load_plan("node", ["model=0.5B", pool("RTX4090", 1), *WORK, f"max_staleness={staleness}"])
    candidate = next(candidates(config))
    alone = simulate(setup_of(config, candidate)).figures  # each with a GPU of its own
    busy = 2.0 - alone["trainer_wait_share"] - alone["rollout_idle_share"]
    shared = evaluate(config, candidate)["step_seconds"]
    assert shared == pytest.approx(busy * alone["step_seconds"], rel=0.15)


@pytest.mark.parametrize(("model", "gpu"), [("7B", "H100"), ("7B", "RTX4090"), ("32B", "H800")])
def test_an_adapter_spares_the_weights_gradients(model, gpu):
    """Promise: of three products two are left, and the adapter's own take less than the third; the log-prob
    pass is a little longer, and attention as long."""
    each, layout = MODELS[model], Layout(1, 1, 1, recompute=0.0)
    whole, adapted = (
        job_costs(each, GPUS[gpu], 1, dataclasses.replace(layout, lora=lora), 1, 4096, DEFAULT)
        for lora in (LoraConfig(), ADAPTER)
    )
    assert 2 / 3 < adapted.train_token / whole.train_token < 0.9
    assert 1.0 < adapted.logprob_token / whole.logprob_token < 1.35
    assert adapted.train_attention == whole.train_attention
    assert adapted.publish_stall < 0.01 * whole.publish_stall and adapted.chain < 0.01 * whole.chain


def test_an_adapters_values_are_counted():
    """7B, with 3,584 wide layers, 4 KV heads of 128 and 18,944 of feed-forward: queries, keys and values are
    one layer of 4,608 outputs, gate and up one of 37,888."""
    inputs = 3584 + 3584 + 3584 + 18944
    outputs = 4608 + 3584 + 37888 + 3584
    assert adapter_values(MODELS["7B"], ADAPTER) == (
        28 * (inputs + 2 * outputs),
        28 * (3 * inputs + 2 * outputs),
    )
    attention = LoraConfig(rank=16, targets="attention")
    assert adapter_values(MODELS["7B"], attention)[0] == 28 * (2 * 3584 + 2 * (4608 + 3584))
    assert trained_part(MODELS["7B"], ADAPTER).parameters == 40_370_176


def test_an_adapter_is_simulated():
    """Promise: pulls and global synchronisation are of the adapter, steps of engines are longer, and a sweep
    with it has more tokens/s where the trainer is the narrower side."""
    words = ["model=7B", "gpus=[16]", "trainer_share=0.25", "draws=0", "pipelines=[laminar]", *WORK]
    plain, adapted = (
        swept(load_simulation("small", [*words, *more]), "versions", 16, 4, 4) for more in ([], LORA)
    )
    pulls = [run.engines[0].costs.pull for run in (plain, adapted)]
    assert pulls[1] < 0.6 * pulls[0] and pulls[1] >= DEFAULT.pull_overhead
    assert adapted.engines[0].costs.global_sync < plain.engines[0].costs.global_sync
    assert adapted.engines[0].costs.step(8, 0) > plain.engines[0].costs.step(8, 0)
    assert adapted.engines[0].costs.kv_token == plain.engines[0].costs.kv_token
    rates = [simulate(run).figures["tokens_per_second"] for run in (plain, adapted)]
    assert rates[1] > rates[0]


def test_the_adapter_stands_in_the_file(tmp_path):
    """Promise: rank, and of the others those that are not by default."""
    words = [*WORK, *SHORT, pool("RTX4090", 2), "model=3B", "lora.rank=8", "lora.targets=attention"]
    config = load_plan("node", words)
    started(config, next(candidates(config)), tmp_path)
    text = (tmp_path / "experiment" / "node.yaml").read_text()
    assert yaml.safe_load(text)["model"]["lora"] == {"rank": 8, "targets": "attention"}
