"""Whether what a configuration names is there: engines, loggers, directories. Before anything heavy begins."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from quintet.config import Composed
from quintet.config.adapters import adapter_faults
from quintet.config.faults import Fault, raise_faults
from quintet.config.keys import show
from quintet.config.native import Experiment
from quintet.config.native.advantages import OutsideAdvantageConfig
from quintet.config.native.learners import LearnerConfig
from quintet.config.native.losses import OutsideLossConfig
from quintet.config.native.worlds import CustomWorldConfig
from quintet.config.plan.steps import fine_tuning
from quintet.config.started import started
from quintet.errors import ConfigError, UserError, nearest
from quintet.registry import Registry, load_outside

__all__ = ["check_choices", "missing_packages", "unknown_choices"]


def check_choices(composed: Composed) -> None:
    """Look up every name and every directory to be read.

    Raises:
        ConfigError: one message for all that is missing.
    """
    raise_faults(_imported(composed))
    raise_faults([*unknown_choices(composed), *_data_files(composed), *missing_packages(composed)])
    _own_functions(composed.experiment)
    if started().rank == 0:
        raise_faults(_stores(composed))


def _stores(composed: Composed) -> Iterator[Fault]:
    """Addresses that are to be copied to and can't be written."""
    config = composed.experiment
    addresses = {
        "checkpoint.remote_dir": None if config.validation.only else config.checkpoint.remote_dir,
        "sft.remote_dir": config.sft.remote_dir if config.sft else None,
    }
    for key, url in addresses.items():
        if url is None:
            continue
        from quintet.training.remote import RemoteStore

        try:
            RemoteStore.of(url, key).prove()
        except UserError as error:
            source = composed.provenance.get(key, "default")
            message = f"{key} = {url!r} ({source}): {error.message.removeprefix(f'{key} = {url}: ')}"
            yield Fault(key, url, source, message, error.hint)


def _own_functions(config: Experiment) -> None:
    """Load the user's own estimator, loss and world, so that what is wrong with them is told before anything begins.

    Raises:
        ConfigError: there is no such file or function.
    """
    algorithm = config.algorithm
    if isinstance(algorithm.advantage, OutsideAdvantageConfig):
        load_outside(algorithm.advantage.function, "algorithm.advantage.function", "quintet.advantages")
    if isinstance(algorithm.loss, OutsideLossConfig):
        load_outside(algorithm.loss.function, "algorithm.loss.function", "quintet.losses")
    for one in config.played:
        if isinstance(one.config, CustomWorldConfig):
            from quintet.envs.catalogue import under_key
            from quintet.envs.custom import load_custom

            with under_key(one.key):
                load_custom(one.config)


def _imported(composed: Composed) -> Iterator[Fault]:
    """Import what people add from outside, which may register what they name."""
    for name in composed.experiment.external_libs:
        try:
            import_module(name)
        except ImportError as error:
            source = composed.provenance.get("external_libs", "default")
            message = f"external_libs = {name!r} ({source}) can't be imported: {error}"
            yield Fault("external_libs", name, source, message, "install it, or put its directory into PYTHONPATH")


def unknown_choices(composed: Composed) -> Iterator[Fault]:
    """Every name that nothing is registered under, and every directory that isn't there."""
    for key, name, registry in _named(composed):
        try:
            registry.get(name)
        except ConfigError as error:
            source = composed.provenance.get(key, "default")
            yield Fault(key, name, source, f"{key} = {name!r} ({source}): {error.message}", error.hint)
    config = composed.experiment
    if config.policy.tokenizer:
        yield from _directory(composed, "policy.tokenizer", config.policy.tokenizer, "a directory with a tokenizer")
    paths = {
        "policy.path": config.policy.path,
        "critic.path": config.critic.path if config.needs_critic else None,
        "reference.path": config.reference.path if config.needs_reference else None,
        "reward.model.path": config.reward.model.path if config.reward and config.reward.model else None,
    }
    for key, path in paths.items():
        yield from _directory(composed, key, path, "a directory with config.json and weights")
    if config.policy.lora is not None:
        yield from _directory(composed, "policy.lora.path", config.policy.lora.path, "a directory with adapters")
    yield from adapter_faults(composed)
    yield from _checkpoint(composed, config.resume)


def _data_files(composed: Composed) -> Iterator[Fault]:
    """Data files that aren't there; what lies at an address is looked for when it is copied."""
    data = composed.experiment.data
    if data is None or data.dataset_class is not None:
        return
    from quintet.data.files import cache_directory, find_files

    for key, names in {"data.train_files": data.train_files, "data.validation_files": data.validation_files}.items():
        try:
            find_files([name for name in names if "://" not in name], key, cache_directory(data.cache_dir))
        except ConfigError as error:
            source = composed.provenance.get(key, "default")
            message = f"{key} = {error.value!r} ({source}): {error.message.removeprefix(f'{key}: ')}"
            yield Fault(key, error.value, source, message, error.hint)


def missing_packages(composed: Composed) -> Iterator[Fault]:
    """Every registered name, and every learner, that needs a package which isn't installed."""
    for key, name, registry in _named(composed):
        entry = next((entry for entry in registry if entry.name == name), None)
        if entry is not None and (missing := entry.missing()):
            yield _lacking(composed, key, name, ", ".join(missing), entry.guide)
    for name in _learners(composed.experiment):
        own: LearnerConfig = getattr(composed.experiment, name)
        if own.backend == "megatron" and not _is_installed("megatron.core"):
            yield _lacking(composed, f"{name}.backend", own.backend, "megatron-core", "pip install 'quintet[megatron]'")
        if own.memory.liger and not _is_installed("liger_kernel"):
            key = f"{name}.memory.liger"
            yield _lacking(composed, key, True, "liger-kernel", f"pip install liger-kernel, or {key}=false")


def _lacking(composed: Composed, key: str, name: object, package: str, guide: str) -> Fault:
    source = composed.provenance.get(key, "default")
    return Fault(key, name, source, f"{key} = {show(name)} ({source}) needs {package}, not installed here", guide)


def _learners(config: Experiment) -> list[str]:
    """Those that the run has."""
    if config.evaluation is not None:
        return []
    reinforced = fine_tuning(config) is None
    there = {"critic": config.needs_critic, "reference": config.needs_reference}
    return ["actor", *(name for name, needed in there.items() if needed and reinforced)]


def _is_installed(package: str) -> bool:
    """Whether it could be imported, of which nothing but what lies above it is."""
    try:
        return find_spec(package) is not None
    except ImportError:
        return False


def _named(composed: Composed) -> Iterator[tuple[str, str, Registry[Any]]]:
    """Each name that a configuration takes from a registry."""
    from quintet.envs import catalogue  # noqa: F401 - registers the worlds
    from quintet.envs.world import WORLDS
    from quintet.rewards.verifiers.catalogue import VERIFIERS
    from quintet.rollout.engine import ENGINES
    from quintet.tracking.loggers import LOGGERS

    config = composed.experiment
    yield from ((f"{one.key}.name", one.config.name, WORLDS) for one in config.played if one.config.name != "prompts")
    yield "rollout.engine", config.rollout.engine, ENGINES
    if config.reward is not None and config.reward.kind != "rules":
        yield "reward.kind", config.reward.kind, VERIFIERS
    yield from (("tracking.loggers", name, LOGGERS) for name in config.tracking.loggers)


def _checkpoint(composed: Composed, resume: str) -> Iterator[Fault]:
    """A place to go on from that isn't there, or is something else, such as the run's directory."""
    words, wanted = ("auto", "never"), "a global_step_N directory"
    if resume in words:
        return
    if not os.path.isdir(resume):
        close = nearest(resume, words)
        yield from _directory(composed, "resume", resume, wanted, f"did you mean {close}?" if close else None)
    elif not any(os.path.isfile(os.path.join(resume, name)) for name in ("state.json", "manifest.json")):
        source = composed.provenance.get("resume", "default")
        places = [*Path(resume).glob("checkpoints/global_step_*"), *Path(resume).glob("global_step_*")]
        near = sorted(places, key=lambda path: (len(path.name), path.name))
        hint = f"did you mean {near[-1]}?" if near else f"resume names {wanted}, auto or never"
        yield Fault("resume", resume, source, f"resume = {resume!r} ({source}): that isn't a checkpoint", hint)


def _directory(
    composed: Composed, key: str, value: str | None, wanted: str, instead: str | None = None
) -> Iterator[Fault]:
    if value is None or os.path.isdir(value):
        return
    path, source = Path(value), composed.provenance.get(key, "default")
    close = nearest(path.name, _directories(path.parent))
    hint = instead or (f"did you mean {path.parent / close}?" if close else f"{key} names {wanted}")
    yield Fault(key, value, source, f"{key} = {value!r} ({source}): no such directory", hint)


def _directories(place: Path) -> list[str]:
    """Names of the directories there, as far as they may be looked at."""
    try:
        return [entry.name for entry in os.scandir(place) if entry.is_dir()]
    except OSError:
        return []
