"""Units of measurement: which of them are of one kind, and how many of one make another."""

import re
from fractions import Fraction

Unit = tuple[tuple[tuple[str, int], ...], Fraction]  # ((kind, power), ...), how many of the kind's own unit

_UNITS = {
    name: (kind, Fraction(factor))
    for line in """length 1/1000 mm millimeter millimetre|1/100 cm centimeter centimetre|1/10 dm decimeter
length 1 m meter metre|1000 km kilometer kilometre|127/5000 in inch inche|381/1250 ft foot feet
length 1143/1250 yd yard|201168/125 mi mile
time 1/1000 ms millisecond|1 s sec second|60 min minute|3600 h hr hour|86400 day|604800 week|2629746 month
time 31556952 yr year
mass 1/1000 mg milligram|1 g gm gram|1000 kg kilogram kilo|1000000 tonne|45359237/100000 lb
mass 45359237/1600000 oz ounce
volume 1/1000 ml milliliter millilitre|1/100 cl centiliter|1 l liter litre|473176473/125000000 gal gallon
volume 473176473/500000000 quart|473176473/1000000000 pint
money 1/100 cent ¢|1 $ dollar usd us$ buck
euro 1 € euro eur
sterling 1 £ gbp
yen 1 ¥ yen
rupee 1 ₹ rupee rs inr
won 1 ₩ won
% 1/100 % percent prozent percentage pct
° 1/180 ° degree deg
radian 1 radian rad
celsius 1 °c celsius
fahrenheit 1 °f fahrenheit
energy 1 j joule|1000 kj kilojoule
force 1 n newton
power 1 w watt|1000 kw kilowatt
potential 1 v volt""".splitlines()
    for kind, entries in [line.split(" ", 1)]
    for factor, *names in map(str.split, entries.split("|"))
    for name in names
}
PURE = {"%": Fraction(1, 100), "°": Fraction(1, 180), "radian": Fraction(1)}  # of 1; degrees of pi
_SPELLED = [(re.compile(pattern), to) for pattern, to in (
    (r"\^\\circ ?", "°"), (r"\bmph\b", "mi/h"), (r"\bkm(?:ph|/hr?)\b", "km/h"), (r"[{}]|\\", ""),
    (r"\bsq(?:uare)?\.? (\w+)", r"\1^2"), (r"\bcu(?:bic)?\.? (\w+)", r"\1^3"),
)]  # fmt: skip
_WORD = re.compile(r"(/|\bper\b)|([^\W\d_]+[$]?|[%°$€£¥₹₩¢][a-zA-Z]?)(?:\^?(-?\d))?|(\S)")


def unit_of(text: str) -> Unit | None:
    """What `text` measures in, as "km/h", "square inches", "cm^2"; None where a word of it is no unit."""
    for pattern, to in _SPELLED:
        text = pattern.sub(to, text.strip(" ."))
    kinds: dict[str, int] = {}
    factor, sign = Fraction(1), 1
    for per, name, power, _ in _WORD.findall(text):
        if per:
            sign = -1
            continue
        known = _UNITS.get(name.lower()) or _UNITS.get(name.lower().removesuffix("s"))
        if known is None:
            return None
        kinds[known[0]] = kinds.get(known[0], 0) + sign * int(power or 1)
        factor *= known[1] ** (sign * int(power or 1))
    return (tuple(sorted(kinds.items())), factor) if kinds else None
