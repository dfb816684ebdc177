"""A foreign configuration, from its files to the one native `Experiment`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from pydantic import ValidationError

from quintet.config.backends import backend_faults, option_faults
from quintet.config.compose import Composed, flatten
from quintet.config.dialects.checking import idle_keys, illegal_values, pending_defaults, pending_keys, unknown_keys
from quintet.config.dialects.composition.reading import Given, Written, composed, reference_values
from quintet.config.dialects.conversion import Native, Values
from quintet.config.dialects.dialect import Dialect, narrowed
from quintet.config.dialects.elsewhere import known_elsewhere
from quintet.config.dialects.engine_choice import engine_shortfall
from quintet.config.dialects.free_sections import model_faults, model_remarks
from quintet.config.dialects.spelling import respelt
from quintet.config.faults import Fault, describe_faults, raise_faults, source_of
from quintet.config.keys import show
from quintet.config.layouts import layout_faults
from quintet.config.native import Experiment
from quintet.config.native.megatron import MegatronConfig
from quintet.config.plan import plan
from quintet.config.plan.values import with_value
from quintet.config.spread import as_asked, as_started, command, ready_keys
from quintet.config.started import Started, started
from quintet.config.waiting import Waiting, spread_faults, waiting

__all__ = ["Converted", "convert", "load_foreign", "load_given", "what_waits", "written_over_reference"]

Unknown = Literal["refuse", "warn"]


class _Conversion(Protocol):
    """What a dialect's module gives."""

    disagreements: Callable[[Values], Iterator[Fault]]
    convert: Callable[[Values, Native], None]


@dataclass(frozen=True, slots=True)
class Converted:
    """A foreign configuration as a native one, with what this version can't do of it."""

    composed: Composed
    """All that it asks for, whether this version can do it or not."""
    waits: tuple[Fault, ...]
    """What somebody asked for and this version can't do."""
    replaced: Mapping[str, Any]
    """Native keys whose value nobody asked for and this version can't do, with the value that a run has instead."""
    remarks: tuple[str, ...]
    """The latter, as it is told to people."""


def load_foreign(path: Path, overrides: Sequence[str], dialect: Dialect, *, unknown: Unknown = "refuse") -> Composed:
    """`load_given` of a file and overrides."""
    return load_given(composed(path, overrides), dialect, unknown=unknown)


def load_given(given: Given, dialect: Dialect, *, unknown: Unknown = "refuse") -> Composed:
    """Check every key, convert, check natively and do the batch arithmetic. What was left out, and where
    the reference's own values wait, stands in the remarks.

    Raises:
        ConfigError: everything that is wrong or waits, in one message, in the dialect's own words.
        MachineError: a file is missing or can't be read.
    """
    found = convert(given, dialect, unknown=unknown, to_run=True)
    raise_faults([*what_waits(found), *spread_faults(_with(found), started())])
    tree = found.composed.experiment.model_dump()
    for key, value in found.replaced.items():
        _set(tree, key, value)
    experiment = Experiment.model_validate(tree)
    provenance = dict(found.composed.provenance) | dict.fromkeys(found.replaced, "this version")
    ready = Composed(experiment, provenance, (*found.composed.remarks, *found.remarks))
    plan(ready)
    return ready


def what_waits(found: Converted) -> tuple[Fault, ...]:
    """All that this version, or its learners on this machine, can't do of it."""
    ready = _with(found)
    return (*found.waits, *backend_faults(ready), *layout_faults(ready))


def _with(found: Converted) -> Composed:
    """What a run has in place of what nobody asked for."""
    return replace(found.composed, experiment=_replaced(found.composed.experiment, found.replaced))


def _replaced(config: Experiment, values: Mapping[str, Any]) -> Experiment:
    for key, value in values.items():
        config = with_value(config, key, value)
    return config


def convert(
    given: Given, dialect: Dialect, *, unknown: Unknown = "refuse", to_run: bool = False, to_plan: bool = False
) -> Converted:
    """Check every key and convert. `to_run` tells beside what is wrong also what waits, all in one message; `to_plan`
    takes as many processes to be started as the configuration asks for.

    Raises:
        ConfigError: everything that is wrong, in one message, in the dialect's own words.
    """
    written, here, remarks = written_over_reference(given, dialect)
    strangers = unknown_keys(written, here, known_elsewhere(dialect.name))
    refused = strangers if unknown == "refuse" else []
    wrong = [
        *(Fault(key.key, None, key.source, f"unknown key {key}") for key in refused),
        *illegal_values(written, here),
        *model_faults(written, here),
    ]
    raise_faults([*wrong, *(pending_keys(written, here) if to_run and wrong else ())])
    native = _natively(written, here)
    sources = dict(native.provenance())
    try:
        experiment = Experiment.model_validate(native.tree)
    except ValidationError as error:
        raise_faults(describe_faults(error, native.tree, sources))
        raise
    left_out = (f"unknown key left out: {key}" for key in strangers)
    told = (*remarks, *left_out, *idle_keys(written, here), *native.remarks, *model_remarks(written, here))
    provenance = {key: source_of(key, sources) for key in flatten(experiment.model_dump())}
    done = Composed(experiment, provenance, told)
    started_as = as_asked(experiment) if to_plan else started()
    return _what_waits(done, native, written, here, started_as)


def written_over_reference(given: Given, dialect: Dialect) -> tuple[Written, Dialect, tuple[str, ...]]:
    """What was given, under documented names and over the values of the references that such a file is written
    by; the dialect with those references; and which names were others."""
    here = narrowed(dialect, given.plain())
    spelt = respelt(given, here.rows())
    return spelt.given.over(reference_values(here)), here, spelt.remarks


def _natively(written: Written, dialect: Dialect) -> Native:
    conversion = cast("_Conversion", import_module(f"quintet.config.dialects.{dialect.name}.convert"))
    values = Values(written, dialect)
    raise_faults(conversion.disagreements(values))
    native = Native(values)
    conversion.convert(values, native)
    return native


def _what_waits(done: Composed, native: Native, written: Written, dialect: Dialect, here: Started) -> Converted:
    """What was asked for and can't be done, told by the keys that asked for it; and what nobody asked for."""
    ready = ready_keys(done.experiment, here)
    pending = (fault for fault in pending_keys(written, dialect) if not _is_ready(fault.key, dialect, ready))
    faults = {fault.key: _or_by_torchrun(fault, done.experiment, dialect) for fault in pending}
    replaced: dict[str, Any] = {}
    remarks = []
    for each in waiting(done.experiment):
        if each.key in ready:
            continue
        origins = native.origins_of(each.key)
        asked = [origin for origin in origins if native.values.given(origin)]
        if not origins or asked:
            if not any(origin in faults for origin in asked):
                faults[each.key] = _fault(each, asked, native.values)
        else:
            replaced[each.key] = each.instead
            told = ", ".join(f"{origin} = {show(native.values[origin])}" for origin in origins)
            remarks.append(f"nobody set it, and the reference's {told} waits for {each.capability}")
    for key, value in as_started(done.experiment, here, partial(_is_asked, native)):
        replaced[key] = value
        remarks.append(f"nobody set it, and the learner has {key} = {value}, as many as processes were started")
    engines = engine_shortfall(done.experiment, native)
    faults |= engines.faults
    replaced |= engines.replaced
    remarks += engines.remarks
    for fault in option_faults(replace(done, experiment=_replaced(done.experiment, replaced))):
        origins = native.origins_of(fault.key)
        if origins and not any(map(native.values.given, origins)):
            replaced[fault.key] = MegatronConfig.model_fields[fault.key.rpartition(".")[2]].default
            remarks.append(f"nobody set it, and the reference's {fault.message}: left out")
    for told in pending_defaults(written, dialect):
        if not any(told.split(" = ")[0] in native.origins_of(key) for key in native.origins):
            remarks.append(f"nobody set it, and the reference's {told}")
    return Converted(done, tuple(faults.values()), replaced, tuple(dict.fromkeys(remarks)))


def _or_by_torchrun(fault: Fault, config: Experiment, dialect: Dialect) -> Fault:
    """What wouldn't wait if as many processes were started as there are to be devices says how they are."""
    asked = as_asked(config)
    if started().size > 1 or not _is_ready(fault.key, dialect, ready_keys(config, asked)):
        return fault
    return replace(fault, hint="; or ".join(filter(None, [fault.hint, f"start it with {command(config, asked.size)}"])))


def _is_ready(key: str, dialect: Dialect, ready: Collection[str]) -> bool:
    """Whether what a key feeds doesn't wait on the ranks that were started."""
    row = dialect.rows().get(key) or dialect.rows().get(dialect.documented(key))
    return row is not None and bool(row.native) and set(row.native) <= set(ready)


def _is_asked(native: Native, key: str) -> bool:
    return any(map(native.values.given, native.origins_of(key)))


def _fault(each: Waiting, asked: Sequence[str], values: Values) -> Fault:
    """A native value that waits, told by the foreign keys that it follows from."""
    if not asked:
        message = f"{each.key} = {show(each.value)}, as this configuration wants it: waits for {each.capability}"
        return Fault(each.key, each.value, "this dialect", message)
    told = ", ".join(map(values.told, asked))
    return Fault(asked[0], values[asked[0]], values.source(asked[0]), f"{told}: waits for {each.capability}")


def _set(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *sections, last = dotted.split(".")
    for section in sections:
        tree = tree[section]
    tree[last] = value
