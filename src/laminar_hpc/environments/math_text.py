"""Text as the mathematics reward reads it: one spelling for what Unicode and LaTeX spell in many ways, and
the part of a response that is its final answer."""

import itertools
import re
import unicodedata

_SIGNS = {
    sign: f"\\{pair[1:]} "
    for pair in "×times πpi ∞infty ≤le ⩽le ≥ge ⩾ge ≠ne ∪cup ∩cap ∅emptyset ±pm ∓mp ∈in "
    "≈approx ≡equiv θtheta αalpha βbeta λlambda ·cdot ⋅cdot ∙cdot".split()
    for sign in pair[0]
} | {"°": r"^\circ ", "’": "'", "′": "'", "。": ".", "、": ",", "⟨": "(", "⟩": ")"}
_SIGNS |= dict.fromkeys("−–‐‑", "-") | dict.fromkeys("÷⁄∕", "/") | dict.fromkeys("→⇒∴", "=")
_RAISED = [(re.compile(pattern), to) for pattern, to in (  # what Unicode raises or lowers
    ("[⁰¹²³⁴-⁹⁺⁻ⁿⁱ]+", r"^{\g<0>}"), ("[₀-₉]+", r"_{\g<0>}"), ("[¼-¾⅐-⅞]", r" \g<0>"), ("º", "°"),
)]  # fmt: skip
_SPELLINGS = [(re.compile(pattern), to) for pattern, to in (
    # size and boldness; spaces
    (r"\\(?:m?left|m?right|[bB]igg?[lr]?|displaystyle|textstyle|[lL]arge|bf|rm)(?![a-zA-Z])\.?|\\!", ""),
    (r"(?<!\\)\\[,;: \n]|\\q?quad(?![a-z])|~|\s+", " "),
    # commands and signs with several names
    (r"\\[dtc](frac|binom)", r"\\\1"), (r"\{([,:])\} ?", r"\1"), (r"\\pounds ?", "£"), (r"\\%", "%"),
    (r"\\(?:mathrm|mathit|text)\s*\{(e|i)\}", r"\1"), (r"\\langle", "("), (r"\\rangle", ")"),
    (r"\\lbrace", r"\\{"), (r"\\rbrace", r"\\}"), (r"\\log_ ?\{?e\}?(?![a-z])", r"\\ln "),
    (r"\\(?:[mh]box|emph|text(?:bf|it|rm|normal|up)|math(?:rm|it|bf|sf)|operatorname\*?)\s*\{", r"\\text{"),
    (r"\\leq?(?:slant)?(?![a-z])|<=", r"\\le "), (r"\\geq?(?:slant)?(?![a-z])|>=", r"\\ge "),
    (r"\\neq?(?![a-z])|!=", r"\\ne "), (r"\\lt(?![a-z])", "<"), (r"\\gt(?![a-z])", ">"),
    (r"\\varnothing|\\\{ *\\\}", r"\\emptyset "), (r"\\[lc]?dots(?![a-z])", "..."),
    (r" ?\^ ?\{ ?\\circ ?\}| ?\^ ?\\circ|\\degree(?![a-z])|\\text\{ ?degrees? ?\}", r"^\\circ "),
    # units over units: \frac{\text{m}}{\text{s}}, \text{km}/\text{h}
    (r"\\frac ?\{ ?\\text\{([^{}]+)\} ?\}\{ ?\\text\{([^{}]+)\}(\^\{?\d\}?)? ?\}", r"\\text{\1/\2\3}"),
    (r"\} ?(/|\\cdot) ?\\text ?\{", r"\1"),
    # functions and powers as in plain text
    (r"(?<=[\w)}])\*\*(?=[\w({-])", "^"),
    (r"(?<![\\a-zA-Z])(pi|sqrt|infty|log|ln|sin|cos|tan)(?![a-zA-Z])", r"\\\1 "),
    (r"√ ?(\d+|\w)", r"\\sqrt{\1}"), (r"√", r"\\sqrt"),
    (r"\\sqrt *\(([^()]*)\)", r"\\sqrt{\1}"),
    # the period of a decimal: a bar, brackets, dots, repetition
    (r"(?<=[\d.])\\(?:overline|bar|overbar)\{(\d+)\}|(?<=\.)\((\d+)\)|(?<=\.\d)\((\d+)\)", r"<\1\2\3>"),
    (r"(?<=[\d.])\\dot\{?(\d)\}?(?:(\d*)\\dot\{?(\d)\}?)?", r"<\1\2\3>"),
    (r"(\.\d*?)(\d+?)\2+\.\.\.", r"\1<\2>"),
    # 3 million
    *((rf"(?i)(\d) ?(?:\\text ?\{{ ?)?{name}\b(?: ?\}})?", rf"\1\\times 10^{power}")
      for name, power in (("thousand", 3), ("million", 6), ("billion", 9), ("trillion", "{12}"))),
    (" +", " "),
)]  # fmt: skip


def spelled(text: str) -> str:
    """`text` with one spelling of each sign, space and command; the period of a decimal is within <>."""
    for pattern, to in _RAISED:
        text = pattern.sub(to, text)
    kept = (c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")
    text = "".join(_SIGNS.get(c, str(unicodedata.decimal(c, c))) for c in kept)
    for pattern, to in _SPELLINGS:
        text = pattern.sub(to, text)
    return text.strip()


FORMULA = re.compile(  # $x$, \(x\) and so on; $5 and $6 are amounts
    r"\\\[(.+?)\\\]|\\\((.+?)\\\)|\$\$(.+?)\$\$"
    r"|(?<![\\$])\$(?=\S)((?:[^$\n\\]|\\.)+?)(?<=\S)\$(?!\d)|\$ ([^$\n]+) \$"
    r"|\\begin\{(?:equation|align|gather|displaymath)\*?\}(.+?)\\end\{(?:equation|align|gather|displaymath)\*?\}",
    re.S,
)
_SEPARATED = re.compile(r"[\s$.,;]*(?:and|or|und|oder|et|ou|y|o|和|或)?[\s$.,;]*", re.I)  # of two answers
ASKED = re.compile(  # "the answer is", "Antwort:", "choose": what follows it is the answer
    r"(?:(?:(?<!to )answer|antwort|r[ée]ponse|respuesta|resposta|risposta|ответ|الجواب|odpowiedź|đáp án|उत्तर"
    r"|cevap|解答|答案|答え?|选项|정?답|(?:correct|right|best) (?:option|choice))[^.,\n:：=]{0,60}?"
    r"|(?:ergebnis|lösung|solution|r[ée]sultat|result|resultado|risultato|结果)[^.,\n:：=]{0,12}?)"
    r"(?:\b(?:is|be|are|ist|lautet|est|es|é|è)\b|[:：=是—為为は은는]|هو)"
    r"(?:\s*(?:therefore|simply|option|choice|选项))?[\s:：*]*|[选選](?!项)[\s:：*]*"
    r"|\b(?:choose|choice|option|select|pick)\b:?\s*(?=[(*]*[A-J]\b)", re.I
)  # fmt: skip
MONTHS = ("jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?"
          "|oct(?:ober)?|nov(?:ember)?|dec(?:ember)?")  # fmt: skip
INTEGER = r"(?:\d{1,3}(?:[, '_]\d{3})+(?!\d)|\d{1,2}(?:,\d\d)+,\d{3}(?!\d)|\d+)"  # 1,234 or Indian 12,34,567
EUROPEAN = r"\d{1,3}(?:\.\d{3})+,\d+|\d{1,3}(?:\.\d{3}){2,}(?!\d)"  # 1.234,5
DECIMAL = rf"(?:{EUROPEAN}|{INTEGER}(?:\.\d*)?(?:<\d+>)?|\.\d+(?:<\d+>)?|\.<\d+>)"
_MORE = (  # what belongs to the number before it: a power, a root, a unit
    r"(?: \d+/\d+|\s?/\s?\d+|\^\{?-?\d+\}?|i\b| ?(?:\\times|\\cdot|\*|x) ?10\^\{?-?\d+\}?| ?\\pi"
    r"| ?\\(?:sqrt|frac)(?: ?\{[^{}]*\})+)*(?::\d+)*(?:\s?%|\s?\^\\circ ?[CF]?|(?:st|nd|rd|th)\b)?"
    r"(?: ?(?:[ap]\.m\.|(?!and\b)(?:[a-zµ]{3,}|[cmdk]m|[km]g|[mc]l|lb|ft|yd|mi|oz|hr|gm|kw|[ap]m|[mgshl])\b"
    r"(?:/[a-z]+)?(?:\^\{?\d\}?)?))?"
)
_NUMBER = (  # a point or set, a date, an amount, a fraction or root
    r"[(\[{] ?-?[\d.]+(?:/\d+)?(?:, ?-?[\d.]+(?:/\d+)?)+ ?[)\]}]"
    rf"|(?:{MONTHS})\.? \d{{1,2}}(?:st|nd|rd|th)?\b(?:,? \d{{4}})?"
    rf"|\d{{1,2}}(?:st|nd|rd|th)? (?:{MONTHS})\b(?:,? \d{{4}})?"
    r"|(?:(?<![\w)\]}])-(?=[\d.$€£¥\\]))?(?:(?:US|HK|A|C)?\\?[$€£¥₹₩]\s?-?)?"
    rf"(?:\d+,\d{{1,2}}\b(?!,)|{DECIMAL}(?<!\.))(?:e[+-]?\d+)?{_MORE}"
    r"|(?:(?<![\w)\]}])-)?\\(?:frac|sqrt|pi)(?: ?\{[^{}]*\})*"
)
NUMBER = re.compile(_NUMBER, re.I)
_LIST = re.compile(rf"(?:{_NUMBER})(?:\s*(?:,|;|,?\s?\b(?:and|or)\b)\s*(?:{_NUMBER}))*", re.I)
_SENTENCE = re.compile(r"\.+(?=\s|$)|\n")
_WORD = re.compile(r"(?<![\\a-zA-Z])(?!and\b|or\b)[^\W\d_]{2,}")
_LETTER = re.compile(r"\(([A-J])\)|\*\*([A-J])\*\*|\b([A-J])\W*$")  # of a choice, in a text
_CHOSEN = re.compile(r"\W*([A-J])\b\W*(?:$|is\b|because\b|since\b|as\b)")  # of a choice, with its reason
_LONGEST = 5000  # characters: the end of a response without a mark, or the beginning of a box


def boxes(text: str) -> str | None:
    """What the last box holds; of boxes between which stands nothing but a comma, "and" or "or", all of it.
    None where there is no box."""
    found: list[str] = []
    end = len(text)
    for opened in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*(\{|[^\s$.,;{]*)", text))):
        held, stop = opened[1], opened.end()
        if held == "{":
            signs = re.sub(r"\\[{}]", "__", text[stop:end])
            depths = itertools.accumulate(((c == "{") - (c == "}") for c in signs), initial=1)
            length = next((i for i, depth in enumerate(depths) if not depth), len(signs) + 1)
            held, stop = text[stop : min(stop + length - 1, end)], stop + length
        if found and not _SEPARATED.fullmatch(text[stop:end]):
            break
        found.insert(0, held.strip())
        end = opened.start()
    return ", ".join(filter(None, dict.fromkeys(found))) if found else None


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
    if formulas and not NUMBER.search(spelled(said[formulas[-1].end() :])):
        return _joined(said, formulas, -1)
    plain = spelled(said)
    numbers = list(NUMBER.finditer(plain))
    if numbers and not re.fullmatch(r"\W*\(?[A-J][).:].*", plain):
        last = numbers[-1][0]
        alone = re.fullmatch(rf"[^\w.\-]*(?:- )?{re.escape(last)}\W*", plain)
        return last if alone or len(plain) > 60 or _WORD.search(plain) or ". " in plain else plain
    letters = [next(filter(None, found.groups())) for found in _LETTER.finditer(plain)]
    return plain if len(plain.split()) < 4 else letters[-1] if letters else ""


def _joined(said: str, formulas: list[re.Match[str]], place: int) -> str:
    """The first or last (`place` 0 or -1) formula, with those to which commas, "and" or "or" join it."""
    groups = [formulas[:1]]
    for before, each in itertools.pairwise(formulas):
        if not _SEPARATED.fullmatch(said[before.end() : each.start()]):
            groups.append([])
        groups[-1].append(each)
    return spelled(", ".join(next(filter(None, found.groups())) for found in groups[place]))
