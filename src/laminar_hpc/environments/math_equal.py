"""Whether two expressions are the same: exactly where both are rational, else to 250 digits, at several
points where they have variables, so that no difference is too small to count. Sets and relations are
math-verify's."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from math import prod
from typing import Any

import sympy
from math_verify import verify
from math_verify.grader import is_relation as is_relation

_DIGITS = 300  # of each value
_SAME = sympy.Float(10, _DIGITS) ** -250  # relative
_LARGE = sympy.Float(10, _DIGITS) ** 200  # beyond it as many digits do not prove a number equal
_BITS = 1 << 20  # of the longest whole number that is written out
_TO_DO = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)
_POINTS: tuple[Callable[[int], Any], ...] = (  # by place of a variable: broken, whole and negative numbers
    lambda i: sympy.Rational(7 * i + 11, 9 + 2 * i),
    lambda i: sympy.Rational(5 * i + 3, 13),
    lambda i: sympy.Integer(2 * i + 3),
    lambda i: sympy.Integer(3 * i + 7),
    lambda i: -sympy.Rational(3 * i + 5, 7),
)


class TooLong(BaseException):
    """Raised in a thread whose time is over. It is no Exception, as sympy and math-verify swallow those."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TooLong in this thread when the block has computed for so long; waiting for a core is not
    computing. It needs no main thread, as a signal would; it cannot interrupt C code."""
    lock, over, ident = threading.Lock(), threading.Event(), threading.get_ident()
    clock, thread = time.pthread_getcpuclockid(ident), ctypes.c_ulong(ident)
    interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
    end = time.clock_gettime(clock) + seconds

    def watch() -> None:
        while not over.wait(max(end - time.clock_gettime(clock), 0.01)):
            with lock:
                if time.clock_gettime(clock) >= end and not over.is_set():
                    interrupt(thread, ctypes.py_object(TooLong))
                    return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        with lock:
            over.set()
            interrupt(thread, None)


def exact(expression: Any) -> Fraction | None:
    """The rational number that it is; None where it is none, or too long to write out."""
    if expression.is_Rational:
        return Fraction(int(expression.p), int(expression.q))
    values = [value for value in map(exact, expression.args) if value is not None]
    if not values or len(values) < len(expression.args):
        return None
    first, last = values[0], values[-1]
    bits = [max(value.numerator.bit_length(), value.denominator.bit_length()) for value in values]
    if expression.is_Add:
        return sum(values, Fraction(0))
    if expression.is_Mul and sum(bits) < _BITS:
        return prod(values, start=Fraction(1))
    if expression.is_Pow and last.denominator == 1 and abs(last) * bits[0] < _BITS and (first or last >= 0):
        return first ** int(last)
    if isinstance(expression, sympy.factorial) and first.denominator == 1 and 0 <= first < 20_000:
        return Fraction(int(sympy.factorial(int(first))))
    return None


def _value(expression: Any, at: dict) -> Any:
    """A number, None where sympy finds none."""
    if not at and (rational := exact(expression)) is not None:
        return sympy.Rational(rational.numerator, rational.denominator)
    with contextlib.suppress(Exception):
        number = expression.evalf(_DIGITS, subs=at)
        if all(part.is_Float or part.is_Rational for part in number.as_real_imag()):
            return number
    return None


def _same_value(x: Any, y: Any) -> bool | None:
    """None where the digits cannot tell."""
    if x.is_Rational and y.is_Rational:
        return bool(x == y)
    larger = max(abs(x), abs(y))
    if abs(x - y) > _SAME * larger:
        return False
    return True if 1 / _LARGE < larger < _LARGE else None


def _named(expression: Any) -> Any:
    """With variables by their names alone, and i as the imaginary unit unless it is a direction."""
    names = {symbol: sympy.Symbol(symbol.name) for symbol in expression.free_symbols}
    vector = any(symbol.name in "jk" for symbol in names)
    return expression.xreplace(
        {old: sympy.I if new.name == "i" and not vector else new for old, new in names.items()}
    )


def equal(a: Any, b: Any) -> bool:
    """Of what sympy or math-verify has made of two texts. May raise whatever sympy raises."""
    if a == b:
        return True
    matrices = [isinstance(each, sympy.MatrixBase) for each in (a, b)]
    if all(matrices):
        return a.shape == b.shape and all(map(equal, a, b))
    special = [isinstance(each, sympy.Set) or is_relation(each) for each in (a, b)]
    if all(special):
        with contextlib.suppress(Exception):  # those of several variables are no set
            a, b = (r if isinstance(r, sympy.Set | sympy.Eq) else r.as_set() for r in (a, b))
        return verify(a, b, _DIGITS, _DIGITS, allow_set_relation_comp=True, timeout_seconds=None)
    if any(matrices + special) or not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return False
    a, b = (_named(each.doit() if each.has(*_TO_DO) else each) for each in (a, b))
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    judged = []
    for point in _POINTS if symbols else _POINTS[:1]:
        at = {symbol: point(i) for i, symbol in enumerate(symbols)}
        x, y = _value(a, at), _value(b, at)
        if x is None or y is None or (point(0) < 0 and not (x.is_real and y.is_real)):
            continue
        judged.append(_same_value(x, y))
        if judged[-1] is False:
            return False
    if judged.count(True) >= (3 if symbols else 1):
        return True
    return bool(a - b == 0 or (symbols and sympy.simplify(a - b) == 0))
