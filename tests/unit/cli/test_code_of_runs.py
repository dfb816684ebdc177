"""If these fail, `quintet serve`, `eval`, `generate` or `export` run code that a run directory brings with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from saved_checkpoints import save_checkpoint
from typer.testing import CliRunner

from quintet.cli.main import app

MARK = "code-was-executed"


@pytest.fixture
def hostile_run(policy_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory whose module, files and model directory leave a mark when they are executed."""
    monkeypatch.chdir(tmp_path)
    code = f"open({str(tmp_path / MARK)!r}, 'w')\n"
    run = tmp_path / "runs" / "r"

    def write(directory: Path) -> None:
        shutil.copytree(policy_directory, directory / "hf")
        config = json.loads((directory / "hf/config.json").read_text())
        config["auto_map"] = {name: f"evil_model.{name}" for name in ("AutoConfig", "AutoModelForCausalLM")}
        (directory / "hf/config.json").write_text(json.dumps(config | {"model_type": "evil"}))
        (directory / "hf/evil_model.py").write_text(code)

    save_checkpoint(run / "checkpoints", 1, {"experiment": {"policy": {"trust_remote_code": True}}}, write, keep=1)
    (tmp_path / "evil_module.py").write_text(code)
    (run / "evil.py").write_text(code)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}\n')
    monkeypatch.syspath_prepend(tmp_path)
    return run


SETTINGS = {
    "policy.trust_remote_code": "policy: {trust_remote_code: true}",
    "external_libs": "external_libs: [evil_module]",
    "env.path": "env: {name: custom, path: runs/r/evil.py:Env}",
    "reward.function": "reward: {function: runs/r/evil.py:score}\nenv: {name: prompts}\n"
    "data: {train_files: [prompts.jsonl], validation_files: [prompts.jsonl]}",
    "data.dataset_class": "env: {name: prompts}\nreward: {kind: exact}\n"
    "data: {train_files: [prompts.jsonl], dataset_class: runs/r/evil.py:Rows}",
    "algorithm.loss.function": "algorithm: {loss: {name: custom, function: 'runs/r/evil.py:loss'}}",
}
COMMANDS: dict[str, list[str]] = {
    "serve": ["serve", "runs/r", "--port", "0"],
    "eval": ["eval", "runs/r"],
    "eval on data": ["eval", "runs/r", "--data", "prompts.jsonl"],
    "generate": ["generate", "runs/r", "--data", "prompts.jsonl", "--output", "out.parquet"],
    "export": ["export", "runs/r", "exported"],
}


EVERYWHERE = {"policy.trust_remote_code", "external_libs"}
REFUSED = {
    "serve": EVERYWHERE,
    "eval": EVERYWHERE | {"env.path", "reward.function", "data.dataset_class"},
    "eval on data": EVERYWHERE | {"reward.function", "data.dataset_class"},
    "generate": EVERYWHERE | {"reward.function", "data.dataset_class"},
    "export": set(),
}
"""Settings that a command would execute; the others do not matter to it."""


@pytest.mark.parametrize("key", SETTINGS)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_code_that_a_run_directory_names(
    hostile_run: Path, tmp_path: Path, command: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quintet.cli.serve._serve", lambda *_: 0)
    (hostile_run / "config.yaml").write_text(f"name: r\n{SETTINGS[key]}\n")
    result = CliRunner().invoke(app, COMMANDS[command])
    assert not (tmp_path / MARK).exists()
    is_refused = "only the command line may ask for" in str(result.exception)
    assert is_refused == (key in REFUSED[command]), result.exception
    assert not is_refused or f"{key} = " in str(result.exception)


@pytest.mark.parametrize("allow", ["policy.trust_remote_code=true", "--trust-remote-code"])
def test_the_command_line_allows_the_code_of_a_run(
    hostile_run: Path, monkeypatch: pytest.MonkeyPatch, allow: str
) -> None:
    monkeypatch.setattr("quintet.cli.serve._serve", lambda *_: 0)
    (hostile_run / "config.yaml").write_text(f"name: r\n{SETTINGS['policy.trust_remote_code']}\n")
    assert CliRunner().invoke(app, [*COMMANDS["serve"], allow]).exit_code == 0


def test_data_in_a_run_directory_cannot_be_a_link_out_of_it(hostile_run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.jsonl").write_text('{"prompt": [{"role": "user", "content": "secret"}], "answer": "2"}\n')
    (hostile_run / "data.jsonl").symlink_to(tmp_path / "secret.jsonl")
    settings = "data: {train_files: [runs/r/data.jsonl], validation_files: [runs/r/data.jsonl]}"
    (hostile_run / "config.yaml").write_text(f"name: r\nenv: {{name: prompts}}\nreward: {{kind: exact}}\n{settings}\n")
    result = CliRunner().invoke(app, COMMANDS["eval"])
    assert "data.validation_files = " in str(result.exception)
    assert "it is a link out of the run directory" in str(result.exception)


def test_a_configuration_that_is_a_link_out_of_the_run_is_not_quoted(hostile_run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.yaml").write_text("password: [\n")
    (hostile_run / "config.yaml").unlink(missing_ok=True)
    (hostile_run / "config.yaml").symlink_to(tmp_path / "secret.yaml")
    for command in ("serve", "eval on data", "generate"):
        result = CliRunner().invoke(app, COMMANDS[command])
        assert "config.yaml leads out of" in str(result.exception)
        assert "password" not in str(result.exception)


def test_an_export_copies_no_file_from_outside_of_the_model(policy_directory: Path, tmp_path: Path) -> None:
    model = shutil.copytree(policy_directory, tmp_path / "model")
    (tmp_path / "secret").write_text("secret")
    (model / "README.md").unlink(missing_ok=True)
    (model / "README.md").symlink_to("../secret")
    result = CliRunner().invoke(app, ["export", str(model), str(tmp_path / "exported")])
    assert "README.md leads out of" in str(result.exception)
    assert not (tmp_path / "exported").exists()
