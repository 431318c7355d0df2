"""docs/promises.md#agents in whole runs on emulated engines, whose turns end with calls: real workers and
agents, deaths of engines, moves all around."""

import shutil
from pathlib import Path

import pytest

from helpers.emulated.stand import Shuffler, Stand, small_config
from helpers.emulated.turning import CALL, TURN, save_model, trajectories
from helpers.models.chats import SEPARATED, vocabulary_size
from helpers.paths import HELPERS
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.data.tokens import TextDecoder
from laminar_hpc.simulator.emulated import responses

AGENTS = HELPERS / "environments/agents_by_url.py"
ROW = """
import agents_by_url

async def run(row, base_url, api_key, model):
    open("begun.log", "a").write("b")
    return await agents_by_url.run(row | {"kind": "looks"}, base_url, api_key, model)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run of agents with one tool."""
    shutil.copy(AGENTS, tmp_path)
    (tmp_path / "agent_of_runs_test.py").write_text(ROW)
    monkeypatch.chdir(tmp_path)
    config = small_config(tmp_path, replicas=3, steps=2)
    save_model(Path(config.model.path), "<pad>" + SEPARATED)
    config.trainer.tokens_per_microbatch = 4096
    config.data.chat_template, config.algorithm.prompts_per_step = True, 8
    config.emulation.turn_tokens, config.emulation.call = TURN, CALL
    config.emulation.median_response_tokens = 700.0
    config.environment.agent, config.reward.function = "agent_of_runs_test.run", ""
    config.rollout.increment_tokens = 20
    return config


@pytest.mark.slow
def test_agents_keep_their_policy(config: RunConfig) -> None:
    """Weights are published and an engine dies while agents think: each trajectory has one policy, its drawn
    tokens are the engine's at their places, its calls are what its agent has answered, and none has moved."""
    shuffler, deaths = Shuffler(seed=3), list[int]()

    def hurt(controller: object) -> None:
        shuffler(controller)  # type: ignore
        log = Path("begun.log")
        if not deaths and log.exists() and len(log.read_text()) > 40:
            deaths.append(1)
            stand.engine(1).die()

    stand = Stand(config, each_turn=hurt)
    stand.run(150)
    found, decoder = trajectories(config), TextDecoder(Path(config.model.path))
    assert deaths and {whole.record.attempt for whole in found} != {0}
    several = 0
    for whole in found:
        record, response = whole.record, whole.response
        mask = response.loss_mask
        assert {s.weight_id for s in response.spans} == {record.weight_id} and record.policies == 1
        assert record.moves == 0 and decoder.text(whole.prompt.tolist(), specials=True) == "<pad>"
        assert record.trained == mask.sum() and not response.logprobs[~mask].any()
        answers = 0
        for span in response.spans:
            run = range(span.start, span.end)
            said = decoder.text(response.tokens[run].tolist(), specials=True)
            calls = said.endswith(CALL + "<|end|>")
            answers += calls
            kept = run[: -len(CALL) - 1] if calls else run
            invented = responses.tokens(record.trajectory_id, span.start, span.end, vocabulary_size())
            assert response.tokens[kept].tolist() == invented[: len(kept)].tolist()
            expected = responses.logprobs(record.trajectory_id, span.start, span.end)
            assert response.logprobs[run].tolist() == expected.tolist()
        text = decoder.text(response.tokens.tolist(), specials=True)
        results = text.count("\n<|tool|>\nvk<|end|>\n<|assistant|>\n")
        assert results == len(response.spans) - 1 <= answers
        assert record.reward_parts["environment.turns"] == len(response.spans)
        if record.finish_reason == "stop":
            assert record.reward == record.reward_parts["environment.tool_calls"] == results
            several += results > 0
    assert several > 8
