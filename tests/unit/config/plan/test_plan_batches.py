"""If these fail, a rank does another number of passes than it was planned for, or a run another number of steps."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from models_of_tests import on

from quintet.config import load_experiment
from quintet.config.plan.batches import budget_of, data_of, sequences_per_game, share
from quintet.config.plan.rows import count_rows

FOOTER = (
    "FQQZbDUAGAZzY2hlbWEVBAA1AhgBcBUCFQZMPAAAADUEGARsaXN0FQIANQIYB2VsZW1lbnQVAgAVDCUCGAFyJQBMHAAAABUAJQIY"
    "Am9rABZKGRwZLCYAHBUMGSUGABlIAXAEbGlzdAdlbGVtZW50AXIVABZKFrQDFrQDJghJHBUAFQAVAgA8FkoZJkoAGVYAAAAASgAA"
    "ACYAHBUAGSUGABkYAm9rFQAWShY8FjwmvANJHBUAFQAVAgA8KQYZJgBKAAAAFvADFkomCBbwAwAoIHBhcnF1ZXQtY3BwLWFycm93"
    "IHZlcnNpb24gMjYuMC4xGSwcAAAcAAAA+QAAAFBBUjE="
)
"""End of a Parquet file of 37 rows with a nested column, as pyarrow 26 writes it: 249 bytes of footer."""


def test_a_ranks_part_of_a_mini_batch_by_hand(tmp_path: Path) -> None:
    """512 games in 8 mini-batches over 8 ranks: 8 games of 536 tokens, three at a time in three passes."""
    config = on(tmp_path, "Qwen2.5-7B", 1, 8, "actor.budget.sequences=3").experiment
    part = share(config, "actor", 8)
    assert (part.games, part.sequences, part.passes) == (8, 8, 3)
    assert (part.tokens, part.places) == (3 * 536, 3 * 24)
    assert part.budget.words == "at most 3 sequences"
    assert part.budget.key == "actor.budget.sequences"


def test_a_budget_of_tokens_says_at_most(tmp_path: Path) -> None:
    """Eight sequences of at most 536 tokens, about 1,000 at a time: five passes."""
    part = share(on(tmp_path, "Qwen2.5-7B", 1, 8, "actor.budget.tokens=1000").experiment, "actor", 8)
    assert (part.passes, part.tokens, part.places) == (5, 1000, 8 * 24)
    assert part.budget.words == "at most 1,000 tokens"


def test_both_limits_hold(tmp_path: Path) -> None:
    words = ["actor.budget.tokens=1000", "actor.budget.sequences=1"]
    part = share(on(tmp_path, "Qwen2.5-7B", 1, 8, *words).experiment, "actor", 8)
    assert (part.tokens, part.passes) == (536, 8)
    assert part.budget.words == "at most 1 sequence and 1,000 tokens"


def test_a_sequence_beyond_the_budget_is_a_pass_by_itself(tmp_path: Path) -> None:
    part = share(on(tmp_path, "Qwen2.5-7B", 1, 8, "actor.budget.tokens=100").experiment, "actor", 8)
    assert (part.tokens, part.passes) == (536, 8)


def test_a_learner_without_a_budget_has_the_runs(tmp_path: Path) -> None:
    config = on(tmp_path, "Qwen2.5-7B", 1, 8, "actor.budget.sequences=3", "critic.inference_budget.tokens=7").experiment
    assert budget_of(config, "critic").key == "training.micro_batch_tokens"
    assert budget_of(config, "critic", inference=True).key == "critic.inference_budget.tokens"


@pytest.mark.parametrize(("window", "turns", "sequences"), [("null", 8, 1), ("1", 8, 8), ("3", 8, 6), ("9", 8, 1)])
def test_a_window_that_slides_makes_more_sequences(window: str, turns: int, sequences: int) -> None:
    """The first three turns are one sequence, the fourth no longer sees the first and begins another."""
    config = load_experiment(None, [f"rollout.window_size={window}", f"rollout.max_turns={turns}"]).experiment
    assert sequences_per_game(config) == sequences


def test_learning_the_worlds_words_predicts_all_tokens(tmp_path: Path) -> None:
    words = ["algorithm.train_on_observations=true", "actor.budget.sequences=2"]
    assert share(on(tmp_path, "Qwen2.5-7B", 1, 8, *words).experiment, "actor", 8).places == 2 * 536


def write(tmp_path: Path) -> dict[str, str]:
    """Files with 3, 4, 5 and 37 rows."""
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n\n{"x": 2}\n{"x": 3}')
    (tmp_path / "b.json").write_text(json.dumps([1, 2, 3, 4]))
    (tmp_path / "c.csv").write_text('q,a\n"two\nlines",1\n2,2\n3,3\n4,4\n5,5\n')
    (tmp_path / "d.parquet").write_bytes(b"PAR1" + base64.b64decode(FOOTER))
    (tmp_path / "e.json").write_text('{"x": 1}\n{"x": 2}\n')
    return {file.stem: str(file) for file in tmp_path.iterdir()}


def test_rows_are_counted_in_each_kind_of_file(tmp_path: Path) -> None:
    files = write(tmp_path)
    assert [count_rows([files[name]]) for name in "abcde"] == [3, 4, 5, 37, 2]
    assert count_rows(files.values()) == 51


@pytest.mark.parametrize(
    "data", [b"", b"PAR1", b"\x00" * 8 + b"\xff\xff\xff\x7fPAR1", b"\x1c" * 99 + b"\x60\x00\x00\x00PAR1"]
)
def test_a_broken_file_has_an_unknown_number_of_rows(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.parquet").write_bytes(data)
    assert count_rows([str(tmp_path / "x.parquet")]) is None


def test_files_that_arent_here_leave_the_number_unknown(tmp_path: Path) -> None:
    (tmp_path / "x.arrow").write_text("")
    assert count_rows([str(tmp_path / "nowhere.jsonl")]) is None
    assert count_rows([str(tmp_path / "x.arrow")]) is None


@pytest.mark.parametrize(
    ("words", "rows", "steps", "dropped"),
    [
        (["data.epochs=3", "training.groups_per_step=10"], 37, 9, 7),
        (["data.epochs=3", "training.groups_per_step=10", "data.train_rows=25"], 25, 6, 5),
        (["training.groups_per_step=10"], 37, None, 7),
        (["sft.epochs=2", "sft.batch=10"], 37, 6, 7),
    ],
)
def test_steps_follow_from_the_rows_of_files(
    tmp_path: Path, words: list[str], rows: int, steps: int | None, dropped: int
) -> None:
    files = f"data.train_files=[{write(tmp_path)['d']}]"
    data = data_of(load_experiment(None, [files, *words]).experiment)
    assert data is not None
    assert (data.rows, data.steps, data.dropped) == (rows, steps, dropped)


def test_steps_are_unknown_while_the_files_are_elsewhere() -> None:
    words = ["data.train_files=[/nowhere/x.parquet]", "data.epochs=1"]
    data = data_of(load_experiment(None, words).experiment)
    assert data is not None
    assert (data.rows, data.steps, data.decide, data.dropped) == (None, None, True, 0)
