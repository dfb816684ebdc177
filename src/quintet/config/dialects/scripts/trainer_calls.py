"""Commands of run scripts that start a framework's trainer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.scripts.shell_commands import Argument, ScriptCommand, read_commands
from quintet.config.dialects.scripts.shell_words import Variables
from quintet.errors import ConfigError, UnsupportedRunError

TRAINERS = {module: name for name, dialect in DIALECTS.items() for module in dialect.trainers}
"""Frameworks by the modules of their trainers."""
PRINTING = {"echo", "printf", "cat", "tee"}
PYTHON = re.compile(r"(.*/)?(python[\d.]*|torchrun|accelerate|deepspeed)")


def all_commands(text: str, variables: Variables, environment: Mapping[str, str]) -> Iterator[ScriptCommand]:
    """Yield the commands of a script, and those in an argument of one: `tmux send-keys "python3 -m …"`."""
    for command in read_commands(text, variables):
        if command[0].text in PRINTING:
            continue
        yield command
        for word in command:
            if re.search(r"\s-m\s+(verl|vagen|ragen)\.", word.text):
                inner = Variables(variables.path, environment)
                inner.unknown_values = variables.unknown_values
                yield from read_commands(word.text, inner, word.line)


@dataclass(slots=True)
class TrainerCall:
    """A command that starts a trainer."""

    module: str
    dialect: str
    words: tuple[Argument, ...]
    line: int
    launcher: tuple[Argument, ...]
    """The words before the module."""


def trainer_call(command: ScriptCommand) -> TrainerCall | None:
    """Return the call of a trainer in a command; None if there is none."""
    by_python = False
    option = ""
    for position, word in enumerate(command):
        module = word.text
        if framework := _framework(module, option, by_python=by_python):
            return TrainerCall(module, framework, command[position + 1 :], word.line, command[:position])
        by_python = by_python or PYTHON.fullmatch(module) is not None
        # `-m PACKAGE.launch MODULE` launches a module
        option = option if option == "-m" and module.endswith(".launch") else module
    return None


def _framework(word: str, option: str, *, by_python: bool) -> str | None:
    """Return the framework whose trainer a word names: `-m MODULE` or `python FILE.py`."""
    if option == "-m":
        return TRAINERS.get(word)
    if not by_python or not word.endswith(".py"):
        return None
    module = word.removesuffix(".py").replace("/", ".")
    by_module = (framework for name, framework in TRAINERS.items() if f".{module}".endswith(f".{name}"))
    programs = (
        name
        for name, dialect in DIALECTS.items()
        if dialect.programs and re.fullmatch(dialect.programs, Path(word).stem)
    )
    return next(by_module, None) or next(programs, None)


def trainer_count_error(path: Path, commands: list[ScriptCommand], calls: list[TrainerCall]) -> ConfigError:
    """Return the error of a script that does not run exactly one known trainer."""
    if calls:
        trainers = ", ".join(f"{call.module} at line {call.line}" for call in calls)
        hint = f"name one by its line, {path}:{calls[0].line}, or leave one of them in"
        return ConfigError(f"{path} trains {len(calls)} times: {trainers}", source=f"{path}:{calls[1].line}", hint=hint)
    hint = f"only scripts that run one of these are supported: {', '.join(TRAINERS)}"
    for command in commands:
        module = started_module([word.text for word in command])
        for dialect in DIALECTS.values():
            if (capability := dialect.missing_trainer(module)) is not None:
                source = f"{path}:{command[0].line}"
                return UnsupportedRunError(f"{source}: a run of {module} {capability.refusal()}", source=source)
        if module.split(".")[0] in ("verl", "vagen", "ragen", "recipe") and "create_dataset" not in module:
            source = f"{path}:{command[0].line}"
            return ConfigError(f"{source} runs {module}, whose arguments are not supported", source=source, hint=hint)
    return ConfigError(f"{path} runs no known trainer", source=str(path), hint=hint)


def started_module(words: list[str]) -> str:
    """Return the module that a command starts by `-m MODULE` or `python FILE.py`; empty if it starts none."""
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    program = next((word for word in words[1:] if word.endswith(".py")), "") if PYTHON.fullmatch(words[0]) else ""
    return program.removesuffix(".py").replace("/", ".")
