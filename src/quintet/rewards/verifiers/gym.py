"""Problems of reasoning-gym (Stojanovski et al. 2025), scored by the scoring function of their generator.

Some of these functions evaluate the answer as Python. They get data and expressions only, and only run in processes
that cannot start others, write files or open connections, see `quintet.sandbox.seccomp`.
"""

from __future__ import annotations

import ast
import builtins
import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

from quintet.rewards.answer_extraction import extract_boxed, extract_tagged
from quintet.rewards.score import GroundTruthError, Score
from quintet.rewards.thoughts import text_after_thoughts
from quintet.sandbox.seccomp import is_confined


def verify(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Return the generator's score, 0 to 1.

    `ground_truth` is the generated entry (`question`, `answer`, `metadata`), as JSON or a mapping, or only its answer,
    with the rest in `extra`. The generator is `extra["generator"]` or the entry's `metadata["source_dataset"]`.

    Raises:
        GroundTruthError: the row has no answer, or does not name its generator.
        RuntimeError: this process is not confined.
    """
    if not is_confined():
        raise RuntimeError(
            "scoring functions of reasoning-gym may evaluate responses as code: they only run in confined processes"
        )
    name, entry = read_entry(ground_truth, extra)
    final = text_after_thoughts(text)
    answer = extract_tagged(final) or extract_boxed(final) or final.strip()
    score = float(_score_function(name)(without_code(name, answer, entry), entry))
    return Score(min(max(score, 0.0), 1.0) if math.isfinite(score) else score, answer)


def read_entry(ground_truth: Any, extra: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the generator and the generated entry of a row.

    Raises:
        GroundTruthError: the row has no answer, or does not name its generator.
    """
    entry = _entry(ground_truth, extra)
    name = extra.get("generator") or entry["metadata"].get("source_dataset")
    if not name:
        raise GroundTruthError("the row does not name its generator", "set data_source to reasoning_gym/GENERATOR")
    if entry["answer"] is None and not entry["metadata"]:
        raise GroundTruthError("the row has neither an answer nor metadata")
    return str(name), entry


def _entry(ground_truth: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    entry = extra.get("entry", ground_truth)
    if isinstance(entry, str) and entry.lstrip().startswith("{"):
        entry = json.loads(entry)
    if isinstance(entry, dict) and "answer" in entry:
        return {"question": "", **entry, "metadata": entry.get("metadata") or {}}
    return {"question": extra.get("question", ""), "answer": ground_truth, "metadata": extra.get("metadata") or {}}


@lru_cache(maxsize=256)
def _score_function(name: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(name)


def preload() -> None:
    """Load before forking everything that is slow to load."""
    _score_function("chain_sum")


LITERALS: Final = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Generators that pass an answer to `eval` unless it equals the solution: they expect lists."""
EXPRESSIONS: Final = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Generators that pass an answer to sympy's `parse_expr`, which evaluates it."""
FUNCTIONS: Final = frozenset(
    {"exp", "log", "ln", "sqrt", "cbrt", "root", "Abs", "abs", "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos"}
    | {"atan", "acot", "sinh", "cosh", "tanh", "coth", "asinh", "acosh", "atanh", "pi", "E", "I", "oo"}
)
NAME: Final = re.compile(r"[^\W\d]\w*")
EXPRESSION: Final = re.compile(r"(?:[\w\s+\-*/^(),!]|\.(?!\s*[^\W\d]))*")
"""Arithmetic without attributes, items, texts and assignments."""
NEITHER: Final = "("
"""Text that is neither data nor an expression: generators score it like any answer that they cannot read."""


def without_code(generator: str, answer: str, entry: Mapping[str, Any]) -> str:
    """Return an answer that the generator may evaluate: itself, or a text that cannot be read in place of code."""
    if generator in LITERALS:
        return answer if _is_solution(answer, entry) or _is_literal(answer) else NEITHER
    if generator in EXPRESSIONS:
        return answer if _is_expression(answer) else NEITHER
    return answer


def _is_solution(answer: str, entry: Mapping[str, Any]) -> bool:
    solutions = [entry["answer"], *entry["metadata"].get("valid_answers", ())]
    return any(isinstance(each, str) and each.strip() == answer.strip() for each in solutions)


def _is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def _is_expression(text: str) -> bool:
    return EXPRESSION.fullmatch(text) is not None and all(map(_is_harmless, NAME.findall(text)))


def _is_harmless(name: str) -> bool:
    """Return whether a name is a mathematical function or a variable, and nothing of Python or sympy."""
    import sympy

    is_known = hasattr(builtins, name) or (len(name) > 1 and hasattr(sympy, name))
    return name in FUNCTIONS or not (is_known or name.startswith("_"))
