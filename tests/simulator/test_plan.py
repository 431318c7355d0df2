"""`laminar plan`: the search, and files that `laminar train` takes as they are, on the very GPUs that were
planned."""

import json
import re

import pytest
import yaml

from laminar_hpc.config.check import check, derive
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.config.memory import USABLE
from laminar_hpc.launch import cli
from laminar_hpc.launch.ssh.hosts import Host, assign
from laminar_hpc.simulator import plan, plan_command
from laminar_hpc.simulator.divisions import (
    Candidate,
    candidates,
    kv_cache_tokens,
    repack_of,
    trainer_of,
    trainer_settings,
)
from laminar_hpc.simulator.plan import evaluate, planned_lengths, rates, search
from laminar_hpc.simulator.plan_command import host_lines, submitted
from laminar_hpc.simulator.plan_files import experiment
from laminar_hpc.simulator.settings import TRAINED, load_plan
from laminar_hpc.simulator.tables import GPUS, MODELS

SMALL = [
    "workload.prompts_per_step=32",
    "workload.samples_per_prompt=4",
    "workload.updates_per_step=4",
    "steps=3",
    "warmup_steps=1",
]
MIXED = "pools=[{gpu: H800, count: 16}, {gpu: H20, count: 8}]"
GB200 = "pools=[{gpu: GB200, count: 16}]"
THREE = "pools=[{gpu: H800, count: 8}, {gpu: A100, count: 16}, {gpu: L40S, count: 4}]"
QUESTIONS = {
    "one node": ["node", *SMALL],
    "L40S": ["node", *SMALL, "pools=[{gpu: L40S, count: 16}]", "workload.max_response_tokens=4096"],
    "mixed": ["mixed", *SMALL],
    "three pools": ["mixed", *SMALL, "model=7B", THREE],
    "cheapest": ["cheapest", *SMALL, "trainer_busy=0.1"],
    "32B on 64": ["mixed", *SMALL, "pools=[{gpu: H100, count: 64}]"],
    "72B on 128 + 64": [
        "mixed",
        *SMALL,
        "model=72B",
        "pools=[{gpu: H800, count: 128}, {gpu: H20, count: 64}]",
    ],
    "experts": ["node", *SMALL, "model=Qwen3-30B-A3B", "pools=[{gpu: H200, count: 16}]"],
    "long responses": [
        "mixed",
        *SMALL,
        "model=32B",
        "workload.max_response_tokens=124000",
        "workload.mean_response_tokens=20000",
        "pools=[{gpu: H100, count: 64}]",
    ],
}
MANY_EXPERTS = ["mixed", *SMALL, "model=Qwen3-235B-A22B", "pools=[{gpu: H200, count: 72}]"]


@pytest.mark.parametrize(
    "words",
    [*QUESTIONS.values(), pytest.param(MANY_EXPERTS, marks=pytest.mark.slow)],
    ids=[*QUESTIONS, "many experts"],
)
def test_the_written_experiment_passes_a_dry_run_on_its_own_gpus(words, tmp_path, monkeypatch):
    """Promise: what is written starts what was simulated: as many trainer ranks and replicas, the same KV
    cache, layout and repack, and it fits the memory of the planned GPUs."""
    monkeypatch.setattr(plan, "_SIMULATED", 2)  # any plan will do
    config = load_plan(words[0], words[1:])
    found = plan.search(config)
    printed, best = "\n".join(plan_command.write(config, found, tmp_path)), found.best.candidate
    train = ["--config-dir", str(tmp_path), f"experiment={config.name}", "dry_run=true"]
    assert f"laminar train --config-dir {tmp_path} experiment={config.name}" in printed
    assert cli.run(["train", *train]) == 0
    run = load_config(train)
    derived = check(run)
    assert derived.trainer_ranks == best.trainer_gpus and derived.rollout_ranks == best.replicas
    assert derived.rollout_ranks * run.rollout.tensor_parallel == sum(gpus for _, gpus, _ in best.rollouts)
    assert run.trainer == trainer_settings(config, best)
    assert (
        run.rollout.kv_cache_tokens == kv_cache_tokens(config, best)
        and run.rollout.max_concurrent == config.max_concurrent
    )
    assert (run.pipeline.repack, run.pipeline.max_staleness) == (
        repack_of(config, best),
        config.max_staleness,
    )
    assert derived.trainer_gpu_memory_bytes < USABLE * GPUS[config.pools[best.trainer_pool].gpu].memory
    assert all(
        derived.rollout_gpu_memory_bytes < USABLE * GPUS[config.pools[pool].gpu].memory
        for pool, *_ in best.rollouts
    )
    with pytest.raises(
        LaminarError, match=r"rollout needs .* GB on a GPU, .* can be used: lower rollout.kv_cache_tokens"
    ):
        check(load_config([*train, f"rollout.kv_cache_tokens={2 * run.rollout.kv_cache_tokens}"]))


def test_a_plan_searches_chunks_experts_and_shared_micro_batches():
    """Promise: a layout has what its model and machines ask for: chunks of each stage where there are stages,
    experts over several GPUs, micro-batches over several where trajectories are long."""
    asked = {
        "72B on 128 + 64": ("virtual_stages", 128, "of 5 chunks"),
        "experts": ("expert_parallel", 8, "EP 8"),
        "long responses": ("context_parallel", 32, "CP "),
    }
    for question, (key, gpus, said) in asked.items():
        name, *words = QUESTIONS[question]
        config = load_plan(name, words)
        found = trainer_of(config, 0, gpus)
        assert found is not None and getattr(found, key) > 1, question
        text = experiment(config, Candidate(0, gpus, ((0, 8, 4),)), {"latency_max": 1.0, "step_seconds": 1.0})
        assert yaml.safe_load(text)["trainer"][key] == getattr(found, key)
        assert said in plan_command.layout_text(found)


@pytest.mark.parametrize(
    "model", [name for name, model in MODELS.items() if model.config["model_type"] in TRAINED]
)
def test_every_model_that_is_planned_is_known_to_a_dry_run(model, tmp_path):
    """Promise: no model of the tables that laminar trains has to be on this machine to be planned."""
    config = load_plan(
        "mixed", [*SMALL, f"model={model}", "pools=[{gpu: B200, count: 256}]", f"name=p{model}"]
    )
    best = next(candidates(config))
    found = plan.Plan(
        plan.RatedCandidate(best, 0.0, figures={"latency_max": 1.0, "step_seconds": 1.0}), None, 1, 1
    )
    assert "dry_run=true" in "\n".join(plan_command.write(config, found, tmp_path))


@pytest.mark.parametrize(("gpus", "splits"), [(8, {4, 6, 7}), (6, {4}), (4, set())])
def test_one_machine_is_divided(gpus, splits):
    """Promise: trainer and rollouts share the only machine, at every split that the trainer's memory
    allows."""
    config = load_plan("node", [*SMALL, f"pools=[{{gpu: H100, count: {gpus}}}]"])
    assert {candidate.trainer_gpus for candidate in candidates(config)} == splits
    if not splits:
        with pytest.raises(
            LaminarError,
            match=r"fits on no division of 4 H100: it needs at least 4 H100 to train and 1 H100 beside "
            "to generate; add GPUs, take a smaller model",
        ):
            search(config)


def test_a_plan_of_one_replica_moves_nothing():
    """Promise: its experiment says repack: off, which YAML alone would read as false."""
    config = load_plan("node", SMALL)
    text = experiment(config, Candidate(0, 4, ((0, 4, 4),)), {"latency_max": 1.0, "step_seconds": 1.0})
    assert yaml.safe_load(text)["pipeline"]["repack"] == "off"


@pytest.mark.parametrize("words", [["mixed", MIXED], ["node", GB200], ["mixed", THREE, "model=7B"]])
def test_the_machines_of_a_plan_hold_all_of_it(words):
    """Promise: `laminar launch` starts every trainer rank and every replica on the machines that the plan
    names, none of which has more GPUs than the question gave it."""
    config, run = (
        load_plan(*words[:1], [*SMALL, *words[1:]]),
        load_config(["experiment=demo", "dry_run=true"]),
    )
    seen = set()
    for candidate in candidates(config):
        t = trainer_settings(config, candidate)
        for key in ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel"):
            setattr(run.trainer, key, getattr(t, key))
        run.rollout.replicas, run.rollout.tensor_parallel = candidate.replicas, candidate.tensor_parallel
        named = re.findall(r"(\d+) machines? of (\w+) with gpus=(\d+)", host_lines(config, candidate))
        hosts = [Host(f"{gpu}-{i}", int(size)) for count, gpu, size in named for i in range(int(count))]
        given = {pool.gpu: pool.count for pool in config.pools}
        assert all(int(count) * int(size) <= given[gpu] for count, gpu, size in named)
        parts = assign(run, derive(run), hosts)
        assert sum(part.replicas for part in parts) == candidate.replicas
        trainers = [part for part in parts if part.trainers]
        each = candidate.trainer_gpus // len(trainers)
        assert each * len(trainers) == candidate.trainer_gpus
        assert {part.host.name.partition("-")[0] for part in trainers} == {
            config.pools[candidate.trainer_pool].gpu
        }
        for part in parts:
            used = part.replicas * candidate.tensor_parallel + each * (part.trainers is not None)
            assert used <= part.host.gpus
            seen.add((part.trainers is not None, part.replicas > 0))
    assert GB200 not in words or (True, True) in seen


def test_a_plan_says_what_slurm_needs():
    """Promise: of one kind of GPU the nodes' size, of several their names; nothing where nodes differ in
    size."""
    for pools, expected in (
        (MIXED, "--apart --gpus-per-node=8 --trainer='--constraint=H800' --rollouts='--constraint=H20'"),
        (GB200, "--apart --gpus-per-node=4"),
        ("pools=[{gpu: H800, count: 16}, {gpu: GB200, count: 8}]", ""),
    ):
        config = load_plan("mixed", [*SMALL, pools])
        last = len(config.pools) - 1
        candidate = next(
            each
            for each in candidates(config)
            if each.trainer_pool == 0 and [pool for pool, *_ in each.rollouts] == [last]
        )
        assert submitted(config, candidate) == expected


def test_plan_is_as_good_as_every_candidate():
    """The pruned search finds the best of all candidates simulated one by one; the bound is never
    exceeded."""
    config = load_plan("mixed", [*SMALL, "steps=4", MIXED])
    found = search(config)
    lengths, rated = planned_lengths(config), {}
    for candidate in candidates(config):
        rated[candidate] = evaluate(config, candidate)["tokens_per_second"]
        assert rated[candidate] <= rates(config, candidate, lengths)[0]
        assert len({tp for _, _, tp in candidate.rollouts}) == 1, (
            "one experiment file has one rollout.tensor_parallel"
        )
    assert (
        found.best.score == max(rated.values())
        and found.simulated <= found.candidates == len(rated)
        and found.ended
    )


def test_plan_is_as_good_where_lengths_change_over_the_run(tmp_path):
    """Promise: what is simulated is what the bound is of: responses that get shorter are generated faster."""
    file = tmp_path / "lengths.jsonl"
    file.write_text("[8000]\n" * 256 + "[300]\n" * 1000)
    work = ["workload.prompts_per_step=64", "workload.samples_per_prompt=8", f"workload.lengths_file={file}"]
    config = load_plan("node", [*work, "steps=12", "warmup_steps=8"])
    found = search(config)
    assert found.best.score == max(
        evaluate(config, candidate)["tokens_per_second"] for candidate in candidates(config)
    )


def test_an_answer_in_json_is_json(tmp_path, capsys):
    """Promise: also where the runner-up is none, as it is too slow."""
    words = ["cheapest", *SMALL, "model=7B", "trainer_busy=0", f"out_dir={tmp_path}"]
    words.append("pools=[{gpu: H800, count: 16}]")
    fastest = search(load_plan(words[0], [*words[1:], "objective=throughput"])).best.figures
    assert cli.run(["plan", *words, f"least_throughput={fastest['tokens_per_second']}", "--json"]) == 0

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    answer = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert answer["best"]["score"] > 0 and answer["runner_up"]["score"] is None


def test_preemptible_gpus_never_train_and_the_cheapest_set_keeps_the_trainer_busy():
    """Preemptible GPUs never train, and the cheapest set keeps the trainer as busy as asked."""
    config = load_plan(
        "cheapest",
        [
            *SMALL,
            "workload.mean_response_tokens=6000",
            "trainer_busy=0.2",
            "pools=[{gpu: H800, count: 16}, {gpu: H20, count: 16, preemptible: true, mtbf_hours: 1}]",
        ],
    )
    assert {candidate.trainer_pool for candidate in candidates(config)} == {0}
    found = search(config)
    assert found.best.figures["trainer_wait_share"] <= 0.8
    with pytest.raises(LaminarError, match="keeps the trainer busy"):
        search(load_plan("cheapest", [*SMALL, "trainer_busy=1.0", "pools=[{gpu: H800, count: 24}]"]))


def test_the_cheapest_that_is_fast_enough():
    """Promise: objective=cost with least_throughput buys more GPUs where fewer are too slow, and refuses what
    no candidate reaches."""
    words = ["cheapest", *SMALL, "workload.samples_per_prompt=16", "trainer_busy=0"]
    words.append("pools=[{gpu: H800, count: 32}]")
    cheap = search(load_plan(words[0], words[1:])).best
    rate = cheap.figures["tokens_per_second"]
    fast = search(load_plan(words[0], [*words[1:], f"least_throughput={1.02 * rate}"])).best
    assert fast.figures["tokens_per_second"] >= 1.02 * rate and fast.price >= cheap.price
    with pytest.raises(
        LaminarError, match=r"reaches 1,000,000,000 tokens/s; lower trainer_busy or least_thr"
    ):
        search(load_plan(words[0], [*words[1:], "least_throughput=1e9"]))


def test_a_model_that_fits_nowhere_is_refused():
    """A model that fits on no pool, or on preemptible ones only, is refused with what to add."""
    small = ["model=72B", "pools=[{gpu: L40S, count: 2}]"]  # which would train on more of them
    with pytest.raises(LaminarError, match=r"fits on no pool to generate \(2 L40S\); add GPUs"):
        search(load_plan("mixed", small))
    with pytest.raises(LaminarError, match=r"fits on no pool to generate \(2 L40S\); add GPUs"):
        search(load_plan("mixed", [*small, "workload.max_response_tokens=100000"]))  # in shared micro-batches
    with pytest.raises(LaminarError, match=r"fits on no pool to train or generate \(2 L40S\); add GPUs"):
        search(load_plan("mixed", ["model=Llama-3.1-405B", small[1]]))
    with pytest.raises(LaminarError, match="fits on no pool that is not preemptible to train"):
        search(load_plan("node", ["pools=[{gpu: H100, count: 8, preemptible: true}]"]))
    assert Candidate(0, 8, ((0, 8, 4),)).replicas == 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["max_staleness=-1"], "max_staleness=-1: must be at least 0"),
        (
            ["mtbf_hours=0"],
            r"mtbf_hours: GPUs are named in pools, for example 'pools=\[{gpu: H100, count: 4}\]'",
        ),
        (
            ["gpus=4"],
            r"gpus: GPUs are named in pools, for example 'pools=\[{gpu: H100, count: 4}\]', with",
        ),
        (["pools=[{gpu: H100, count: 8, mtbf_hours: 0}]"], r"pools\[0\].mtbf_hours=0: must be at least 0.25"),
        (["pools=[{gpu: H100, count: 8, price: -1}]"], r"pools\[0\].price=-1: must be above 0"),
        (["pools=[{gpu: H100, count: 8, mtbf: 3}]"], "with the keys gpu, count, price, preemptible, mtbf_h"),
        (["pools=[H100]"], r"must be a list of tables, written \[\{KEY: value\}\]"),
        (["pools=[]"], "pools is empty: name at least one"),
        (["pools=[{gpu: H100, count: 1}]"], "one GPU cannot be divided"),
    ],
)
def test_a_bad_question_is_refused_in_one_line(words, text, tmp_path):
    """Promise: nothing is simulated, the line names the key and what it may be."""
    with pytest.raises(LaminarError, match=text) as refused:
        cli.run(["plan", "node", f"out_dir={tmp_path}", *words])
    assert len(str(refused.value).splitlines()) == 1 and not list(tmp_path.iterdir())


def test_an_experiment_that_would_be_refused_is_not_left_behind(tmp_path, monkeypatch):
    """Promise: no file stays that a run would refuse; the planner says why."""
    monkeypatch.setattr(plan_command, "experiment", lambda *_: "# @package _global_\nsteps: -1\n")
    with pytest.raises(LaminarError, match="its experiment is refused"):
        cli.run(["plan", "node", *SMALL, f"out_dir={tmp_path}"])
    assert not list(tmp_path.rglob("*.yaml"))
