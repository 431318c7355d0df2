"""Whether two expressions are the same: exactly where both are rational, else to 250 digits, at several
points where they have variables, so that no difference is too small to count. Sets and relations are
math-verify's."""

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator
from typing import Any

import sympy
from math_verify import verify
from math_verify.grader import is_relation as is_relation

_DIGITS = 300  # of each value
_SAME = sympy.Float(10, _DIGITS) ** -250  # relative
_LARGE = sympy.Float(10, _DIGITS) ** 200  # beyond it as many digits do not prove a number equal
_BITS = 1 << 20  # of the longest whole number that is written out
_TO_DO = (sympy.Sum, sympy.Product, sympy.Integral, sympy.Limit, sympy.Derivative)
_POINTS = ((7, 11, 9), (5, 3, 13), (2, 3, 1), (3, 7, 1), (-3, -5, 7))  # (a, b, c): variable i is (ai + b)/c


class TooLong(BaseException):
    """Raised in a thread whose time is over. It is no Exception, as sympy and math-verify swallow those."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises TooLong in this thread when the block has computed for so long; waiting for a core is not
    computing. It needs no main thread, as a signal would; it cannot interrupt C code."""
    lock, over, thread = threading.Lock(), threading.Event(), threading.get_ident()
    clock = time.pthread_getcpuclockid(thread)
    end = time.clock_gettime(clock) + seconds

    def interrupt(by: Any) -> None:
        with lock:
            if by is None or not over.is_set():
                over.set()
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), by)

    def watch() -> None:
        while (left := end - time.clock_gettime(clock)) > 0 and not over.wait(max(left, 0.01)):
            pass
        interrupt(ctypes.py_object(TooLong))

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        interrupt(None)


def _exact(expression: Any) -> Any:
    """The rational number that it is; None where it is none, or too long to write out."""
    if expression.is_Rational:
        return expression
    values = list(map(_exact, expression.args))
    if not values or None in values:
        return None
    first, last = values[0], values[-1]
    bits = [max(int(value.p).bit_length(), int(value.q).bit_length()) for value in values]
    if (
        expression.is_Add
        or (expression.is_Mul and sum(bits) < _BITS)
        or (expression.is_Pow and last.q == 1 and abs(last) * bits[0] < _BITS)
        or (isinstance(expression, sympy.factorial) and 0 <= first < 20_000)
    ):
        value = expression.func(*values)
        return value if value.is_Rational else None
    return None


def _same_at(a: Any, b: Any, at: dict) -> bool | None:
    """Whether they are equal with these values of the variables; None where the digits cannot tell."""
    values = [None if at else _exact(each) for each in (a, b)]
    x, y = (each.evalf(_DIGITS, subs=at) if v is None else v for each, v in zip((a, b), values, strict=True))
    if x.is_Rational and y.is_Rational:
        return bool(x == y)
    parts = [*x.as_real_imag(), *y.as_real_imag()]
    if not all(part.is_Float or part.is_Rational for part in parts):
        return None
    if min(at.values(), default=0) < 0 and any(parts[1::2]):  # of a negative number only real values count
        return None
    larger = max(abs(x), abs(y))
    if abs(x - y) > _SAME * larger:
        return False
    return True if 1 / _LARGE < larger < _LARGE else None


def _named(expression: Any) -> Any:
    """With variables by their names alone, and i as the imaginary unit unless it is a direction."""
    names = {symbol: sympy.Symbol(symbol.name) for symbol in expression.free_symbols}
    imaginary = not any(symbol.name in "jk" for symbol in names)
    return expression.xreplace(names).xreplace({sympy.Symbol("i"): sympy.I} if imaginary else {})


def equal(a: Any, b: Any) -> bool:
    """Of what sympy or math-verify has made of two texts. May raise whatever sympy raises."""
    if a == b:
        return True
    if all(isinstance(each, sympy.MatrixBase) for each in (a, b)):
        return a.shape == b.shape and all(map(equal, a, b))
    if all(isinstance(each, sympy.Set) or is_relation(each) for each in (a, b)):
        with contextlib.suppress(Exception):  # those of several variables are no set
            a, b = (r if isinstance(r, sympy.Set | sympy.Eq) else r.as_set() for r in (a, b))
        return verify(a, b, _DIGITS, _DIGITS, allow_set_relation_comp=True, timeout_seconds=None)
    if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
        return False
    a, b = (_named(each.doit() if each.has(*_TO_DO) else each) for each in (a, b))
    symbols = sorted(a.free_symbols | b.free_symbols, key=str)
    judged: list[bool | None] = []
    for step, start, part in _POINTS if symbols else _POINTS[:1]:
        with contextlib.suppress(Exception):  # sympy finds no value there
            at = {symbol: sympy.Rational(step * i + start, part) for i, symbol in enumerate(symbols)}
            judged.append(_same_at(a, b, at))
    if False in judged or judged.count(True) >= (3 if symbols else 1):
        return False not in judged
    return bool(a - b == 0 or (symbols and sympy.simplify(a - b) == 0))
