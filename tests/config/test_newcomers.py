"""Mistakes of a first week: names of other systems, paths as a shell leaves them, models that are not all
there, functions that are not where they are said to be."""

import json
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from helpers.refusals import refusal
from laminar_hpc.config import peers
from laminar_hpc.config.bounds import all_fields
from laminar_hpc.config.check import check, warnings
from laminar_hpc.config.directories import examples_directory
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.load import load_config
from laminar_hpc.config.models import missing_files
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.config.user_code import load_function
from laminar_hpc.machine.compat.torchvision import declare_schemas

THEIRS = {
    "data.train_batch_size=64": "data.train_batch_size: verl's name; here it is algorithm.prompts_per_step",
    "actor_rollout_ref.rollout.n=8": "verl's name; here it is algorithm.samples_per_prompt",
    "trainer.total_epochs=3": "here it is steps: trainer steps; an epoch is",
    "--rollout-batch-size 8": "--rollout-batch-size 8: slime's name; here it is algorithm.prompts_per_step; "
    "settings are key=value",
    "--lr=1e-6": "--lr=1e-6: slime's name; here it is optimizer.lr",
    "learning_rate=1e-6": "learning_rate: TRL's name; here it is optimizer.lr",
    "beta=0.04": "beta: TRL's name; here it is algorithm.kl_coefficient",
    "num_generations=8": "here it is algorithm.samples_per_prompt",
    "max_completion_length=512": "here it is sampling.max_response_tokens",
    "epsilon=0.2": "here it is algorithm.clip_low",
    "loss_type=dapo": "here it is algorithm.loss_aggregation: tokens (dapo), sequences (grpo) or",
    "--reward_funcs my.score": "--reward_funcs my.score: TRL's name; here it is reward.function: MODULE.NAME",
    "--use-kl-loss --lr 1e-6": "--use-kl-loss: slime's name; here it is algorithm.kl_coefficient: 0 = none",
}


@pytest.mark.parametrize("words", THEIRS)
def test_names_of_other_systems_are_answered_with_ours(words):
    """Promise: whoever pastes a line of verl's, slime's or TRL's is told our key for each of theirs."""
    line, *more = refusal("train", "experiment=demo", *words.split())
    assert THEIRS[words] in line and len(more) == (words.count("--") or 1) - 1


def test_what_they_are_called_here_is_there():
    """Every row names a key of the schema, and no name of theirs stands in two rows, or is a key of ours."""
    keys = dict(all_fields(RunConfig))
    names = [name for row in peers.ROWS for name in (*row.verl, *row.slime)] + list(peers.TRL)
    assert all(key in keys for key, _ in peers.TRL.values())
    assert all(row.key in keys for row in peers.ROWS) and len({row.key for row in peers.ROWS}) == len(
        peers.ROWS
    )
    assert len(names) == len(set(names)) and not set(names) & set(keys)


def test_the_names_of_trl_are_its_own():
    """Promise: each of them is a setting of the installed TRL, or the one that its last versions dropped."""
    declare_schemas()
    import trl

    theirs = {f.name for c in (trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments) for f in fields(c)}
    trainer = (Path(trl.__file__).parent / "trainer" / "grpo_trainer.py").read_text()
    missing = [name for name in peers.TRL if name not in theirs and f"        {name}: " not in trainer]
    assert missing == ["max_prompt_length"]


def test_home_is_where_a_shell_leaves_it(monkeypatch):
    """Promise: `~/` behind an `=` is the home folder in every key that is a path, never a folder called ~."""
    monkeypatch.setenv("HOME", "/home/me")
    keys = ("run_dir", "store_dir", "model.path", "data.train", "relay.shm_dir", "checkpoint.key")
    words = [f"{key}=~/a" for key in keys]
    config = load_config([*words, "source=replay:~/b", 'evaluation.files=["~/c","d~"]'])
    found = (config.run_dir, config.store_dir, config.model.path, config.data.train, config.relay.shm_dir)
    assert {*found, config.checkpoint.key} == {"/home/me/a"}
    assert (config.source, config.evaluation.files) == ("replay:/home/me/b", ["/home/me/c", "d~"])


@pytest.mark.parametrize("folder", [".", "./", "..", "runs/..", "/", ""])
def test_a_run_has_a_folder_of_its_own(folder):
    """A folder without a name could not be moved aside."""
    (line,) = refusal("train", "experiment=demo", f"run_dir={folder}")
    assert "name a folder of the run's own, for example runs/mine" in line


def test_a_replay_is_a_run_of_its_own(tmp_path):
    """Else the run that is replayed would be moved aside first."""
    (tmp_path / "store.sqlite").touch()
    (line,) = refusal("train", "experiment=demo", f"run_dir={tmp_path}", f"source=replay:{tmp_path}")
    assert "is run_dir itself" in line


def test_a_run_named_as_a_model(tmp_path):
    """Its newest checkpoint's weights are named instead."""
    for step in (9, 10):
        (tmp_path / f"checkpoints/step_{step:06d}/hf").mkdir(parents=True)
    (line,) = refusal("train", "experiment=demo", f"model.path={tmp_path}", f"run_dir={tmp_path}/run")
    assert line.endswith(f"model.path={tmp_path}/checkpoints/step_000010/hf")


def test_models_that_are_not_all_there(tmp_path):
    """Promise: weights of another format, missing shards and a slow tokenizer are said before a
    run starts, each with its cure."""
    index = tmp_path / "model.safetensors.index.json"
    (tmp_path / "pytorch_model.bin").touch()
    (tmp_path / "vocab.json").touch()
    weights, tokenizer = missing_files(str(tmp_path))
    assert "no *.safetensors there; pytorch_model.bin is not read; save it anew" in weights
    assert "no tokenizer.json there; save it anew with transformers: AutoTokenizer" in tokenizer
    (tmp_path / "tokenizer.json").touch()
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    (tmp_path / "one.safetensors").touch()
    (line,) = missing_files(str(tmp_path))
    assert line.endswith("two.safetensors of its index is missing; download the model again")
    index.write_text("[]")
    assert "is no index of safetensors files" in missing_files(str(tmp_path))[0]
    (tmp_path / "two.safetensors").touch()
    index.unlink()
    assert missing_files(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "RoPE of type dynamic is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights cannot be trained"),
        ({"use_sliding_window": True}, "sliding windows, dropout and activations"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"auto_map": {"AutoModelForCausalLM": "m.Own"}}, "auto_map names code of the model's own"),
        ({"pretraining_tp": 2}, "pretraining_tp=2 splits each sum"),
        ({"num_key_value_heads": 3}, "num_attention_heads=4 does not go with num_key_value_heads=3"),
        ({"num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": None}, "go with hidden_size="),
        ({"architectures": None}, 'add "architectures": ["Qwen2ForCausalLM"], or save the model again'),
        ({"architectures": None, "model_type": "phi3"}, "architecture phi3 is not supported"),
    ],
)
def test_a_model_that_the_trainer_cannot_compute_is_refused_at_once(tmp_path, more, text):
    """Promise: a dry run knows it too. Of rope_scaling and rope_parameters the engine takes the first."""
    base = examples_directory("arithmetic/base")
    config = json.loads(Path(base, "config.json").read_text())
    assert "rope_parameters" in config
    (tmp_path / "config.json").write_text(json.dumps(config | more))
    (line,) = refusal("train", "experiment=demo", f"model.path={tmp_path}", "dry_run=true")
    assert text in line and f"{tmp_path}/config.json" in line


def test_an_evaluation_without_files_is_warned_of():
    """A run that would evaluate nothing says so."""
    config = load_config(["experiment=demo", "evaluation.files=[]", "evaluation.every=5"])
    (line,) = warnings(config, check(config))
    assert "nothing is evaluated; name held-out files" in line


def test_functions_that_are_not_there(tmp_path, monkeypatch):
    """Promise: a misspelt function is answered with the nearest one, a module that is not found with where it
    is looked for; an error inside a module stays that error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_rewards_here.py").write_text("def score(): ...\n")
    (tmp_path / "my_rewards_broken.py").write_text("import json\njson.no_such_thing\n")
    wrong = {
        "my_rewards_here.scor": r"my_rewards_here has no 'scor' \(did you mean score\?\)",
        "my_rewards_nowhere.score": r"my_rewards_nowhere\.py must be in the current folder or one of",
        "my_rewards_broken.score": "cannot be imported: AttributeError: module 'json' has no attribute",
    }
    for path, text in wrong.items():
        with pytest.raises(LaminarError, match=text):
            load_function(path, f"reward.function='{path}'")
