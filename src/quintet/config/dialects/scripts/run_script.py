"""Run scripts: the overrides that a shell script passes to a framework's trainer, with the line of each.

`python3 -m verl.trainer.main_ppo data.train_batch_size=8 …` is read and never run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quintet.config.dialects.registry import DIALECTS, FRAMEWORK_FILES, detect
from quintet.config.dialects.scripts.control_flow import ScriptCommand, commands_of
from quintet.config.dialects.scripts.expansion import Field, Shell, UnknownValue
from quintet.config.dialects.scripts.override_list import is_override_list, key_of, keys_as_tree, read_override_list
from quintet.config.yaml_reader import read_file, read_text
from quintet.errors import ConfigError, nearest

TRAINERS = {module: name for name, dialect in DIALECTS.items() for module in dialect.trainers}
"""Frameworks by the modules of their trainers."""
RAGEN_SCRIPT = "train.sh"
PRINTING = {"echo", "printf", "cat", "tee"}
PYTHON = re.compile(r"(.*/)?(python[\d.]*|torchrun|accelerate|deepspeed)")
CONFIG_OPTIONS = {
    **dict.fromkeys(("--config-path", "-cp", "--config_path"), "path"),
    **dict.fromkeys(("--config-name", "-cn", "--config_name"), "name"),
}
OVERRIDE = re.compile(r"(\+{0,2}|~)([^\s=~+'\"][^\s='\"]*)=(.*)|~[^\s=]+", re.DOTALL)
YAML, SHELL = (".yaml", ".yml"), (".sh", ".bash")

Override = tuple[str, str]
"""An override and its source `FILE:LINE`."""


@dataclass(frozen=True, slots=True)
class MissingValue:
    """An override whose value the script does not determine."""

    key: str
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key} ({self.source}): {self.reason}"


@dataclass(frozen=True, slots=True)
class RunScript:
    """Content of a run script, a list of overrides, or a YAML file: a configuration file and overrides of it."""

    config: Path | None
    words: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    """Source of each override."""
    dialect: str | None = None
    missing: tuple[MissingValue, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script exports, for `${oc.env:…}`."""
    remarks: tuple[str, ...] = ()

    def with_overrides(self, overrides: Sequence[str]) -> list[str]:
        """Return the script's overrides and then those of the command line.

        Raises:
            ConfigError: the value of a key is unknown, and the command line does not set it.
        """
        overridden = set(map(key_of, overrides))
        missing = [value for value in self.missing if value.key not in overridden]
        if missing:
            hint = f"set it on the command line: {' '.join(f'{value.key}=…' for value in missing)}"
            first = missing[0]
            raise ConfigError("\n".join(map(str, missing)), key=first.key, source=first.source, hint=hint)
        return [*self.words, *overrides]


def read_run_script(path: Path, environment: Mapping[str, str] | None = None) -> RunScript:
    """Read a run script or a list of overrides; of a YAML file, return only its path.

    Raises:
        ConfigError: the script runs no known trainer, or several; a word cannot be understood.
        MachineError: the file is missing or cannot be read.
    """
    if path.suffix in YAML:
        return RunScript(path)
    text = read_text(path).translate(dict.fromkeys([0, 0xE000, 0xE001]))
    if path.suffix not in SHELL and is_override_list(text):
        overrides = read_override_list(path, text)
        dialect = next(iter(detect(keys_as_tree(override for override, _ in overrides))), None)
        return RunScript(_env_config_beside(path) if dialect == "vagen" else None, *_columns(overrides), dialect)
    if path.suffix in SHELL or text.startswith("#!") or any(f"-m {module}" in text for module in TRAINERS):
        return _read_script(path, text, os.environ if environment is None else environment)
    return RunScript(path)


def _columns(overrides: Sequence[Override]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(override for override, _ in overrides), tuple(source for _, source in overrides)


def _env_config_beside(path: Path) -> Path | None:
    """Return VAGEN's file of environments beside a script."""
    file = path.parent / "env_config.yaml"
    return file if file.is_file() else None


@dataclass(slots=True)
class _TrainerCall:
    module: str
    dialect: str
    words: tuple[Field, ...]
    line: int
    comment_lines: tuple[int, ...]


def _read_script(path: Path, text: str, environment: Mapping[str, str]) -> RunScript:
    shell = Shell(path, {"PWD": os.getcwd(), **environment})
    commands = list(_all_commands(text, shell))
    calls = [call for command in commands if (call := _trainer_call(command)) is not None]
    if len(calls) != 1:
        raise _trainer_count_error(path, commands, calls)
    return _Arguments(path, shell, calls[0]).run_script(_yaml_path_option(commands))


def _all_commands(text: str, shell: Shell) -> Iterator[ScriptCommand]:
    """Yield the commands of a script, and those in an argument of one: `tmux send-keys "python3 -m …"`."""
    for command in commands_of(text, shell):
        if command.words[0].text not in PRINTING:
            yield command
            for word in command.words:
                if re.search(r"\s-m\s+(verl|vagen|ragen)\.", word.text):
                    yield from commands_of(
                        word.text, Shell(shell.path, shell.environment, {}, shell.unknown_values), word.line
                    )


def _trainer_call(command: ScriptCommand) -> _TrainerCall | None:
    words = command.words
    by_python = False
    for position, word in enumerate(words):
        before = words[position - 1].text if position else ""
        if (trainer := _trainer(word.text, before, by_python=by_python)) is not None:
            return _TrainerCall(*trainer, words[position + 1 :], word.line, command.comment_lines)
        by_python = by_python or PYTHON.fullmatch(word.text) is not None
    return None


def _trainer(text: str, before: str, *, by_python: bool) -> tuple[str, str] | None:
    """Return the module and the framework of a word that names a trainer."""
    if before == "-m":
        return (text, TRAINERS[text]) if text in TRAINERS else None
    if Path(text).name == RAGEN_SCRIPT and before in ("", "bash", "sh"):
        return RAGEN_SCRIPT, "ragen"
    if not by_python or not text.endswith(".py"):
        return None
    module = text.removesuffix(".py").replace("/", ".")
    for name, framework in TRAINERS.items():
        if module == name or module.endswith(f".{name}"):
            return name, framework
    programs = ((name, dialect.programs) for name, dialect in DIALECTS.items() if dialect.programs)
    return next(((text, name) for name, pattern in programs if re.fullmatch(pattern, Path(text).stem)), None)


def _trainer_count_error(path: Path, commands: list[ScriptCommand], calls: list[_TrainerCall]) -> ConfigError:
    if calls:
        trainers = ", ".join(f"{call.module} at line {call.line}" for call in calls)
        hint = "leave one of them in, or write one file each"
        return ConfigError(f"{path} trains {len(calls)} times: {trainers}", source=f"{path}:{calls[1].line}", hint=hint)
    hint = f"only scripts that run one of these are supported: {', '.join(TRAINERS)}"
    for command in commands:
        texts = [word.text for word in command.words]
        module = texts[texts.index("-m") + 1] if "-m" in texts[:-1] else ""
        if module.split(".")[0] in ("verl", "vagen", "ragen", "recipe"):
            source = f"{path}:{command.line}"
            return ConfigError(f"{source} runs {module}, whose arguments are not supported", source=source, hint=hint)
    return ConfigError(f"{path} runs no known trainer", source=str(path), hint=hint)


def _yaml_path_option(commands: list[ScriptCommand]) -> Field | None:
    """Return the `--yaml_path` of VAGEN's `create_dataset`."""
    for command in commands:
        words = command.words
        if any(word.text.endswith(("create_dataset", "create_dataset.py")) for word in words):
            for word, following in zip(words, (*words[1:], None), strict=True):
                option, sign, value = word.text.partition("=")
                if option == "--yaml_path" and (sign or following is not None):
                    return Field(value, word.line) if sign or following is None else following
    return None


class _Arguments:
    """The arguments of one trainer."""

    def __init__(self, path: Path, shell: Shell, call: _TrainerCall) -> None:
        self.path, self.shell, self.call = path, shell, call
        self.overrides: list[Override] = []
        self.missing: list[MissingValue] = []
        self.options: dict[str, Field] = {}

    def run_script(self, yaml_path: Field | None) -> RunScript:
        words = list(self.call.words)
        ragen_env = words.pop(0) if self.call.module == RAGEN_SCRIPT and words and "=" not in words[0].text else None
        while words:
            self._read(words)
        config = self._config_file()
        beneath = self._framework_file() if config is None else []
        if self.call.dialect == "vagen" and (envs := self._env_config(yaml_path)) is not None:
            beneath += [] if config is None else _file_overrides(envs)
            config = config or envs
        if ragen_env is not None:
            config, beneath = self._ragen_files(ragen_env)
        exported = {name: self.shell.variables.get(name) for name in self.shell.exported}
        return RunScript(
            config,
            *_columns([*beneath, *self.overrides]),
            self.call.dialect,
            tuple(self.missing),
            {
                name: value
                for name, value in exported.items()
                if isinstance(value, str) and self.shell.find_unknown(value) is None
            },
            tuple(
                f"{self.path}:{line}: a shell ends the command at this comment; the lines after it are read as well"
                for line in self.call.comment_lines
            ),
        )

    def _read(self, words: list[Field]) -> None:
        """Remove an override, or an option with its value, from the front of `words`."""
        word = words.pop(0)
        source = f"{self.path}:{word.line}"
        option, sign, value = word.text.partition("=")
        if option in CONFIG_OPTIONS:
            following = words.pop(0) if not sign and words else Field(value, word.line)
            self.options[CONFIG_OPTIONS[option]] = following
        elif (unknown := self.shell.find_unknown(word.text)) is not None:
            self._add_unknown(word, source, unknown)
        elif word.text and not word.text.strip():
            message = f"{source}: a blank after the backslash ends the command there"
            raise ConfigError(message, source=source, hint="remove the blank")
        elif OVERRIDE.fullmatch(word.text):
            self.overrides.append((word.text, source))
        elif word.text:
            hint = "the arguments of a trainer are key=value, --config-path and --config-name"
            raise ConfigError(f"{source}: {word.text!r} is not an override", value=word.text, source=source, hint=hint)

    def _add_unknown(self, word: Field, source: str, unknown: UnknownValue) -> None:
        key = key_of(word.text)
        if "=" not in word.text or self.shell.find_unknown(key) is not None:
            hint = "write its words out in the script, or set what it depends on: NAME=… quintet …"
            raise ConfigError(f"{source}: {unknown} (line {unknown.line})", source=source, hint=hint)
        self.missing.append(MissingValue(key, source, f"{unknown} (line {unknown.line})"))

    def _option_text(self, option: Field) -> str:
        if (unknown := self.shell.find_unknown(option.text)) is not None:
            source = f"{self.path}:{option.line}"
            raise ConfigError(f"{source}: {unknown} (line {unknown.line})", source=source, hint="write it out")
        return option.text

    def _config_file(self) -> Path | None:
        """Return the file that `--config-name` names; None for one that comes with the framework."""
        if "name" not in self.options:
            return None
        name = self._option_text(self.options["name"])
        name = name if name.endswith(YAML) else f"{name}.yaml"
        directory = self._option_text(self.options["path"]) if "path" in self.options else "."
        program = Path(self.call.module).parent if self.call.module.endswith(".py") else Path()
        roots = [self.path.parent, Path(), program, self.path.parent.parent]
        files = [Path(os.path.normpath(root / directory / name)) for root in roots]
        existing = next((file for file in files if file.is_file()), None)
        if existing is None and Path(name).stem not in FRAMEWORK_FILES:
            source = f"{self.path}:{self.options['name'].line}"
            beside = [other.stem for file in files if file.parent.is_dir() for other in file.parent.glob("*.yaml")]
            close = nearest(Path(name).stem, beside)
            hint = f"did you mean {close}?" if close else f"looked for {files[0]} and {files[1].absolute()}"
            raise ConfigError(f"{source}: there is no {directory}/{name}", value=name, source=source, hint=hint)
        return existing

    def _framework_file(self) -> list[Override]:
        """Return what a file that comes with the framework sets differently from the reference."""
        name = self.options.get("name")
        if name is None:
            return []
        tree = FRAMEWORK_FILES[Path(name.text).name.removesuffix(".yaml")]
        return list(_as_overrides(tree, "", lambda _: f"{self.path}:{name.line}"))

    def _env_config(self, yaml_path: Field | None) -> Path | None:
        """Return VAGEN's file of environments: that of `--yaml_path`, or the one beside the script."""
        if yaml_path is None:
            return _env_config_beside(self.path)
        name = self._option_text(yaml_path)
        existing = next((file for file in (self.path.parent / name, Path(name)) if file.is_file()), None)
        if existing is None:
            source = f"{self.path}:{yaml_path.line}"
            raise ConfigError(f"{source}: there is no {name}", value=name, source=source, hint="check --yaml_path")
        directory = self.path.parent.resolve()
        inside = existing.resolve().is_relative_to(directory)
        return self.path.parent / existing.resolve().relative_to(directory) if inside else existing

    def _ragen_files(self, env: Field) -> tuple[Path | None, list[Override]]:
        """Return the files of `train.sh ENV`: RAGEN applies `config/ENV.yaml` over `config/base.yaml`."""
        directory = self.path.parent / "config"
        base, own = directory / "base.yaml", directory / f"{self._option_text(env)}.yaml"
        return base if base.is_file() else None, _file_overrides(own) if own.is_file() else []


def _file_overrides(path: Path) -> list[Override]:
    sources: dict[str, str] = {}
    tree = read_file(path, sources)
    return list(_as_overrides(tree, "", sources.__getitem__))


def _as_overrides(tree: Mapping[str, Any], prefix: str, source: Callable[[str], str]) -> Iterator[Override]:
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _as_overrides(value, f"{dotted}.", source)
        else:
            yield f"{dotted}={_hydra_value(value)}", source(dotted)


def _hydra_value(value: Any) -> str:
    """Return a value in the grammar of Hydra's overrides."""
    if isinstance(value, str):
        # backslashes are escapes only before a quote
        quoted = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
        return f"'{quoted}'"
    if isinstance(value, list):
        return f"[{','.join(map(_hydra_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_hydra_value(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)
