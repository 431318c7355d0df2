"""What is refused of environments before a run starts, and how its prompts are rendered."""

import json
from pathlib import Path

import pytest

from helpers.models.chats import CLEARED, SEPARATED, save, vocabulary_size
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.environments.turns.preflight import check_environment, prompt_render

MODULE = """
class Shop:
    def reset(self, **row): ...
    def buy(self, what: str) -> str:
        "Buys it."

    def get_reward(self) -> float:
        return 0.0

class Maths(Shop):
    buy = None
    def add(self, x: int) -> int:
        "Adds."

class Ungraded(Shop):
    get_reward = None
"""
SHOP, MATHS = "environments_of_preflight_test.Shop", "environments_of_preflight_test.Maths"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """Two environments."""
    (tmp_path / "environments_of_preflight_test.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    config = RunConfig()
    config.model.path = str(save(tmp_path / "model", SEPARATED, ["<|end|>"]))
    config.environment.factory = {"shop": SHOP, "maths": MATHS}
    return config


def test_a_prompt_tells_of_its_own_tools(config: RunConfig) -> None:
    """Those of the environment that the row names; it ends with the user's words, which reset may add to. A
    row that names none ends the run before it starts."""
    render, said = prompt_render(config), [{"role": "user", "content": "go"}]
    shop = render(said, "row 1", {"environment": "shop"})
    maths = render(said, "row 2", {"environment": "maths"})
    assert '"buy"' in shop and '"add"' not in shop
    assert '"add"' in maths and '"buy"' not in maths
    assert shop.endswith("<|user|>\ngo") and maths.endswith("<|user|>\ngo")
    with pytest.raises(LaminarError, match=r"^row 3: its field 'environment' is not there"):
        render(said, "row 3", {})


def test_each_environment_is_checked(config: RunConfig) -> None:
    """One without a reward among others that have it is named; so is a template that cannot be used."""
    config.environment.factory["free"] = SHOP.replace("Shop", "Ungraded")
    with pytest.raises(LaminarError, match=r"factory: \S+\.Ungraded has no get_reward: add it, or set"):
        check_environment(config)
    del config.environment.factory["free"]
    save(Path(config.model.path), CLEARED, ["<|end|>"])
    with pytest.raises(LaminarError, match="rewrites earlier turns"):
        check_environment(config)


def test_a_tokenizer_with_tokens_that_the_model_lacks_is_refused(config: RunConfig) -> None:
    """Promise: what tools and agents write never becomes a token without a row; with a row for each the run
    may start."""
    (Path(config.model.path) / "config.json").write_text(json.dumps({"vocab_size": vocabulary_size() - 1}))
    with pytest.raises(LaminarError, match=rf"has 'é' as token {vocabulary_size() - 1}, the model has"):
        check_environment(config)
    (Path(config.model.path) / "config.json").write_text(json.dumps({"vocab_size": vocabulary_size()}))
    assert set(check_environment(config)) == {"shop", "maths"}
