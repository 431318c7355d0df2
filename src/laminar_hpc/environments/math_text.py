"""Text as the mathematics reward reads it: one spelling for what Unicode and LaTeX spell in many ways, and
the part of a response that is its final answer."""

import itertools
import re
import unicodedata

_SIGNS = {
    sign: f"\\{pair[1:]} "
    for pair in "×times πpi ∞infty ≤le ⩽le ≥ge ⩾ge ≠ne ∪cup ∩cap ∅emptyset ±pm ∓mp ∈in ⟨langle ⟩rangle "
    "≈approx ≡equiv θtheta αalpha βbeta λlambda ·cdot ⋅cdot ∙cdot".split()
    for sign in pair[0]
} | {"°": r"^\circ ", "º": r"^\circ ", "’": "'", "′": "'", "。": ".", "、": ","}
_SIGNS |= dict.fromkeys("−–‐‑", "-") | dict.fromkeys("÷⁄∕", "/") | dict.fromkeys("→⇒∴", "=")
_SPELLINGS = [(re.compile(pattern), to) for pattern, to in (
    (r"\\(?:left|right|mleft|mright|[bB]igg?[lr]?|displaystyle|textstyle|[lL]arge|bf|rm)(?![a-zA-Z])\.?", ""),
    (r"\\(?:text)?color\s*\{\w+\}|\\!|\\phantom\{.*?\}", ""), (r"(?<!\\)\\[,;: \n]|\\q?quad(?![a-z])|~", " "),
    (r"\s+", " "), (r"\\[dtc]frac", r"\\frac"), (r"\\[dt]?binom ?(\w) ?(\w)", r"\\binom{\1}{\2}"),
    (r"\\[dt]binom", r"\\binom"), (r"\{([,:])\} ?", r"\1"), (r"\\pounds ?", "£"), (r"\\%", "%"),
    (r"\\(?:mathrm|mathit|text)\s*\{(e|i)\}", r"\1"), (r"\\log_ ?\{?e\}?(?![a-z])", r"\\ln "),
    (r"\\(?:[mh]box|emph|text(?:bf|it|rm|normal|up)|math(?:rm|it|bf|sf)|operatorname\*?)\s*\{", r"\\text{"),
    (r"\\leq?(?:slant)?(?![a-z])|<=", r"\\le "), (r"\\geq?(?:slant)?(?![a-z])|>=", r"\\ge "),
    (r"\\neq?(?![a-z])|!=", r"\\ne "), (r"\\lt(?![a-z])", "<"), (r"\\gt(?![a-z])", ">"),
    (r"\\varnothing|\\\{ *\\\}", r"\\emptyset "), (r"\\lbrace", r"\\{"), (r"\\rbrace", r"\\}"),
    (r" ?\^ ?\{ ?\\circ ?\}| ?\^ ?\\circ|\\degree(?![a-z])|\\text\{ ?degrees? ?\}", r"^\\circ "),
    (r"\\(?:l|c)?dots(?![a-z])", "..."), (r"(?<=[\w)}])\*\*(?=[\w({-])", "^"),
    (r"(?i:\binfinity\b)", r"\\infty "),
    (r"(?<![\\a-zA-Z])(pi|sqrt|infty|log|ln|sin|cos|tan)(?=[^a-zA-Z]|$)", r"\\\1 "),
    (r"√ ?(\d+|\w)", r"\\sqrt{\1}"), (r"√ ?", r"\\sqrt"), (r"∛ ?(\w+)", r"\\sqrt[3]{\1}"),
    (r"\\sqrt ?(\d)", r"\\sqrt{\1}"), (r"\\sqrt *\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\^ ?\(([^()]*)\)", r"^{\1}"), (r"\\text *\{ *\}", ""),
    (r"(?<=[\d.])\\(?:overline|bar|overbar)\{(\d+)\}", r"<\1>"),
    (r"(\.\d*)\((\d+)\)", r"\1<\2>"), (r"(?<=[\d.])\\dot\{?(\d)\}?(?:(\d*)\\dot\{?(\d)\}?)?", r"<\1\2\3>"),
    (r"(\.\d*?)(\d{2,}?)\2+\.\.\.", r"\1<\2>"), (r"(\.\d*?)(\d)\2\2+\.\.\.", r"\1<\2>"),
    *((rf"(?i)(\d) ?(?:\\text ?\{{ ?)?{name}\b(?: ?\}})?", rf"\1\\times 10^{power}")
      for name, power in (("thousand", 3), ("million", 6), ("billion", 9), ("trillion", "{12}"))),
    (" +", " "),
)]  # fmt: skip


def spelled(text: str) -> str:
    """`text` with one spelling of each sign, space and command; the period of a decimal is within <>."""
    parts: list[str] = []
    for c in text:
        kind, _, points = unicodedata.decomposition(c).partition("> ")
        if kind in ("<super", "<sub", "<fraction"):
            plain = "".join(_SIGNS.get(chr(int(p, 16)), chr(int(p, 16))) for p in points.split())
            mark = {"<super": "^{", "<sub": "_{"}.get(kind)
            if mark and parts and parts[-1].startswith(mark):
                parts[-1] = f"{parts[-1][:-1]}{plain}}}"  # a run of them is one exponent
            else:
                parts.append(f"{mark}{plain}}}" if mark else f" {plain}")
        elif unicodedata.category(c) != "Cf":
            digit = unicodedata.decimal(c, None)
            parts.append(unicodedata.normalize("NFKC", c) if digit is None else str(digit))
    spelling = "".join(_SIGNS.get(c, c) for c in "".join(parts))
    for pattern, to in _SPELLINGS:
        spelling = pattern.sub(to, spelling)
    return spelling.strip()


FORMULA = re.compile(
    r"\\\[(.+?)\\\]|\\\((.+?)\\\)|\$\$(.+?)\$\$"
    r"|(?<![\\\w$])\$(?=\S)((?:[^$\n\\]|\\.)+?)(?<=\S)\$(?!\d)|\$ ([^$\n]+) \$"  # $5 and $6 are amounts
    r"|\\begin\{(?:equation|align|gather|displaymath)\*?\}(.+?)\\end\{(?:equation|align|gather|displaymath)\*?\}",
    re.S,
)
_SEPARATED = re.compile(r"[\s$.,;]*(?:and|or|und|oder|et|ou|y|o|和|或)?[\s$.,;]*", re.I)
ASKED = re.compile(
    r"(?:(?:(?<!to )answer|antwort|r[ée]ponse|respuesta|resposta|risposta|ответ|الجواب|odpowiedź|đáp án|उत्तर"
    r"|cevap|解答|答案|答え?|选项|정?답|(?:correct|right|best) (?:option|choice))[^.,\n:：=]{0,60}?"
    r"|(?:ergebnis|lösung|solution|r[ée]sultat|result|resultado|risultato|结果)[^.,\n:：=]{0,12}?)"
    r"(?:\b(?:is|be|are|ist|lautet|est|es|é|è)\b|[:：=是—為为は은는]|هو)"
    r"(?:\s*(?:therefore|simply|option|choice|选项))?[\s:：*]*|[选選](?!项)[\s:：*]*"
    r"|\b(?:choose|choice|option|select|pick)\b:?\s*(?=[(*]*[A-J]\b)", re.I
)  # fmt: skip
_MONTH = (
    r"jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?"
)
DATE = re.compile(rf"\b({_MONTH})\b", re.I)
_DIGITS = (
    r"(?:\d{1,3}(?:\.\d{3})+,\d+|\d+(?:[.,]\d*)?<\d+>"
    r"|[1-9]\d{0,2}(?:(?:[, ']\d{3})+|(?:\.\d{3}){2,})(?!\d)(?:\.\d+)?|\d+(?:[.,]\d+)?|\.\d+)(?:e[+-]?\d+)?"
)
_MORE = (
    r"(?: \d+/\d+|\s?/\s?\d+|\^\{?-?\d+\}?|i\b| ?(?:\\times|\\cdot|\*|x) ?10\^\{?-?\d+\}?| ?\\pi"
    r"| ?\\(?:sqrt|frac)(?: ?\{[^{}]*\})+)*(?::\d+)*(?:\s?%|\s?\^\\circ ?[CF]?|(?:st|nd|rd|th)\b)?"
    r"(?: ?(?:[ap]\.m\.|(?!and\b)(?:[a-zµ]{3,}|[cmdk]m|[km]g|[mc]l|lb|ft|yd|mi|oz|hr|gm|kw|[ap]m|[mgshl])\b"
    r"(?:/[a-z]+)?(?:\^\{?\d\}?)?))?"
)
_NUMBER = (
    r"[(\[{] ?-?[\d.]+(?:/\d+)?(?:, ?-?[\d.]+(?:/\d+)?)+ ?[)\]}]"
    rf"|(?:{_MONTH})\.? \d{{1,2}}(?:st|nd|rd|th)?\b(?:,? \d{{4}})?"
    rf"|\d{{1,2}}(?:st|nd|rd|th)? (?:{_MONTH})\b(?:,? \d{{4}})?"
    rf"|(?:(?<![\w)\]}}])-(?=[\d.$€£¥\\]))?(?:(?:US|HK|A|C)?\\?[$€£¥₹₩]\s?-?)?{_DIGITS}{_MORE}"
    r"|(?:(?<![\w)\]}])-)?\\(?:frac|sqrt|pi)(?: ?\{[^{}]*\})*"
)
NUMBER = re.compile(_NUMBER, re.I)
_LIST = re.compile(rf"(?:{_NUMBER})(?:\s*(?:,|;|,?\s?\b(?:and|or)\b)\s*(?:{_NUMBER}))*", re.I)
_SENTENCE = re.compile(r"\.+(?=\s|$)|\n")
_WORD = re.compile(r"(?<![\\a-zA-Z])(?!and\b|or\b)[^\W\d_]{2,}")
_LONGEST = 5000  # characters: the end of a response without a mark, or the beginning of a box
_LETTER = re.compile(r"\(([A-J])\)|\*\*([A-J])\*\*|\b([A-J])\W*$")
_CHOSEN = re.compile(r"\W*([A-J])\b\W*(?:$|is\b|because\b|since\b|as\b)")


def boxes(text: str) -> str | None:
    """What the last box holds; of boxes between which stands nothing but a comma, "and" or "or", all of it.
    None where there is no box."""
    found: list[str] = []
    end = len(text)
    while (start := max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))) >= 0:
        rest = text[start:end]
        opened = re.match(r"\\f?box(?:ed)?\s*(\{)?", rest)
        assert opened
        depth, stop = 1 if opened[1] else 0, opened.end()
        while depth and stop < len(rest):
            depth += {"{": 1, "}": -1}.get(rest[stop], 0) if rest[stop - 1] != "\\" else 0
            stop += 1
        if not opened[1]:
            stop += len((re.match(r"[^\s$.,;]*", rest[stop:]) or [""])[0])
        if found and not _SEPARATED.fullmatch(rest[stop:]):
            break
        held = rest[opened.end() : stop - bool(opened[1] and not depth)].strip()
        found.insert(0, boxes(held) or held)
        end = start
    return ", ".join(dict.fromkeys(found)) if found else None


def final_answer(response: str) -> str:
    """The final answer in `spelled` form, or "": the last box, <answer> or "####", else what follows the last
    "the answer is", in several languages, else the last formula or number."""
    text = response.rpartition("</think>")[2].strip() or response
    tag, hashes = text.rfind("</answer>"), text.rfind("####")
    if max(text.rfind("\\boxed"), text.rfind("\\fbox")) > max(hashes, tag, text.rfind("<answer>")):
        return spelled((boxes(text) or "")[:_LONGEST])
    if max(tag, hashes) >= 0:
        held = text[:tag].rpartition("<answer>")[2] if tag > hashes else text[hashes + 4 :]
        return spelled(held) if len(held) < 60 and not ASKED.search(held) else final_answer(held)
    return _unmarked(re.sub(r"</?[a-zA-Z]\w*>|<\|\w+\|>|```", " ", text[-_LONGEST:]).strip())


def _unmarked(text: str) -> str:
    asked = list(ASKED.finditer(text))
    said = re.sub(r"^\s*(?:[-•*] |\.\.+|…)", "", text[asked[-1].end() :] if asked else text)
    formulas = list(FORMULA.finditer(said))
    if asked:
        plain = spelled(_SENTENCE.split(said.strip() + " ", maxsplit=1)[0].strip(" *`")).rstrip("!?")
        if formulas and formulas[0].start() < 40:
            return _joined(said, formulas, 0)
        if chosen := _CHOSEN.match(plain):
            return chosen[1]
        found = _LIST.search(plain.rpartition("=")[2])
        if found and _WORD.search(plain) and not re.match(r"\(?[A-J]\b\)?(?!')", plain):
            return found[0]
        return plain if found else re.split(r"[,(](?=.)", plain + " ")[0].strip() or plain
    plain = spelled(said)
    numbers = list(NUMBER.finditer(plain))
    if formulas and not NUMBER.search(spelled(said[formulas[-1].end() :])):
        return _joined(said, formulas, -1)
    if numbers and not re.fullmatch(r"\W*\(?[A-J][).:].*", plain):
        last = numbers[-1][0]
        alone = re.fullmatch(rf"[^\w.\-]*(?:- )?{re.escape(last)}\W*", plain)
        return last if alone or len(plain) > 60 or _WORD.search(plain) or ". " in plain else plain
    letters = [next(filter(None, found.groups())) for found in _LETTER.finditer(plain)]
    return plain if len(plain.split()) < 4 else letters[-1] if letters else ""


def _joined(said: str, formulas: list[re.Match[str]], first: int) -> str:
    """The first or last formula, with those to which commas, "and" or "or" join it."""
    low = first % len(formulas)
    high = low + 1
    between = [said[a.end() : b.start()] for a, b in itertools.pairwise(formulas)]
    while high < len(formulas) and _SEPARATED.fullmatch(between[high - 1]):
        high += 1
    while low and first and _SEPARATED.fullmatch(between[low - 1]):
        low -= 1
    return spelled(", ".join(next(filter(None, found.groups())) for found in formulas[low:high]))
