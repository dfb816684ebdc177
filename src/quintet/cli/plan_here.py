"""`quintet plan --here`: all overrides with which a run works on this machine, and the command that starts it."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rich.text import Text

from quintet import hardware
from quintet.cli.config_source import with_further
from quintet.cli.configuration import InspectedConfig, inspect_config, reinspect_config
from quintet.cli.machine_changes import Change, machine_changes, remaining_problems
from quintet.cli.tables import page, section
from quintet.config.composed import ComposedConfig
from quintet.config.fit.overrides import merge_overrides, remedies_of, to_overrides
from quintet.config.plan.devices import device_of_machine
from quintet.config.plan.format_sizes import GIB
from quintet.config.plan.run_plan import plan_run
from quintet.errors import ConfigError

COMMAND_LINE = "(command line)"
OMISSION = re.compile(r"  leave ([\w.]+(?: and [\w.]+)*) out")
MAX_ROUNDS = 12
"""Number of times that the configuration is read with further overrides; each change may need others."""
USABLE = 0.8
"""Share of the memory of a machine without a GPU that a run may take."""


@dataclass(slots=True)
class LocalOverrides:
    """Overrides with which a run works on this machine, each with its reason, and what has to be created first."""

    devices: int
    overrides: list[str] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)
    prepare: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """What no override solves."""

    def add(self, words: Sequence[str], reason: str) -> bool:
        """Add overrides; return whether one of them is new."""
        new = [word for word in words if word not in self.overrides]
        self.reasons |= dict.fromkeys(new, reason)
        self.overrides = merge_overrides([*self.overrides, *new])
        return bool(new)


def run(
    config: str | None,
    overrides: list[str],
    dialect: str | None,
    unknown_keys: str,
    device_memory: float | None,
    *,
    as_json: bool = False,
) -> None:
    """Print the overrides, the commands that create what they name, and the command of the run.

    Raises:
        ConfigError: the configuration is invalid on any machine.
        MachineError: a file is missing or cannot be read.
    """
    inspected = inspect_config(config, overrides, dialect, unknown_keys)
    memory = int(device_memory * GIB) if device_memory is not None else _memory()
    here = LocalOverrides(max(1, hardware.num_gpus()))
    for _ in range(MAX_ROUNDS):
        before = list(here.overrides)
        if not _extend(here, inspected, memory):
            break
        try:
            inspected = _reread(
                here, lambda words: reinspect_config(config, with_further(overrides, words), dialect, unknown_keys)
            )
        except ConfigError as error:
            here.overrides, here.problems = before, [*here.problems, str(error)]
            break
    verb = "eval" if inspected.composed.experiment.evaluation is not None else "train"
    command = _command(verb, config, with_further(overrides, here.overrides), dialect, here.devices)
    if as_json:
        content = {"overrides": here.overrides, "prepare": here.prepare, "command": command, "problems": here.problems}
        print(json.dumps(content, indent=1))
    else:
        _print(here, command)


def _reread(here: LocalOverrides, reload: Callable[[Sequence[str]], InspectedConfig]) -> InspectedConfig:
    """Return the configuration with the overrides, and with those that hints demand if it is invalid with them.

    Raises:
        ConfigError: it is still invalid.
    """
    try:
        return reload(here.overrides)
    except ConfigError as error:
        if not here.add(_remedies(str(error)), _reason(str(error))):
            raise
    return reload(here.overrides)


def _remedies(message: str) -> list[str]:
    """Return the overrides that hints propose, and the removal of keys that they say to leave out."""
    removed: list[str] = []
    for line, hint in pairwise(message.splitlines()):
        names = OMISSION.match(hint)
        if names is not None and COMMAND_LINE not in line.partition(": ")[0]:
            removed += line.split(" = ")[:1] if names[1] == "it" else names[1].split(" and ")
    return [*remedies_of(message), *(f"~{name}" for name in removed)]


def _memory() -> int:
    present = device_of_machine()
    return present[1] if present is not None else int(USABLE * hardware.memory_bytes())


def _extend(here: LocalOverrides, inspected: InspectedConfig, memory: int) -> bool:
    """Add the overrides for what is known so far; return whether there are new ones."""
    composed, is_new = inspected.runnable, False
    for change in machine_changes(composed, here.devices):
        is_new |= _apply(here, composed, change)
    if is_new:  # what follows depends on them
        return True
    here.problems = []
    missing = map(str, remaining_problems(composed))
    for problem in (*map(str, inspected.unsupported), *missing, *_refusals(composed, memory)):
        if here.add(_remedies(problem), _reason(problem)):
            is_new = True
        else:
            here.problems.append(problem)
    return is_new


def _apply(here: LocalOverrides, composed: ComposedConfig, change: Change) -> bool:
    words = to_overrides(composed, change.values)
    if change.prepare is not None and change.prepare not in here.prepare:
        here.prepare.append(change.prepare)
    return here.add(words, change.reason)


def _refusals(composed: ComposedConfig, memory: int) -> Iterator[str]:
    """Yield what the plan refuses, with `memory` bytes per device."""
    try:
        plan_run(composed, memory)
    except ConfigError as error:
        yield str(error)


def _reason(message: str) -> str:
    """Return the first line of a message, as the reason of the overrides that its hint proposes."""
    return message.splitlines()[0]


def _command(verb: str, config: str | None, words: Sequence[str], dialect: str | None, devices: int) -> str:
    """Return the command that starts the run."""
    start = f"quintet {verb}" if devices == 1 else f"torchrun --nproc-per-node {devices} -m quintet {verb}"
    name, _, release = (dialect or "").partition("@")
    options = [*(["--dialect", name] if name else []), *(["--release", release] if release else [])]
    return " ".join([start, *map(shlex.quote, [*([config] if config else []), *options, *words])])


def _print(here: LocalOverrides, command: str) -> None:
    with page() as out:
        section(out, "Overrides for this machine")
        for word in here.overrides:
            out.print(Text(f"  {word}"), soft_wrap=True)
            out.print(Text(f"     {here.reasons[word]}", style="dim"), soft_wrap=True)
        if not here.overrides:
            out.print("  none: the run works here as it is")
        if here.problems:
            section(out, "No override solves")
            for problem in here.problems:
                out.print(Text(f"  {problem}"), soft_wrap=True)
        if here.prepare:
            section(out, "Before")
            for line in here.prepare:
                out.print(Text(f"  {line}"), soft_wrap=True)
        section(out, "Run")
        out.print(Text(f"  {command}"), soft_wrap=True)
