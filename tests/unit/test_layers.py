"""If these fail, a package depends on one above it, or modules on each other, and no part can be tested alone."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "quintet"
LAYERS = [
    ("arrow_values", "cache_directory", "relations", "expressions", "package_files", "loopback"),
    ("reward_sum", "sampling"),
    ("errors", "hardware", "loading_lock", "records", "seeds", "trace"),
    ("contained_files", "embodied_records", "file_formats", "shared_environment"),
    ("registry",),
    ("sandbox", "kernels"),
    ("config",),
    ("algorithms",),
    ("envs", "rewards"),
    ("tools",),
    ("data",),
    ("policies",),
    ("tracking",),
    ("diagnosis",),
    ("rollout",),
    ("training",),
    ("runtime",),
    ("pipelines",),
    ("viewer",),
    ("cli",),
    ("__main__",),
]
"""Modules and packages of `quintet` from the bottom up; each imports only from lines above its own."""
LAYERS_WITHIN: Mapping[str, list[tuple[str, ...]]] = {
    "quintet.config": [
        ("dotted", "divisors", "capabilities", "torchrun"),
        ("native", "deprecation", "model_locations"),
        ("schema",),
        ("problems", "yaml_reader", "tool_files", "interaction_files"),
        ("composed",),
        ("yaml_writer",),
        ("plan",),
        ("checks",),
        ("fit", "key_states"),
        ("dialects", "run_name", "translate", "validation"),
        ("compose",),
    ],
    "quintet.runtime": [
        ("device", "dtypes", "groups", "memory", "openmp_waiting", "process_settings", "server_process", "signals"),
        ("calls",),
        ("engines",),
        ("learners",),
        ("embodied", "env_hosts"),
        ("judge_servers", "profiler", "worker", "worker_process"),
        ("controller", "components", "reward_scorer", "run_checkpoint"),
        ("http_service",),
        ("serving", "env_service"),
        ("run_registration", "ray_cluster"),
    ],
}
"""The same for the parts of a package. Parts on one line may import each other; import cycles are refused anyway."""
UPWARD = {("judge_servers", "serving")}
"""Parts that import one from a line above: a run starts the servers of its judges."""


@cache
def modules() -> Mapping[str, Path]:
    """Every module and package under its dotted name; a package is its `__init__.py`."""
    files = {path: path.relative_to(SRC.parent).with_suffix("") for path in sorted(SRC.rglob("*.py"))}
    return {".".join(p.parts).removesuffix(".__init__"): path for path, p in files.items()}


def imports(path: Path) -> Iterator[str]:
    """Every module imported in a file, also inside functions and for types alone, and the packages around them."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            named = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules() else str(node.module) for name in named]
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))


@cache
def graph() -> Mapping[str, frozenset[str]]:
    return {name: frozenset(imports(path)) & modules().keys() - {name} for name, path in modules().items()}


def cycles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    results: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                results.append(sorted(component))

    for node in edges:
        if node not in index:
            visit(node)
    return results


def part(package: str, name: str, parts: Collection[str]) -> str:
    """Return which of the `parts` a module is in; otherwise its name below the package."""
    rest = name.removeprefix(f"{package}.")
    return max((each for each in parts if f"{rest}.".startswith(f"{each}.")), key=len, default=rest)


def test_no_module_imports_itself_through_others() -> None:
    """A cycle is none the better for being for types, or inside a function, or by way of a package's `__init__.py`."""
    assert cycles({"a": ["b"], "b": ["c"], "c": ["b"]}) == [["b", "c"]]
    listed = cycles(graph())
    assert not listed, "import cycles:\n" + "\n".join(", ".join(names) for names in listed)


@pytest.mark.parametrize("package", ["quintet", *LAYERS_WITHIN])
def test_parts_of_a_package_import_only_from_lower_layers(package: str) -> None:
    layers = LAYERS if package == "quintet" else LAYERS_WITHIN[package]
    level = {part: number for number, parts in enumerate(layers) for part in parts}
    divided = {f"{package}.{each.rpartition('.')[0]}" for each in level if "." in each}
    edges = {
        (part(package, name, level), part(package, other, level)): f"{name} imports {other}"
        for name, others in graph().items()
        for other in others - divided
        if name.startswith(f"{package}.") and other.startswith(f"{package}.")
    }
    unlisted = {part for edge in edges for part in edge} - level.keys()
    assert not unlisted, f"add {unlisted} to the layers of {package}"
    same_line_allowed = package != "quintet"
    upward = [
        line
        for (own, other), line in sorted(edges.items())
        if own != other and (own, other) not in UPWARD and level[other] + (not same_line_allowed) > level[own]
    ]
    assert not upward, "\n".join(upward)


def test_nothing_that_the_configuration_imports_needs_torch() -> None:
    """Not even inside a function: `quintet plan` works without a model in memory."""
    todo = [name for name in graph() if name.startswith("quintet.config")]
    reached = set[str]()
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += graph()[name]
            heavy = {"torch", "ray", "numpy", "transformers"} & set(imports(modules()[name]))
            assert not heavy, f"{name} imports {heavy}"
    assert "quintet.errors" in reached


@pytest.mark.parametrize("line", ["from quintet import cli", "import quintet.cli.main", "from quintet.cli import main"])
def test_each_way_to_import_is_seen(tmp_path: Path, line: str) -> None:
    (tmp_path / "a.py").write_text(f"def f():\n    {line}\n")
    assert "quintet.cli" in imports(tmp_path / "a.py")


def test_modules_are_named_after_what_they_contain() -> None:
    vague = {"utils.py", "helpers.py", "common.py", "misc.py", "base.py"}
    assert not [path for path in SRC.rglob("*.py") if path.name in vague]


def test_pytest_can_import_every_test_file() -> None:
    """Outside packages, pytest imports a test file by its name alone, so two of one name are an error."""
    tests = Path(__file__).parents[1]
    paths = [path for path in tests.rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    names = Counter(path.name for path in paths)
    assert not [path for path in paths if names[path.name] > 1]
