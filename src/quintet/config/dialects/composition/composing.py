"""Composition by Hydra, with its faults as messages that say what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config.dialects.composition.overrides import Said
from quintet.config.dialects.composition.resolvers import first_line, hint_for
from quintet.config.dialects.typos import meant
from quintet.config.source import COMMAND_LINE, read_file
from quintet.errors import ConfigError, nearest

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.default_element import ResultDefault
    from omegaconf import DictConfig

__all__ = ["compose"]

File = tuple[Path, str]
"""A file with the package where its keys stand."""


def compose(
    loader: ConfigLoader, path: Path | None, words: list[str], said: Sequence[Said]
) -> tuple[DictConfig, list[File]]:
    """The composed configuration with Hydra's own section, and its files, in order. `words` are the overrides
    `said` as they are handed to Hydra.

    Raises:
        ConfigError: it can't be composed.
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
        raise error if error.source else _placed(error, path, said) from None
    except (HydraException, OmegaConfBaseException, RecursionError, ValueError, TypeError, LookupError) as error:
        raise _told(error, path, said) from None
    except AssertionError as error:
        raise _told(ValueError(str(error) or "its defaults list isn't one"), path, said) from None
    OmegaConf.set_struct(config, False)
    _refuse_items(config, said)
    roots = [Path(source.path) for source in config.hydra.runtime.config_sources if source.schema == "file"]
    return config, list(_files(path, defaults, roots))


def _refuse_items(config: DictConfig, said: Sequence[Said]) -> None:
    """`list.0=…`: lists are given whole, so that each has one source."""
    from omegaconf import ListConfig

    for one in said:
        place: Any = config
        for part in one.key.split(".")[:-1]:
            place = place._get_node(part) if hasattr(place, "_get_node") and not isinstance(place, ListConfig) else None
            if isinstance(place, ListConfig):
                above = one.key.rpartition(".")[0]
                message = f"{one.word} ({one.place}): {above} is a list"
                raise ConfigError(message, key=one.key, source=one.place, hint=f"give it whole: {above}=[…]")


def _files(path: Path | None, defaults: Sequence[ResultDefault], roots: Sequence[Path]) -> Iterator[File]:
    for default in defaults:
        package = "" if default.package in (None, "_global_") else str(default.package)
        if default.primary:
            yield from [(path, package)] if path else []
        elif (file := _file(str(default.config_path), path, roots)) is not None:
            yield file, package


def _file(name: str, path: Path | None, roots: Sequence[Path]) -> Path | None:
    """The file of a defaults list's entry; None for what comes with Hydra or a framework."""
    for root in roots:
        # the directory that was named stays as it was written
        shown = path.parent if path is not None and root == path.parent.resolve() else root
        if (file := shown / f"{name.removesuffix('.yaml')}.yaml").is_file():
            return Path(os.path.normpath(file)) if ".." in name else file
    return None


def _placed(error: ConfigError, path: Path | None, said: Sequence[Said]) -> ConfigError:
    """An error of what the primary file or an override says to Hydra itself, with its place."""
    source = next((one.place for one in said if one.key == error.key), None) or _line(path, error.key)
    message = f"{source}: {error.message}"
    return ConfigError(message, key=error.key, value=error.value, source=source, hint=error.hint)


def _line(path: Path | None, key: str | None) -> str:
    sources: dict[str, str] = {}
    if path is None:
        return COMMAND_LINE
    read_file(path, sources)
    return sources.get(key or "", str(path))


def _told(error: Exception, path: Path | None, said: Sequence[Said]) -> ConfigError:
    from hydra.errors import MissingConfigException

    if isinstance(error, MissingConfigException):
        return _no_such_file(error, path)
    problem = first_line(error)
    if problem.startswith("Could not delete"):
        return _not_there(problem, path, said)
    if (word := _blamed(problem, said)) is not None:
        return _of_word(word, first_line(error.__cause__) if error.__cause__ else problem)
    if isinstance(error, RecursionError):
        message = f"{_line(path, 'defaults')}: its defaults lists name each other in a circle"
        return ConfigError(message, key="defaults", source=_line(path, "defaults"), hint="take one of them out")
    key = "hydra.searchpath" if "searchpath" in problem or "Environment" in problem else "defaults"
    source = _line(path, key)
    hint = hint_for(problem) if key == "hydra.searchpath" else "a defaults list has entries such as `- GROUP: NAME`"
    return ConfigError(f"{source} can't be composed: {problem}", key=key, source=source, hint=hint)


def _blamed(problem: str, said: Sequence[Said]) -> Said | None:
    """The override that Hydra's message speaks of."""
    return next(
        (one for one in said if one.forced in problem or re.search(rf"[' ]{re.escape(one.name)}['.]", problem)), None
    )


def _of_word(word: Said, problem: str) -> ConfigError:
    if "@" in word.name or "/" in word.name or "Multiple values" in problem:
        hint = f"a choice among files is written GROUP=NAME or GROUP@SECTION=NAME, a key {word.key}=VALUE"
    else:
        hint = "its section holds a value, or the reverse"
    return ConfigError(f"{word.word} ({word.place}): {problem}", key=word.key, source=word.place, hint=hint)


def _not_there(problem: str, path: Path | None, said: Sequence[Said]) -> ConfigError:
    """`~key` of a key that isn't there."""
    word = next((one for one in said if one.takes_away and f"'{one.key}'" in problem), None)
    place, shown = (word.place, word.word) if word else (COMMAND_LINE, "~key")
    sources: dict[str, str] = {}
    if path is not None:
        read_file(path, sources)
    near = meant(word.key, sources, 1) if word else []
    hint = f"did you mean ~{near[0]}?" if near else "what nobody gave can't be taken away; leave it out"
    message = f"{shown} ({place}): there is no such key in {path or 'the overrides'}"
    return ConfigError(message, key=word.key if word else None, source=place, hint=hint)


def _no_such_file(error: Any, path: Path | None) -> ConfigError:
    """A defaults list names a file that isn't there."""
    name = str(error.missing_cfg_file)
    found = re.match(r"In '([^']*)'", str(error))
    parent = path
    if found and path is not None and found[1] != path.name:
        parent = next(iter(sorted(path.parent.glob(f"{found[1]}.y*ml"))), path)
    source = _line(parent, "defaults")
    roots = [Path(root) for root in re.findall(r"path=file://(.*)$", str(error), re.MULTILINE)]
    group = name.rpartition("/")[0]
    there = [
        f"{group}/{file.stem}" if group else file.stem
        for root in roots
        for file in sorted((root / group).glob("*.yaml"))
        if file.is_file()
    ]
    names = [one for one in dict.fromkeys(there) if path is None or one != path.stem]
    close = nearest(name, names)
    hint = f"did you mean {close}?" if close else f"there are {', '.join(names[:9])}" if names else _nowhere(roots)
    message = f"{source}: its defaults name {name}, and there is no {name}.yaml"
    return ConfigError(message, key="defaults", value=name, source=source, hint=hint)


def _nowhere(roots: Sequence[Path]) -> str:
    return f"looked in {', '.join(map(str, roots))}; name further directories in hydra.searchpath"
