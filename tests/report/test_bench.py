"""The benches' own arithmetic, on synthetic runs; the benches themselves run the real system and are started
by hand."""

import ast
import importlib
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import synthetic
from helpers.paths import BENCH
from laminar_hpc.config.load import load_config
from laminar_hpc.machine.observability.trace import TraceSpan
from laminar_hpc.report import rundata
from laminar_hpc.store.store import Store


@pytest.fixture
def load(monkeypatch):
    """Imports a bench as its own command line would."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module


def test_waits_are_the_distribution_promised(load):
    """Promise: log-normal with median 0.2 s and 99th percentile 3 s, the same for the same text, never beyond
    the reward's time limit."""
    rewards = load("rewards")
    waits = [rewards.wait_seconds("1+1=", ">2", call) for call in range(20_000)]
    cuts = statistics.quantiles(waits, n=100)
    assert cuts[49] == pytest.approx(0.2, rel=0.05) and cuts[98] == pytest.approx(3.0, rel=0.1)
    assert max(waits) < rewards.TIMEOUT_SECONDS / 1.5
    assert waits[3] == rewards.wait_seconds("1+1=", ">2", 3) != rewards.wait_seconds("1+1=", ">3", 3)


async def test_the_reward_itself_is_unchanged(load, monkeypatch):
    """Promise: waiting changes no score."""
    rewards = load("rewards")
    monkeypatch.setattr(rewards, "MEDIAN_SECONDS", 1e-3)
    assert (await rewards.waiting(prompt="1+1=", response=">2", row={"answer": "2"}))["reward"] == 1.0
    assert (await rewards.waiting(prompt="1+1=", response=">3", row={"answer": "2"}))["reward"] == 0.0


def test_seconds_per_step_add_up(load, finished):
    """Promise: where the time goes is measured over the same window as the throughput, and work never exceeds
    the whole."""
    common = load("common")
    run = rundata.load(finished[0])
    found = common.seconds_per_step(run, 2)
    assert 0 < found["work"] <= found["all"] * (1 + 1e-9)
    assert found["trainer train"] + found["trainer wait"] + found["trainer publish"] == pytest.approx(
        found["all"], rel=0.1
    )
    written = finished[1].steps
    tokens = sum(step["prompt_tokens"] + step["response_tokens"] for step in written[2:])
    assert common.tokens_per_second(run, 2) == pytest.approx(
        tokens / (written[-1]["time"] - written[1]["time"])
    )


def test_a_run_that_never_reaches_the_goal(load, tmp_path):
    """Promise: no time to accuracy is invented for a run that did not get there."""
    synthetic.write(tmp_path / "run", steps=4)
    assert load("common").seconds_to_accuracy(rundata.load(tmp_path / "run")) is None


def test_results_are_one_table_and_one_file(load, tmp_path, capsys):
    """Promise: --json holds figures, rows and the machine; the table has a column per name, a dash where
    there is no value."""
    common = load("common")
    options = common.parser("A bench.").parse_args(
        ["--json", str(tmp_path / "out.json"), "--repeats", "2", "seed=3"]
    )
    assert options.repeats == 2 and options.overrides == ["seed=3"]
    common.finish(
        options, {"gain": 0.5, "speed": None}, [{"a": 1.0, "b": None}, {"a": 12.5, "b": "x"}], ("a", "b")
    )
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["figures"] == {"gain": 0.5, "speed": None} and len(written["rows"]) == 2
    assert {"cpu", "cores", "ram_gb", "torch"} <= written["machine"].keys()
    assert capsys.readouterr().out.splitlines()[:3] == ["     a  b", " 1.000  -", "12.500  x"]


def test_a_run_that_fails_ends_the_bench_with_its_words(load, tmp_path):
    """Promise: a failing run is not a sample; the bench ends with what the run said."""
    common = load("common")
    options = common.parser("A bench.").parse_args([])
    with pytest.raises(SystemExit, match=r"broken failed \(2\); it said last:\n.*no-such-pipeline"):
        common.train(options, tmp_path, "broken", {"pipeline": "no-such-pipeline"})


def test_the_model_made_on_the_fly_is_one_that_transformers_reads(load, tmp_path, monkeypatch):
    """Promise: the half-billion bench's directory has every tensor of a Qwen2 with a tied head, with sane
    values, and nothing else."""
    from laminar_hpc.config.check import count_parameters
    from laminar_hpc.config.directories import examples_directory
    from laminar_hpc.machine.compat.torchvision import declare_schemas

    declare_schemas()
    from transformers import Qwen2ForCausalLM

    bench = load("half_billion")
    small = {"hidden_size": 28, "intermediate_size": 32, "vocab_size": 40}
    monkeypatch.setattr(bench, "SHAPE", bench.SHAPE | small)
    manifest = bench.make_model(tmp_path / "model", Path(examples_directory("arithmetic/base")), layers=2)
    model, info = Qwen2ForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (
        manifest.data_bytes == 2 * count_parameters(config) == 2 * sum(p.numel() for p in model.parameters())
    )
    assert float(model.model.norm.weight.detach().mean()) == 1.0
    assert 0.01 < float(model.model.embed_tokens.weight.detach().float().std()) < 0.03


def test_the_stock_engine_has_none_of_our_hooks(load, tmp_path):
    """Promise: what is compared with is SGLang as it comes; the port's variable is what our plugin is
    switched on by."""
    from laminar_hpc.engine.sglang.plugin.protocol import SOCKET_VARIABLE
    from laminar_hpc.engine.sglang.process import EngineProcess

    for kind, hooked in ((EngineProcess, True), (load("engine").StockProcess, False)):
        process = kind("engine", tmp_path / "log", 1)
        process.folder = tmp_path
        assert (SOCKET_VARIABLE in process.environment()) is hooked


def test_the_math_bench_counts_what_agrees(load, tmp_path, monkeypatch):
    """Promise: its figures are the share of pairs with the reward that is right, calls that raised, and a
    time, for the reward and for math-verify alone."""
    pairs = [("\\$36", "\\boxed{36}", 1.0), ("7", "\\boxed{8}", 0.0), ("7", "\\boxed{7}", 0.0)]
    lines = [json.dumps({"answer": a, "response": r, "right": right}) for a, r, right in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    words = ["--pairs", str(tmp_path / "pairs.jsonl"), "--json", str(tmp_path / "out.json")]
    monkeypatch.setattr(sys, "argv", ["math_reward.py", *words])
    load("math_reward").main()
    figures = json.loads((tmp_path / "out.json").read_text())["figures"]
    assert figures["agree"] == pytest.approx(2 / 3) and figures["raised"] == 0
    assert figures["seconds_per_1000"] > 0 and "math_verify_agree" in figures


def test_the_kernels_bench_says_that_it_needs_a_gpu():
    """Promise: without one, a single line and a non-zero exit; no figure is made up."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(BENCH / "kernels.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines() == [
        "bench/kernels.py needs an NVIDIA GPU, and torch sees none here; run it on a machine that has one, "
        "or with --device cpu"
    ]


def test_what_the_benches_set_is_in_the_configuration(load):
    """Promise: a key renamed does not first show itself when a bench is run."""
    half_billion, attribution = load("half_billion"), load("attribution")
    repack = {
        f"pipeline.{key}": value
        for _, changes in attribution.LADDER.values()
        for key, value in changes.items()
    }
    for settings in (half_billion.SETTINGS, attribution.REAL | attribution.REAL_REPACK | repack):
        config = load_config(["experiment=demo", *(f"{key}={value}" for key, value in settings.items())])
        assert config.evaluation.files == []


def test_every_kill_window_is_a_function_of_the_product(load):
    """Promise: a function renamed does not leave a window in which nobody dies."""
    package = BENCH.parent / "src"
    for name, (_, module, function, _) in load("kill_windows").WINDOWS.items():
        owner, _, last = function.rpartition(".")
        body = ast.parse((package / "laminar_hpc" / f"{module.replace('.', '/')}.py").read_text()).body
        if owner:
            (body,) = (each.body for each in body if isinstance(each, ast.ClassDef) and each.name == owner)
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        assert any(isinstance(each, kinds) and each.name == last for each in body), name


def test_faults_are_read(load):
    """Promise: how, how long and whom a word names; what names none is refused with the word."""
    read = load("faults").Fault.read
    found = [read(word) for word in ("kill-relay", "stop-trainer", "stop60-engine")]
    assert [(f.how, f.seconds, f.target) for f in found] == [
        ("kill", 13.0, "relay"),
        ("stop", 13.0, "trainer"),
        ("stop", 60.0, "engine"),
    ]
    for word in ("kill5-relay", "stop-trainer generation", "pause-relay"):
        with pytest.raises(ValueError, match=word):
            read(word)


def test_what_the_others_do_meanwhile(load, tmp_path):
    """Promise: shares are over the same activity before, and none is made up where nothing was measured."""
    outages, start = load("outages"), synthetic.EPOCH
    store = Store(tmp_path)
    for group, granted in ((1, start), (2, start + 50)):
        store.rows.add_group(group, 0, 0, 0, group, granted)
    store.commit()
    store.close()
    spans = {
        "rollout0": [
            TraceSpan("generate", start, start + 10, {"tokens": 100}),
            TraceSpan("generate", start + 50, start + 70, {"tokens": 160}),
        ],
        "trainer0": [
            TraceSpan("train", start + at, start + at + long, {"step": step})
            for step, at, long in ((0, 20, 2), (1, 30, 2), (2, 61, 3))
        ],
    }
    steps = [{"step": n, "prompt_tokens": 50, "response_tokens": 50, "time": start + n} for n in (1, 2, 3)]
    config = {"algorithm": {"prompts_per_step": 4}, "pipeline": {"max_staleness": 1}}
    run = rundata.Run(
        tmp_path,
        config,
        [rundata.RunLaunch(start, start, None, None, {}, steps=steps)],
        [],
        0,
        {"pull": [{"time": start, "step": 0}]},
        spans,
        [],
    )
    assert outages.rollouts_share(run, start + 60, start + 90) == pytest.approx(0.8)
    assert outages.rollouts_share(run, start + 20, start + 30) is None
    assert outages.trainer_share(run, start + 60, start + 70) == pytest.approx(1.5)
    assert outages.trainer_share(run, start + 90, start + 99) is None
    assert outages.groups_left(run, start + 5, start + 40) == 4 * 2 - 1
    assert outages.groups_left(run, start + 15, start + 40) is None


def test_the_shortest_step_that_a_bound_allows(load, finished):
    """Promise: work that cannot be shared out, or b + 1 steps for a trajectory's whole way, whichever is
    longer; waits that differ cost more than their mean; and scoring counts from a local batch's last token to
    its last score."""
    bench, run = load("async_vs_sync"), rundata.load(finished[0])
    run.config["pipeline"]["max_staleness"] = 2
    seconds = {"trainer train": 3.0, "trainer publish": 1.0, "rollout generate": 2.0, "rollout pull": 0.5}

    def shortest(*scoring: float) -> float:
        return bench.shortest_step(run, seconds, [*scoring] * (3000 // len(scoring)))

    assert shortest(1.0) == pytest.approx(4.0, rel=0.001)
    assert shortest(8.5) == pytest.approx(5.0, rel=0.001)
    assert shortest(0.0, 0.0, 25.5) > 5.5
    batches = {t.weight_id for t in run.consumed}
    ends = {i: max(t.time_finished for t in run.consumed if t.weight_id == i) for i in batches}
    scored = {i: max(t.time_scored for t in run.consumed if t.weight_id == i) for i in batches}
    assert bench.longest_scores(run) == pytest.approx([scored[i] - ends[i] for i in sorted(batches)])
