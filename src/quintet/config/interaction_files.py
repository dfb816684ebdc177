"""Simulated users named by verl's interaction files: lists of `name`, `class_name` and `config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from quintet.config.capabilities import Capability
from quintet.config.native.interactions import InteractionsConfig, UserConfig
from quintet.config.yaml_reader import read_file
from quintet.errors import ConfigError

KEY: Final = "rollout.interactions.file"
WITHOUT: Final = "rollout.interactions=null"
"""The setting with which a run needs no interaction file."""
CLASSES: Final[Mapping[str, str]] = {"verl.interactions.gsm8k_interaction.Gsm8kInteraction": "gsm8k"}
"""Built-in users by the classes of verl that they stand for."""


def run_users(config: InteractionsConfig) -> dict[str, UserConfig]:
    """Return the users of a run by name: those of the file, and those of the configuration.

    Raises:
        ConfigError: the file is not one of interactions, or names a class of verl that has no counterpart here.
        MachineError: it cannot be read.
    """
    named = {} if config.file is None else read_interaction_file(config.file)
    return {**named, **config.users}


def read_interaction_file(path: str) -> dict[str, UserConfig]:
    """Return the users in a file; see `run_users`."""
    entries = read_file(Path(path), {}).get("interaction")
    if not isinstance(entries, list) or not entries:
        raise _error(path, "has no list `interaction`")
    users: dict[str, UserConfig] = {}
    for name, user in (_user(entry, path) for entry in entries):
        if name in users:
            raise _error(path, f"has two interactions named {name}")
        users[name] = user
    return users


def _user(entry: Any, path: str) -> tuple[str, UserConfig]:
    """Return the name of a user, by default that of its class as verl derives it, and its configuration."""
    if not isinstance(entry, Mapping) or not isinstance(entry.get("class_name"), str):
        raise _error(path, f"has an interaction without class_name: {entry!r:.80}")
    class_name = entry["class_name"]
    module, _, attribute = class_name.rpartition(".")
    name = str(entry.get("name") or attribute.removesuffix("Interaction").lower())
    if class_name in CLASSES:
        return name, UserConfig(user=CLASSES[class_name], arguments={})
    if not module or class_name.startswith("verl."):
        raise _error(path, f"class_name = {class_name} {Capability.TOOLS.refusal()}")
    config = entry.get("config") or {}
    if not isinstance(config, Mapping):
        raise _error(path, f"the config of {class_name} is no mapping: {config!r:.80}")
    return name, UserConfig(user=f"{module}:{attribute}", arguments={"config": {**config, "name": name}})


def _error(path: str, problem: str) -> ConfigError:
    return ConfigError(f"{KEY} = {path}: {problem}", key=KEY, value=path, source=path, hint=WITHOUT)
