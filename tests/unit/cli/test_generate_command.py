"""If these fail, `quintet generate` overwrites a training run, or its options set something else than they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from quintet.cli.configuration import as_overrides, load_config
from quintet.cli.generate import _model_settings, as_config, prepared
from quintet.cli.options import GenerateOptions
from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.pipelines.model_lookup import StoredModel

WORDS = ("env.name=prompts", "data.train_files=[rows.jsonl]", "policy.path=model", "output_dir=runs")


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_directory: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(policy_directory)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1 = ?"}\n')


def composed(options: GenerateOptions, *overrides: str) -> Experiment:
    """What `quintet generate model …` asks for."""
    return load_config(*as_config("model", list(overrides), None, options), None, "refuse").experiment


def test_a_run_without_a_name_is_named_for_its_output() -> None:
    words = [*WORDS, "generation.output_path=out/answers.parquet"]
    assert prepared(load_experiment(None, words)).experiment.name == "generate-answers"
    assert prepared(load_experiment(None, [*words, "name=mine"])).experiment.name == "mine"


def test_the_directory_of_a_training_run_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "runs/mine").mkdir(parents=True)
    (tmp_path / "runs/mine/config.yaml").write_text("seed: 1\n")
    run = prepared(load_experiment(None, [*WORDS, "generation.output_path=x.jsonl", "name=mine"])).experiment
    assert (run.name, run.policy.path) == ("generate-mine", "model")


def test_options_of_a_model_are_settings() -> None:
    run = composed(GenerateOptions("rows.jsonl", "x.jsonl", 4, 0.5, 32), "rollout.top_p=0.9")
    assert run.generation is not None
    assert run.data is not None
    assert (run.generation.output_path, run.generation.samples) == ("x.jsonl", 4)
    assert (run.data.train_files, run.policy.path, run.resume) == (("rows.jsonl",), "model", "auto")
    rollout = run.rollout
    assert (rollout.temperature, rollout.do_sample, rollout.top_p, rollout.max_response_tokens) == (0.5, True, 0.9, 32)


def test_without_options_a_model_samples_once_at_temperature_1() -> None:
    run = composed(GenerateOptions("rows.jsonl", "x.jsonl"))
    assert run.generation is not None
    assert (run.generation.samples, run.rollout.temperature, run.rollout.do_sample) == (1, 1.0, True)
    assert run.rollout.max_response_tokens == 512


def test_a_temperature_of_0_is_greedy(tmp_path: Path) -> None:
    """Whatever the temperature of the model's run was."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.yaml").write_text("{env: {name: prompts}, rollout: {temperature: 0.7}}")
    source = StoredModel(Path("model"), Path("run/config.yaml"))
    settings = _model_settings(source, GenerateOptions("rows.jsonl", "x.jsonl", temperature=0.0))
    run = load_experiment(str(source.config), [*as_overrides(settings)]).experiment
    assert (run.rollout.do_sample, run.rollout.temperature) == (False, 1.0)
