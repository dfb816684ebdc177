"""If these fail, a native key has no effect, or no test would notice that its effect is gone."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
OTHER_TEST = "tests/unit/algorithms/test_kl.py::test_the_k3_estimate_is_clamped"
NO_TEST = "tests/unit/algorithms/test_kl.py::test_of_another_name"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_proofs", ROOT / "scripts/check_proofs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_native_field_has_one_entry_and_exceptions_are_few(script: ModuleType) -> None:
    assert script.check_entries() == []


def test_every_field_has_a_proof_or_is_an_exception(script: ModuleType) -> None:
    assert script.load()["unproven"] == []


def test_a_random_tenth_of_the_proofs_fails_with_its_field_at_the_default(script: ModuleType) -> None:
    """Two wrong proofs are noticed among them."""
    seed = random.SystemRandom().randrange(1_000_000)
    proofs = script.sample_proofs(0.1, seed) | {"GaeConfig.lam": OTHER_TEST, "GaeConfig.gamma": NO_TEST}
    wrong = {"GaeConfig.lam": f"{OTHER_TEST} passes", "GaeConfig.gamma": f"{NO_TEST} does not exist"}
    again = f"the sample has seed {seed}: scripts/check_proofs.py check --share 0.1 --seed {seed}"
    assert script.wrong_proofs(proofs) == wrong, again
