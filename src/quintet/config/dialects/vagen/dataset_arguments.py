"""Arguments of VAGEN's `create_dataset` until 2025-04, which say what `env_config.yaml` says since then."""

import re
from collections.abc import Sequence
from typing import Any

from quintet.config.dialects.vagen.key_values import ENV

PROGRAM = re.compile(r"vagen\.env(?:_new)?\.(\w+)\.create_dataset")
ENV_OPTIONS = {
    "num_boxes": ("num_boxes", int),
    "max_steps": ("max_steps", int),
    "search_depth": ("search_depth", int),
    "max_action_per_step": ("max_actions_per_step", int),
    "max_action_penalty": ("max_action_penalty", float),
    "format_reward": ("format_reward", float),
}
"""Options of the environment, with their names in `env_config`."""
DEFAULTS = {"max_action_per_step": 1, "max_action_penalty": -0.1}
"""Defaults that differ from those of `env_config.yaml`."""
CANDIDATES, TRAIN_SHARE = 20_000, 0.8


def section_of_dataset(module: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the section of the environment whose start states a program writes; empty for other programs.

    >>> section_of_dataset("vagen.env.sokoban.create_dataset", ["--n_candidate", "10"])["env1"]["train_size"]
    8
    """
    matched = PROGRAM.fullmatch(module)
    if matched is None:
        return {}
    options = _options(arguments)
    numbers = {name: values[0] for name, values in options.items() if values}
    config: dict[str, Any] = {
        name: kind(numbers[option] if option in numbers else DEFAULTS[option])
        for option, (name, kind) in ENV_OPTIONS.items()
        if option in numbers or option in DEFAULTS
    }
    if "dim_room" in options:
        config["dim_room"] = [int(size) for size in options["dim_room"]]
    candidates = int(numbers.get("n_candidate", CANDIDATES))
    train_size = int(float(numbers.get("train_ratio", TRAIN_SHARE)) * candidates)
    section = {
        "env_name": matched[1],
        "env_config": config | {"render_mode": "vision" if "visual_env" in options else "text"},
        "train_size": train_size,
        "test_size": candidates - train_size,
    }
    if "max_action_length" in numbers:
        section["max_action_length"] = int(numbers["max_action_length"])
    return {ENV: section}


def _options(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the values after each option."""
    options: dict[str, list[str]] = {}
    values: list[str] = []
    for word in arguments:
        if word.startswith("--"):
            values = options[word.removeprefix("--")] = []
        else:
            values.append(word)
    return options
