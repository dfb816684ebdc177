"""Default values of dataclasses in Python files, read from their syntax trees; nothing of them is executed."""

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.config.dialects.release_tables import ANY_NAME, Table, leaves

MAX_FILE = 1 << 20
"""Bytes of a module that is read."""
MAX_DEPTH = 12
"""Classes within each other."""
NAMED_SECTIONS = re.compile(r"Dict\[str, (\w+)\]")
"""Annotation of a field with sections of a class that the user names."""
SYNTAX_ERRORS = (SyntaxError, ValueError, RecursionError, MemoryError)
"""Errors of `ast.parse` for a text that is no Python, or nests too deep."""


@dataclass(frozen=True, slots=True)
class _Scope:
    """Place from which a class is named: its module, and the number of classes that may be within it."""

    module: Path
    depth: int = MAX_DEPTH


class Dataclasses:
    """Dataclasses of modules. Of several classes of a name, that of the same module counts, then that of the first."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.classes: dict[str, dict[Path, ast.ClassDef]] = {}
        for file in files:
            for node in _statements(file):
                if isinstance(node, ast.ClassDef):
                    self.classes.setdefault(node.name, {})[file] = node

    def table(self, name: str) -> Table:
        """Return the default values of a class by dotted key; empty if there is no such class."""
        return dict(leaves(self._tree(name, _Scope(Path())))) if name in self.classes else {}

    def _tree(self, name: str, scope: _Scope) -> dict[str, Any]:
        """Return the defaults of a class, those of its bases first."""
        of_name = self.classes[name]
        module = scope.module if scope.module in of_name else next(iter(of_name))
        tree: dict[str, Any] = {}
        if scope.depth == 0:
            return tree
        inner, node = _Scope(module, scope.depth - 1), of_name[module]
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in self.classes:
                tree |= self._tree(base.id, inner)
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.value is not None:
                tree |= self._field(field.target.id, field.annotation, field.value, inner)
        return tree

    def _field(self, name: str, annotation: ast.expr, default: ast.expr, scope: _Scope) -> dict[str, Any]:
        named = NAMED_SECTIONS.search(ast.unparse(annotation))
        if named and named[1] in self.classes:
            return {name: {ANY_NAME: self._tree(named[1], scope)}}
        value = self._value(default, scope)
        return {} if value is NotImplemented else {name: value}

    def _value(self, node: ast.expr, scope: _Scope) -> Any:
        """Return a value, a tree for an object of a class, or NotImplemented for what has to be executed."""
        if isinstance(node, ast.Lambda):
            return self._value(node.body, scope)
        if isinstance(node, ast.Call):
            named = {word.arg: word.value for word in node.keywords if word.arg}
            if _name(node.func) != "field":
                return self._object(node.func, named, scope)
            if "default_factory" in named:
                return self._object(named["default_factory"], {}, scope)
            return self._value(named["default"], scope) if "default" in named else NotImplemented
        try:
            value = ast.literal_eval(node)
        except SYNTAX_ERRORS:
            return NotImplemented
        return list(value) if isinstance(value, tuple) else value

    def _object(self, factory: ast.expr, fields: Mapping[str, ast.expr], scope: _Scope) -> Any:
        """Return what a class or a function without arguments returns."""
        name = _name(factory)
        if isinstance(factory, ast.Lambda):
            return self._value(factory.body, scope)
        if name in ("list", "dict") and not fields:
            return [] if name == "list" else {}
        if name not in self.classes:
            return NotImplemented
        values = {key: self._value(value, scope) for key, value in fields.items()}
        return self._tree(name, scope) | {key: value for key, value in values.items() if value is not NotImplemented}


def class_tables(directory: Path, patterns: Iterable[str], classes: Mapping[str, str]) -> dict[str, Table]:
    """Return the defaults of configurations, by the name of each, from its class in the files of a directory."""
    files = sorted({file for pattern in patterns for file in directory.glob(pattern)})
    dataclasses = Dataclasses(files)
    return {name: table for name, each in classes.items() if (table := dataclasses.table(each))}


def _name(node: ast.expr) -> str:
    """Return the name of a class or function, without that of its module; empty for any other expression."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _statements(file: Path) -> list[ast.stmt]:
    if not file.is_file() or file.stat().st_size > MAX_FILE:
        return []
    try:
        return ast.parse(file.read_text(encoding="utf-8", errors="replace")).body
    except SYNTAX_ERRORS:
        return []
