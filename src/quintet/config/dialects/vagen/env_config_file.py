"""Reading VAGEN's `env_config.yaml` without a training configuration."""

from pathlib import Path
from typing import Any

from quintet.config.dialects.composition.foreign_config import compose_config
from quintet.config.dialects.key_checks import illegal_values, unsupported_keys
from quintet.config.dialects.loader import merge_with_reference
from quintet.config.dialects.unknown_keys import unknown_keys
from quintet.config.dialects.vagen.dialect import VAGEN
from quintet.config.dialects.vagen.env_sections import EnvSection, env_problems, env_sections
from quintet.config.problems import ConfigProblem, raise_problems
from quintet.errors import ConfigError


def read_sections(path: Path) -> dict[str, dict[str, Any]]:
    """Return env_name, env_config, train_size and test_size of each section, with defaults for missing ones.

    Raises:
        ConfigError: the file has no section, an unknown option, or an invalid or unsupported value.
        MachineError: the file cannot be read.
    """
    values, _ = merge_with_reference(compose_config(path, []), VAGEN)
    if not any(key.endswith(".env_name") for key in values.merged.sources):
        hint = "write one, such as env1: {env_name: frozenlake, train_size: 10000, test_size: 512}"
        raise ConfigError(f"{path} has no section with an env_name", key="env1.env_name", hint=hint)
    unknown = unknown_keys(values)
    raise_problems(
        [
            *(ConfigProblem(key.key, None, key.source, f"unknown key {key}") for key in unknown),
            *illegal_values(values),
            *unsupported_keys(values),
        ]
    )
    sections = env_sections(values)
    raise_problems(env_problems(values))
    return {
        section.name: {
            "env_name": section["env_name"],
            # a struct without fields cannot be written
            "env_config": {"render_mode": section["env_config.render_mode"]} | _options(section),
            "train_size": section["train_size"],
            "test_size": section["test_size"],
        }
        for section in sections
    }


def _options(section: EnvSection) -> dict[str, Any]:
    """Return the options that the file sets, not the defaults."""
    prefix = f"{section.name}.env_config."
    keys = (key for key in section.values.merged.sources if key.startswith(prefix))
    return {key.removeprefix(prefix): section.values[key] for key in keys}
