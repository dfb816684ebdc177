"""Run the tests of the packages that changed since the merge base with `origin/main`, or with the first argument.

A changed file of `src/quintet/PACKAGE/…` runs the directory of `tests/unit` that mirrors its folder; a changed test
file runs itself; a changed script runs the unit test of its name. A changed module of `tests/support` runs the tests
that import or start it, also through other modules there; a changed `conftest.py` runs the tests below it that name one
of its fixtures. `test_layers.py` and `test_docs.py` always run.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALWAYS = ("tests/unit/test_layers.py", "tests/unit/test_docs.py")
FIXTURE = re.compile(r"^@pytest\.fixture.*\ndef (\w+)", re.MULTILINE)


def changed_files(base: str) -> list[str]:
    """Return the files that differ from the merge base with `base`, and those that git does not track yet."""
    merge_base = _git("merge-base", base, "HEAD")[0]
    return [*_git("diff", "--name-only", merge_base), *_git("ls-files", "--others", "--exclude-standard")]


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()


def select_tests(files: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the test files and directories to run for changed files, without any below another."""
    tests = {test for file in files for test in _tests_of(Path(file), root)} | set(map(Path, ALWAYS))
    tests = {test for test in tests if (root / test).exists()}
    return sorted(str(test) for test in tests if not tests.intersection(test.parents))


def _tests_of(file: Path, root: Path) -> Iterable[Path]:
    match file.parts:
        case ["src", "quintet", *folders, name]:
            return [_mirror(folders, name, root)]
        case ["tests", "support", name]:
            return _tests_with_support(Path(name).stem, root)
        case ["tests", *_, "conftest.py"] if (root / file).exists():
            fixtures = FIXTURE.findall((root / file).read_text())
            return _tests_with(rf"\b({'|'.join(fixtures)})\b", file.parent, root)
        case ["tests", ("unit" | "parity" | "system"), *_, name] if name.startswith("test_") and name.endswith(".py"):
            return [file]
        case ["scripts", name]:
            return [Path("tests/unit/scripts") / f"test_{Path(name).stem}.py"]
    return []


def _tests_with(pattern: str, directory: Path, root: Path) -> list[Path]:
    """Return the test files below a directory in which a pattern matches."""
    tests = (root / directory).rglob("test_*.py")
    return [test.relative_to(root) for test in tests if re.search(pattern, test.read_text())]


def _tests_with_support(module: str, root: Path) -> list[Path]:
    """Return the test files that use a module of `tests/support`, or another one there that does."""
    texts = {path.stem: path.read_text() for path in (root / "tests/support").glob("*.py")}
    modules, added = {module}, {module}
    while added:
        pattern = _use_of(added)
        added = {name for name, text in texts.items() if name not in modules and re.search(pattern, text)}
        modules |= added
    return _tests_with(_use_of(modules), Path("tests"), root)


def _use_of(modules: Iterable[str]) -> str:
    """Return a pattern for imports of modules and for paths of their files."""
    names = "|".join(sorted(modules))
    return rf"\b(?:from|import) (?:tests\.support\.)?(?:{names})\b|\b(?:{names})\.py\b"


def _mirror(folders: list[str], name: str, root: Path) -> Path:
    """Return the nearest directory of `tests/unit` that mirrors the folders of a module, or the module's own test."""
    unit = Path("tests/unit")
    module_test = unit / f"test_{Path(name).stem}.py"
    for depth in range(len(folders), 0, -1):
        directory = unit.joinpath(*folders[:depth])
        if (root / directory).is_dir():
            return directory
    return module_test


def main() -> None:
    base = sys.argv[1] if len(sys.argv) > 1 else "origin/main"
    tests = select_tests(changed_files(base))
    print("tests of what changed:", *tests, flush=True)
    pytest = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile"]
    sys.exit(subprocess.run([*pytest, *tests], cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
