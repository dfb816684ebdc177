"""`quintet sft`."""

from __future__ import annotations

import os

from quintet.cli.choices import check_choices
from quintet.cli.configuration import compose
from quintet.cli.ranks import on_all_ranks
from quintet.config import Composed
from quintet.config.plan.placement import refuse_misplaced
from quintet.config.started import started
from quintet.errors import ConfigError

__all__ = ["run", "run_composed"]


def run(config: str | None, overrides: list[str], dialect: str | None, unknown_keys: str) -> int:
    """Check everything, then load what is heavy and fine-tune."""
    return run_composed(compose(config, overrides, dialect, unknown_keys))


def run_composed(composed: Composed) -> int:
    """The same for a configuration that is composed already."""
    _check(composed)
    check_choices(composed)
    refuse_misplaced(composed)
    from quintet.tracking.run_directory import RunDirectory

    if started().rank == 0:
        RunDirectory.made(composed)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from rich.console import Console
    from transformers.utils import logging

    from quintet.pipelines.sft import fine_tune

    logging.disable_progress_bar()

    return on_all_ranks(composed, lambda conductor: fine_tune(composed, Console(), conductor))


def _check(composed: Composed) -> None:
    """What is known to be wrong before anything heavy is loaded.

    Raises:
        ConfigError: nothing is to be fine-tuned, there is nothing to learn from, or the model isn't there.
    """
    config, places = composed.experiment, composed.provenance
    if config.sft is None:
        hint = "give it one, `sft: {}` at least; RAGEN's configurations have rl_or_sft=sft"
        told = "this configuration doesn't ask for fine-tuning: it has no section `sft`"
        raise ConfigError(told, key="sft", hint=hint)
    if config.sft.games is None and (config.data is None or not config.data.train_files):
        hint = "name files, data.train_files=[FILE.parquet], or have games solved, sft.games={}"
        raise ConfigError("there is nothing to learn from", key="data.train_files", hint=hint)
    lora = config.sft.lora
    for key, path in {"sft.path": config.sft.path, "sft.lora.path": lora.path if lora else None}.items():
        if path is not None and not os.path.isdir(path):
            told = f"{key} = {path!r} ({places.get(key, 'default')}): no such directory"
            raise ConfigError(told, key=key, value=path, hint=f"{key} names a directory on this machine")
