"""If these fail, a room knows of a room above it, and parts can't be used or tested alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "quintet"
LAYERS = [
    ("errors", "records"),
    ("registry",),
    ("processes", "kernels"),
    ("config",),
    ("algorithms",),
    ("envs", "rewards"),
    ("data",),
    ("policies",),
    ("tracking",),
    ("rollout",),
    ("training",),
    ("runtime",),
    ("pipelines",),
    ("cli",),
    ("__main__",),
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def imports(path: Path) -> Iterator[str]:
    """Every module named in the file, also inside functions; `from quintet import cli` names `quintet.cli`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides its room"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names if is_module(node.module, alias.name))


def is_module(package: str | None, name: str) -> bool:
    place = SRC.parent.joinpath(*str(package).split("."), name)
    return place.is_dir() or place.with_suffix(".py").is_file()


def room(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda p: str(p.relative_to(SRC)))
def test_each_room_imports_only_from_below(path: Path) -> None:
    if path == SRC / "__init__.py":
        return
    own = room(path)
    for module in imports(path):
        parts = module.split(".")
        if parts[0] == "quintet" and len(parts) > 1 and parts[1] != own:
            assert LEVEL[parts[1]] < LEVEL[own], f"{own} imports {module}"


def test_nothing_that_the_configuration_reaches_names_torch() -> None:
    """Not even inside a function: what a configuration is must be known without a model in memory."""
    files, todo = set[Path](), [SRC / "config" / "__init__.py", *(SRC / "config").rglob("*.py")]
    while todo:
        path = todo.pop()
        if path in files:
            continue
        files.add(path)
        for module in imports(path):
            assert module.split(".")[0] not in {"torch", "ray", "numpy", "transformers"}, f"{path} imports {module}"
            place = SRC.parent.joinpath(*module.split("."))
            todo += [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
    assert SRC / "errors.py" in files


@pytest.mark.parametrize("line", ["from quintet import cli", "import quintet.cli.main", "from quintet.cli import main"])
def test_the_lint_sees_each_way_to_import(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.py").write_text(f"def f():\n    {line}\n")
    rooms = {module.split(".")[1] for module in imports(tmp_path / "a.py") if module.count(".")}
    assert rooms == {"cli"}


def test_the_ground_and_the_configuration_load_no_torch() -> None:
    for path in (*SRC.glob("*.py"), *(SRC / "config").rglob("*.py")):
        tree = ast.parse(path.read_text())
        top = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        names = {a.name.split(".")[0] for n in top if isinstance(n, ast.Import) for a in n.names}
        names |= {n.module.split(".")[0] for n in top if isinstance(n, ast.ImportFrom) and n.module}
        assert not names & {"torch", "ray", "numpy", "transformers"}, path


def test_rooms_have_no_drawers() -> None:
    drawers = {"utils.py", "helpers.py", "common.py", "misc.py", "base.py"}
    assert not [path for path in SRC.rglob("*.py") if path.name in drawers]
