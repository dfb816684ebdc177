"""`quintet generate`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.cli.choices import check_choices
from quintet.cli.config_source import NATIVE
from quintet.cli.configuration import (
    TRAINING_CODE,
    as_overrides,
    generation_settings,
    load_config,
    load_run_config,
    print_key_states,
    with_defaults,
)
from quintet.cli.evaluate import data_settings
from quintet.cli.messages import warn
from quintet.cli.model_downloads import downloaded_model, with_downloaded_models
from quintet.cli.options import GenerateOptions
from quintet.cli.ranks import run_on_all_ranks
from quintet.cli.transformers_setup import silence_transformers
from quintet.config.composed import ComposedConfig
from quintet.config.plan.images import check_images
from quintet.config.plan.placement import check_placement
from quintet.config.torchrun import current_rank
from quintet.errors import ConfigError
from quintet.tracking.run_directory import RunDirectory

if TYPE_CHECKING:
    from quintet.pipelines.model_lookup import StoredModel


def run(config: str | None, overrides: list[str], dialect: str | None, unknown_keys: str) -> int:
    """Check the configuration, then generate."""
    return run_composed(load_config(config, overrides, dialect, unknown_keys))


def run_composed(composed: ComposedConfig) -> int:
    """Check a composed configuration, then generate."""
    composed = prepared(composed)
    check_choices(composed)
    check_placement(composed)
    check_images(composed)
    composed = with_downloaded_models(composed)
    if current_rank().rank == 0:
        RunDirectory.create_for(composed)
        print_key_states(composed)
    silence_transformers()
    from rich.console import Console

    from quintet.pipelines.generate import generate

    return run_on_all_ranks(composed, lambda controller: generate(composed, Console(), controller))


def prepared(composed: ComposedConfig) -> ComposedConfig:
    """Return the configuration with the path of its model, and with a run directory of its own.

    Raises:
        ConfigError: there is no section `generation`, or no model.
    """
    from quintet.pipelines.model_lookup import with_configured_model

    if composed.experiment.generation is None:
        message = "this configuration has no section `generation`, so there is nothing to generate"
        hint = "generation.output_path=FILE.parquet; or quintet generate MODEL --data FILE --output FILE"
        raise ConfigError(message, key="generation", hint=hint)
    composed = with_defaults(composed, TRAINING_CODE)
    return _with_unused_directory(with_configured_model(composed, warn, "generate with"))


def _with_unused_directory(composed: ComposedConfig) -> ComposedConfig:
    """Name a run without a name for its output, and rename one whose directory has a training run."""
    config, generation = composed.experiment, composed.experiment.generation
    if composed.source("name") == "default" and generation is not None:
        name = f"generate-{Path(generation.output_path).stem}"
    elif RunDirectory.from_config(config).config.exists():
        name = f"generate-{config.name}"
    else:
        return composed
    sources = {**composed.provenance, "name": composed.source("generation.output_path")}
    return replace(composed, experiment=config.model_copy(update={"name": name}), provenance=sources)


def as_config(
    target: str | None, overrides: list[str], dialect: str | None, options: GenerateOptions
) -> tuple[str | None, list[str]]:
    """Return a configuration and overrides; with `--data` those that generate with the model `target`.

    Raises:
        ConfigError: an option of a model is given without one, or one is missing; or see `load_run_config`.
        MachineError: there is no model.
    """
    if options.data is None:
        for option in options.set_options():
            message = f"{option} is only valid with a model and --data; a configuration sets it by its keys"
            raise ConfigError(message, key=option, hint="quintet generate MODEL --data FILE --output FILE")
        return target, overrides
    if target is None or options.output is None:
        missing = "the model" if target is None else "--output"
        raise ConfigError(f"{missing} is missing", key="generate", hint="quintet generate MODEL --data FILE -o FILE")
    if dialect not in (None, NATIVE):
        message = f"--dialect {dialect}: with a model, native keys apply"
        raise ConfigError(message, key="--dialect", hint="remove --dialect")
    from quintet.pipelines.model_lookup import find_model

    source = find_model(downloaded_model(target), warn)
    arguments = [*as_overrides(_model_settings(source, options)), *overrides]
    load_run_config(source.config, arguments, unused=TRAINING_CODE)
    return None if source.config is None else str(source.config), arguments


def _model_settings(source: StoredModel, options: GenerateOptions) -> dict[str, Any]:
    """Return the settings that turn the configuration of the model's run, or the defaults, into a generation."""
    settings = generation_settings(str(source.policy), has_run=source.config is not None)
    settings |= data_settings(str(options.data), source.config)
    rank = current_rank()
    settings |= {
        "placement": {"nodes": rank.size // rank.local_size, "devices_per_node": rank.local_size},
        "resume": "auto",
        "name": f"generate-{Path(str(options.output)).stem}",
        "rollout.tool_calls": None,
        "rollout.interactions": None,
        "generation": {"output_path": options.output, "samples": options.samples or 1},
    }
    return settings | dict(_sampling(options))


def _sampling(options: GenerateOptions) -> Iterator[tuple[str, Any]]:
    if options.temperature is not None:
        yield "rollout.do_sample", options.temperature > 0
        yield "rollout.temperature", options.temperature or 1.0
    if options.max_tokens is not None:
        yield "rollout.max_response_tokens", options.max_tokens
