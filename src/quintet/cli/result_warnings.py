"""Warnings of `quintet plan` about what a run learns, printed by the commands that train."""

from __future__ import annotations

from quintet.cli.messages import warn
from quintet.config.composed import ComposedConfig
from quintet.config.plan.advice import result_warnings
from quintet.config.plan.run_plan import plan_run
from quintet.config.torchrun import current_rank


def warn_about_results(composed: ComposedConfig) -> None:
    """Print the warnings that concern the result, once for all ranks.

    Raises:
        ConfigError: see `plan_run`.
    """
    if current_rank().rank == 0:
        for line in result_warnings(plan_run(composed)):
            warn(line)
