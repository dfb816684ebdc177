"""Instruction following with a verifiable constraint: as IFEval defines it, or as ROLL does."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from quintet import hardware
from quintet.rewards.score import CORRECT, WRONG, GroundTruthError, Score
from quintet.rewards.thoughts import text_after_thoughts
from quintet.rewards.verifiers import roll_ifeval
from quintet.rewards.verifiers.ifeval_constraints import ARGUMENTS, CONSTRAINTS, INTEGERS, LANGUAGE, LISTS, QUANTIFIERS
from quintet.rewards.verifiers.roll_text import remove_special_tokens, repetition_penalty, text_after_thinking

MAX_REPETITION_PENALTY = -0.5


def verify(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Score 1 if the text after thoughts meets the constraint; an empty text meets none.

    `ground_truth` is a mapping, or its JSON, with `func_name` and the arguments of that constraint; other entries are
    ignored.

    Raises:
        GroundTruthError: the ground truth names no constraint, or an argument is missing or unsuitable.
        ModuleNotFoundError: the constraint needs `langdetect`, which is not installed.
    """
    name, arguments = _constraint(ground_truth)
    answer = text_after_thoughts(remove_special_tokens(text)).lstrip("\n")
    return Score(CORRECT if answer.strip() and _meets(CONSTRAINTS, name, answer, arguments) else WRONG)


def verify_as_roll(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Score as ROLL's `GeneralRuleRewardWorker`: 1 if the text after thinking meets the constraint, minus a penalty of
    repetition in the whole text. Raises the errors of `verify`."""
    name, arguments = _constraint(ground_truth)
    text = remove_special_tokens(text)
    score = CORRECT if _meets(roll_ifeval.CONSTRAINTS, name, text_after_thinking(text), arguments) else WRONG
    repetition = repetition_penalty(text, MAX_REPETITION_PENALTY)
    return Score(score + repetition, reward_components={"acc": score, "repetition": repetition})


def _meets(constraints: Mapping[str, Callable[..., bool]], name: str, text: str, arguments: Mapping[str, Any]) -> bool:
    if name != LANGUAGE:
        return constraints[name](text, **arguments)
    if not hardware.is_installed("langdetect"):
        command = hardware.install_command(("langdetect",))
        raise ModuleNotFoundError(f"the constraint {name} needs langdetect, which is not installed: {command}")
    try:
        return constraints[name](text, **arguments)
    except Exception as error:
        # langdetect finds no language in a text without letters
        if type(error).__name__ == "LangDetectException":
            return False
        raise


def _constraint(ground_truth: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name of the constraint of a row, and its arguments."""
    row = _mapping(ground_truth)
    name = row.get("func_name")
    if name not in CONSTRAINTS:
        known = ", ".join(CONSTRAINTS)
        raise GroundTruthError(
            f"the ground truth must name a constraint, func_name: {name!r} is none", f"known: {known}"
        )
    arguments = {
        argument: _argument(str(name), argument, row.get(argument)) for argument in ARGUMENTS.get(str(name), ())
    }
    if "i" in arguments and not 1 <= arguments["i"] <= arguments["N"]:
        raise GroundTruthError(
            f"{name}: paragraph i = {arguments['i']} is none of N = {arguments['N']}", "count from 1"
        )
    return str(name), arguments


def _mapping(ground_truth: Any) -> Mapping[str, Any]:
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except (ValueError, RecursionError) as error:
            problem = f"the ground truth must be JSON with func_name: {error}"
            raise GroundTruthError(problem) from error
    if not isinstance(ground_truth, Mapping):
        raise GroundTruthError(f"the ground truth must be a mapping with func_name: {ground_truth!r:.80} is none")
    return ground_truth


def _argument(name: str, argument: str, value: Any) -> Any:
    """Return an argument of a constraint.

    Raises:
        GroundTruthError: it is missing, or not of its kind.
    """
    if argument in INTEGERS:
        valid, is_valid = "a whole number of at least 0", _is_count(value)
        value = int(value) if is_valid else value
    elif argument in LISTS:
        is_valid = isinstance(value, list | tuple) and bool(value) and all(isinstance(v, str) and v for v in value)
        valid = "a list of texts"
    elif argument == "quantifier":
        valid, is_valid = f"one of {', '.join(QUANTIFIERS)}", value in QUANTIFIERS
    else:
        valid, is_valid = "a text", isinstance(value, str) and bool(value.strip())
        if argument == "letter":
            valid, is_valid = "a letter", is_valid and len(value) == 1
    if not is_valid:
        raise GroundTruthError(f"the argument {argument} of {name} is {value!r:.60}", f"it must be {valid}")
    return value


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and value == int(value)
