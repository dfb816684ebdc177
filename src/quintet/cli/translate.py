"""`quintet translate`: convert a configuration to another framework's format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quintet.cli.config_source import NATIVE, check_dialect
from quintet.cli.configuration import inspect_config
from quintet.cli.messages import warn
from quintet.config.dialects.registry import DIALECTS
from quintet.config.problems import ConfigProblem
from quintet.config.translate import translate
from quintet.config.yaml_writer import dump_config
from quintet.errors import ConfigError, MachineError


def run(
    config: str | None, overrides: list[str], dialect: str | None, unknown_keys: str, *, to: str, output: str | None
) -> None:
    """Print the translated configuration as YAML, or write it to a new file.

    Raises:
        ConfigError: The configuration is invalid, or the target format cannot express the run.
        MachineError: A file cannot be read or written.
    """
    check_dialect(to)
    check_new_file(output)
    inspected = inspect_config(config, overrides, dialect, unknown_keys)
    for remark in inspected.composed.remarks:
        warn(remark)
    if to == inspected.dialect and to != NATIVE:
        raise ConfigError(f"{config} is already in the format of {to}", key="--to", hint="choose another target format")
    text, lost = dump_config(inspected.composed), 0
    if to != NATIVE:
        translation = translate(inspected.composed, DIALECTS[to])
        text, lost = translation.text(), len(translation.lost)
    if lost:
        warn(f"{lost} keys have no counterpart in {to}; they are listed in comments at the end")
    unsupported = [] if inspected.dialect == NATIVE else [key for key in inspected.unsupported if not key.elsewhere]
    if unsupported:
        warn("the run has settings that are not supported yet; comments at the end list them")
    write_text(text + _unsupported_comments(unsupported), output)


def _unsupported_comments(problems: Sequence[ConfigProblem]) -> str:
    """Return comments about the settings that a translation lacks, since this version does not support them."""
    if not problems:
        return ""
    lines = "".join(f"#   {' '.join(problem.message.split())}\n" for problem in problems)
    return f"# The original run also has these settings, and is another one without them:\n{lines}"


def check_new_file(output: str | None) -> None:
    """Check that an output file does not exist yet.

    Raises:
        MachineError: it does.
    """
    if output is not None and Path(output).exists():
        raise MachineError(f"{output} already exists", "choose another file name, or remove the file")


def write_text(text: str, output: str | None) -> None:
    """Write a text to a file, or print it if there is none.

    Raises:
        MachineError: the file cannot be written.
    """
    if output is None:
        print(text, end="")
        return
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise MachineError(
            f"cannot write {output}: {error.strerror}", "choose a file in an existing writable directory"
        ) from None
