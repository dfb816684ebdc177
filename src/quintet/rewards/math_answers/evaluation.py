"""Values of scalars: exact fractions as far as possible, else numbers of as many digits as a comparison needs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import cache
from typing import Any, Final

from quintet.rewards.math_answers.nodes import Call, Node, Num, Sym

MAX_EXACT_BITS: Final = 20_000
MAX_MAGNITUDE: Final = 100_000
"""Larger values, as binary exponents, are not computed."""
MAX_FACTORIAL: Final = 2000
MAX_GAMMA: Final = 100
MAX_ROOT: Final = 64
LOG_2: Final = math.log10(2)


class Undefined(ArithmeticError):
    """A scalar has no value, or one that is too large to compute."""


class Evaluator:
    """Computes scalars with `digits` significant digits; `values` has the fraction of each variable.

    `magnitudes` are the smallest and the largest binary exponent of all values computed so far.
    """

    def __init__(self, digits: int, values: Mapping[str, Fraction]) -> None:
        self.mp = _context(digits)
        self._values = values
        self.magnitudes = (0, 0)

    def value(self, node: Node) -> Any:
        """Return the value of a scalar: a `Fraction`, or a real or complex number of mpmath.

        Raises:
            Undefined: there is none.
        """
        match node:
            case Num(number):
                value: Any = number
            case Sym("π"):
                value = +self.mp.pi
            case Sym("e"):
                value = +self.mp.e
            case Sym("i"):
                value = self.mp.mpc(0, 1)
            case Sym(name) if name in self._values:
                value = self._values[name]
            case Call("pow", (Sym("e"), exponent)):
                value = self._exp(self.value(exponent))
            case Call(name, arguments) if name in OPERATIONS:
                value = self._call(name, [self.value(argument) for argument in arguments])
            case _:
                raise Undefined("no scalar")
        return self._tracked(value)

    def number(self, value: Any) -> Any:
        """Return a value as a number of mpmath."""
        return self.mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else value

    def _call(self, name: str, arguments: list[Any]) -> Any:
        try:
            return OPERATIONS[name](self, *arguments)
        except (ArithmeticError, ValueError, TypeError) as error:
            raise Undefined(name) from error

    def _tracked(self, value: Any) -> Any:
        """Return a value after noting its magnitude."""
        magnitude = self.magnitude(value)
        if magnitude is not None:
            if abs(magnitude) > MAX_MAGNITUDE:
                raise Undefined("too large")
            low, high = self.magnitudes
            self.magnitudes = min(low, magnitude), max(high, magnitude)
        return value

    def magnitude(self, value: Any) -> int | None:
        """Return the binary exponent of a value, None for 0.

        Raises:
            Undefined: the value is infinite or not a number.
        """
        if isinstance(value, Fraction):
            return value.numerator.bit_length() - value.denominator.bit_length() if value else None
        if not self.mp.isfinite(value):
            raise Undefined("not finite")
        return int(self.mp.mag(value)) if value else None

    def _exp(self, exponent: Any) -> Any:
        if exponent == 0:
            return Fraction(1)
        if (self.magnitude(exponent) or 0) > MAX_MAGNITUDE.bit_length():
            raise Undefined("too large")
        return self.mp.exp(self.number(exponent))

    def power(self, base: Any, exponent: Any) -> Any:
        """Return a power, exact if base and exponent allow it; odd roots of negative numbers are real."""
        if isinstance(base, Fraction) and isinstance(exponent, Fraction):
            if exponent.denominator == 1:
                return self._integer_power(base, exponent.numerator)
            return self._rational_power(base, exponent)
        if isinstance(exponent, Fraction) and base == 0 and exponent > 0:
            return Fraction(0)
        if isinstance(exponent, Fraction) and exponent.denominator % 2 and not base.imag and base.real < 0:
            return (-1) ** (exponent.numerator % 2) * self._real_power(-base.real, exponent)
        return self._real_power(base, exponent)

    def _integer_power(self, base: Fraction, exponent: int) -> Any:
        if base in (0, 1, -1):
            return base ** (exponent if exponent <= 0 else 2 - exponent % 2)
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) <= MAX_EXACT_BITS:
            return base**exponent
        return self._real_power(base, Fraction(exponent))

    def _rational_power(self, base: Fraction, exponent: Fraction) -> Any:
        index = exponent.denominator
        if base < 0 and index % 2:
            sign = -1 if exponent.numerator % 2 else 1
            return sign * self._rational_power(-base, exponent)
        if base > 0 and index <= MAX_ROOT:
            roots = [_exact_root(part, index) for part in (base.numerator, base.denominator)]
            if None not in roots:
                return self._integer_power(Fraction(*roots), exponent.numerator)  # type: ignore[arg-type]
        return self._real_power(base, exponent)

    def _real_power(self, base: Any, exponent: Any) -> Any:
        if base == 0:
            raise Undefined("a power of 0")
        # the binary exponent of the result is at most this
        estimate = (abs(self.magnitude(base) or 0) + 1) * abs(self.mp.mpf(self.number(abs(exponent))))
        if estimate > MAX_MAGNITUDE:
            raise Undefined("too large")
        return self.mp.power(self.number(base), self.number(exponent))

    def function(self, name: str, x: Any) -> Any:
        """Return the value of an elementary function of mpmath."""
        if (self.magnitude(x) or 0) > MAX_MAGNITUDE.bit_length() * 4:
            raise Undefined("too large an argument")
        return getattr(self.mp, name)(self.number(x))

    def logarithm(self, x: Any, base: Any = Fraction(10)) -> Any:
        if x == 0 or base in (0, 1):
            raise Undefined("a logarithm")
        return self.mp.log(self.number(x)) / self.mp.log(self.number(base))

    def root(self, x: Any, index: Any = Fraction(2)) -> Any:
        if not isinstance(index, Fraction) or index == 0:
            raise Undefined("the index of a root")
        return self.power(x, 1 / index) if x != 0 else Fraction(0)


@cache
def _context(digits: int) -> Any:
    from mpmath import MPContext

    context = MPContext()
    context.dps = digits
    return context


def _exact_root(number: int, index: int) -> int | None:
    """Return the integer root of a positive integer, None if there is none."""
    if number == 1:
        return 1
    root = 1 << -(-number.bit_length() // index)
    while True:
        smaller = ((index - 1) * root + number // root ** (index - 1)) // index
        if smaller >= root:
            return root if root**index == number else None
        root = smaller


def _divide(evaluator: Evaluator, a: Any, b: Any) -> Any:
    if b == 0:
        raise Undefined("division by 0")
    return a / b if isinstance(a, Fraction) and isinstance(b, Fraction) else evaluator.number(a) / evaluator.number(b)


def _exactly(operation: Callable[[Any, Any], Any]) -> Callable[[Evaluator, Any, Any], Any]:
    """Return an operation of two values that is exact for two fractions."""

    def apply(evaluator: Evaluator, a: Any, b: Any) -> Any:
        if isinstance(a, Fraction) and isinstance(b, Fraction):
            result = operation(a, b)
            if max(result.numerator.bit_length(), result.denominator.bit_length()) > 2 * MAX_EXACT_BITS:
                raise Undefined("too long")
            return result
        return operation(evaluator.number(a), evaluator.number(b))

    return apply


def _natural(value: Any, limit: int = MAX_FACTORIAL) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= limit:
        raise Undefined("no natural number in range")
    return value.numerator


def _factorial(evaluator: Evaluator, x: Any) -> Any:
    """Return x!, for fractions that stand for a variable Γ(x + 1)."""
    if isinstance(x, Fraction) and x.denominator != 1 and abs(x) < MAX_GAMMA:
        return evaluator.mp.factorial(evaluator.number(x))
    return Fraction(math.factorial(_natural(x)))


def _binomial(evaluator: Evaluator, n: Any, k: Any) -> Any:
    """Return a binomial coefficient; `n` and `k` may be fractions that stand for variables."""
    if any(isinstance(x, Fraction) and x.denominator != 1 and abs(x) < MAX_GAMMA for x in (n, k)):
        return evaluator.mp.binomial(evaluator.number(n), evaluator.number(k))
    return Fraction(math.comb(_natural(n), _natural(k)))


def _rounded(rounding: Callable[[Fraction], int]) -> Callable[[Evaluator, Any], Any]:
    def apply(evaluator: Evaluator, x: Any) -> Any:
        if isinstance(x, Fraction):
            return Fraction(rounding(x))
        name = "floor" if rounding is math.floor else "ceil"
        return Fraction(int(getattr(evaluator.mp, name)(x)))

    return apply


def _elementary(name: str) -> Callable[[Evaluator, Any], Any]:
    return lambda evaluator, x: evaluator.function(name, x)


def _integers(operation: Callable[..., int]) -> Callable[..., Any]:
    return lambda evaluator, *values: Fraction(operation(*(_natural(value, 10**300) for value in values)))


ELEMENTARY: Final = {
    **{name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh")},
    "arcsin": "asin",
    "arccos": "acos",
    "arctan": "atan",
    "arccot": "acot",
}
OPERATIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "add": _exactly(lambda a, b: a + b),
    "mul": _exactly(lambda a, b: a * b),
    "div": _divide,
    "neg": lambda evaluator, x: -x,
    "pow": Evaluator.power,
    "sqrt": Evaluator.root,
    "cbrt": lambda evaluator, x: evaluator.root(x, Fraction(3)),
    "exp": Evaluator._exp,
    "ln": lambda evaluator, x: evaluator.logarithm(x, evaluator.mp.e),
    "log": Evaluator.logarithm,
    "abs": lambda evaluator, x: abs(x),
    "floor": _rounded(math.floor),
    "ceil": _rounded(math.ceil),
    "factorial": _factorial,
    "binom": _binomial,
    "degree": lambda evaluator, x: evaluator.number(x) * evaluator.mp.pi / 180,
    "gcd": _integers(math.gcd),
    "lcm": _integers(math.lcm),
    "max": lambda evaluator, *values: max(values, key=evaluator.number),
    "min": lambda evaluator, *values: min(values, key=evaluator.number),
    **{name: _elementary(function) for name, function in ELEMENTARY.items()},
}
