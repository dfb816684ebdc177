"""If these fail, tests of a row are not those that its program is judged by, or a broken row is a wrong answer."""

# ruff: noqa: E501 - programs

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from quintet.rewards.verifiers import code
from quintet.rewards.verifiers.code_tests import parse_tests

PROGRAM = "def f(n):\n    return 2 * n\n"
STACK = "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
STACK += "    def pop(self): return self.items.pop()\n"


def score(program: str, truth: Any, **extra: Any) -> float:
    return code.verify(f"```python\n{program}\n```", truth, extra).score


@pytest.mark.parametrize(
    ("tests", "number"),
    [
        ("assert f(2) == 4\nassert f(3) == 6", 2),
        ("def test_a():\n    assert f(2) == 4\ndef test_b():\n    assert f(3) == 6", 2),
        ("from solution import f\ndef test_a():\n    assert f(2) == 4", 1),
        ("from solution import *\nimport solution\nassert f(2) == solution.f(2) == 4", 1),
        ("def test_a():\n    assert f(2) == 4\ntest_a()", 1),
        ("def test_a():\n    assert f(2) == 4\nif __name__ == '__main__':\n    test_a()", 1),
        ("class TestF:\n    def test_a(self):\n        assert f(2) == 4\n    def test_b(self):\n        assert f(1) == 2", 2),
        (
            "import unittest\nclass Cases(unittest.TestCase):\n    def setUp(self): self.n = 2\n"
            "    def test_a(self): self.assertEqual(f(self.n), 4)\nif __name__ == '__main__':\n    unittest.main()",
            1,
        ),
        (
            "from solution import f\nimport unittest\nclass Cases(unittest.TestCase):\n    def test_a(self):\n"
            "        self.assertRaises(TypeError, f, None)\n        assert f(max([2])) == 4 and issubclass(bool, int)",
            1,
        ),
        ("import solution\ndef test_a():\n    try: solution.f(None)\n    except TypeError: pass\n    assert solution.f(2) == 4", 1),
        ("for n in range(3):\n    assert f(n) == 2 * n", 1),
        ("assert f(2) == 4\nfor n in range(3):\n    assert f(n) == 2 * n", 1),
        ("def helper(n): return 4\nassert f(2) == helper(2)", 1),
    ],
)  # fmt: skip
def test_all_kinds_of_python_tests_are_run(tests: str, number: int) -> None:
    """A program that is wrong passes none of them: tests that nothing calls would pass."""
    assert len(parse_tests(tests, {})) == number
    assert score(PROGRAM, tests) == 1.0
    assert score("def f(n):\n    return -1", tests) == 0.0


def test_assertions_see_the_effects_of_earlier_statements_only() -> None:
    tests = "s = Stack()\ns.push(1)\nassert len(s.items) == 1\ns.push(2)\nassert s.pop() == 2\nassert s.pop() == 1"
    assert score(STACK, tests) == 1.0
    assert score(STACK.replace("pop()", "pop(0)"), tests) == pytest.approx(1 / 3)


def test_a_method_may_be_the_entry_point_and_have_any_parameters() -> None:
    program = "class Solution:\n    def find(self, nums, target, operation=0): return nums.index(target)"
    check = "def check(candidate):\n    assert candidate(nums=[2, 7], target=7, operation=1) == 1"
    assert score(program, check, entry_point="Solution().find") == 1.0
    assert score(program, check.replace("== 1", "== 0"), entry_point="Solution().find") == 0.0


def test_livecodebench_names_the_function_in_its_metadata() -> None:
    tests = [{"input": "2", "output": "4", "testtype": "functional"}]
    for metadata in ({"func_name": "f"}, '{"func_name": "f"}'):
        assert score(PROGRAM, tests, metadata=metadata) == 1.0
    tests = [{"input": "2", "output": "4", "testtype": "stdin"}]
    assert score("print(2 * int(input()))", tests, metadata="{}") == 1.0


def test_setup_of_a_row_is_there_for_program_and_tests() -> None:
    setup = {"test_setup_code": "BASE = 2\nclass Node:\n    def __init__(self, v): self.v = v"}
    assert score("def f(node): return node.v * BASE", ["assert f(Node(3)) == 3 * BASE"], **setup) == 1.0
    assert score("def f(n): return n", ["assert math.isclose(f(2), 2)"], test_imports=["import math"]) == 1.0


@pytest.mark.parametrize(
    ("truth", "problem"),
    [
        (None, "no tests"),
        ({}, "no tests"),
        ([], "no tests"),
        ("", "asserts nothing"),
        ("x = 4", "asserts nothing"),
        ("def helper(): pass", "asserts nothing"),
        ("def check(f): assert f(2) == 4", "no entry_point"),
        ("def test_a(value): assert f(value) == 4", "fixtures"),
        ("assert f(", "not Python"),
        (["assert f("], "not Python"),
        ("[1, 2", "neither JSON nor"),
        ('{"inputs": [1}', "neither JSON nor"),
        ("Answer: 4", "asserts nothing"),
        ([5], "no test of a program"),
        ({"inputs": "3", "outputs": "6"}, "no list"),
        ({"inputs": ["3"], "outputs": []}, "1 inputs, but 0 outputs"),
        ({"inputs": [None], "outputs": ["6"]}, "no text"),
        ({"inputs": [{"a": 1}], "outputs": ["6"]}, "no text"),
        ({"inputs": [3], "outputs": [6], "fn_name": "f"}, "no list"),
        ([{"input": "2", "output": "4", "testtype": "functional"}], "no func_name"),
        ({"inputs": ["f(2)"], "outputs": [6], "fn_name": "f"}, "neither JSON nor"),
    ],
)
def test_a_row_whose_tests_cannot_be_read_is_an_error_of_the_data(truth: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_tests(truth, {})


@pytest.fixture
def long_integers() -> Iterator[None]:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(limit)


@pytest.mark.usefixtures("long_integers")
def test_integers_may_have_any_number_of_digits() -> None:
    digits = "7" * 5000
    assert score("print(2**20000)", {"inputs": [""], "outputs": [str(2**20000)]}) == 1.0
    assert score("print(int(input()))", {"inputs": [digits], "outputs": [digits]}) == 1.0
    assert score("print(int(input()) + 1)", {"inputs": [digits], "outputs": [digits]}) == 0.0
    assert score("def f(n): return n", {"inputs": [f"{digits}"], "outputs": [digits], "fn_name": "f"}) == 1.0


MAIN = "\nif __name__ == '__main__':\n    print(f(int(input())))"
LEETCODE = """class Solution:
    def f(self, items: List[int], node: Optional[TreeNode] = None) -> Dict[str, float]:
        counts = defaultdict(int)
        for item in items:
            counts[item] += 1
        heapq.heapify(items)
        return {heapq.heappop(items): max(counts.values()) / gcd(3, 30) if inf > math.pi else -1}"""


@pytest.mark.parametrize(
    ("program", "inputs", "output"),
    [
        (PROGRAM + MAIN, ["3"], "6"),
        ("def f(a, b): return a + b", ["0.1\n0.2"], "0.3"),
        ("def f(a, b): return [{a: a + b}]", ["0.1\n0.2"], '[{"0.1": 0.3}]'),
        (LEETCODE, ["[3, 1, 1]"], '{"1": 0.6666666666666667}'),
        ("import numpy as np\ndef f(n): return np.array([[n, 2 * n]]) / 2", ["3"], "[[1.5, 3.0]]"),
        ("import numpy as np\ndef f(n): return {'a': np.int64(n), 'b': (np.float32(0.5),)}", ["3"], '{"a": 3, "b": [0.5]}'),
        ("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: List[int]\n"
         "def f(n): return A([n]).x", ["3"], "[3]"),
        ("def f(n): return n > 2", ["3"], "True"),
    ],
)  # fmt: skip
def test_results_of_calls(program: str, inputs: list[str], output: str) -> None:
    truth = {"inputs": inputs, "outputs": [output], "fn_name": "f"}
    assert score(program, json.dumps(truth)) == 1.0


@pytest.mark.parametrize(
    "program",
    [
        PROGRAM + MAIN,
        "import sys\nprint(2 * int(sys.stdin.buffer.read()))\nsys.exit()",
        "print(2 * int(open(0).read()))\nexit(0)",
        "print(2 * int(open('/dev/stdin').read()))\nquit()",
        "import os, io\nread = io.BytesIO(os.read(0, os.fstat(0).st_size)).readline\nprint(2 * int(read()))",
        "import sys, io\nout = sys.stdout = io.StringIO()\nprint(2 * int(input()))\nsys.__stdout__.write(out.getvalue())",
        "import sys, threading\nthreading.stack_size(1 << 27)\ndef main(): print(2 * int(input()))\n"
        "threading.Thread(target=main).start()",
        "def f(n): return n and 2 + f(n - 1)\nprint(f(30_000) - f(30_000) + f(int(input())))",
        "import asyncio\nasync def main(): print(2 * int(input()))\nasyncio.run(main())",
        "import atexit\natexit.register(lambda: print(6))",
        "import os\nos.path.abspath(__file__)\nprint(6)",
        "from resource import *\nsetrlimit(RLIMIT_STACK, (RLIM_INFINITY, RLIM_INFINITY))\nprint(6)",
        "import sys\nprint(2 * int(input()))\nsys.stdout.close()",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nprint(2 * A(int(input())).x)",
    ],
)
def test_programs_read_and_write_in_all_ways(program: str) -> None:
    assert score(program, {"inputs": ["3\n"], "outputs": ["6"]}) == 1.0


@pytest.mark.parametrize("program", ["print(6)\nexit(1)", "print(6)\n1 / 0", "print(6)\nimport os\nos.abort()"])
def test_a_program_that_fails_after_its_output_is_wrong(program: str) -> None:
    assert score(program, {"inputs": [""], "outputs": ["6"]}) == 0.0
