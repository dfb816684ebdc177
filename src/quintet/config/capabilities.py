"""Capabilities that this version, or a single process, does not have, and marks for the fields that require them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Capability(StrEnum):
    """Missing capability that unsupported keys wait for; the value is its name in messages."""

    PROCESSES = "one process per device"
    """Not missing: `torchrun` or `--ray` starts them."""

    ENGINES = "an engine of TensorRT-LLM"
    LOGGERS = "further loggers and videos"
    EMBODIED = "vision-language-action policies and simulators"
    PROMPTS = "a run on prompts instead of environments"
    """Not missing: of keys that a run in environments does not read."""

    @property
    def is_missing(self) -> bool:
        """Whether this version lacks it."""
        return self not in (Capability.PROCESSES, Capability.PROMPTS)

    def refusal(self, *, plural: bool = False) -> str:
        """Return the end of a message about a setting, or several ones, that require it."""
        if self.is_missing:
            return f"{'are' if plural else 'is'} not supported yet: requires {self}"
        return f"{'require' if plural else 'requires'} {self}"


@dataclass(frozen=True, slots=True)
class Requires:
    """Annotation of a field with values that this version does not support.

    The default is always supported, and so are the values in `supported`. If `unsupported` is given, only these values,
    and lists that contain one of them, are unsupported. The JSON schema of the field has both.
    """

    capability: Capability
    supported: tuple[Any, ...] = ()
    unsupported: tuple[Any, ...] | None = None

    def applies_to(self, value: Any) -> bool:
        """Return whether a value other than the default is unsupported."""
        if self.unsupported is not None:
            return any(item in self.unsupported for item in (value if isinstance(value, tuple) else (value,)))
        # 0 equals 0.0, but not false
        return not any(
            value == other and isinstance(value, bool) == isinstance(other, bool) for other in self.supported
        )

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = dict(handler(core_schema))
        if not self.capability.is_missing:
            return schema
        unsupported = {} if self.unsupported is None else {"unsupported": list(self.unsupported)}
        return schema | {"requires": str(self.capability)} | unsupported
