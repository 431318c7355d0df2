"""One run of a command line says all that is wrong with it, of whichever kinds."""

import json
import shutil
from pathlib import Path

import pytest

from helpers.refusals import refusal
from laminar_hpc.config.directories import examples_directory


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Rows of two files and a reward, all of them wrong; the reward's module is there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"question": "1"}\n{"prompt": "2", "answer": " "}\n')
    (tmp_path / "held.jsonl").write_text('{"prompt": 3}\n')
    files = [f"data.train={tmp_path}/train.jsonl", f"evaluation.files=[{tmp_path}/held.jsonl]"]
    return [*files, "data.answer_field=answer", "reward.function=no_such_module.score"]


OF_INPUTS = (
    "train.jsonl, row 1: no field 'prompt'",
    "train.jsonl, row 1: no field 'answer'",
    "train.jsonl, row 2: field 'answer' must be a text or a number, not ' '",
    "held.jsonl, row 1: field 'prompt' must be a non-empty string",
    "held.jsonl, row 1: no field 'answer'",
    "reward.function='no_such_module.score'",
)


def check(lines, *more):
    """Each text is in one line, each line has one text."""
    wanted = [*more, *OF_INPUTS]
    assert [[text for text in wanted if text in line] for line in lines] and len(lines) == len(wanted), lines
    assert all(sum(text in line for line in lines) == 1 for text in wanted), lines


def test_rows_and_rewards_together(words, tmp_path):
    """Promise: a wrong row hides neither another, nor those of the next file, nor the reward."""
    check(refusal("train", "experiment=demo", *words, f"run_dir={tmp_path}/run"))


def test_an_unreachable_hub_hides_nothing(words, tmp_path, monkeypatch):
    """Promise: beside a model that cannot be had, all that can be known without it is said."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    given = ["model.path=acme/sums", "relay.lanes=2", "relay.slots=2", f"run_dir={tmp_path}/run"]
    check(refusal("train", "experiment=demo", *words, *given), "offline mode is enabled", "needs at least 3")


def test_wrong_values_hide_nothing(words, tmp_path):
    """Promise: a word and a value that are wrong are said beside rows and reward."""
    given = ["stepz=1", "optimizer.lr=-1", f"run_dir={tmp_path}/run"]
    check(refusal("train", "experiment=demo", *words, *given), "stepz", "optimizer.lr=-1")


def test_a_machine_hides_nothing(words, tmp_path):
    """Promise: what this machine lacks is said beside rows and reward."""
    given = [f"relay.shm_dir={tmp_path}/nowhere", f"run_dir={tmp_path}/run"]
    check(refusal("train", "experiment=demo", *words, *given), "no such folder; name one in memory")


def test_a_public_model_that_no_run_can_train_is_known_without_a_network(tmp_path, monkeypatch):
    """Promise: of a model of the table it is said that it is not supported, whether the hub answers or not;
    in a dry run that is all."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    given = ["experiment=demo", "model.path=deepseek-ai/DeepSeek-V3", f"run_dir={tmp_path}/run"]
    _, line = refusal("train", *given)
    assert "architecture deepseek_v3 is not supported" in line and "Qwen3MoeForCausalLM" in line
    assert refusal("train", *given, "dry_run=true") == [line]


def test_a_public_model_that_cannot_be_had(tmp_path, monkeypatch):
    """Promise: its numbers are known all the same, so that what does not go with them is said."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    given = ["experiment=demo", "model.path=Qwen/Qwen2.5-7B", f"run_dir={tmp_path}/run"]
    (line,) = refusal("train", *given)
    assert "offline mode is enabled" in line
    first, second = refusal("train", *given, "trainer.tensor_parallel=3")
    assert first == line and "does not divide the model's num_attention_heads=28" in second
    lines = refusal("train", "experiment=demo", f"model.path={tmp_path}/Qwen2.5-7B", "steps=-1")
    assert len(lines) == 2 and any("no config.json there" in each for each in lines)


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("generation_config.json", '{"eos_token_id": "x"}', 'eos_token_id="x" is not the id of a token'),
        ("generation_config.json", "{", "generation_config.json cannot be read as JSON"),
        ("generation_config.json", "[]", "generation_config.json is no JSON object"),
    ],
)
def test_a_generation_config_is_looked_at_before_a_run(tmp_path, file, text, says):
    """Promise: stop tokens that the model does not have end no run after its start."""
    shutil.copytree(examples_directory("arithmetic/base"), tmp_path / "model")
    (tmp_path / "model" / file).write_text(text)
    given = [f"model.path={tmp_path}/model", f"run_dir={tmp_path}/run"]
    (line,) = refusal("train", "experiment=demo", *given)
    assert says in line and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["data.system_prompt=Be brief."], "data.system_prompt needs data.chat_template=true"),
        (["data.chat_template_arguments={a: 1}"], "data.chat_template_arguments needs data.chat_template"),
        (
            ["data.chat_template=true", "data.chat_template_arguments.tools=[]"],
            "data.chat_template_arguments.tools: the run sets it; leave it out",
        ),
    ],
)
def test_keys_of_the_chat_template(given, says):
    """Promise: each is refused in one line where it would do nothing or what it must not."""
    lines = refusal("train", "experiment=demo", *given, "dry_run=true")
    assert says in lines[0] and len(lines) == 1


def test_values_of_the_chat_template_are_what_they_say(tmp_path):
    """Promise: `false` on the command line is false to the template, a number a number, a word a text."""
    from laminar_hpc.config.load import load_config

    names = [("enable_thinking", "false"), ("budget", "3"), ("effort", "low"), ("quoted", '"true"')]
    words = [f"data.chat_template_arguments.{name}={value}" for name, value in names]
    found = load_config(["experiment=demo", "data.chat_template=true", *words]).data.chat_template_arguments
    assert found == {"enable_thinking": False, "budget": 3, "effort": "low", "quoted": "true"}
    words = ["data.chat_template_arguments={enable_thinking: false}", "data.chat_template=true"]
    assert load_config(["experiment=demo", *words]).data.chat_template_arguments == {"enable_thinking": False}
    (tmp_path / "experiment").mkdir()
    given = {"data": {"chat_template": True, "chat_template_arguments": {"enable_thinking": False}}}
    text = "# @package _global_\n" + json.dumps(given)
    Path(tmp_path, "experiment", "mine.yaml").write_text(text)
    config = load_config(["--config-dir", str(tmp_path), "experiment=mine"])
    assert config.data.chat_template_arguments == {"enable_thinking": False}
