"""A whole emulated run whose responses have several turns, each but the last with a call of `look`."""

import json
import sqlite3
from pathlib import Path

from helpers.emulated.stand import small_config
from helpers.models.chats import SEPARATED, save, vocabulary_size
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.store.payload.whole import Whole, wholes
from laminar_hpc.store.rows import stored_groups

TURN, CALL = 200, '<tool_call>{"name": "look", "arguments": {"key": "k"}}</tool_call>'


def save_model(folder: Path, template: str) -> None:
    """A model of characters in the folder of an emulated one. One token ends a turn, the template's: of
    several the emulated engine would draw another."""
    save(folder, template, ["<|end|>"])
    settings = json.loads((folder / "config.json").read_text())
    settings |= json.loads((folder / "generation_config.json").read_text())
    settings |= {"vocab_size": vocabulary_size(), "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(settings))


def several_turns(folder: Path, toolbox: str) -> RunConfig:
    """`toolbox`: the source of a module that has the tool and `score`, a reward."""
    (folder / "turns_toolbox.py").write_text(toolbox)
    config = small_config(folder, replicas=3, steps=2)
    save_model(Path(config.model.path), SEPARATED)
    config.trainer.tokens_per_microbatch = 4096
    config.data.chat_template = True
    config.algorithm.prompts_per_step = 8
    config.emulation.turn_tokens, config.emulation.call = TURN, CALL
    config.environment.tools = ["turns_toolbox.look"]
    config.reward.function = "turns_toolbox.score"
    config.rollout.increment_tokens = 20
    return config


def trajectories(config: RunConfig) -> list[Whole]:
    """All that are stored."""
    database = sqlite3.connect(f"file:{config.run_dir}/store.sqlite?mode=ro", uri=True)
    groups = [i for (i,) in database.execute("SELECT id FROM groups ORDER BY id")]
    found = wholes(Path(config.run_dir), stored_groups(database, groups))
    database.close()
    wanted = config.steps * config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt
    assert len(found) == wanted
    return found
