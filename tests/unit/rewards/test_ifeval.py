"""If these fail, rows with constraints of a ROLL file get other rewards than ROLL's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from quintet import hardware
from quintet.rewards.verifiers import ifeval

GOLDEN = json.loads((Path(__file__).parents[2] / "parity" / "golden" / "roll_rules.json").read_text())["ifeval"]
TEXTS = GOLDEN[0]["texts"]


def meets(text: str, func_name: str, **arguments: object) -> bool:
    score = ifeval.verify(text, {"func_name": func_name, **arguments}, {})
    return score.reward_components["acc"] == 1.0


@pytest.mark.parametrize(
    ("text", "func_name", "arguments", "met"),
    [
        ("Big red dog", "verify_keywords", {"keyword_list": ["RED", "big"]}, True),
        ("Big red dog", "verify_keywords", {"keyword_list": ["blue"]}, False),
        ("Big red dog", "validate_forbidden_words", {"forbidden_words": ["do"]}, False),
        ("a b c", "verify_keyword_frequency", {"word": "a", "N": 3}, True),  # counts all words, as ROLL
        ("a b c", "verify_keyword_frequency", {"word": "a", "N": 1}, False),
        ("Eel", "verify_letter_frequency", {"letter": "e", "N": 1}, True),
        ("x\n* * *\ny", "verify_paragraph_count", {"N": 2}, True),
        ("x\n* * *\n", "verify_paragraph_count", {"N": 2}, False),
        ("w " * 45, "validate_word_constraint", {"N": 50, "quantifier": "around"}, True),
        ("w " * 44, "validate_word_constraint", {"N": 50, "quantifier": "around"}, False),
        ("I am Mr. X. You? No! Yes", "verify_sentence_constraint", {"N": 3, "quantifier": "at most"}, True),
        ("a\n\nThen b", "validate_paragraphs", {"N": 2, "first_word": "Then", "i": 2}, True),
        ("a P.S. b", "verify_postscript", {"postscript_marker": "P.S."}, True),
        ("a P.S.", "verify_postscript", {"postscript_marker": "P.S."}, False),
        ("[a] [b]", "validate_placeholders", {"N": 2}, True),
        ("* a\n - b\nc", "verify_bullet_points", {"N": 2}, True),
        ("<<a>> b", "validate_title", {}, True),
        ("yes", "validate_choice", {"options": ["yes, sir"]}, True),
        ("*a* b *c*", "validate_highlighted_sections", {"N": 2}, True),
        ("PART a PART b", "validate_sections", {"N": 2, "section_splitter": "PART"}, True),
        ("[1, 2]", "validate_json_format", {}, True),
        ("[1, 2", "validate_json_format", {}, False),
        ("Why? So.", "validate_repeat_prompt", {"original_prompt": "Why?"}, True),
        ("a ****** b", "validate_two_responses", {}, True),
        ("a ****** a", "validate_two_responses", {}, False),
        ("A 1", "validate_uppercase", {}, True),
        ("a 1", "validate_lowercase", {}, True),
        ("NO, it IS", "validate_frequency_capital_words", {"N": 2, "quantifier": "around"}, True),
        ("The end", "validate_end", {"end_phrase": "end"}, True),
        ('"a"', "validate_quotation", {}, True),
        ("a, b", "validate_no_commas", {}, False),
    ],
)
def test_a_constraint_is_met(text: str, func_name: str, arguments: dict, met: bool) -> None:
    assert meets(text, func_name, **arguments) is met


def test_repetition_while_thinking_is_penalized_and_does_not_change_the_accuracy() -> None:
    score = ifeval.verify("<think>x x x x</think>\n\nb", json.dumps({"func_name": "validate_lowercase"}), {})
    assert score.score == 1.0
    score = ifeval.verify("X x x x x</think>\n\nb", {"func_name": "validate_uppercase", "N": None}, {})
    assert score.reward_components == {"acc": 0.0, "repetition": pytest.approx(-0.5 / 4)}
    assert score.score == pytest.approx(-0.125)


@pytest.mark.parametrize("case", GOLDEN[1:], ids=lambda case: case["truth"]["func_name"])
def test_rewards_are_those_of_roll(case: dict) -> None:
    results = [ifeval.verify(text, json.dumps(case["truth"]), {}).score for text in TEXTS]
    assert results == pytest.approx(case["rewards"])


@pytest.mark.parametrize("truth", [{}, {"func_name": "validate_rhyme"}, [], "{}", "not json", None])
def test_a_row_without_constraint_is_a_fault_of_the_row(truth: object) -> None:
    with pytest.raises(ValueError, match=r"func_name|Expecting value"):
        ifeval.verify("a", truth, {})


def test_a_missing_argument_means_that_the_constraint_is_not_met() -> None:
    assert not meets("a b", "validate_word_constraint", N=2)


def test_a_language_is_not_judged_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "is_installed", lambda name: name != "langdetect")
    with pytest.raises(ModuleNotFoundError, match=r"validate_response_language needs langdetect.*install"):
        meets("Guten Tag", "validate_response_language", language="de")


def test_a_language_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    detector = SimpleNamespace(detect=lambda text: "de" if "Tag" in text else "en", DetectorFactory=SimpleNamespace())
    monkeypatch.setattr(hardware, "is_installed", lambda name: True)
    monkeypatch.setitem(sys.modules, "langdetect", detector)
    assert meets("Guten Tag", "validate_response_language", language="de")
    assert not meets("Good day", "validate_response_language", language="de")
    assert detector.DetectorFactory.seed == 0
