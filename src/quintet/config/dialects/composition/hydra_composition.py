"""Composition by Hydra, with its errors as messages that name the source and a remedy."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config.dialects.composition.overrides import ParsedOverride
from quintet.config.dialects.composition.resolvers import first_line, hint_for
from quintet.config.dialects.typos import closest_keys
from quintet.config.yaml_reader import COMMAND_LINE, read_file
from quintet.errors import ConfigError, nearest

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.default_element import ResultDefault
    from omegaconf import DictConfig

File = tuple[Path, str]
"""A file and the package (section) in which its keys are."""


def compose(
    loader: ConfigLoader, path: Path | None, words: list[str], overrides: Sequence[ParsedOverride]
) -> tuple[DictConfig, list[File]]:
    """Return the composed configuration, with Hydra's own section, and its files in order.

    `words` are the overrides `overrides` in the form in which Hydra receives them.

    Raises:
        ConfigError: it cannot be composed.
    """
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    name = path.name if path else None
    try:
        config = loader.load_configuration(name, words, RunMode.RUN, from_shell=False)
        defaults = loader.compute_defaults_list(name, words, RunMode.RUN).defaults
    except ConfigError as error:
        raise error if error.source else _with_source(error, path, overrides) from None
    except (HydraException, OmegaConfBaseException, RecursionError, ValueError, TypeError, LookupError) as error:
        raise _describe_error(error, path, overrides) from None
    except AssertionError as error:
        raise _describe_error(ValueError(str(error) or "its defaults list is not a list"), path, overrides) from None
    OmegaConf.set_struct(config, False)
    _refuse_list_items(config, overrides)
    roots = [Path(source.path) for source in config.hydra.runtime.config_sources if source.schema == "confined"]
    return config, list(_files(path, defaults, roots))


def _refuse_list_items(config: DictConfig, overrides: Sequence[ParsedOverride]) -> None:
    """Refuse overrides of list items such as `list.0=…`: a list has one source."""
    from omegaconf import ListConfig

    for override in overrides:
        node: Any = config
        for part in override.key.split(".")[:-1]:
            is_section = hasattr(node, "_get_node") and not isinstance(node, ListConfig)
            node = node._get_node(part) if is_section else None
            if isinstance(node, ListConfig):
                above = override.key.rpartition(".")[0]
                message = f"{override.word} ({override.place}): {above} is a list"
                raise ConfigError(
                    message, key=override.key, source=override.place, hint=f"set the entire list: {above}=[…]"
                )


def _files(path: Path | None, defaults: Sequence[ResultDefault], roots: Sequence[Path]) -> Iterator[File]:
    for default in defaults:
        package = "" if default.package in (None, "_global_") else str(default.package)
        if default.primary:
            yield from [(path, package)] if path else []
        elif (file := _file(str(default.config_path), path, roots)) is not None:
            yield file, package


def _file(name: str, path: Path | None, roots: Sequence[Path]) -> Path | None:
    """Return the file of an entry of a defaults list; None for files of Hydra or a framework."""
    for root in roots:
        # show the directory as the user wrote it
        shown = path.parent if path is not None and root == path.parent.resolve() else root
        if (file := shown / f"{name.removesuffix('.yaml')}.yaml").is_file():
            return Path(os.path.normpath(file)) if ".." in name else file
    return None


def _with_source(error: ConfigError, path: Path | None, overrides: Sequence[ParsedOverride]) -> ConfigError:
    """Add the source to an error about the `hydra` section or an override of it."""
    source = next((override.place for override in overrides if override.key == error.key), None) or _line(
        path, error.key
    )
    message = f"{source}: {error.message}"
    return ConfigError(message, key=error.key, value=error.value, source=source, hint=error.hint)


def _line(path: Path | None, key: str | None) -> str:
    sources: dict[str, str] = {}
    if path is None:
        return COMMAND_LINE
    read_file(path, sources)
    return sources.get(key or "", str(path))


def _describe_error(error: Exception, path: Path | None, overrides: Sequence[ParsedOverride]) -> ConfigError:
    from hydra.errors import MissingConfigException

    if isinstance(error, MissingConfigException):
        return _missing_file_error(error, path)
    problem = first_line(error)
    if problem.startswith("Could not delete"):
        return _missing_key_error(problem, path, overrides)
    if (override := _mentioned_override(problem, overrides)) is not None:
        return _override_error(override, first_line(error.__cause__) if error.__cause__ else problem)
    if isinstance(error, RecursionError):
        message = f"{_line(path, 'defaults')}: its defaults lists name each other in a circle"
        return ConfigError(message, key="defaults", source=_line(path, "defaults"), hint="remove one of them")
    key = "hydra.searchpath" if "searchpath" in problem or "Environment" in problem else "defaults"
    source = _line(path, key)
    hint = hint_for(problem) if key == "hydra.searchpath" else "a defaults list has entries such as `- GROUP: NAME`"
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
    message = f"{override.word} ({override.place}): {problem}"
    return ConfigError(message, key=override.key, source=override.place, hint=hint)


def _missing_key_error(problem: str, path: Path | None, overrides: Sequence[ParsedOverride]) -> ConfigError:
    """Describe a `~key` whose key does not exist."""
    override = next((item for item in overrides if item.removes_key and f"'{item.key}'" in problem), None)
    place, shown = (override.place, override.word) if override else (COMMAND_LINE, "~key")
    sources: dict[str, str] = {}
    if path is not None:
        read_file(path, sources)
    near = closest_keys(override.key, sources, 1) if override else []
    hint = f"did you mean ~{near[0]}?" if near else "only keys that the files set can be removed; leave it out"
    message = f"{shown} ({place}): there is no such key in {path or 'the overrides'}"
    return ConfigError(message, key=override.key if override else None, source=place, hint=hint)


def _missing_file_error(error: Any, path: Path | None) -> ConfigError:
    """Describe an entry of a defaults list without a file."""
    name = str(error.missing_cfg_file)
    matched = re.match(r"In '([^']*)'", str(error))
    parent = path
    if matched and path is not None and matched[1] != path.name:
        parent = next(iter(sorted(path.parent.glob(f"{matched[1]}.y*ml"))), path)
    source = _line(parent, "defaults")
    roots = [Path(root) for root in re.findall(r"path=confined://(.*)$", str(error), re.MULTILINE)]
    group = name.rpartition("/")[0]
    available = [
        f"{group}/{file.stem}" if group else file.stem
        for root in roots
        for file in sorted((root / group).glob("*.yaml"))
        if file.is_file()
    ]
    names = [item for item in dict.fromkeys(available) if path is None or item != path.stem]
    close = nearest(name, names)
    alternatives = f"there are {', '.join(names[:9])}" if names else _searched_roots(roots)
    hint = f"did you mean {close}?" if close else alternatives
    message = f"{source}: its defaults list names {name}, but {name}.yaml does not exist"
    return ConfigError(message, key="defaults", value=name, source=source, hint=hint)


def _searched_roots(roots: Sequence[Path]) -> str:
    return f"looked in {', '.join(map(str, roots))}; name further directories in hydra.searchpath"
