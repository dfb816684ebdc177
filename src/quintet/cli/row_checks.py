"""Check of the rows that a run grades, for `quintet train` and `quintet plan`."""

from __future__ import annotations

from quintet.config.composed import ComposedConfig, errors_with_sources
from quintet.rewards.prompt_file_checks import check_prompt_files


def check_graded_rows(composed: ComposedConfig) -> None:
    """Check that all rows of the data files can be graded.

    Raises:
        ConfigError: see `check_prompt_files`, with the source of the key.
        MachineError: a package of a verifier is missing.
    """
    with errors_with_sources(composed):
        check_prompt_files(composed.experiment)
