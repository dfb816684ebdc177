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
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


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
