"""Commands of run scripts that start a framework's trainer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quintet.config.dialects.registry import DIALECTS, detect
from quintet.config.dialects.scripts.compound_commands import read_commands
from quintet.config.dialects.scripts.inner_scripts import script_arguments
from quintet.config.dialects.scripts.override_list import LINE as OVERRIDE
from quintet.config.dialects.scripts.override_list import keys_as_tree
from quintet.config.dialects.scripts.simple_commands import Argument, ScriptCommand, ScriptCommands
from quintet.config.dialects.scripts.variables import MARKER, Variables
from quintet.errors import ConfigError, UnsupportedRunError

TRAINERS = {module: name for name, dialect in DIALECTS.items() for module in dialect.trainers}
"""Frameworks by the modules of their trainers."""
NAMES = (
    *("trainer.experiment_name", "trainer.project_name", "trainer.default_local_dir", "trainer.default_hdfs_dir"),
    *("exp_name", "output_dir", "logging_dir", "checkpoint_config.output_dir", "hydra.run.dir"),
)
"""Keys that only name a run and its directories."""
DEVICES = ("system.CUDA_VISIBLE_DEVICES",)
"""Keys that only choose the devices of a run."""
MAX_LISTED, MAX_LINE = 100, 160
"""Calls that an error lists, and characters for each."""
PRINTING = {"echo", "printf", "cat", "tee"}
PYTHON = re.compile(r"(.*/)?(python[\d.]*|torchrun|accelerate|deepspeed)")


def all_commands(text: str, variables: Variables, environment: Mapping[str, str]) -> ScriptCommands:
    """Return the commands of a script, and those in an argument of one: `tmux send-keys "python3 -m …"`.

    Those of functions that the script does not call are among them if it starts no trainer otherwise.
    """
    script = read_commands(text, variables)
    commands = tuple(_with_inner_commands(script.commands, variables, environment))
    if script.exit_line is None and not any(map(trainer_call, commands)):
        commands += tuple(_with_inner_commands(script.of_uncalled_functions, variables, environment))
    return replace(script, commands=commands)


def _with_inner_commands(
    commands: Iterable[ScriptCommand], variables: Variables, environment: Mapping[str, str]
) -> Iterator[ScriptCommand]:
    for command in commands:
        if command.words[0].text in PRINTING:
            continue
        yield command
        for word in command.words[1:]:  # a program's name is no command, whatever blanks it has
            if re.search(r"\s-m\s+(verl|vagen|ragen)\.", word.text):
                inner = Variables(word.path, environment)
                inner.unknown_values = variables.unknown_values
                for each in read_commands(word.text, inner, word.line).commands:
                    conditions = (*command.conditions, *each.conditions)
                    start_line, in_process = command.start_line, command.in_process
                    yield replace(each, start_line=start_line, in_process=in_process, conditions=conditions)


@dataclass(slots=True)
class TrainerCall:
    """A command that starts a trainer."""

    module: str
    dialect: str
    words: tuple[Argument, ...]
    line: int
    """Its line in the main script, or the line there at which the other file is read that has it."""
    launcher: tuple[Argument, ...]
    """The words before the module."""
    exports: Mapping[str, str]
    """Variables that the script has exported."""
    source: str
    """Its `FILE:LINE`."""
    path: Path | None = None
    """The script in a process of its own that has it; None for the main script."""
    conditions: tuple[str, ...] = ()
    """What is assumed where it is not known whether it runs."""
    iteration: int | None = None
    """Number among the calls at its line, from 1; None for the only one."""
    is_of_fork: bool = False
    """Whether the module is none of the framework, and only its arguments are."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """Messages about how the call is read."""
        read = f"{self.source}: {self.module} is read as {self.dialect}'s trainer: its arguments are {self.dialect}'s"
        return (read,) if self.is_of_fork else ()

    def name(self, path: Path) -> str:
        """Return how it is named on the command line: `FILE:LINE` or `FILE:LINE:ITERATION`."""
        return f"{path}:{self.line}" if self.iteration is None else f"{path}:{self.line}:{self.iteration}"


def trainer_call(command: ScriptCommand) -> TrainerCall | None:
    """Return the call of a trainer in a command, also of one of a fork with a framework's arguments, or None."""
    by_python = False
    option = ""
    for position, word in enumerate(command.words):
        if framework := _framework(word.text, option, by_python=by_python):
            return _call(command, position, framework)
        by_python = by_python or PYTHON.fullmatch(word.text) is not None
        # `-m PACKAGE.launch MODULE` launches a module
        option = option if option == "-m" and word.text.endswith(".launch") else word.text
    return _fork_call(command) if by_python else None


def _call(command: ScriptCommand, position: int, framework: str, *, is_of_fork: bool = False) -> TrainerCall:
    """Return the call of the module at a position in a command."""
    word, after, before = command.words[position], command.words[position + 1 :], command.words[:position]
    line = word.line if command.start_line is None else command.start_line
    path, source = word.path if command.in_process else None, f"{word.path}:{word.line}"
    return TrainerCall(
        word.text,
        framework,
        after,
        line,
        before,
        command.exports,
        source,
        path,
        command.conditions,
        is_of_fork=is_of_fork,
    )


def _fork_call(command: ScriptCommand) -> TrainerCall | None:
    """Return the call of a module that is no framework's and whose arguments have the marks of one."""
    words = [word.text for word in command.words]
    module = started_module(words)
    if not module or any(dialect.missing_trainer(module) for dialect in DIALECTS.values()):
        return None
    named = (number for number, word in enumerate(words) if word.removesuffix(".py").replace("/", ".") == module)
    position = next(named, None)
    if position is None:
        return None
    arguments = [word for word in words[position + 1 :] if OVERRIDE.fullmatch(word)]
    frameworks = detect(keys_as_tree(arguments))
    return _call(command, position, frameworks[0], is_of_fork=True) if frameworks else None


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


def many_calls_error(path: Path, calls: Sequence[TrainerCall], variables: Variables) -> ConfigError:
    """Return the error of a script that trains several times, with how each call is named and how it differs."""
    lines = [f"  {call.name(path)}  {differences(call, calls, variables) or call.module}" for call in calls]
    if len(lines) > MAX_LISTED:
        lines[MAX_LISTED - 2 : -1] = [f"  … {len(lines) - MAX_LISTED + 1} more"]
    message = "\n".join([f"{path} trains {len(calls)} times:", *lines])
    hint = f"name one of them: quintet plan {calls[0].name(path)}"
    return ConfigError(message, source=f"{path}:{calls[1].line}", hint=hint)


def differences(call: TrainerCall, calls: Sequence[TrainerCall], variables: Variables) -> str:
    """Return the words that tell a call from the others at its line, without those that only name it.

    A call that is alone at its line is compared with the others that are.
    """
    others = [other for other in calls if (other.line == call.line if call.iteration else other.iteration is None)]
    common = set.intersection(*({variables.shown(word.text) for word in other.words} for other in others))
    words = [word for each in call.words if (word := variables.shown(each.text)) not in common]
    words = [word for word in words if word.partition("=")[0] not in (*NAMES, *DEVICES)] or words
    words = words if len({other.module for other in others}) == 1 else [call.module, *words]
    text = " ".join(words) if len(others) > 1 else ""
    return text if len(text) <= MAX_LINE else f"{text[: MAX_LINE - 1]}…"


def no_trainer_error(path: Path, script: ScriptCommands, variables: Variables) -> ConfigError:
    """Return the error of a script that runs no known trainer."""
    if script.exit_line is not None and any(map(trainer_call, (*script.after_exit, *script.of_uncalled_functions))):
        source = f"{path}:{script.exit_line}"
        names = dict.fromkeys(re.findall(r"\$\{?([A-Za-z_]\w*)", script.exit_reason)) or ["NAME"]
        hint = f"set what it depends on: {' '.join(f'{name}=…' for name in names)} quintet plan {path}"
        reason = f": {script.exit_reason}" if script.exit_reason else ""
        return ConfigError(f"{source}: the script ends here before it trains{reason}", source=source, hint=hint)
    commands = script.commands
    hint = f"only scripts that run one of these are supported: {', '.join(TRAINERS)}"
    for command in commands:
        module = started_module([word.text for word in command.words])
        for dialect in DIALECTS.values():
            if (capability := dialect.missing_trainer(module)) is not None:
                source = command.source
                return UnsupportedRunError(f"{source}: a run of {module} {capability.refusal()}", source=source)
        has_settings = any(re.fullmatch(r"[+~]*\w[\w.]*=.*", word.text, re.DOTALL) for word in command.words[1:])
        is_framework = module.split(".")[0] in ("verl", "vagen", "ragen", "recipe") and "create_dataset" not in module
        if module and (has_settings or is_framework):
            source = command.source
            message = f"{source} runs {module}, whose arguments are those of no framework"
            return ConfigError(message, source=source, hint=hint)
    for command in reversed(commands):
        if (inner := script_arguments([word.text for word in command.words])) is not None:
            called = " ".join([inner[0], *(variables.shown(argument) for argument in inner[1])])
            place = command.source.replace(f"{path}:", "line ")
            reason = variables.not_followed.get(place, "runs no known trainer")
            message = f"{command.source} runs the script {inner[0]}, which {reason}"
            return ConfigError(message, source=command.source, hint=f"give that script itself: quintet plan {called}")
    unread = "".join(f"; at {place}, {reason}" for place, reason in variables.unread.items())
    return ConfigError(f"{path} runs no known trainer{unread}", source=str(path), hint=hint)


def distinct_calls(commands: Iterable[ScriptCommand]) -> list[tuple[ScriptCommand, TrainerCall]]:
    """Return the calls of trainers, those at one line numbered, and without repetitions.

    A repetition differs from another call at its line at most in the devices that it runs on, as in a script that runs
    each experiment on the first devices that are free.
    """
    calls: dict[tuple[object, ...], tuple[ScriptCommand, TrainerCall]] = {}
    for command in commands:
        if (call := trainer_call(command)) is not None:
            words = tuple(word.text for word in call.words if not _names_only(word.text))
            calls.setdefault(
                (call.module, call.line, call.source, words, tuple(sorted(call.exports.items()))), (command, call)
            )
    of_line = Counter(call.line for _, call in calls.values())
    numbers: Counter[int] = Counter()
    for _, call in calls.values():
        numbers[call.line] += 1
        call.iteration = numbers[call.line] if of_line[call.line] > 1 else None
    return list(calls.values())


def _names_only(word: str) -> bool:
    """Return whether a word names devices, or the run by what is not known, such as the time."""
    key = word.partition("=")[0]
    return key in DEVICES or (key in NAMES and MARKER.search(word) is not None)


def started_module(words: list[str]) -> str:
    """Return the module that a command starts by `-m MODULE` or `python FILE.py`; empty if it starts none."""
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    program = next((word for word in words[1:] if word.endswith(".py")), "") if PYTHON.fullmatch(words[0]) else ""
    return program.removesuffix(".py").replace("/", ".")
