"""If this fails, a user whose locale is not UTF-8 gets an error, or other text than the file has."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).parents[2] / "src/quintet"


def calls_without_encoding(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that read or write text in the encoding of the locale."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(each.arg in ("encoding", None) for each in node.keywords):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("read_text", "write_text") and isinstance(node.func, ast.Attribute):
            # the first argument of read_text is its encoding
            if len(node.args) == (name == "write_text"):
                yield node
        elif name in ("open", "fdopen") and not is_other_open(node):
            position = 0 if isinstance(node.func, ast.Attribute) and name == "open" else 1
            given = [each.value for each in node.keywords if each.arg == "mode"] or node.args[position : position + 1]
            mode = given[0].value if given and isinstance(given[0], ast.Constant) else "r" if not given else "b"
            if "b" not in str(mode):
                yield node


def is_other_open(node: ast.Call) -> bool:
    """Whether something else than a text file is opened: `os.open`, images, archives."""
    if not isinstance(node.func, ast.Attribute) or node.func.attr == "fdopen":
        return False
    owner = ast.unparse(node.func.value)
    return (
        owner in ("os", "Image", "PIL.Image", "av", "webbrowser", "gzip", "wave", "tarfile", "zipfile") or "fs" in owner
    )


def test_text_files_have_the_encoding_utf_8() -> None:
    found = [
        f"{path.relative_to(SRC)}:{node.lineno}"
        for path in sorted(SRC.rglob("*.py"))
        for node in calls_without_encoding(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, f"add encoding='utf-8': {found}"
