"""Generated verifiable tasks: registry, options, and problems by number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from pydantic import ValidationError

from quintet.config.native.section import Section
from quintet.errors import ConfigError, nearest
from quintet.registry import Registry

Style = Literal["direct", "worked", "tool"]
REASONING_GYM = "reasoning_gym"


@dataclass(frozen=True, slots=True)
class Problem:
    """A question with its ground truth."""

    question: str
    ground_truth: Any
    """JSON data: text or a mapping."""
    key: str
    """Equal for equivalent problems, such as 3 + 4 and 4 + 3, which must be in the same split."""
    response: str | None = None
    """A correct response to imitate, if known."""
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the row's `extra_info`."""


class Task(Protocol):
    """Generates problems, each determined by `seed` and its number."""

    source: str
    """`data_source` of the rows, which selects the reward function."""
    ability: str

    def problem(self, seed: int, number: int) -> Problem | None:
        """Return problem `number`, or None if none could be generated from its random numbers."""


class TaskOptions(Section):
    """Options of all tasks."""

    demonstrates_calls: ClassVar[bool] = False
    """Whether demonstrated responses may call a tool."""

    style: Style = "direct"
    """Demonstrated responses: only the result, with intermediate steps, or with a call of the tool `calculator`."""
    instruction: str = "Write the result between <answer> and </answer>."
    """Appended to each question; may be empty."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.style == "tool" and not self.demonstrates_calls:
            yield "`style` = tool needs the task addition or arithmetic", "style=direct"

    def add_instruction(self, question: str) -> str:
        """Return the question followed by the instruction."""
        return f"{question} {self.instruction}".rstrip()


TASKS: Registry[Task] = Registry("task", entry_points="quintet.tasks")
TASKS.add_file(__file__, "tasks.yaml")

SectionT = TypeVar("SectionT", bound=Section)


def build_task(name: str, options: Mapping[str, Any]) -> Task:
    """Build a task from its name, for example `addition` or `reasoning_gym:chain_sum`.

    Raises:
        ConfigError: the task is unknown, an option is invalid, or a package is missing.
    """
    task_name, colon, generator = name.partition(":")
    entry = TASKS.get(task_name)
    if task_name == REASONING_GYM:
        options = {**options, "generator": generator or None}
    elif colon:
        raise ConfigError(f"task {name}: {task_name} has no generators", value=name, hint=f"use {task_name}")
    return entry.load()(options)


def parse_options(kind: type[SectionT], options: Mapping[str, Any], name: str) -> SectionT:
    """Validate options as a config section; `name` is the task or environment for errors.

    Raises:
        ConfigError: an option is unknown or its value is invalid; the message lists all of them.
    """
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        problems = [
            _describe_problem(kind, details["loc"], details["msg"], details["input"]) for details in error.errors()
        ]
        key = ".".join(str(part) for part in error.errors()[0]["loc"])
        hint = f"options of {name}: {', '.join(kind.model_fields)}"
        raise ConfigError(f"{name}: {'; '.join(problems)}", key=key, hint=hint) from error


def _describe_problem(kind: type[Section], location: tuple[int | str, ...], message: str, value: object) -> str:
    name = ".".join(str(part) for part in location)
    if name and name.partition(".")[0] not in kind.model_fields:
        suggestion = nearest(name, kind.model_fields)
        return f"unknown option {name}" + (f", did you mean {suggestion}?" if suggestion else "")
    return f"{name}={value}: {message}" if name else message.removeprefix("Value error, ")


def format_response(result: str, working: str | None = None) -> str:
    """Format a demonstrated response; spaces keep words separate for small tokenizers."""
    thought = f"<think> {working} </think> " if working else ""
    return f"{thought}<answer> {result} </answer>"
