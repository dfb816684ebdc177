"""Native keys that a run does not read, by its kind and the values of other keys; `unread_keys.yaml` lists them.

An entry of the file has

    keys: [betas, epsilon]               # keys, or sections with all their keys
    section: optimizer                   # last part of the name of the section that has them; otherwise full names
    except: [critic.path]                # keys in these sections that are read
    when: {run.kind: robots}             # the entry applies if these keys, or facts of the run, have these values
    needs: {kind: [adamw, muon]}         # the keys are read only if these have one of these values
    reason: a policy of robots outputs actions   # the end of a sentence; by default the values that `needs` misses
    refused: true                        # a run that sets one of the keys is refused
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from quintet.config.checks.engines import ENGINE_OPTIONS, OPTIONS
from quintet.config.dotted import flatten, is_inside, sections_around
from quintet.config.native.experiment import Experiment
from quintet.config.plan.model_shapes import ModelShape
from quintet.config.plan.models import find_models
from quintet.config.plan.overlap import overlaps_training
from quintet.config.plan.placement import place_components
from quintet.config.plan.process_layout import process_layout
from quintet.config.plan.weight_transfer import weight_transfers
from quintet.config.schema import documented_key, format_value, keys
from quintet.package_files import read_yaml

DEFAULT = "default"
SIZES = ("tensor_parallel", "pipeline_parallel")
"""Options that the placement of every engine reads."""
_MISSING = object()


@dataclass(frozen=True, slots=True)
class UnreadRule:
    """Keys that are not read under a condition."""

    keys: tuple[str, ...]
    section: str | None = None
    exceptions: tuple[str, ...] = ()
    when: Mapping[str, tuple[Any, ...]] | None = None
    needs: Mapping[str, tuple[Any, ...]] | None = None
    reason: str | None = None
    refused: bool = False

    def prefixes(self, key: str) -> Iterator[str]:
        """Yield the names of the sections, each with a dot, in which the rule has the key: none, or usually one."""
        if self.section is None:
            if self._has(key):
                yield ""
            return
        parts = key.split(".")
        for depth, part in enumerate(parts[:-1], start=1):
            if part == self.section and self._has(".".join(parts[depth:])):
                yield ".".join(parts[:depth]) + "."

    def _has(self, key: str) -> bool:
        listed = any(is_inside(key, name) for name in self.keys)
        return listed and not any(is_inside(key, name) for name in self.exceptions)

    def reason_for(self, prefix: str, values: Mapping[str, Any]) -> str | None:
        """Return why the keys below a section are not read, given the values of all keys; None if they are."""
        for name, accepted in (self.when or {}).items():
            if not _is_one_of(_value(name, prefix, values), accepted):
                return None
        if self.needs is None:
            return self.reason
        for name, accepted in self.needs.items():
            value = _value(name, prefix, values)
            if value is not _MISSING and not _is_one_of(value, accepted):
                return self.reason or f"{prefix}{name} = {format_value(value)}"
        return None


def _value(name: str, prefix: str, values: Mapping[str, Any]) -> Any:
    return values.get(name if name.startswith("run.") else f"{prefix}{name}", _MISSING)


def _is_one_of(value: object, accepted: tuple[Any, ...]) -> bool:
    value = list(value) if isinstance(value, tuple) else value
    # 0 equals 0.0, but not false
    return any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in accepted)


@cache
def unread_rules() -> tuple[UnreadRule, ...]:
    """Return the rules of `unread_keys.yaml`."""
    return tuple(_rule(entry) for entry in read_yaml(__file__))


def _rule(entry: Mapping[str, Any]) -> UnreadRule:
    conditions = {name: _alternatives(entry[name]) for name in ("when", "needs") if name in entry}
    return UnreadRule(
        tuple(entry["keys"]),
        entry.get("section"),
        tuple(entry.get("except", ())),
        conditions.get("when"),
        conditions.get("needs"),
        entry.get("reason"),
        entry.get("refused", False),
    )


def _alternatives(condition: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(value) if isinstance(value, list) else (value,) for name, value in condition.items()}


def run_kind(experiment: Experiment) -> str:
    """Return the kind of a run, by which the keys that it reads differ."""
    stages = {"evaluation": experiment.evaluation, "generation": experiment.generation, "sft": experiment.sft_only}
    if (stage := next((name for name, section in stages.items() if section is not None), None)) is not None:
        return stage
    if experiment.env.is_simulator:
        return "robots"
    return "prompts" if experiment.env.reads_prompts else "episodes"


def _facts(experiment: Experiment) -> dict[str, Any]:
    kind = run_kind(experiment)
    reinforces = kind in ("robots", "prompts", "episodes")
    placement = place_components(experiment)
    learners = {name: placement.of(name) for name in ("actor", "critic", "reference")}
    return {
        "run.kind": kind,
        "run.critic": reinforces and experiment.needs_critic,
        "run.reference": (reinforces or kind == "sft") and experiment.needs_reference,
        "run.reward_model": experiment.reward is not None and experiment.reward.model is not None,
        "run.replies": experiment.rollout.tool_calls is not None or experiment.rollout.interactions is not None,
        "run.reads_images": _reads_images(experiment),
        "run.weight_transfers": reinforces and bool(weight_transfers(experiment)),
        "run.overlaps_training": reinforces and overlaps_training(experiment),
        "run.domains": bool(experiment.domains),
        "run.processes": process_layout(experiment).size,
        **{f"run.{name}_processes": part.num_processes if part else 1 for name, part in learners.items()},
    }


def _reads_images(experiment: Experiment) -> bool:
    """Return whether the policy reads images, also if its architecture is not known here."""
    shape = find_models(experiment).policy
    return not isinstance(shape, ModelShape) or bool(shape.vision)


def condition_values(experiment: Experiment) -> dict[str, Any]:
    """Return the values that conditions of rules name: those of keys and sections, and facts of the run."""
    values = flatten(experiment.model_dump())
    sections = {section for key in values for section in sections_around(key)}
    return dict.fromkeys(sections, "a section") | values | _facts(experiment)


def refused_keys(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Yield the keys and sections that the run may not set, since it does not read them, each with the reason."""
    values = condition_values(experiment)
    for rule in unread_rules():
        if rule.refused and (reason := rule.reason_for("", values)) is not None:
            yield from ((key, reason) for key in rule.keys)


def unread_reasons(experiment: Experiment) -> Callable[[str], str | None]:
    """Return a function that tells why the run does not read a native key; it returns None for keys that are read."""
    values = condition_values(experiment)

    def reason_of(key: str) -> str | None:
        if (absent := _absent_section(experiment, key)) is not None:
            return f"the run has no {absent}"
        reasons = (rule.reason_for(prefix, values) for rule in unread_rules() for prefix in rule.prefixes(key))
        return next(filter(None, reasons), None) or _missing_option(experiment.rollout.engine, key)

    return reason_of


def _missing_option(engine: str, key: str) -> str | None:
    """Return that an engine has no such option; None if it has, or for other keys."""
    section, _, option = key.rpartition(".")
    if section != OPTIONS or option in SIZES or engine not in ENGINE_OPTIONS:
        return None
    return None if option in ENGINE_OPTIONS[engine].names else f"the engine {engine} has no such option"


def _absent_section(experiment: Experiment, key: str) -> str | None:
    """Return the section, or the key itself, that the run does not have."""
    node: Any = experiment
    *sections, _ = parts = key.split(".")
    for depth, part in enumerate(parts):
        if isinstance(node, Mapping):
            return None  # entries with names that the user chose
        if not hasattr(node, part):
            return key
        node = getattr(node, part)
        if node is None and depth < len(sections):
            return ".".join(parts[: depth + 1])
    return None


def is_default(key: str, value: Any) -> bool:
    """Return whether a native key has its default value, or a section sets nothing."""
    if value == {}:
        return True
    defaults = {each.name: each.default for each in keys() if not each.is_section}
    return bool((list(value) if isinstance(value, tuple) else value) == defaults.get(documented_key(key)))
