"""Models whose architecture this version does not compute, from their `config.json`."""

from collections.abc import Iterator

from quintet.config.composed import ComposedConfig, config_value
from quintet.config.model_locations.locations import UnreadableConfigError, read_model_config
from quintet.config.plan.model_support import unsupported_reason
from quintet.config.problems import ConfigProblem, raise_problems

PATHS = ("policy.path", "sft.path", "critic.path", "reference.path")
"""Keys of the paths of causal language models."""


def model_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield the paths of models that are refused, if their `config.json` is there."""
    config = composed.experiment
    is_only_sampled = config.generation is not None and config.rollout.engine != "hf"
    if config.env.is_simulator or is_only_sampled:
        return
    for key in PATHS:
        path = config_value(config, key) if key != "sft.path" or config.sft else None
        try:
            settings = None if path is None else read_model_config(str(path))
        except (UnreadableConfigError, OSError, ValueError, RecursionError):
            continue  # loading the model says why
        if settings is None:
            continue
        overrides = config.policy.overrides if key in ("policy.path", "sft.path") else {}
        if reason := unsupported_reason({**settings, **overrides}):
            yield composed.problem(key, f"{reason}; docs/models.md lists the supported model families")


def check_models(composed: ComposedConfig) -> None:
    """Check the architectures of the models before they are loaded.

    Raises:
        ConfigError: one message names every path of a model that is refused.
    """
    raise_problems(model_problems(composed))
