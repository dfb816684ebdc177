"""If these fail, a program that solves nothing gets the reward of one that does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quintet.rewards.verifiers import code
from quintet.rewards.verifiers.code_sandbox import verify as verify_like_roll
from quintet.rewards.verifiers.options import CodeSandboxOptions

ASSERTIONS = ["assert f(2) == 4", "assert f(3) == 9"]
CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert abs(candidate(3) - 9) < 1e-6\n"
LIAR = """
class Liar:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __hash__(self): return 4
    def __bool__(self): return True
    def __sub__(self, other): return self
    __rsub__ = __add__ = __radd__ = __sub__
    def __abs__(self): return self
    def __getattr__(self, name): return self
    def __call__(self, *args): return self
    def __getitem__(self, key): return self
"""
ZERO = """
class Zero(Liar):
    def __init__(self, *args): pass
    def __sub__(self, other): return Zero() if other == 4 else 0
    __rsub__ = __isub__ = __sub__
    def __abs__(self): return 0
    __round__ = __int__ = __float__ = __abs__
    def __divmod__(self, other): return 1, 0
"""
SECTIONS = (Path(__file__).parent / "code_attacks.txt").read_text().split("## ")[1:]
ATTACKS = {name.strip(): program for name, _, program in (section.partition("\n") for section in SECTIONS)}
"""Programs; those with `(liar)` begin with the class above."""


def judge(program: str, truth: Any, extra: dict[str, Any] | None = None) -> float:
    return code.verify(f"```python\n{program}\n```", truth, extra or {}).score


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_passes_no_test(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (LIAR if "(liar)" in name else "") + ATTACKS[name]
    monkeypatch.setattr(code.run_tests, "__defaults__", (0.7,))
    assert judge(program, ASSERTIONS[:1]) == 0.0
    assert judge(program, CHECK, {"entry_point": "f"}) == 0.0
    assert judge(program, {"inputs": [[2]], "outputs": [4], "fn_name": "f"}) == 0.0
    assert judge(program, {"inputs": ["2"], "outputs": ["4"]}) == 0.0


@pytest.mark.parametrize(
    "name", ["the token of the source", "exit with status 0", "lying integer (liar)", "own messages"]
)
def test_an_attack_on_tests_of_roll_passes_none(name: str) -> None:
    program = (LIAR if "(liar)" in name else "") + ATTACKS[name]
    for case_type, tests in (
        ("assert", ASSERTIONS[0]),
        ("pytest", f"def test_f():\n    {ASSERTIONS[0]}"),
        ("check_based", CHECK),
    ):
        row = {"case_type": case_type, "test_cases": [{"assert_code": tests, "entry_point": "f"}]}
        assert (
            verify_like_roll(f"```python\n{program}\n```", "", row, CodeSandboxOptions(test_seconds=2.0)).score == 0.0
        )


def test_the_same_tests_pass_with_a_program_that_solves_them() -> None:
    """Otherwise the attacks above would prove nothing."""
    program = "def f(n):\n    return n * n"
    assert judge(program, ASSERTIONS) == 1.0
    assert judge(program, CHECK, {"entry_point": "f"}) == 1.0
    assert judge(program, {"inputs": [[2]], "outputs": [4], "fn_name": "f"}) == 1.0


def test_names_that_every_program_has_are_no_solution() -> None:
    assert judge("x = 0", {"inputs": [[4, 6]], "outputs": [2], "fn_name": "gcd"}) == 0.0
    assert judge("from math import gcd", {"inputs": [[4, 6]], "outputs": [2], "fn_name": "gcd"}) == 1.0
    assert judge("x = 0", "def check(f):\n    assert f(4, 6) == 2", {"entry_point": "gcd"}) == 0.0
    assert judge("from math import gcd", "def check(f):\n    assert f(4, 6) == 2", {"entry_point": "gcd"}) == 1.0


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        (LIAR + "def f(n): return Liar()", "assert 4 in f(2)"),
        (LIAR + "def f(n): return Liar()", "assert f(2) in (4, 5)"),
        (LIAR + "def f(n): return [Liar(), Liar()]", "assert f(2) == [4, 5]"),
        (LIAR + "def f(n): return {Liar(): Liar()}", "assert f(2) == {4: 4}"),
        (LIAR + "def f(n): return (Liar(),)", "assert sorted(f(2)) == [4]"),
        (LIAR + "def f(n): return Liar()", "assert not f(2) != 4"),
        (LIAR + "def f(n): return Liar()", "import math\nassert math.isclose(f(2), 4)"),
        (LIAR + "def f(n): return Liar()", "assert isinstance(f(2), int) and f(2) > 3"),
        (LIAR + "class Solution(Liar):\n    def f(self, n): return self", "assert 4 in Solution().f(2)"),
        (LIAR + "class Solution(Liar):\n    def f(self, n): return self", "assert Solution().f(2) == 4"),
        ("def f(n): raise StopIteration", "assert all(map(lambda case: f(case[0]) == case[1], [(2, 4)]))"),
        ("def f(n): raise StopIteration", "assert all(a == b for a, b in zip(map(f, [2]), [4]))"),
        ("class np:\n    allclose = lambda *a: True\ndef f(n): return 0", "assert np.allclose(f(2), 4)"),
        ("class math:\n    isclose = lambda *a: True\ndef f(n): return 0", "assert math.isclose(f(2), 4)"),
        ("isclose = lambda *a: True\ndef f(n): return 0", "assert isclose(f(2), 4)"),
        (LIAR + ZERO + "def f(n): return Zero()", "assert abs(f(2) - 4) < 1e-6"),
        (LIAR + ZERO + "def f(n): return Zero()", "assert abs(4 - f(2)) < 1e-6 or round(f(2) - 4, 3) == 0"),
        (LIAR + ZERO + "def f(n): return Zero()", "assert -1e-6 < f(2) - 4 < 1e-6 or divmod(f(2), 4) == (1, 0)"),
        (LIAR + ZERO + "f = Zero", "assert abs(f(2) - 4) < 1e-6 or f(2) - 4 == 0 or int(f(2) - 4) == 0"),
        (LIAR + ZERO + "def f(n): return [Zero()]", "assert all(abs(a - b) < 1e-6 for a, b in zip(f(2), [4]))"),
        (LIAR + ZERO + "class Int(Zero, int): pass\ndef f(n): return Int(0)", "assert abs(f(2) - 4) < 1e-6"),
        (LIAR + ZERO + "class Int(Zero, int): pass\nf = Int", "assert abs(f(2) - 4) < 1e-6"),
        (LIAR + ZERO + "f = Zero", "d = f(2)\nd -= 4\nassert abs(d) < 1e-6"),
        (
            "class D:\n    __sub__ = lambda self, n: self\n    __bool__ = lambda self: False\ndef f(n): return D()",
            "assert not f(2) - 4",
        ),
        ("def abs(x): return 0\ndef f(n): return 0", "from solution import *\nassert abs(f(2) - 4) < 1e-6"),
        (
            "isclose = lambda *a: True\ndef f(n): return 0",
            "from math import *\nfrom solution import *\nassert isclose(f(2), 4)",
        ),
        ("x = 0", "assert gcd(4, 6) == 2"),
        ("x = 0", "assert sum([1, 2]) == 3"),
        ("x = 0", "import numpy as np\nassert np.allclose(mean([1.0]), 1)"),
        ("def abs(x): return 0", "assert abs(sum([1.0]) - 2) < 1e-6"),
        ("def f(n, key): key.__globals__['passed'] = 1", "assert f(2, lambda x: x) == 4"),
        (
            "def f(n, items):\n    frame = items.gi_frame\n    return frame.f_globals['expected']",
            "expected = 4\nassert f(2, (x for x in [1])) == expected",
        ),
        (
            "def f(n, node):\n    return node.__init__.__globals__['expected']",
            "expected = 4\nclass Node:\n    def __init__(self): self.x = 1\nassert f(2, Node()) == expected",
        ),
        (
            "def f(n, judge):\n    judge.accepts = lambda value: True\n    return 0",
            "class Judge:\n    def accepts(self, value): return value == 4\njudge = Judge()\n"
            "assert judge.accepts(f(2, judge))",
        ),
    ],
)  # fmt: skip
def test_objects_decide_nothing(program: str, tests: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code.run_tests, "__defaults__", (1.0,))
    assert judge(program, [tests]) == 0.0
