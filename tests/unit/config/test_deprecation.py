"""If these fail, configurations and checkpoints of earlier versions no longer load, or renamed keys go unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from quintet.config.compose import load_experiment
from quintet.config.deprecation import RENAMED_KEYS, RENAMED_VALUES, current_key, upgrade_keys
from quintet.config.dotted import flatten
from quintet.config.schema import keys
from quintet.config.yaml_writer import dump_config
from quintet.errors import ConfigError

FORMER = """\
world: {name: sokoban, boxes: 2, processes: {games_per_process: 4}}
validation:
  games: 32
placement: {worlds: {devices: [0]}, offload_worlds: false}
warm_start: {games: 12}
sft: {games: {games: 3, validation_games: 2}}
tracking: {report_games: 5}
"""
PRESENT = """\
env: {name: sokoban, boxes: 2, processes: {episodes_per_process: 4}}
validation:
  episodes: 32
placement: {envs: {devices: [0]}, offload_envs: false}
warm_start: {episodes: 12}
sft: {episodes: {episodes: 3, validation_episodes: 2}}
tracking: {report_episodes: 5}
"""


def write(directory: Path, text: str, name: str = "run.yaml") -> str:
    path = directory / name
    path.write_text(text)
    return str(path)


def test_every_present_name_exists() -> None:
    names = {key.name for key in keys()}
    assert [new for new in RENAMED_KEYS.values() if current_key(new) == new and new not in names] == []
    assert [key for key in RENAMED_VALUES if key not in names] == []


def test_a_file_with_former_names_is_the_same_run(tmp_path: Path) -> None:
    former = load_experiment(write(tmp_path, FORMER, "former.yaml"))
    assert former.experiment == load_experiment(write(tmp_path, PRESENT)).experiment
    assert former.provenance["validation.episodes"] == f"{tmp_path}/former.yaml:3"
    assert f"`validation.games` ({tmp_path}/former.yaml:3) is now called `validation.episodes`" in former.remarks
    assert len([note for note in former.remarks if "`world`" in note]) == 1, "one note a section"
    assert yaml.safe_load(dump_config(former))["env"]["boxes"] == 2


def test_overrides_with_former_names() -> None:
    former = load_experiment(None, ["world.boxes=2", "world.name=sokoban", "warm_start={games: 7}"])
    present = load_experiment(None, ["env.boxes=2", "env.name=sokoban", "warm_start={episodes: 7}"])
    assert former.experiment == present.experiment
    assert former.provenance == present.provenance
    assert "`world.boxes` (command line) is now called `env.boxes`" in former.remarks


def test_envs_of_a_mixture_with_former_names(tmp_path: Path) -> None:
    path = write(tmp_path, "worlds:\n  lake: {world: {size: 5}, validation_games: 8}\n  world: {share: 2}\n")
    run = load_experiment(path, ["worlds.lake.world.size=6"]).experiment
    assert run.envs["lake"].env.size == 6  # type: ignore[union-attr]
    assert (run.envs["lake"].validation_episodes, run.envs["world"].share) == (8, 2.0)


@pytest.mark.parametrize("text", ["world: {size: 5}\nenv: {size: 6}", "env: {size: 6}\nworld: {size: 5}"])
def test_both_names_in_one_file_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"`world` \(.*run.yaml:\d\) is the former name of `env` \(.*run.yaml:\d\)"):
        load_experiment(write(tmp_path, text))
    with pytest.raises(ConfigError, match=r"`world.size` .* is the former name of `env.size`"):
        load_experiment(None, ["world.size=5", "env.size=6"])


def test_an_override_wins_over_a_file_with_the_other_name(tmp_path: Path) -> None:
    for section, key in (("world", "env.size"), ("env", "world.size")):
        path = write(tmp_path, f"{section}: {{size: 5}}")
        assert load_experiment(path, [f"{key}=6"]).experiment.env.size == 6


def test_a_stored_experiment_gets_present_names() -> None:
    stored = {"world": {"name": "frozenlake", "size": 5}, "policy": {"overrides": {"a.b": 1}}, "seed": 3}
    upgraded = upgrade_keys(stored)
    assert upgraded == {"env": {"name": "frozenlake", "size": 5}, "policy": {"overrides": {"a.b": 1}}, "seed": 3}
    channel = {"name": None, "queue": None, "size": 0}
    assert upgrade_keys({"placement": {"actor": {"channel": channel, "group": None}}}) == {
        "placement": {"actor": {"group": None}}
    }
    today = load_experiment(None).experiment.model_dump(mode="json")
    assert upgrade_keys(today) == today
    assert set(flatten(upgrade_keys(yaml.safe_load(FORMER)))) == set(flatten(yaml.safe_load(PRESENT)))


def test_stored_configurations_lose_keys_without_effect() -> None:
    component = {"devices_per_worker": 1, "processes_per_device": 1}
    stored = {"placement": {"actor": {**component, "devices": [0]}, "rollout": component, "envs": component}}
    expected = {"actor": {"devices": [0]}, "rollout": component, "envs": {"processes_per_device": 1}}
    assert upgrade_keys(stored)["placement"] == expected
    assert upgrade_keys({"data": {"kind": "conversations", "seed": 3}}) == {"data": {"seed": 3}}
