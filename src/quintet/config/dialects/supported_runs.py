"""Refusals of native runs that a framework has no counterpart for."""

from collections.abc import Collection

from quintet.config.native.experiment import Experiment
from quintet.errors import ConfigError


def require_single_env(experiment: Experiment, framework: str) -> None:
    """Raise unless the run has a single environment, or evaluates stored answers.

    Raises:
        ConfigError: it has several.
    """
    if experiment.envs and experiment.evaluation is None:
        message = f"{framework} runs have a single environment, and this run has {', '.join(experiment.envs)}"
        raise ConfigError(message, key="envs", value=list(experiment.envs), hint="vagen supports several environments")


def require_env(experiment: Experiment, framework: str, envs: Collection[str]) -> None:
    """Raise unless the framework has the run's only environment.

    Raises:
        ConfigError: the run has several environments, or one that is not in `envs`.
    """
    require_single_env(experiment, framework)
    if experiment.env.name not in envs:
        message = f"{framework} has no environment {experiment.env.name}"
        raise ConfigError(message, key="env.name", hint=f"it has {', '.join(envs)}")


def require_no_stages(experiment: Experiment, framework: str) -> None:
    """Raise if the run fine-tunes on demonstrations, evaluates stored answers or only generates.

    Raises:
        ConfigError: it does.
    """
    for key in ("sft", "evaluation", "generation"):
        if getattr(experiment, key) is not None:
            raise ConfigError(f"{framework} has no counterpart for the section {key}", key=key)
