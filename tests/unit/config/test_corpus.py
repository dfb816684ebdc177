"""If these fail, somebody's configuration can't be read, planned or said in another framework's words."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
from corpus import EXAMPLES, NAMES, corpus

from quintet.cli.configuration import InspectedConfig, inspect_config
from quintet.config.dialects.registry import DIALECTS
from quintet.config.plan.run_plan import plan_run
from quintet.config.translate import described_values, translate
from quintet.errors import ConfigError

CORE = (
    "training.groups_per_step",
    "training.samples_per_group",
    "training.mini_batches",
    "rollout.temperature",
    "rollout.max_response_tokens",
    "actor.optimizer.learning_rate",
    "algorithm.entropy_coefficient",
)
"""What a run of reinforcement learning is about, in whatever words."""


@pytest.fixture(autouse=True)
def _where_their_files_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EMBODIED_PATH", "REPO_PATH"):
        monkeypatch.setenv(name, str(EXAMPLES / "rlinf"))


def asked(path: Path, dialect: str | None = None) -> InspectedConfig:
    return inspect_config(str(path), [], dialect, "refuse")


def can_say(dialect: str, found: InspectedConfig) -> bool:
    """Whether a framework has runs of that kind at all, as its own module tells."""
    module = import_module(f"quintet.config.dialects.{dialect}.converter")
    try:
        module.base_tree(found.composed.experiment)
    except ConfigError:
        return False
    return True


def test_there_are_enough_of_every_framework() -> None:
    count = Counter(NAMES[path].split("/")[0] for path in corpus())
    assert count.total() - count["native"] >= 40
    assert all(count[dialect] >= 6 for dialect in DIALECTS)


@pytest.mark.parametrize("path", corpus(), ids=NAMES.get)
def test_it_is_recognised_read_and_planned(path: Path) -> None:
    found = asked(path)
    assert found.dialect == NAMES[path].split("/")[0].replace("custom", "native")
    plan = plan_run(found.composed, None).to_json()
    assert plan["run"]


@pytest.mark.parametrize("path", corpus(), ids=NAMES.get)
def test_it_comes_back_whole_from_its_own_dialect(path: Path, tmp_path: Path) -> None:
    found = asked(path)
    if found.dialect == "native":
        return
    translation = translate(found.composed, DIALECTS[found.dialect])
    assert translation.lost == {}
    (tmp_path / "back.yaml").write_text(translation.text())
    assert asked(tmp_path / "back.yaml", found.dialect).composed.experiment == found.composed.experiment


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("path", corpus(), ids=NAMES.get)
def test_what_another_framework_can_say_it_says(path: Path, dialect: str, tmp_path: Path) -> None:
    """The translation's own text is read again: it differs in the keys that its comments name, and in no other."""
    found = asked(path)
    if not can_say(dialect, found):
        with pytest.raises(ConfigError) as error:
            translate(found.composed, DIALECTS[dialect])
        stages = ("sft", "sft.episodes", "evaluation", "generation")
        assert error.value.key in ("env.name", "env.simulator", "envs", *stages)
        return
    translation = translate(found.composed, DIALECTS[dialect])
    (tmp_path / "there.yaml").write_text(translation.text())
    there = described_values(asked(tmp_path / "there.yaml", dialect).composed.experiment)
    here = described_values(found.composed.experiment)
    assert {key for key in here if key not in there or there[key] != here[key]} == set(translation.lost)
    if found.composed.experiment.sft is None and found.composed.experiment.evaluation is None:
        fed = {native for row in translation.dialect.specs().values() for native in row.native}
        assert not set(CORE) & set(translation.lost) & fed, translation.text()


def test_planning_loads_neither_torch_nor_ray() -> None:
    script = (
        "import os, sys\nfrom quintet.cli.plan import run\n"
        "for path in sys.argv[1:]:\n"
        "    os.chdir(os.path.dirname(path))\n"  # files of code are named from there
        "    run(path, [], None, 'refuse', as_json=True)\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules)\n"
    )
    paths = [str(path) for path in corpus()]
    done = subprocess.run([sys.executable, "-c", script, *paths], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
