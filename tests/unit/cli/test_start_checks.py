"""If these fail, a run finds out after its episodes what could have been known before them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.support.openvla_directories import robot_statistics, write_openvla_directory

from quintet.cli import main as command
from quintet.cli import train
from quintet.cli.choices import check_action_policy, check_choices
from quintet.cli.configuration import load_config
from quintet.config.compose import load_experiment
from quintet.errors import ConfigError

MANISKILL = Path(__file__).parents[3] / "examples" / "rlinf" / "maniskill_ppo_openvlaoft.yaml"


@pytest.mark.parametrize(
    ("key", "url", "message"),
    [
        ("checkpoint.remote_dir", "/proc/nowhere", "cannot write to /proc/nowhere: FileNotFoundError"),
        ("checkpoint.remote_dir", "nowhere://x", "not supported by fsspec"),
        ("sft.remote_dir", "file:///proc/nowhere", "cannot write to"),
    ],
)
def test_a_store_that_cant_be_written_is_told_at_the_start(key: str, url: str, message: str) -> None:
    overrides = ["sft.episodes={}"] if key.startswith("sft") else []
    with pytest.raises(ConfigError) as refused:
        check_choices(load_experiment(None, [*overrides, f"{key}={url}"]))
    assert (refused.value.key, refused.value.source) == (key, "command line")
    assert f"{key} = '{url}' (command line): {message}" in str(refused.value)


def test_a_store_that_can_be_written_is_left_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"
    check_choices(load_experiment(None, [f"checkpoint.remote_dir={store}"]))
    assert list(store.iterdir()) == []
    # of several processes one asks
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    check_choices(load_experiment(None, ["checkpoint.remote_dir=/proc/nowhere"]))


LOSS_FILE = """
from dataclasses import dataclass
from math import sqrt

def squares(logprobs, targets, options): ...

class Cubes: ...

def _helper(): ...
"""


@pytest.mark.parametrize(
    ("name", "hint"), [("squres", "did you mean {}:squares?"), ("zzz", "define it in {}, or name one of those")]
)
def test_a_misspelt_loss_function_is_refused_with_the_functions_of_its_file(
    name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "loss.py"
    file.write_text(LOSS_FILE)
    reference = f"{file}:{name}"
    overrides = [f"output_dir={tmp_path}/runs", "algorithm.loss.name=custom", f"algorithm.loss.function={reference}"]
    monkeypatch.setattr(sys, "argv", ["quintet", "train", *overrides])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 2
    named = f"quintet: algorithm.loss.function = {reference!r} (command line): "
    problem = f"{file} has no {name!r}; it defines squares, Cubes"
    assert capsys.readouterr().err == f"{named}{problem}\n  {hint.format(file)}\n"
    assert not (tmp_path / "runs").exists()


def test_a_server_that_cannot_be_started_is_refused_before_anything_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quintet.hardware.is_installed", lambda module: module != "sglang")
    engine, option = "rollout.engine=sglang-server", "rollout.engine_options.server_url"
    with pytest.raises(ConfigError) as refused:
        check_choices(load_experiment(None, [engine]))
    assert "rollout.engine = 'sglang-server' (command line) needs sglang, not installed here" in str(refused.value)
    assert f"set {option} to a running server" in str(refused.value)
    check_choices(load_experiment(None, [engine, f"{option}=http://127.0.0.1:30000"]))


def test_training_is_refused_before_a_run_directory_if_images_exceed_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise no episode of the run has a turn."""
    monkeypatch.chdir(tmp_path)
    overrides = ["policy.preset=grid-vl", "env.render=vision", "env.tile_size=16", "rollout.max_prompt_tokens=10"]
    with pytest.raises(ConfigError, match=r"rollout\.max_prompt_tokens = 10 \(command line\).*4 × 4 = 16 tokens"):
        train.run(None, [*overrides, "training.steps=0", "warm_start.updates=1"], None, "refuse")
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy as it is published, and one whose statistics were not copied."""
    directory = tmp_path_factory.mktemp("policies")
    for name in ("complete", "copied"):
        write_openvla_directory(directory / name, statistics=robot_statistics("bridge_orig"))
    (directory / "copied/dataset_statistics.json").unlink()
    settings = json.loads((directory / "copied/config.json").read_text())
    (directory / "copied/config.json").write_text(json.dumps({**settings, "norm_stats": {}}))
    return directory


@pytest.mark.parametrize(
    ("policy", "overrides", "message"),
    [
        (
            "complete",
            ["actor.model.unnorm_key=bridge_oirg"],
            "policy.vla.normalization_key = 'bridge_oirg' is not among the policy's data sets (actor.model.unnorm_key:"
            " command line)\n  did you mean 'bridge_orig'? valid values: bridge_orig",
        ),
        (
            "copied",
            [],
            "policy.vla.normalization_key = 'bridge_orig' is not among the policy's data sets (actor.model.unnorm_key:"
            f" {MANISKILL}:88)\n  the directory of the policy has no statistics: copy its dataset_statistics.json",
        ),
        (
            "complete",
            ["actor.model.action_dim=6"],
            "policy.vla.action_dim = 6, but the policy's data set bridge_orig has actions of 7 dimensions"
            " (actor.model.action_dim: command line)\n  set actor.model.action_dim=7",
        ),
        ("complete", [], None),
    ],
)
def test_a_policy_without_statistics_of_its_actions_is_refused_by_the_keys_of_rlinf(
    policies: Path, monkeypatch: pytest.MonkeyPatch, policy: str, overrides: list[str], message: str | None
) -> None:
    monkeypatch.setenv("EMBODIED_PATH", str(MANISKILL.parent))
    placed = [f"cluster.component_placement.{part}=0" for part in ("actor", "env", "rollout")]
    overrides = [*placed, f"actor.model.model_path={policies / policy}", *overrides]
    composed = load_config(str(MANISKILL), overrides, None, "refuse")
    if message is None:
        check_action_policy(composed)
        return
    with pytest.raises(ConfigError) as refused:
        check_action_policy(composed)
    assert str(refused.value).startswith(message)
