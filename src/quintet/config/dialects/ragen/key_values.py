"""Value types of RAGEN's keys that a type expression cannot describe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from quintet.config.dialects.value_types import ValueType


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
    "loggers": _loggers("console", "wandb", "mlflow", "swanlab", "vemlp_wandb", "tensorboard", "clearml"),
    "local_loggers": _loggers("console", "wandb", "tensorboard"),
}
NATIVE_VALUES: Mapping[str, Mapping[Any, Any]] = {}
