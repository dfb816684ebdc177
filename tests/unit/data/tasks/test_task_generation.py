"""If these fail, a made data set asks what it can't judge, holds training questions out, or is another each time."""

from __future__ import annotations

import json
import operator
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintet.config.native.data import DataConfig
from quintet.config.native.training import SolvedEpisodesConfig
from quintet.data import demonstration_rows
from quintet.data.demonstration_rows import parse_env_config, write_demonstration_rows
from quintet.data.row_reader import RowReader
from quintet.data.tasks import generation
from quintet.data.tasks.arithmetic import Tree, evaluate_steps, to_text
from quintet.data.tasks.generation import generate_dataset
from quintet.data.tasks.task import build_task
from quintet.envs.factory import build_env
from quintet.envs.start_states import Split, split_of
from quintet.errors import ConfigError, MachineError

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


def rows(path: Path) -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return read


def make(directory: Path, task: str, train: int = 40, validation: int = 10, **more: Any) -> tuple[list[Any], list[Any]]:
    made = generate_dataset(task, directory, train=train, validation=validation, **more)
    return rows(made["train"]), rows(made["validation"])


def value(text: str) -> Fraction:
    """An expression's value by a parser of the test's own: precedence climbing over exact fractions."""
    tokens = re.findall(r"\d+|[-+*/()]", text)

    def atom() -> Fraction:
        word = tokens.pop(0)
        if word != "(":
            return Fraction(int(word))
        inside = sum_()
        assert tokens.pop(0) == ")"
        return inside

    def product() -> Fraction:
        total = atom()
        while tokens and tokens[0] in "*/":
            total = OPERATORS[tokens.pop(0)](total, atom())
        return total

    def sum_() -> Fraction:
        total = product()
        while tokens and tokens[0] in "+-":
            total = OPERATORS[tokens.pop(0)](total, product())
        return total

    result = sum_()
    assert not tokens
    return result


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("addition", {"digits": 3, "terms": 3, "style": "worked"}),
        ("arithmetic", {"operators": "+-*/", "parentheses": True, "style": "worked"}),
        ("arithmetic", {"operators": "-*", "terms": 4, "negative": False}),
    ],
)
def test_generated_ground_truth_is_correct(tmp_path: Path, task: str, options: dict[str, Any]) -> None:
    train, validation = make(tmp_path, task, options=options)
    for row in train + validation:
        asked = row["prompt"][0]["content"].partition(" = ?")[0]
        truth = row["reward_model"]["ground_truth"]
        assert value(asked) == int(truth)
        assert row["response"].endswith(f"<answer> {truth} </answer>")
        assert ("<think>" in row["response"]) == (options.get("style") == "worked")
        for line in re.findall(r"<think> (.*) </think>", row["response"]):
            assert all(value(left) == int(right) for left, right in (part.split(" = ") for part in plain(line)))
        assert options.get("negative", True) or int(truth) >= 0


def plain(working: str) -> list[str]:
    """Its steps without those that begin with a negative number, which the test's parser doesn't read."""
    return [part for part in working.split(" , ") if not re.search(r"(^|[-+*/] )-", part)]


def test_worked_sums_proceed_digit_by_digit() -> None:
    task = build_task("addition", {"style": "worked", "digits": 2})
    problem = next(p for p in (task.problem(0, n) for n in range(100)) if p is not None and p.question[:2] == "97")
    left, right = (int(word) for word in re.findall(r"\d+", problem.question)[:2])
    carry = (left % 10 + right % 10) // 10
    first = f"{left % 10} + {right % 10} = {left % 10 + right % 10}"
    second = f"{left // 10} + {right // 10}{' + 1' if carry else ''} = {left // 10 + right // 10 + carry}"
    assert problem.response == f"<think> {first} , {second} </think> <answer> {left + right} </answer>"


def test_the_style_with_a_tool_calls_a_calculator_with_the_question() -> None:
    problem = build_task("addition", {"style": "tool", "digits": 2}).problem(0, 0)
    assert problem is not None
    expression = problem.question.partition(" = ?")[0]
    assert problem.response == (
        f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'
        f"<answer> {problem.ground_truth} </answer>"
    )
    with pytest.raises(ConfigError, match="needs the task addition or arithmetic"):
        build_task("countdown", {"style": "tool"})


@pytest.mark.parametrize("style", ["direct", "worked"])
def test_word_problems_have_the_result_of_what_they_tell(tmp_path: Path, style: str) -> None:
    train, validation = make(tmp_path, "word_problems", options={"style": style, "largest_result": 30})
    for row in train + validation:
        asked, truth = row["prompt"][0]["content"], int(row["reward_model"]["ground_truth"])
        before, change = (int(number) for number in re.findall(r"\d+", asked))
        assert truth == (before + change if " buys " in asked else before - change)
        assert 0 <= truth <= 30
        assert asked.endswith("have now? Answer with just the number.")
        worked = f"<think> {before} {'+' if ' buys ' in asked else '-'} {change} = {truth} </think>"
        assert row["response"] == (str(truth) if style == "direct" else f"{worked} <answer> {truth} </answer>")


numbers = st.integers(0, 99)
trees: st.SearchStrategy[Tree] = st.recursive(
    numbers, lambda inner: st.tuples(st.sampled_from("+-*/"), inner, inner), max_leaves=7
)


@settings(max_examples=200)
@given(trees)
def test_expression_text_evaluates_to_the_value_of_its_tree(tree: Tree) -> None:
    done = evaluate_steps(tree)
    if done:
        assert value(to_text(tree)) == done[-1][-1]


def test_countdown_can_be_solved_with_each_number_once(tmp_path: Path) -> None:
    train, validation = make(tmp_path, "countdown", options={"numbers": 5, "style": "worked"})
    for row in train + validation:
        target, given_numbers = (row["reward_model"]["ground_truth"][name] for name in ("target", "numbers"))
        match = re.search(r"<answer> (.*) </answer>", row["response"])
        assert match
        assert value(match[1]) == target
        assert sorted(map(int, re.findall(r"\d+", match[1]))) == given_numbers
        assert 10 <= target <= 100
        assert f"Make {target} from {', '.join(map(str, given_numbers))} " in row["prompt"][0]["content"]


@pytest.mark.parametrize("name", ["chain_sum", "gsm_symbolic", "countdown"])
def test_reasoning_gym_scores_its_own_answers_as_correct(tmp_path: Path, name: str) -> None:
    import reasoning_gym

    train, validation = make(tmp_path, f"reasoning_gym:{name}", 6, 3)
    for row in train + validation:
        entry = json.loads(row["reward_model"]["ground_truth"])
        assert row["data_source"] == f"reasoning_gym/{name}"
        assert row["extra_info"]["generator"] == entry["metadata"]["source_dataset"] == name
        assert entry["question"].rstrip() in row["prompt"][0]["content"]
        judge = reasoning_gym.get_score_answer_fn(name)
        assert judge(entry["answer"], entry) == 1.0
        assert judge("nonsense", entry) < 0.5
        assert row["response"] == f"<answer> {entry['answer']} </answer>"


@pytest.mark.parametrize("task", ["addition", "arithmetic", "countdown", "word_problems", "reasoning_gym:chain_sum"])
def test_sizes_are_exact_and_no_question_is_in_both_splits(tmp_path: Path, task: str) -> None:
    train, validation = make(tmp_path, task, 150, 30)
    assert (len(train), len(validation)) == (150, 30)
    asked = [row["prompt"][0]["content"] for row in train + validation]
    assert len(set(asked)) == 180
    for split, found in (("train", train), ("validation", validation)):
        assert [row["extra_info"]["index"] for row in found] == list(range(len(found)))
        assert {row["extra_info"]["split"] for row in found} == {split}
    question = RowReader(DataConfig()).read(train[0], 0, "here")
    assert question.ground_truth
    assert question.response


def test_equivalent_problems_stay_in_one_split(tmp_path: Path) -> None:
    train, validation = make(tmp_path, "addition", 40, 20, options={"digits": 1})
    keys = [
        {tuple(sorted(re.findall(r"\d", row["prompt"][0]["content"]))) for row in found}
        for found in (train, validation)
    ]
    assert not keys[0] & keys[1]


@pytest.mark.parametrize("task", ["addition", "countdown", "reasoning_gym:chain_sum"])
def test_the_rows_follow_from_the_seed(tmp_path: Path, task: str) -> None:
    again = [
        generate_dataset(task, tmp_path / str(n), train=20, validation=5, seed=seed) for n, seed in enumerate([1, 1, 2])
    ]
    files = [[made[split].read_bytes() for split in ("train", "validation")] for made in again]
    assert files[0] == files[1]
    assert files[0] != files[2]
    asked = [{row["prompt"][0]["content"] for row in rows(made["train"])} for made in (again[0], again[2])]
    assert len(asked[0] & asked[1]) < 10


def test_generation_does_not_depend_on_the_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [generate_dataset("addition", tmp_path / str(n), train=400, validation=50, processes=n) for n in (1, 2)]
    assert made[0]["train"].read_bytes() == made[1]["train"].read_bytes()
    assert made[0]["validation"].read_bytes() == made[1]["validation"].read_bytes()
    episodes = SolvedEpisodesConfig(episodes=9, validation_episodes=3)
    played = [
        write_demonstration_rows(
            parse_env_config("frozenlake", {}), episodes.model_copy(update={"processes": n}), tmp_path / f"g{n}"
        )
        for n in (1, 2)
    ]
    assert played[0]["train"].read_bytes() == played[1]["train"].read_bytes()


def test_too_few_distinct_problems_is_an_error_with_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(generate_dataset("addition", tmp_path / "a", train=100, validation=0, options={"digits": 1})) == 1
    monkeypatch.setattr(generation, "MAX_IDLE_PROBLEMS", 2000)
    with pytest.raises(ConfigError, match="only 100 distinct questions were found, 101 were requested"):
        generate_dataset("addition", tmp_path / "b", train=101, validation=0, options={"digits": 1})
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("addtion", {}, "did you mean 'addition'"),
        ("addition:x", {}, "use addition"),
        ("addition", {"digit": 2}, "unknown option digit, did you mean digits?"),
        ("addition", {"digits": 0, "terms": 1}, "digits=0: Input should be greater than or equal to 1; terms=1"),
        ("arithmetic", {"operators": "+%"}, "unknown %"),
        ("countdown", {"min_target": 50, "max_target": 40}, "min_target=50 is above"),
        ("reasoning_gym", {}, "requires a generator"),
        ("reasoning_gym:chain_sun", {}, "did you mean reasoning_gym:chain_sum"),
        ("reasoning_gym:chain_sum", {"min_digit": 2}, "did you mean min_digits"),
        ("reasoning_gym:chain_sum", {"min_terms": -1}, "min_terms must be positive"),
        ("reasoning_gym:rearc", {}, "cannot be stored"),
    ],
)
def test_invalid_task_options_are_named(tmp_path: Path, task: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        generate_dataset(task, tmp_path, train=2, validation=1, options=options)
    assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    generate_dataset("addition", tmp_path, train=5, validation=2)
    with pytest.raises(MachineError, match="exists already"):
        generate_dataset("addition", tmp_path, train=6, validation=2)
    assert list(generate_dataset("addition", tmp_path, train=6, validation=0, overwrite=True)) == ["train"]
    assert [path.name for path in tmp_path.iterdir()] == ["train.parquet"]
    assert len(rows(tmp_path / "train.parquet")) == 6
    with pytest.raises(ConfigError, match="no rows to generate"):
        generate_dataset("addition", tmp_path, train=0, validation=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot write"):
        generate_dataset("addition", tmp_path / "file", train=1, validation=0)


def solve(directory: Path, env: str, **more: Any) -> tuple[list[Any], list[Any]]:
    episodes = SolvedEpisodesConfig(episodes=12, validation_episodes=4, seed=7, **more)
    made = write_demonstration_rows(parse_env_config(env, {}), episodes, directory)
    return rows(made["train"]), rows(made["validation"])


@pytest.mark.parametrize("env", ["sokoban", "frozenlake"])
def test_solved_episodes_can_be_replayed_from_their_rows(tmp_path: Path, env: str) -> None:
    train, validation = solve(tmp_path, env)
    episodes: dict[int, list[Any]] = {}
    for row in train + validation:
        episodes.setdefault(row["extra_info"]["index"], []).append(row)
    assert len(episodes) == 16
    for seed, turns in episodes.items():
        assert split_of(seed) is Split.DEMONSTRATION
        played = build_env(parse_env_config(env, {}))
        seen, step = played.reset(seed).text, None
        for number, row in enumerate(turns):
            assert row["extra_info"]["turn"] == number
            assert [m["role"] for m in row["prompt"]] == ["system", "user", *["assistant", "user"] * number]
            assert row["prompt"][-1]["content"] == seen
            assert row["prompt"][2:-1:2] == [
                {"role": "assistant", "content": before["response"]} for before in turns[:number]
            ]
            action = row["reward_model"]["ground_truth"]
            assert re.fullmatch(rf"<think> .* </think><answer> {action} </answer>", row["response"])
            step = played.step(action)
            seen = step.observation.text
        assert step is not None
        assert step.info["success"]
    starts = [turns[0]["prompt"][-1]["content"] for turns in episodes.values()]
    assert len(set(starts)) == 16


def test_solved_episodes_as_text(tmp_path: Path) -> None:
    chat, _ = solve(tmp_path / "qwen", "frozenlake", form="qwen-instruct")
    later = next(row for row in chat if row["extra_info"]["turn"] == 1)
    assert later["prompt"].startswith("<|im_start|>system\nReach the goal")
    assert later["prompt"].endswith("<|im_end|>\n<|im_start|>assistant\n<think>")
    assert later["prompt"].count("<|im_start|>assistant\n<think>") == 2
    assert re.fullmatch(r" safe .* </think><answer> \w+ </answer>", later["response"])
    base, _ = solve(tmp_path / "base", "frozenlake", form="base")
    assert base[0]["prompt"].endswith("\nAssistant: <think>")
    assert "<|im_start|>" not in base[0]["prompt"]


def test_too_few_solvable_episodes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstration_rows, "MAX_TRIES_PER_EPISODE", 5)
    hard, episodes = (
        parse_env_config("sokoban", {"min_solution_pushes": 3}),
        SolvedEpisodesConfig(episodes=2, max_depth=1),
    )
    with pytest.raises(ConfigError, match="solved in") as caught:
        write_demonstration_rows(hard, episodes, tmp_path)
    assert caught.value.key == "max_depth"
    with pytest.raises(ConfigError, match="did you mean boxes"):
        parse_env_config("sokoban", {"box": 2})
    with pytest.raises(ConfigError, match="the environment countdown has no expert"):
        parse_env_config("countdown", {})
