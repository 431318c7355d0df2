"""Reward functions written for TRL and for verl run unchanged, others are refused with the words that
help, and several make one sum."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar_hpc.config.errors import LaminarError
from laminar_hpc.config.rewards import check_reward, reward_functions
from laminar_hpc.config.schema import RewardConfig, RunConfig
from laminar_hpc.environments.preflight import check_functions, first_call
from laminar_hpc.environments.reward_pool import RewardPool, Score

FUNCTIONS = """
import asyncio

# As in TRL's documentation: a batch of completions and the columns of the data set in, a list of rewards out.
def exact(completions, answer, **kwargs):
    return [1.0 if completion.endswith(right) else 0.0 for completion, right in zip(completions, answer)]

async def exact_async(prompts, completions, completion_ids, answer, log_metric, trainer_state=None, **kwargs):
    await asyncio.sleep(0.01)
    log_metric("seen", 1.0)
    return [float(c.endswith(a)) + len(ids) for c, a, ids in zip(completions, answer, completion_ids)]

def chat(prompts, completions, **kwargs):
    assert prompts[0][0]["role"] == "user" and completions[0][0]["role"] == "assistant"
    return [float(len(completion[0]["content"])) for completion in completions]

def only_math(completions, task, **kwargs):
    return [1.0 if kind == "math" else None for kind in task]

def two(completions, **kwargs): return [1.0, 2.0]
def needs_state(completions, trainer_state): return [1.0]

# As in verl's documentation.
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    bonus = 0.5 if data_source == "gsm8k" else 0.0
    return float(solution_str == ground_truth) + bonus + extra_info.get("bonus", 0.0)

async def compute_score_async(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str == ground_truth), "acc": True, "pred": solution_str}

def router(data_source, solution_str, ground_truth, extra_info, reward_router_address): return 1.0

# Ours.
def right(*, prompt, response, row):
    return {"reward": float(response == row["answer"]), "accuracy": 1.0, "steps": 2}
def length(*, prompt, response, row): return -float(len(response))
def fails(*, prompt, response, row): raise KeyError("field")
def text(*, prompt, response, row): return "good"
def strange(text, truth): return 1.0
def positional(prompt, response, row, /): return 1.0
"""
MODULE = "functions_for_style_test"


@pytest.fixture(scope="module", autouse=True)
def user_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder, before = tmp_path_factory.mktemp("user"), os.getcwd()
    (folder / f"{MODULE}.py").write_text(FUNCTIONS)
    os.chdir(folder)
    yield folder
    os.chdir(before)


async def scores(config: RewardConfig, *calls: tuple, prompt_field: str = "prompt") -> list[Score]:
    """Of calls (prompt, response, row, tokens)."""
    check_reward(config)
    pool = RewardPool(config, prompt_field)
    await pool.start()
    try:
        return [await pool.score(*call) for call in calls]
    finally:
        await pool.close()


def config(function: str, style: str = "laminar", **more) -> RewardConfig:
    return RewardConfig(function=f"{MODULE}.{function}", style=style, score_on_failure=-7.0, **more)


def several(**entries) -> RewardConfig:
    return RewardConfig(functions=entries, score_on_failure=-7.0)


# ---- TRL ---------------------------------------------------------------------------------------------------


async def test_trl_functions_run_unchanged():
    """Plain and async: columns come as lists, token ids are there, what the trainer would give is
    accepted."""
    row = {"prompt": "1+1=", "answer": "2", "other": [1, 2]}
    call = ("1+1=", "it is 2", row, [5, 6, 7])
    assert [s.reward for s in await scores(config("exact", "trl"), call, ("1+1=", "3", row, []))] == [
        1.0,
        0.0,
    ]
    assert (await scores(config("exact_async", "trl"), call))[0].reward == 4.0


async def test_trl_functions_get_messages_where_the_data_has_messages():
    """As in a conversational data set; also where another field holds the prompt."""
    messages = [{"role": "user", "content": "hello"}]
    for prompt_field, row in (
        ("prompt", {"prompt": messages}),
        ("a.b|c", {"c": messages}),
        ("a.b", {"a": {"b": messages}}),
        ("turns.0.messages", {"turns": [{"messages": messages}]}),
    ):
        found = await scores(
            config("chat", "trl"), ("<user>hello", "four", row, []), prompt_field=prompt_field
        )
        assert (found[0].reward, found[0].error) == (4.0, "")


async def test_none_means_that_it_does_not_apply():
    """It takes no part in the sum; a response that no function applies to has no reward, which is an error
    of its own."""
    both = several(
        math={"function": f"{MODULE}.only_math", "style": "trl"},
        length={"function": f"{MODULE}.length", "weight": 0.5},
    )
    math, other = await scores(both, ("", "abcd", {"task": "math"}), ("", "abcd", {"task": "poem"}))
    assert (math.reward, math.parts) == (-1.0, {"math": 1.0, "length": -4.0})
    assert (other.reward, other.parts, other.error) == (-2.0, {"length": -4.0}, "")
    alone = await scores(config("only_math", "trl"), ("", "", {"task": "poem"}))
    assert alone[0].reward == -7.0 and "no reward function applies" in alone[0].error


async def test_what_trl_functions_cannot_have_is_said():
    """A list of another length, a column that is not there, the trainer's state."""
    found = await scores(config("two", "trl"), ("", "", {}))
    assert "returned 2 of them instead of a list with one reward" in found[0].error
    found = await scores(config("exact", "trl"), ("", "", {"solution": "2"}))
    assert "asks for 'answer', which the row does not have; it has: solution" in found[0].error
    assert "asks for 'trainer_state'" in (await scores(config("needs_state", "trl"), ("", "", {})))[0].error


async def test_a_reward_of_trl_itself():
    """The real thing, from the installed package."""
    real = RewardConfig(
        function="trl.rewards.format_rewards.think_format_reward", style="trl", timeout_seconds=60.0
    )
    row = {"prompt": [{"role": "user", "content": "hello"}]}
    found = await scores(real, ("", "<think>\nso\n</think>\nyes", row, []), ("", "yes", row, []))
    assert [(s.reward, s.error) for s in found] == [(1.0, ""), (0.0, "")]


# ---- verl --------------------------------------------------------------------------------------------------


async def test_verl_functions_run_unchanged():
    """The truth is where verl's files have it, or the row's answer; `score` is the reward, `acc` the
    accuracy, texts are left out."""
    row = {"data_source": "gsm8k", "reward_model": {"ground_truth": "42"}, "extra_info": {"bonus": 0.25}}
    found = await scores(
        config("compute_score", "verl"),
        ("", "42", row),
        ("", "42", {"answer": "42"}),
        ("", "1", {"answer": "42"}),
    )
    assert [s.reward for s in found] == [1.75, 1.0, 0.0]
    found = await scores(config("compute_score_async", "verl"), ("", "42", row))
    assert (found[0].reward, found[0].parts) == (1.0, {"accuracy": 1.0})


# ---- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "style", "says"),
    [
        (
            "exact",
            "laminar",
            "(completions, answer, kwargs) are those of a TRL reward function: set reward.style=trl",
        ),
        ("chat", "laminar", "set reward.style=trl"),
        ("compute_score", "laminar", "are those of verl's compute_score: set reward.style=verl"),
        ("compute_score_async", "trl", "set reward.style=verl"),
        ("right", "trl", "are laminar's own: set reward.style=laminar"),
        ("right", "verl", "are laminar's own: set reward.style=laminar"),
        (
            "strange",
            "laminar",
            "(text, truth) do not fit reward.style=laminar, which calls it with prompt=, response= and row=",
        ),
        ("positional", "laminar", "do not fit reward.style=laminar"),
        ("router", "verl", "do not fit reward.style=verl, which calls it with data_source="),
    ],
)
def test_a_function_of_another_kind_is_refused_before_anything_starts(function, style, says):
    """By its parameters: one line that names them and the style that would run it."""
    with pytest.raises(LaminarError) as refusal:
        check_functions(RunConfig(reward=config(function, style)))
    assert says in str(refusal.value) and str(refusal.value).startswith(
        f"reward.function='{MODULE}.{function}'"
    )


def test_one_of_several_is_refused_by_its_own_key():
    """Among several rewards the refused one is named by its own key."""
    with pytest.raises(LaminarError, match=r"set reward\.functions\.b\.style=trl"):
        check_functions(
            RunConfig(reward=several(a={"function": f"{MODULE}.right"}, b={"function": f"{MODULE}.exact"}))
        )


def test_the_first_call_refuses_mistakes_and_warns_of_failures():
    """On the first row, with its own answer: what is no reward, or lacks a column, is refused; a call that
    raises only warns."""
    row = {"answer": "2"}
    assert first_call(RunConfig(reward=config("right")), "1+1=", row) == []
    (warning,) = first_call(RunConfig(reward=config("fails")), "1+1=", row)
    assert warning.startswith("warning: reward.function=")
    assert warning.endswith("KeyError: 'field'; the row has answer")
    with pytest.raises(
        LaminarError, match=r"on the first row, with its own answer.*str instead of a number; return a number"
    ):
        first_call(RunConfig(reward=config("text")), "1+1=", row)
    with pytest.raises(LaminarError, match=r"on the first row, with an empty response: it asks for 'answer'"):
        first_call(RunConfig(reward=config("exact", "trl")), "1+1=", {"solution": "2"})


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (
            RewardConfig(function="a.b", functions={"c": {"function": "c.d"}}),
            "are both set: add `reward.function=`",
        ),
        (RewardConfig(style="trl", functions={"c": {"function": "c.d"}}), "set reward.functions.NAME.style"),
        (RewardConfig(), "reward.function is empty: name a Python function"),
        (
            RewardConfig(functions={"c": {"function": "c.d", "weigth": 1}}),
            "reward.functions.c.weigth: no such key",
        ),
        (
            RewardConfig(functions={"c": {"function": "c.d", "weight": "heavy"}}),
            "reward.functions.c.weight='heavy': must be a number",
        ),
        (
            RewardConfig(functions={"c": {"function": "c.d", "weight": float("inf")}}),
            "reward.functions.c.weight=inf",
        ),
        (RewardConfig(functions={"c": {"function": "c.d", "weight": 0}}), "every weight is 0"),
        (RewardConfig(functions={"c": {"weight": 1}}), "set either reward.functions.c.function"),
        (RewardConfig(functions={"c": 7}), "reward.functions.c=7: must be {function"),
        (RewardConfig(functions={"reward": {"function": "c.d"}}), "'reward' is that of the sum"),
        (RewardConfig(functions={"c": {"url": "ftp://h/x"}}), "reward.functions.c.url is not a URL"),
        (RewardConfig(functions={"c": {"url": "http://h:x/x"}}), "reward.functions.c.url is not a URL"),
        (RewardConfig(functions={"c": {"url": "http://u:secret@h/x"}}), "holds a user or password"),
        (
            RewardConfig(functions={"c": {"url": "http://h/x", "style": "verl"}}),
            "of a URL it is one of laminar, sglang",
        ),
        (
            RewardConfig(functions={"c": {"url": "http://h/x", "api_key_env": "NO_SUCH_KEY"}}),
            "this environment variable is not set",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(reward, says):
    """One line with the key and the cure, and no secret in it."""
    with pytest.raises(LaminarError) as refusal:
        check_reward(reward)
    assert says in str(refusal.value) and "secret" not in str(refusal.value)


# ---- several -----------------------------------------------------------------------------------------------


async def test_the_reward_is_the_weighted_sum():
    """Each one's own reward and parts are kept under its name; the first `accuracy` is that of the
    trajectory."""
    both = several(
        right={"function": f"{MODULE}.right"}, length={"function": f"{MODULE}.length", "weight": 0.1}
    )
    (found,) = await scores(both, ("", "2", {"answer": "2"}))
    assert found.reward == pytest.approx(0.9) and found.error == ""
    assert found.parts == {
        "right": 1.0,
        "right.accuracy": 1.0,
        "right.steps": 2.0,
        "length": -1.0,
        "accuracy": 1.0,
    }


async def test_one_that_fails_is_named_and_the_others_count():
    """It counts with reward.score_on_failure at its weight."""
    both = several(right={"function": f"{MODULE}.right"}, bad={"function": f"{MODULE}.fails", "weight": 0.5})
    (found,) = await scores(both, ("", "2", {"answer": "2"}))
    assert found.reward == 1.0 - 3.5 and found.error == "bad: KeyError: 'field'" and "bad" not in found.parts


def test_reward_function_alone_is_one_of_weight_one():
    """Its name is empty, and its parts are the trajectory's own."""
    (entry,) = reward_functions(RewardConfig(function="a.b", style="trl")).values()
    assert (entry.style, entry.weight) == ("trl", 1.0)
