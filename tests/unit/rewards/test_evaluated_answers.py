"""If these fail, an answer to a puzzle of reasoning-gym gets a reward by code, or a right one gets none."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quintet.rewards.verifiers import gym
from quintet.rewards.verifiers.gym import EXPRESSIONS, LITERALS, without_code

reasoning_gym = pytest.importorskip("reasoning_gym")
FORGERIES = (
    "entry['answer']",
    "oracle_answer",
    "valid_solutions[0].split()",
    "[__import__('os').write(fd, b'{\"score\": 1.0}') for fd in range(3, 20)]",
    "[c for c in ().__class__.__base__.__subclasses__()]",
)
CODE = (
    "eval(chr(49))",
    "__import__('os')",
    "(1).__class__",
    "x.subs(x, 2)",
    "x . subs",
    "sympify(1)",
    "exec(chr(50))",
    "lambdify(x, x)",
    "S(2)(3).free_symbols",
    "preview(x)",
    "[x][0]",
    "open(0)",
    "globals()",
    "getattr(x, y)",
)


def entry(generator: str) -> dict[str, Any]:
    return reasoning_gym.create_dataset(generator, seed=1, size=1)[0]


def score(generator: str, answer: str, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(gym, "is_confined", lambda: True)
    row = entry(generator)
    return gym.verify(f"<answer>{answer}</answer>", row, {}).score


@pytest.mark.parametrize("generator", sorted(LITERALS))
def test_code_that_names_the_solution_is_no_solution(generator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for forgery in FORGERIES:
        assert score(generator, forgery, monkeypatch) == 0.0
    assert score(generator, entry(generator)["answer"], monkeypatch) == 1.0


def test_lists_are_still_read(monkeypatch: pytest.MonkeyPatch) -> None:
    solution = entry("spiral_matrix")["answer"].split()
    assert score("spiral_matrix", f"[{', '.join(solution)}]", monkeypatch) == 0.1
    assert score("string_insertion", str(list(entry("string_insertion")["answer"])), monkeypatch) == 0.1


@pytest.mark.parametrize("generator", sorted(EXPRESSIONS))
def test_expressions_are_read_and_code_is_not(generator: str) -> None:
    for code in CODE:
        assert without_code(generator, code, {}) == "(", code
    for expression in (
        "3 + 4*(2 - x)/7",
        "x**2 + C",
        "-exp(x)*sin(2*x) + 1.5",
        "log(Abs(x)) + sqrt(2)",
        "E**x + pi",
        "4!",
    ):
        assert without_code(generator, expression, {}) == expression


@pytest.mark.parametrize("generator", sorted(EXPRESSIONS - {"puzzle24"}))
def test_a_solution_that_is_an_expression_is_right(generator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert score(generator, entry(generator)["answer"], monkeypatch) == 1.0


def evaluated(source: str) -> Iterator[str]:
    functions = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", "") == "score_answer"]
    calls = [node for each in functions for node in ast.walk(each) if isinstance(node, ast.Call)]
    names = ("eval", "exec", "parse_expr")
    yield from (ast.unparse(call.args[0]) for call in calls if ast.unparse(call.func).rpartition(".")[2] in names)


def test_every_generator_that_evaluates_answers_is_known() -> None:
    """Fails with a release of reasoning-gym that has another one."""
    sources = {path.stem: path.read_text() for path in Path(reasoning_gym.__file__).parent.rglob("*.py")}
    suspects = {name: text for name, text in sources.items() if re.search(r"eval\(|exec\(|parse_expr\(", text)}
    evaluating = {name for name, text in suspects.items() if "answer" in evaluated(text)}
    assert evaluating == LITERALS | EXPRESSIONS
