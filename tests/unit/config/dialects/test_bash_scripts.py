"""If these fail, a run script gives other arguments to Quintet than bash gives to the trainer."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from bash_script_generator import ScriptGenerator

from bash_scripts import TRAIN, ScriptComparison

CASES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("bash_cases.yaml").read_text())
SAMPLE = 300


@pytest.fixture
def comparison(tmp_path: Path) -> ScriptComparison:
    if shutil.which("bash") is None:
        pytest.skip("no bash to compare with")
    return ScriptComparison(tmp_path)


@pytest.mark.parametrize("name", CASES)
def test_arguments_are_those_of_bash_or_unknown_with_a_line(name: str, comparison: ScriptComparison) -> None:
    case = CASES[name]
    script = f"BS=256\n{case['script']}\n".replace("train ", f"{TRAIN} ").replace("alias " + TRAIN, "alias train")
    result = comparison.compare(script, case.get("arguments"))
    assert result.result == case.get("reader", "equal"), result


def test_no_generated_script_gives_other_arguments_than_bash(comparison: ScriptComparison) -> None:
    generator = ScriptGenerator(0)
    counts: Counter[str] = Counter()
    for _ in range(SAMPLE):
        script, arguments = generator.script()
        result = comparison.compare(script, arguments)
        counts[result.result] += 1
        assert result.result != "different", f"{script}\n{arguments}\n{result}"
    assert counts["equal"] > SAMPLE / 3
