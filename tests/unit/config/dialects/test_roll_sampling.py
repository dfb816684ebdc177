"""If these fail, a ROLL user's replies are drawn otherwise than their file says, in training or in validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively, translated

from quintet.config.dialects.ledger import load_keys
from quintet.errors import ConfigError

PLAIN: dict[str, Any] = {"actor_train": {"data_args": {"file_name": "train.json"}}}
TRAIN, VALID, SAMPLING = "actor_infer.generating_args.", "validation.generating_args.", "validation.sampling."

REACHED: list[tuple[str, Any, Any, str, Any]] = [
    (f"{TRAIN}do_sample", False, 1, "rollout.do_sample", False),
    (f"{TRAIN}repetition_penalty", 1.1, 0, "rollout.repetition_penalty", 1.1),
    (f"{TRAIN}stop_strings", ["</answer>"], 3, "rollout.stop", ("</answer>",)),
    ("async_generation_ratio", 1.5, -1, "rollout.async_ratio", 1.5),
    ("async_generation_ratio", 1.5, "x", "rollout.max_staleness", 2),
    ("async_generation_ratio", 1, None, "rollout.partial", True),
    (f"{VALID}temperature", 0.6, -1, f"{SAMPLING}temperature", 0.6),
    (f"{VALID}top_p", 0.6, 0, f"{SAMPLING}top_p", 0.6),
    (f"{VALID}top_k", -1, -2, f"{SAMPLING}top_k", 0),
    (f"{VALID}do_sample", False, 1, f"{SAMPLING}do_sample", False),
    (f"{VALID}do_sample", True, 1, f"{SAMPLING}do_sample", True),
    (f"{VALID}num_return_sequences", 4, 0, f"{SAMPLING}samples", 4),
    (f"{VALID}max_new_tokens", 4096, 100, "rollout.max_response_tokens", 4096),
    ("validation.data_args.file_name", "held_out.json", 1, "data.validation_files", ("held_out.json",)),
]
"""Key, a legal value, an illegal one, the native key, and what that becomes."""
ONE_BEAM = (f"{TRAIN}num_beams", f"{VALID}num_beams")


@pytest.mark.proves("roll", *ONE_BEAM, *(case[0] for case in REACHED))
@pytest.mark.parametrize("reached", REACHED, ids=[f"{row[0]}-{row[3]}" for row in REACHED])
def test_a_key_reaches_the_run(tmp_path: Path, reached: tuple[str, Any, Any, str, Any]) -> None:
    key, value, illegal, native, expected = reached
    found = converted(tmp_path, "roll", changed(PLAIN, {key: value}))
    assert natively(found, native) == expected
    assert f"{key}: given.yaml:1" in found.composed.provenance[native]
    assert translated(found, "roll").lost == {}
    with pytest.raises(ConfigError, match=f"{key} = "):
        converted(tmp_path, "roll", changed(PLAIN, {key: illegal}))


@pytest.mark.parametrize("key", ONE_BEAM)
def test_there_is_one_beam(tmp_path: Path, key: str) -> None:
    converted(tmp_path, "roll", changed(PLAIN, {key: 1}))
    with pytest.raises(ConfigError, match=f"{key} = 4"):
        converted(tmp_path, "roll", changed(PLAIN, {key: 4}))


def test_each_key_has_a_row_in_that_table() -> None:
    assert {*ONE_BEAM, *(row[0] for row in REACHED)} == {row.key for row in load_keys("roll", "roll_sampling")}


def test_a_section_for_validation_draws_by_rolls_own_numbers(tmp_path: Path) -> None:
    found = converted(tmp_path, "roll", changed(PLAIN, {f"{VALID}num_return_sequences": 2}))
    sampling = found.composed.experiment.validation.sampling
    assert (sampling.do_sample, sampling.temperature, sampling.top_p, sampling.top_k) == (True, 0.95, 0.7, 50)
    assert not converted(tmp_path, "roll", PLAIN).composed.experiment.validation.sampling.do_sample
    cold = converted(tmp_path, "roll", changed(PLAIN, {f"{VALID}temperature": 0}))
    assert not cold.composed.experiment.validation.sampling.do_sample
    assert translated(cold, "roll").lost == {}


def test_generation_that_waits_for_learning_is_neither_partial_nor_old(tmp_path: Path) -> None:
    rollout = converted(tmp_path, "roll", PLAIN).composed.experiment.rollout
    assert (rollout.async_ratio, rollout.partial, rollout.max_staleness) == (0.0, False, None)
