"""observability.show_samples: what a user sees of the model's answers while it trains."""

from helpers.made import Made
from helpers.synthetic import CHARACTERS, finish, write_model
from laminar_hpc.config.schema import RunConfig
from laminar_hpc.controller.shown_samples import ShownSamples, shown, spread
from laminar_hpc.store.store import Store

GROUPS, SAMPLES, STEP = 8, 4, 5


def trajectory(number: int, **fields) -> Made:
    ids = {character: index for index, character in enumerate(CHARACTERS)}
    prompt, response = f"{number // SAMPLES}+1=", f">{number:02d}"
    values = {
        "trajectory_id": number,
        "group_id": number // SAMPLES,
        "attempt": 0,
        "replica": 0,
        "weight_id": 9,
        "weight_step": 4,
        "prompt_tokens": [ids[c] for c in prompt],
        "response_tokens": [ids[c] for c in response],
        "logprobs": [-1.0] * len(response),
        "finish_reason": "stop",
        "time_started": 0.0,
        "time_finished": 1.0,
        "reward": number % 2,
    }
    return Made(**{**values, **fields})


def a_store(tmp_path, *, last: Made | None = None) -> Store:
    """With the groups that step STEP trained on."""
    store = Store(tmp_path)
    for group in range(GROUPS):
        store.rows.add_group(group, group, 9, 4, group + 1, 0.0)
        numbers = range(group * SAMPLES, (group + 1) * SAMPLES)
        store.rows.add_prompt(group, trajectory(numbers[0]).prompt_tokens)
        store.rows.add_trajectories(numbers, group, 0, 0, 9, 4)
        for number in numbers:
            is_last = last is not None and number == last.trajectory_id
            finish(store, last if is_last else trajectory(number), 1.0)
        store.rows.finish_group(group, 4, group, 1.0)
        store.rows.consume([group], STEP)
    return store


def lines(tmp_path, number: int, step: int = STEP, last: Made | None = None) -> list[str]:
    said, store = list[str](), a_store(tmp_path, last=last)
    ShownSamples(write_model(tmp_path / "model"), number, said.append).show(step, store.rows, store.run_dir)
    return said


def test_the_default_is_one_line_per_step(tmp_path):
    """Promise: nothing is read nor shown, and no tokenizer is loaded, unless it is asked for."""
    said: list[str] = []
    assert RunConfig().observability.show_samples == 0
    store = a_store(tmp_path)
    ShownSamples(tmp_path / "no model", 0, said.append).show(STEP, store.rows, store.run_dir)
    assert said == []


def test_a_sample_shows_prompt_response_reward_and_staleness(tmp_path):
    """Promise: of different prompts of this step one response each; never more than there are prompts."""
    said = lines(tmp_path, 3)
    assert len(said) == 3 and len({line.split('"')[1] for line in said}) == 3
    for line in said:
        prompt, response = line.split('"')[1], line.split('"')[3]
        number = int(response[1:])
        assert (
            prompt == f"{number // SAMPLES}+1="
            and f"reward {number % 2:5.2f}  stale 1  " in line
            and line.startswith("sample ")
        )
    assert len(lines(tmp_path / "all", 100)) == GROUPS
    assert lines(tmp_path / "other step", 2, step=STEP + 1) == [], "nothing was trained in that step"


def test_failures_and_cuts_are_marked(tmp_path):
    """Promise: a reward that its function did not give, and a response that met the limit, are seen as
    such."""
    (at,) = spread(range(GROUPS), 1, STEP)
    cut = trajectory(
        at * SAMPLES + STEP % SAMPLES, finish_reason="length", reward_error="ValueError: no", reward=0.0
    )
    (line,) = lines(tmp_path, 1, last=cut)
    assert "reward  0.00 (its function failed)" in line and line.endswith("(cut at the limit)")


def test_text_of_a_model_cannot_move_the_cursor():
    """Promise: control and bidirectional characters are escaped, a long text keeps its beginning and its end,
    other scripts stay."""
    assert shown("a\x1b[2J\nb\r\u202e\x07\ud800", 100) == "a\\x1b[2J\\nb\\r\\u202e\\x07\\ud800"
    assert shown("漢字 é 😀", 100) == "漢字 é 😀"
    text = shown("x" * 500 + "the answer is 42", 40)
    assert (
        text.startswith("xxxx")
        and text.endswith("... xxxxthe answer is 42"[-20:])
        and "476 characters" in text
        and len(text) < 80
    )


def test_picks_are_spread_and_rotate():
    """Promise: over the steps every place of the batch is shown."""
    assert {group for step in range(GROUPS) for group in spread(range(GROUPS), 2, step)} == set(range(GROUPS))
    assert (
        all(len(set(spread(range(GROUPS), n, 3))) == n for n in range(GROUPS + 1)) and spread([], 3, 0) == []
    )
