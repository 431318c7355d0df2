"""Drafts of an engine: found where a text agrees for longest, forgotten in time."""

import random

from laminar_hpc.engine.sglang.plugin import drafts
from laminar_hpc.engine.sglang.plugin.drafts import KEY, MATCH, Drafts, TextIndex


def test_the_longest_agreement_wins_and_then_the_newest() -> None:
    """(1 2 3) is followed by 4 in one text and by 5 in a later one; 9 before it tells them apart."""
    index = TextIndex()
    index.begin([9, 1, 2, 3, 4, 40])
    index.begin([8, 1, 2, 3, 5, 50])
    assert index.draft([1, 2, 3], 2) == (3, [5, 50])
    assert index.draft([9, 1, 2, 3], 2) == (4, [4, 40])
    assert index.draft([7, 1, 2], 2) == (0, [])


def test_a_draft_ends_with_its_text() -> None:
    """Nothing is guessed across the end of a response."""
    index = TextIndex()
    index.begin([1, 2, 3, 4])
    index.begin([6, 7, 8])
    assert index.draft([1, 2, 3], 5) == (3, [4])
    assert index.draft([2, 3, 4], 5) == (0, [])


def test_a_text_that_repeats_itself_is_guessed_in_full() -> None:
    """The last of equal places has little or nothing behind it: neither in the request's own words nor in a
    sibling that said the same. Responses that run to their limit are often such."""
    known = Drafts(others=True)
    said = [7, 8, 9] * 20
    assert known.draft("own", [], said, 7) == [7, 8, 9, 7, 8, 9, 7]
    known.ended("own", [], said)
    known.take_in()
    assert known.draft("sibling", [], said[:40], 7) == [8, 9, 7, 8, 9, 7, 8]
    assert known.draft("at its end", [], said, 7) == [7, 8, 9, 7, 8, 9, 7]


def test_what_is_found_agrees_as_far_as_it_is_said_to(seed: int = 1) -> None:
    """Against a search through all of it: no longer agreement stands among the newest occurrences, and the
    draft is what follows there."""
    draw = random.Random(seed)
    text = [draw.randrange(4) for _ in range(3000)]
    index = TextIndex()
    for begin in range(0, 3000, 7):
        index.extend(text[begin : begin + 7])
    found = 0
    for _ in range(300):
        tail = [draw.randrange(4) for _ in range(MATCH)]
        ends = [end for end in range(KEY, len(text)) if text[end - KEY : end] == tail[-KEY:]]
        lengths = []
        for end in ends[-drafts.OCCURRENCES :]:
            length = KEY
            while length < min(MATCH, end) and text[end - 1 - length] == tail[-1 - length]:
                length += 1
            lengths.append((length, min(5, len(text) - end), end))
        length, following = index.draft(tail, 5)
        best, _, end = max(lengths)
        assert (length, following) == (best, text[end : end + 5])
        found += best > KEY
    assert found > 100


def test_a_request_drafts_from_its_own_words_and_from_those_of_its_group() -> None:
    """ngram knows the first, suffix both; a longer agreement of one's own goes before."""
    prompt, said = [1, 2, 3], [10, 11, 12, 13]
    for others in (False, True):
        known = Drafts(others)
        known.draft("first", prompt, said, 4)
        known.ended("first", prompt, said)
        known.take_in()
        assert known.draft("second", prompt, [10], 3) == ([11, 12, 13] if others else [])
    known.learn([30, 31, 32, 33, drafts._BETWEEN, 40, 41, 42, 43])  # of another engine
    known.take_in()
    assert known.draft("fourth", [], [30, 31, 32], 3) == [33]
    assert known.draft("fifth", [], [40, 41, 42], 3) == [43]
    own = [20, 21, 22, 23, 24, 20, 21, 22, 23]
    assert known.draft("third", prompt, own, 1) == [24]


def test_a_prompt_that_comes_again_is_guessed_from_its_last_pass(monkeypatch) -> None:
    """However much was answered in between, as far as the history reaches; learned for one of its samples."""
    monkeypatch.setattr(drafts, "ENDED_TOKENS", 100)
    monkeypatch.setattr(drafts, "HISTORY_TOKENS", 600)
    known = Drafts(others=True)
    known.ended("before", [9, 9, 9], [91, 92, 93, 94])
    known.ended("first", [1, 2, 3], [10, 11, 12, 13])
    for number in range(14):
        known.ended(str(number), [4, number], [1000 * number + i for i in range(40)])
        known.take_in()
    assert known.draft("other", [5], [10, 11, 12], 1) == [], "an engine's newest texts lack it"
    for sample in ("second", "third"):
        known.draft(sample, [1, 2, 3], [], 4)
    assert list(known._ended) == [[drafts._BETWEEN, 1, 2, 3, 10, 11, 12, 13]]
    known.take_in()
    assert known.draft("second", [1, 2, 3], [10], 3) == [11, 12, 13]
    for number in range(14, 20):
        known.ended(str(number), [4, number], [1000 * number + i for i in range(40)])
    assert not known._history.texts([9, 9, 9]) and known._history._tokens <= 600
    for number in range(20):
        known.ended(str(number), [7], [number])
    assert known._history.texts([7])[2::3] == list(range(12, 20)), "the newest to a prompt"


def test_an_index_of_many_texts_loses_the_oldest(monkeypatch) -> None:
    """What has ended is indexed by and by, the newest first, and no more of it is kept than ENDED_TOKENS."""
    monkeypatch.setattr(drafts, "ENDED_TOKENS", 400)
    monkeypatch.setattr(drafts, "STEP_TOKENS", 50)
    known = Drafts(others=True)
    for number in range(40):
        known.ended(str(number), [], [1000 * number + i for i in range(40)])
    assert known._waiting <= 400
    known.take_in()
    assert known.draft("new", [], [39000, 39001, 39002], 2) == [39003, 39004]
    assert known.draft("old", [], [31000, 31001, 31002], 2) == []
    for _ in range(20):
        known.take_in()
    assert known.draft("other", [], [31000, 31001, 31002], 2) == [31003, 31004]
    assert known.draft("oldest", [], [1000, 1001, 1002], 2) == []
    for number in range(40, 60):
        known.ended(str(number), [], [1000 * number + i for i in range(40)])
        known.take_in()
        assert sum(len(index.tokens) for index in known._others) <= 400 + 2 * 41
    assert known.draft("third", [], [59000, 59001, 59002], 1) == [59003]
    assert known.draft("fourth", [], [31000, 31001, 31002], 1) == []
    known.forget({"new"})
    assert set(known._own) == {"new"}
