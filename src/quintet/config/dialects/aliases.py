"""Aliases: names of documented keys in older and newer releases of a framework."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from omegaconf import OmegaConf

from quintet.config.dialects.composition.foreign_config import ForeignConfig
from quintet.config.dialects.ledger import KeySpec
from quintet.config.dotted import is_inside, sections_around
from quintet.config.yaml_reader import COMMAND_LINE
from quintet.errors import ConfigError


def resolve_aliases(
    config: ForeignConfig,
    specs: Mapping[str, KeySpec],
    shared_sections: Mapping[str, str] | None = None,
    release: Collection[str] = (),
) -> tuple[ForeignConfig, tuple[str, ...]]:
    """Replace aliases by the documented names of their keys; return a remark for each that is not the framework's own
    name, `KeySpec.wins`.

    A name on the command line counts rather than one in a file. A name with the default of the key, as in a framework's
    own file of all keys, does not contradict another name. Of two other values, that under `KeySpec.wins` counts.
    `shared_sections` take the keys of other sections, and their aliases. `KeySpec.replaced_by` counts with any value,
    and if `release` has it where `+` adds the key.

    Raises:
        ConfigError: a key is set under two of its names, to different values.
    """
    sources = dict(config.sources)
    remarks, written = [], dict[str, str]()
    for spec in (*specs.values(), *_shared_specs(config.sources, specs, shared_sections or {})):
        for alias in spec.aliases:
            if alias not in config.sources or alias in specs:
                continue
            source = config.sources[alias]
            if spec.key in sources:
                if (remark := _keep_documented(config, spec, alias, sources)) is not None:
                    remarks.extend([remark] if remark else [])
                    continue
                kept = sources.pop(spec.key)
                if spec.replaced_by == alias:
                    remarks.append(f"{spec.key} ({kept}) has no effect, because of {alias} ({source})")
            _move(config, alias, spec.key)
            for key in [key for key in sources if is_inside(key, alias)]:
                documented = spec.key + key.removeprefix(alias)
                sources[documented] = sources.pop(key)
                written[documented] = written.pop(key, key)
            for section in sections_around(spec.key):
                sources.setdefault(section, source)
            if alias != spec.wins:
                remarks.append(f"{alias} ({source}) is read as {spec.key}")
        _drop_unset(config, spec, sources)
        remarks += _drop_replaced(config, spec, sources, release)
    _delete_empty_sections(config.sources, sources)
    return replace(config, sources=sources, aliases=written), tuple(remarks)


def _drop_replaced(
    config: ForeignConfig, spec: KeySpec, sources: dict[str, str], release: Collection[str]
) -> Iterator[str]:
    """Delete a key that a key of the release replaces; yield a remark."""
    if spec.replaced_by in release and spec.replaced_by not in config.sources and spec.key in sources:
        yield f"{spec.key} ({_delete(config, spec.key, sources)}) has no effect, because of {spec.replaced_by}"


def _shared_specs(
    written: Mapping[str, str], specs: Mapping[str, KeySpec], shared_sections: Mapping[str, str]
) -> Iterator[KeySpec]:
    """Yield the keys of sections that take those of another section, if a file has aliases of them."""
    for section, other in shared_sections.items():
        prefix = f"{other}." if other else ""
        for spec in specs.values():
            key = f"{section}.{spec.key.removeprefix(prefix)}"
            if not spec.aliases or not spec.key.startswith(prefix) or key in specs:
                continue
            aliases = (f"{section}.{alias.removeprefix(prefix)}" for alias in spec.aliases if alias.startswith(prefix))
            if present := tuple(alias for alias in aliases if alias in written and alias not in specs):
                yield spec.model_copy(update={"key": key, "aliases": present, "wins": None})


def _keep_documented(config: ForeignConfig, spec: KeySpec, alias: str, sources: dict[str, str]) -> str | None:
    """Return a remark, empty if there is nothing to say, if the documented name counts; None if the alias does."""
    if spec.replaced_by == alias:
        return None
    ours, theirs = _plain_value(config, spec.key), _plain_value(config, alias)
    source = sources[alias]
    if ours == theirs:
        sources.pop(alias)
        return f"{alias} ({source}) is another name of {spec.key} and says the same"
    unset = (None, spec.default)
    if (source == COMMAND_LINE) != (sources[spec.key] == COMMAND_LINE):
        return None if source == COMMAND_LINE else _drop_alias(spec, alias, sources)
    if theirs in (None, "") or (theirs == spec.default and ours not in unset):
        sources.pop(alias)
        return ""
    if ours in unset or spec.wins == alias:
        return None
    if spec.wins == spec.key:
        return _drop_alias(spec, alias, sources)
    message = f"{alias} ({source}) is another name of {spec.key} ({sources[spec.key]})"
    raise ConfigError(message, key=alias, source=source, hint=f"leave {alias} out")


def _drop_alias(spec: KeySpec, alias: str, sources: dict[str, str]) -> str:
    """Drop a name that does not count; return a remark."""
    return f"{alias} ({sources.pop(alias)}) has no effect, because of {spec.key} ({sources[spec.key]})"


def _plain_value(config: ForeignConfig, key: str) -> Any:
    """Return a value before interpolation."""
    *sections, last = key.split(".")
    parent: Any = OmegaConf.select(config.tree, ".".join(sections)) if sections else config.tree
    node = parent._get_node(last)
    return OmegaConf.to_container(node) if OmegaConf.is_config(node) else node._value()


def _drop_unset(config: ForeignConfig, spec: KeySpec, sources: dict[str, str]) -> None:
    """Drop null that stands for the default, and null under the documented name of a key that has others, if it is no
    valid value: the others count."""
    is_unset = spec.null_follows or (bool(spec.aliases) and not spec.value_type.accepts(None))
    if is_unset and spec.key in sources and _plain_value(config, spec.key) is None:
        _delete(config, spec.key, sources)


def _delete(config: ForeignConfig, key: str, sources: dict[str, str]) -> str:
    """Delete a key; return its source."""
    section, _, last = key.rpartition(".")
    parent: Any = OmegaConf.select(config.tree, section) if section else config.tree
    del parent[last]
    return sources.pop(key)


def _delete_empty_sections(before: Mapping[str, str], after: dict[str, str]) -> None:
    """Delete sections that are empty because all of their keys had aliases."""
    above = {key.rpartition(".")[0] for key in before}
    while empty := [key for key in after if key in above and not any(other.startswith(f"{key}.") for other in after)]:
        for section in empty:
            del after[section]


def _move(config: ForeignConfig, old: str, new: str) -> None:
    """Move a value to its documented name, and let `${old}` in other values refer to it."""
    section, _, last = old.rpartition(".")
    parent = OmegaConf.select(config.tree, section) if section else config.tree
    node: Any = parent._get_node(last)
    OmegaConf.update(config.tree, new, node, force_add=True)
    parent[last] = f"${{{new}}}"
