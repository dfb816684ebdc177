"""Composition by Hydra, with the source of every key, and its errors as messages that name the source and a remedy."""

import json
import re
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import initialize
from hydra.conf import HydraConf
from hydra.core.config_loader import ConfigLoader
from hydra.core.default_element import ResultDefault
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from quintet.config.dialects.composition.confined_source import (
    ConfigFiles,
    confined_search_path,
    confined_to,
)
from quintet.config.dialects.composition.interpolation import first_line, hint_for
from quintet.config.dialects.composition.overrides import ParsedOverride
from quintet.config.dialects.composition.plain_composition import (
    HYDRA,
    Composed,
    delete_missing,
    refuse_list_items,
    section_node,
    set_keys,
)
from quintet.config.dialects.typos import closest_keys
from quintet.config.yaml_reader import COMMAND_LINE
from quintet.errors import ConfigError, nearest

SEARCH_PATH = "hydra.searchpath"
RUN_KEYS = ("hydra.run.dir", "hydra.output_subdir")
"""Keys of the `hydra` section that also configure the run."""


def compose(path: Path | None, overrides: Sequence[ParsedOverride]) -> Composed:
    """Compose a file, the files in its defaults list, and overrides.

    Of the `hydra` section, only the set keys of `RUN_KEYS` remain.

    Raises:
        ConfigError: it cannot be composed.
    """
    with _hydra(path) as (loader, files):
        # looking up a group takes 10 ms, and no group has a dot in its name
        names = {override.key for override in overrides if "." not in override.key}
        choices = {name for name in names if loader.get_group_options(name)}
        config, defaults, misfits = _compose_with(loader, files, overrides, choices)
    refuse_list_items(config, overrides)
    sources = _sources(files, defaults)
    for override in overrides:
        if override.key not in choices and override.key != SEARCH_PATH:
            override.note(sources)
    delete_missing(config, sources)
    _reduce_hydra_section(config, [key for key in RUN_KEYS if key in sources])
    return Composed(config, sources, misfits)


@contextmanager
def _hydra(path: Path | None) -> Iterator[tuple[ConfigLoader, ConfigFiles]]:
    """Yield Hydra's loader, confined to the directories that the file names, without its warnings about style."""
    GlobalHydra.instance().clear()
    with warnings.catch_warnings(), confined_to(path) as files:
        warnings.simplefilter("ignore")
        # 1.1: files that were written before `_self_` existed keep the order for which they were written
        with initialize(None, version_base="1.1"):
            yield GlobalHydra.instance().config_loader(), files


def _compose_with(
    loader: ConfigLoader, files: ConfigFiles, overrides: Sequence[ParsedOverride], choices: Collection[str]
) -> tuple[DictConfig, Sequence[ResultDefault], tuple[str, ...]]:
    """Return the composed configuration, its defaults list, and the overrides that Hydra refuses without `++`.

    Hydra parses each override twice more, so it only gets those that it needs; and all of them to describe an error,
    or to remove a key.
    """

    def texts(selected: Sequence[ParsedOverride]) -> list[str]:
        return [_hydra_override(override, is_choice=override.key in choices) for override in selected]

    plain = [override for override in overrides if override.sets_key and override.key not in choices]
    if not any(override.removes_key for override in overrides):
        others = [override for override in overrides if override not in plain]
        config, defaults = _load(loader, files, texts(others), overrides)
        OmegaConf.set_struct(config, False)
        if (misfits := set_keys(config, plain)) is not None:
            return config, defaults, misfits
    config, defaults = _load(loader, files, texts(overrides), overrides)
    OmegaConf.set_struct(config, False)
    return config, defaults, ()


def _hydra_override(override: ParsedOverride, *, is_choice: bool) -> str:
    """Return an override as it is given to Hydra."""
    entries = override.value
    if override.key == SEARCH_PATH and isinstance(entries, list):
        return f"{SEARCH_PATH}=[{','.join(json.dumps(str(entry)) for entry in confined_search_path(entries))}]"
    return override.text if is_choice else override.forced


def _load(
    loader: ConfigLoader, files: ConfigFiles, texts: list[str], overrides: Sequence[ParsedOverride]
) -> tuple[DictConfig, Sequence[ResultDefault]]:
    """Return the composed configuration, with Hydra's own section, and its defaults list."""
    try:
        config = loader.load_configuration(files.name, texts, RunMode.RUN, from_shell=False)
        return config, loader.compute_defaults_list(files.name, texts, RunMode.RUN).defaults
    except ConfigError as error:
        raise error if error.source else _with_source(error, files, overrides) from None
    except (HydraException, OmegaConfBaseException, RecursionError, ValueError, TypeError, LookupError) as error:
        raise _describe_error(error, files, overrides) from None
    except AssertionError as error:
        raise _describe_error(ValueError(str(error) or "its defaults list is not a list"), files, overrides) from None


def _sources(files: ConfigFiles, defaults: Sequence[ResultDefault]) -> dict[str, str]:
    """Return the sources of the files' keys; later files replace the keys of earlier ones."""
    sources: dict[str, str] = {}
    for default in defaults:
        package = "" if default.package in (None, "", "_global_") else f"{default.package}."
        for key, source in files.lines.get(str(default.config_path), {}).items():
            if _is_run_key(key, package):
                sources[f"{package}{key}"] = source
    return sources


def _is_run_key(key: str, package: str) -> bool:
    """Whether a key of a file configures the run, or is unknown to Hydra in its own section."""
    section = key.split(".")[0]
    if section != HYDRA:
        return section != "defaults"
    return not package and (key in RUN_KEYS or not _is_hydra_key(key))


def _is_hydra_key(key: str) -> bool:
    section: Any = HydraConf
    for name in key.split(".")[1:]:
        if not is_dataclass(section):
            return True
        types = {field.name: field.type for field in fields(section)}
        if name not in types:
            return False
        section = types[name]
    return True


def _reduce_hydra_section(config: DictConfig, keys: Sequence[str]) -> None:
    """Reduce the `hydra` section to the set keys."""
    hydra: Any = config._get_node(HYDRA)
    del config[HYDRA]
    for key in keys:
        inner, last = key.partition(".")[2], key.rpartition(".")[2]
        OmegaConf.update(config, key, section_node(hydra, inner)._get_node(last), force_add=True)


def _with_source(error: ConfigError, files: ConfigFiles, overrides: Sequence[ParsedOverride]) -> ConfigError:
    """Add the source to an error about the `hydra` section or an override of it."""
    override = next((override for override in overrides if override.key == error.key), None)
    source = override.source if override else files.source_of(error.key)
    message = f"{source}: {error.message}"
    return ConfigError(message, key=error.key, value=error.value, source=source, hint=error.hint)


def _describe_error(error: Exception, files: ConfigFiles, overrides: Sequence[ParsedOverride]) -> ConfigError:
    if isinstance(error, MissingConfigException):
        return _missing_file_error(error, files)
    problem = first_line(error)
    if problem.startswith("Could not delete"):
        return _missing_key_error(problem, files, overrides)
    if (override := _mentioned_override(problem, overrides)) is not None:
        return _override_error(override, first_line(error.__cause__) if error.__cause__ else problem)
    if isinstance(error, RecursionError):
        source = files.source_of("defaults")
        message = f"{source}: its defaults lists name each other in a circle"
        return ConfigError(message, key="defaults", source=source, hint="remove one of them")
    key = SEARCH_PATH if "searchpath" in problem or "Environment" in problem else "defaults"
    source = files.source_of(key)
    hint = hint_for(problem) if key == SEARCH_PATH else "a defaults list has entries such as `- GROUP: NAME`"
    return ConfigError(f"{source} cannot be composed: {problem}", key=key, source=source, hint=hint)


def _mentioned_override(problem: str, overrides: Sequence[ParsedOverride]) -> ParsedOverride | None:
    """Return the override that Hydra's message mentions."""

    def is_mentioned(override: ParsedOverride) -> bool:
        return override.forced in problem or bool(re.search(rf"[' ]{re.escape(override.name)}['.]", problem))

    return next(filter(is_mentioned, overrides), None)


def _override_error(override: ParsedOverride, problem: str) -> ConfigError:
    if "@" in override.name or "/" in override.name or "Multiple values" in problem:
        hint = f"a choice among files is written GROUP=NAME or GROUP@SECTION=NAME, a key {override.key}=VALUE"
    else:
        hint = "it sets a key inside a value, or replaces a section by a value"
    message = f"{override.text} ({override.source}): {problem}"
    return ConfigError(message, key=override.key, source=override.source, hint=hint)


def _missing_key_error(problem: str, files: ConfigFiles, overrides: Sequence[ParsedOverride]) -> ConfigError:
    """Describe a `~key` whose key does not exist."""
    override = next((item for item in overrides if item.removes_key and f"'{item.key}'" in problem), None)
    source, text = (override.source, override.text) if override else (COMMAND_LINE, "~key")
    near = closest_keys(override.key, files.lines.get(files.name or "", {}), 1) if override else []
    hint = f"did you mean ~{near[0]}?" if near else "only keys that the files set can be removed; leave it out"
    message = f"{text} ({source}): there is no such key in {files.path or 'the overrides'}"
    return ConfigError(message, key=override.key if override else None, source=source, hint=hint)


def _missing_file_error(error: MissingConfigException, files: ConfigFiles) -> ConfigError:
    """Describe an entry of a defaults list without a file."""
    name = str(error.missing_cfg_file)
    parent = re.match(r"In '([^']*)'", str(error))
    source = files.source_of("defaults", parent[1] if parent else None)
    directories = [*dict.fromkeys(Path(source.path) for source in files.sources if not source.is_package)]
    names = [other for other in _names_beside(name, directories) if files.path is None or other != files.path.stem]
    close = nearest(name, names)
    places = f"looked in {', '.join(map(str, directories))}; name further directories in {SEARCH_PATH}"
    alternatives = f"there are {', '.join(names[:9])}" if names else places
    message = f"{source}: its defaults list names {name}, but {name}.yaml does not exist"
    hint = f"did you mean {close}?" if close else alternatives
    return ConfigError(message, key="defaults", value=name, source=source, hint=hint)


def _names_beside(name: str, directories: Sequence[Path]) -> list[str]:
    """Return the names of the files in the same group."""
    group = name.rpartition("/")[0]
    files = [file for root in directories for file in sorted((root / group).glob("*.yaml")) if file.is_file()]
    return [*dict.fromkeys(f"{group}/{file.stem}" if group else file.stem for file in files)]
