"""`quintet examples`: the examples of the repository, which the installed package has, too."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from quintet.cli.example_files import EXAMPLES, example_lines, examples_directory
from quintet.errors import ConfigError, did_you_mean

app = typer.Typer(invoke_without_command=True, help="List the examples, or copy one.")


@app.callback()
def examples(context: typer.Context) -> None:
    """List the examples, a line each; all commands take their paths, as in `quintet plan examples/native/arm.yaml`."""
    if context.invoked_subcommand is not None:
        return
    lines = example_lines()
    width = max(map(len, lines))
    for name, line in lines.items():
        print(f"{EXAMPLES}/{name:<{width}}  {line}")


@app.command()
def copy(
    name: Annotated[str, typer.Argument(help="Example, for instance native/frozenlake.yaml.")],
    directory: Annotated[str, typer.Argument(help="Directory to copy to.")] = ".",
) -> None:
    """Copy an example, and the files that belong to it, into a directory."""
    wanted = name.removeprefix(f"{EXAMPLES}/")
    if wanted not in (names := example_lines()):
        hint = f"{did_you_mean(wanted, names, '{}')} `quintet examples` lists all".lstrip()
        raise ConfigError(f"there is no example {name}", key="NAME", value=name, hint=hint)
    target = Path(directory).expanduser()
    sources = list(_with_companions(examples_directory() / wanted))
    taken = [target / source.name for source in sources if os.path.lexists(target / source.name)]
    if taken:
        raise ConfigError(f"{taken[0]} exists", key="DIRECTORY", value=directory, hint="choose another directory")
    target.mkdir(parents=True, exist_ok=True)
    for source in sources:
        _copy(source, target / source.name)
        print(target / source.name)


def _copy(source: Path, copied: Path) -> None:
    """Copy a file or directory to a path at which there is nothing, also no link: nothing is written through one."""
    if source.is_dir():
        shutil.copytree(source, copied)
        return
    with source.open("rb") as reader, copied.open("xb") as writer:
        shutil.copyfileobj(reader, writer)
    shutil.copymode(source, copied)


def _with_companions(path: Path) -> Iterator[Path]:
    """Yield an example, files of the same name, the environments of a script, and the directories of the files that a
    defaults list names."""
    yield path
    if path.is_dir():
        return
    companions = {*path.parent.glob(f"{path.stem}.*"), *path.parent.glob("env_config.yaml")}
    yield from sorted(companions - {path})
    if "\ndefaults:" in f"\n{path.read_text(encoding='utf-8')}":
        yield from (other for other in sorted(path.parent.iterdir()) if other.is_dir())
