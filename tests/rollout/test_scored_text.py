"""docs/rewards.md: what a reward function gets as `response`."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from laminar_hpc.environments.reward_pool import Score
from laminar_hpc.line.messages.data import PromptGroup, Sample
from laminar_hpc.rollout.scoring import Scoring
from laminar_hpc.store.payload.layout import tokens_array

WORDS = ["one", "two", "<stop>", "<mark>"]


def model(folder: Path, special: bool) -> Path:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="one"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken("<mark>")])
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([AddedToken("<stop>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    return folder


@pytest.mark.parametrize("special", [True, False])
def test_the_end_token_is_no_part_of_it(tmp_path, special):
    """Promise: whether tokenizer.json marks it special or not; only the last one is the end. Special tokens
    inside are left out, as the page says."""
    seen: list[tuple[str, list[int]]] = []

    class Pool:
        async def score(self, prompt: str, response: str, row: dict, tokens: list[int]) -> Score:
            seen.append((response, tokens))
            return Score(1.0, {}, "", 0.0, 1.0)

    config = SimpleNamespace(model=SimpleNamespace(path=str(model(tmp_path, special))))
    channel = SimpleNamespace(send=lambda message: None)
    trace = SimpleNamespace(record=lambda *_, **__: None)
    scoring = Scoring(SimpleNamespace(config=config, channel=channel, trace=trace), Pool(), print, print)
    group = PromptGroup(0, [0], "one", {}, [])
    for tokens in ([0, 3, 1, 2], [0, 1], [2], []):
        asyncio.run(scoring._score("", group, Sample(0, 0), tokens_array(tokens)))
    assert [text for text, _ in seen] == ["one two", "one two", "", ""]
    assert seen[0][1] == [0, 3, 1, 2]
