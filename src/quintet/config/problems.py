"""Problems of a configuration, raised together as one `ConfigError`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from quintet.config.capabilities import Capability
from quintet.config.dotted import is_inside, sections_around
from quintet.config.schema import format_value
from quintet.errors import ConfigError

MAX_PROBLEMS = 100
"""Maximum number of problems in a message. The suggestion for each takes milliseconds."""


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """A problem with one dotted key; message and hint are for the user."""

    key: str
    value: object
    source: str
    message: str
    remedy: str | Callable[[], str | None] | None = None
    """The hint, or a function that returns it: translating one takes long, and most problems are not raised."""
    elsewhere: bool = False
    """Whether the run could work on another machine, with a GPU or with a package that is missing here."""
    capability: Capability | None = None
    """The capability that the setting waits for."""

    @property
    def hint(self) -> str | None:
        return self.remedy() if callable(self.remedy) else self.remedy

    def __str__(self) -> str:
        hint = self.hint
        return self.message if hint is None else f"{self.message}\n  {hint}"


def describe_setting(key: str, value: object, source: str) -> str:
    """Return `key = value (source)` for a message."""
    return f"{key} = {format_value(value)} ({source})"


def setting_problem(key: str, value: object, source: str, problem: str, hint: str | None = None) -> ConfigProblem:
    """Return a problem whose message names key, value and source."""
    return ConfigProblem(key, value, source, f"{describe_setting(key, value, source)}: {problem}", hint)


def raise_problems(problems: Iterable[ConfigProblem]) -> None:
    """Raise all problems in one message, if there are any; of more than `MAX_PROBLEMS`, the first.

    Raises:
        ConfigError: key, value and source are those of the first problem.
    """
    by_text: dict[str, ConfigProblem] = {}
    for problem in problems:
        if len(by_text) == MAX_PROBLEMS:
            by_text["there are further problems: correct these first"] = problem
            break
        by_text[str(problem)] = problem
    if by_text:
        first = next(iter(by_text.values()))
        raise ConfigError("\n".join(by_text), key=first.key, value=first.value, source=first.source)


def source_of(key: str, sources: Mapping[str, str]) -> str:
    """Return the source of a key, otherwise of the closest section around it, otherwise of the first key in it that is
    no default."""
    around = [section for section in (key, *sections_around(key)) if section in sources]
    inner = (source for other, source in sources.items() if is_inside(other, key) and source != "default")
    return sources[around[0]] if around else next(inner, "default")
