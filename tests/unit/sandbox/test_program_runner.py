"""If these fail, tests reject a right program because it runs in another process than they do."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from quintet.sandbox.program_runner import NoResultError, ProgramRunner, program_runner


@pytest.fixture(scope="module")
def runner() -> Iterator[ProgramRunner]:
    runner = ProgramRunner()
    yield runner
    runner.close()


CLASSES = """
class EmptyError(ValueError):
    def __init__(self, code):
        super().__init__(f"empty: {code}")
        self.code = code

class Stack:
    limit = 3
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise EmptyError(7)
        return self.items.pop()
    @property
    def top(self): return self.items[-1]
    @staticmethod
    def of(*items): return Stack(items)
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
    def __getitem__(self, index): return self.items[index]
    def __setitem__(self, index, value): self.items[index] = value
    def __contains__(self, item): return item in self.items
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __lt__(self, other): return len(self) < len(other)
    def __hash__(self): return hash(tuple(self.items))
    def __add__(self, other): return Stack(self.items + list(other))
    def __repr__(self): return f"Stack({self.items})"
    def __enter__(self): return self
    def __exit__(self, *_): self.items.clear()
    def __call__(self, n): return n + len(self)

class Numbers(list):
    def total(self): return sum(self)
"""


@pytest.mark.parametrize(
    "statements",
    [
        "s = Stack()\ns.push(1).push(2)\nassert s.pop() == 2 and s.items == [1] and len(s) == 1",
        "assert Stack([1, 2]).top == 2 and Stack.limit == 3 and Stack.of(1, 2).items == [1, 2]",
        "s = Stack()\ntry:\n    s.pop()\nexcept ValueError as error:\n    assert str(error) == 'empty: 7'\nelse:\n    assert 0",
        "try:\n    Stack().pop()\nexcept EmptyError as error:\n    assert error.code == 7\nelse:\n    assert False",
        "import unittest\nwith unittest.TestCase().assertRaises(EmptyError) as caught:\n    Stack().pop()\n"
        "assert caught.exception.code == 7",
        "s = Stack([1, 2, 3])\nassert list(s) == [1, 2, 3] and s[0] == 1 and s[1:] == [2, 3] and 2 in s and 5 not in s",
        "s = Stack([1])\ns[0] = 5\ns.items = [6]\nassert s[0] == 6 and not hasattr(s, 'nothing')",
        "assert Stack([1]) == Stack([1]) and Stack([1]) != Stack([2]) and Stack() < Stack([1]) and Stack([1]) != 1",
        "assert isinstance(Stack(), Stack) and not isinstance(3, Stack) and not isinstance(Stack(), list)",
        "assert repr(Stack([1])) == 'Stack([1])' and f'{Stack([2])}' == 'Stack([2])' and bool(Stack()) is False",
        "assert (Stack([1]) + [2]).items == [1, 2] and Stack([1])(2) == 3 and {Stack([1]): 2}[Stack([1])] == 2",
        "with Stack([1]) as s:\n    assert len(s) == 1\nassert len(s) == 0",
        "n = Numbers()\nn.append(3)\nassert n.total() == 3 and n == [3] and n != [4] and n[0] == 3",
        "def test():\n    return [Stack([n]).top for n in range(3)]\nassert test() == [0, 1, 2]",
        "class Case:\n    stack = Stack\n    def run(self): return self.stack([1]).top\nassert Case().run() == 1",
        "s = Stack([1])\nt = s\nt += [2]\nassert t.items == [1, 2] and f'{s}' == 'Stack([1])' and s.items is s.items",
        "n = Numbers([1])\nassert n + [2] == [1, 2] and Stack.of is Stack.of",
        "s = Stack([[1], [2]])\nassert max(s) == [2] and sorted(s, reverse=True) == [[2], [1]] and sum(len(x) for x in s) == 2",
    ],
)  # fmt: skip
def test_classes_of_the_program_behave_like_classes(runner: ProgramRunner, statements: str) -> None:
    assert runner.run_tests(CLASSES, statements, 10.0)


FUNCTIONS = """
import sys
from collections import Counter, OrderedDict, deque, namedtuple, defaultdict
from decimal import Decimal
from fractions import Fraction
from enum import Enum, IntEnum
import datetime
import numpy as np
Point = namedtuple("Point", "x y")
class Color(Enum):
    RED = 1
class Level(IntEnum):
    LOW = 1
counter = 0
def same(x, *args, **kwargs): return x
def named(target, operation, self, kwargs): return [target, operation, self, kwargs]
def sort(items): items.sort()
def rotate(grid): grid[:] = [list(row) for row in zip(*grid[::-1])]
def set_first(grid): grid[0][0] = 9
def clear(d): d.pop("a"); d["b"] = {"c": 1}
def apply(f, *args, **kwargs): return f(*args, **kwargs)
def compose(f, g): return lambda x: g(f(x))
def numbers(n):
    for i in range(n): yield i
def naturals():
    i = 0
    while True:
        yield i
        i += 1
def fail(kind, *args): raise kind(*args)
def array(): return np.array([[1, 2], [3, 4]])
def mean(x): return np.mean(x)
def total(node):
    result = 0
    while node: result, node = result + node.val, node.next
    return result
def reverse(node):
    previous = None
    while node: node.next, previous, node = previous, node, node.next
    return previous
def show(x): print("value", x)
def count():
    global counter
    counter += 1
async def later(x): return x + 1
def color(): return Color.RED
def decorate(f): return f
def fold(f, items):
    value = items[0]
    for item in items[1:]: value = f(value, item)
    return value
"""
LINKED = (
    "class Node:\n    def __init__(self, val, next=None): self.val, self.next = val, next\n"
    "a = Node(1, Node(2, Node(3)))\n"
)


# ruff: noqa: E501
@pytest.mark.parametrize(
    "statements",
    [
        *(f"assert same({value}) == {value} and type(same({value})) is type({value})" for value in (
            "None", "True", "3", "-10**40", "0.1", "float('inf')", "1+2j", "'a\\ud800é'", "b'a\\xff'", "(1, [2], {3: (4,)})",
            "{(1, 2): {3}}", "frozenset({1})", "range(3)", "bytearray(b'a')", "...", "slice(1, 2)", "[]", "()", "set()",
        )),
        "from collections import *\nassert same(deque([1])) == deque([1]) and same(Counter('aa')) == {'a': 2}",
        "from collections import *\nassert same(OrderedDict(a=1)) == OrderedDict(a=1) and same(defaultdict(int)) == {}",
        "from decimal import Decimal as D\nfrom fractions import Fraction as F\nassert same(D('1.50')) == D('1.5')\nassert same(F(1, 3)) == F(1, 3)",
        "import datetime as d\nassert same(d.date(2020, 1, 2)) == d.date(2020, 1, 2)\nassert same(d.timedelta(1)).days == 1",
        "p = Point(1, y=2)\nassert p.x == 1 and p == (1, 2) and same(p).y == 2 and same(p) == p",
        "assert Level.LOW == 1 and color() == Color.RED and color() is not None and Color.RED.name == 'RED'",
        "a = [3, 1, 2]\nassert sort(a) is None and a == [1, 2, 3]",
        "g = [[1, 2], [3, 4]]\nrow = g[0]\nrotate(g)\nassert g == [[3, 1], [4, 2]]",
        "g = [[1, 2], [3, 4]]\nrow = g[0]\nset_first(g)\nassert g == [[9, 2], [3, 4]] and row[0] == 9",
        "d = {'a': 1}\nclear(d)\nassert d == {'b': {'c': 1}}",
        "a = [1]\nassert same(a) is a and same([a, a])[1] is a",
        "a = [1]\na.append(a)\nb = same(a)\nassert b is a",
        "assert apply(lambda x, y: x - y, 5, y=3) == 2 and apply(len, [1, 2]) == 2 and apply(str, 5) == '5'",
        "import operator\nassert fold(operator.add, [1, 2, 3]) == 6 and fold(max, [1, 3, 2]) == 3",
        "calls = []\napply(calls.append, 5)\nassert calls == [5]",
        "assert compose(lambda x: x + 1, lambda x: x * 2)(3) == 8 and apply(compose(str, len), 123) == 3",
        "assert list(numbers(3)) == [0, 1, 2] and sum(numbers(4)) == 6 and next(naturals()) == 0",
        "import itertools\nassert list(itertools.islice(naturals(), 3)) == [0, 1, 2]",
        "assert list(map(same, [1, 2])) == [1, 2] and sorted([2, 1], key=same) == [1, 2]",
        "def numbers_here():\n    yield 1\n    yield 2\nassert apply(list, numbers_here()) == [1, 2]",
        "for kind in (ValueError, KeyError, TypeError, ZeroDivisionError, IndexError, RuntimeError):\n"
        "    try:\n        fail(kind, 'a')\n    except kind as error:\n        assert error.args == ('a',)\n    else:\n        assert False",
        "try:\n    fail(OSError, 2, 'x')\nexcept FileNotFoundError as error:\n    assert error.errno == 2",
        "try:\n    apply(lambda: 1 / 0)\nexcept ZeroDivisionError:\n    pass\nelse:\n    assert False",
        "try:\n    nothing()\nexcept NameError:\n    pass\nelse:\n    assert False",
        "import numpy as np\nassert (array() == np.array([[1, 2], [3, 4]])).all() and array().shape == (2, 2)\n"
        "assert abs(mean(np.array([1.0, 2.0])) - 1.5) < 1e-9 and np.allclose(array()[0], [1, 2])",
        "assert array() == [[1, 2], [3, 4]] and mean([1, 2]) == 1.5",
        LINKED + "assert total(a) == 6",
        LINKED + "b = reverse(a)\nassert b.val == 3 and b.next.val == 2 and b.next.next is a and a.next is None",
        "a = ListNode(1, ListNode(2))\nassert total(a) == 3 and reverse(a).val == 2 and a.next is None",
        "import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    show(5)\nassert out.getvalue() == 'value 5\\n'",
        "count()\ncount()\nassert counter == 2",
        "import asyncio\nassert asyncio.run(later(2)) == 3\nasync def test(): return await later(3)\nassert asyncio.run(test()) == 4",
        "assert named(target=1, operation=2, self=3, kwargs=4) == [1, 2, 3, 4]",
        "assert color() is Color.RED and same(color) is color",
        "def g(target, operation=0, self=0, args=0): return [target, operation, self, args]\n"
        "assert apply(g, target=1, operation=2, self=3, args=4) == [1, 2, 3, 4]",
        "assert Counter('aab')['a'] == 2 and gcd(4, 6) == 2 and isinstance(same([1]), List) is False or True",
        "import copy\nassert copy.deepcopy(same([1])) == [1] and same.__name__ == 'same' and callable(same)",
        "@decorate\ndef f(x): return x + 1\nassert f(2) == 3",
    ],
)  # fmt: skip
def test_values_arrive_as_they_are(runner: ProgramRunner, statements: str) -> None:
    assert runner.run_tests(FUNCTIONS, statements, 10.0)


def test_functions_named_like_builtins_are_tested_if_the_tests_are_about_them(runner: ProgramRunner) -> None:
    program = "def sum(items): return 7\ndef gcd(a, b): return 8\ndef abs(x): return 0\ndef f(x): return 5"
    assert runner.run_tests(program, "assert sum([1]) == 7", 10.0)
    assert runner.run_tests(program, "assert gcd(4, 6) == 8 and f(2) == 5", 10.0)
    assert runner.run_tests(program, "def check(g):\n    assert g([1]) == 7\ncheck(sum)", 10.0, subjects=["sum"])
    assert not runner.run_tests(program, "assert abs(f(2) - 4) < 1e-6", 10.0)


def test_a_function_is_called_with_plain_data(runner: ProgramRunner) -> None:
    assert runner.call("def f(a, b): return {a: (b, 10**30)}", "f", [1, [2.5]], 10.0) == {1: ([2.5], 10**30)}
    assert runner.call("class Solution:\n    def f(n): return n", "f", [3], 10.0) == 3
    assert runner.call("import numpy as np\ndef f(): return np.arange(3) * np.float64(2)", "f", [], 10.0) == [0, 2, 4]
    for program in ("def f(): return lambda: 1", "def f(): 1 / 0", "x = 1", "def f(): return open(0)", "def f(:"):
        with pytest.raises(NoResultError):
            runner.call(program, "f", [], 10.0)


def test_a_fork_server_that_has_died_is_replaced() -> None:
    first = program_runner()
    os.kill(first._server._process.pid, signal.SIGKILL)
    first._server._process.wait()
    assert program_runner().run_script("print(1)", "", 10.0).output == "1\n"
    assert program_runner() is not first


def test_what_a_runner_has_started_ends_with_it() -> None:
    runner = ProgramRunner()
    runner.close()
    with pytest.raises(OSError, match=r"Bad file descriptor|Broken pipe"):
        runner.run_script("", "", 1.0)
