"""A conversation as token ids that only ever grows: token in, token out.

    prompt | drawn, with its stop token | given: results, up to the next answer | drawn | given | drawn

The first prompt is rendered once, and what the policy has drawn stays as it was drawn: nothing is decoded and
encoded again. What is given between two turns is what the model's chat template writes behind an assistant's
content, taken from a rendering of a short conversation, whose assistant says MARK. Pure: it knows a template
and a tokenizer as functions, no engine and no environment.
"""

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from laminar_hpc.config.errors import LaminarError

Messages = list[dict]
MARK = "0LAMINAR0"  # survives templates that trim
_SHOWN = 60  # characters of a rendering that an error shows


@dataclass(frozen=True)
class ToolResult:
    """What a tool said, as the model reads it."""

    name: str
    content: str


class Conversation:
    """One model's. `render`: messages -> the text up to where the next answer begins, tools included;
    `encode`: text -> token ids, special tokens as such; `specials`: their texts, and `marks` those of them
    that no text of the model's own may have; `stop_ids`: those that end a turn. Raises LaminarError as
    `check` does."""

    def __init__(
        self,
        render: Callable[[Messages], str],
        encode: Callable[[str], list[int]],
        specials: Collection[str],
        marks: Collection[str],
        stop_ids: Collection[int],
        thinks: bool = False,
        answered_by: str = "tool",
        grows: bool = True,
    ) -> None:
        """`thinks`: the template knows of <think>, so that is tried too. `answered_by`: the role that is
        tried behind a turn; "" tries none. `grows`: a template that rewrites earlier turns is refused."""
        self._render = render
        self._encode = encode
        self._grows = grows
        self._specials = _any_of(specials)
        self._marks = _any_of(marks)
        _, mark, self.closing = render([_user(MARK)]).partition(MARK)
        if not mark:
            raise LaminarError(f"{_TEMPLATE} leaves out what the user says")
        self._stop_ids = stop_ids
        self._thinks = thinks
        if answered_by:
            self.check(answered_by)

    def first(self, messages: Messages) -> list[int]:
        """A whole prompt. Raises LaminarError for messages that the template refuses."""
        return self._encode(self.written(messages))

    def written(self, messages: Messages) -> str:
        """The template's text of a whole conversation, up to the next answer. Raises LaminarError."""
        return self._render([self._spoken(message) for message in messages])

    def behind_user(self, messages: Messages) -> str:
        """What the template writes behind the words of the user whom `messages` answer."""
        _, mark, behind = self.written([_user(MARK), *messages]).partition(MARK)
        if not mark:
            raise LaminarError(f"{_TEMPLATE} leaves out what the user says")
        return behind

    def encoded(self, text: str) -> list[int]:
        return self._encode(text)

    def opening(self, observation: str) -> list[int]:
        """What follows on a prompt that was cut before `closing`: more of the user's words, and the rest."""
        return self._encode(self._plain(observation) + self.closing)

    def between(self, last: int, results: Sequence[ToolResult]) -> list[int]:
        """What is given behind a turn whose last token is `last`. The template's own end of a turn is not
        doubled, nor the mark of a role that has ended the turn; the separators behind it are restored."""
        return self.after(last, [tool_message(result) for result in results])

    def after(self, last: int, messages: Messages) -> list[int]:
        """The same of any messages."""
        given = self._encode(self._behind([assistant(MARK), *map(self._spoken, messages)]))
        return given[1:] if given[:1] == [last] else given

    def _behind(self, messages: Messages) -> str:
        text = self._render([_user("0"), *messages])
        _, mark, behind = text.partition(MARK)
        if not mark:
            raise LaminarError(f"{_TEMPLATE} leaves out what the assistant says")
        return behind

    def _spoken(self, message: dict) -> dict:
        own = message["role"] == "assistant"
        return {**message, "content": self._plain(message["content"], self._marks if own else self._specials)}

    def _plain(self, text: str, specials: re.Pattern[str] | None = None) -> str:
        """No text can end a turn or begin another role's."""
        return (specials or self._specials).sub(lambda found: f"{found[0][:1]} {found[0][1:]}", text)

    def check(self, answered_by: str) -> None:
        """Three turns, each answered by a tool or the user, token by token: the conversation that has grown
        is the one that the template writes. Raises LaminarError."""
        answer = _user if answered_by == "user" else lambda text: tool_message(ToolResult("tool", text))
        if self.closing.rstrip().endswith("<think>"):  # the prompt begins the thought
            self._check(answer, "{}\n</think>\n\n{}")
            return
        self._check(answer, "{}")
        if self._thinks and not self.closing.rstrip().endswith("</think>"):  # else the thought is over
            self._check(answer, "<think>\n{}\n</think>\n\n{}")

    def _check(self, answer: Callable[[str], dict], pattern: str) -> None:
        messages = [_user("0")]
        grown = self._render(messages)
        ids = self._encode(grown)
        for word in ("1", "2", "3"):
            said, result = pattern.format(word, word), answer(f"4{word}")
            behind = self._behind([assistant(MARK), result])
            first = self._encode(behind)[:1]
            if not first or first[0] not in self._stop_ids:
                raise LaminarError(
                    f"{_TEMPLATE} ends an assistant's turn with token {first}, which is none of the "
                    f"stop tokens {sorted(self._stop_ids)}: name it as eos_token_id in generation_config.json"
                )
            grown += said + behind
            ids += [*self._encode(said), *first, *self.after(first[0], [result])]
            messages += [assistant(said), result]
            self._compare(self._render(messages), grown, ids)

    def _compare(self, text: str, grown: str, ids: list[int]) -> None:
        if text != grown:
            if not self._grows:
                return
            pairs = enumerate(zip(text, grown, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(text), len(grown)))
            now, before = text[at : at + _SHOWN], grown[at : at + _SHOWN]
            raise LaminarError(
                f"{_TEMPLATE} rewrites earlier turns (it writes {now!r} where {before!r} stood): what is "
                "trained would not be what the model sees; take a template that keeps them, or set "
                "environment.history=keep or branch"
            )
        if self._encode(text) != ids:
            raise LaminarError(
                f"{_TEMPLATE} and its tokenizer do not split a turn as it was drawn: what is trained would "
                "not be what the model sees; take another template"
            )


_TEMPLATE = "environment: the model's chat template"


def _user(content: str) -> dict:
    return {"role": "user", "content": content}


def _any_of(texts: Collection[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "$^")


def assistant(content: str) -> dict:
    """What the model says, as a message."""
    return {"role": "assistant", "content": content}


def tool_message(result: ToolResult) -> dict:
    """Some templates want a call's id, of nine letters."""
    return {"role": "tool", "name": result.name, "content": result.content, "tool_call_id": "000000000"}
