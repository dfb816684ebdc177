"""If these fail, equal answers are scored as wrong, or different ones as right."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.rewards.math_answers.comparison import compare, is_parsed, parsed_value
from quintet.rewards.verifiers import gsm8k, math, math_rule, numeric, text_match
from quintet.rewards.verifiers.options import MathRuleOptions

EQUAL = [
    (r"\{x\mid x>1\}", r"(1,\infty)"),
    (r"\{x : 1<x<2\}", "(1,2)"),
    ("all real numbers", r"\mathbb{R}"),
    ("{1, 2, 3}", r"\{3,2,1\}"),
    (r"\binom{n}{2}", r"\frac{n(n-1)}{2}"),
    ("n!", r"n\cdot(n-1)!"),
    (r"\frac{12!}{5!7!}", "792"),
    (r"2x+1\ ", "1+2x"),
    (r"0.\overline{36}", r"\frac{4}{11}"),
    (r"33\frac13\%", r"\frac13"),
    (r"\tan^{-1}(1)", r"\frac{\pi}{4}"),
    ("(x,y)=(2,3)", "(2,3)"),
    ("√2", r"\sqrt{2}"),
    ("x²+1", "x^2+1"),
    ("1 1/2", "3/2"),
    (r"\frac12", "0.5"),
    (r"2\sqrt3", r"\sqrt{12}"),
    (r"\sqrt{2}/2", r"\frac{1}{\sqrt2}"),
    ("pi/2", r"\frac{\pi}{2}"),
    ("14-1i", "14-i"),
    ("101_2", "5"),
    (r"50\%", "50"),
    (r"50\%", "0.5"),
    (r"\{1,2\}", "2,1"),
    (r"\{1,1,2\}", r"\{2,1\}"),
    ("(1,2)", "1,2"),
    ("x=1 or x=2", "1,2"),
    (r"x\in\{1,2\}", r"\{2,1\}"),
    ("1<x<2", "(1,2)"),
    ("x>2", r"(2,\infty)"),
    (r"2<x", r"x>2"),
    (r"(1,2)\cup[2,3)", "(1,3)"),
    (r"\mathbb{R}\setminus\{1\}", r"(-\infty,1)\cup(1,\infty)"),
    (r"\pm3", "3,-3"),
    (r"x=\pm3", "x=3, x=-3"),
    (r"2\pm\sqrt3", r"2-\sqrt3,2+\sqrt3"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"\sin 30^\circ", r"\frac12"),
    (r"\log_2 8", "3"),
    (r"90^\circ", r"\frac{\pi}{2}"),
    (r"30^\circ", "30"),
    ("y=2x+1", "2x-y+1=0"),
    ("5!", "120"),
    (r"\binom52", "10"),
    (r"e^{i\pi}", "-1"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1.0\\2\end{pmatrix}"),
    ("1,2,3,...", r"1, 2, 3, \dots"),
    ("East", r"\text{east}"),
    ("(A)", r"\text{A}"),
    (r"5\text{ cm}", "5 cm"),
    ("18 dollars", "18"),
    (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2"),
    (r"\sqrt[3]{2+\sqrt5}+\sqrt[3]{2-\sqrt5}", "1"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"\sin^2x+\cos^2x", "1"),
    (r"3.14159265", r"\pi"),
    ("x<1 or x>2", r"(-\infty,1)\cup(2,\infty)"),
    (r"\ln 8", r"3\ln2"),
    ("f(x)=x^2", "x^2"),
    (r"\frac{\sqrt{6}-\sqrt2}{4}", r"\sin 15^\circ"),
    ("2^{100}", "1267650600228229401496703205376"),
    (r"\frac{-1}{2}", "-0.5"),
    (r"(-8)^{1/3}", "-2"),
    (r"\infty", r"+\infty"),
    ("$x=5$", "5"),
    ("2a+3b", "3b+2a"),
    (r"\frac{2}{3}x", "2x/3"),
    ("5 m", r"5\text{ m}"),
    ("5 m/s", r"5\text{ m/s}"),
    ("1,000", "1000"),
    (r"\$1,000", "1000"),
    ("x+y=1 ", "1=y+x"),
    (r"e^{2\ln 3}", "9"),
    (r"-\infty<x\le2", r"(-\infty,2]"),
    (r"|x|", r"\sqrt{x^2}"),
]
DIFFERENT = [
    ("{0,1}", "(0,1)"),
    (r"\{1,\ldots\}", r"(1,\ldots)"),
    ("2024-01-05", "2018"),
    (r"1,2,\ldots", r"[1,2,\ldots]"),
    ("x^2=4", "4"),
    (r"\{10^{-20}\}", r"\{0\}"),
    (r"[10^{-20},1]", "[0,1]"),
    (r"10^{-20}x", "-10^{-20}x"),
    (r"\sqrt{1+10^{-20}}", "1"),
    ("FF_{16}", "FF_{17}"),
    (r"1,2,\ldots,10", r"1,2,\ldots,11"),
    (r"\log_2 3", r"\log_3 2"),
    ("5 hours", "5 minutes"),
    ("-11a", "-11"),
    ("11/2", "1 1/2"),
    ("1.6\\times10^{-19}", "-1.6\\times10^{-19}"),
    (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"),
    ("0.0000014", r"4\pi\times10^{-7}"),
    ("101_3", "101_2"),
    ("3.14", r"\pi"),
    ("3.1416", r"\pi"),
    ("1.414", r"\sqrt2"),
    ("3.141592", r"\pi"),
    ("0.333333", "1/3"),
    (r"1,2,3,\ldots", r"1,2,4,\ldots"),
    (r"1,2,\ldots", r"1,2,3,\ldots"),
    ("(2,1)", "(1,2)"),
    ("[1,2]", "(1,2)"),
    ("[1,2)", "(1,2]"),
    (r"\{1,2\}", "(1,2)"),
    ("1,2", "1"),
    ("1,1,2", "1,2,2"),
    ("y=5", "x=5"),
    ("2x=10", "x=5"),
    (r"\sqrt{10^{50}+1}", "10^{25}"),
    (r"\pi\cdot10^{-300}", r"\pi\cdot10^{-301}"),
    (r"\sqrt2+10^{-300}", r"\sqrt2"),
    ("x+1", "x-1"),
    ("x", "y"),
    ("5 cm", "5 m"),
    ("50%", "0.5%"),
    ("50", "0.5"),
    ("9^{9^{9^9}}", "7"),
    ("100000000!", "7"),
    ("x>2", "x<2"),
    ("x>2", r"x\ge2"),
    ("x>2", r"y>2"),
    ("5 cm^2", "5 cm"),
    ("no", "on"),
    ("yes", "no"),
    ("East", "west"),
    (r"\sqrt{x^2}", "x"),
    (r"\frac10", "0"),
    ("42 or 43", "42"),
    ("x=1,y=2", "2,1"),
    ("2516", "2516_8"),
    ("5x", "5"),
    ("5m", "5"),
    (r"\infty", "1"),
    ("1+i", "1-i"),
    ("-x^2", "(-x)^2"),
    ("2^{-1}", "2"),
    (r"\emptyset", "0"),
    ("(1,2,3)", "(1,2)"),
    (r"\pi", r"\frac{22}{7}"),
    ("1.0000001", "1"),
    (r"10^{10^{10}}", "10"),
]
HOSTILE = [
    r"9^{9^{9^{9}}}",
    r"100000000!",
    r"\binom{1000000000}{500000000}",
    "1+" * 499 + "1",
    "(" * 400 + "1" + ")" * 400,
    "x" + "!" * 900,
    "-" * 900 + "1",
    "2^" * 400 + "2",
    "x^{1000}" * 100,
    r"\sqrt{" * 150 + "2" + "}" * 150,
    "9" * 990 + "^9",
    "1.1^{10000000}",
    r"\sin(10^{1000})",
    r"\pi^{\pi^{\pi^\pi}}",
    "1," * 499 + "1",
    r"\cup".join(["(1,2)"] * 80),
    "\\{" * 300,
    "|" * 300,
    "1e999999999",
    r"10^{400}\approx 10^{400}",
    "{" * 480 + "," + "}" * 480,
    "9" * 5000,
]


@pytest.mark.parametrize(("answer", "truth"), EQUAL)
def test_equal_answers_are_equal_in_both_directions(answer: str, truth: str) -> None:
    assert compare(answer, truth) is True
    assert compare(truth, answer) is True
    assert math.verify_boxed(f"\\boxed{{{answer}}}", truth, {}).score == 1.0


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_different_answers_are_different_in_both_directions(answer: str, truth: str) -> None:
    assert compare(answer, truth) is False
    assert compare(truth, answer) is False
    assert math.verify_boxed(f"\\boxed{{{answer}}}", truth, {}).score == 0.0


@pytest.mark.parametrize("answer", HOSTILE)
def test_hostile_answers_are_decided_in_no_time(answer: str) -> None:
    started = time.process_time()
    for truth in ("7", "x+1", "(1,2)"):
        assert not compare(answer, truth)
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"1.6\times10^{-19}", r"-1.6\times10^{-19}"),
        (r"\frac{1}{2^{98}}", r"\frac{1}{2^{99}}"),
        ("3.141593", r"\pi+10^{-7}"),
    ],
)
def test_rolls_verifier_has_no_absolute_tolerance_either(answer: str, truth: str) -> None:
    for accepted, score in ((truth, 0.0), (answer, 1.0)):
        assert math_rule.verify(f"a</think>\\boxed{{{answer}}}", accepted, {}, MathRuleOptions()).score == score


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        (r"\sum_{k=1}^{3} k", "6", 1.0),
        (r"\sum_{k=1}^{3} 10^{-20}k", r"\sum_{k=1}^{3} 10^{-21}k", 0.0),
        (r"\int_0^1 2x dx", "1", 1.0),
        (r"x^2+\sum_{k=1}^{2} k=4", "4", 0.0),
        (r"\sum_{k=1}^{3} k\text{ cm}", r"6\text{ cm}", 1.0),
        (r"\sum_{k=1}^{3} k\text{ cm}", r"6\text{ m}", 0.0),
    ],
)
def test_math_verify_decides_what_is_outside_of_the_grammar_without_its_tolerance(answer, truth, score) -> None:
    assert not is_parsed(answer)
    assert math.verify_boxed(f"\\boxed{{{answer}}}", truth, {}).score == score


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        (r"so $\boxed 42$.", "42", 1.0),
        (r"so $\boxed\frac12$", "0.5", 1.0),
        ("The answer is 1 1/2.", "3/2", 1.0),
        ("The answer is 1 1/2.", "11/2", 0.0),
        ("So we get $x = 5$.", "5", 1.0),
        ("The answer is 57 (3 significant figures).", "57", 1.0),
        ("The answer is 57 to the nearest integer.", "57", 1.0),
        ("It costs 57 dollars.", "57", 1.0),
        (r"It is \boxed{57", "57", 0.0),
        ("It is -1.6e-19.", r"1.6\times10^{-19}", 0.0),
    ],
)
def test_answers_without_braces_are_compared_in_the_same_way(text: str, truth: str, score: float) -> None:
    assert math.verify_anywhere(text, truth, {}).score == score


def test_equal_values_are_one_class_of_majority_votes() -> None:
    for texts in (("1024", "2^{10}", "1,024", "x = 1024"), ("1.5", "1 1/2", r"\frac{3}{2}", r"1\frac12")):
        assert len({math.verify_boxed(f"\\boxed{{{text}}}", "1", {}).extracted_answer for text in texts}) == 1
    assert len({math.verify_boxed(f"\\boxed{{{text}}}", "1", {}).extracted_answer for text in ("11/2", "1 1/2")}) == 2


def test_votes_of_other_verifiers_are_by_value_too() -> None:
    for text in ("0.5", "1/2", ".50"):
        rolls = math_rule.verify(f"a</think>\\boxed{{{text}}}", "0.5", {}, MathRuleOptions())
        others = (text_match.verify_visual(f"<answer>{text}</answer>", "0.5", {}), numeric.verify(text, "0.5", {}))
        flexible = gsm8k.verify_flexible(f"so {text}", "0.5", {})
        assert {score.extracted_answer for score in (rolls, flexible, *others)} == {"1/2"}


RATIONALS = st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=10**4)


@given(RATIONALS, RATIONALS)
def test_rational_answers_agree_exactly_if_their_values_do(x: Fraction, y: Fraction) -> None:
    for a, b in ((x, y), (x, x), (x, x + Fraction(1, 10**30))):
        latex = f"\\frac{{{b.numerator}}}{{{b.denominator}}}"
        assert compare(str(a), latex) is (a == b)
        assert compare(f"{a.numerator * 7}/({a.denominator}*7)", latex) is (a == b)


@given(st.lists(RATIONALS, min_size=1, max_size=4, unique=True), st.randoms(use_true_random=False))
def test_sets_ignore_order_and_tuples_do_not(values: list[Fraction], draw) -> None:
    shuffled = draw.sample(values, len(values))
    a, b = (",".join(map(str, items)) for items in (values, shuffled))
    assert compare(f"\\{{{a}\\}}", f"\\{{{b}\\}}") is True
    if len(values) > 1:
        assert compare(f"({a})", f"({b})") is (values == shuffled)
        assert compare(f"\\{{{a}\\}}", f"\\{{{','.join(map(str, values[1:]))}\\}}") is False


@given(st.integers(2, 60), st.integers(1, 60), st.integers(-60, 60), st.integers(-300, 300))
def test_irrational_answers_agree_at_any_size(radicand: int, factor: int, addend: int, exponent: int) -> None:
    a = f"10^{{{exponent}}}({addend}+{factor}\\sqrt{{{radicand}}})"
    assert compare(a, f"(\\sqrt{{{radicand * factor**2}}}+{addend})*10^{{{exponent}}}") is True
    assert compare(a, f"10^{{{exponent}}}({addend}+{factor}\\sqrt{{{radicand + 1}}})") is False
    value = parsed_value(a)
    assert value is None or round(radicand**0.5) ** 2 == radicand


@given(st.text(alphabet=r"0123456789.,-+*/ ()[]{}\^_%$=<>|!abxeiπ∪sqrtfracpi", max_size=40))
def test_no_answer_raises(text: str) -> None:
    compare(text, "1")
    compare("x", text)
    assert compare(text, text) is not False or not is_parsed(text)


@pytest.mark.parametrize("opening", [r"\{1,", "f(", r"\sqrt{"])
def test_nesting_that_keeps_math_verify_busy_is_wrong_at_once(opening: str) -> None:
    assert compare(opening * 70 + "2", r"\{1,2\}") is False
