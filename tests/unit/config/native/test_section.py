"""If these fail, a configuration that cannot train is accepted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

import pytest

from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.config.native.section import Section
from quintet.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("algorithm.correction={lower: 3.0, upper: 2.0}", "`lower` = 3.0 is above upper = 2.0"),
        ("algorithm.correction={reject: [{upper: 2.0, lower: 3.0}]}", "`lower` = 3.0 is above upper = 2.0"),
        ("algorithm.correction={reject: [{upper: 0.5}]}", "`lower` is required with upper = 0.5"),
        ("algorithm.filter={min_mean: 0.8, max_mean: 0.2}", "`min_mean` = 0.8 is above max_mean = 0.2"),
        ("algorithm.loss={name: clip_cov, min_covariance: 6}", "`min_covariance` = 6.0 is above max_covariance = 5.0"),
        ("rollout.min_response_tokens=99", "`min_response_tokens` = 99 is above max_response_tokens = 24"),
    ],
)
def test_reversed_bounds_are_refused_instead_of_masking_every_token(override: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        load_experiment(None, [override])


def test_every_pair_of_bounds_is_checked() -> None:
    """A section with a lower and an upper bound of one quantity names them in `ranges`."""
    prefixes = (("min_", "max_"), ("lower", "upper"))
    sections = [Experiment]
    for section in sections:
        fields = section.model_fields
        pairs = {
            (name, name.replace(low, high, 1))
            for low, high in prefixes
            for name in fields
            if name.startswith(low) and name.replace(low, high, 1) in fields
        }
        assert pairs == set(section.ranges), section
        sections += [each for each in nested_sections(section) if each not in sections]
    assert len(sections) > 40


def nested_sections(section: type[Section]) -> list[type[Section]]:
    """Return the sections in the annotations of the fields, also within unions, lists and mappings."""

    def within(annotation: object) -> Iterator[type[Section]]:
        if isinstance(annotation, type) and issubclass(annotation, Section):
            yield annotation
        for argument in get_args(annotation):
            yield from within(argument)

    return [found for field in section.model_fields.values() for found in within(field.annotation)]


def test_a_stored_run_leaves_to_its_policy_what_it_does_not_set() -> None:
    """Otherwise an evaluation, or another rank, replaces the sizes of the policy by defaults."""
    experiment = load_experiment(None, ["env.name=simulator", "env.simulator=arm", "policy.vla={images: 2}"]).experiment
    stored = experiment.model_dump(mode="json")
    again = Experiment.model_validate(stored, strict=False)
    assert stored["policy"]["vla"] == {"images": 2}
    assert again.policy.vla is not None
    assert again.policy.vla.model_fields_set == {"images"}
