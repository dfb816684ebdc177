"""Docstrings of the fields of configuration sections.

They are read when somebody asks for documentation. Pydantic's `use_attribute_docstrings` would tokenize the source of
every section whenever a command starts, which takes a fifth of a second.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from inspect import cleandoc, getsource

from pydantic import BaseModel


@cache
def field_docs(section: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below each field of a section, inherited fields included."""
    docs = ((name, _field_doc(section, name)) for name in section.model_fields)
    return {name: doc for name, doc in docs if doc is not None}


def _field_doc(section: type[BaseModel], name: str) -> str | None:
    """Return the docstring of a field in the class that defines it last."""
    described = section.model_fields[name].description
    bodies = (_class_docs(base.__module__).get(base.__qualname__, {}) for base in section.__mro__)
    return described or next((docs[name] for docs in bodies if name in docs), None)


@cache
def _class_docs(module: str) -> dict[str, dict[str, str | None]]:
    """Return the fields of each class of a module with their docstrings; none if there is no source, as in a shell."""
    try:
        tree = ast.parse(getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError, SyntaxError):
        return {}
    return {name: dict(_documented(node)) for name, node in _classes(tree, "")}


def _classes(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.ClassDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield f"{prefix}{child.name}", child
            yield from _classes(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _classes(child, f"{prefix}{child.name}.<locals>.")
        else:
            yield from _classes(child, prefix)


def _documented(node: ast.ClassDef) -> Iterator[tuple[str, str | None]]:
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            text = after.value.value if is_text else None  # type: ignore[union-attr]
            yield statement.target.id, cleandoc(text) if isinstance(text, str) else None
