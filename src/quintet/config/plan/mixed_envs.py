"""Checks of `envs`, several envs in one run."""

import re
from collections.abc import Iterator

from quintet.config.composed import ComposedConfig
from quintet.config.native.envs import FrozenLakeConfig
from quintet.config.native.mixed_envs import ALL_ENVS
from quintet.config.problems import ConfigProblem, setting_problem
from quintet.config.schema import format_value

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def mixture_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield the problems of the entries of `envs` and of keys that contradict them."""
    envs = composed.experiment.envs
    if not envs:
        return
    yield from _check_no_single_env(composed)
    for name, entry in envs.items():
        yield from _check_name(composed, name)
        if entry.env.name == "prompts":
            key = f"envs.{name}.env.name"
            problem, hint = "prompts from files cannot be mixed with envs", f"leave envs.{name} out, for a separate run"
            yield setting_problem(key, "prompts", composed.source(key), problem, hint)


def _check_no_single_env(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Refuse keys of `env` that were set beside `envs`."""
    env, default = composed.experiment.env, FrozenLakeConfig()
    sources = composed.provenance.items()
    names = [key.split(".")[1] for key, source in sources if key.startswith("env.") and source != "default"]
    if names:
        name = next((name for name in names if getattr(env, name) != getattr(default, name, None)), names[0])
        problem = f"the run uses the envs {', '.join(composed.experiment.envs)} from `envs`, not `env`"
        yield composed.problem(f"env.{name}", problem, "leave `env` out, and set its keys in one of `envs`")


def _check_name(composed: ComposedConfig, name: str) -> Iterator[ConfigProblem]:
    key = f"envs.{name}"
    sources = (source for other, source in composed.provenance.items() if other.startswith(f"{key}."))
    source = next((source for source in sources if source != "default"), "default")
    if not NAME.fullmatch(name):
        problem = f"{format_value(name)} cannot be a name in metrics and directories"
        yield ConfigProblem(key, name, source, f"{key} ({source}): {problem}", "rename it: letters, digits, - and _")
    elif name == ALL_ENVS:
        problem = f"metrics use {ALL_ENVS!r} for all envs together"
        yield ConfigProblem(key, name, source, f"{key} ({source}): {problem}", "rename it")
