"""If these fail, `train`, `plan`, `explain` and `translate` read different things out of the same words."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quintet.cli import main as command
from quintet.cli.config_source import read_config_source
from quintet.errors import ConfigError

SCRIPT = """\
set -x
N=$((2 * 4))
python3 -m verl.trainer.main_ppo \\
    data.train_batch_size=$N \\
    actor_rollout_ref.actor.ppo_mini_batch_size=$N \\
    actor_rollout_ref.rollout.name=vllm \\
    trainer.total_training_steps=$(cat steps) trainer.experiment_name=$(date) $@
"""
RAGEN = """\
rl_or_sft: rl
training: {max_turns: 3, train_batch_size: 4, n_rollout: 4, ppo_batch_size: 8, use_kl_loss: false}
optimization: {adv_estimator: grpo}
sft: {env_type: frozenlake}
"""


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["quintet", *arguments])
    with pytest.raises(SystemExit) as end:
        command.main()
    return int(end.value.code or 0)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "base.yaml").write_text(RAGEN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_script_is_explained_planned_and_trained_alike(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("train", "plan", "explain"):
        assert call(monkeypatch, name, "run.sh", *(["data.seed"] if name == "explain" else [])) == 2
        stderr = capsys.readouterr().err
        assert "trainer.total_training_steps (run.sh:7): $(cat steps) is the output of a program" in stderr
        assert "trainer.total_training_steps=…" in stderr
    override = "trainer.total_training_steps=5"
    assert call(monkeypatch, "explain", "run.sh", "data.train_batch_size", override) == 0
    assert "data.train_batch_size = 8  (run.sh:4)" in capsys.readouterr().out
    assert call(monkeypatch, "plan", "run.sh", override) in (0, 2)
    stderr = capsys.readouterr().err
    assert "run.sh:7: $(date) is the output of a program, and none is run here (line 7): the name has date" in stderr
    assert "run.sh: a configuration of verl" in stderr
    assert call(monkeypatch, "train", "run.sh", override) == 2
    stderr = capsys.readouterr().err
    assert "run.sh: a configuration of verl" in stderr
    # what lacks first: the engine where it isn't installed, else the data
    assert "(actor_rollout_ref.rollout.name: run.sh:6) needs vllm" in stderr or "data.train_files" in stderr


def test_positional_arguments_of_a_script_follow_the_dashes(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "arguments.sh").write_text("N=$1; shift\npython3 -m verl.trainer.main_ppo data.train_batch_size=$N $@\n")
    key = "data.train_batch_size"
    assert call(monkeypatch, "explain", "arguments.sh", key, "--", "8", "data.max_prompt_length=99") == 0
    assert f"{key} = 8  (arguments.sh:2)" in capsys.readouterr().out
    assert call(monkeypatch, "explain", "arguments.sh", key, f"{key}=4", "--", "8") == 0
    assert f"{key} = 4  (command line)" in capsys.readouterr().out
    assert call(monkeypatch, "plan", "base.yaml", "--", "8") == 2
    assert "base.yaml takes no arguments after `--`" in capsys.readouterr().err


def test_a_list_may_be_native(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "mine").write_text("# mine\ntraining.steps=7\nworld.name=frozenlake\n")
    assert call(monkeypatch, "explain", "mine", "training.steps") == 0
    assert "training.steps = 7  (mine:2)" in capsys.readouterr().out
    assert call(monkeypatch, "explain", "mine", "training.steps", "training.steps=8") == 0
    assert "training.steps = 8  (command line)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("training.max_turns", ["training.max_turns = 3  (base.yaml:2)", "unit ", "native   rollout.max_turns"]),
        ("training.temperature", ["training.temperature = 0.7  (default of ragen 2025-03-08)"]),
        ("rollout.max_turns", ["rollout.max_turns = 3  (training.max_turns: base.yaml:2)"]),
        ("training.steps", ["(follows from training.total_training_steps: reference"]),
        ("checkpoint.keep", ["(default)"]),
    ],
)
def test_a_value_is_explained_with_what_it_comes_from(
    key: str, parts: list[str], here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "explain", "base.yaml", key) == 0
    output = capsys.readouterr().out
    assert all(part in output for part in parts), output


def test_a_key_is_explained_with_its_unit_and_what_others_call_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "explain", "data.train_batch_size", "--dialect", "verl") == 0
    output = capsys.readouterr().out
    for part in ("default  1024", "unit     prompts", "native   training.groups_per_step", "roll: rollout_batch_size"):
        assert part in output, output
    assert call(monkeypatch, "explain", "training.groups_per_step") == 0
    assert "ragen: training.train_batch_size" in capsys.readouterr().out
    assert call(monkeypatch, "explain", "training.groups_per_step", "--json") == 0
    assert "roll: rollout_batch_size" in json.loads(capsys.readouterr().out)["feeds_from"]


def test_the_list_tells_how_many_keys_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "explain", "--list", "--json") == 0
    captured = capsys.readouterr()
    objects = [json.loads(line) for line in captured.out.splitlines()]
    assert captured.err.startswith(f"{len(objects)} documented keys, ")
    assert all("unit" in one for one in objects)
    assert call(monkeypatch, "explain", "--list") == 0
    assert capsys.readouterr().out.splitlines()[-1] == captured.err.strip()
    assert call(monkeypatch, "explain", "--list", "--dialect", "native", "--json") == 0
    assert any(json.loads(line)["key"] == "seed" for line in capsys.readouterr().out.splitlines())


def test_a_run_is_translated_and_read_again(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "translate", "base.yaml", "training.n_rollout=6", "-o", "own.yaml") == 0
    assert call(monkeypatch, "explain", "own.yaml", "training.samples_per_group") == 0
    assert "training.samples_per_group = 6" in capsys.readouterr().out
    assert call(monkeypatch, "translate", "own.yaml", "--to", "ragen") == 0
    captured = capsys.readouterr()
    assert "n_rollout: 6" in captured.out
    (here / "again.yaml").write_text(captured.out)
    assert call(monkeypatch, "explain", "again.yaml", "rollout.max_turns") == 0
    assert "rollout.max_turns = 3" in capsys.readouterr().out


def test_a_translation_lists_the_settings_that_are_not_supported(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = {"actor_rollout_ref": {"model": {"path": "m"}, "rollout": {"name": "trtllm"}}, "data": {"gen_batch_size": 7}}
    (here / "verl.yaml").write_text(json.dumps(run))
    assert call(monkeypatch, "translate", "verl.yaml", "--to", "native") == 0
    captured = capsys.readouterr()
    assert "settings that are not supported yet; comments at the end list them" in captured.err
    _, listed = captured.out.split("# The original run also has these settings, and is another one without them:\n")
    assert "#   data.gen_batch_size = 7 (verl.yaml:1) is not supported yet: requires rollouts of more prompts" in listed


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["base.yaml", "--to", "regen"], "did you mean ragen?"),
        (["base.yaml", "--to", "ragen"], "already in the format of ragen"),
        (["base.yaml", "-o", "run.sh"], "run.sh already exists"),
        (["base.yaml", "-o", "no/where.yaml"], "cannot write no/where.yaml"),
        (["nothing.yaml"], "no such file: nothing.yaml"),
        (["base.yaml", "--to", "verl"], "verl trains on prompts from files"),
    ],
)
def test_translations_that_cant_be_made_are_messages(
    overrides: list[str],
    part: str,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call(monkeypatch, "translate", *overrides) == 2
    assert part in capsys.readouterr().err
    assert (here / "run.sh").read_text() == SCRIPT


def test_an_environment_file_of_vagen_alone_names_the_file_to_give_instead(tmp_path: Path) -> None:
    file = tmp_path / "env_config.yaml"
    file.write_text("sokoban: {env_name: sokoban, env_config: {dim_room: [6, 6]}, train_size: 8}")
    with pytest.raises(ConfigError, match="VAGEN's environment file") as refused:
        read_config_source(str(file), [], None)
    assert "the run script or the list of overrides beside it" in str(refused.value.hint)
