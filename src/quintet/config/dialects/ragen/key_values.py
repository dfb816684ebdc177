"""Value types of RAGEN's keys that a type expression cannot describe."""

import re
from collections.abc import Mapping
from typing import Any

import yaml

from quintet.config.dialects.dialect import tables
from quintet.config.dialects.value_types import ValueType

TABLES = tables("ragen")
REFERENCE_ENV = "custom_envs.SimpleSokoban"
"""Section of an environment in the reference; users choose any name."""
ENV_TYPES: Mapping[str, str] = TABLES["env_types"]
"""Native environment by `env_type`."""


def parse_devices(visible: int | str) -> list[int]:
    """Return device numbers; none if -1 hides all."""
    return [int(number) for number in str(visible).split(",") if number.strip() != "-1"]


def format_devices(devices: tuple[int, ...]) -> tuple[int | str]:
    """Return the value of the key: a number, or several joined by commas."""
    return (",".join(map(str, devices)) if len(devices) > 1 else (*devices, -1)[0],)


def parse_loggers(value: Any) -> Any:
    """Return loggers as RAGEN reads them: a list, or the text of one."""
    return yaml.safe_load(value) if isinstance(value, str) else value


def _loggers(*names: str) -> ValueType:
    def accepts(value: object) -> bool:
        try:
            loggers = parse_loggers(value)
        except yaml.YAMLError:
            return False
        return all(logger in names for logger in (loggers if isinstance(loggers, list) else [loggers]))

    return ValueType(f"a list, or the text of one, of {', '.join(names)}", accepts, names)


VALUE_TYPES = {
    "disabled_section": ValueType(
        "a section with enabled: false", lambda value: isinstance(value, Mapping) and not value.get("enabled")
    ),
    "devices": ValueType(
        "a device number, or several joined by commas such as 0,1,2,3",
        lambda value: re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*|-1", str(value)) is not None,
    ),
    "loggers": _loggers("console", "wandb", "mlflow", "swanlab", "vemlp_wandb", "tensorboard", "clearml"),
}
