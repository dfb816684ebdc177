"""If these fail, a rank does another number of passes than it was planned for, or a run another number of steps."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from example_models import on
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.config.compose import load_experiment
from quintet.config.plan.batches import (
    max_mini_batches,
    max_sequences_per_episode,
    micro_batch_limits,
    num_sft_validations,
    rank_workload,
)
from quintet.config.plan.row_counts import count_rows, count_training_rows, num_steps
from quintet.config.plan.run_plan import plan_run
from quintet.errors import ConfigError

FOOTER = (
    "FQQZbDUAGAZzY2hlbWEVBAA1AhgBcBUCFQZMPAAAADUEGARsaXN0FQIANQIYB2VsZW1lbnQVAgAVDCUCGAFyJQBMHAAAABUAJQIY"
    "Am9rABZKGRwZLCYAHBUMGSUGABlIAXAEbGlzdAdlbGVtZW50AXIVABZKFrQDFrQDJghJHBUAFQAVAgA8FkoZJkoAGVYAAAAASgAA"
    "ACYAHBUAGSUGABkYAm9rFQAWShY8FjwmvANJHBUAFQAVAgA8KQYZJgBKAAAAFvADFkomCBbwAwAoIHBhcnF1ZXQtY3BwLWFycm93"
    "IHZlcnNpb24gMjYuMC4xGSwcAAAcAAAA+QAAAFBBUjE="
)
"""End of a Parquet file of 37 rows with a nested column, as pyarrow 26 writes it: 249 bytes of footer."""


UNSHARED = ("training.groups_per_step=512", "training.samples_per_group=1", "algorithm.advantage.name=raw")
"""Prompts that no other episode has."""


def test_a_ranks_part_of_a_mini_batch_by_hand(tmp_path: Path) -> None:
    """512 episodes in 8 mini-batches over 8 ranks: 8 episodes of 536 tokens, three at a time in three passes."""
    config = on(tmp_path, "Qwen2.5-7B", 1, 8, *UNSHARED, "actor.budget.sequences=3").experiment
    part = rank_workload(config, "actor", 8)
    assert (part.episodes_per_rank, part.sequences_per_rank, part.micro_batches) == (8, 8, 3)
    assert (part.tokens_per_micro_batch, part.predicted_tokens_per_micro_batch) == (3 * 536, 3 * 24)
    assert part.budget.description == "at most 3 sequences"
    assert part.budget.key == "actor.budget.sequences"


def test_a_budget_of_tokens_says_at_most(tmp_path: Path) -> None:
    """Eight sequences of at most 536 tokens, about 1,000 at a time: five passes, of which some have two sequences."""
    config = on(tmp_path, "Qwen2.5-7B", 1, 8, *UNSHARED, "actor.budget.tokens=1000").experiment
    part = rank_workload(config, "actor", 8)
    assert (part.micro_batches, part.tokens_per_micro_batch, part.predicted_tokens_per_micro_batch) == (5, 1072, 8 * 24)
    assert part.budget.description == "at most 1,000 tokens"


def test_samples_of_a_prompt_are_planned_with_one_copy_of_it(tmp_path: Path) -> None:
    """One device packs each of 4 prompts of 512 tokens once, with 16 responses of 24; eight devices may divide the
    samples of a prompt, so that a rank's 8 episodes have two. A second turn has a prompt of its own."""
    tokens = [
        rank_workload(on(tmp_path, "Qwen2.5-7B", 1, ranks, *more).experiment, "actor", ranks).tokens_per_micro_batch
        for ranks, more in ((1, ()), (8, ()), (8, ("rollout.max_turns=2", "rollout.window_size=null")))
    ]
    assert tokens == [4 * 512 + 64 * 24, 2 * 512 + 8 * 24, 8 * 536]


def test_fine_tuning_is_planned_with_its_own_batch_and_length() -> None:
    """16 rows of 96 tokens are one micro-batch of 1,536 tokens, however large the budget is; held-out rows as set."""
    words = ["sft.batch=16", "sft.max_tokens=96", "data.validation_batch=4", "data.train_files=[x.jsonl]"]
    config = load_experiment(None, words).experiment
    update, loss = (rank_workload(config, "actor", 1, inference=inference) for inference in (False, True))
    assert (update.tokens_per_micro_batch, update.micro_batches, loss.tokens_per_micro_batch) == (16 * 96, 1, 4 * 96)
    halves = rank_workload(config, "actor", 2)
    assert halves.tokens_per_micro_batch == 8 * 96


def test_both_limits_hold(tmp_path: Path) -> None:
    words = [*UNSHARED, "actor.budget.tokens=1000", "actor.budget.sequences=1"]
    part = rank_workload(on(tmp_path, "Qwen2.5-7B", 1, 8, *words).experiment, "actor", 8)
    assert (part.tokens_per_micro_batch, part.micro_batches) == (536, 8)
    assert part.budget.description == "at most 1 sequence and 1,000 tokens"


def test_a_sequence_beyond_the_budget_is_a_pass_by_itself(tmp_path: Path) -> None:
    part = rank_workload(on(tmp_path, "Qwen2.5-7B", 1, 8, "actor.budget.tokens=100").experiment, "actor", 8)
    assert (part.tokens_per_micro_batch, part.micro_batches) == (536, 8)


def test_a_learner_without_a_budget_has_the_runs(tmp_path: Path) -> None:
    config = on(tmp_path, "Qwen2.5-7B", 1, 8, "actor.budget.sequences=3", "critic.inference_budget.tokens=7").experiment
    assert micro_batch_limits(config, "critic").key == "training.micro_batch_tokens"
    assert micro_batch_limits(config, "critic", inference=True).key == "critic.inference_budget.tokens"


@pytest.mark.parametrize(("window", "turns", "sequences"), [("null", 8, 1), ("1", 8, 8), ("3", 8, 6), ("9", 8, 1)])
def test_a_window_that_slides_makes_more_sequences(window: str, turns: int, sequences: int) -> None:
    """The first three turns are one sequence, the fourth no longer sees the first and begins another."""
    config = load_experiment(None, [f"rollout.window_size={window}", f"rollout.max_turns={turns}"]).experiment
    assert max_sequences_per_episode(config) == sequences


def test_updates_of_a_number_of_turns_are_as_many_as_the_turns_of_a_step_fill() -> None:
    """By hand: 32 × 16 episodes of at most 8 turns fill 64 updates of 64 turns, 16 for each of 4 ranks."""
    words = ["rollout.window_size=1", "rollout.max_turns=8", "training.mini_batch_sequences=64"]
    config = load_experiment(None, words).experiment
    assert max_mini_batches(config) == 64
    part = rank_workload(config, "actor", 4)
    assert (part.sequences_per_rank, part.episodes_per_rank) == (16, 16)
    assert rank_workload(config, "actor", 4, inference=True).sequences_per_rank == 1024


def test_learning_the_envs_words_predicts_all_tokens(tmp_path: Path) -> None:
    words = ["algorithm.train_on_observations=true", "actor.budget.sequences=2"]
    assert (
        rank_workload(on(tmp_path, "Qwen2.5-7B", 1, 8, *words).experiment, "actor", 8).predicted_tokens_per_micro_batch
        == 2 * 536
    )


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
        (["data.epochs=3", "training.groups_per_step=10", "data.max_steps=4"], 37, 4, 7),
        (["data.epochs=3", "training.groups_per_step=10", "data.max_steps=40"], 37, 9, 7),
        (["training.groups_per_step=10"], 37, None, 7),
        (["sft.epochs=2", "sft.batch=10"], 37, 6, 7),
    ],
)
def test_steps_follow_from_the_rows_of_files(
    tmp_path: Path, words: list[str], rows: int, steps: int | None, dropped: int
) -> None:
    files = [f"data.train_files=[{write(tmp_path)['d']}]", "env.name=prompts"]
    data = count_training_rows(load_experiment(None, [*files, *words]).experiment)
    assert data is not None
    assert (data.rows, data.steps, data.dropped) == (rows, steps, dropped)


def test_steps_are_unknown_while_the_files_are_elsewhere() -> None:
    words = ["data.train_files=[/nowhere/x.parquet]", "data.epochs=1", "env.name=prompts"]
    data = count_training_rows(load_experiment(None, words).experiment)
    assert data is not None
    assert (data.rows, data.steps, data.sets_steps, data.dropped) == (None, None, True, 0)


def test_rows_that_fill_no_step_are_refused_with_what_would() -> None:
    config = load_experiment(None, ["env.name=prompts", "data.epochs=3", "training.groups_per_step=10"]).experiment
    assert [num_steps(config, rows) for rows in (10, 19, 20)] == [3, 3, 6]
    with pytest.raises(ConfigError, match=r"training\.groups_per_step = 10: the data have 9 rows") as error:
        num_steps(config, 9)
    assert error.value.hint == "nearest valid value: training.groups_per_step=9"
    alone = load_experiment(None, ["sft.batch=4", "sft.epochs=2"]).experiment
    assert num_steps(alone, 9) == 4
    with pytest.raises(ConfigError, match=r"sft\.batch = 4: the data have 1 row,"):
        num_steps(alone, 1)


@pytest.mark.parametrize("words", [["training.steps=7"], ["data.seed=1", "training.steps=7", "data.max_steps=3"]])
def test_steps_that_dont_follow_from_the_rows_are_those_that_were_given(words: list[str]) -> None:
    assert num_steps(load_experiment(None, ["env.name=prompts", *words]).experiment, 5) == 7


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 4), st.integers(-1, 9))
def test_losses_of_fine_tuning_are_as_many_as_counting_gives(rows: int, batch: int, epochs: int, every: int) -> None:
    words = [f"sft.batch={batch}", f"sft.epochs={epochs}", f"validation.every_steps={every}"]
    config = load_experiment(None, words).experiment
    assert config.sft is not None
    each, steps = rows // batch, rows // batch * epochs
    if each:
        told = [step for step in range(1, steps + 1) if every >= 0 and (step % each == 0 or step == steps)]
        told += [step for step in range(1, steps + 1) if every > 0 and step % every == 0]
        assert num_sft_validations(config, config.sft, steps, each) == 1 + len(set(told))


def test_passes_of_fine_tuning_are_those_of_sequences_or_of_tokens() -> None:
    """By hand: 30 rows four at a time; or of at most 1,000 tokens each, 4,096 tokens at a time."""
    own = load_experiment(None, ["sft.batch=30", "sft.sequences_per_pass=4"]).experiment
    filled = load_experiment(
        None, ["sft.batch=30", "sft.max_tokens=1000", "training.micro_batch_tokens=4096"]
    ).experiment
    assert [rank_workload(config, "actor", 1).micro_batches for config in (own, filled)] == [8, 8]


def test_held_out_rows_are_those_of_their_own_files_or_of_training(tmp_path: Path) -> None:
    files = write(tmp_path)
    train = ["env.name=prompts", f"data.train_files=[{files['d']}]"]
    for words, rows in (
        ([], 37),
        ([f"data.validation_files=[{files['a']}]"], 3),
        (["data.validation_rows=2"], 2),
        (["data.dataset_class=mine.py:Mine"], None),
    ):
        data = count_training_rows(load_experiment(None, [*train, *words]).experiment)
        assert data is not None
        assert data.held_out == rows


def test_stored_answers_are_counted(tmp_path: Path) -> None:
    files = write(tmp_path)
    for path, rows in {files["a"]: 3, "/nowhere.parquet": None}.items():
        assert plan_run(load_experiment(None, [f"evaluation.path={path}"])).numbers["rows"] == rows


def test_files_that_nothing_reads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"data\.train_files = .*frozenlake makes its own start states"):
        load_experiment(None, ["data.train_files=[x.parquet]"])
