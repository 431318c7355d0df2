"""docs/promises.md#branches in a whole run with tools on emulated engines, whose template leaves out
earlier results; real workers, tools in processes."""

import sqlite3
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from helpers.emulated.stand import Shuffler, Stand
from helpers.emulated.turning import CALL, several_turns, trajectories
from helpers.models.chats import CLEARED, save
from laminar_hpc.data.tokens import TextDecoder

TOOLBOX = """
def look(key: str) -> str:
    "Looks it up."
    return "v" + key

def score(*, prompt, response, row):
    return {"reward": len(response) % 2}
"""
RESULT, NEXT = "<|tool|>\nvk<|end|>\n", "<|assistant|>\n"


@pytest.mark.slow
def test_a_run_of_branches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each branch begins with the prompt and the last result, without the earlier ones; all are trained with
    the weights of one policy, and nothing moves. The audit knows of each trajectory once."""
    monkeypatch.chdir(tmp_path)
    config = several_turns(tmp_path, TOOLBOX)
    save(Path(config.model.path), CLEARED, ["<|end|>"])
    config.environment.history = "branch"
    config.sampling.max_response_tokens, config.emulation.median_response_tokens = 2000, 1200
    Stand(config, each_turn=Shuffler(seed=3)).run(240)
    decoder, branched = TextDecoder(Path(config.model.path)), 0
    for whole in trajectories(config):
        response, first = whole.response, len(whole.prompt)
        tokens = np.concatenate((whole.prompt, response.tokens))
        drawn = np.concatenate((np.zeros(first, bool), response.loss_mask))
        assert whole.record.moves == 0 and {s.weight_id for s in response.spans} == {whole.record.weight_id}
        assert (
            len(response.starts) >= len(response.spans) - 2
            and not response.logprobs[~response.loss_mask].any()
        )
        begun = decoder.text(whole.prompt.tolist(), specials=True).removesuffix("<|end|>\n" + NEXT)
        edges = [0, *(first + start for start in response.starts), len(tokens)]
        for begin, end in list(pairwise(edges))[1:]:
            given = int(np.flatnonzero(drawn[begin:end])[0])
            history = decoder.text(tokens[begin : begin + given].tolist(), specials=True)
            assert history.startswith(begun) and history.endswith(f"{CALL}<|end|>\n{RESULT}{NEXT}")
            assert history.count(RESULT) == 1 and history.count(CALL) > 0
        branched += len(response.starts)
    assert branched > 5
    database = sqlite3.connect(f"file:{config.run_dir}/store.sqlite?mode=ro", uri=True)
    states = dict(database.execute("SELECT state, count(*) FROM trajectories GROUP BY state"))
    database.close()
    wanted = config.steps * config.algorithm.prompts_per_step * config.algorithm.samples_per_prompt
    assert states["consumed"] == wanted
