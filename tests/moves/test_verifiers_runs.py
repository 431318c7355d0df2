"""docs/environments.md#an-environment-of-verifiers in a whole run on emulated engines: the rows are the
taskset's, and each episode is a trajectory. The package itself is stood in for."""

import shutil
import sys
from pathlib import Path

import pytest

from helpers.emulated.stand import Stand, small_config
from helpers.emulated.turning import TURN, save_model, trajectories
from helpers.models.chats import SEPARATED
from helpers.paths import HELPERS
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.data.tokens import TextDecoder

STAND_IN = HELPERS / "environments"
WORDS = 24


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run that names a taskset, and no data."""
    shutil.copy(STAND_IN / "stand_in_verifiers.py", tmp_path / "verifiers.py")
    shutil.copy(STAND_IN / "guessing.py", tmp_path)
    (tmp_path / "verifiers-0.3.1.dist-info").mkdir()
    (tmp_path / "verifiers-0.3.1.dist-info" / "METADATA").write_text("Name: verifiers\nVersion: 0.3.1\n")
    monkeypatch.chdir(tmp_path)
    config = small_config(tmp_path, replicas=2, steps=2)
    save_model(Path(config.model.path), "<pad>" + SEPARATED)
    config.trainer.tokens_per_microbatch = 4096
    config.data.chat_template, config.data.train, config.algorithm.prompts_per_step = True, "", 8
    config.emulation.turn_tokens, config.emulation.median_response_tokens = TURN, 300.0
    config.environment.verifiers = {"taskset": {"id": "guessing", "words": WORDS, "turns": 2}}
    config.environment.python, config.reward.function = sys.executable, ""
    return config


@pytest.mark.slow
def test_a_taskset_is_trained(config: RunConfig) -> None:
    """Each trajectory is an episode of a task, with its conversation, its reward and one policy."""
    Stand(config).run(150)
    [file] = Path(config.run_dir).glob("verifiers-*.jsonl")
    assert len(file.read_text().splitlines()) == WORDS
    found, decoder = trajectories(config), TextDecoder(Path(config.model.path))
    assert len(found) == 2 * 8 * config.algorithm.samples_per_prompt
    for whole in found:
        record, response = whole.record, whole.response
        turns, mask = len(response.spans), response.loss_mask
        assert record.policies == 1 and record.moves == 0 and record.reward == 0.0
        assert record.reward_parts["environment.turns"] == turns <= 2 and record.trained == mask.sum()
        text = decoder.text(response.tokens.tolist(), specials=True)
        assert text.startswith("<|user|>\nguess ") and text.count("<|user|>\nno<|end|>") == turns - 1
        if turns == 2:
            assert record.reward_parts["guesses"] == 2
    assert any(len(whole.response.spans) == 2 for whole in found)
