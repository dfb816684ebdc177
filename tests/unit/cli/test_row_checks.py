"""If these fail, a run generates for hours before it finds a row that nothing can grade, or gives it reward 0."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quintet.cli import plan, train
from quintet.cli.row_checks import check_prompt_files
from quintet.config.compose import load_experiment
from quintet.errors import ConfigError


def write(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


def words(directory: Path, file: str, *more: str) -> list[str]:
    return ["env.name=prompts", f"data.train_files=[{file}]", "reward.kind=numeric", f"output_dir={directory}", *more]


def refusal(directory: Path, file: str, *more: str) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        check_prompt_files(load_experiment(None, words(directory, file, *more)).experiment)
    return error.value


def test_a_row_after_thousands_of_good_ones_is_named(tmp_path: Path) -> None:
    rows = [{"prompt": f"{number} + 1?", "answer": str(number + 1)} for number in range(1500)]
    file = write(tmp_path / "sums.jsonl", *rows, {"prompt": "0 + 1?", "answer": None})
    assert "sums.jsonl, row 1500 has no ground truth; its columns are prompt, answer" in refusal(tmp_path, file).message
    check_prompt_files(load_experiment(None, words(tmp_path, write(tmp_path / "good.jsonl", *rows))).experiment)


def test_a_column_of_another_name_is_named_with_the_key_that_selects_it(tmp_path: Path) -> None:
    file = write(tmp_path / "gold.jsonl", *[{"prompt": "1 + 1?", "gold": "2"}] * 40)
    error = refusal(tmp_path, file)
    assert "gold.jsonl, row 0 (and 39 other rows) has no ground truth; its columns are prompt, gold" in error.message
    assert "data.truth_key=gold" in str(error.hint)
    check_prompt_files(load_experiment(None, words(tmp_path, file, "data.truth_key=gold")).experiment)


def test_held_out_rows_are_checked_up_to_their_limit(tmp_path: Path) -> None:
    good, bad = {"prompt": "1 + 1?", "answer": "2"}, {"prompt": "1 + 1?", "answer": "two"}
    train_file = write(tmp_path / "good.jsonl", good)
    held_out = f"data.validation_files=[{write(tmp_path / 'held_out.jsonl', good, bad)}]"
    assert "held_out.jsonl, row 1 has the ground truth 'two'" in refusal(tmp_path, train_file, held_out).message
    few = words(tmp_path, train_file, held_out, "data.validation_rows=1")
    check_prompt_files(load_experiment(None, few).experiment)


def test_rows_that_a_function_scores_need_no_ground_truth(tmp_path: Path) -> None:
    file = write(tmp_path / "only.jsonl", {"prompt": "Name a fruit."})
    function = words(tmp_path, file, "reward.function=mine.py:score")
    check_prompt_files(load_experiment(None, function).experiment)


@pytest.mark.parametrize("command", [plan, train])
def test_rows_that_nothing_scores_are_refused_before_a_model_is_loaded(command: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "mine.jsonl", {"prompt": "1 + 1?", "answer": "2"})
    with pytest.raises(ConfigError, match=r"rows have no data_source .*, and reward.kind = 'rules'") as error:
        command.run(None, [*words(tmp_path, file), "reward=null"], None, "refuse")
    assert "reward.function (file.py:function)" in str(error.value)


@pytest.mark.parametrize("command", [plan, train])
def test_a_function_that_its_file_lacks_is_named_before_a_model_is_loaded(command: Any, tmp_path: Path) -> None:
    file, code = write(tmp_path / "mine.jsonl", {"prompt": "1 + 1?"}), tmp_path / "reward.py"
    code.write_text("raise SystemExit('was run')\ndef score(**arguments): return 1\n")
    for key in ("reward.function", "data.dataset_class"):
        with pytest.raises(ConfigError, match=r"\(command line\): .*reward.py has no 'scor'") as error:
            command.run(None, [*words(tmp_path, file), f"{key}={code}:scor"], None, "refuse")
        assert str(error.value).endswith(f"did you mean {code}:score?")


@pytest.mark.parametrize("command", [plan, train])
def test_plan_and_train_name_such_rows_before_a_model_is_loaded(command: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "gold.jsonl", *[{"prompt": "1 + 1?", "gold": "2"}] * 40)
    with pytest.raises(ConfigError, match=r"data.truth_key = 'reward_model' \(default\): .*gold.jsonl, row 0"):
        command.run(None, words(tmp_path, file), None, "refuse")
