"""Pairs of answers of which it is known whether they are equal, for `benchmarks/verifier_agreement.py`.

Each category draws a value and writes it in forms that models and data sets use: as in MATH and its solutions, in
plain text, and as calculators print it. An equal pair is the same value in two forms. An unequal pair is a value and a
near miss of it: another sign, a neighbour, the reciprocal, an open end for a closed one, a missing element, another
base. Equality is a property of the values that were drawn, never the verdict of a verifier. By convention, `50\\%` is
50 and 0.5, and an answer with a unit equals the number without it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True, slots=True)
class Pair:
    """An answer, a ground truth, and whether they are equal."""

    category: str
    answer: str
    truth: str
    equal: bool


Drawn = tuple[list[str], list[str]]
"""Forms of a value, the first of which are ground truths, and near misses."""
Category = Callable[[random.Random], Drawn]
CATEGORIES: dict[str, Category] = {}


def category(function: Category) -> Category:
    CATEGORIES[function.__name__] = function
    return function


def pairs(count: int, seed: int) -> Iterator[Pair]:
    """Yield `count` pairs, about as many of each category, half of them equal."""
    draw = random.Random(seed)
    names = list(CATEGORIES)
    for number in range(count):
        name = names[number % len(names)]
        forms, misses = CATEGORIES[name](draw)
        truth = draw.choice(forms[:2])
        equal = number // len(names) % 2 == 0
        answer = draw.choice([form for form in forms if form != truth] if equal else misses)
        yield Pair(name, decorated(answer, draw), truth, equal)


def decorated(answer: str, draw: random.Random) -> str:
    """Return an answer with what people put around answers, one in four times."""
    if draw.random() > 0.25 or "$" in answer or "**" in answer or answer.endswith("."):
        return answer
    forms = [
        "${}$",
        "{}.",
        "\\displaystyle {}",
        "{}\\ ",
        "\\; {}",
        " {} ",
        "\\({}\\)",
        "{{{}}}",
        "$$ {} $$",
        "$ {} $",
        "**{}**",
        "{{ {} }}",
    ]
    return draw.choice(forms).format(answer)


def signed(value: int | str, negative: bool) -> str:
    return f"-{value}" if negative else str(value)


def latex(value: Fraction, command: str = "frac") -> str:
    if value.denominator == 1:
        return str(value)
    return f"{'-' if value < 0 else ''}\\{command}{{{abs(value.numerator)}}}{{{value.denominator}}}"


def proper(draw: random.Random, most: int = 60) -> Fraction:
    """Return a positive fraction that is no integer."""
    below = draw.randint(2, most)
    above = draw.choice([n for n in range(1, 3 * most) if math.gcd(n, below) == 1])
    return Fraction(above, below)


def squarefree(draw: random.Random) -> int:
    return draw.choice([2, 3, 5, 6, 7, 10, 11, 13, 14, 15, 17, 19, 21, 22, 23])


@category
def integers(draw: random.Random) -> Drawn:
    n, negative = (
        draw.choice([draw.randint(1, 99), draw.randint(100, 9999), draw.randint(10**4, 10**9)]),
        draw.random() < 0.3,
    )
    grouped = f"{n:,}"
    bodies = [str(n), grouped, grouped.replace(",", "{,}"), grouped.replace(",", "\\,"), f"{n}.0", f"{n}.", f"${n}$"]
    forms = [signed(body, negative) for body in bodies[:-1]] + [f"${signed(n, negative)}$"]
    wrong = {n + 1, n * 10, n + 10, int(str(n)[::-1]) if int(str(n)[::-1]) != n else n + 2}
    return forms, [signed(other, negative) for other in wrong] + [signed(n, not negative)]


@category
def decimals(draw: random.Random) -> Drawn:
    places = draw.randint(1, 5)
    units = draw.randint(1, 10**6)
    while units % 10 == 0:
        units += 1
    value, negative = Fraction(units, 10**places), draw.random() < 0.3
    text = f"{units // 10**places}.{units % 10**places:0{places}d}"
    forms = [text, f"{text}0", latex(value), f"{value.numerator}/{value.denominator}", f"{text}00"]
    if text.startswith("0."):
        forms.append(text[1:])
    near = [f"{(units + d) // 10**places}.{(units + d) % 10**places:0{places}d}" for d in (1, 9)]
    return [signed(form, negative) for form in forms], [
        *(signed(form, negative) for form in near),
        signed(text, not negative),
    ]


@category
def fractions(draw: random.Random) -> Drawn:
    value, negative = proper(draw), draw.random() < 0.3
    k = draw.randint(2, 5)
    a, b = value.numerator, value.denominator
    bodies = [f"\\frac{{{a}}}{{{b}}}", f"{a}/{b}", f"\\dfrac{{{a}}}{{{b}}}", f"\\tfrac{{{a}}}{{{b}}}"]
    bodies.append(f"\\frac{{{a * k}}}{{{b * k}}}")
    forms = [signed(body, negative) for body in bodies]
    forms += [f"\\frac{{-{a}}}{{{b}}}"] if negative else [f"\\left(\\frac{{{a}}}{{{b}}}\\right)"]
    wrong = {value + Fraction(1, b), Fraction(a, b + 1), Fraction(b, a)} - {value}
    misses = [signed(latex(other), negative) for other in wrong] + [signed(bodies[1], not negative)]
    return forms, misses


@category
def mixed_numbers(draw: random.Random) -> Drawn:
    below = draw.randint(2, 12)
    part = Fraction(draw.choice([n for n in range(1, below) if math.gcd(n, below) == 1]), below)
    whole, negative = draw.randint(1, 20), draw.random() < 0.25
    value = whole + part
    a, b = part.numerator, part.denominator
    forms = [
        latex(value),
        f"{whole}\\frac{{{a}}}{{{b}}}",
        f"{whole} {a}/{b}",
        f"{whole} \\frac{{{a}}}{{{b}}}",
        str(value),
    ]
    wrong = [Fraction(int(f"{whole}{a}"), b), value + 1, whole * part]
    misses = [signed(str(other), negative) for other in wrong if other != value]
    return [signed(form, negative) for form in forms], [*misses, signed(forms[1], not negative)]


@category
def scientific(draw: random.Random) -> Drawn:
    mantissa, exponent = f"{draw.randint(1, 9)}.{draw.randint(1, 9)}", draw.choice([-34, -19, -12, -7, -4, 3, 6, 8, 23])
    negative = draw.random() < 0.3

    def written(m: str, e: int) -> list[str]:
        return [
            f"{m} \\times 10^{{{e}}}",
            f"{m}e{e}",
            f"{m}\\cdot10^{{{e}}}",
            f"{m}*10^{e}" if e > 0 else f"{m}*10^({e})",
        ]

    plain = [f"{m}" for m in [format_plain(mantissa, exponent)]]
    forms = [signed(body, negative) for body in written(mantissa, exponent) + plain]
    near = written(mantissa, exponent + 1)[:2] + written(mantissa, exponent - 1)[:2] + written(mantissa, -exponent)[:1]
    return forms, [*(signed(body, negative) for body in near), signed(written(mantissa, exponent)[0], not negative)]


def format_plain(mantissa: str, exponent: int) -> str:
    """Return `1.6`, -3 as `0.0016`."""
    digits = mantissa.replace(".", "")
    if exponent >= 1:
        return digits + "0" * (exponent - 1)
    return "0." + "0" * (-exponent - 1) + digits if exponent < 0 else mantissa


@category
def percentages(draw: random.Random) -> Drawn:
    n = draw.choice([str(draw.randint(1, 99)), f"{draw.randint(1, 99)}.{draw.randint(1, 9)}"])
    forms = [f"{n}\\%", n, f"{n}%", f"{n} percent", f"${n}\\%$"]
    other = str(Fraction(n) + 1) if "." not in n else f"{n}1"
    return forms, [f"{other}\\%", f"{other}%", f"-{n}\\%", other]


@category
def shares(draw: random.Random) -> Drawn:
    n = draw.randint(1, 99)
    value = Fraction(n, 100)
    forms = [f"{n}\\%", f"{n}%", f"0.{n:02d}", latex(value)]
    # only percentages are ambiguous: truths have a percent sign
    return forms, [f"0.{n % 99 + 1:02d}", latex(value + 1), f"0.0{n:02d}", f"-0.{n:02d}"]


@category
def money(draw: random.Random) -> Drawn:
    n = draw.randint(2, 5000)
    forms = [str(n), f"\\${n}", f"{n} dollars", f"\\${n:,}", f"\\${n}.00", f"{n}\\text{{ dollars}}", f"${n}"]
    return forms, [f"\\${n + 1}", f"{n * 10} dollars", f"-{n}", f"\\${n}.50"]


@category
def units(draw: random.Random) -> Drawn:
    n = draw.choice([str(draw.randint(1, 500)), f"{draw.randint(1, 99)}.{draw.randint(1, 9)}"])
    unit, word = draw.choice([("cm", "centimeters"), ("km", "kilometers"), ("kg", "kilograms"), ("mm", "millimeters")])
    other = draw.choice([each for each in ("cm", "km", "kg", "mm") if each != unit])
    forms = [
        f"{n}\\text{{ {unit}}}",
        f"{n} \\text{{ {unit}}}",
        f"{n} {unit}",
        f"{n}\\,\\mathrm{{{unit}}}",
        f"{n} {word}",
        n,
    ]
    return forms, [f"{n}\\text{{ {other}}}", f"{n}1\\text{{ {unit}}}", f"{n}1 {unit}", f"-{n}\\text{{ {unit}}}"]


@category
def areas(draw: random.Random) -> Drawn:
    n, unit = draw.randint(1, 500), draw.choice(["cm", "m", "km"])
    forms = [f"{n}\\text{{ {unit}}}^2", f"{n} \\text{{ {unit}}}^2", f"{n}\\mathrm{{\\,{unit}}}^2", f"{n}"][:4]
    forms = [forms[0], forms[1], f"{n} \\mathrm{{{unit}}}^2", str(n)]
    return forms, [f"{n + 1}\\text{{ {unit}}}^2", f"{n}\\text{{ {unit}}}^3", f"{n}\\text{{ {unit}}}", str(n * 10)]


@category
def degrees(draw: random.Random) -> Drawn:
    n = draw.randint(1, 359)
    forms = [f"{n}^\\circ", str(n), f"{n}^{{\\circ}}", f"{n}°", f"{n} degrees", f"{n}\\text{{ degrees}}"]
    return forms, [f"{n + 1}^\\circ", f"-{n}^\\circ", str(n + 10)]


@category
def powers(draw: random.Random) -> Drawn:
    base, exponent = draw.choice([2, 3, 5, 7, 10]), draw.randint(2, 24)
    value = base**exponent
    forms = [
        str(value),
        f"{base}^{{{exponent}}}",
        f"{base}^{exponent}" if exponent < 10 else f"{value:,}",
        f"{base}**{exponent}",
    ]
    return forms, [
        f"{base}^{{{exponent + 1}}}",
        f"{exponent}^{{{base}}}" if value != exponent**base else "1",
        f"-{value}",
        f"{value + 1}",
    ]


@category
def small_powers(draw: random.Random) -> Drawn:
    base, exponent = draw.choice([2, 3, 5, 10]), draw.randint(5, 120)
    sign = draw.choice(["", "-"])
    forms = [
        f"{sign}\\frac{{1}}{{{base}^{{{exponent}}}}}",
        f"{sign}{base}^{{-{exponent}}}",
        f"{sign}1/{base}^{{{exponent}}}",
    ]
    other = "" if sign else "-"
    misses = [
        f"{sign}\\frac{{1}}{{{base}^{{{exponent + 1}}}}}",
        f"{sign}{base}^{{-{exponent - 1}}}",
        f"{other}{base}^{{-{exponent}}}",
        "0",
    ]
    return forms, misses


@category
def roots(draw: random.Random) -> Drawn:
    a, b, sign = draw.randint(2, 30), squarefree(draw), draw.choice(["", "", "-"])
    forms = [
        f"{sign}{a}\\sqrt{{{b}}}",
        f"{sign}\\sqrt{{{a * a * b}}}",
        f"{sign}{a} \\sqrt{{{b}}}",
        f"{sign}{a}*sqrt({b})",
        f"{sign}\\sqrt{{{b}}}\\cdot {a}",
    ]
    other = "" if sign else "-"
    return forms, [
        f"{sign}{a}\\sqrt{{{b + 1}}}",
        f"{sign}{a + 1}\\sqrt{{{b}}}",
        f"{other}{a}\\sqrt{{{b}}}",
        f"{sign}\\sqrt{{{a * b}}}",
    ]


@category
def root_quotients(draw: random.Random) -> Drawn:
    b, c = squarefree(draw), draw.randint(2, 20)
    forms = [
        f"\\frac{{\\sqrt{{{b}}}}}{{{c}}}",
        f"\\frac{{{b}}}{{{c}\\sqrt{{{b}}}}}",
        f"\\sqrt{{{b}}}/{c}",
        f"sqrt({b})/{c}",
        f"\\dfrac{{1}}{{{c}}}\\sqrt{{{b}}}",
    ]
    approximation = f"{math.sqrt(b) / c:.3f}"
    return forms, [
        f"\\frac{{\\sqrt{{{b}}}}}{{{c + 1}}}",
        f"\\frac{{{c}}}{{\\sqrt{{{b}}}}}",
        f"\\frac{{{b}}}{{{c}}}",
        approximation,
    ]


@category
def surds(draw: random.Random) -> Drawn:
    a, b, c = draw.randint(1, 20), draw.randint(2, 9), squarefree(draw)
    forms = [
        f"{a}+{b}\\sqrt{{{c}}}",
        f"{b}\\sqrt{{{c}}}+{a}",
        f"{a} + {b}\\sqrt {{{c}}}",
        f"{a}+\\sqrt{{{b * b * c}}}",
        f"{a}+{b}*sqrt({c})",
    ]
    return forms, [
        f"{a}-{b}\\sqrt{{{c}}}",
        f"{b}+{a}\\sqrt{{{c}}}" if a != b else f"{a}+{b + 1}\\sqrt{{{c}}}",
        f"{a}+{b}\\sqrt{{{c + 1}}}",
        f"{a + b}\\sqrt{{{c}}}",
    ]


@category
def multiples_of_pi(draw: random.Random) -> Drawn:
    value = proper(draw, 12)
    a, b = value.numerator, value.denominator
    forms = [
        f"\\frac{{{a}\\pi}}{{{b}}}",
        f"\\frac{{{a}}}{{{b}}}\\pi",
        f"{a}\\pi/{b}",
        f"{a}*pi/{b}",
        f"{a}pi/{b}",
        f"\\dfrac{{{a} \\pi}}{{{b}}}",
    ]
    misses = [
        f"\\frac{{{a + b}\\pi}}{{{b}}}",
        f"\\frac{{{a}}}{{{b}}}",
        f"-\\frac{{{a}\\pi}}{{{b}}}",
        f"{a / b * math.pi:.2f}",
        f"\\frac{{{b}\\pi}}{{{a}}}",
    ]
    return forms, misses


@category
def constants(draw: random.Random) -> Drawn:
    """Values of functions that are rational."""
    n, base = draw.randint(2, 9), draw.choice([2, 3, 5, 10])
    kind = draw.randrange(4)
    if kind == 0:
        return [
            str(n),
            f"\\log_{{{base}}} {base**n}",
            f"\\log_{base} {{{base**n}}}" if base < 10 else f"\\log_{{{base}}}({base**n})",
        ], [str(n + 1), str(base**n), f"\\log_{{{base + 1}}} {base**n}"]
    if kind == 1:
        return [str(n), f"\\ln e^{{{n}}}", f"\\ln(e^{{{n}}})"], [f"\\ln {n}", f"e^{{{n}}}", str(n + 1)]
    if kind == 2:
        return ["\\frac{1}{2}", "\\sin 30^\\circ", "\\cos\\frac{\\pi}{3}", "\\sin(\\pi/6)", "0.5"], [
            "\\cos 30^\\circ",
            "-\\frac{1}{2}",
            "\\frac{\\sqrt{3}}{2}",
            "\\sin\\frac{\\pi}{3}",
        ]
    return [str(math.factorial(n)), f"{n}!", f"{n} \\cdot {n - 1}!"], [
        f"{n + 1}!",
        str(math.factorial(n) + 1),
        f"{n}",
    ] if n > 2 else ["3!", "3", "1"]


@category
def binomials(draw: random.Random) -> Drawn:
    n = draw.randint(4, 20)
    k = draw.randint(2, n - 2)
    forms = [
        str(math.comb(n, k)),
        f"\\binom{{{n}}}{{{k}}}",
        f"\\binom{{{n}}}{{{n - k}}}",
        f"\\frac{{{n}!}}{{{k}!{n - k}!}}",
    ]
    return forms, [f"\\binom{{{n + 1}}}{{{k}}}", str(math.comb(n, k) + 1), f"\\frac{{{n}!}}{{{n - k}!}}"]


@category
def bases(draw: random.Random) -> Drawn:
    base = draw.randint(2, 9)
    n = draw.randint(base, 600)
    digits, left = "", n
    while left:
        digits, left = str(left % base) + digits, left // base
    forms = [f"{digits}_{base}", f"{digits}_{{{base}}}", f"{digits}_{{{base}}}", str(n)]
    misses = [f"{digits}_{{{base + 1}}}", f"{digits[:-1]}{(int(digits[-1]) + 1) % base}_{{{base}}}", str(n + 1)]
    return forms, misses


@category
def intervals(draw: random.Random) -> Drawn:
    a, b = sorted(draw.sample([*range(-30, 30)], 2))
    left, right = draw.choice("(["), draw.choice(")]")
    low, high = draw.choice(
        [(str(a), str(b)), (f"\\frac{{{2 * a + 1}}}{{2}}".replace("{-", "{-"), f"\\frac{{{2 * b + 1}}}{{2}}")]
    )
    forms = [
        f"{left}{low},{high}{right}",
        f"{left}{low}, {high}{right}",
        f"\\left{left}{low}, {high}\\right{right}",
        f"${left}{low},{high}{right}$",
    ]
    other_left, other_right = "[" if left == "(" else "(", "]" if right == ")" else ")"
    misses = [
        f"{other_left}{low},{high}{right}",
        f"{left}{low},{high}{other_right}",
        f"{left}{high},{low}{right}",
        f"{left}{low},{b + 1}{right}",
    ]
    return forms, misses


@category
def rays(draw: random.Random) -> Drawn:
    a = draw.randint(-30, 30)
    kind = draw.choice(
        [
            (f"({a},\\infty)", "x>{}", "{}<x"),
            (f"[{a},\\infty)", "x\\ge {}", "{} \\leq x"),
            (f"(-\\infty,{a})", "x<{}", "{}>x"),
            (f"(-\\infty,{a}]", "x\\le {}", "{} \\geq x"),
        ]
    )
    forms = [kind[0], kind[1].format(a), kind[2].format(a), kind[0].replace(",", ", ")]
    flipped = (
        kind[0]
        .translate(str.maketrans("[]()", "()[]"))
        .replace("\\infty]", "\\infty)")
        .replace("[-\\infty", "(-\\infty")
    )
    return forms, [
        kind[1].format(a + 1),
        kind[1].format(a).translate(str.maketrans("<>", "><")).replace("\\le ", "\\gt ").replace("\\ge ", "\\lt "),
        flipped,
        str(a),
    ]


@category
def bounded_inequalities(draw: random.Random) -> Drawn:
    a, b = sorted(draw.sample([*range(-30, 30)], 2))
    low, high = draw.choice(["<", "\\le"]), draw.choice(["<", "\\le"])
    left, right = "(" if low == "<" else "[", ")" if high == "<" else "]"
    forms = [
        f"{a} {low} x {high} {b}",
        f"{left}{a},{b}{right}",
        f"{left}{a}, {b}{right}",
        f"x \\in {left}{a}, {b}{right}",
    ]
    strict = {"<": "\\le", "\\le": "<"}
    misses = [
        f"{a} {strict[low]} x {high} {b}",
        f"{a} {low} x {strict[high]} {b}",
        f"{a - 1} {low} x {high} {b}",
        f"x {high} {b}",
    ]
    return forms, misses


@category
def unions(draw: random.Random) -> Drawn:
    a, b, c, d = sorted(draw.sample([*range(-40, 40)], 4))
    first, second = f"{draw.choice('([')}{a},{b}{draw.choice(')]')}", f"{draw.choice('([')}{c},{d}{draw.choice(')]')}"
    forms = [f"{first}\\cup{second}", f"{first} \\cup {second}", f"{second}\\cup {first}", f"{first} ∪ {second}"]
    swapped = second.translate(str.maketrans("[]()", "()[]"))
    return forms, [first, second, f"{first}\\cup{swapped}", f"{first}\\cap{second}", f"({a},{d})"]


@category
def sets(draw: random.Random) -> Drawn:
    values = draw.sample([*range(-20, 40)], draw.randint(2, 5))
    shuffled = draw.sample(values, len(values))
    forms = [
        "\\{" + ",".join(map(str, values)) + "\\}",
        "\\{" + ", ".join(map(str, shuffled)) + "\\}",
        "\\left\\{" + ",".join(map(str, sorted(values))) + "\\right\\}",
        "\\{" + ",".join(map(str, [*values, values[0]])) + "\\}",
    ]
    misses = [
        "\\{" + ",".join(map(str, values[1:])) + "\\}",
        "\\{" + ",".join(map(str, [*values, 99])) + "\\}",
        "\\{" + ",".join(map(str, [*values[1:], values[0] + 60])) + "\\}",
        "(" + ",".join(map(str, values)) + ")",
    ]
    return forms, misses


@category
def points(draw: random.Random) -> Drawn:
    n = draw.choice([2, 2, 3])
    values = [str(draw.randint(-20, 20)) for _ in range(n - 1)] + [latex(proper(draw, 9))]
    forms = [
        f"({','.join(values)})",
        f"({', '.join(values)})",
        f"\\left({','.join(values)}\\right)",
        f"( {' , '.join(values)} )",
    ]
    misses = [
        f"({','.join(reversed(values))})",
        f"({','.join([*values[:-1], '77'])})",
        f"({','.join(values[:-1])},{values[-1]},0)",
        "\\{" + ",".join(values) + "\\}",
    ]
    return forms, misses


@category
def solutions(draw: random.Random) -> Drawn:
    a, b = draw.sample([*range(-30, 30)], 2)
    forms = [
        f"{a},{b}",
        f"{a}, {b}",
        f"{b}, {a}",
        f"{a} and {b}",
        f"x={a}, x={b}",
        f"x = {a} \\text{{ or }} x = {b}",
        f"{a}\\text{{ and }}{b}",
    ]
    return forms, [
        str(a),
        f"{a}, {b + 1}",
        f"{a}, {b}, {b + 1}",
        f"{-a - 1}, {b}" if -a - 1 not in (a, b) else "77, 78",
    ]


@category
def plus_minus(draw: random.Random) -> Drawn:
    a, b = draw.randint(1, 20), squarefree(draw)
    forms = [
        f"{a} \\pm \\sqrt{{{b}}}",
        f"{a}+\\sqrt{{{b}}}, {a}-\\sqrt{{{b}}}",
        f"{a}\\pm\\sqrt{{{b}}}",
        f"x={a}\\pm\\sqrt{{{b}}}",
        f"\\{{{a}-\\sqrt{{{b}}}, {a}+\\sqrt{{{b}}}\\}}",
    ]
    return forms, [f"-{a} \\pm \\sqrt{{{b}}}", f"{a} \\pm \\sqrt{{{b + 1}}}", f"{a}+\\sqrt{{{b}}}", f"{a} \\pm {b}"]


@category
def complex_numbers(draw: random.Random) -> Drawn:
    a, b = draw.randint(-30, 30), draw.randint(1, 30)
    sign, other = draw.choice([("+", "-"), ("-", "+")])
    bi = "i" if b == 1 else f"{b}i"
    lead = "" if sign == "+" else "-"
    end = f"{a:+d}" if a else "+0"
    forms = [f"{a}{sign}{bi}", f"{a} {sign} {bi}", f"{lead}{bi}{end}", f"{a}{sign}{b}i", f"{a}{sign}{b}*i"]
    return forms, [f"{a}{other}{bi}", f"{a + 1}{sign}{bi}", f"{a}{sign}{b + 1}i", f"{a}{sign}{b}"]


@category
def polynomials(draw: random.Random) -> Drawn:
    r, s = draw.sample([*range(1, 12)], 2)
    total, product = r + s, r * s
    forms = [
        f"x^2+{total}x+{product}",
        f"(x+{r})(x+{s})",
        f"{product}+{total}x+x^2",
        f"x^2 + {total}x + {product}",
        f"x**2+{total}*x+{product}",
        f"(x+{s})(x+{r})",
    ]
    return forms, [
        f"x^2+{total}x-{product}",
        f"x^2-{total}x+{product}",
        f"x^2+{total + 1}x+{product}",
        f"(x+{r})(x-{s})",
        f"y^2+{total}y+{product}",
    ]


@category
def linear_expressions(draw: random.Random) -> Drawn:
    a, b = draw.randint(2, 20), draw.randint(1, 30)
    forms = [f"{a}x+{b}", f"{b}+{a}x", f"{a}*x+{b}", f"{a} x + {b}", f"{a}\\cdot x + {b}"]
    return forms, [f"{a}x-{b}", f"{b}x+{a}" if a != b else f"{a}x+{b + 1}", f"{a}y+{b}", f"{a + b}x", f"-{a}x+{b}"]


@category
def rational_expressions(draw: random.Random) -> Drawn:
    a, b = draw.sample([*range(1, 15)], 2)
    forms = [
        f"\\frac{{x+{a}}}{{x+{b}}}",
        f"(x+{a})/(x+{b})",
        f"\\dfrac{{x + {a}}}{{x + {b}}}",
        f"1+\\frac{{{a - b}}}{{x+{b}}}",
        f"\\frac{{2x+{2 * a}}}{{2x+{2 * b}}}",
    ]
    return forms, [
        f"\\frac{{x+{b}}}{{x+{a}}}",
        f"\\frac{{x-{a}}}{{x+{b}}}",
        f"\\frac{{{a}}}{{{b}}}",
        f"\\frac{{x+{a}}}{{x+{b + 1}}}",
    ]


@category
def named_values(draw: random.Random) -> Drawn:
    n, name = draw.randint(-50, 50), draw.choice("xyznkma")
    forms = [str(n), f"{name}={n}", f"{name} = {n}", f"${name} = {n}$"]
    return forms, [f"{name}={n + 1}", f"{name} = {-n - 1}" if n != -n - 1 else "1", f"{name}^2={n}", f"{n or 7}{name}"]


@category
def equations(draw: random.Random) -> Drawn:
    a, b = draw.randint(2, 12), draw.randint(1, 20)
    forms = [f"y={a}x+{b}", f"y = {a}x + {b}", f"y={b}+{a}x", f"{a}x-y+{b}=0", f"y - {a}x = {b}"]
    return forms, [f"y={a}x-{b}", f"y={a + 1}x+{b}", f"x={a}y+{b}", f"y=-{a}x+{b}"]


@category
def matrices(draw: random.Random) -> Drawn:
    a, b, c, d = (draw.randint(-9, 9) for _ in range(4))
    c += c == b

    def written(kind: str, rows: list[list[int]], between: str) -> str:
        return (
            f"\\begin{{{kind}}}"
            + f" \\\\{between}".join(
                between.join(["&"]).join(map(str, row)) if not between else f"{between}&{between}".join(map(str, row))
                for row in rows
            )
            + f"\\end{{{kind}}}"
        )

    rows = [[a, b], [c, d]]
    forms = [
        written("pmatrix", rows, ""),
        written("pmatrix", rows, " "),
        written("bmatrix", rows, " "),
        written("bmatrix", rows, ""),
    ]
    misses = [
        written("pmatrix", [[a, c], [b, d]], ""),
        written("pmatrix", [[a, b], [c, d + 1]], " "),
        written("pmatrix", [[a, b]], ""),
    ]
    return forms, misses


@category
def vectors(draw: random.Random) -> Drawn:
    values = [draw.randint(-20, 20) for _ in range(3)]
    values[2] += values[2] == values[0]
    inside = " \\\\ ".join(map(str, values))
    forms = [
        f"\\begin{{pmatrix}} {inside} \\end{{pmatrix}}",
        f"\\begin{{pmatrix}}{inside.replace(' ', '')}\\end{{pmatrix}}",
        f"\\begin{{bmatrix}} {inside} \\end{{bmatrix}}",
    ]
    swapped = " \\\\ ".join(map(str, values[::-1]))
    return forms, [
        f"\\begin{{pmatrix}} {swapped} \\end{{pmatrix}}",
        f"\\begin{{pmatrix}} {values[0]} \\\\ {values[1]} \\end{{pmatrix}}",
        f"\\begin{{pmatrix}} {inside} \\\\ 0 \\end{{pmatrix}}",
    ]


@category
def words(draw: random.Random) -> Drawn:
    names = [
        "east",
        "west",
        "north",
        "south",
        "even",
        "odd",
        "yes",
        "no",
        "ellipse",
        "circle",
        "parabola",
        "Monday",
        "Friday",
    ]
    name, other = draw.sample(names, 2)
    forms = [f"\\text{{{name}}}", name, f"\\text{{ {name}}}", f"\\mathrm{{{name}}}", name.capitalize()]
    return forms, [f"\\text{{{other}}}", other, f"\\text{{not {name}}}"]


@category
def sequences(draw: random.Random) -> Drawn:
    a, step = draw.randint(1, 20), draw.randint(1, 9)
    terms = [a + step * index for index in range(4)]
    forms = [
        ", ".join(map(str, terms)) + ", \\ldots",
        ",".join(map(str, terms)) + ",\\dots",
        ", ".join(map(str, terms)) + ", \\cdots",
        ", ".join(map(str, terms)) + ", ...",
    ]
    misses = [
        ", ".join(map(str, [*terms[:3], terms[3] + 1])) + ", \\ldots",
        ", ".join(map(str, terms[:3])) + ", \\ldots",
        ", ".join(map(str, terms)),
    ]
    return forms, misses


@category
def magnitudes(draw: random.Random) -> Drawn:
    """Irrational numbers that are very small or very large."""
    a, exponent, sign = draw.randint(2, 9), draw.choice([-30, -19, -12, -9, 9, 12, 30]), draw.choice(["", "-"])
    b = squarefree(draw)
    forms = [
        f"{sign}{a}\\sqrt{{{b}}}\\times10^{{{exponent}}}",
        f"{sign}{a} \\sqrt{{{b}}} \\cdot 10^{{{exponent}}}",
        f"{sign}\\sqrt{{{a * a * b}}}\\times 10^{{{exponent}}}",
    ]
    other = "" if sign else "-"
    return forms, [
        f"{other}{a}\\sqrt{{{b}}}\\times10^{{{exponent}}}",
        f"{sign}{a}\\sqrt{{{b}}}\\times10^{{{exponent - 1}}}",
        f"{sign}{a + 1}\\sqrt{{{b}}}\\times10^{{{exponent}}}",
        "0",
    ]
