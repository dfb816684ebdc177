"""Translation of a configuration into another framework's format, with comments for what has no counterpart there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quintet.config.composed import ComposedConfig
from quintet.config.dialects.composition.foreign_config import config_from_tree
from quintet.config.dialects.conversion import converter_of, exported_values
from quintet.config.dialects.dialect import Dialect
from quintet.config.dialects.ledger import is_effective
from quintet.config.dialects.loader import convert
from quintet.config.dialects.release_choice import choose_release
from quintet.config.dialects.release_tables import ReleaseEvidence
from quintet.config.dotted import flatten, unflatten
from quintet.config.native.experiment import Experiment
from quintet.config.schema import format_value
from quintet.config.yaml_writer import yaml_lines
from quintet.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Translation:
    """A configuration in another framework's format."""

    dialect: Dialect
    tree: Mapping[str, Any]
    """Keys that differ from the framework's reference."""
    lost: Mapping[str, tuple[Any, Any]]
    """Native keys without a counterpart: their value, and the value that the translation has instead."""

    def text(self) -> str:
        """Return the translation as a YAML file."""
        release = self.dialect.release
        source = "its reference" if release is None else f"its release {release.name}"
        lines = [f"# Run configuration for {self.dialect.name}; other keys have the values of {source}."]
        lines += yaml_lines(self.tree)
        if self.lost:
            lines += ["", f"# No counterpart in {self.dialect.name}:"]
            lines += [
                f"#   {key} = {format_value(ours)}   (there: {format_value(theirs)})"
                for key, (ours, theirs) in self.lost.items()
            ]
        return "\n".join(lines) + "\n"


def translate(composed: ComposedConfig, dialect: Dialect) -> Translation:
    """Translate a configuration, then read the translation to find what was lost.

    Raises:
        ConfigError: the framework has no such runs.
    """
    base_tree = converter_of(dialect).base_tree(composed.experiment)
    narrowed = dialect.narrowed(base_tree)
    values = exported_values(composed.experiment, narrowed)
    differing = flatten(_differing(values, base_tree, narrowed))
    released, further = narrowed, differing
    while further:
        released = _of_release(narrowed, unflatten(differing))
        of_release = flatten(_differing(values, base_tree, released))
        further = {key: value for key, value in of_release.items() if key not in differing}
        differing |= further
    tree, converted = _convertible(unflatten(differing), base_tree, dialect)
    return Translation(released, tree, _lost(composed.experiment, converted))


def _of_release(dialect: Dialect, tree: Mapping[str, Any]) -> Dialect:
    """Return the dialect with the defaults of the release that a translation is of by its keys."""
    release = choose_release(dialect, tree, list(flatten(tree)), ReleaseEvidence())
    return dialect if release is None else dialect.of_release(release)


def _convertible(
    tree: dict[str, Any], base_tree: Mapping[str, Any], dialect: Dialect
) -> tuple[dict[str, Any], Experiment]:
    """Drop keys that the framework forbids beside the others; return the tree and the run that it describes."""
    values, required = flatten(tree), flatten(dict(base_tree))
    while True:
        try:
            return unflatten(values), convert(config_from_tree(unflatten(values)), dialect).composed.experiment
        except ConfigError as error:
            # the error may blame a value of the reference beside one of ours, which the message names, too
            blamed = [error.key, *(key for key in values if f"{key} = " in error.message)]
            culprit = next((key for key in blamed if key in values and key not in required), None)
            if culprit is None:
                raise
            del values[culprit]


def _differing(values: Mapping[str, Any], base_tree: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """Return, as a tree, the values that differ from the reference's.

    Keys that follow another key in the reference are compared last, with the value that they would follow.
    """
    specs, reference = dialect.specs(), dialect.default_tree()
    followers = {key for key, spec in specs.items() if isinstance(spec.default, str) and "${" in spec.default}
    differing: dict[str, Any] = flatten(dict(base_tree))
    for keys in ([key for key in values if key not in followers], [key for key in values if key in followers]):
        merged = config_from_tree(unflatten(differing)).merge_onto(reference)
        differing |= {key: values[key] for key in keys if merged.value(key) != values[key]}
    merged = config_from_tree(unflatten(differing)).merge_onto(reference)
    effective = [key for key in differing if key not in specs or is_effective(specs[key], specs, merged.value)]
    return unflatten({key: differing[key] for key in sorted(effective, key=[*specs, *differing].index)})


def _lost(ours: Experiment, theirs: Experiment) -> dict[str, tuple[Any, Any]]:
    our_values, their_values = map(described_values, (ours, theirs))
    return {
        key: (value, their_values.get(key))
        for key, value in our_values.items()
        if key not in their_values or their_values[key] != value
    }


def described_values(experiment: Experiment) -> dict[str, Any]:
    """Return the values of a run, with the budgets of `training.micro_batch_tokens` written out."""
    values = flatten(experiment.model_dump(mode="json"))
    for key in [key for key in values if key.endswith("budget.tokens")]:
        if values[key] is None and values[key.replace(".tokens", ".sequences")] is None:
            values[key] = values["training.micro_batch_tokens"]
    return values
