"""Files of the examples: in the installed package, or beside the sources."""

from __future__ import annotations

from pathlib import Path

import quintet
from quintet.errors import MachineError

EXAMPLES = "examples"


def example_lines() -> dict[str, str]:
    """Return the examples by path below the directory, each with a line about it."""
    from quintet.package_files import read_yaml

    return dict(read_yaml(__file__))


def examples_directory() -> Path:
    """Return the directory of the examples.

    Raises:
        MachineError: it is missing, because only the package was copied.
    """
    package = Path(quintet.__file__).parent
    for directory in (package / EXAMPLES, package.parents[1] / EXAMPLES):
        if (directory / "native").is_dir():
            return directory
    raise MachineError("this installation has no examples", "install the wheel, or use a clone of the repository")


def with_installed_examples(text: str) -> str:
    """Return a path, or `key=path`, with the installed example if it names one that the current directory lacks.

    >>> with_installed_examples("name=words")
    'name=words'
    """
    key, sign, value = text.rpartition("=")
    path = Path(value)
    if path.parts[:1] != (EXAMPLES,) or path.exists():
        return text
    try:
        installed = examples_directory().joinpath(*path.parts[1:])
    except MachineError:
        return text
    return f"{key}{sign}{installed}" if installed.exists() else text
