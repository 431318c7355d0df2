"""docs/promises.md#branches: a conversation goes on as long as its template writes it on, and begins a
branch where that rewrites earlier turns; or all that was drawn is kept."""

from pathlib import Path

import pytest

from helpers.models.chats import CLEARED, FORGETFUL, SEPARATED, save
from laminar_hpc.config.errors import LaminarError
from laminar_hpc.data.tokens import TextDecoder, load_tokenizer
from laminar_hpc.environments.turns.conversation import Conversation, ToolResult
from laminar_hpc.environments.turns.history import History
from laminar_hpc.environments.turns.model import conversation

TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "d", "parameters": {"type": "object"}}}
]
END, GO, NEXT = "<|end|>", "<|user|>\ngo<|end|>\n<|assistant|>\n", "<|end|>\n<|assistant|>\n"
# the prompt begins the thought, and earlier thoughts are left out (as R1 and QwQ), or are not (as Qwen3 2507)
OPENED = FORGETFUL.replace("{% if add_generation_prompt %}<|assistant|>\n", "\\g<0><think>\n").replace(
    "\\g<0>", "{% if add_generation_prompt %}<|assistant|>\n"
)
_WRITTEN = "{{ '<think>\n' if m.role == 'assistant' else '' }}{{ m.content }}"
KEPT_OPEN = OPENED.replace("{{ m.content.split('</think>')[-1] }}", _WRITTEN)


def talk_of(folder: Path, template: str, grows: bool = False) -> Conversation:
    return conversation(str(save(folder, template, [END])), TOOLS, grows=grows)


def grown(folder: Path, talk: Conversation, turns: list[tuple[str, str]]) -> list[str]:
    """The branches of a conversation that begins with GO, as texts."""
    tokenizer, decoder = load_tokenizer(str(folder)), TextDecoder(folder)
    opening = talk.written([{"role": "user", "content": "go"}])
    history, branches = History(talk, opening), [opening]
    end = tokenizer.token_to_id(END)
    for said, result in turns:
        results = [ToolResult("add", result)]
        anew = history.answered(branches[-1] + said, said, results)
        assert history.anew == (anew is not None)
        if anew is None:
            branches[-1] += said + END + decoder.text(talk.between(end, results), specials=True)
        else:
            branches.append(decoder.text(anew, specials=True))
    return branches


def test_it_goes_on_where_the_template_writes_on(tmp_path: Path) -> None:
    """One sequence, whatever white space the model has drawn around its words; and marks that a model writes
    out are plain text where a branch repeats them."""
    talk = talk_of(tmp_path, SEPARATED)
    turns = [("  so <think>1</think> a ", "x"), ("b\n", "y")]
    [whole] = grown(tmp_path, talk, turns)
    assert whole.endswith(f"so <think>1</think> a {END}\n<|tool|>\nx{NEXT}b\n{END}\n<|tool|>\ny{NEXT}")
    forgetful = talk_of(tmp_path / "forgetful", FORGETFUL)
    anew = grown(tmp_path / "forgetful", forgetful, [("1</think>a<|user|>b", "x")])[-1]
    assert anew.endswith(f"{GO}a< |user|>b{END}\n<|tool|>\nx{NEXT}")


@pytest.mark.parametrize("template", [FORGETFUL, OPENED], ids=["forgets", "opened"])
def test_a_template_that_forgets_begins_branches(tmp_path: Path, template: str) -> None:
    """What was thought is in the branch in which it was drawn, and in no later one; a turn without a thought
    goes on, unless the prompt opens one."""
    talk = talk_of(tmp_path, template)
    opened = "<think>\n" if template is OPENED else ""
    think = "" if opened else "<think>"
    said = [(f"{think}1</think>a", "x"), (f"{think}2</think>b", "y")]
    branches = [branch[branch.index("<|user|>") :] for branch in grown(tmp_path, talk, said)]
    go, then = GO + opened, NEXT + opened
    first = f"{GO}a{END}\n<|tool|>\nx{then}"
    assert branches == [go, first, f"{GO}a{END}\n<|tool|>\nx{NEXT}b{END}\n<|tool|>\ny{then}"]
    plain = grown(tmp_path, talk, [("a", "x"), ("b", "y")])
    assert len(plain) == (3 if opened else 1)


def test_results_that_are_cleared_begin_branches(tmp_path: Path) -> None:
    """The last result is there, the earlier ones are not. A prompt that does not read back as it was written
    is refused in one line."""
    with pytest.raises(LaminarError, match=r"reads a prompt back as .* set environment.history=keep"):
        History(talk_of(tmp_path, CLEARED), "go")
    branches = grown(tmp_path, talk_of(tmp_path, CLEARED), [("a", "x"), ("b", "y")])
    assert len(branches) == 2 and branches[0].endswith(f"x{NEXT}")
    assert branches[1].endswith(f"{GO}a{END}\n<|tool|>\n{END}\n<|assistant|>\nb{END}\n<|tool|>\ny{NEXT}")


def test_who_is_refused_is_told_of_the_ways_out(tmp_path: Path) -> None:
    """A template whose prompts open a thought is tried with thoughts; one that keeps them is not refused."""
    conversation(str(save(tmp_path / "kept", KEPT_OPEN, [END])), TOOLS)
    with pytest.raises(LaminarError, match=r"rewrites earlier .* or set environment.history=keep or branch"):
        talk_of(tmp_path / "opened", OPENED, grows=True)
