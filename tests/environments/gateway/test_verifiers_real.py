"""docs/environments.md#an-environment-of-verifiers with the package itself: tasksets of v1, verifiers' own
Wordle among them, an environment of v0, and the client of `renderers`, in virtual environments that are made
here. The model alone is stood in for, by a script of what it says."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_agents import END, Rollout, Script, saying, with_agents

from helpers.environments.verifiers_of_pypi import V1, interpreter
from helpers.paths import HELPERS
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.environments.turns.pool import EnvironmentPool
from laminar_hpc.environments.verifiers.rows import run_rows
from laminar_hpc.rollout.in_flight import Outcome, TrajectoryInFlight
from laminar_hpc.rollout.partial_response import logprobs_of, tokens_of

pytestmark = pytest.mark.slow
V0 = "0.1.14", "0.3.1"  # the first and the last version with v0 that is taken
OF_V0 = """
import verifiers as vf
from datasets import Dataset


def load_environment(first: int = 1):
    rows = [{"question": f"{n}+{n}=", "answer": str(n + n)} for n in range(first, first + 4)]

    async def right(completion, answer) -> float:
        return float(answer in completion[-1]["content"])

    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[right]))
"""
OF_RENDERERS = """
import json
from openai import AsyncOpenAI
from renderers.client import generate


class Renderer:
    supports_tools = True

    def get_stop_token_ids(self):
        return [1]

    def parse_response(self, ids, **given):
        from renderers.base import ParsedResponse
        return ParsedResponse(content="".join(map(str, ids)))


async def run(row, base_url, api_key, model):
    said, seen = row["ids"], []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(2):
            answer = await generate(
                client=client, renderer=Renderer(), messages=[], model=model, prompt_ids=said,
                sampling_params={"max_tokens": 4, "temperature": 1.0})
            seen.append([answer["completion_ids"], answer["completion_logprobs"], answer["finish_reason"]])
            said = [*said, *answer["completion_ids"], 7]
    with open("generated.json", "w") as file:
        json.dump([said, seen], file)
    return 1.0
"""


@pytest.fixture(scope="module")
def v1(tmp_path_factory: pytest.TempPathFactory) -> str:
    return interpreter(tmp_path_factory.mktemp("v1"), V1)


@pytest.fixture(scope="module", params=V0)
def v0(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return interpreter(tmp_path_factory.mktemp("v0"), [f"verifiers=={request.param}"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder, path = tmp_path_factory.mktemp("tasksets"), list(sys.path)
    source = (HELPERS / "environments/tasksets_of_v1.py").read_text()
    (folder / "sums.py").write_text(source + '\n\n__all__ = ["SumsTaskset"]\n')
    (folder / "words.py").write_text(source + '\n\n__all__ = ["WordsTaskset", "WordsEnv"]\n')
    (folder / "old_sums.py").write_text(OF_V0)
    (folder / "of_renderers.py").write_text(OF_RENDERERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("NLTK_DATA", str(word_lists(folder / "nltk")))
        yield folder
    sys.path[:] = path


def word_lists(folder: Path) -> Path:
    """What Wordle reads of nltk, with one word that it can choose."""
    words, tagger = folder / "corpora" / "words", "averaged_perceptron_tagger_eng"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("crane\n")
    tags = folder / "taggers" / tagger
    tags.mkdir(parents=True)
    for name, value in (("weights", {"bias": {"NN": 1.0}}), ("tagdict", {}), ("classes", ["NN"])):
        (tags / f"{tagger}.{name}.json").write_text(json.dumps(value))
    return folder


async def played(
    folder: Path, python: str, named: object, scripts: list[Script], turns: int = 8
) -> list[tuple[TrajectoryInFlight, Outcome, str]]:
    """Episodes of the first rows, at once: the trajectory, what became of it, and its text."""
    given = {"verifiers": named, "python": python, "max_turns": turns, "timeout_seconds": 300.0}
    found: list[tuple[TrajectoryInFlight, Outcome, str]] = []

    async def test(rollout: Rollout) -> None:
        file = await asyncio.to_thread(run_rows, rollout.config.environment, str(folder / "run"))
        rows = [json.loads(line) for line in Path(file).read_text().splitlines()][: len(scripts)]
        works = [rollout.works("", **row) for row in rows]
        outcomes = await asyncio.gather(*map(rollout.run, works, scripts))
        for work, outcome in zip(works, outcomes, strict=True):
            text = rollout.text([*work.group.prompt_tokens, *tokens_of(work.partial)])
            found.append((work, outcome, text))

    await with_agents(folder, "", test, **given)
    return found


async def test_a_taskset_of_one_turn(folder: Path, v1: str) -> None:
    """Its rewards and metrics are verifiers' own; its taskset's fields are the user's."""
    named = {"taskset": {"id": "sums", "first": 3}}
    right, wrong = await played(folder, v1, named, [saying("6"), saying("60?")])
    assert right[2] == f"<pad><|system|>\nAdd.{END}\n<|user|>\n3+3={END}\n<|assistant|>\n6{END}"
    assert right[1] == wrong[1] == Outcome() and right[0].score is not None and wrong[0].score is not None
    assert (right[0].score.reward, right[0].score.parts) == (1.0, {"right": 1.0, "length": 1.0})
    assert (wrong[0].score.reward, wrong[0].score.parts) == (0.0, {"right": 0.0, "length": 3.0})


async def test_a_game_of_several_turns(folder: Path, v1: str) -> None:
    """The environment speaks as the user: one conversation, one trajectory. The run's limit of turns ends it
    as verifiers ends it, graded on what is there; an environment that raises is not graded."""
    scripts = [saying("x", "abc"), saying("x", "y", "z"), saying()]
    won, stopped, broken = await played(folder, v1, "words", scripts, turns=3)
    begin, no = f"<pad><|user|>\nguess{END}\n<|assistant|>\n", f"{END}\n<|user|>\nno{END}\n<|assistant|>\n"
    assert won[2] == f"{begin}x{no}abc{END}" and stopped[2] == f"{begin}x{no}y{no}z{END}"
    assert won[0].score is not None and stopped[0].score is not None
    assert (won[0].score.reward, won[0].score.parts) == (1.0, {"won": 1.0, "guesses": 2.0})
    assert (stopped[0].score.reward, stopped[0].score.parts) == (0.0, {"won": 0.0, "guesses": 3.0})
    assert broken[1].ungraded and "EnvError: WordsEnv.run(): OSError: its shop is closed" in (
        broken[1].lost or ""
    )


async def test_a_full_conversation_is_graded(folder: Path, v1: str) -> None:
    """Where the next message has no room the chat loop ends, and the environment grades what is there."""

    async def test(rollout: Rollout) -> None:
        file = await asyncio.to_thread(run_rows, rollout.config.environment, str(folder / "run"))
        row = json.loads(Path(file).read_text().splitlines()[0])
        said = f"<|user|>\nguess{END}\n<|assistant|>\nx{END}"
        work = rollout.works("", room=len(rollout.encode(said)) + 3, **row)
        assert await rollout.run(work, saying("x")) == Outcome() and work.finish_reason == "length"
        assert work.score is not None and work.score.parts == {"won": 0.0, "guesses": 1.0}
        assert (work.score.reward, work.score.error) == (0.0, "") and len(work.partial.spans) == 1

    await with_agents(folder, "", test, verifiers="words", python=v1, timeout_seconds=300.0)


async def test_wordle_of_verifiers(folder: Path, v1: str) -> None:
    """The taskset that verifiers ships, as it is; of its endless tasks as many as were asked for."""
    named = {"taskset": {"id": "textarena", "game": "Wordle-v0"}, "select": {"limit": 2}}
    scripts = [saying("[slate]", "[crane]"), saying("[slate]", "[stone]")]
    won, lost = await played(folder, v1, named, scripts, turns=2)
    assert won[0].score is not None and won[0].score.parts == {"game_reward": 1.0}
    assert lost[0].score is not None and lost[0].score.reward == 0.0 and len(lost[0].partial.spans) == 2
    assert "You are Playing Wordle" in won[2] and won[2].endswith(f"[crane]{END}")
    endless = {"verifiers": {"taskset": named["taskset"]}, "python": v1}
    rollout = Rollout(folder, "", **endless)
    with pytest.raises(LaminarError, match="its tasks never end: say how many"):
        await asyncio.to_thread(run_rows, rollout.config.environment, str(folder / "run"))


async def test_code_runs_where_the_user_says(folder: Path, v1: str) -> None:
    """A harness that runs what the model has written is refused, unless it is said where."""
    named = {"taskset": {"id": "sums"}, "agent": {"harness": {"id": "bash"}}}
    rollout = Rollout(folder, "", verifiers=named, python=v1)
    with pytest.raises(LaminarError, match="'bash' runs what the model has written: say where"):
        await EnvironmentPool(rollout.config.environment).start()


async def test_an_environment_of_v0(folder: Path, v0: str) -> None:
    """Unchanged, by each version; load_environment's arguments are the user's."""
    named = {"taskset": {"id": "old_sums", "first": 3}}
    right, wrong = await played(folder, v0, named, [saying("6"), saying("7")])
    assert right[0].score is not None and wrong[0].score is not None
    assert (right[0].score.reward, wrong[0].score.reward) == (1.0, 0.0)
    assert right[0].score.parts["right"] == 1.0 and right[2].endswith(f"3+3={END}\n<|assistant|>\n6{END}")


async def test_the_client_of_renderers(folder: Path, v1: str) -> None:
    """It takes what the gateway answers: the drawn tokens, each with its log-prob."""

    async def test(rollout: Rollout) -> None:
        first = [*rollout.encode("<pad>"), *rollout.encode("hello")]
        work = rollout.works("", ids=first)
        assert await rollout.run(work, lambda text: f"(again){END}") == Outcome()
        said, seen = json.loads((folder / "generated.json").read_text())
        whole = [*work.group.prompt_tokens, *tokens_of(work.partial).tolist()]
        assert [*whole, 7] == said and len(work.partial.spans) == 2
        for (ids, logprobs, finish), span in zip(seen, work.partial.spans, strict=True):
            assert ids == whole[span.start + 1 : span.end + 1] and len(ids) == 4 and finish == "length"
            assert logprobs == logprobs_of(work.partial)[span.start : span.end].tolist()

    await with_agents(folder, "", test, agent="of_renderers.run", python=v1)
