"""`quintet train`."""

from __future__ import annotations

import os

from quintet.cli.choices import check_choices
from quintet.cli.configuration import compose
from quintet.cli.ranks import on_all_ranks
from quintet.config.plan.placement import refuse_misplaced
from quintet.config.started import started

__all__ = ["run"]


def run(config: str | None, overrides: list[str], dialect: str | None, unknown_keys: str) -> int:
    """Check everything, then load what is heavy and train; what asks for fine-tuning alone is fine-tuned."""
    composed = compose(config, overrides, dialect, unknown_keys)
    stage = composed.experiment.sft
    if stage is not None and not stage.then_reinforce:
        from quintet.cli.sft import run_composed

        return run_composed(composed)
    check_choices(composed)
    refuse_misplaced(composed)
    from quintet.tracking.run_directory import RunDirectory

    if started().rank == 0:
        RunDirectory.made(composed)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from rich.console import Console
    from transformers.utils import logging

    from quintet.pipelines.rl import train

    logging.disable_progress_bar()

    return on_all_ranks(composed, lambda conductor: train(composed, Console(), conductor))
