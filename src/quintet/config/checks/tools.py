"""Tool files that are missing, or whose tools this version does not have."""

from collections.abc import Iterator
from dataclasses import replace

from quintet.config.composed import ComposedConfig
from quintet.config.problems import ConfigProblem
from quintet.config.tool_files import KEY, WITHOUT, read_tool_file
from quintet.errors import ConfigError, MachineError


def tool_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield what prevents the tools of `rollout.tool_calls.file` from being used."""
    tool_calls = composed.experiment.rollout.tool_calls
    if tool_calls is None or tool_calls.file is None:
        return
    try:
        read_tool_file(tool_calls.file)
    except MachineError as error:
        yield replace(composed.problem(KEY, error.message, WITHOUT), elsewhere=True)
    except ConfigError as error:
        problem = error.message.removeprefix(f"{KEY} = {tool_calls.file}: ")
        yield composed.problem(KEY, problem, WITHOUT)
