"""What a user writes wrongly: every mistake of a command line at once, a line each, that says what to write
instead."""

import dataclasses
import time
from pathlib import Path

import pytest

from helpers.refusals import refusal
from laminar_hpc.config.bounds import Bounds, Choices, all_fields, allowed, plain_type, wrong_values
from laminar_hpc.config.check import check, warnings
from laminar_hpc.config.errors import LaminarError, Refused
from laminar_hpc.config.load import load_config, read_config
from laminar_hpc.config.schema import RENAMED, RunConfig
from laminar_hpc.engine.sglang import speculation
from laminar_hpc.engine.sglang.command_line import argument_names, arguments, refused_arguments
from laminar_hpc.simulator.emulation.constants import unknown_constants
from laminar_hpc.simulator.tables import GPUS, MODELS

NOT_OURS = (
    "full_key",
    "object_type",
    "LexerNoViableAlt",
    "mismatched input",
    "Error",
    "ConfigKey",
    "Traceback",
    "DictConfig",
)


# One value each, all of them on one command line.
VALUES = {
    "algorithm.minibatches_per_step=0": "must be at least 1; the default is 2",
    "optimizer.lr=-1": "must be above 0 and at most 1; the default is 0.0001",
    "optimizer.weight_decay=nan": "must be a finite number, at least 0 and at most 1; the default is 0.0",
    "optimizer.beta1=1": "must be at least 0 and below 1; the default is 0.9",
    "optimizer.beta2=-0.1": "must be at least 0 and below 1",
    "optimizer.eps=0": "must be above 0",
    "optimizer.clip_grad=inf": "must be a finite number, at least 0",
    "optimizer.warmup_steps=-1": "must be at least 0",
    "optimizer.max_skipped_updates=-1": "must be at least 0",
    "trainer.threads=0": "must be at least 1 and at most 1,024",
    "relay.threads=0": "must be at least 1",
    "rollout.threads=2.5": "must be a whole number, at least 1",
    "relay.chunk_megabytes=0": "must be at least 1",
    "relay.publish_timeout_seconds=0": "must be above 0 and at most 1,000,000",
    "reward.timeout_seconds=0": "must be above 0",
    "cluster.stop_timeout_seconds=-5": "must be above 0",
    "cluster.heartbeat_timeout_seconds=1e300": "must be above 0 and at most 1,000,000",
    "reward.workers=0": "must be at least 1",
    "reward.score_on_failure=1e300": "must be at least -1,000,000 and at most 1,000,000",
    "seed=-1": "must be at least 0; the default is 0",
    "steps=99999999999": "must be at most 2,147,483,647; the default is 60",
    "cluster.port=70000": "must be at least 0 and at most 65,535",
    "first_index=-1": "must be at least 0",
    "pipeline.max_staleness=-1": "must be at least 0, auto or auto:N, or null; the default is 2",
    "pipeline.local_batch_groups=0": "must be at least 1, or null",
    "evaluation.samples=-1": "must be at least 0",
    "checkpoint.keep=0": "must be at least 1",
    "rollout.replicas=2000000000": "must be at least 1 and at most 65,536",
    "rollout.replicas_min=0": "must be at least 1 and at most 65,536, or null",
    "trainer.devices=[-1]": "trainer.devices=-1: must be at least 0, or null",
    "rollout.devices=[a]": "must be a list of whole numbers, written [a,b]",
    "trainer.data_parallel=two": "must be a whole number, at least 1",
    "trainer.distributed_optimizer=maybe": "must be true or false; the default is false",
    "rollout.tensor_parallel=1,2": "must be a whole number, at least 1",
    "rollout.max_concurrent=null": "must be a whole number, at least 1",
    "sampling.temperature=0": "must be above 0",
    "emulation.constants.prefill_mfu=high": "must be a number, at least 0",
    "algorithm.loss=clp": "use one of clip, gspo, cispo, aipo, dppo, sapo, gmpo, or MODULE.FUNCTION "
    "(did you mean clip?)",
    "algorithm.advantage=gea": "use one of grpo, rloo, reinforce_pp, reinforce_pp_baseline",
    "model.dtype=bf16": "use one of float32, bfloat16",
    "resume=maybe": "use one of auto, never",
    "pipeline.refresh=drain": "use one of drained, barrier, interrupt, versions (did you mean drained?)",
    "observability.wandb=ofline": "(did you mean offline?)",
    "stepz=1": "no such key (did you mean steps?); the keys are in docs/configuration.md",
    "lr=1e-5": "no such key (did you mean critic.lr or optimizer.lr?)",
    "trainer.replicas=2": "no such key (did you mean rollout.replicas?)",
    "optimizer.learningrate=1": "no such key; those of optimizer are lr, weight_decay",
    "+foo=1": "foo: no such key; the keys are in",
    "+rollout.foo=1": "rollout.foo: no such key; those of rollout are replicas",
    "trainer=4": "trainer is a section; set its keys: trainer.tensor_parallel, ",
    "evaluation.files=a.jsonl": "not a list; write 'evaluation.files=[a.jsonl]'",
    "environment.tools=[[a]]": "environment.tools=[[a]]: must be a list of texts, written [a,b]",
    "rollout.engine_arguments=3": "not a table; write rollout.engine_arguments.NAME=VALUE",
    "data.train=${unclosed": "cannot be read; a reference is ${KEY}, or ${oc.env:NAME}",
    "model.path=/nowhere": "no config.json there",
}

# Words of a shape that leaves nothing else to be said.
SHAPES = {
    "--steps=3": "write steps=3; settings are key=value, without dashes",
    "--steps 3": "--steps 3: write steps=3;",
    "-steps=3": "write steps=3;",
    "--hydra-help": "no such option; settings are key=value",
    "--reward.function a$b": "write 'reward.function=a$b'",
    "reward.function=my reward": "if it belongs to the value before it, write 'reward.function=my reward'",
    "data.train=my long file.jsonl": "long file.jsonl: not key=value; if it belongs to the value before it, "
    "write 'data.train=my long",
    "steps = 3": "steps = 3: write steps=3, without spaces around =",
    "steps =3": "write steps=3, without spaces",
    "steps= 3": "write steps=3, without spaces",
    "demo": "write experiment=demo",
    "steps": "write steps=VALUE",
    "pipline": "not key=value (did you mean pipeline?)",
    "~steps": "a setting cannot be removed",
    "experiment=dmeo": "use one of cluster_1024gpu_72b, cluster_128gpu_235b_a22b, cluster_64gpu_32b, "
    "cluster_64gpu_32b_128k, demo, lora, moe, node_8gpu_30b_a3b, node_8gpu_72b_lora, node_8gpu_7b, one_gpu, "
    "one_gpu_7b_lora, retool_32b, retool_7b, tools (did you mean demo?)",
    "pipeline=laminarr": "one of laminar, one_step, partial, stream, sync, versions (did you mean laminar?)",
    "experiment=demo,one_gpu": "use one of",
    "conf/experiment/mine.yaml": "write --config-dir DIR experiment=NAME",
    "experiment=conf/mine.yaml": "tools; for a file DIR/experiment/NAME.yaml write --config-dir DIR",
    "--config-name mine": "--config-name mine: no such option; for a file DIR/experiment/NAME.yaml write",
}

COMMANDS = {
    "trian": "laminar trian: no such command (did you mean train?); use one of train, init, stop,",
    "steps=3": "write laminar train steps=3",
    "train": "try `laminar train experiment=demo`",
    "stop": "laminar stop needs RUN_DIR; usage: laminar stop RUN_DIR",
    "stop my run": "run: one word too many; quote a name that has spaces; usage: laminar stop RUN_DIR",
    "top --onec run": "--onec: no such option (did you mean --once?); usage: laminar top RUN_DIR [--once]",
    "report": "laminar report needs RUN_DIR",
    "doctor now": "now: one word too many",
    "sim": "usage: laminar sim EXPERIMENT",
    "sim drao": "no simulation 'drao' (did you mean dora?)",
    "sim dora --steps=3": "write steps=3; settings are key=value",
    "sim dora steps=x": "steps=x: must be a whole number",
    "sim dora gpus=64": "write 'gpus=[64]'",
    "plan mixd": "no plan 'mixd' (did you mean mixed?)",
    "plan mixed +foo=1": "foo: no such key; the keys are name, out_dir, seed, model, pools, objective, ",
    "plan node gpus=4": "gpus: GPUs are named in pools, for example 'pools=[{gpu: H100, count: 4}]'",
    "plan node price=2": "price: GPUs are named in pools, for example 'pools=[{gpu: H100, count: 4}]'",
    "sim dora foo=1": "foo: no such key; the keys are name, out_dir, seed, steps, warmup_steps, draws, ",
}


@pytest.fixture(scope="module")
def all_at_once() -> list[str]:
    started = time.thread_time()
    lines = refusal("train", "experiment=demo", *VALUES)
    assert time.thread_time() - started < 2, "of processor time, modules included"
    return lines


@pytest.mark.parametrize("word", VALUES)
def test_wrong_values_and_keys_are_named_together(all_at_once, word):
    """Promise: one start shows every mistake, each in a line of its own with key, bound and cure, in words
    that are ours."""
    about, text = word.lstrip("+").partition("=")[0], VALUES[word]
    (line,) = [line for line in all_at_once if line.startswith((f"{about}=", f"{about}:"))]
    assert text in line and len(line) < 320
    assert not [word for word in NOT_OURS if word in line]
    assert len(all_at_once) == len(VALUES)


@pytest.mark.parametrize("words", SHAPES)
def test_words_of_a_wrong_shape(words):
    """Promise: dashes, spaces and missing `=` are answered with the word to write, never with a lexer's
    words."""
    (line,) = refusal("train", "pipeline.max_staleness=1", *words.split())
    assert SHAPES[words] in line and not [word for word in NOT_OURS if word in line]


@pytest.mark.parametrize("words", COMMANDS)
def test_commands_of_wrong_words(words):
    """Promise: every command says in one line what it needs or which word it means."""
    (line,) = refusal(*words.split())
    assert COMMANDS[words] in line


def test_several_wrong_shapes_at_once():
    """Several mistakes of one command line are refused together, a line each."""
    assert len(refusal("train", "--steps=3", "experiment=dmeo", "stepz=1", "my")) == 4


@pytest.mark.parametrize("quote", ["", "'", '"'])
def test_texts_are_taken_as_they_stand(quote):
    """Promise: a path or name needs no quoting but the shell's; quotes around all of it, as Hydra's users
    write them, do no harm."""
    texts = {
        "run_dir": "/a b",
        "store_dir": "/lr=1e-3,b[0]{x}(y)$z:w",
        "reward.function": "007",
        "data.train": "1e3",
        "model.path": "a\\b",
        "data.answer_field": "null",
        "rollout.engine_arguments.x": "{a: [1]}",
    }
    config = load_config([f"{key}={quote}{text}{quote}" for key, text in texts.items()])
    found = (
        config.run_dir,
        config.store_dir,
        config.reward.function,
        config.data.train,
        config.model.path,
        config.data.answer_field,
        config.rollout.engine_arguments["x"],
    )
    assert found == tuple(texts.values())


def test_tables_take_entries_as_written():
    """Promise: no `+` is needed, none is refused; an entry may come from anywhere, and an empty table
    grows."""
    words = [
        "rollout.engine_arguments.mem-fraction-static=0.30",
        "+rollout.engine_arguments.x={a: 1}",
        "emulation.constants.prefill_mfu=0.4",
    ]
    words += [
        "rollout={replicas: 2}",
        "++steps=${relay.slots}",
        "trainer.devices=[1,3]",
        "data.max_prompt_tokens=null",
    ]
    config = load_config(["experiment=one_gpu", *words])
    assert config.rollout.engine_arguments == {"mem-fraction-static": "0.30", "x": "{a: 1}"}
    assert (config.emulation.constants, config.rollout.replicas, config.steps) == (
        {"prefill_mfu": 0.4},
        2,
        3,
    )
    assert config.trainer.devices == [1, 3]
    wrong = {
        "rollout={replicaz: 2}": "rollout.replicaz: no such key (did you mean rollout.replicas?)",
        "rollout={replicas: x}": "rollout.replicas=x: must be a whole number",
        "evaluation.files=[a=b]": "quote an entry that has spaces or any of",
        "data.train=${HOME}/x": "data.train: Interpolation key 'HOME' not found; "
        "a reference is ${KEY}, or ${oc.env:NAME}",
    }
    lines = refusal("train", *wrong)
    assert len(lines) == len(wrong) and all(any(text in line for line in lines) for text in wrong.values())


def test_names_within_tables():
    """Promise: a name that SGLang or the simulator does not have is refused before an engine starts."""
    assert len(argument_names()) > 300
    words = [
        "mem-fractoin-static=0.3",
        "mem_fraction_static=0.5",
        "attention-backend=triton",
        "no-lora-strict-loading=true",
    ]
    (line,) = refused_arguments(load_config([f"rollout.engine_arguments.{word}" for word in words]))
    assert "--mem-fractoin-static (did you mean mem-fraction-static?)" in line
    (line,) = unknown_constants(load_config(["emulation.constants.mfu=1"]))
    assert "emulation.constants.mfu: no such constant" in line


def test_every_number_has_bounds_and_every_default_keeps_them():
    """Promise: a numeric key cannot be added without bounds, nor a default outside of them."""
    bare = []
    for key, field in all_fields(RunConfig):
        kind = plain_type(field)[0]
        if {int, float} & {kind, *getattr(kind, "__args__", ())} and not isinstance(allowed(field), Bounds):
            bare.append(key)
    assert not bare, (
        "write number(default, at_least=..., above=..., at_most=..., below=...) or seconds(default) "
        "in config/schema.py"
    )
    assert not wrong_values(RunConfig())
    choices = {
        key: field.metadata for key, field in all_fields(RunConfig) if isinstance(allowed(field), Choices)
    }
    assert {"algorithm.loss", "role", "resume", "rollout.engine"} <= choices.keys()


def test_choices_that_other_files_decide():
    """The emulation's choices of model and GPU are those of the simulator."""
    emulation = {key: allowed(field) for key, field in all_fields(RunConfig) if key.startswith("emulation.")}
    assert set(emulation["emulation.model"].names) == set(MODELS)
    assert set(emulation["emulation.gpu"].names) == set(GPUS)


def test_tables_of_sections_are_checked_too():
    """Promise: the numbers of a table whose entries are sections have bounds as well."""

    @dataclasses.dataclass
    class Inner:
        weight: float = dataclasses.field(default=1.0, metadata={"laminar": Bounds(at_least=0)})

    @dataclasses.dataclass
    class Outer:
        parts: dict[str, Inner] = dataclasses.field(default_factory=lambda: {"a": Inner(), "b": Inner(-1.0)})

    (line,) = wrong_values(Outer())
    assert line.startswith("parts.b.weight=-1: must be at least 0")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("steps: [1\n", r"mine.yaml, line 2: not YAML"),
        ("# @package _global_\nstepz: 1\n", r"experiment=mine: stepz: no such key \(did you mean steps\?\)"),
        (
            "# @package _global_\noptimizer: {lr: fast}\n",
            r"experiment=mine: optimizer.lr: must be a number, above 0",
        ),
        (
            "# @package _global_\ntrainer: 3\n",
            r"experiment=mine: trainer: a section, not a value; its keys are",
        ),
        (
            "# @package _global_\nrun_dir: ${oc.env:NO_SUCH}\n",
            r"^run_dir: Environment variable 'NO_SUCH' not found",
        ),
        ("# @package _global_\nname: \udcff\n", r"experiment=mine: not UTF-8"),
        ("steps: 1\n", r"begin the file with the line `# @package _global_`"),
        ("# @package _global_\nsteps: 0\n", r"^steps=0: must be at least 1"),
    ],
)
def test_wrong_experiment_files(tmp_path, monkeypatch, content, text):
    """Promise: what is wrong in a file is named with the file, in our words."""
    import shutil

    from laminar_hpc.config import load

    shutil.copytree(load.conf_directory(), tmp_path / "conf")
    (tmp_path / "conf/experiment/mine.yaml").write_text(content, errors="surrogateescape")
    monkeypatch.setattr(load, "conf_directory", lambda: tmp_path / "conf")
    with pytest.raises(Refused, match=text) as error:
        load_config(["experiment=mine"])
    assert not [word for word in NOT_OURS if word in str(error.value).splitlines()[0]]


def test_a_kv_cache_that_serialises_a_batch_is_warned_of():
    """Promise: a run that will mostly wait for room in the KV cache says so, with the size that is enough.
    (Shipped ones: test_config.)"""
    config = load_config(["experiment=demo", "rollout.kv_cache_tokens=1024"])
    (line,) = warnings(config, check(config))
    assert "holds 4 responses of sampling.max_response_tokens=256 at once, and a replica is given 256" in line
    config.rollout.kv_cache_tokens = int(line.rpartition("set it to ")[2].split()[0])
    assert warnings(config, check(config)) == []


@pytest.mark.parametrize("text", ["", "3", "[1]", "algorithm: 3", "steps: many", "steps: {", "no_such: 1"])
def test_a_damaged_configuration_of_a_run_is_refused(text, tmp_path):
    """Promise: one line for what a full disk or another version has left."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(LaminarError, match=rf"^{path} is not a run's configuration \(.+\); restore it"):
        read_config(path)


@pytest.mark.parametrize(("earlier", "now"), RENAMED.items())
def test_a_renamed_key_is_refused_with_its_new_name(earlier, now, tmp_path):
    """Promise: who comes from an earlier version is told the new name; an earlier run's own file is read."""
    (line,) = refusal("train", "experiment=demo", f"{earlier}=1")
    assert f"{earlier} is called {now} now" in line
    section, _, name = earlier.partition(".")
    value = {"algorithm.denominator": "constant"}.get(earlier, 3)
    (tmp_path / "config.yaml").write_text(f"{section}:\n  {name}: {value}\n")
    read = getattr(read_config(tmp_path / "config.yaml"), section)
    assert getattr(read, now.partition(".")[2]) == value


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("dp-size=2", "rollout.replicas"),
        ("tensor_parallel_size=2", "rollout.tensor_parallel"),
        ("dtype=float16", "model.dtype"),
        ("model-path=/models/other", "model.path"),
    ],
)
def test_what_has_a_key_of_ours_is_set_by_that(word, key):
    """Promise: no engine with another layout, dtype or model than the weights that it is sent."""
    (line,) = refused_arguments(load_config([f"rollout.engine_arguments.{word}"]))
    assert line == f"rollout.engine_arguments.{word.partition('=')[0]}: set {key} and leave it out"


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("quantization=fp8", "takes the trainer's weights as they are, in model.dtype"),
        ("pp-size=2", "set rollout.tensor_parallel"),
        ("pipeline_parallel_size=2", "set rollout.tensor_parallel"),
        ("nnodes=2", "set rollout.tensor_parallel"),
        ("enable-dp-attention=true", "set rollout.tensor_parallel"),
        ("speculative-algorithm=DFLASH", "returns its own log-probs"),
        ("speculative-accept-threshold-acc=0.5", "would not have drawn"),
        ("disaggregation-mode=prefill", "generates by itself"),
        ("preferred-sampling-params={top_k: 1}", "drawn as `sampling` says"),
        ("random-seed=1", "set seed"),
        ("quantiz=fp8", "no argument --quantiz"),
        ("speculative-algo=DSPARK", "returns its own log-probs"),
    ],
)
def test_an_engine_that_could_serve_no_run_is_refused_at_once(word, why):
    """Promise: what an engine would die of after minutes, or what would change what is drawn without a word,
    is one line of the dry run, which says why and what to do."""
    (line,) = refusal("train", "experiment=one_gpu", "dry_run=true", f"rollout.engine_arguments.{word}")
    assert f"rollout.engine_arguments.{word.partition('=')[0]}: " in line
    assert why in line and ("leave it out" in line or "did you mean quantization" in line)


def test_speculation_that_is_not_exact_here_is_refused(monkeypatch):
    """Promise: what SGLang speculates with on a GPU passes where it changes no distribution, and no response
    is taken out in between; ours is of engines on the CPU, one process each."""
    eagle = "rollout.engine_arguments.speculative-algorithm=EAGLE3"
    assert not refused_arguments(load_config([eagle, "pipeline.repack=off"]))
    assert not refused_arguments(load_config(["rollout.speculation=auto"]))
    for words, why in (
        ([eagle, "pipeline.repack=reprefill"], "set pipeline.repack=off"),
        ([eagle, "pipeline=partial"], "no pipeline.refresh=interrupt"),
        ([eagle, "rollout.speculation=ngram"], "set rollout.speculation=off"),
        ([eagle, "model.lora.rank=8"], "set model.lora.rank=0"),
        (["rollout.speculation=auto", "rollout.tensor_parallel=2"], "set rollout.tensor_parallel=1"),
        (["rollout.speculation=auto", "rollout.engine=emulated"], "set it to off"),
        (
            ["rollout.speculation=auto", "rollout.engine_arguments.disable_overlap_schedule=false"],
            "leave out disable-overlap-schedule",
        ),
    ):
        (line,) = refused_arguments(load_config(words))
        assert why in line
    config = load_config([eagle, "pipeline.repack=off"])
    with pytest.raises(LaminarError, match="takes the most probable token on a CPU"):
        arguments(config, Path("/m"), "0", 0)
    ours = load_config(["rollout.speculation=auto"])
    (line,) = speculation.refused(ours, on_gpu=False, routes=True)
    assert "set algorithm.routing_replay=false" in line
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (line,) = refused_arguments(ours)
    assert "on GPUs set rollout.engine_arguments.speculative-algorithm=EAGLE3" in line


@pytest.mark.parametrize("word", ["kv-cache-dtype=fp8_e4m3", "page-size=128", "disable-radix-cache=true"])
def test_a_kv_cache_that_cannot_move_is_refused_where_caches_move(word):
    """Promise: with pipeline.repack=kv every move would fail; without moves, and with a cache that moves, the
    argument is SGLang's affair."""
    setting = f"rollout.engine_arguments.{word}"
    (line,) = refused_arguments(load_config([setting, "pipeline.repack=kv"]))
    assert "pipeline.repack=kv moves caches of 16 or 32 bits" in line
    assert line.endswith("leave it out, or set pipeline.repack=reprefill")
    assert not refused_arguments(load_config([setting, "pipeline.repack=reprefill"]))
    fine = [f"rollout.engine_arguments.{x}" for x in ("kv-cache-dtype=bfloat16", "page-size=64")]
    off = [
        "rollout.engine_arguments.disable-radix-cache=false",
        "rollout.engine_arguments.enable-dp-attention=false",
    ]
    assert not refused_arguments(load_config([*fine, *off, "pipeline.repack=kv"]))


@pytest.mark.parametrize(
    "word",
    ["host=0.0.0.0", "port=80", "api_key=x", "hos=0.0.0.0", "grpc-port=80", "tokenizer-worker-num=2"],
)
def test_engines_are_not_opened_by_an_argument(word):
    """Where an engine listens and with which key is not for rollout.engine_arguments to say."""
    (line,) = refused_arguments(load_config([f"rollout.engine_arguments.{word}"]))
    assert line.startswith(f"rollout.engine_arguments.{word.partition('=')[0]}: ") and "leave it out" in line
