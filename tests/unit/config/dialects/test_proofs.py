"""If these fail, a key counts as honoured and no test shows its effect, or a test claims to prove a key that is none.

A test names the keys that it proves: `@pytest.mark.proves("verl", "data.shuffle", …)`. If it is parametrised by a table
of keys, the arguments are an expression over that table.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path

from quintet.config.dialects.ledger import load_keys
from quintet.config.dialects.registry import DIALECTS

TESTS = Path(__file__).parents[3]
Proof = tuple[str, str]
"""Framework and key."""


def key_names(*, honoured: bool) -> set[Proof]:
    names = set()
    for framework in DIALECTS:
        for path in (files("quintet.config.dialects") / framework / "keys").iterdir():
            specs = load_keys(framework, path.name.removesuffix(".yaml"))
            names |= {(framework, spec.key) for spec in specs if not honoured or spec.state == "honoured"}
    return names


@cache
def proofs(*, tables: bool) -> frozenset[Proof]:
    """The keys that tests name in text, or by an expression over a table."""
    found: set[Proof] = set()
    for path in TESTS.rglob("test_*.py"):
        source = path.read_text(encoding="utf-8")
        if "mark.proves(" in source:
            for function in ast.walk(ast.parse(source)):
                if isinstance(function, ast.FunctionDef):
                    found.update(_proofs_of(function, path, tables=tables))
    return frozenset(found)


def _proofs_of(function: ast.FunctionDef, path: Path, *, tables: bool) -> Iterator[Proof]:
    for call in function.decorator_list:
        if not (isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.mark.proves"):
            continue
        literal = all(isinstance(argument, ast.Constant) for argument in call.args)
        if literal and not tables:
            framework, *names = (str(ast.literal_eval(argument)) for argument in call.args)
            yield from ((framework, name) for name in names)
        elif not literal and tables:
            assert str(path.parent) in sys.path, f"{path}: a table of keys belongs beside this file"
            marks = getattr(import_module(path.stem), function.name).pytestmark
            yield from ((mark.args[0], key) for mark in marks if mark.name == "proves" for key in mark.args[1:])


def test_every_honoured_key_is_proved_by_a_test() -> None:
    proved = proofs(tables=False) | proofs(tables=True)
    # VAGEN runs on verl and takes its keys
    proved |= {("vagen", key) for framework, key in proved if framework == "verl"}
    assert sorted(key_names(honoured=True) - proved) == []


def test_every_key_named_as_proved_is_honoured() -> None:
    assert sorted(proofs(tables=False) - key_names(honoured=True)) == []
