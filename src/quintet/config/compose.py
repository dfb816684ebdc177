"""Composition of an `Experiment` from a YAML file and `key=value` overrides, each value with its source."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from quintet.config.checks.unread_keys import DEFAULT, is_default, unread_reasons
from quintet.config.checks.unsupported import with_torchrun_devices
from quintet.config.composed import ComposedConfig, Setting
from quintet.config.deprecation import current_key, refuse_both_names, upgrade, upgrade_override
from quintet.config.dialects.synonyms import keys_by_synonym
from quintet.config.dotted import flatten, get_value, has_key, sections_around, set_value
from quintet.config.model_locations.published_models import published_models
from quintet.config.native.experiment import Experiment
from quintet.config.plan.batch_arithmetic import compute_batch_arithmetic
from quintet.config.plan.suitable_defaults import with_suitable_defaults
from quintet.config.problems import describe_setting, raise_problems, source_of
from quintet.config.run_name import default_run_name
from quintet.config.schema import chosen_name, documented_key, is_text, keys
from quintet.config.validation import describe_problems
from quintet.config.yaml_reader import COMMAND_LINE, parse_override, read_file


def load_experiment(
    path: str | None, overrides: Sequence[str] = (), override_sources: Sequence[str] = ()
) -> ComposedConfig:
    """Compose, validate, and check the batch arithmetic.

    `override_sources` names the sources of the first overrides; the others come from the command line.

    Raises:
        ConfigError: one message names all unknown keys and invalid values, or all keys that contradict each other.
        MachineError: the file is missing or cannot be read.
    """
    file_sources: dict[str, str] = {}
    upgraded = upgrade(read_file(Path(path), file_sources) if path is not None else {}, file_sources)
    tree = upgraded.tree
    sources = upgraded.sources
    notes = [*upgraded.notes]
    for override, source in _choices_first(overrides, override_sources):
        notes += _apply(override, source, tree, sources)
    settings = tuple(_settings(tree, sources))
    _name_published_preset(tree, sources)
    _drop_default_preset(tree, sources)
    try:
        experiment = Experiment.model_validate(tree)
    except ValidationError as error:
        raise_problems(describe_problems(error, tree, sources, keys_by_synonym))
        raise
    experiment = with_suitable_defaults(experiment, tree)
    if not has_key(tree, "name"):
        experiment = experiment.model_copy(update={"name": default_run_name(experiment)})
    values = flatten(experiment.model_dump())
    provenance = {key: source_of(key, sources) if _is_set_in_tree(tree, key) else DEFAULT for key in values}
    composed = ComposedConfig(experiment, provenance, tuple(dict.fromkeys(notes)), settings=settings)
    compute_batch_arithmetic(composed)
    return composed


def _settings(tree: Mapping[str, Any], sources: Mapping[str, str], prefix: str = "") -> Iterator[Setting]:
    """Yield each key of a tree that has a source; an empty section is one."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _settings(value, sources, f"{key}.")
        elif (source := source_of(key, sources)) != DEFAULT:
            yield Setting(key, value, source, (key,))


def unread_remarks(composed: ComposedConfig) -> Iterator[str]:
    """Yield a remark for each key that was set, differs from its default and is not read."""
    reason_of = unread_reasons(with_torchrun_devices(composed).experiment)
    for setting in composed.settings:
        reason = reason_of(setting.key)
        if reason is not None and not is_default(setting.key, setting.value):
            yield f"{describe_setting(setting.key, setting.value, setting.source)} has no effect: {reason}"


def _is_set_in_tree(tree: Mapping[str, Any], key: str) -> bool:
    """Return whether the tree has a value for a dotted key, or for all of a section around it, which then is no
    mapping."""
    return has_key(tree, key) or any(
        has_key(tree, section) and not isinstance(get_value(tree, section), Mapping) for section in sections_around(key)
    )


def _name_published_preset(tree: dict[str, Any], sources: dict[str, str]) -> None:
    """Move `policy.preset` to `policy.path` if it is a published model: that has weights, as a directory has."""
    preset = get_value(tree, "policy.preset")
    if isinstance(preset, str) and preset in published_models() and get_value(tree, "policy.path") is None:
        set_value(tree, "policy.path", preset)
        set_value(tree, "policy.preset", None)
        sources["policy.path"] = source_of("policy.preset", sources)


def _drop_default_preset(tree: dict[str, Any], sources: dict[str, str]) -> None:
    """Set `policy.preset` to null if it is not set and `policy.path` is."""
    if get_value(tree, "policy.path") is not None and not has_key(tree, "policy.preset"):
        set_value(tree, "policy.preset", None)
        sources["policy.preset"] = source_of("policy.path", sources)


def _choice_names() -> list[str]:
    return [f"{key.name}.name" for key in keys() if key.is_choice]


def _choices_first(overrides: Sequence[str], sources: Sequence[str]) -> list[tuple[str, str]]:
    """Return overrides and sources, choices first: `env.boxes=2 env.name=sokoban` works in any order."""
    pairs = [*zip_longest(overrides, sources, fillvalue=COMMAND_LINE)]
    refuse_both_names({override.partition("=")[0]: source for override, source in pairs})
    names = _choice_names() if len(pairs) > 1 else []
    return sorted(pairs, key=lambda pair: documented_key(current_key(pair[0].partition("=")[0])) not in names)


def _apply(override: str, source: str, tree: dict[str, Any], sources: dict[str, str]) -> tuple[str, ...]:
    """Set one override in the tree; return notes about former names in it."""
    written: dict[str, str] = {}
    key, value, upgraded = upgrade_override(*_parse(override, written, source), written)
    section, _, last = key.rpartition(".")
    if last == "name" and documented_key(key) in _choice_names() and chosen_name(tree, section) != value:
        _forget_options(tree, section, sources)
    for other in [other for other in sources if other.startswith(f"{key}.")]:
        del sources[other]
    sources |= upgraded.sources
    set_value(tree, key, value)
    return upgraded.notes


def _parse(override: str, written: dict[str, str], source: str) -> tuple[str, Any]:
    """Return key and value of an override. A text key takes a word as it stands: `name=no` is not false."""
    key, value = parse_override(override, written, source)
    word = override.partition("=")[2].strip()
    is_word = isinstance(value, bool | int | float) and is_text(current_key(key))
    return key, word if is_word else value


def _forget_options(tree: dict[str, Any], choice: str, sources: dict[str, str]) -> None:
    """Drop the options of the env or algorithm that an override replaces."""
    options = get_value(tree, choice)
    if isinstance(options, dict):
        options.clear()
    for key in [key for key in sources if key.startswith(f"{choice}.") and sources[key] != COMMAND_LINE]:
        del sources[key]
