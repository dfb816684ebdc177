"""`quintet sft`."""

from __future__ import annotations

import os

from quintet.cli.choices import check_choices, missing_model
from quintet.cli.configuration import load_config, print_key_states
from quintet.cli.model_downloads import with_downloaded_models
from quintet.cli.ranks import run_on_all_ranks
from quintet.cli.result_warnings import warn_about_results
from quintet.cli.transformers_setup import silence_transformers
from quintet.config.checks.models import check_models
from quintet.config.composed import ComposedConfig
from quintet.config.plan.placement import check_placement
from quintet.config.problems import raise_problems
from quintet.config.torchrun import current_rank
from quintet.errors import ConfigError

MISSING_SECTION_HINT = "add `sft: {}` at least; RAGEN's rl_or_sft=sft and verl's sft_trainer files fine-tune, too"


def run(config: str | None, overrides: list[str], dialect: str | None, unknown_keys: str) -> int:
    """Check the configuration, then fine-tune."""
    return run_composed(load_config(config, overrides, dialect, unknown_keys))


def run_composed(composed: ComposedConfig) -> int:
    """Check and fine-tune a composed configuration."""
    check_sft(composed)
    check_models(composed)
    check_choices(composed)
    check_placement(composed)
    warn_about_results(composed)
    composed = with_downloaded_models(composed)
    from quintet.tracking.run_directory import RunDirectory

    if current_rank().rank == 0:
        RunDirectory.create_for(composed)
        print_key_states(composed)
    silence_transformers()
    from rich.console import Console

    from quintet.pipelines.sft.fine_tuning import fine_tune

    return run_on_all_ranks(composed, lambda controller: fine_tune(composed, Console(), controller))


def check_sft(composed: ComposedConfig) -> None:
    """Check the `sft` section before heavy imports.

    Raises:
        ConfigError: There is no `sft` section, there is no training data, or the model is missing.
    """
    config = composed.experiment
    if config.sft is None:
        message = "this configuration has no section `sft`, so there is nothing to fine-tune"
        raise ConfigError(message, key="sft", hint=MISSING_SECTION_HINT)
    if config.sft.episodes is None and (config.data is None or not config.data.train_files):
        hint = "set data.train_files=[FILE.parquet], or sft.episodes={} for expert demonstrations"
        raise ConfigError("there is no training data", key="data.train_files", hint=composed.hint_for_user(hint))
    lora = config.sft.lora
    raise_problems(missing_model(composed, "sft.path", config.sft.path))
    if lora is not None and lora.path is not None and not os.path.isdir(lora.path):
        key = "sft.lora.path"
        message = f"{composed.describe(key)}: no such directory"
        raise ConfigError(message, key=key, value=lora.path, hint="set it to a directory on this machine")
