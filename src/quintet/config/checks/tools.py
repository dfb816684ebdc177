"""Tool and interaction files that are missing, or that name classes which this version does not have."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from quintet.config import interaction_files, tool_files
from quintet.config.composed import ComposedConfig
from quintet.config.problems import ConfigProblem
from quintet.errors import ConfigError, MachineError


def tool_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield what prevents the classes of `rollout.tool_calls.file` and `rollout.interactions.file` from being used."""
    tool_calls, interactions = composed.experiment.rollout.tool_calls, composed.experiment.rollout.interactions
    if tool_calls is not None and tool_calls.file is not None:
        keys = (tool_files.KEY, tool_files.WITHOUT)
        yield from _file_problems(composed, tool_calls.file, *keys, tool_files.read_tool_file)
    if interactions is not None and interactions.file is not None:
        keys = (interaction_files.KEY, interaction_files.WITHOUT)
        yield from _file_problems(composed, interactions.file, *keys, interaction_files.read_interaction_file)


def _file_problems(
    composed: ComposedConfig, path: str, key: str, without: str, read: Callable[[str], Any]
) -> Iterator[ConfigProblem]:
    try:
        read(path)
    except MachineError as error:
        yield replace(composed.problem(key, error.message, without), elsewhere=True)
    except ConfigError as error:
        yield composed.problem(key, error.message.removeprefix(f"{key} = {path}: "), without)
