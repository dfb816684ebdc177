"""If these fail, a hint of supervised fine-tuning leads nowhere."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hint_cases import HintCase, case, name_of, sites_without_case
from rich.console import Console

from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.data.prompt_source import open_split
from quintet.data.tasks.generation import write_rows
from quintet.pipelines.sft import final_weights, fine_tuning, stage
from quintet.pipelines.sft.episodes import build_solved_episodes
from quintet.pipelines.sft.fine_tuning import HeldOutLosses
from quintet.pipelines.sft.rows import build_sft_dataset
from quintet.policies.model_loading import load_tokenizer
from quintet.runtime.controller import Controller
from quintet.tracking.progress import NullProgress
from quintet.training.checkpoint.checkpoint import Checkpoint

ROWS = ["sft={batch: 2}", "env.name=prompts", "data.train_files=[rows.jsonl]"]


def experiment(overrides: Sequence[str]) -> Experiment:
    return load_experiment(None, [*overrides]).experiment


def configured(overrides: Sequence[str]) -> None:
    stage.sft_config(experiment(overrides))


def solved(overrides: Sequence[str]) -> None:
    """Rows of an expert's episodes."""
    sizes = [f"sft.episodes.{name}=1" for name in ("episodes", "validation_episodes", "processes")]
    build_solved_episodes(experiment([*sizes, *overrides]), NullProgress())


def beside_other_rows(directory: str) -> None:
    write_rows(Path("there/frozenlake"), {"train": [{"prompt": "1 + 1 = ?"}]})
    solved([f"sft.episodes.directory={directory}"])


def copied(urls: Sequence[str]) -> None:
    """Copies of final weights in a store."""
    for url in urls:
        final_weights.copy_to_remote(
            experiment(["output_dir=.", "name=run", "sft.episodes={}", f"sft.remote_dir={url}"])
        )


def before_reinforcement(overrides: Sequence[str]) -> None:
    composed = load_experiment(None, ["sft={episodes: {}, then_reinforce: true, lora: {}}", *overrides])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fine_tuning, "fine_tune", lambda *_: None)
        fine_tuning.with_fine_tuned_policy(composed, Console(file=io.StringIO()), Controller.in_process())


def read(overrides: Sequence[str]) -> None:
    """The rows to learn from and the held-out ones."""
    config = experiment([*ROWS, *overrides])
    assert config.data
    splits = [open_split(config.data, None, name) for name in ("train", "validation")]
    build_sft_dataset(config, load_tokenizer("model"), *splits, NullProgress())


def tokenized(overrides: Sequence[str]) -> None:
    """A vocabulary of 3 tokens; the tokenizer of the model has 2."""
    config = experiment([*ROWS, *overrides])
    stage._check_vocabulary(config, range(4) if config.policy.tokenizer else range(2), 3)


def continued(digest_and_resume: tuple[str, str]) -> None:
    """Adapters of a base model with another digest, unless the run starts again."""
    digest, resume = digest_and_resume
    learners: Any = SimpleNamespace(load=lambda *_: None)
    tuned = stage.SftStage(experiment(ROWS), None, learners, Path("model"), None, digest)  # type: ignore[arg-type]
    if resume != "never":
        tuned.load(Checkpoint(Path("saved"), 1, {"base": "before", "contents": ["model"]}))


def resumed(reached: dict[str, Any] | None) -> None:
    """Losses in the state of a checkpoint; a run that starts again reads none."""
    if reached is not None:
        HeldOutLosses.restored(Checkpoint(Path("saved"), 1, {"reached": reached}))


MERGE = ["sft.merge=true"]
CASES = [
    case(configured, [], "add one, at least `sft: {}`; RAGEN's configurations have it with rl_or_sft=sft", ["sft={}"]),
    # episodes
    case(
        solved,
        ["sft.episodes.form=base", "rollout.window_size=2"],
        "rollout.window_size=null, or sft.episodes.form=message",
    ),
    case(beside_other_rows, "there", "set sft.episodes.directory to another directory, or remove that file", "new"),
    case(
        solved,
        ["sft.episodes.max_depth=1", "env={name: sokoban, min_solution_pushes: 2}", "sft.episodes.directory=boxes"],
        "increase max_depth, or make the environment easier",
        ["sft.episodes.max_depth=30", "env={name: sokoban, min_solution_pushes: 2}", "sft.episodes.directory=boxes"],
        ["sft.episodes.max_depth=1", "env={name: sokoban}", "sft.episodes.directory=boxes"],
    ),
    # rows
    case(read, ["data.keep_text=true"], "remove data.keep_text", []),
    case(
        read, ["sft.batch=20"], "sft.batch=6 or less, or more rows", ["sft.batch=6"], ["data.train_files=[more.jsonl]"]
    ),
    case(
        read,
        ["data.validation_files=[long.jsonl]", "sft.max_tokens=24", "data.truncation=right"],
        "name files with responses: data.validation_files=[FILE]",
        ["data.validation_files=[rows.jsonl]", "sft.max_tokens=24", "data.truncation=right"],
    ),
    case(
        tokenized,
        ["policy.tokenizer=other"],
        "use the model's own tokenizer: policy.tokenizer=null",
        ["policy.tokenizer=null"],
    ),
    # weights
    case(copied, ["/proc/no"], "fix that and rerun the same command, or copy the directory yourself", ["copies"], []),
    case(before_reinforcement, ["sft.merge=false"], "sft.merge=true", MERGE),
    case(resumed, {"best": "low"}, "use another checkpoint, or start again with resume=never", {"best": 1.0}, None),
    case(
        continued,
        ("after", "auto"),
        "restore the original weights, or start again with resume=never",
        ("before", "auto"),
        ("after", "never"),
    ),
]


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_directory: Path) -> None:
    """A model, final weights, and rows."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").symlink_to(policy_directory)
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/config.json").touch()
    row = {"prompt": "1 + 1 = ?", "response": "2"}
    for name, count, prompt in (("rows", 6, "1 + 1 = ?"), ("more", 20, "1 + 1 = ?"), ("long", 1, "1 + 1 = ? " * 50)):
        lines = (json.dumps({**row, "prompt": prompt}) + "\n" for _ in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_a_hint_of_fine_tuning_removes_its_error(entry: HintCase) -> None:
    entry.check()


def test_every_hint_of_fine_tuning_is_followed() -> None:
    assert not sites_without_case("pipelines/sft", CASES, ())
