"""If these fail, rows with constraints of a ROLL file get other rewards than ROLL's."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from quintet import hardware
from quintet.rewards.score import GroundTruthError
from quintet.rewards.verifiers import ifeval
from quintet.rewards.verifiers.truth_checks import check_ground_truth

GOLDEN = json.loads((Path(__file__).parents[2] / "parity" / "golden" / "roll_rules.json").read_text())["ifeval"]
TEXTS = GOLDEN[0]["texts"]


def meets(text: str, func_name: str, **arguments: object) -> bool:
    return ifeval.verify(text, {"func_name": func_name, **arguments}, {}).score == 1.0


def truth_problem(verifier: str, truth: str) -> bool:
    try:
        check_ground_truth(verifier, truth, {}, {})
    except GroundTruthError:
        return True
    return False


def meets_in_roll(text: str, func_name: str, **arguments: object) -> bool:
    score = ifeval.verify_as_roll(text, {"func_name": func_name, **arguments}, {})
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
def test_a_constraint_is_met_where_roll_finds_it_met(text: str, func_name: str, arguments: dict, met: bool) -> None:
    assert meets_in_roll(text, func_name, **arguments) is met


@pytest.mark.parametrize(
    ("text", "func_name", "arguments", "met"),
    [
        ("Big red dog", "verify_keywords", {"keyword_list": ["RED", "big"]}, True),
        ("a cat, A hat", "verify_keyword_frequency", {"word": "a", "N": 2}, True),
        ("a cat", "verify_keyword_frequency", {"word": "a", "N": 2}, False),
        ("deep learning is Deep-Learning", "verify_keyword_frequency", {"word": "deep learning", "N": 1}, True),
        ("a dog", "validate_forbidden_words", {"forbidden_words": ["do"]}, True),
        ("I do.", "validate_forbidden_words", {"forbidden_words": ["DO"]}, False),
        ("Eel", "verify_letter_frequency", {"letter": "e", "N": 1}, True),
        ("x\n* * *\ny", "verify_paragraph_count", {"N": 2}, True),
        ("x\n* * *\n", "verify_paragraph_count", {"N": 2}, False),
        ("w " * 45, "validate_word_constraint", {"N": 50, "quantifier": "around"}, True),
        ("w " * 44, "validate_word_constraint", {"N": 50.0, "quantifier": "around"}, False),
        ("I am Mr. X. You? No! Yes", "verify_sentence_constraint", {"N": 4, "quantifier": "at least"}, True),
        ("One.\n\nTwo.", "verify_sentence_constraint", {"N": 2, "quantifier": "at most"}, True),
        ("a\n\nThen b\n\n", "validate_paragraphs", {"N": 2, "first_word": "then", "i": 2}, True),
        ("a\n\nThenceforth", "validate_paragraphs", {"N": 2, "first_word": "then", "i": 2}, False),
        ("a\n\n**Then** b", "validate_paragraphs", {"N": 2, "first_word": "Then", "i": 2}, True),
        ("a P.S. b", "verify_postscript", {"postscript_marker": "P.S."}, True),
        ("a P.S.", "verify_postscript", {"postscript_marker": "P.S."}, False),
        ("[a] [b]", "validate_placeholders", {"N": 2}, True),
        ("* a\n - b\n---\n**bold**\n* * *\nc", "verify_bullet_points", {"N": 2}, True),
        ("<<a>> b", "validate_title", {}, True),
        ("<< >>", "validate_title", {}, False),
        ("My answer is yes.", "validate_choice", {"options": ["My answer is yes.", "My answer is no."]}, True),
        ("Apple", "validate_choice", {"options": ["A", "B"]}, False),
        ("y", "validate_choice", {"options": ["yes, sir"]}, False),
        ("*a* b *c*", "validate_highlighted_sections", {"N": 2}, True),
        ("**a** b", "validate_highlighted_sections", {"N": 2}, False),
        ("** **", "validate_highlighted_sections", {"N": 1}, False),
        ("Section 1 a\nSECTION 2 b", "validate_sections", {"N": 2, "section_splitter": "Section"}, True),
        ("a section is a section", "validate_sections", {"N": 2, "section_splitter": "Section"}, False),
        ("```json\n[1, 2]\n```", "validate_json_format", {}, True),
        ("```JSON\n[1, 2\n```", "validate_json_format", {}, False),
        ("Here: [1]", "validate_json_format", {}, False),
        ("why? So.", "validate_repeat_prompt", {"original_prompt": "Why? "}, True),
        ("a ****** b", "validate_two_responses", {}, True),
        ("a ******", "validate_two_responses", {}, False),
        ("A 1", "validate_uppercase", {}, True),
        ("1", "validate_uppercase", {}, False),
        ("a 1", "validate_lowercase", {}, True),
        ("A a", "validate_lowercase", {}, False),
        ("NO, it IS " * 5, "validate_frequency_capital_words", {"N": 11, "quantifier": "around"}, True),
        ('"The End."\n', "validate_end", {"end_phrase": "the end."}, True),
        ("The end. Or not", "validate_end", {"end_phrase": "the end."}, False),
        (' "a"\n', "validate_quotation", {}, True),
        ('"', "validate_quotation", {}, False),
        ("a; b", "validate_no_commas", {}, True),
        ("<think>A, B</think>\n\na", "validate_no_commas", {}, True),
        ("<think>a", "validate_lowercase", {}, False),
        ("a</think>", "validate_no_commas", {}, False),
        ("", "validate_word_constraint", {"N": 5, "quantifier": "at most"}, False),
        ("x\n***\ny\n***\n", "verify_paragraph_count", {"N": 2}, True),
        ("* * *\nx\n* * *\ny", "verify_paragraph_count", {"N": 2}, True),
        ("x\n* * *\n* * *\ny", "verify_paragraph_count", {"N": 2}, False),
        ("***x***", "verify_paragraph_count", {"N": 1}, True),
        ("a p. s. b", "verify_postscript", {"postscript_marker": "P.S."}, True),
        ("a P.P.S b", "verify_postscript", {"postscript_marker": "P.P.S"}, True),
        ("```json[1]```", "validate_json_format", {}, True),
        ("****** a ****** b ******", "validate_two_responses", {}, True),
        ("a ****** b ****** c", "validate_two_responses", {}, False),
    ],
)
def test_a_constraint_is_met_as_the_instruction_says(text: str, func_name: str, arguments: dict, met: bool) -> None:
    assert meets(text, func_name, **arguments) is met


def test_repetition_while_thinking_is_penalized_and_does_not_change_the_accuracy() -> None:
    score = ifeval.verify_as_roll("<think>x x x x</think>\n\nb", json.dumps({"func_name": "validate_lowercase"}), {})
    assert score.score == 1.0
    score = ifeval.verify_as_roll("X x x x x</think>\n\nb", {"func_name": "validate_uppercase", "N": None}, {})
    assert score.reward_components == {"acc": 0.0, "repetition": pytest.approx(-0.5 / 4)}
    assert score.score == pytest.approx(-0.125)


@pytest.mark.parametrize("case", GOLDEN[1:], ids=lambda case: case["truth"]["func_name"])
def test_rewards_are_those_of_roll_except_for_rows_that_no_text_can_meet_there(case: dict) -> None:
    try:
        results = [ifeval.verify_as_roll(text, json.dumps(case["truth"]), {}).score for text in TEXTS]
    except GroundTruthError:
        assert max(case["rewards"]) <= 0.0
    else:
        assert results == pytest.approx(case["rewards"])
        assert len(results) == len(TEXTS)


def test_few_rows_are_refused() -> None:
    truths = [json.dumps(case["truth"]) for case in GOLDEN[1:]]
    assert sum(truth_problem("ifeval_roll", truth) for truth in truths) == 6


@pytest.mark.parametrize("truth", [{}, {"func_name": "validate_rhyme"}, [], "{}", "not json", None])
def test_a_row_without_constraint_is_a_fault_of_the_row(truth: object) -> None:
    for verify in (ifeval.verify, ifeval.verify_as_roll):
        with pytest.raises(GroundTruthError, match="func_name"):
            verify("a", truth, {})


@pytest.mark.parametrize(
    ("func_name", "arguments", "names"),
    [
        ("validate_word_constraint", {"N": 2}, "quantifier"),
        ("validate_word_constraint", {"N": 2, "quantifier": "exactly"}, "exactly"),
        ("validate_word_constraint", {"N": "2", "quantifier": "at most"}, "whole number"),
        ("validate_word_constraint", {"N": 2.5, "quantifier": "at most"}, "whole number"),
        ("validate_placeholders", {"N": True}, "whole number"),
        ("verify_keywords", {"keyword_list": "abc"}, "list of texts"),
        ("verify_keywords", {"keyword_list": []}, "list of texts"),
        ("verify_letter_frequency", {"letter": "ab", "N": 1}, "a letter"),
        ("validate_paragraphs", {"N": 2, "first_word": "a", "i": 3}, "i = 3"),
        ("validate_paragraphs", {"N": 2, "first_word": "a", "i": 0}, "i = 0"),
        ("validate_end", {"end_phrase": None}, "end_phrase"),
    ],
)
def test_an_argument_that_is_missing_or_unsuitable_is_a_fault_of_the_row(
    func_name: str, arguments: dict, names: str
) -> None:
    with pytest.raises(GroundTruthError, match=names):
        ifeval.verify("a", {"func_name": func_name, **arguments}, {})


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
