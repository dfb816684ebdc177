"""Check that everything that a configuration names exists: engines, loggers, packages, files and directories."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from quintet import hardware
from quintet.cli.configuration import model_paths
from quintet.config.checks.adapters import adapter_problems
from quintet.config.composed import ComposedConfig, errors_with_sources
from quintet.config.model_locations.locations import (
    MODEL_FORMS,
    UnreadableConfigError,
    config_file,
    hub_revision,
    is_gguf_file,
    is_hub_name,
    is_hub_offline,
    local_directory,
    published_model,
    read_model_config,
)
from quintet.config.native.advantages import CustomAdvantageConfig
from quintet.config.native.envs import CustomEnvConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import LearnerConfig
from quintet.config.native.losses import CustomLossConfig
from quintet.config.plan.models import policy_path
from quintet.config.problems import ConfigProblem, raise_problems
from quintet.config.schema import format_value
from quintet.config.torchrun import current_rank
from quintet.data.chat_templates import KEY, chat_template
from quintet.errors import ConfigError, UserError, nearest
from quintet.registry import Registry, check_user_file, load_user_object


def check_choices(composed: ComposedConfig) -> None:
    """Check every name, file, directory and package before the run starts.

    Raises:
        ConfigError: one message names everything that is missing.
    """
    raise_problems(_imported(composed))
    raise_problems([*unknown_choices(composed), *data_file_problems(composed), *missing_packages(composed)])
    _load_custom_functions(composed.experiment)
    if current_rank().rank == 0:
        raise_problems(_stores(composed))


def check_action_policy(composed: ComposedConfig) -> None:
    """Check the directory of an action policy, if it is on this machine.

    Raises:
        ConfigError: it has no statistics for the actions of the run.
        MachineError: a file cannot be read.
    """
    config, directory = composed.experiment, Path(composed.experiment.policy.path or "")
    if config.env.is_simulator and (directory / "config.json").is_file():
        from quintet.policies.vla.policy_directory import check_policy_directory

        with errors_with_sources(composed):
            check_policy_directory(directory, config)


def _stores(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield remote directories that cannot be written."""
    config = composed.experiment
    addresses = {
        "checkpoint.remote_dir": None if config.validation.only else config.checkpoint.remote_dir,
        "sft.remote_dir": config.sft.remote_dir if config.sft else None,
    }
    for key, url in addresses.items():
        if url is None:
            continue
        from quintet.training.checkpoint.remote_store import RemoteStore

        try:
            RemoteStore.from_url(url, key).check_writable()
        except UserError as error:
            source = composed.provenance.get(key, "default")
            message = f"{key} = {url!r} ({source}): {error.message.removeprefix(f'{key} = {url}: ')}"
            yield ConfigProblem(key, url, source, message, error.hint and composed.hint_for_user(error.hint))


def _load_custom_functions(config: Experiment) -> None:
    """Load custom advantages, losses and envs, so that errors in them appear before the run starts.

    Raises:
        ConfigError: a file or function is missing.
    """
    algorithm = config.algorithm
    if isinstance(algorithm.advantage, CustomAdvantageConfig):
        load_user_object(algorithm.advantage.function, "algorithm.advantage.function", "quintet.advantages")
    if isinstance(algorithm.loss, CustomLossConfig):
        load_user_object(algorithm.loss.function, "algorithm.loss.function", "quintet.losses")
    for env in config.run_envs:
        if isinstance(env.config, CustomEnvConfig):
            from quintet.envs.custom_env import load_custom_env
            from quintet.envs.factory import env_errors_under_key

            with env_errors_under_key(env.key):
                load_custom_env(env.config)


def _imported(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Import `external_libs`, which may register names; yield those that cannot be imported."""
    for name in composed.experiment.external_libs:
        try:
            import_module(name)
        except ImportError as error:
            source = composed.provenance.get("external_libs", "default")
            message = f"external_libs = {name!r} ({source}) cannot be imported: {error}"
            yield ConfigProblem(
                "external_libs", name, source, message, "install it, or add its directory to PYTHONPATH"
            )


def unknown_choices(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield unknown names and missing directories."""
    for key, name, registry in _registered_names(composed):
        try:
            registry.get(name)
        except ConfigError as error:
            source = composed.provenance.get(key, "default")
            yield ConfigProblem(key, name, source, f"{key} = {name!r} ({source}): {error.message}", error.hint)
    config = composed.experiment
    for key, path in model_paths(config).items():
        if key != "sft.path":  # `check_sft` checks it
            yield from missing_model(composed, key, path)
    if config.policy.lora is not None:
        yield from _directory(composed, "policy.lora.path", config.policy.lora.path, "a directory with adapters")
    yield from adapter_problems(composed)
    yield from template_problems(composed)
    yield from user_file_problems(composed)
    yield from _checkpoint(composed, config.resume)


def user_file_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield files of the user that are missing or do not define what the configuration names, without running them."""
    for key, reference in _user_files(composed.experiment).items():
        try:
            check_user_file(reference or "", key)
        except ConfigError as error:
            source = composed.provenance.get(key, "default")
            named = f"{key} = {reference!r}"
            message = error.message.replace(named, f"{named} ({source})", 1)
            yield ConfigProblem(key, reference, source, message, error.hint)


def _user_files(config: Experiment) -> dict[str, str | None]:
    """Return functions and classes of the user by key."""
    advantage, loss = config.algorithm.advantage, config.algorithm.loss
    custom_envs = {f"{env.key}.path": env.config for env in config.run_envs}
    return {
        "reward.function": config.reward.function if config.reward else None,
        "evaluation.function": config.evaluation.function if config.evaluation else None,
        "data.dataset_class": config.data.dataset_class if config.data else None,
        "algorithm.advantage.function": advantage.function if isinstance(advantage, CustomAdvantageConfig) else None,
        "algorithm.loss.function": loss.function if isinstance(loss, CustomLossConfig) else None,
        **{key: env.path for key, env in custom_envs.items() if isinstance(env, CustomEnvConfig)},
    }


def data_file_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield missing local data files; URLs are checked when they are copied."""
    data = composed.experiment.data
    if data is None or data.dataset_class is not None:
        return
    from quintet.data.data_files import cache_directory, resolve_files

    for key, names in {"data.train_files": data.train_files, "data.validation_files": data.validation_files}.items():
        try:
            resolve_files([name for name in names if "://" not in name], key, cache_directory(data.cache_dir))
        except ConfigError as error:
            source = composed.provenance.get(key, "default")
            message = f"{key} = {error.value!r} ({source}): {error.message.removeprefix(f'{key}: ')}"
            yield ConfigProblem(key, error.value, source, message, error.hint)


def missing_packages(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield engines, loggers, envs, verifiers and learners whose package is not installed."""
    for key, name, registry in _registered_names(composed):
        entry = next((entry for entry in registry if entry.name == name), None)
        if entry is not None and (missing := entry.missing()):
            yield _missing_package(composed, key, name, ", ".join(missing), entry.guide)
    yield from _missing_server(composed)
    yield from _missing_judge_engines(composed)
    for name in _learners(composed.experiment):
        learner: LearnerConfig = getattr(composed.experiment, name)
        if learner.memory.liger and not hardware.is_installed("liger_kernel"):
            key = f"{name}.memory.liger"
            yield _missing_package(composed, key, True, "liger-kernel", f"pip install liger-kernel, or {key}=false")


def _missing_server(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield the engine if it is a server that would be started in this environment, without its package."""
    rollout = composed.experiment.rollout
    options = rollout.engine_options
    is_started_here = options.server_url is None and options.server_python is None
    if rollout.engine == "sglang-server" and is_started_here and not hardware.is_installed("sglang"):
        key = "rollout.engine_options"
        guide = (
            f"set {key}.server_url to a running server, or {key}.server_python to the interpreter of another "
            "environment with SGLang (docs/sglang.md)"
        )
        yield _missing_package(composed, "rollout.engine", rollout.engine, "sglang", guide)


def _missing_judge_engines(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield engines of the servers of judges whose package is not installed."""
    reward = composed.experiment.reward
    for section, judge in reward.judges.items() if reward is not None else ():
        engine = "hf" if judge.server is None else judge.server.engine
        if engine != "hf" and not hardware.is_installed(engine):
            key = f"reward.{section}.server.engine"
            yield _missing_package(composed, key, engine, engine, f"install it, or {key}=hf")


def _missing_package(composed: ComposedConfig, key: str, name: object, package: str, guide: str) -> ConfigProblem:
    source = composed.provenance.get(key, "default")
    message = f"{key} = {format_value(name)} ({source}) needs {package}, not installed here"
    return ConfigProblem(key, name, source, message, partial(composed.hint_for_user, guide))


def _learners(config: Experiment) -> list[str]:
    """Return the learners of the run."""
    if config.evaluation is not None or config.generation is not None:
        return []
    has_rl = config.sft_only is None
    present = {"critic": config.needs_critic, "reference": config.needs_reference}
    return ["actor", *(name for name, needed in present.items() if needed and has_rl)]


def _registered_names(composed: ComposedConfig) -> Iterator[tuple[str, str, Registry[Any]]]:
    """Yield key, name and registry of each registered name in the configuration."""
    from quintet.config.native.envs import ENVS, SimulatorConfig
    from quintet.rewards.verifiers.registry import VERIFIERS
    from quintet.rollout.engines.engine import ENGINES
    from quintet.runtime.learners.learner_backends import LEARNER_BACKENDS
    from quintet.tracking.logger import LOGGERS

    config = composed.experiment
    yield from ((f"{name}.backend", getattr(config, name).backend, LEARNER_BACKENDS) for name in _learners(config))
    if isinstance(config.env, SimulatorConfig):
        from quintet.envs.simulators.registry import SIMULATORS

        simulators = {"env": config.env, "validation.simulator": config.validation.simulator}
        named = ((key, env.simulator) for key, env in simulators.items() if env is not None)
        yield from ((f"{key}.simulator", name, SIMULATORS) for key, name in named if ":" not in name)
    elif not config.env.reads_prompts:
        played = [env for env in config.run_envs if not env.config.is_simulator]
        yield from ((f"{env.key}.name", env.config.name, ENVS) for env in played)
    yield "rollout.engine", config.rollout.engine, ENGINES
    if config.reward is not None and config.reward.kind != "rules":
        yield "reward.kind", config.reward.kind, VERIFIERS
    yield from (("tracking.loggers", name, LOGGERS) for name in config.tracking.loggers)


def _checkpoint(composed: ComposedConfig, resume: str) -> Iterator[ConfigProblem]:
    """Check that `resume` is a checkpoint, not for example a run directory."""
    keywords, expected = ("auto", "never"), "a global_step_N directory"
    if resume in keywords:
        return
    if not os.path.isdir(resume):
        close = nearest(resume, keywords)
        yield from _directory(composed, "resume", resume, expected, f"did you mean {close}?" if close else None)
    elif not any(os.path.isfile(os.path.join(resume, name)) for name in ("state.json", "manifest.json")):
        source = composed.provenance.get("resume", "default")
        checkpoints = [*Path(resume).glob("checkpoints/global_step_*"), *Path(resume).glob("global_step_*")]
        newest = sorted(checkpoints, key=lambda path: (len(path.name), path.name))
        hint = f"did you mean {newest[-1]}?" if newest else f"set it to {expected}, auto or never"
        yield ConfigProblem("resume", resume, source, f"resume = {resume!r} ({source}): not a checkpoint", hint)


def _directory(
    composed: ComposedConfig, key: str, value: str | None, expected: str, hint: str | None = None
) -> Iterator[ConfigProblem]:
    if value is None or os.path.isdir(value):
        return
    path, source = Path(value), composed.provenance.get(key, "default")
    close = nearest(path.name, _directories(path.parent))
    hint = hint or (f"did you mean {path.parent / close}?" if close else f"set it to {expected}")
    yield ConfigProblem(key, value, source, f"{key} = {value!r} ({source}): no such directory", hint)


def missing_model(composed: ComposedConfig, key: str, value: str | None) -> Iterator[ConfigProblem]:
    """Yield a problem with a model that is not on this machine and cannot be downloaded, or is not converted."""
    if value is None or published_model(value) or local_directory(value):
        return
    if is_gguf_file(value) and os.path.exists(os.path.expanduser(value)):
        try:
            read_model_config(value)
        except (UnreadableConfigError, OSError) as error:
            yield composed.problem(key, f"this file is not converted: {error}", f"{key}=DIRECTORY")
    elif not is_hub_name(value):
        yield from _directory(composed, key, value, MODEL_FORMS)
    elif is_hub_offline() or os.path.isdir(os.path.dirname(value)):  # a directory here, with a typing error
        yield from _directory(composed, key, value, MODEL_FORMS, _offline_hint(value))


def _offline_hint(name: str) -> str:
    path, (model, revision) = Path(name), hub_revision(name)
    close = nearest(path.name, _directories(path.parent))
    download = f"hf download {model}" + (f" --revision {revision}" if "@" in name else "")
    other = f"did you mean {path.parent / close}?" if close else f"set it to {MODEL_FORMS}"
    return f"{download}, which stores the model in the cache of the hub, or unset HF_HUB_OFFLINE; or {other}"


def _directories(parent: Path) -> list[str]:
    """Return the names of the directories in `parent`, none if it is not readable."""
    try:
        return [entry.name for entry in os.scandir(parent) if entry.is_dir()]
    except OSError:
        return []


TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
"""Files with chat templates, those first that transformers prefers."""
MAX_BYTES = 64 << 20
"""Larger files are not read."""


def template_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield a problem if responses may call tools and the template never mentions them."""
    config = composed.experiment
    if config.data is None or config.rollout.tool_calls is None:
        return
    try:
        text = chat_template(config.data.template).text or _stored_template(composed)
    except ConfigError:
        return  # an unknown template is reported when it is used
    if text and "tools" not in text:
        yield composed.problem(
            KEY, "the chat template does not show tools", f"{KEY}=hermes, or rollout.tool_calls=null"
        )


def _stored_template(composed: ComposedConfig) -> str:
    """Return the texts of all templates of the policy's tokenizer; empty if there are none or no files."""
    policy, path = composed.experiment.policy, policy_path(composed.experiment)
    file = None if path is None else config_file(path)
    directory = Path(policy.tokenizer) if policy.tokenizer else file and file.parent
    if directory is None:
        return ""
    others = sorted(directory.glob("additional_chat_templates/*.jinja"))
    texts = [_read(other) for other in others]
    return "\n".join([*texts, next(filter(None, (_read(directory / name) for name in TEMPLATE_FILES)), "")])


def _read(file: Path) -> str:
    """Return the template in a file, or all of them; empty if there is none."""
    try:
        if file.stat().st_size > MAX_BYTES:
            return ""
        text = file.read_text(encoding="utf-8")
        stored: Any = text if file.suffix == ".jinja" else json.loads(text).get("chat_template")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    return stored if isinstance(stored, str) else json.dumps(stored) if stored else ""
