"""docs/promises.md#verifiers with nothing stood in for: verifiers' own environment server, from its
package, plays with a real SGLang."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from helpers.engines.pair import EOS, hf_logprobs, reference
from helpers.engines.replica_stand import replica_of_turns
from helpers.environments.verifiers_of_pypi import V1, interpreter
from helpers.models.chats import SEPARATED
from helpers.paths import HELPERS
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.environments.verifiers.rows import run_rows
from laminar_hpc.line.messages.data import PromptGroup, Sample
from laminar_hpc.line.messages.rollouts import Generated, Grant, Scored, WeightsOpened
from laminar_hpc.store.payload.reader import read

pytestmark = pytest.mark.slow
STOPS = [*range(0, 60), EOS]  # so that a random model ends its turns
START = 257  # <|im_start|>, with which every conversation begins
TEMPLATE = "<|im_start|>" + SEPARATED.replace("<|end|>", "<|im_end|>")
GUESSES = 3


def test_a_game_of_verifiers_on_a_real_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four episodes at once, of two words: each is one trajectory of as many turns as the environment has
    counted, with verifiers' reward; its tokens' log-probs are those of transformers."""
    python = interpreter(tmp_path / "venv", V1)
    source = (HELPERS / "environments/tasksets_of_v1.py").read_text()
    (tmp_path / "words.py").write_text(source + '\n\n__all__ = ["WordsTaskset", "WordsEnv"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    rows: list[dict] = []

    def adjust(config: RunConfig) -> None:
        config.environment.verifiers, config.environment.python = "words", python
        config.environment.max_turns, config.environment.timeout_seconds = GUESSES, 300.0
        config.reward.function = ""
        file = Path(run_rows(config.environment, str(tmp_path / "run")))
        rows.extend(json.loads(line) for line in file.read_text().splitlines()[:2])

    with replica_of_turns(tmp_path, TEMPLATE, STOPS, adjust) as replica:
        controller = replica.controller
        while controller.received.empty():
            assert not replica.ended(0.1), replica.error
        controller.get(WeightsOpened)
        controller.until_asked(0)
        samples = [[Sample(2 * g, 0), Sample(2 * g + 1, 0)] for g in range(len(rows))]
        groups = [PromptGroup(g, [START], "", row, samples[g]) for g, row in enumerate(rows)]
        controller.tell(Grant(1, 0, 0, groups, 1.0, 600, ""))
        messages, model = controller.collect(8, Generated, Scored), reference(replica.models[0])
        scored = {m.trajectory_id: m for m in messages if isinstance(m, Scored)}
        for t in (m.trajectory for m in messages if isinstance(m, Generated)):
            score = scored[t.trajectory_id]
            assert t.place is not None and t.policies == 1 and not score.error
            [response] = read(replica.folder, [(t.trajectory_id, t.place)])
            won = score.parts["won"]
            assert score.reward == won and score.parts["guesses"] == t.turns == len(response.spans)
            assert t.turns == GUESSES or won
            assert all(a.end < b.start for a, b in pairwise(response.spans))
            expected = hf_logprobs(model, [START], response.tokens.tolist())
            gap = (torch.tensor(response.logprobs) - expected)[torch.tensor(response.loss_mask)].abs().max()
            assert gap < 1e-3
        assert len(scored) == 4
