"""If these fail, the rows of VAGEN's Parquet files are other episodes in a run, or are lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quintet.config.dialects.composition.foreign_config import config_from_tree
from quintet.config.dialects.loader import convert
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.vagen.env_config_file import read_sections
from quintet.config.native.experiment import Experiment
from quintet.data.start_state_files import build_start_states, write_start_state_files
from quintet.envs.start_states import Split, env_index, env_seed, split_of
from quintet.errors import ConfigError

LAKE = {"render_mode": "text", "size": 5}
PUZZLE = {"render_mode": "vision", "dim_room": [7, 6]}


def row(name: str, config: Mapping[str, Any], seed: int, split: str = "train") -> dict[str, Any]:
    """A row as VAGEN's `create_dataset` writes it."""
    info = {"split": split, "env_name": name, "env_config": dict(config), "seed": seed}
    return {"data_source": name, "prompt": [{"role": "user", "content": ""}], "extra_info": info}


def write(path: Path, *rows: Mapping[str, Any]) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


def run(train: str, test: str | None = None, **tree: Any) -> Experiment:
    files = {"train_files": train, **({} if test is None else {"val_files": test})}
    base = {"data": files, "trainer": {"total_training_steps": 3}, "rollout_manager": {"max_turns": 2}}
    return convert(config_from_tree(base | tree), DIALECTS["vagen"]).composed.experiment


@pytest.mark.proves("vagen", "data.train_files", "data.val_files")
def test_each_row_is_an_episode_of_its_environment_with_its_seed(tmp_path: Path) -> None:
    """Mixed environments give rows null fields, as Parquet unifies them."""
    rows = [row("frozenlake", LAKE, 11), row("sokoban", PUZZLE, 12), row("frozenlake", LAKE, 7)]
    train = write(tmp_path / "train.parquet", *rows)
    test = write(tmp_path / "test.parquet", row("sokoban", PUZZLE, 3, "test"), row("frozenlake", LAKE, 4, "test"))
    config = run(train, test)
    assert [(env.name, env.config.name) for env in config.run_envs] == [("env1", "frozenlake"), ("env2", "sokoban")]
    assert [env.config.model_dump()["render"] for env in config.run_envs] == ["text", "vision"]
    assert [env.validation_episodes for env in config.run_envs] == [1, 1]
    states = build_start_states(config)
    drawn = [(env_index(start), env_seed(start)) for start in states.take(6)]
    assert sorted(drawn[:3]) == sorted(drawn[3:]) == [(0, 7), (0, 11), (1, 12)], "each row once per pass"
    assert [(env_index(start), env_seed(start)) for start in states.held_out()] == [(1, 3), (0, 4)]
    in_order = build_start_states(config.model_copy(update={"training": unshuffled(config)}))
    assert [env_seed(start) for start in in_order.take(4)] == [11, 12, 7, 11]


def unshuffled(config: Experiment) -> Any:
    return config.training.model_copy(update={"shuffle_start_states": False})


def test_a_resumed_run_continues_after_the_rows_that_it_used(tmp_path: Path) -> None:
    train = write(tmp_path / "train.parquet", *(row("frozenlake", LAKE, seed) for seed in range(7)))
    config = run(train)
    first = build_start_states(config)
    before = first.take(3)
    state, after = first.state(), first.take(9)
    resumed = build_start_states(config)
    resumed.load(state)
    assert resumed.take(9) == after
    assert before != after[:3]
    write(tmp_path / "train.parquet", row("frozenlake", LAKE, 99))
    with pytest.raises(ConfigError, match="the rows differ from those of the checkpoint"):
        build_start_states(run(train)).load(state)


def test_without_files_of_a_split_its_seeds_are_those_of_the_run(tmp_path: Path) -> None:
    train = write(tmp_path / "train.parquet", row("frozenlake", LAKE, 5))
    states = build_start_states(run(train))
    assert {env_seed(start) for start in states.take(3)} == {5}
    assert {split_of(start) for start in states.held_out()} == {Split.VALIDATION}


def test_the_options_of_a_section_must_be_those_of_the_rows(tmp_path: Path) -> None:
    train = write(tmp_path / "train.parquet", row("frozenlake", LAKE, 5), row("frozenlake", {"size": 6}, 5))
    section = {"env_name": "frozenlake", "env_config": LAKE}
    config = run(train, env1=section)
    with pytest.raises(ConfigError, match=r"train.parquet, row 1: extra_info.env_config says env.size = 6, .* has 5"):
        build_start_states(config)


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"env_name": "", "env_config": LAKE, "seed": 1}, "row 0: extra_info.env_name = ''"),
    ({"env_name": "frozenlake", "env_config": LAKE, "seed": -1}, "row 0: extra_info.seed = -1"),
    ({"env_name": "frozenlake", "env_config": LAKE}, "row 0: extra_info.seed = None"),
    ({"env_name": "frozenlake", "env_config": 3, "seed": 1}, "row 0: extra_info.env_config = 3"),
    ({"env_name": "frozenlake", "env_config": {"sise": 5}, "seed": 1}, "unknown key env1.env_config.sise"),
]


@pytest.mark.parametrize(("info", "message"), BROKEN)
def test_a_broken_row_is_named_with_file_and_key(tmp_path: Path, info: dict[str, Any], message: str) -> None:
    train = write(tmp_path / "train.parquet", {"extra_info": info})
    with pytest.raises(ConfigError, match=message):
        run(train)


def test_another_parquet_file_is_refused_by_name(tmp_path: Path) -> None:
    prompts = write(tmp_path / "train.parquet", {"question": "2 + 2"})
    with pytest.raises(ConfigError, match=r"data.train_files: .*train.parquet is no Parquet file of start states"):
        run(prompts)


ENV_CONFIG = """\
lake: {env_name: frozenlake, env_config: {size: 5}, train_size: 4, test_size: 2}
boxes: {env_name: sokoban, env_config: {render_mode: vision, dim_room: [7, 6]}, train_size: 3, test_size: 2}
"""


def test_written_files_have_vagens_layout_and_no_start_state_twice(tmp_path: Path) -> None:
    (tmp_path / "env_config.yaml").write_text(ENV_CONFIG)
    files = write_start_state_files(read_sections(tmp_path / "env_config.yaml"), tmp_path / "data")
    rows = {split: pq.read_table(path).to_pylist() for split, path in files.items()}
    assert [len(rows[split]) for split in ("train", "test")] == [7, 4]
    assert rows["train"][0] == row("frozenlake", {"render_mode": "text", "size": 5, "dim_room": None}, 0)
    seeds = {split: {one["extra_info"]["seed"] for one in rows[split]} for split in rows}
    assert seeds == {"train": {0, 3, 6, 9}, "test": {1, 4}}
    with pytest.raises(ConfigError, match="--overwrite"):
        write_start_state_files({}, tmp_path / "data")
    config = run(str(files["train"]), str(files["test"]))
    assert [env.config.name for env in config.run_envs] == ["frozenlake", "sokoban"]
    assert len(build_start_states(config).held_out()) == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lake: {env_name: frozenlake, env_config: {sise: 5}}", "lake.env_config.sise"),
        ("lake: {env_name: chess}", "lake.env_name = 'chess'"),
        ("lake: {env_name: frozenlake, train_size: many}", "lake.train_size"),
        ("lake: {size: 5}", "no section with an env_name"),
    ],
)
def test_an_env_config_that_no_run_could_use_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "env_config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_sections(tmp_path / "env_config.yaml")
