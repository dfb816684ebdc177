"""If these fail, a run fills the disk with episodes, stores other ones than its keys say, or ends by a logger."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from quintet.config.compose import load_experiment
from quintet.pipelines import run as run_module
from quintet.pipelines.episode_log import prompt_decoder, store_validation_episodes, validation_number
from quintet.pipelines.rollout_step import Rollout, show_rollout
from quintet.pipelines.run import Run
from quintet.records import FinishReason, Outcome, Trajectory, Turn
from quintet.tracking.loggers import GENERATIONS_FILE, JsonlLogger
from quintet.tracking.progress import NullProgress
from quintet.tracking.run_directory import RunDirectory

FOUR = "tracking.trajectories_every_steps=4"
NO_TOKENIZER = cast(Any, SimpleNamespace(tokenizer=None))


class Notes(NullProgress):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def note(self, text: str) -> None:
        self.texts.append(text)


def build_run(directory: Path, *overrides: str) -> Run:
    composed = load_experiment(None, [f"output_dir={directory}", "name=lake", *overrides])
    return Run(composed, RunDirectory.from_config(composed.experiment), Notes(), saver=cast(Any, None))


def test_a_run_on_a_gpu_logs_its_memory_with_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "gpu_memory_metrics", lambda: {"perf/max_memory_allocated_gb": 7.5})
    run = build_run(tmp_path, "tracking.loggers=[jsonl]")
    run.directory.path.mkdir()
    run.log(3, {"actor/lr": 0.1})
    (row,) = map(json.loads, run.directory.metrics.read_text().splitlines())
    assert (row["step"], row["actor/lr"], row["perf/max_memory_allocated_gb"]) == (3, 0.1, 7.5)
    assert row["perf/max_memory_rss_gb"] > 0


def episodes(count: int) -> list[Trajectory]:
    picture = np.zeros((2, 2, 3), np.uint8)
    turns = Turn("<image>", (1,), False, (2,), (-0.5,), 0, "a", (), True, 1.0, FinishReason.STOP, images=(picture,))
    return [Trajectory("frozenlake", seed, seed, 0, (turns,), Outcome.SUCCESS) for seed in range(count)]


def test_stored_turns_have_their_prompts_as_the_model_saw_them(tmp_path: Path) -> None:
    class Letters:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            assert not skip_special_tokens
            return "".join("<s>" if token == 0 else " ab"[token] for token in tokens)

    assert prompt_decoder(None) is None
    decode = prompt_decoder(Letters())
    assert decode is not None
    assert decode((0, 1, -5, -6, 2)) == "<s>a<image>b"
    run, step = build_run(tmp_path, "tracking.trajectories_every_steps=1"), 1
    show_rollout(run, cast(Any, SimpleNamespace(tokenizer=Letters())), step, Rollout(episodes(1), {}))
    store_validation_episodes(run, step, episodes(1), batch_size=1, tokenizer=Letters())
    for split in ("train", "validation"):
        (line,) = (run.directory.path / f"trajectories/{split}/step_000001.jsonl").read_text().splitlines()
        assert json.loads(line)["turns"][0]["prompt_text"] == "a"


def files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_pages_are_written_at_the_frequency_and_for_the_number_of_episodes_asked_for(tmp_path: Path) -> None:
    run = build_run(
        tmp_path, FOUR, "tracking.rendered_episodes=3", f"tracking.rendered_episodes_dir={tmp_path / 'log'}"
    )
    for step in range(1, 10):
        show_rollout(run, NO_TOKENIZER, step, Rollout(episodes(5), {}))
    assert files(tmp_path / "log") == [
        f"lake/train/step_{step}/trajectory_data_{number}.html" for step in (4, 8) for number in range(3)
    ]
    store_validation_episodes(run, 0, episodes(5), batch_size=2)
    validation = [name for name in files(tmp_path / "log/lake") if name.startswith("validation")]
    numbers = {1: (0, 1), 2: (0, 1), 3: (0,)}
    assert validation == [
        f"validation_1/step_{batch}/trajectory_data_{number}.html" for batch in numbers for number in numbers[batch]
    ]


def test_a_number_beyond_the_batch_makes_no_empty_pages(tmp_path: Path) -> None:
    run = build_run(tmp_path, FOUR, "tracking.rendered_episodes=32")
    show_rollout(run, NO_TOKENIZER, 4, Rollout(episodes(2), {}))
    pages = [name for name in files(run.directory.path) if name.endswith(".html")]
    assert pages == [f"pictures/train/step_4/trajectory_data_{number}.html" for number in range(2)]


def test_nothing_is_written_where_nothing_is_asked_for(tmp_path: Path) -> None:
    run = build_run(tmp_path, "tracking.trajectories_every_steps=0", "tracking.image_episodes=0")
    for step in range(1, 10):
        show_rollout(run, NO_TOKENIZER, step, Rollout(episodes(2), {}))
    assert files(tmp_path) == []
    store_validation_episodes(run, 1, episodes(2), batch_size=2)
    assert files(run.directory.path) == ["trajectories/validation/step_000001.jsonl"]


def test_images_of_at_most_the_given_number_of_episodes_are_stored(tmp_path: Path) -> None:
    run = build_run(tmp_path, FOUR, "tracking.image_episodes=2")
    show_rollout(run, NO_TOKENIZER, 4, Rollout(episodes(5), {}))
    lines = run.directory.trajectories("train", 4).read_text().splitlines()
    assert ["image_files" in line for line in lines] == [True, True, False, False, False]


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["validation.every_steps=2", "training.steps=5"], [0, 2, 4, 5]),
        (["validation.every_steps=2", "training.steps=4", "validation.before_training=false"], [2, 4]),
        (["validation.every_steps=0", "training.steps=5"], [0, 5]),
        (["validation.every_steps=-1"], [0]),
    ],
)
def test_validations_are_numbered_in_order(overrides: list[str], steps: list[int]) -> None:
    config = load_experiment(None, overrides).experiment
    assert [validation_number(config, step) for step in steps] == list(range(1, len(steps) + 1))


@pytest.mark.proves("vagen", "trainer.val_generations_to_log_to_wandb")
@pytest.mark.proves("verl", "trainer.log_val_generations")
def test_a_validation_sends_that_many_generations_to_the_loggers(tmp_path: Path) -> None:
    for count, expected in ((0, None), (3, 3), (8, 5)):
        run = build_run(tmp_path / str(count), f"tracking.validation_generations={count}", "tracking.loggers=[jsonl]")
        store_validation_episodes(run, 0, episodes(5), batch_size=5)
        run._logger and run._logger.close()
        path = run.directory.path / GENERATIONS_FILE
        assert (len(path.read_text().splitlines()) if path.exists() else None) == expected
        assert cast(Notes, run.progress).texts == []


def no_server(*_: Any) -> None:
    raise ConnectionError("no server")


def test_a_logger_that_fails_or_is_missing_is_noted_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build_run(tmp_path, "tracking.validation_generations=3", "tracking.loggers=[jsonl]")
    monkeypatch.setattr(JsonlLogger, "log_generations", no_server)
    store_validation_episodes(run, 2, episodes(5), batch_size=5)
    assert cast(Notes, run.progress).texts == ["tracking.validation_generations of step 2 are not logged: no server"]
    run = build_run(tmp_path, "tracking.validation_generations=3", "tracking.loggers=[console]")
    for step in (2, 4):
        store_validation_episodes(run, step, episodes(5), batch_size=5)
    (text,) = cast(Notes, run.progress).texts
    assert text == "tracking.validation_generations: none of tracking.loggers shows generations"


def test_run_name_and_log_dir_name_the_run_and_its_files_in_loggers_and_a_lost_video_ends_nothing(
    tmp_path: Path,
) -> None:
    settings = ("tracking.run_name=shown", "tracking.project=mine", f"tracking.log_dir={tmp_path}/logs")
    run = build_run(tmp_path, *settings, "tracking.loggers=[file, tensorboard]")
    run.log(1, {"actor/entropy": 0.5})
    run.log_video(1, "train/video", tmp_path / "missing.gif")
    run._logger and run._logger.close()
    assert (tmp_path / "logs/mine/shown.jsonl").read_text().startswith('{"step": 1, "data": {"actor/entropy": 0.5')
    assert list((tmp_path / "logs/tensorboard").glob("events.*"))
    (text,) = cast(Notes, run.progress).texts
    assert "missing.gif is not logged" in text
