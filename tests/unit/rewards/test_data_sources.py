"""If these fail, rows are judged by other rules than their source's, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from quintet.config.native.data import RewardConfig
from quintet.errors import ConfigError
from quintet.rewards.data_sources import SOURCES, Route, route
from quintet.rewards.verifiers.registry import VERIFIERS


def chosen(source: str, kind: str = "rules", **verifiers: Any) -> Route:
    return route(source, RewardConfig.model_validate({"kind": kind, "verifiers": verifiers}))


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
    assert chosen(source).verifier == verifier


def test_all_that_the_tables_name_exists() -> None:
    for name in {*SOURCES.values()}:
        assert name in VERIFIERS, name
    for name in ("math", "vqa", "code", "searchr1", "rstar2"):  # RLinf's reward types
        assert name in VERIFIERS, name


def test_a_kind_judges_all_rows_alike() -> None:
    assert chosen("openai/gsm8k", "exact").verifier == "exact"
    assert chosen("", "math").verifier == "math"


def test_a_source_can_have_a_verifier_of_its_own() -> None:
    verifiers = {"physics": {"kind": "exact"}, "sums": {"kind": "numeric"}}
    assert chosen("physics", "math", **verifiers).verifier == "exact"
    assert chosen("sums", **verifiers).verifier == "numeric"
    assert chosen("biology", "math", **verifiers).verifier == "math"
    with pytest.raises(ConfigError, match=r"reward\.verifiers\.physics\.kind = 'exac'.*") as error:
        chosen("physics", physics={"kind": "exac"})
    assert "did you mean 'exact'?" in str(error.value)
    with pytest.raises(
        ConfigError, match=r"reward\.verifiers\.physics\.arguments = {'a': 1}: the verifier 'exact' has no"
    ):
        chosen("physics", physics={"kind": "exact", "arguments": {"a": 1}})


def test_puzzle_sources_name_their_generator() -> None:
    assert chosen("reasoning_gym/chain_sum").extra == {"generator": "chain_sum"}


def test_only_verifiers_that_start_processes_are_unconfined() -> None:
    assert not chosen("codeforces").process_kind.confined
    assert not chosen("KodCode", "code_sandbox").process_kind.confined
    assert all(
        chosen(source.replace("*", "x")).process_kind.confined for source, name in SOURCES.items() if name != "code"
    )


@pytest.mark.parametrize(
    ("source", "hint"),
    [("openai/gsm8", "did you mean 'openai/gsm8k'"), ("my_own_task", "reward.function"), ("", "reward.kind")],
)
def test_an_unknown_source_is_an_error_with_a_hint(source: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=hint) as caught:
        chosen(source)
    assert source in caught.value.message
    assert "reward.function" in str(caught.value)
    for verifier in ("gsm8k", "math", "numeric", "exact"):
        assert verifier in str(caught.value), "the verifiers to choose from are not listed"


def test_an_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'countdown'") as caught:
        chosen("", "countdwn")
    assert caught.value.key == "reward.kind"
