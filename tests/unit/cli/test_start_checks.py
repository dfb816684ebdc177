"""If these fail, a run finds out after its episodes what could have been known before them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quintet.cli import main as command
from quintet.cli import train
from quintet.cli.choices import check_choices
from quintet.config.compose import load_experiment
from quintet.errors import ConfigError


@pytest.mark.parametrize(
    ("key", "url", "told"),
    [
        ("checkpoint.remote_dir", "/proc/nowhere", "cannot write to /proc/nowhere: FileNotFoundError"),
        ("checkpoint.remote_dir", "nowhere://x", "not supported by fsspec"),
        ("sft.remote_dir", "file:///proc/nowhere", "cannot write to"),
    ],
)
def test_a_store_that_cant_be_written_is_told_at_the_start(key: str, url: str, told: str) -> None:
    words = ["sft.episodes={}"] if key.startswith("sft") else []
    with pytest.raises(ConfigError) as refused:
        check_choices(load_experiment(None, [*words, f"{key}={url}"]))
    assert (refused.value.key, refused.value.source) == (key, "command line")
    assert f"{key} = '{url}' (command line): {told}" in str(refused.value)


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
    words = [f"output_dir={tmp_path}/runs", "algorithm.loss.name=custom", f"algorithm.loss.function={reference}"]
    monkeypatch.setattr(sys, "argv", ["quintet", "train", *words])
    with pytest.raises(SystemExit) as end:
        command.main()
    assert end.value.code == 2
    message = f"algorithm.loss.function = {reference!r}: {file} has no {name!r}; it defines squares, Cubes"
    assert capsys.readouterr().err == f"quintet: {message}\n  {hint.format(file)}\n"
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
    words = ["policy.preset=grid-vl", "env.render=vision", "env.tile_size=16", "rollout.max_prompt_tokens=10"]
    with pytest.raises(ConfigError, match=r"rollout\.max_prompt_tokens = 10 \(command line\).*4 × 4 = 16 tokens"):
        train.run(None, [*words, "training.steps=0", "warm_start.updates=1"], None, "refuse")
    assert not list(tmp_path.iterdir())
