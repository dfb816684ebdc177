"""If these fail, the page about the rules says something else than the rules do."""

from __future__ import annotations

import re
from pathlib import Path

import quintet.diagnosis
from quintet.diagnosis.diagnose import EPISODE_RULES, METRIC_RULES, STATE_RULES, rule_name
from quintet.diagnosis.rule_specs import rule_specs
from quintet.tracking.metrics import all_metrics
from quintet.tracking.remedies import remedies

SRC = Path(quintet.diagnosis.__file__).parent
CODE = "".join(path.read_text() for path in SRC.glob("*.py"))


def test_every_rule_has_words_and_every_words_a_rule() -> None:
    assert {rule_name(rule) for rule in (*METRIC_RULES, *EPISODE_RULES, *STATE_RULES)} == rule_specs().keys()


def test_every_limit_is_explained_or_a_number_of_steps() -> None:
    text = (SRC / "rules.yaml").read_text()
    for name, spec in rule_specs().items():
        entry = re.search(rf"^{name}:\n(.*?)(?=^\S|\Z)", text, re.M | re.S)
        assert entry
        unexplained = [limit for limit in spec.limits if f"{{{limit}" not in entry[1]]
        assert set(unexplained) <= {"steps", "validations", "rest"}, name


def test_every_limit_is_used() -> None:
    phases = set(rule_specs()["slow-phase"].limits)
    for spec in rule_specs().values():
        for limit in spec.limits.keys() - phases:
            assert f'"{limit}"' in CODE, f"{spec.name}: {limit}"


def test_every_remedy_is_used() -> None:
    used = {name for metric in all_metrics() for names in metric.remedies.values() for name in names}
    used |= {name for spec in rule_specs().values() for name in spec.remedies}
    assert [name for name in remedies() if name not in used and f'"{name}"' not in CODE] == []
