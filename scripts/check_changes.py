"""Run the tests of the packages that changed since the merge base with `origin/main`, or with the first argument.

A changed file of `src/quintet/PACKAGE/…` runs the directory of `tests/unit` that mirrors its folder; a changed test
file runs itself; a changed script runs the unit test of its name. `test_layers.py` and `test_docs.py` always run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALWAYS = ("tests/unit/test_layers.py", "tests/unit/test_docs.py")


def changed_files(base: str) -> list[str]:
    """Return the files that differ from the merge base with `base`, and those that git does not track yet."""
    merge_base = _git("merge-base", base, "HEAD")[0]
    return [*_git("diff", "--name-only", merge_base), *_git("ls-files", "--others", "--exclude-standard")]


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()


def select_tests(files: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the test files and directories to run for changed files, without any below another."""
    tests = {test for file in files if (test := _test_of(Path(file), root)) is not None} | set(map(Path, ALWAYS))
    return sorted(str(test) for test in tests if not tests.intersection(test.parents))


def _test_of(file: Path, root: Path) -> Path | None:
    match file.parts:
        case ["src", "quintet", *folders, name]:
            return _mirror(folders, name, root)
        case ["tests", ("unit" | "parity" | "system"), *_, name] if name.startswith("test_") and name.endswith(".py"):
            return file if (root / file).exists() else None
        case ["scripts", name]:
            test = Path("tests/unit/scripts") / f"test_{Path(name).stem}.py"
            return test if (root / test).exists() else None
    return None


def _mirror(folders: list[str], name: str, root: Path) -> Path | None:
    """Return the nearest directory of `tests/unit` that mirrors the folders of a module, or the module's own test."""
    unit = Path("tests/unit")
    module_test = unit / f"test_{Path(name).stem}.py"
    if not folders:
        return module_test if (root / module_test).exists() else None
    for depth in range(len(folders), 0, -1):
        directory = unit.joinpath(*folders[:depth])
        if (root / directory).is_dir():
            return directory
    return None


def main() -> None:
    base = sys.argv[1] if len(sys.argv) > 1 else "origin/main"
    tests = select_tests(changed_files(base))
    print("tests of what changed:", *tests, flush=True)
    pytest = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile"]
    sys.exit(subprocess.run([*pytest, *tests], cwd=ROOT, check=False).returncode)


if __name__ == "__main__":
    main()
