"""Problems of a configuration, raised together as one `ConfigError`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quintet.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """A problem with one dotted key; message and hint are for the user."""

    key: str
    value: object
    source: str
    message: str
    hint: str | None = None
    elsewhere: bool = False
    """Whether the run could work on another machine, with a GPU or with a package that is missing here."""

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  {self.hint}"


def raise_problems(problems: Iterable[ConfigProblem]) -> None:
    """Raise all problems in one message, if there are any.

    Raises:
        ConfigError: key, value and source are those of the first problem.
    """
    by_text = {str(problem): problem for problem in problems}
    if by_text:
        first = next(iter(by_text.values()))
        raise ConfigError("\n".join(by_text), key=first.key, value=first.value, source=first.source)


def source_of(key: str, sources: Mapping[str, str]) -> str:
    """Return the source of a key, otherwise of the closest section around it, otherwise of a key in it."""
    nearest = key
    while nearest not in sources and "." in nearest:
        nearest = nearest.rpartition(".")[0]
    inner = (source for other, source in sources.items() if other.startswith(f"{key}."))
    return sources[nearest] if nearest in sources else next(inner, "default")
