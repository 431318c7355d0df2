"""What the text of an answer can mean, and whether two of them mean the same.

`read` gives every reading: "100,200" is a number and a list. Two texts mean the same if they share a reading,
unless what else they say of it differs: a unit of another kind, another name, another choice's letter.
"""

import contextlib
import itertools
import math
import re
from dataclasses import dataclass, replace
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse
from math_verify.parser import NormalizationConfig

from laminar_hpc.environments.math_equal import equal, is_relation
from laminar_hpc.environments.math_text import ASKED, DECIMAL, EUROPEAN, FORMULA, INTEGER, MONTHS
from laminar_hpc.environments.math_units import PURE, Unit, unit_of

_LATEX = [LatexExtractionConfig(normalization_config=NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none"))]  # fmt: skip
_LONGEST, _DEEPEST = 1000, 20  # characters, and brackets within brackets, of what is parsed


@dataclass(frozen=True)
class Reading:
    """`value`: words (str), a list (a tuple of the readings of each item), or what sympy can compare.
    `brackets` are those of a list, "" or two of "{}()[]". `name` is what the value is said to be: "x" of x=5,
    "(c)" of (C) 12, "?" of a sum."""

    value: Any
    unit: Unit | None = None
    name: str = ""
    brackets: str = ""


Readings = tuple[Reading, ...]

_NUMBER = re.compile(  # a decimal with its power of ten, a fraction or mixed number
    rf"([+-]?) ?(?:({DECIMAL})(?:e([+-]?\d+)| ?(?:\\times|\\cdot|\*|x) ?10\^\{{?(-?\d+)\}}?)?"
    rf"|(?:({INTEGER})(?: (?=\d)| ?(?=\\frac)))?(?:({INTEGER}) ?/ ?({INTEGER})"
    rf"|\\frac ?\{{({INTEGER})\}} ?\{{({INTEGER})\}}|\\frac ?(\d) ?(\d)))", re.I
)  # fmt: skip
_CURRENCY = re.compile(r"(-?) ?(?:(?:US|HK|AU?|CA?)? ?\\?([$€£¥₹₩])|(USD|EUR|GBP|INR|Rs\.?)) ?(-?)(.+)")
_UNIT = re.compile(  # an amount; a unit in \text or behind a digit or bracket; its power
    r"(.+?) ?(?:\\text ?\{ *((?:[^{}]|\^\{-?\d\})*?)[ .]*\}|(?:(?<=[\d})%.!\s])|(?<=\\pi)) ?"
    r"([^\W\d_][^\\{}=<>+,;()\d]*?|[%€£¥₹₩¢]|\^\\circ ?[CF]?))(\^\{?-?\d\}?)?"
)
_NAME = re.compile(  # x, \angle ABC, \text{Area}, |x|, dy/dx, f'(x), (x, y)
    r"(?:\\?[A-Za-z]+|\\angle ?\w+|\\text\{[^{}]*\}|\|\w+\||\\frac\{d\w*\}\{d\w+\})'*(?:_\{?\w+\}?)?'*"
    r"(?: ?\([a-z, ]*\))?|\(\w(?:, ?\w)*\)"
)
_LETTER = re.compile(r"[a-zA-Z](_\{?\w+\}?)?|\([a-j]\)")  # names that tell two values apart
_CHOICE = re.compile(  # (C) 12, C. 12, C
    r"(?:[oO]ption |[cC]hoice )?(?:\(([A-Ja-j])\)\s*(.*)|([A-J]) ?[.:)]\s*(.*)|([A-J])[^\x00-\x7f]*)"
)
_AND = r"\s*(?:\\text ?\{ *,? *(?:and|or) *\}|\b(?:and|or)\b)\s*|;"
_PROSE = re.compile(r"(?<![\\a-zA-Z])(?:[^\W\d_]{4}|(?:to|of|by|in|is|if|the|for)\b)")
_HUGE = re.compile(  # what Python would be too long about to write out
    r"\^\{?-?\d{7}|\^ ?\{?-?\w+ ?\^ ?\{?-?\w+ ?[\^!]|\^\{?-?(?:\d\d|[7-9]) ?\^ ?\{?(?:\d\d|[7-9])"
    r"|\d{7} ?!|! ?\)? ?!|\^\{?\d{3,} ?!|\\binom ?\{\d{5}"
)
_WITHIN = re.compile(  # {x | ...}, x in ..., 5th
    r"\\\{ ?\w(?: ?\\in ?\\mathbb\{R\})? ?(?:\\mid|\||:) ?(?P<set>.*?) ?\\\}|\w+ ?\\in (?P<range>.*)"
    r"|(?P<place>\d[\d,]*|n|k|\(.*\))(?: ?\^ ?\{? ?)? ?(?:st|nd|rd|th)\b ?\}?(?: .*)?"
)
_DATE = re.compile(rf"\b({MONTHS})\b", re.I)
_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_BASES = dict(zip("two three four five six seven eight nine ten".split(), range(2, 11), strict=True))


def read(text: str) -> Readings:
    """All readings of a text in `spelled` form; none of an empty one."""
    if len(text) > _LONGEST or max(_depths(text), default=0) > _DEEPEST:
        return (Reading(text),)
    text = _bare(text)
    if not text:
        return ()
    if (number := _number(text)) is not None:
        items = text.split(",") if re.fullmatch(r"\d{1,3}(,[1-9]\d\d)+", text) else []
        listed = Reading(tuple((Reading(sympy.Integer(item)),) for item in items))
        return (Reading(number), *([listed] if items else []))
    plain = " ".join(re.sub(r"\\text ?\{([^{}]*)\}", r" \1 ", text).split())
    amount, unit = _measured(text, plain)
    if (number := _number(amount)) is not None:
        return (Reading(number, unit),)
    return _typed(plain) or _compound(text) or _single(text, plain, amount, unit)


def _bare(text: str) -> str:
    """Without what stands around an answer: signs of a formula, bold marks, full stops, braces."""
    before = None
    while text != before:
        before = text
        text = FORMULA.sub(lambda found: next(filter(None, found.groups())), text)
        text = text.strip().strip("*`").strip().rstrip(",;:\\").lstrip("=:,;# ")
        text = re.sub(r"^\\[\[(]|\\[\])]$|(?<!\.\.)\.+$", "", text)
        text = re.sub(r"^(?:\\approx|\\equiv|about |approximately )", "", text)
        whole = r"(?:\\text ?)?\{((?:[^{}]|\{[^{}]*\})*)\}|\(([^(),]*)\)|\[([^][,]*)\]"
        if found := re.fullmatch(whole, text):
            text = next(part for part in found.groups() if part is not None)
    return text


def _number(text: str) -> Any:
    """The rational number that is written out, None if `text` is none."""
    if not (found := _NUMBER.fullmatch(text)):
        return None
    sign, decimal, *powers, mixed = found.groups()[:5]
    power = int(next(filter(None, powers), 0))
    above, below, period = "0", "1", ""
    if decimal:
        if re.fullmatch(EUROPEAN, decimal):
            decimal = decimal.replace(".", "").replace(",", ".")
        mixed, _, period = decimal.rstrip(">").partition("<")
    else:
        above, below = filter(None, found.groups()[5:])
    mixed, above, below = (re.sub(r"[, '_]", "", part or "0") for part in (mixed, above, below))
    if abs(power) > 100_000 or not int(below):
        return None
    value = sympy.Rational(f"0{mixed}".rstrip(".")) + sympy.Rational(above, below)
    if period:
        value += sympy.Rational(int(period), 10 ** len(mixed.partition(".")[2]) * (10 ** len(period) - 1))
    return value * sympy.Integer(10) ** power * (-1 if sign == "-" else 1)


def _measured(text: str, plain: str) -> tuple[str, Unit | None]:
    """The text without its currency or unit, and that unit; None for one that is not known."""
    if found := _CURRENCY.fullmatch(plain):
        amount = found[1] + found[4] + found[5]
        return _measured(amount, amount)[0], unit_of(found[2] or found[3])
    found = _UNIT.fullmatch(text)
    if not found or _DATE.search(plain) or re.search(r"\\(?:sin|cos|tan|cot|sec|csc).*\\circ", text):
        return text, None
    amount, (in_text, said, power) = found[1].strip(), found.groups()[1:]
    if not re.search(r"\d|\\(?:pi|sqrt|frac|infty)|^[a-z]$", amount):
        return text, None
    unit = unit_of((said if in_text is None else in_text) + (power or ""))
    if in_text is None and unit and re.fullmatch("[a-zA-Z]", said) and f" {said}" not in text:
        return text, None  # 2m may be twice m
    word = in_text is not None or re.match(r"[^\x00-\x7f]|(?=.*[aeiouy])[^\W\d_]{3}", said)
    return (amount, unit) if unit or word else (text, None)


def _typed(plain: str) -> Readings:
    """Times, ratios, dates, places, residues, choices, sentences."""
    if found := re.fullmatch(r"(\d{1,2}):([0-5]\d)(:[0-5]\d)? ?(?:([ap])\.? ?m\.?)?", plain, re.I):
        hour, minute, half = int(found[1]), int(found[2]), (found[4] or "").lower()
        hour, half = (hour - 12, "p") if 12 < hour < 24 and not half else (hour, half)
        clock = sympy.Symbol(f"{hour}:{minute}{found[3] or ''}")  # half is as a unit: it may be left out
        time = Reading(clock, (((half, 1),), sympy.Integer(1)) if half else None)
        ratio = not half and math.gcd(hour, minute) == 1
        return (time, *([Reading(sympy.Rational(hour, minute))] if ratio else []))
    if re.fullmatch(r"[\d.\\{}a-z()]+(?: ?: ?[^\s:]+)+", plain):
        parts = plain.split(":")
        return read(f"({parts[0]})/({parts[1]})" if len(parts) == 2 else f"({','.join(parts)})")
    if re.fullmatch(r"\d{4}-\d\d?-\d\d?|\d\d?[/.]\d\d?[/.]\d{4}", plain):
        return (Reading(f"date {plain}"),)
    if (found := _DATE.search(plain)) and len(plain) < 30 and re.search(r"\d", plain):
        numbers = sorted(str(int(n)) for n in re.findall(r"\d+", plain))
        return (Reading(f"date {found[1].lower()[:3]} {' '.join(numbers)}"),)
    if found := re.fullmatch(r"([\d.]+ ?[a-zA-Z]+),? (?:and )?([\d.]+ ?[a-zA-Z]+)", plain):  # 5 ft 3 in
        large, small = (next(iter(read(part))) for part in found.groups())
        if large.unit and small.unit and large.unit[0] == small.unit[0]:
            return (replace(small, value=large.value * (large.unit[1] / small.unit[1]) + small.value),)
    if found := re.fullmatch(r"(.*?) ?\(? ?(?:\\[pb]?mod|mod(?:ulo)?)(?![a-z]) ?\{? ?(\w+) ?\}? ?\)?", plain):
        residue = (((f"mod {found[2]}", 1),), sympy.Integer(1))
        return tuple(replace(r, unit=residue) for r in read(found[1].rpartition("\\equiv")[2]))
    if found := _CHOICE.fullmatch(plain):
        letter = next(filter(None, found.group(1, 3, 5))).lower()
        rest = read(found[2] or found[4] or "")
        return (Reading(letter, name=f"({letter})"), *(replace(r, name=f"({letter})") for r in rest))
    if found := _WITHIN.fullmatch(plain):
        return read(next(filter(None, found.groups())))
    asked = list(ASKED.finditer(plain))
    return read(plain[asked[-1].end() :]) if asked else ()


def _depths(text: str) -> list[int]:
    """How many brackets are open at each sign."""
    return list(itertools.accumulate((c in "([{") - (c in ")]}") for c in text))


def _split(text: str, pattern: str) -> list[str]:
    """Splits at matches that are in no brackets."""
    depths, parts, begun = _depths(text), [], 0
    for found in re.finditer(pattern, text):
        if depths[found.start()] == 0:
            parts.append(text[begun : found.start()])
            begun = found.end()
    return [*parts, text[begun:]]


def _compound(text: str) -> Readings:
    """Lists, brackets, equations, plus or minus."""
    if found := re.fullmatch(r"([\](\[]|\\\{) ?(.*?) ?([)\][]|\\\})", text):
        items = _split(found[2], r",|;")
        brackets = found[1][-1].replace("]", "(") + found[3][-1].replace("[", ")")  # ]2,5[ is (2,5)
        if min(_depths("_" + found[2])) >= 0 and (len(items) > 1 or brackets == "{}"):
            return _listed(tuple(map(read, items)), brackets)
    commas = r",\s+" if re.search(r"\d,\d{3}(?!\d)", text) and re.search(rf",\s|{_AND}", text) else ","
    items = [
        part.replace("\\pm", sign).replace("\\mp", "-" if sign == "+" else "+")
        for part in _split(text, rf"(?:{commas})?{_AND}|{commas}")
        for sign in ("+-" if "\\pm" in part else "+")
        if part.strip()
    ]
    if len(items) > 1:
        first = _split(items[0], "=")
        if len(first) == 2 and _NAME.fullmatch(first[0].strip()) and "=" not in "".join(items[1:]):
            items[0] = first[1]  # n = 2, 3, 4
        readings = tuple(map(read, items))
        return _listed(readings) if all(readings) else ()
    sides = [side.strip() for side in _split(text, r"(?<![<>!\\])=|\\approx|\\equiv")]
    if len(sides) < 2 or not all(sides):
        return ()
    left, right = sides[0], sides[-1]
    if len(sides) == 2 and not _NAME.fullmatch(left) and _NAME.fullmatch(right):
        left, right = right, left
    if not re.search(r"(?<![\\a-zA-Z])[a-zA-Z]", left + right):  # 3 + 4 = 7
        return read(right)
    name = left.replace(" ", "") if _NAME.fullmatch(left) else "?"
    whole: Any = _expression(text) if len(sides) == 2 else None
    named = [replace(r, name=r.name or name) for r in read(right)]
    return (*named, *([Reading(whole)] if is_relation(whole) and not whole.has(sympy.Derivative) else []))


def _listed(items: tuple[Readings, ...], brackets: str = "") -> Readings:
    """As a list, and as the interval, union or set of points that it may be."""
    readings = [Reading(items, brackets=brackets)]
    values = [next((r.value for r in item if not isinstance(r.value, str | tuple)), None) for item in items]
    with contextlib.suppress(Exception):
        if brackets[:1] in ("(", "[") and len(values) == 2 and sympy.Lt(*values) == sympy.true:
            readings.append(Reading(sympy.Interval(*values, brackets[0] == "(", brackets[1] == ")")))
        elif any(is_relation(v) or isinstance(v, sympy.Set) for v in values):
            sets: list[Any] = [v.as_set() if v is not None and is_relation(v) else v for v in values]
            both = sympy.Intersection(*sets).simplify() if all(map(is_relation, values)) else sympy.S.EmptySet
            readings.append(Reading(both if both != sympy.S.EmptySet else sympy.Union(*sets)))
    return tuple(readings)


def _single(text: str, plain: str, amount: str, unit: Unit | None) -> Readings:
    """A number or function in a unit, or words."""
    if amount != text and (inner := [r for r in read(amount) if not isinstance(r.value, str)]):
        return tuple(replace(r, unit=unit) for r in inner)
    said = re.sub(r"\\[a-z]+|[^\w\s\\.^+*/=<>-]", " ", plain).casefold()
    words = Reading(" ".join(said.split()).replace("^ ", "^"))
    if re.fullmatch(r"no (?:real |such )?(?:solutions?|values?|roots?)(?: exists?)?", words.value):
        return (words, Reading(sympy.S.EmptySet))
    if based := re.fullmatch(r"\(?([\dA-Z]+)\)? ?_\{? ?\(?(\d\d?|[a-z]+)\)? ?\}?", plain):
        base = _BASES.get(based[2]) or int(based[2] if based[2].isdigit() else 0)
        if 2 <= base <= 36 and not set(based[1]) - set(_DIGITS[:base]):
            return (Reading(sympy.Integer(int(based[1], base))),)
    prose = _PROSE.search(plain) or ("\\text" in text and not re.search(r"\d", text))
    value = _expression(text) if "\\begin" in text or not prose else None
    if value is None:
        return (words,)
    return (Reading(value), *([words] if re.fullmatch(r"[^\W\d_]+", plain) else []))


def _expression(text: str) -> Any:
    """What math-verify makes of LaTeX, with decimals exact; None for nothing, or something huge."""
    if _HUGE.search(text):
        return None

    def exactly(found: re.Match[str]) -> str:
        number = _number(found[0])
        return found[0] if number is None else f"{{\\frac{{{number.p}}}{{{number.q}}}}}"

    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(\d+(?:\.\d+)?) ?\^\\circ", r"(\\frac{\1\\pi}{180})", text)
    text = re.sub(r"(?<![\w.])(?:\d+\.\d*|\.\d+|\d+(?=e[+-]?\d))(?:<\d+>)?(?:e[+-]?\d+)?", exactly, text)
    made = parse(f"${text}$", _LATEX, parsing_timeout=None)
    return made[0] if made and not isinstance(made[0], str) else None


def same(gold: Readings, said: Readings) -> bool:
    """Whether they have a reading in common."""
    rests = [[r for r in each if r.name[:1] == "(" and r.name != f"({r.value})"] for each in (gold, said)]
    for a, b in itertools.product(*(rests if all(rests) else (gold, said))):  # (C) 12 is not (C) 13
        with contextlib.suppress(Exception):  # of sympy: these two it cannot compare
            if _same(a, b):
                return True
    return False


def _same(a: Reading, b: Reading) -> bool:
    if a.name == "?" or (a.name != b.name and _LETTER.fullmatch(a.name) and _LETTER.fullmatch(b.name)):
        return False  # the sum of a gold answer is no answer; x = 5 is not y = 5
    if isinstance(a.value, str) or isinstance(b.value, str):
        return isinstance(a.value, str) and a.value == b.value != ""
    lists = [isinstance(each.value, tuple) for each in (a, b)]
    if all(lists):
        return _same_lists(a, b)
    if any(lists):
        many, one = (a, b) if lists[0] else (b, a)
        return len(many.value) == 1 and same(many.value[0], (one,))
    return _same_amounts(a, b)


def _same_lists(a: Reading, b: Reading) -> bool:
    if a.brackets != b.brackets and a.brackets and b.brackets:
        return False
    names = [{item[0].name for item in each.value} for each in (a, b)]
    ordered = len(names[0]) == len(a.value) > 1 and names[1] == {""}  # (1, 2) for x=1, y=2
    if ordered or a.brackets[:1] in ("(", "["):
        return len(a.value) == len(b.value) and all(map(same, a.value, b.value))
    if "{}" in (a.brackets, b.brackets):  # of a set it does not count how often something is in it
        found = [[same(x, y) for y in b.value] for x in a.value]
        return all(map(any, found)) and all(map(any, zip(*found, strict=True)))
    rest = list(b.value)
    for x in a.value:
        if (match := next((y for y in rest if same(x, y)), None)) is None:
            return False
        rest.remove(match)
    return not rest


def _same_amounts(a: Reading, b: Reading) -> bool:
    if a.unit and b.unit:
        kinds = {kind for each in (a.unit, b.unit) for kind, _ in each[0]}
        temperature = kinds in ({"°", "celsius"}, {"°", "fahrenheit"})
        if a.unit[0] != b.unit[0] and not temperature:
            return False
        return equal(a.value * (1 if temperature else a.unit[1] / b.unit[1]), b.value)
    unit = a.unit or b.unit
    kind = unit[0][0][0] if unit and len(unit[0]) == 1 else ""
    if scale := PURE.get(kind):
        if equal(a.value * scale, b.value) if a.unit else equal(a.value, b.value * scale):
            return True
        if not a.unit and kind == "%" and a.value.is_number and abs(a.value) < 1:
            return False  # 0.5 is not 0.5%, though 50 is 50%
    return equal(a.value, b.value)
