"""Verifiable tasks that are made on the spot: a name, its options, and problems by number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from pydantic import ValidationError

from quintet.config.native.section import Section
from quintet.errors import ConfigError, nearest
from quintet.registry import Registry

__all__ = ["TASKS", "Problem", "Style", "Task", "TaskOptions", "answered", "make_task", "options_of"]

Style = Literal["direct", "worked"]
GYM = "reasoning_gym"


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with what is right."""

    question: str
    truth: Any
    """As JSON takes it: text, or a mapping."""
    key: str
    """The same for problems that come to the same, such as 3 + 4 and 4 + 3: they stay in one split."""
    response: str | None = None
    """A right answer to learn from, where one is known."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What else is known, for `extra_info`."""


class Task(Protocol):
    """Makes problems; each follows from `seed` and its number alone."""

    source: str
    """`data_source` of the rows: says which rules judge."""
    ability: str

    def problem(self, seed: int, number: int) -> Problem | None:
        """None where that draw gives none."""
        ...


class TaskOptions(Section):
    """What every task takes."""

    style: Style = "direct"
    """Demonstrated answers: the result alone, or with what leads to it."""
    instruction: str = "Write the result between <answer> and </answer>."
    """Follows each question; may be empty."""

    def asked(self, question: str) -> str:
        """The question with the instruction behind it."""
        return f"{question} {self.instruction}".rstrip()


TASKS: Registry[Task] = Registry("task", entry_points="quintet.tasks")
TASKS.add("addition", "quintet.data.arithmetic:Addition", help="sums of numbers of so many digits")
TASKS.add("arithmetic", "quintet.data.arithmetic:Arithmetic", help="expressions of so many terms and operators")
TASKS.add("countdown", "quintet.data.countdown:Countdown", help="reach a target with each of some numbers")
TASKS.add(
    GYM,
    "quintet.data.gym_tasks:GymTask",
    help=f"any generator of reasoning-gym, as {GYM}:chain_sum",
    requires=(GYM,),
    extra="tasks",
)

SectionT = TypeVar("SectionT", bound=Section)


def make_task(name: str, options: Mapping[str, Any]) -> Task:
    """The task of that name.

    Raises:
        ConfigError: there is none, an option is wrong, or a package is missing.
    """
    head, colon, generator = name.partition(":")
    entry = TASKS.get(head)
    if head == GYM:
        options = {**options, "generator": generator or None}
    elif colon:
        raise ConfigError(f"{head} has no generators to choose from", value=name, hint=f"say {head}")
    return entry.load()(options)


def options_of(kind: type[SectionT], options: Mapping[str, Any], what: str) -> SectionT:
    """Options as their section takes them.

    Raises:
        ConfigError: an option is unknown or its value illegal; the message names all of them.
    """
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        faults = [_fault(kind, details["loc"], details["msg"], details["input"]) for details in error.errors()]
        key = ".".join(str(part) for part in error.errors()[0]["loc"])
        hint = f"{what} takes {', '.join(kind.model_fields)}"
        raise ConfigError(f"{what}: {'; '.join(faults)}", key=key, hint=hint) from error


def _fault(kind: type[Section], place: tuple[int | str, ...], message: str, value: object) -> str:
    name = ".".join(str(part) for part in place)
    if name and name.partition(".")[0] not in kind.model_fields:
        close = nearest(name, kind.model_fields)
        return f"unknown option {name}" + (f", did you mean {close}?" if close else "")
    return f"{name}={value}: {message}" if name else message.removeprefix("Value error, ")


def answered(result: str, working: str | None = None) -> str:
    """A demonstrated answer; blanks keep the words apart for small tokenizers."""
    thought = f"<think> {working} </think> " if working else ""
    return f"{thought}<answer> {result} </answer>"
