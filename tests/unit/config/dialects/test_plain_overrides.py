"""Overrides read without Hydra are those that Hydra reads, to the type of each value."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from quintet.config.dialects.composition.plain_overrides import read_plain_override

NUMBERS = ("0", "-1", "+1", "1.", "-1.5", "1e-6", "1E5", "1.5e+3", "1.e5", "1e400", "123456789012345678")
TEXTS = ("a", "E5", "true-1", "TRUE1", "null/x", "/a/b.c", "//", "a:b", "x:/y", "Qwen/Qwen2.5-7B-Instruct", "a..b")
WORDS = ("true", "False", "TRUE", "null", "Null")
QUOTED = ("''", '""', "'1'", "'x y'", '"x y"', "'a\"b'", "'é'")
LISTS = ("[]", "[ ]", "[1,2]", "[a, b]", "['a', \"b c\"]", "[true,null,1.5]", "[ 'a' , 'b' ]", "[a:b]", "[-1,+2]")
OTHERS = (
    *("", "01", "1a", ".5", "1_000", "nan", "Inf", "-inf", "123456789012345678901", "a,b", "a b", "a=b", " a", "a "),
    *("${x}", "'${x}'", "'a\\'b'", "'a\tb'", "[a,,b]", "[,]", "[a", "[[1]]", "[1e-3,inf]", "[01]", "{a:1}", "f(x)"),
    *("é", "a@b", "a+b", "~/x", "-a", "1-2", "1.2.3"),
)


@pytest.mark.parametrize("value", [*NUMBERS, *TEXTS, *WORDS, *QUOTED, *LISTS])
@pytest.mark.parametrize("key", ["a", "+a.b-c", "++_a.b.c"])
def test_a_plain_override_has_the_value_that_hydra_gives_it(key: str, value: str) -> None:
    text = f"{key}={value}"
    (override,) = OverridesParser.create().parse_overrides([text])
    expected = override.key_or_group, override.value()
    assert repr(read_plain_override(text)) == repr(expected)


@pytest.mark.parametrize(
    "text", [*(f"a={value}" for value in OTHERS), "~a", "~a=1", "a/b=c", "a@b=c", "a.=1", "a", "=1"]
)
def test_an_override_that_is_not_plain_is_left_to_hydra(text: str) -> None:
    assert read_plain_override(text) is None
