"""What this version can't do yet, each thing under the name by which people are told of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Capability", "Waits"]


class Capability(StrEnum):
    """What a pending key waits for, as it is told to people."""

    ENGINES = "an engine of TensorRT-LLM"
    SHARDING = "sharded learners (FSDP, FSDP2) and their options"
    MEMORY = "offloading and memory options of learners"
    BATCHING = "micro-batches by sequence or token budget over several ranks"
    MEGATRON = "the Megatron learner"
    CLUSTER = "Ray, several processes and placement on devices"
    LOGGERS = "further loggers and stored pictures"
    VISION = "images in turns and vision-language policies"
    EMBODIED = "vision-language-action policies and simulators"
    WORLDS = "the environment service and further worlds"


@dataclass(frozen=True, slots=True)
class Waits:
    """Marks a field of the schema that this version can't honour.

    The field's default asks for nothing, nor do the values in `works`; where `lacks` is given, only its values,
    or lists that hold one of them, ask for what isn't there. The JSON schema says so too.
    """

    capability: Capability
    works: tuple[Any, ...] = ()
    lacks: tuple[Any, ...] | None = None

    def asked_by(self, value: Any) -> bool:
        """Whether a value that isn't the default asks for what isn't there."""
        if self.lacks is not None:
            return any(item in self.lacks for item in (value if isinstance(value, tuple) else (value,)))
        # 0 and 0.0 ask for the same, 0 and false don't
        return not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.works)

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: Any) -> dict[str, Any]:
        schema: dict[str, Any] = dict(handler(core_schema))
        lacks = {} if self.lacks is None else {"lacks": list(self.lacks)}
        return schema | {"waits": str(self.capability)} | lacks
