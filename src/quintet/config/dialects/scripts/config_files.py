"""The configuration file of a trainer that a script starts: named by an option, or the trainer's own in a checkout."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

from quintet.config.dialects.composition.checkout import program_directories, trainer_file
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.scripts.trainer_calls import TrainerCall

YAML = (".yaml", ".yml")
OWN_DIRECTORY = "config"
"""Directory of the frameworks' own files, beside the modules of their trainers."""


class ConfigFiles:
    """The places in which the configuration file of a trainer can be, for a script at `script`."""

    def __init__(self, script: Path, call: TrainerCall) -> None:
        self.script, self.module = script, call.module.removesuffix(".py").replace("/", ".")
        self.is_program = call.module.endswith(".py")
        files = DIALECTS[call.dialect].program_files
        self.default, self.keys = files.get(self.module) or files.get(self.module.rpartition(".")[2]) or ("", _NO_KEYS)
        if call.is_of_fork:
            self.default, self.keys = str(trainer_file(call.module, script) or ""), _NO_KEYS
        """The file that the trainer uses unless another one is named, and the keys that it sets."""

    def name(self, name: str | None) -> str:
        """Return the name of the file, empty if none is named and the trainer has none."""
        name = name or PurePath(self.default).name
        return name if name.endswith(YAML) or not name else f"{name}.yaml"

    def candidates(self, name: str | None, directory: str | None) -> list[Path]:
        """Return the paths that the file can have, the first one that exists counts.

        Hydra takes a module's own file from the directory `config` beside it, unless the module names another
        directory. The module is in the working directory or in a checkout around the script.
        """
        file = self.name(name)
        if not file:
            return []
        if name is None and directory is None and not self.is_program and self.directory == ".":
            return [*self._own_files(file)]
        places = self.directory if directory is None else directory
        roots = (self.script.parent, Path(), self._program.parent, self.script.parent.parent)
        files = [Path(os.path.normpath(root / places / file)) for root in roots]
        return files if self.is_program else [*files, *self._own_files(file, directory or OWN_DIRECTORY)]

    def has_directory(self, directory: str) -> bool:
        """Whether a directory that an option names exists, or is of the framework's checkout, which may not be here."""
        is_own = os.path.normpath(directory) == OWN_DIRECTORY or self.module.split(".")[0] in PurePath(directory).parts
        if is_own and not self.is_program:
            return True
        return any(file.parent.is_dir() for file in self.candidates("any", directory))

    @property
    def directory(self) -> str:
        """The directory of the file that the trainer uses by default."""
        return str(PurePath(self.default).parent)

    @property
    def _program(self) -> Path:
        return Path(f"{self.module.replace('.', '/')}.py")

    def _own_files(self, file: str, directory: str = OWN_DIRECTORY) -> Iterator[Path]:
        """Yield the paths of a file in a directory beside the trainer's module, in the working directory, in the
        directories around the script, and in those of its checkout."""
        roots = [Path(), *self.script.parents]
        if not self.script.is_absolute():
            roots += self.script.absolute().parent.parents
        roots += program_directories(self.script, str(self._program))
        for root in roots:
            if (root / self._program).is_file():
                yield Path(os.path.normpath(root / self._program.parent / directory / file))


_NO_KEYS: Mapping[str, Any] = {}
