"""If these fail, a native key has no effect, or no test that would fail without its effect."""

from __future__ import annotations

import importlib.util
from datetime import date
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
MAX_UNPROVEN = 0
"""Fields without proof, of which there may only be fewer."""
KL_BY_HAND = "tests/unit/algorithms/test_kl.py::test_x"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_proofs", ROOT / "scripts/check_proofs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_native_field_has_one_entry_and_the_exceptions_are_few(script: ModuleType) -> None:
    assert script.check_entries() == []


def test_the_fields_without_proof_do_not_grow_in_number(script: ModuleType) -> None:
    assert len(script.load()["unproven"]) <= MAX_UNPROVEN


def test_a_random_tenth_of_the_proofs_fails_with_the_field_at_its_default_and_no_other_test_counts(
    script: ModuleType,
) -> None:
    seed = date.today().toordinal()
    proofs = script.sample_proofs(0.1, seed)
    no_proofs = {
        "GaeConfig.lam": f"{KL_BY_HAND} passes with the field at its default",
        "GaeConfig.gamma": f"{KL_BY_HAND}_x does not exist, is skipped, or fails by itself",
    }
    tests = {field: text.partition(" ")[0] for field, text in no_proofs.items()}
    problems = script.check_proofs(proofs | tests)
    assert problems == [f"{field}: {text}" for field, text in no_proofs.items()], f"seed {seed}"
