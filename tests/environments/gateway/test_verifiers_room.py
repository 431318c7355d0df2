"""docs/environments.md#an-environment-of-verifiers: its interpreter, its rows, what becomes of its episodes.
The package itself is stood in for (stand_in_verifiers.py); test_verifiers_real.py has it."""

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_agents import END, Rollout, saying, with_agents

from helpers.models.chats import vocabulary_size
from helpers.paths import HELPERS
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.rules import broken_rules
from laminar_hpc.config.schema import EnvironmentConfig, RunConfig
from laminar_hpc.environments.run_prompts import load_run_prompts
from laminar_hpc.environments.turns.pool import EnvironmentPool
from laminar_hpc.environments.verifiers.rows import run_rows
from laminar_hpc.machine.processes import process_is_alive
from laminar_hpc.rollout.in_flight import Outcome, TrajectoryInFlight

ENVIRONMENT = {"verifiers": "guessing", "python": sys.executable}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder, path = tmp_path_factory.mktemp("verifiers"), list(sys.path)
    shutil.copy(HELPERS / "environments" / "stand_in_verifiers.py", folder / "verifiers.py")
    shutil.copy(HELPERS / "environments" / "guessing.py", folder)
    (folder / "verifiers-0.3.1.dist-info").mkdir()
    (folder / "verifiers-0.3.1.dist-info" / "METADATA").write_text("Name: verifiers\nVersion: 0.3.1\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("LAMINAR_SECRET", "s")
        patch.setenv("WANDB_API_KEY", "s")
        patch.setenv("PYTHONPATH", str(folder / "ours"))
        yield folder
    sys.path[:] = path


def works(rollout: Rollout, *turns: int) -> list[TrajectoryInFlight]:
    """Of rows as rows.py writes them."""
    rows = [{"prompt": [{"role": "user", "content": "guess"}], "word": "yes", "turns": n} for n in turns]
    return [rollout.works("", task=row) for row in rows]


def test_a_runs_rows_are_written_once(folder: Path) -> None:
    """All tasks, or as many as were asked for; the run that goes on has those of its first start."""
    config = EnvironmentConfig(verifiers="guessing", python=sys.executable)
    file = run_rows(config, str(folder / "run"))
    rows = [json.loads(line) for line in Path(file).read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["guess 0", "guess 1", "guess 2"]
    assert [row["task"]["word"] for row in rows] == ["w0", "w1", "w2"]
    config.python = "/nowhere"
    assert run_rows(config, str(folder / "run")) == file
    words = {"taskset": {"id": "guessing", "words": 9}, "select": {"limit": 4}}
    command = [
        sys.executable,
        "-m",
        "laminar_hpc.environments.verifiers.rows",
        sys.executable,
        json.dumps(words),
        "four",
    ]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.stdout.strip().endswith("four: 4 rows") and Path("four").read_text().count("\n") == 4
    said = subprocess.run(command[:-1], capture_output=True, text=True)
    assert said.returncode == 2 and said.stderr.startswith(
        "usage: python -m laminar_hpc.environments.verifiers.rows"
    )


async def test_episodes_have_verifiers_rewards(folder: Path) -> None:
    """Two at once: each is one conversation, whose reward and metrics are the environment's; its process has
    none of our keys and packages, and what it has left running ends with it."""

    async def test(rollout: Rollout) -> None:
        first, second = works(rollout, 3, 2)
        scripts = saying("no", "leave", "yes"), saying("no", "no")
        outcomes = await asyncio.gather(*map(rollout.run, (first, second), scripts))
        assert outcomes == [Outcome(), Outcome()] and first.bound
        assert first.score is not None and second.score is not None
        assert (first.score.reward, first.score.parts) == (1.0, {"guesses": 3.0})
        assert (second.score.reward, second.score.parts) == (0.0, {"guesses": 2.0})
        assert len(first.partial.spans) == 3 and len(second.partial.spans) == 2
        theirs = json.loads(Path("environment.json").read_text())
        assert not {"LAMINAR_SECRET", "WANDB_API_KEY", "PYTHONPATH"} & set(theirs)
        assert process_is_alive(int(Path("left").read_text()))

    await with_agents(folder, "", test, **ENVIRONMENT)
    assert not process_is_alive(int(Path("left").read_text()))


async def test_what_fails_begins_again(folder: Path) -> None:
    """An environment that fails, hangs, or whose process dies is nobody's answer: the trajectory begins
    again, in a new process where the old one is gone; one that always fails is lost with its reason. Behind a
    limit it counts as a failure of the policy."""

    async def test(rollout: Rollout) -> None:
        dies, fails, hangs = works(rollout, 3, 3, 3)
        assert await rollout.run(dies, saying("die", "yes")) == Outcome()
        assert dies.score is not None and dies.score.reward == 1.0 and len(dies.partial.spans) == 1
        lost = await rollout.run(fails, saying("raise", "raise", "raise"))
        assert "3 times, at last: verifiers: UnluckyError: it is over" in (lost.lost or "") and lost.ungraded
        assert await rollout.run(hangs, saying("hang", "yes")) == Outcome() and hangs.score is not None
        rollout.episodes.limits.max_turns = 1
        [limited] = works(rollout, 9)
        assert await rollout.run(limited, lambda text: f"no{END}") == Outcome()
        assert limited.score is not None and limited.score.reward == -1.0
        assert limited.finish_reason == "turns" and "environment.max_turns" in limited.score.error

    await with_agents(folder, "", test, **ENVIRONMENT)


async def test_a_reward_that_is_none(folder: Path) -> None:
    """It fails alone: an episode beside it goes on in the same process, which is asked again."""

    async def test(rollout: Rollout) -> None:
        [beside, *strange] = works(rollout, *[9] * 6)
        said = ["nan", "much", "none", "text", "half"]
        turn = asyncio.Event()

        async def waits() -> Outcome:
            words = iter(("no", "yes"))

            async def script(work: TrajectoryInFlight) -> Outcome:
                answer = next(words)
                if answer == "yes":
                    await turn.wait()
                return await rollout.draw(work, lambda _: answer + END)

            return await rollout.episodes.run(beside, script)

        waiting = asyncio.create_task(waits())
        lives = [rollout.run(work, saying(*[word] * 3)) for work, word in zip(strange, said, strict=True)]
        lost = [outcome.lost or "" for outcome in await asyncio.gather(*lives)]
        turn.set()
        assert await waiting == Outcome() and beside.score is not None and beside.score.reward == 1.0
        words = ("it returned reward=nan", "beyond", "NoneType", "could not convert", "ValueError: ?")
        for text, word in zip(lost, words, strict=True):
            assert "3 times, at last: verifiers: " in text and word in text, text

    await with_agents(folder, "", test, **ENVIRONMENT)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"verifiers": "guessing", "python": "/nowhere/python"},
            "environment.python=/nowhere/python is no program",
        ),
        ({"python": "/bin/false"}, "guessing: /bin/false ended"),
        ({"verifiers": "missing"}, "missing is a taskset of v1, for verifiers 0.4.; here is 0.3.1"),
        ({"verifiers": {"taskset": {"id": "guessing", "words": -1}}}, "ValueError: fewer than none"),
        ({"verifiers": {"taskset": {"id": "guessing"}, "agent": {}}}, "an environment of v0 has no 'agent'"),
    ],
)
async def test_what_cannot_be_used_is_one_line(folder: Path, given: dict, words: str) -> None:
    """Before anything starts."""
    with pytest.raises(LaminarError) as error:
        await EnvironmentPool(EnvironmentConfig(**{**ENVIRONMENT, **given})).start()
    assert words in str(error.value) and "\n" not in str(error.value)


def test_rows_without_tasks_are_refused(folder: Path) -> None:
    """With their place, before a run."""
    config = RunConfig(run_dir=str(folder / "other"))
    config.environment = EnvironmentConfig(**ENVIRONMENT)
    model = Rollout(folder, "").model
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": vocabulary_size()}))
    config.model.path, config.data.chat_template = str(model), True
    config.trainer.tokens_per_microbatch, config.sampling.max_response_tokens = 4096, 1000
    said: list[str] = []
    train, _ = load_run_prompts(config, said.append)
    assert [len(prompt.tokens) for prompt in train] == [1, 1, 1] and train[2].row["task"]["word"] == "w2"
    (folder / "plain.jsonl").write_text('{"prompt": "a"}\n')
    config.data.train = "plain.jsonl"
    with pytest.raises(LaminarError, match=r"data.train=plain.jsonl: its row 1 has no task"):
        load_run_prompts(config, said.append)


def test_rules(folder: Path) -> None:
    """One kind of environment; an interpreter; a table with a taskset."""
    config = RunConfig(run_dir=str(folder))
    config.data.chat_template = True
    config.environment = EnvironmentConfig(verifiers={"taskset": {}}, agent="a.b")
    lines = "\n".join(broken_rules(config, None))
    assert "environment.agent=a.b and environment.verifiers={" in lines and "leave all but one out" in lines
    assert "environment.verifiers needs environment.python" in lines and "{taskset: {id: ID}}" in lines
    config.environment = EnvironmentConfig(**ENVIRONMENT)
    assert not [line for line in broken_rules(config, None) if "environment" in line]
