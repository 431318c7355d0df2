"""Where drafts come from: what a request may say next, by what texts said that ended as it does now.

A guess costs time when it is wrong, and never a token: `speculation.py` draws each token from the model and
keeps a draft only where that token was drawn anyway. No model and no torch is needed, so this file has none.
"""

from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

KEY = 3  # tokens that must agree before a text is looked at
MATCH = 32  # tokens that are compared; a longer agreement says no more
OCCURRENCES = 8  # of the same KEY tokens that are looked at, the newest
PROMPT = 4096  # tokens at a prompt's end in which a request looks for its own words
ENDED_TOKENS = 1 << 18  # of ended responses that an engine keeps, some 250 bytes each
STEP_TOKENS = 4096  # of them that are taken into the index in one decoding step, some milliseconds
HISTORY_TOKENS = 1 << 22  # of responses that are kept by prompt for the next pass, 4 bytes each
HISTORY_RESPONSES = 8  # of them to a prompt, the newest
RECALLED = 64  # prompts whose last pass has been learned for the requests of now
_BETWEEN = -1  # stands between two texts, and is no token
Found = tuple[int, list[int]]  # tokens that agree, and those that followed


def longest(found: Iterable[Found]) -> Found:
    """The longest agreement with something behind it; of equal ones that with more, of these the first."""
    return max(found, key=lambda one: (bool(one[1]) and one[0], len(one[1])))


class TextIndex:
    """Texts behind each other, and where each KEY tokens in a row stand."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)

    def extend(self, tokens: Sequence[int]) -> None:
        """Adds to the last text."""
        text, places = self.tokens, self._places
        first = max(len(text), KEY)
        text.extend(tokens)
        for end in range(first, len(text)):  # what follows the KEY tokens before `end` is known from now on
            found = places[tuple(text[end - KEY : end])]
            found.append(end)
            if len(found) > 2 * OCCURRENCES:
                del found[:OCCURRENCES]

    def begin(self, tokens: Sequence[int]) -> None:
        """Adds a text of its own."""
        self.tokens.append(_BETWEEN)
        self.extend(tokens)

    def draft(self, tail: Sequence[int], count: int) -> Found:
        """How many tokens at the end of `tail` agree with what was found, at most MATCH, and up to `count`
        that followed there: the `longest`, newest first. (0, []) for none. Of a text that repeats itself the
        newest place has nothing behind it."""
        best: Found = 0, []
        for end in reversed(self._places.get(tuple(tail[-KEY:]), [])[-OCCURRENCES:]):
            length = KEY
            most = min(MATCH, len(tail), end)
            while length < most and self.tokens[end - 1 - length] == tail[-1 - length]:
                length += 1
            if length >= best[0] and (length > best[0] or len(best[1]) < count):
                best = longest((best, (length, self._following(end, count))))
        return best

    def _following(self, place: int, count: int) -> list[int]:
        text = self.tokens[place : place + count]
        return text[: text.index(_BETWEEN)] if _BETWEEN in text else text


@dataclass
class OwnWords:
    """A request's own text: prompt and response, as far as they are indexed."""

    index: TextIndex = field(default_factory=TextIndex)
    known: int = 0  # of its response


class PromptHistory:
    """What was answered to each prompt, until it comes again: HISTORY_TOKENS of the newest, unindexed."""

    def __init__(self) -> None:
        self._responses: dict[int, deque[array[int]]] = {}  # of each prompt, the one answered last at the end
        self._tokens = 0

    def add(self, prompt: Sequence[int], response: Sequence[int]) -> None:
        key = hash(tuple(prompt))
        kept = self._responses.pop(key, None) or deque()
        self._responses[key] = kept
        kept.append(array("i", response))
        self._tokens += len(response)
        if len(kept) > HISTORY_RESPONSES:
            self._tokens -= len(kept.popleft())
        while self._tokens > HISTORY_TOKENS:
            oldest = next(iter(self._responses))
            self._tokens -= sum(map(len, self._responses.pop(oldest)))

    def texts(self, prompt: Sequence[int]) -> list[int]:
        """Its responses, each behind the prompt's end, with _BETWEEN between them."""
        found: list[int] = []
        for response in self._responses.get(hash(tuple(prompt)), ()):
            found += (_BETWEEN, *prompt[-MATCH:], *response)
        return found


class Drafts:
    """Drafts for the requests of an engine. `others`: also from what the engine has answered before, of
    whatever weights: samples of the same group are the newest of it, and agree for longest, and before one of
    them has ended those of the last pass over the data."""

    def __init__(self, others: bool) -> None:
        # the newest and the one before, of half of ENDED_TOKENS each
        self._others = [TextIndex(), TextIndex()] if others else []
        self._ended: deque[list[int]] = deque()  # not in the index yet
        self._waiting = 0  # tokens of them
        self._history = PromptHistory()
        self._recalled: deque[int] = deque(maxlen=RECALLED)
        self._own: dict[str, OwnWords] = {}

    def ended(self, request_id: str, prompt: Sequence[int], response: Sequence[int]) -> None:
        """A request has its last token. Indexed by and by, and only once drafts are asked for."""
        self._own.pop(request_id, None)
        if self._others:
            self._history.add(prompt, response)
        self.learn([*prompt[-MATCH:], *response])

    def learn(self, text: list[int]) -> None:
        """What others have said: a text, or several with _BETWEEN between them."""
        if not self._others:
            return
        self._ended.append(text)
        self._waiting += len(text)
        while self._waiting > ENDED_TOKENS:
            self._waiting -= len(self._ended.popleft())

    def take_in(self) -> None:
        """Indexes some of what has ended, the newest first."""
        room = STEP_TOKENS
        while self._ended and room > 0:
            if 2 * len(self._others[0].tokens) > ENDED_TOKENS:
                self._others = [TextIndex(), self._others[0]]
            text = self._ended.pop()
            self._waiting -= len(text)
            room -= len(text)
            self._others[0].begin(text)

    def draft(self, request_id: str, prompt: Sequence[int], response: Sequence[int], count: int) -> list[int]:
        """Up to `count` tokens that may follow `response`: of the request's own words where they agree for
        longer than what others said."""
        own = self._own.get(request_id)
        if own is None:
            own = self._own[request_id] = OwnWords()
            own.index.extend(prompt[-PROMPT:])
            self._recall(prompt)
        own.index.extend(list(islice(response, own.known, None)))
        own.known = len(response)
        tail = own.index.tokens[-MATCH:]
        return longest(index.draft(tail, count) for index in (own.index, *self._others))[1]

    def _recall(self, prompt: Sequence[int]) -> None:
        """Learns the prompt's last pass, for the first of its samples alone; of use from the next step on."""
        key = hash(tuple(prompt))
        if self._others and prompt and key not in self._recalled:
            self._recalled.append(key)
            if texts := self._history.texts(prompt):
                self.learn(texts)

    def forget(self, running: set[str]) -> None:
        """Of requests that ended without a word (aborted ones), none is kept."""
        for request_id in self._own.keys() - running:
            del self._own[request_id]
