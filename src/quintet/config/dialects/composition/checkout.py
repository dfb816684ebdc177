"""The configuration file of a trainer in the checkout around a script, which `@hydra.main` in its module names."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

HYDRA_MAIN = re.compile(r"^@hydra\.main\(([^)]*)\)", re.MULTILINE)
OPTION = re.compile(r"""config_(path|name)\s*=\s*["']([^"']+)["']""")
MAX_PROGRAM = 1 << 20
"""Bytes of a program that is searched."""
MAX_PARENTS = 6
"""Directories around a script that are searched for the trainer."""


def trainer_file(module: str, script: Path) -> Path | None:
    """Return the file that a trainer takes by default in the checkout around a script; None if there is none.

    `module` is that of `-m MODULE`, or a program `DIRECTORY/FILE.py`.
    """
    program = module if module.endswith(".py") else f"{module.replace('.', '/')}.py"
    programs = (directory / program for directory in _directories(script, program))
    return next(filter(None, map(_default_file, programs)), None)


def trainer_files(module: str, script: Path, config: Path | None) -> tuple[Path, ...]:
    """Return the files of a trainer in the checkout around a script: its default, and the one that the run takes if it
    is beside that."""
    default = trainer_file(module, script)
    if default is None:
        return ()
    is_beside = config is not None and config.resolve().parent == default.resolve().parent
    return (default, config) if config is not None and is_beside else (default,)


def is_trainer_file(path: Path) -> bool:
    """Return whether a program beside its directory takes the file by default."""
    programs = path.resolve().parent.parent.glob("*.py")
    return any(file is not None and file.resolve() == path.resolve() for file in map(_default_file, programs))


def _directories(script: Path, program: str) -> Iterator[Path]:
    """Yield the directories that may have a program: those around the script, and then those in the checkout."""
    around = [*script.resolve().parents][:MAX_PARENTS]
    yield Path()
    yield from around
    root = next((directory for directory in around if (directory / ".git").exists()), Path())
    for depth in ("*", "*/*"):
        for file in sorted(root.glob(f"{depth}/{program}")):
            yield Path(str(file).removesuffix(program))


def _default_file(program: Path) -> Path | None:
    """Return the file that `@hydra.main` in a program names."""
    if not program.is_file() or program.stat().st_size > MAX_PROGRAM:
        return None
    decorator = HYDRA_MAIN.search(program.read_text(encoding="utf-8", errors="replace"))
    options = dict(OPTION.findall(decorator[1])) if decorator else {}
    if "name" not in options:
        return None
    name = f"{options['name'].removesuffix('.yaml')}.yaml"
    file = Path(os.path.normpath(program.parent / options.get("path", "") / name))
    return file if file.is_file() else None
