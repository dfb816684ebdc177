"""Values of VAGEN's keys: the name of the reference's environment, and a type that an expression cannot describe."""

from quintet.config.dialects.value_types import ValueType, parse_type

ENV = "env1"
"""Section of an environment in the reference's env_config.yaml; users choose any name."""

_SIDE = parse_type("int >= 4 <= 16")


def _is_room_size(value: object) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_SIDE.accepts, value))


VALUE_TYPES = {"room_size": ValueType("a list of two integers ≥ 4 and ≤ 16", _is_room_size)}
