"""docs/promises.md#one-policy over several turns: whole runs with tools on emulated engines, whose turns
end with calls; real workers, moves, tools in processes, deaths."""

import json
import re
import sqlite3
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from helpers.emulated.stand import Shuffler, Stand
from helpers.emulated.turning import CALL, several_turns, trajectories
from helpers.models.chats import vocabulary_size
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.data.tokens import TextDecoder
from laminar_hpc.environments.turns.ahead import Ahead
from laminar_hpc.environments.turns.session import Session
from laminar_hpc.machine.observability.trace import read_spans
from laminar_hpc.simulator.emulated import responses
from laminar_hpc.simulator.emulation.fleet import EmulatedReplica
from laminar_hpc.store.payload.whole import Whole

TOOLBOX = """
import asyncio, os, time

def _noted(what):
    with open("calls.log", "a") as file:
        file.write(what + "\\n")

def look(key: str) -> str:
    "Looks it up."
    _noted("look")
    time.sleep(0.05)
    return "v" + key

class Shelf:
    def reset(self, prompt: str, **row) -> str:
        self.looks = 0
        return " shelf of " + prompt

    def look(self, key: str) -> str:
        "Looks it up."
        _noted("look")
        self.looks += 1
        if os.path.exists("break") and self.looks == 2:
            os.unlink("break")
            os._exit(7)
        return "v" + key

    def get_reward(self) -> dict:
        return {"reward": self.looks % 2, "accuracy": 1.0, "looks": self.looks}

class Drawer:
    async def reset(self, prompt: str) -> str:
        self.calls = 0
        return " drawer of " + prompt

    async def look(self, key: str) -> str:
        "Takes it from a drawer."
        self.calls += 1
        return "in the drawer: " + key

    async def get_reward(self) -> float:
        return self.calls

class Slow(Drawer):
    async def reset(self, prompt: str) -> str:
        await asyncio.sleep(0.3)
        return await super().reset(prompt)

class Broken(Shelf):
    def reset(self, prompt: str, **row) -> None:
        if os.path.exists("all") or int(prompt) % 4 == 1:
            raise RuntimeError("no shelf")
        self.looks = 0

def score(*, prompt, response, row):
    return {"reward": len(response) % 2, "calls": response.count("<tool_call>")}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run with `look` as its tool."""
    monkeypatch.chdir(tmp_path)
    return several_turns(tmp_path, TOOLBOX)


def assert_grown(config: RunConfig, whole: Whole, answer: str) -> int:
    """One policy; what was drawn stands where the engine drew it, each turn but the last ends with a call,
    and behind it stands what the template writes around the tool's answer. Returns the number of calls."""
    record, response = whole.record, whole.response
    mask, decoder = response.loss_mask, TextDecoder(Path(config.model.path))
    assert {s.weight_id for s in response.spans} == {record.weight_id} and record.policies == 1
    assert record.trained == mask.sum() and not response.logprobs[~mask].any()
    runs = np.split(np.arange(len(mask)), np.flatnonzero(np.diff(mask)) + 1)
    drawn = [run for run in runs if mask[run[0]]]
    given = [decoder.text(response.tokens[run].tolist(), specials=True) for run in runs if not mask[run[0]]]
    for run in drawn:
        end = int(run[-1]) + 1
        said = decoder.text(response.tokens[run].tolist(), specials=True)
        kept = run[: -len(CALL) - 1] if said.endswith(CALL + "<|end|>") else run
        invented = responses.tokens(record.trajectory_id, int(run[0]), end, vocabulary_size())
        assert response.tokens[kept].tolist() == invented[: len(kept)].tolist()
        expected = responses.logprobs(record.trajectory_id, int(run[0]), end)
        assert response.logprobs[run].tolist() == expected.tolist()
    for run in drawn[:-1]:
        said = decoder.text(response.tokens[run[-len(CALL) - 1 :]].tolist(), specials=True)
        assert said == CALL + "<|end|>"
    calls = [text for text in given if text == f"\n<|tool|>\n{answer}<|end|>\n<|assistant|>\n"]
    assert record.reward_parts["environment.tool_calls"] == len(calls) == len(drawn) - 1
    assert record.reward_parts["environment.turns"] == len(drawn)
    return len(calls)


def called() -> int:
    return Counter(Path("calls.log").read_text().split())["look"]


@pytest.mark.slow
def test_turns_move_and_keep_their_policy(config: RunConfig) -> None:
    """Weights are published while tools are called, and trajectories move between and within turns: each
    has one policy, every token is where it was drawn, and no call was made twice."""
    shuffler = Shuffler(seed=3)
    stand = Stand(config, each_turn=shuffler)
    stand.run(120)
    found = trajectories(config)
    made = [assert_grown(config, whole, "vk") for whole in found]
    assert sum(made) == called() and max(made) > 1
    assert sum(whole.record.moves for whole in found) > 3 and shuffler.begun
    assert {whole.record.reward_parts["calls"] for whole in found} == {0.0}, "the reward is of the last turn"


@pytest.mark.slow
def test_replicas_die_while_tools_are_called(config: RunConfig) -> None:
    """What is known of a trajectory goes on elsewhere; one whose call had no result yet begins again from its
    prompt. All end whole."""
    deaths: list[int] = []

    async def end(replica: EmulatedReplica) -> None:
        assert replica.worker is not None
        replica.worker._leave(LaminarError("it was killed"))

    def hurt(_: object) -> None:
        log = Path("calls.log")
        if len(deaths) < 2 and log.exists() and log.read_text().count("look") > 10 * (len(deaths) + 1):
            deaths.append(len(deaths))
            stand.loop.run(end(stand.replicas[deaths[-1]]))

    stand = Stand(config, each_turn=hurt)
    stand.run(120)
    found = trajectories(config)
    assert len(deaths) == 2 and stand.lives > config.rollout.replicas
    assert sum(assert_grown(config, whole, "vk") for whole in found) <= called()
    assert {whole.record.attempt for whole in found} != {0}


@pytest.mark.slow
def test_environments_of_a_factory(config: RunConfig) -> None:
    """Each trajectory has an instance of its own, whose reset stands behind the prompt and whose get_reward
    is the reward; one whose environment dies begins again in a fresh one. It moves, and its environment is
    called and graded where it is: no call is made twice, and none in another's."""
    config.environment.tools, config.environment.factory = [], "turns_toolbox.Shelf"
    config.reward.function = ""
    Path("break").touch()
    stand = Stand(config, each_turn=Shuffler(seed=3))
    stand.run(120)
    found = trajectories(config)
    made = [assert_grown(config, whole, "vk") for whole in found]
    decoder = TextDecoder(Path(config.model.path))
    for whole, calls in zip(found, made, strict=True):
        prompt = decoder.text(whole.prompt.tolist(), specials=True)
        opening = decoder.text(whole.response.tokens[: whole.response.mask_runs[1]].tolist(), specials=True)
        said = prompt.rpartition("<|user|>\n")[2]
        assert opening == f" shelf of {said}<|end|>\n<|assistant|>\n" and whole.response.mask_runs[0] == 0
        assert whole.record.reward == calls % 2 and whole.record.reward_parts["looks"] == calls
    assert not Path("break").exists() and called() == sum(made) + 2, "two calls were of the one that died"
    assert sum(whole.record.moves for whole in found) > 3
    spans = [span for of in read_spans(Path(config.run_dir)).values() for span in of if span.kind == "tool"]
    assert [span.fields["what"] for span in spans if span.fields.get("failed") == "failed"] == ["look"]


@pytest.mark.slow
def test_each_row_has_its_own_environment(config: RunConfig) -> None:
    """Of two factories in one run, under an interpreter that is named: each trajectory is in the one that its
    row names, with its tools and its reward."""
    config.environment.tools, config.reward.function = [], ""
    config.environment.factory = {"shelf": "turns_toolbox.Shelf", "drawer": "turns_toolbox.Drawer"}
    config.environment.python = sys.executable
    names = ["shelf", "drawer"]
    rows = [{"prompt": f"{i:010d}", "environment": names[i % 2]} for i in range(64)]
    Path(config.data.train).write_text("".join(json.dumps(row) + "\n" for row in rows))
    Stand(config).run(120)
    found, decoder, seen = trajectories(config), TextDecoder(Path(config.model.path)), Counter[str]()
    for whole in found:
        prompt = decoder.text(whole.prompt.tolist(), specials=True)
        name = names[int(prompt[-1]) % 2]
        opening = decoder.text(whole.response.tokens[: whole.response.mask_runs[1]].tolist(), specials=True)
        calls = assert_grown(config, whole, "vk" if name == "shelf" else "in the drawer: k")
        assert opening.startswith(f" {name} of ") and ("from a drawer" in prompt) == (name == "drawer")
        assert whole.record.reward == (calls % 2 if name == "shelf" else calls)
        seen[name] += calls
    assert seen["shelf"] > 3 and seen["drawer"] > 3


@pytest.mark.slow
def test_resets_begin_before_their_grant(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica is told the rows of its next local batch, and resets their environments while the present one
    ends: most trajectories behind the first batches find theirs begun. No row is used twice in a pass."""
    taken, take = Counter[bool](), Ahead.take

    async def counted(ahead: Ahead, row: dict) -> Session | None:
        session = await take(ahead, row)
        taken[session is not None] += 1
        return session

    monkeypatch.setattr(Ahead, "take", counted)
    config.environment.tools, config.environment.factory = [], "turns_toolbox.Slow"
    config.reward.function, config.steps, config.rollout.replicas = "", 6, 2
    Stand(config).run(120)
    prompts = Counter(whole.prompt.tobytes() for whole in trajectories(config))
    assert set(prompts.values()) == {config.algorithm.samples_per_prompt}
    assert taken[True] > taken[False], f"{taken[True]} environments were begun before"


@pytest.mark.slow
def test_limits_end_a_trajectory_that_is_graded(config: RunConfig) -> None:
    """On turns and calls: what is there is scored, and the finish reason says which it was."""
    config.environment.max_turns, config.environment.max_tool_calls = 3, 1
    Stand(config).run(120)
    found = trajectories(config)
    ends = Counter(whole.record.finish_reason for whole in found)
    assert ends["calls"] > 3 and set(ends) <= {"calls", "stop", "length"}
    assert all(assert_grown(config, whole, "vk") <= 1 for whole in found)
    assert {
        whole.record.reward_parts["calls"] for whole in found if whole.record.finish_reason == "calls"
    } == {1}


@pytest.mark.slow
def test_what_no_environment_can_grade_is_not_trained(config: RunConfig) -> None:
    """A prompt whose environment always fails: its group is given up with all of its trajectories, its
    admission number is given to another, and the run trains whole batches. When every environment fails, the
    run says so in one line."""
    config.environment.tools, config.environment.factory = [], "turns_toolbox.Broken"
    config.reward.function = ""
    stand = Stand(config)
    stand.run(120)
    database = sqlite3.connect(f"file:{config.run_dir}/store.sqlite?mode=ro", uri=True)
    groups = database.execute("SELECT state, reason FROM groups").fetchall()
    states = dict(database.execute("SELECT state, count(*) FROM trajectories GROUP BY state"))
    database.close()
    size, wanted = config.algorithm.samples_per_prompt, config.steps * config.algorithm.prompts_per_step
    reasons = [reason for state, reason in groups if state == "given_up"]
    assert 0 < len(reasons) == len(groups) - wanted and states["given_up"] == size * len(reasons)
    assert all(re.match(r"an environment failed: its environment failed \d times", r) for r in reasons)
    assert (
        states["consumed"] + states.get("finished", 0) == size * wanted and not stand.controller.state.failure
    )

    config.run_dir = f"{config.run_dir}2"
    Path("all").touch()
    stand = Stand(config)
    stand.run(120)
    assert "groups had no grade, the last because its environment failed" in stand.controller.state.failure
