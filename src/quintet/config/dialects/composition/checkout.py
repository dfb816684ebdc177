"""The configuration file of a trainer in the checkout around a script, which `@hydra.main` in its module names, and the
trainer's code, whose text tells what releases and forks do without a key for it. Nothing of it is executed."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from quintet.config.dialects.composition.dataclass_defaults import class_tables
from quintet.config.dialects.release_tables import Table

HYDRA_MAIN = re.compile(r"^@hydra\.main\(([^)]*)\)", re.MULTILINE)
OPTION = re.compile(r"""config_(path|name)\s*=\s*["']([^"']+)["']""")
COMMENT = re.compile(r"^\s*#.*$", re.MULTILINE)
TRAINER_IMPORT = re.compile(r"^\s*from ([\w.]+) import (?:\([^)]*Trainer|.*Trainer)", re.MULTILINE)
TRAINING_LOOP, CHECKS = "def fit(", "def _validate_config("
ACTOR, ALGORITHMS = "verl/workers/*actor/dp_actor.py", "core_algos.py"
"""Modules with the loss of verl's policy, in its package and beside its trainer."""
MAX_PROGRAM = 1 << 20
"""Bytes of a program that is searched."""
MAX_PARENTS = 6
"""Directories around a script that are searched for the trainer."""


def trainer_file(module: str, script: Path) -> Path | None:
    """Return the file that a trainer takes by default in the checkout around a script; None if there is none.

    `module` is that of `-m MODULE`, or a program `DIRECTORY/FILE.py`.
    """
    program = _program(module)
    programs = (directory / program for directory in program_directories(script, program))
    return next(filter(None, map(_default_file, programs)), None)


def trainer_files(module: str, script: Path, config: Path | None) -> tuple[Path, ...]:
    """Return the files of a trainer in the checkout around a script: its default, and the one that the run takes if it
    is beside that."""
    default = trainer_file(module, script)
    if default is None:
        return ()
    is_beside = config is not None and config.resolve().parent == default.resolve().parent
    return (default, config) if config is not None and is_beside else (default,)


def package_directory(module: str, script: Path) -> Path | None:
    """Return the directory with the package of a trainer in the checkout around a script; None if there is none."""
    program = _program(module)
    return next((each for each in program_directories(script, program) if (each / program).is_file()), None)


def trainer_code(module: str, found: Path) -> Mapping[str, str]:
    """Return the code, without comments, of the `trainer` that a module starts in the directory of its package, of the
    module with its `checks` of a configuration, and of the `objective` of its policy; without those not found."""
    packages = (found, found / "verl")
    modules = [*_trainer_modules(found / _program(module), packages)]
    trainer, checks = (next((each for each in modules if name in each[1]), None) for name in (TRAINING_LOOP, CHECKS))
    code = {name: each[1] for name, each in (("trainer", trainer), ("checks", checks)) if each is not None}
    actor = next((file for package in packages for file in sorted(package.glob(ACTOR))), None)
    if actor is not None and trainer is not None and (trainer[0].parent / ALGORITHMS).is_file():
        code["objective"] = _read_code(actor) + _read_code(trainer[0].parent / ALGORITHMS)
    return code


def class_defaults(file: Path, patterns: Iterable[str], classes: Mapping[str, str]) -> Mapping[str, Table]:
    """Return the defaults of configurations, by their names, from classes in the checkout around a file, if any."""
    around = (Path(), *[*file.resolve().parents][:MAX_PARENTS])
    tables = (class_tables(directory, patterns, classes) for directory in around)
    return next(filter(None, tables), {})


def _trainer_modules(program: Path, packages: tuple[Path, ...]) -> Iterator[tuple[Path, str]]:
    """Yield a program, the modules from which it imports a trainer, those of its base class, and so on, with code."""
    files = [program]
    for file in files:
        code = _read_code(file)
        yield file, code
        for name in TRAINER_IMPORT.findall(code)[: MAX_PARENTS - len(files)]:
            path = f"{name.strip('.').replace('.', '/')}.py"
            places = (file.parent,) if name.startswith(".") else packages
            files += [place / path for place in places if (place / path).is_file() and place / path not in files]


def _read_code(file: Path) -> str:
    if not file.is_file() or file.stat().st_size > MAX_PROGRAM:
        return ""
    return COMMENT.sub("", file.read_text(encoding="utf-8", errors="replace"))


def _program(module: str) -> str:
    """Return the path of a module; a program `DIRECTORY/FILE.py` is its own."""
    return module if module.endswith(".py") else f"{module.replace('.', '/')}.py"


def is_trainer_file(path: Path) -> bool:
    """Return whether a program beside its directory takes the file by default."""
    programs = path.resolve().parent.parent.glob("*.py")
    return any(file is not None and file.resolve() == path.resolve() for file in map(_default_file, programs))


def program_directories(script: Path, program: str) -> Iterator[Path]:
    """Yield the directories that may have a program: those around the script, and then those in the checkout, such as
    that of a framework in a fork's directory `verl`."""
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
