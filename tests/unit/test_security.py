"""If these fail, something that a model, a file or the network says could be executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "quintet"
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}


def faults(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {a.name}" for a in node.names if a.name.split(".")[0] in BANNED_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in BANNED_MODULES:
            yield f"from {node.module}"
        elif isinstance(node, ast.Call):
            yield from call_faults(node)
        elif isinstance(node, ast.ExceptHandler):
            yield from handler_faults(node)


def call_faults(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
    if name in BANNED_CALLS:
        yield name
    if name == "torch.load" and keywords.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    if name in {"yaml.load", "yaml.compose"} and keywords.get("Loader") != "yaml.SafeLoader":
        yield f"{name} without SafeLoader"
    if keywords.get("shell") == "True" or name == "os.system":
        yield "a shell"
    if keywords.get("trust_remote_code") == "True":
        yield "trust_remote_code=True"


def handler_faults(node: ast.ExceptHandler) -> Iterator[str]:
    """A broad handler must hand the error on, as an exception or as data."""
    broad = node.type is None or ast.unparse(node.type) in {"Exception", "BaseException"}
    if broad and not any(isinstance(n, ast.Raise | ast.Return) for n in ast.walk(node)):
        yield "a broad except that hides"


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_nothing_executes_what_it_is_given(path: Path) -> None:
    assert list(faults(path.read_text())) == []


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_only_the_command_line_prints(path: Path) -> None:
    if path.relative_to(SRC).parts[0] == "cli":
        return
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    assert not [n for n in calls if ast.unparse(n.func) == "print"]


def test_the_lint_sees_what_it_bans() -> None:
    source = "import pickle\ntorch.load(x)\neval(y)\nrun(z, shell=True)\ntry:\n    a\nexcept Exception:\n    pass\n"
    assert len(list(faults(source))) == 5
