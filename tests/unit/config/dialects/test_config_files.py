"""The framework's own file in a checkout, which a trainer reads unless another one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from quintet.config.dialects.composition.checkout import trainer_code
from quintet.config.dialects.composition.foreign_config import compose_config
from quintet.config.dialects.conversion import ForeignValues
from quintet.config.dialects.loader import convert, merge_with_reference
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.release_tables import load_release_tables
from quintet.config.dialects.scripts.run_script import RunScript
from quintet.config.dialects.scripts.run_script_reader import read_run_script
from quintet.config.dotted import unflatten
from quintet.errors import ConfigError

TRAINER = "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=model algorithm.adv_estimator=grpo"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of a fork of verl 0.4.0, whose entropy coefficient is another."""
    directory = tmp_path / "fork/verl/trainer"
    (directory / "config").mkdir(parents=True)
    decorator = "@hydra.main(config_path='config', config_name='ppo_trainer', version_base=None)"
    (directory / "main_ppo.py").write_text(f"{decorator}\ndef main(config): ...\n")
    tables = load_release_tables("verl")
    assert tables is not None
    changed = {"actor_rollout_ref.actor.entropy_coeff": 0.02}
    table = dict(tables.table("ppo_trainer", "0.4.0")) | changed
    (directory / "config/ppo_trainer.yaml").write_text(yaml.safe_dump(unflatten(table)))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "fork"


def script(directory: Path, words: str = "", name: str = "run.sh") -> RunScript:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{TRAINER} {words}\n")
    return read_run_script(path)


def values_of(found: RunScript) -> ForeignValues:
    config = compose_config(found.config, found.words, found.places, is_frameworks_file=found.is_frameworks_file)
    return merge_with_reference(config, DIALECTS["verl"])[0]


@pytest.mark.parametrize("words", ["", "--config-name ppo_trainer", "--config-path=config --config-name=ppo_trainer"])
def test_a_script_in_a_checkout_has_other_defaults_than_the_checkout(checkout: Path, words: str) -> None:
    values = values_of(script(checkout, words, "examples/grpo/run.sh"))
    assert values["actor_rollout_ref.actor.entropy_coeff"] == 0.02
    assert values.source("actor_rollout_ref.actor.entropy_coeff").partition(":")[0].endswith("ppo_trainer.yaml")
    assert values.dialect.release is not None
    assert values.dialect.release.name == "0.4.0"


@pytest.mark.parametrize(
    ("words", "misfits"),
    [
        ("actor_rollout_ref.rollout.calculate_log_probs=True", "actor_rollout_ref.rollout.calculate_log_probs"),
        ("+trainer.test_freq=5", "trainer.test_freq"),
        ("+actor_rollout_ref.rollout.calculate_log_probs=True trainer.test_freq=5 ++trainer.save_freq=5", None),
        ("+data.mine=1 data.mine=2", None),
        ("", None),
    ],
)
def test_a_script_that_hydra_refuses_in_its_checkout_plans_without_a_word(
    checkout: Path, words: str, misfits: str | None
) -> None:
    """The trainer that its author ran has another file; 0.4.0 has `test_freq`, and no `calculate_log_probs`."""
    found = script(checkout, words)
    for is_in_checkout in (True, False):
        config = compose_config(found.config, found.words, found.places, is_frameworks_file=is_in_checkout)
        told = [each for each in convert(config, DIALECTS["verl"]).composed.remarks if "Hydra refuses" in each]
        assert len(told) == int(is_in_checkout and misfits is not None)
        assert all(f"{misfits} (" in each and "run.sh:1" in each for each in told)


def test_a_script_in_a_checkout_of_vagen_has_other_limits_than_the_checkout(tmp_path: Path) -> None:
    """`vagen/trainer/main_ppo.py` of 25.6.28 has `config_path='config', config_name='ppo_trainer'`."""
    directory = tmp_path / "fork/vagen/trainer"
    (directory / "config").mkdir(parents=True)
    (directory / "main_ppo.py").touch()
    tables = load_release_tables("vagen")
    assert tables is not None
    table = dict(tables.table("ppo_trainer", "25.6.28")) | {"rollout_manager.max_turns": 7}
    (directory / "config/ppo_trainer.yaml").write_text(yaml.safe_dump(unflatten(table)))
    path = tmp_path / "fork/scripts/run.sh"
    path.parent.mkdir()
    (path.parent / "env_config.yaml").write_text("env1: {env_name: sokoban, train_size: 256, test_size: 8}\n")
    dataset = "python -m vagen.env.create_dataset --yaml_path env_config.yaml\n"
    path.write_text(f"{dataset}python3 -m vagen.trainer.main_ppo data.max_response_length=300\n")
    found = read_run_script(path)
    config = compose_config(found.config, found.words, found.places, is_frameworks_file=found.is_frameworks_file)
    values = merge_with_reference(config, DIALECTS["vagen"])[0]
    limits = ("rollout_manager.max_turns", "data.max_response_length", "data.max_trajectory_length")
    assert [values[key] for key in limits] == [7, 300, 3072]
    assert values.source("rollout_manager.max_turns").partition(":")[0].endswith("ppo_trainer.yaml")
    assert values["env1.env_name"] == "sokoban"
    assert config.misfits == ()  # the trainer reads the environments from another file


def test_a_script_that_is_started_in_a_checkout_has_other_defaults(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m` takes the package in the working directory."""
    monkeypatch.chdir(checkout)
    assert values_of(script(tmp_path))["actor_rollout_ref.actor.entropy_coeff"] == 0.02


def test_a_framework_in_a_directory_of_a_fork_does_not_decide_the_defaults(checkout: Path) -> None:
    """`pip install -e verl` makes the package of a copy in the fork's directory `verl` the one that a script starts."""
    project = checkout.parent / "project"
    (project / ".git").mkdir(parents=True)
    checkout.rename(project / "verl")
    values = values_of(script(project, "trainer.nnodes=2", "scripts/run.sh"))
    assert values["actor_rollout_ref.actor.entropy_coeff"] == 0.02
    assert values.source("actor_rollout_ref.actor.entropy_coeff").startswith(f"{project}/verl/verl/trainer/config/")


def test_defaults_of_a_checkout_count_as_settings_of_the_user(checkout: Path) -> None:
    """The release's default for engines, two GPUs for each, is no reason to refuse a run on a smaller machine."""
    found = script(checkout, "data.train_batch_size=1024")
    values = values_of(found)
    assert not values.is_set("actor_rollout_ref.rollout.tensor_model_parallel_size")
    assert values["actor_rollout_ref.rollout.tensor_model_parallel_size"] == 2
    # the user wrote it, though it is the default
    assert values.is_set("data.train_batch_size")
    config = compose_config(found.config, found.words, found.places, is_frameworks_file=True)
    result = convert(config, DIALECTS["verl"])
    assert not result.unsupported


def test_a_file_beside_a_script_is_taken_for_the_trainers_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/ppo_trainer.yaml").write_text(json.dumps({"data": {"seed": 3}}))
    assert script(tmp_path).config is None


def test_a_missing_config_path_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"run\.sh:1: there is no directory /nowhere"):
        script(tmp_path, "--config-path /nowhere --config-name ppo_trainer.yaml")
    without_checkout: Any = script(tmp_path, "--config-path=config --config-name=ppo_trainer")
    assert without_checkout.config is None


def test_the_training_backend_of_a_checkouts_file_counts_also_if_it_is_the_releases(checkout: Path) -> None:
    """Its default follows from the run, so that of the release does not stand for it."""
    tables = load_release_tables("verl")
    assert tables is not None
    table = tables.table("ppo_megatron_trainer", "0.3.0")
    file = checkout / "verl/trainer/config/ppo_megatron_trainer.yaml"
    file.write_text(yaml.safe_dump(unflatten(table)))
    values = values_of(script(checkout, "--config-name ppo_megatron_trainer"))
    assert values["actor_rollout_ref.actor.strategy"] == values["critic.strategy"] == "megatron"


def test_a_trainer_that_a_checkout_lacks_has_no_code(tmp_path: Path) -> None:
    (tmp_path / "verl/trainer").mkdir(parents=True)
    assert trainer_code("verl.trainer.main_ppo", tmp_path) == {}
