"""If these fail, something that a model, a file or the network says could be executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "quintet"
BANNED_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
CONFINED = SRC / "sandbox" / "program_worker.py"
"""Runs programs of models, after confining its process."""
UNSAFE_LOADERS = {"yaml.full_load", "yaml.unsafe_load", "torch.hub.load", "torch.jit.load"}
UNSAFE_NAMES = UNSAFE_LOADERS | {"torch.load", "yaml.load", "os.system", "numpy.load", "torch.hub"}


def faults(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (f"import {a.name}" for a in node.names if a.name.split(".")[0] in BANNED_MODULES)
        elif isinstance(node, ast.ImportFrom):
            yield from import_faults(node)
        elif isinstance(node, ast.Call):
            yield from call_faults(node)
        elif isinstance(node, ast.ExceptHandler):
            yield from handler_faults(node)


SAFE_LOADERS = ("yaml.SafeLoader", "getattr(yaml, 'CSafeLoader', yaml.SafeLoader)")


def import_faults(node: ast.ImportFrom) -> Iterator[str]:
    """Banned modules, and names by which a banned call would pass unseen."""
    module = node.module or ""
    if module.split(".")[0] in BANNED_MODULES:
        yield f"from {module}"
    yield from (f"from {module} import {a.name}" for a in node.names if f"{module}.{a.name}" in UNSAFE_NAMES)


def call_faults(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
    if name in BANNED_CALLS or name in UNSAFE_LOADERS:
        yield name
    if name.endswith(("np.load", "numpy.load")) and keywords.get("allow_pickle", "False") != "False":
        yield "numpy.load with allow_pickle"
    if name == "torch.load" and keywords.get("weights_only") != "True":
        yield "torch.load without weights_only=True"
    loader = keywords.get("Loader", ast.unparse(node.args[1]) if len(node.args) > 1 else "")
    if name in {"yaml.load", "yaml.compose"} and loader not in SAFE_LOADERS:
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


def test_nothing_executes_what_it_is_given() -> None:
    by_file = {path: list(faults(path.read_text())) for path in SRC.rglob("*.py")}
    assert CONFINED in by_file
    assert {path: names for path, names in by_file.items() if names} == {CONFINED: ["exec", "compile"]}


def test_only_the_command_line_prints() -> None:
    others = [path for path in SRC.rglob("*.py") if path.relative_to(SRC).parts[0] != "cli"]
    assert others
    assert not [path for path in others if has_print(path.read_text())]


def has_print(source: str) -> bool:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(x)",
        "from torch import load",
        "eval(y)",
        "run(z, shell=True)",
        "yaml.full_load(x)",
        "yaml.load(x, Loader=yaml.Loader)",
        "np.load(x, allow_pickle=True)",
        "model(trust_remote_code=True)",
        "try:\n    a\nexcept Exception:\n    pass",
    ],
)
def test_the_lint_sees_what_it_bans(source: str) -> None:
    assert len(list(faults(source))) == 1
