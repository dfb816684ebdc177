"""If these fail, rows are judged by other rules than their source's, or not at all."""

from __future__ import annotations

import pytest

from quintet.errors import ConfigError
from quintet.rewards.data_sources import SOURCES, route
from quintet.rewards.verifiers.registry import VERIFIERS


@pytest.mark.parametrize(
    ("source", "verifier"),
    [
        ("openai/gsm8k", "gsm8k"),
        ("lighteval/MATH", "math_boxed"),
        ("DigitalLearningGmbH/MATH-lighteval", "math_boxed"),
        ("HuggingFaceH4/MATH-500", "math_boxed"),
        ("math_dapo", "math_dapo"),
        ("aime2024", "math_dapo"),
        ("numina_olympiads", "math"),
        ("codeforces", "code"),
        ("hiyouga/geometry3k", "geometry3k"),
        ("searchR1_nq", "searchr1"),
        ("addition", "numeric"),
        ("quintet/arithmetic", "numeric"),
        ("countdown", "countdown"),
        ("reasoning_gym/chain_sum", "reasoning_gym"),
    ],
)
def test_a_source_has_its_rules(source: str, verifier: str) -> None:
    assert route(source).verifier == verifier


def test_all_that_the_tables_name_exists() -> None:
    for name in {*SOURCES.values()}:
        assert name in VERIFIERS, name
    for name in ("math", "vqa", "code", "searchr1", "rstar2"):  # RLinf's reward types
        assert name in VERIFIERS, name


def test_a_kind_judges_all_rows_alike() -> None:
    assert route("openai/gsm8k", "exact").verifier == "exact"
    assert route("", "math").verifier == "math"


def test_puzzle_sources_name_their_generator() -> None:
    assert route("reasoning_gym/chain_sum").extra == {"generator": "chain_sum"}


def test_only_verifiers_that_start_processes_are_unconfined() -> None:
    assert not route("codeforces").process_kind.confined
    assert all(
        route(source.replace("*", "x")).process_kind.confined for source, name in SOURCES.items() if name != "code"
    )


@pytest.mark.parametrize(
    ("source", "hint"),
    [("openai/gsm8", "did you mean 'openai/gsm8k'"), ("my_own_task", "reward.function"), ("", "reward.kind")],
)
def test_an_unknown_source_is_an_error_with_a_hint(source: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        route(source)
    assert source in caught.value.message
    assert "reward.function" in str(caught.value)


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'countdown'") as caught:
        route("", "countdwn")
    assert caught.value.key == "reward.kind"
