"""Units of measurement: which of them are of one kind, and how many of one make another."""

import re

import sympy

Unit = tuple[tuple[tuple[str, int], ...], sympy.Rational]  # ((kind, power), ...), how many of the kind's own

_UNITS = {  # a line: kind, how many of its own unit, names
    name: (kind, sympy.Rational(factor))
    for kind, factor, *names in map(str.split, """length 1/1000 mm millimeter millimetre
length 1/100 cm centimeter centimetre; length 1/10 dm decimeter; length 1 m meter metre
length 1000 km kilometer kilometre; length 127/5000 in inch inche; length 381/1250 ft foot feet
length 1143/1250 yd yard; length 201168/125 mi mile; time 1/1000 ms millisecond; time 1 s sec second
time 60 min minute; time 3600 h hr hour; time 86400 day; time 604800 week; time 2629746 month
time 31556952 yr year; mass 1/1000 mg milligram; mass 1 g gm gram; mass 1000 kg kilogram kilo
mass 1000000 tonne; mass 45359237/100000 lb; mass 45359237/1600000 oz ounce
volume 1/1000 ml milliliter millilitre; volume 1/100 cl centiliter; volume 1 l liter litre
volume 473176473/125000000 gal gallon; volume 473176473/500000000 quart; volume 473176473/1000000000 pint
money 1/100 cent ¢; money 1 $ dollar usd us$ buck; euro 1 € euro eur; sterling 1 £ gbp; yen 1 ¥ yen
rupee 1 ₹ rupee rs inr; won 1 ₩ won; % 1/100 % percent prozent percentage pct; ° 1/180 ° degree deg
radian 1 radian rad; celsius 1 °c celsius; fahrenheit 1 °f fahrenheit; energy 1 j joule
energy 1000 kj kilojoule; force 1 n newton; power 1 w watt; power 1000 kw kilowatt
potential 1 v volt""".replace(";", "\n").splitlines())
    for name in names
}  # fmt: skip
PURE = {"%": sympy.Rational(1, 100), "°": sympy.pi / 180, "radian": sympy.Integer(1)}  # of the number 1
_SPELLED = [(re.compile(pattern), to) for pattern, to in (
    (r"\^\\circ ?", "°"), (r"\bmph\b", "mi/h"), (r"\bkm(?:ph|/hr?)\b", "km/h"), (r"[{}]|\\", ""),
    (r"\bsq(?:uare)?\.? (\w+)", r"\1^2"), (r"\bcu(?:bic)?\.? (\w+)", r"\1^3"),
)]  # fmt: skip
_WORD = re.compile(r"(/|\bper\b)|([^\W\d_]+[$]?|[%°$€£¥₹₩¢][a-zA-Z]?)(?:\^?(-?\d))?|(\S)")  # a unit, a power


def unit_of(text: str) -> Unit | None:
    """What `text` measures in, as "km/h", "square inches", "cm^2"; None where a word of it is no unit."""
    for pattern, to in _SPELLED:
        text = pattern.sub(to, text.strip(" ."))
    kinds: dict[str, int] = {}
    factor, sign = sympy.Integer(1), 1
    for per, name, power, _ in _WORD.findall(text):
        known = _UNITS.get(name.lower()) or _UNITS.get(name.lower().removesuffix("s"))
        if known:
            kinds[known[0]] = kinds.get(known[0], 0) + sign * int(power or 1)
            factor *= known[1] ** (sign * int(power or 1))
        elif not per:
            return None
        sign = -1 if per else sign
    return (tuple(sorted(kinds.items())), factor) if kinds else None
