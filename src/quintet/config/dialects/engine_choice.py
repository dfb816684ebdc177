"""Which engine a foreign configuration runs with here, and which options of its framework's engine go with that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from quintet.config.dialects.conversion import Native, Values
from quintet.config.dialects.free_sections import further_arguments, idle_arguments
from quintet.config.engines import ABILITIES, OPTIONS, Unmet, accelerators, runnable, unmet
from quintet.config.faults import Fault
from quintet.config.keys import show
from quintet.config.native import Experiment
from quintet.config.plan.values import with_value

if TYPE_CHECKING:
    from quintet.config.translate import Foreign

__all__ = ["Shortfall", "engine_shortfall", "express_arguments", "hand_arguments_on"]

ENGINE = "rollout.engine"
VALIDATED = "validation.prompts_per_device"
SPLITS = (f"{OPTIONS}.tensor_parallel", f"{OPTIONS}.pipeline_parallel")


@dataclass(slots=True)
class Shortfall:
    """What the engines of this machine can't do of it."""

    faults: dict[str, Fault] = field(default_factory=dict)
    """What somebody asked for, by the foreign key."""
    replaced: dict[str, Any] = field(default_factory=dict)
    """Native keys that nobody asked for, with what a run has instead."""
    remarks: list[str] = field(default_factory=list)
    """The latter, as it is told to people."""


def engine_shortfall(experiment: Experiment, native: Native) -> Shortfall:
    """A reference's own engine runs where it is installed and there is an accelerator; elsewhere `hf` does. What was
    asked for is never replaced."""
    found, values = Shortfall(), native.values
    engine = experiment.rollout.engine
    if engine in ABILITIES and not runnable(engine) and not _engine_asked(native):
        found.replaced[ENGINE] = "hf"
        whose = _told(values, native.origins_of(ENGINE))
        found.remarks.append(f"nobody set the engine, and {_why_not(engine)} (the reference's {whose}): hf generates")
    here = with_value(experiment, ENGINE, found.replaced.get(ENGINE, engine))
    for each in unmet(here):
        _without(each, native, found, instead_of=engine)
    _unhurried(experiment, native, found)
    for key in _too_wide(here, native):
        found.replaced[key] = 1
        told = _told(values, native.origins_of(key))
        found.remarks.append(f"nobody set it, and the reference's {told} needs more GPUs than are here: 1 instead")
    return found


def _engine_asked(native: Native) -> bool:
    """Whether a key that names the engine was given."""
    rows: Mapping[str, Any] = native.values.dialect.rows()
    origins = native.origins_of(ENGINE)
    return any(native.values.given(key) and key in rows and rows[key].native[:1] == (ENGINE,) for key in origins)


def _why_not(engine: str) -> str:
    package = ABILITIES[engine].package
    missing = package is not None and find_spec(package) is None
    return f"{engine} isn't installed here" if missing else f"{engine} has no accelerator here"


def _told(values: Values, origins: Sequence[str]) -> str:
    """Foreign keys with their values, as a remark tells them."""
    return ", ".join(f"{origin} = {show(values[origin])}" for origin in origins)


def _without(each: Unmet, native: Native, found: Shortfall, *, instead_of: str) -> None:
    """An option that the engine doesn't take: told where it was asked for, else left out."""
    values, origins = native.values, native.origins_of(each.key)
    asked = [origin for origin in origins if values.given(origin)]
    if not asked:
        found.replaced[each.key] = each.instead
        if not found.replaced.get(ENGINE):
            found.remarks.append(f"nobody set it, and the reference's {_told(values, origins)} is left out: {each.why}")
        return
    told = ", ".join(map(values.told, asked))
    replaced = each.engine != instead_of
    why = f"{each.why}, and {_why_not(instead_of)}" if replaced else each.why
    hint = f"leave it out, or install {instead_of}" if replaced else "leave it out"
    hint += f" ({' and '.join(each.others)} take it)" if each.others and not replaced else ""
    found.faults[asked[0]] = Fault(asked[0], values[asked[0]], values.source(asked[0]), f"{told}: {why}", hint)


def _unhurried(experiment: Experiment, native: Native, found: Shortfall) -> None:
    """A reference's own number of held-out prompts side by side is left out: it is small, and no result hangs on it."""
    origins = native.origins_of(VALIDATED)
    if experiment.validation.prompts_per_device is not None and not any(map(native.values.given, origins)):
        found.replaced[VALIDATED] = None
        told = _told(native.values, origins)
        found.remarks.append(f"nobody set it, and the reference's {told} is left out: as many as fit are answered")


def _too_wide(experiment: Experiment, native: Native) -> Iterator[str]:
    """Splits over more devices than there are, where nobody asked for any."""
    options, able = experiment.rollout.engine_options, ABILITIES.get(experiment.rollout.engine)
    sizes = dict(zip(SPLITS, (options.tensor_parallel, options.pipeline_parallel), strict=True))
    wanted = any(native.values.given(origin) for key in SPLITS for origin in native.origins_of(key))
    splits = able is not None and "tensor_parallel" in able.takes
    if splits and not wanted and math.prod(sizes.values()) > max(1, accelerators()):
        yield from (key for key, size in sizes.items() if size > 1)


def hand_arguments_on(values: Values, native: Native) -> None:
    """Entries that the engine has and no reference lists reach it as they are; those of another engine are told."""
    engine = native.tree["rollout"]["engine"]
    for argument in further_arguments(values.written, values.dialect, engine):
        native.put(f"{OPTIONS}.arguments.{argument.name}", values[argument.whole], argument.given)
    native.remarks += idle_arguments(values.written, values.dialect, engine)


def express_arguments(foreign: Foreign, sections: Mapping[str, str]) -> None:
    """The same in a dialect's words: `sections` says where the entries of each engine stand."""
    rollout = foreign.experiment.rollout
    if rollout.engine in sections:
        for name, value in rollout.engine_options.arguments.items():
            foreign.put(f"{sections[rollout.engine]}.{name}", value)
