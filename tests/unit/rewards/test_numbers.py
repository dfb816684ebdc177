"""If these fail, numbers in answers are read as other numbers, or not at all."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quintet.rewards.number_mentions import find_quantities, read_answer, read_last
from quintet.rewards.numbers import parse_number, parse_quantity, same_number
from quintet.rewards.units import parse_unit
from quintet.rewards.verifiers import gsm8k, numeric, text_match

NUMBERS = {
    **dict.fromkeys(("42", "+42", "042", "42.", "42.0", "**42**", "$42$", r"\(42\)", "{42}", "４２", "= 42"), 42),
    **dict.fromkeys(("-42", "−42", "–42", "- 42", "$-42$"), -42),
    **dict.fromkeys(("1,234,567", "1 234 567", "1_234_567", "1{,}234{,}567", r"1\,234\,567", "1 234 567"), 1234567),
    **dict.fromkeys(
        ("0.5", ".5", "1/2", r"\frac12", r"\dfrac{1}{2}", "½", "50%", r"50\%", "50 percent"), Fraction(1, 2)
    ),
    **dict.fromkeys(("-3/4", "3/-4", r"-\frac{3}{4}", r"\frac{-3}{4}", r"\tfrac{3}{-4}", "-0.75"), Fraction(-3, 4)),
    **dict.fromkeys(("1 1/2", r"1\frac12", r"1 \frac{1}{2}", "1½", "3/2", "1.5"), Fraction(3, 2)),
    "-1 1/2": Fraction(-3, 2),
    **dict.fromkeys(
        ("1.6e-19", "1.6E-19", r"1.6\times10^{-19}", "1.6 × 10^-19", "1.6·10⁻¹⁹", "1.6*10**-19", r"1.6 \cdot 10^{-19}"),
        Fraction(16, 10**20),
    ),
    r"10^{-3}": Fraction(1, 1000),
    r"0.\overline{3}": Fraction(1, 3),
    r"0.1\overline{6}": Fraction(1, 6),
    "0.(142857)": Fraction(1, 7),
    **dict.fromkeys(("$18", r"\$18", "18 dollars", "18 USD", "€18", "18€", "£18.00"), 18),
    **dict.fromkeys(("-$5", "$-5", r"-\$5"), -5),
    **dict.fromkeys(("approximately 3.5", r"\approx 3.5", "~3.5", "about 3.5"), Fraction(7, 2)),
    "5 million": 5_000_000,
    "2 dozen eggs": 24,
    "9" * 1500: int("9" * 1500),
}
UNITS = {
    **dict.fromkeys(("5 cm", r"5\text{ cm}", r"5\mathrm{cm}", r"5 \text{cm}", "5cm", "5 centimetres"), "cm"),
    **dict.fromkeys(("5 cm^2", r"5\text{ cm}^2", "5 cm²", "5 square centimeters", "5 sq cm"), "cm^2"),
    **dict.fromkeys(("5 km/h", "5 km per hour", r"5\text{ km/h}"), "h^-1 km"),
    **dict.fromkeys(("5°", r"5^\circ", r"5^{\circ}", "5 degrees"), "°"),
    "5 apples": "apple",
    "$5 per day": "$",
}
NO_NUMBERS = (
    *(
        "",
        "-",
        "x",
        "--5",
        "8,12",
        "8, 12",
        "12,34,567",
        "1,23",
        "0,123",
        "1,234,56",
        "10-20",
        "2+3",
        "2*3",
        "1/2/3",
        "1:30",
    ),
    *(
        "1.2.3",
        "5x",
        "5!",
        "1/0",
        r"\frac{1}{0}",
        "0.333...",
        r"0.333\ldots",
        "5 or 6",
        "5 sqrt 2",
        r"2\pi",
        "101_2",
        "inf",
    ),
    *("nan", "1 3/2", "1e999999999", "10^10^10", "1e", "٣", r"\sqrt{2}", "five", "9" * 5000, "1e" + "9" * 400),
)
ANSWERS = {
    "approximately 3.5 (rounded to 1 decimal)": Fraction(7, 2),
    "3.5, rounded to 1 decimal place": Fraction(7, 2),
    "3.5 to 2 decimal places": Fraction(7, 2),
    "3.50 (correct to 3 significant figures)": Fraction(7, 2),
    "3.5 rounded to the nearest tenth": Fraction(7, 2),
    "57 (see step 2)": 57,
    "34 + 23 = 57": 57,
    "57 = 34 + 23": 57,
    "x ≈ 57": 57,
    "The total is 57": 57,
    "57, which we found in 3 steps": 57,
    "57 apples in 3 days": 57,
    "57cm": 57,
    "57 cm^2": 57,
    "-57.": -57,
    "the balance is -57": -57,
    "the balance is = - 57": -57,
    **dict.fromkeys(
        ("8,12", "8, 12", "10-20", "10 - 20", "10–20", "2+3", "5 -3", "57 or 58", "between 10 and 20", "5;3")
    ),
    **dict.fromkeys(
        ("x - 5", "3x + 4", "x^2", "f(3)", r"\sqrt{2}", r"\binom{5}{2}", r"2\pi", "3 > 2", "3.5 ± 0.1", "5!")
    ),
    **dict.fromkeys(("2024-01-05", "1/2/2020", "10:30", "covid-19", "H2O", "the 3rd", "100k", "3 apples and 4 pears")),
}


@pytest.mark.parametrize(("text", "value"), NUMBERS.items())
def test_numbers_are_read_exactly(text: str, value: Fraction) -> None:
    assert parse_number(text) == value or parse_quantity(text).value == value


@pytest.mark.parametrize(("text", "unit"), UNITS.items())
def test_spellings_of_a_unit_are_one_unit(text: str, unit: str) -> None:
    quantity = parse_quantity(text)
    assert (quantity.number, quantity.unit) == (5, unit)


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_other_text_is_no_number(text: str) -> None:
    assert parse_quantity(text) is None


@pytest.mark.parametrize(("text", "value"), ANSWERS.items())
def test_an_answer_has_one_number_or_none(text: str, value: Fraction | None) -> None:
    quantity = read_answer(text)
    assert (None if quantity is None else quantity.value) == value
    assert numeric.verify(f"<answer>{text}</answer>", str(value or 12), {}).score == float(value is not None)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("50%", "50", True),
        ("50%", "0.5", True),
        ("50", "0.5", False),
        ("50%", "50 percent", True),
        ("50%", "0.5%", False),
        ("5 cm", "5", True),
        ("5 cm", "5 m", False),
        ("500 cm", "5 m", False),
        ("$5", "5 dollars", True),
        ("$5", "€5", False),
        ("5 cm", "5 cm^2", False),
    ],
)
def test_percentages_and_units_are_compared(a: str, b: str, same: bool) -> None:
    assert same_number(parse_quantity(a), parse_quantity(b)) is same
    assert same_number(parse_quantity(b), parse_quantity(a)) is same
    assert numeric.verify(f"\\boxed{{{a}}}", b, {}).score == float(same)
    assert text_match.verify_visual(f"<answer>{a}</answer>", b, {}).score == float(same)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("from 1,234.5 down to -3, then 7.", [Fraction(2469, 2), -3, 7]),
        ("She buys 3 for $2.50 each, so 7.5.", [3, Fraction(5, 2), Fraction(15, 2)]),
        ("It is 10-20, 2^10, then 5x.", [None, None, None]),
        ("5 or 6", [None]),
        ("**Answer:** 57...", [57]),
    ],
)
def test_numbers_in_prose_are_found(text: str, values: list[Fraction | None]) -> None:
    assert [mention.quantity and mention.quantity.value for mention in find_quantities(text)] == values


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("#### 42.", "42", 1.0),
        ("#### 42.00", "42", 1.0),
        ("#### 42", 42.0, 1.0),
        ("#### $1,234.00", "1234", 1.0),
        (r"#### \$1,234", "1234", 1.0),
        ("#### **42**", "42", 1.0),
        ("#### 42 apples", "42", 1.0),
        ("#### 18.5", "18.50", 1.0),
        ("#### -42", "42", 0.0),
        ("#### 8,12", "812", 0.0),
        ("#### 42 or 43", "42", 0.0),
        ("#### 10-20", "10", 0.0),
        ("#### x = 42", "42", 0.0),
        ("#### 42", "She buys 6 * 7 = <<6*7=42>>42.\n#### 42", 1.0),
    ],
)
def test_gsm8k_compares_values(text: str, truth: object, score: float) -> None:
    assert gsm8k.verify_strict(text, truth, {}).score == score


@pytest.mark.parametrize(
    ("text", "truth", "score"),
    [
        ("so it costs $1,234.00", "1234", 1.0),
        ("so it costs 18.50", "18.5", 1.0),
        ("it is 42.", 42.0, 1.0),
        ("6*7=42", "42", 1.0),
        ("42 (in 3 steps)", "42", 1.0),
        ("8,12", "812", 0.0),
        ("10-20", "-20", 0.0),
        ("2+3", "3", 0.0),
        (r"so $\boxed{42}$", "42", 1.0),
        (r"so $\boxed{42^\circ}$", "42", 1.0),
        (r"so $\boxed{42", "42", 0.0),
    ],
)
def test_flexible_gsm8k_compares_values(text: str, truth: object, score: float) -> None:
    assert gsm8k.verify_flexible(text, truth, {}).score == score


@pytest.mark.parametrize("verify", [numeric.verify, gsm8k.verify_strict, gsm8k.verify_flexible])
@pytest.mark.parametrize("truth", ["about five", "", "8,12", "10-20", "1/0"])
def test_a_truth_that_is_no_number_is_a_fault_of_the_row_whatever_the_response(verify, truth: str) -> None:
    for text in ("#### 5", "none"):
        with pytest.raises(ValueError, match=r"not a number|no ground truth"):
            verify(text, truth, {})


@given(st.fractions(max_denominator=10**9), st.sampled_from(["{}", "+{}", "**{}**", "${}$", r"\({}\)", "{}.", " {} "]))
def test_a_fraction_is_read_in_every_form(value: Fraction, form: str) -> None:
    sign = "-" if value < 0 else ""
    texts = [f"{sign}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}", str(value)]
    whole, part = divmod(abs(value), 1)
    if whole and part:
        texts += [f"{sign}{whole} {part}", f"{sign}{whole}\\frac{{{part.numerator}}}{{{part.denominator}}}"]
    for text in texts:
        assert parse_number(form.format(text).replace("+-", "-")) == value


@given(st.decimals(allow_nan=False, allow_infinity=False, places=4), st.sampled_from([",", "_", " ", "{,}", r"\,"]))
def test_a_decimal_is_read_with_any_separator(value, separator: str) -> None:
    assert parse_number(f"{value:,f}".replace(",", separator)) == Fraction(value)


@given(
    st.integers(0, 10**12), st.integers(0, 10**12), st.sampled_from(["-", "+", "*", ":", ", ", " or ", "–", "^", ";"])
)
def test_two_numbers_are_never_one(a: int, b: int, between: str) -> None:
    text = f"{a}{between}{b}"
    assert parse_quantity(text) is None or (between == "^" and a == 10)
    assert read_answer(text) is None or (between == "^" and a == 10)


@given(st.text(alphabet="0123456789.,-+*/ ()\\{}^_%$=eE frac times or cm", max_size=60))
def test_no_text_raises_and_what_is_read_is_found(text: str) -> None:
    quantity = parse_quantity(text)
    read_answer(text)
    if quantity is not None and quantity.value and len(text) < 20 and text.strip().isdigit():
        assert read_last(text) == quantity


@pytest.mark.parametrize(
    "text",
    ["9" * 10**6, "1 " * 10**5, "(" * 10**5, " " * 10**6, "1e" * 10**5, "-" * 10**5, "1,234," * 10**5],
)
def test_long_texts_take_linear_time(text: str) -> None:
    started = time.process_time()
    read_last(text)
    read_answer(text)
    assert parse_quantity(text) is None
    assert time.process_time() - started < 1


def test_words_that_are_no_units() -> None:
    assert [parse_unit(text) for text in ("or 6", "x", "times 2", "cm + 3", "apples pears plums figs dates")] == [
        None
    ] * 5


@pytest.mark.parametrize("answer", ["<5", "> 5", r"\ge 5", "$\\neq 5$", "x=3 and y=5", "x = 3, y = 5"])
def test_an_inequality_or_the_values_of_two_variables_are_no_number(answer: str) -> None:
    assert numeric.verify(f"\\boxed{{{answer}}}", "5", {}).score == 0.0
