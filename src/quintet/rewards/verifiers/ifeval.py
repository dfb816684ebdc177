"""Instruction following with a verifiable constraint, scored as by ROLL's `GeneralRuleRewardWorker`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from quintet import hardware
from quintet.rewards.score import CORRECT, WRONG, Score
from quintet.rewards.verifiers.ifeval_constraints import CONSTRAINTS, LANGUAGE
from quintet.rewards.verifiers.roll_text import remove_special_tokens, repetition_penalty, text_after_thinking

MAX_REPETITION_PENALTY = -0.5


def verify(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Score 1 if the text after thinking meets the constraint, minus a penalty of repetition in the whole text.

    `ground_truth` is a mapping, or its JSON, with `func_name` and the arguments of that constraint; other entries are
    ignored. A constraint without its arguments is not met.

    Raises:
        ValueError: the ground truth names no constraint.
        ModuleNotFoundError: the constraint needs `langdetect`, which is not installed.
    """
    name, arguments = _constraint(ground_truth)
    if name == LANGUAGE and not hardware.is_installed("langdetect"):
        command = hardware.install_command(("langdetect",))
        raise ModuleNotFoundError(f"the constraint {name} needs langdetect, which is not installed: {command}")
    text = remove_special_tokens(text)
    score = CORRECT if _meets(CONSTRAINTS[name], text_after_thinking(text), arguments) else WRONG
    repetition = repetition_penalty(text, MAX_REPETITION_PENALTY)
    return Score(score + repetition, reward_components={"acc": score, "repetition": repetition})


def _constraint(ground_truth: Any) -> tuple[str, Mapping[str, Any]]:
    row = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
    name = row.get("func_name") if isinstance(row, Mapping) else None
    if name not in CONSTRAINTS:
        raise ValueError(f"the ground truth must name a constraint, func_name: {name!r} is none; known: {_KNOWN}")
    return str(name), row


def _meets(constraint: Callable[..., bool], text: str, row: Mapping[str, Any]) -> bool:
    names = list(inspect.signature(constraint).parameters)[1:]
    try:
        return constraint(text, **{name: row[name] for name in names if name in row})
    except Exception:  # noqa: BLE001 - missing or unsuitable arguments, as in ROLL
        return False


_KNOWN = ", ".join(CONSTRAINTS)
