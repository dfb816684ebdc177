"""If these fail, `make check` misses tests of what a developer changed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_changes", ROOT / "scripts/check_changes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("file", "test"),
    [
        ("src/quintet/algorithms/objective.py", "tests/unit/algorithms"),
        ("src/quintet/config/dialects/verl/keys/a_new_file.yaml", "tests/unit/config/dialects"),
        ("src/quintet/errors.py", "tests/unit/test_errors.py"),
        ("tests/system/test_view.py", "tests/system/test_view.py"),
        ("scripts/check_changes.py", "tests/unit/scripts/test_check_changes.py"),
        ("tests/support/warm_processes.py", "tests/system/test_answers.py"),
        ("tests/support/vision_models.py", "tests/unit/training/parallel/test_vision_ranks.py"),
        ("tests/support/checkpoint_ranks.py", "tests/unit/training/checkpoint/test_parallel_checkpoints.py"),
        ("tests/system/conftest.py", "tests/system/test_env_service_command.py"),
    ],
)
def test_a_changed_file_runs_the_tests_that_mirror_it(script: ModuleType, file: str, test: str) -> None:
    selected = script.select_tests([file])
    assert any(Path(test) == Path(path) or Path(path) in Path(test).parents for path in selected)
    assert set(script.ALWAYS) < set(selected)


def test_files_without_tests_run_only_what_always_runs(script: ModuleType) -> None:
    assert script.select_tests(["README.md", "tests/unit/test_that_was_deleted.py"]) == sorted(script.ALWAYS)


def test_a_module_of_support_runs_no_test_that_does_not_use_it(script: ModuleType) -> None:
    selected = script.select_tests(["tests/support/image_files.py"])
    assert len(selected) > len(script.ALWAYS)
    assert not any(path.startswith("tests/unit/algorithms") for path in selected)


def test_no_test_runs_twice(script: ModuleType) -> None:
    files = ["src/quintet/rewards/dispatcher.py", "tests/unit/rewards/test_verifier_pool.py"]
    assert script.select_tests(files) == ["tests/unit/rewards", *sorted(script.ALWAYS)]
