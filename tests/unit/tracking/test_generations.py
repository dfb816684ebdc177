"""If these fail, the table of validation generations shows other episodes, other images, or ends the run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from quintet.envs.service.png import decode_png
from quintet.records import FinishReason, Outcome, Trajectory, Turn
from quintet.tracking.generations import LoggedGeneration, select_generations
from quintet.tracking.image_files import read_png
from quintet.tracking.logger import LoggerContext
from quintet.tracking.loggers import GENERATIONS_FILE, build_loggers, truncate

PICTURE = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3)


def turn(observation: str, text: str, reward: float = 0.5) -> Turn:
    return Turn(
        observation, (1,), False, (2,), (-0.5,), 0, text, (), True, reward, FinishReason.STOP, images=(PICTURE,)
    )


def episodes(count: int) -> list[Trajectory]:
    turns = turn("a", "b"), turn("c", "d", 1.0)
    return [Trajectory("lake", seed, seed, 0, turns[: 1 + seed % 2], Outcome.SUCCESS) for seed in range(count)]


def test_a_seed_selects_the_same_episodes_in_every_validation() -> None:
    chosen = select_generations(episodes(50), 8, seed=3)
    assert chosen == select_generations(episodes(50), 8, seed=3)
    marked = [Trajectory("lake", n, n, 0, (turn(str(n), ""),), Outcome.SUCCESS) for n in range(50)]
    numbers = {seed: [int(generation.input) for generation in select_generations(marked, 8, seed)] for seed in (3, 4)}
    assert len(set(numbers[3])) == len(set(numbers[4])) == 8
    assert numbers[3] != numbers[4] != sorted(numbers[4])
    assert len(select_generations(episodes(5), 8, seed=3)) == 5


def test_a_generation_has_the_whole_dialogue_its_reward_and_its_images() -> None:
    single, double = sorted(select_generations(episodes(2), 2, seed=0), key=lambda each: each.score)
    assert (single.input, single.output, single.score, len(single.images)) == ("a", "b", 0.5, 1)
    assert (double.input, double.score, len(double.images)) == ("a", 1.5, 2)
    assert double.output == "response: b\nobservation: c\nresponse: d"


def test_generations_are_json_lines_with_png_files_and_are_cut_on_resume(tmp_path: Path) -> None:
    loggers = build_loggers(["jsonl"], LoggerContext(tmp_path))
    rows = [LoggedGeneration("in \ud800", "out", float("nan"), (PICTURE, PICTURE))]
    for step in (1, 2):
        assert loggers.log_generations(step, rows)
    loggers.close()
    truncate(tmp_path, 1, GENERATIONS_FILE)
    (line,) = map(json.loads, (tmp_path / GENERATIONS_FILE).read_text().splitlines())
    assert (line["step"], line["output"], line["score"]) == (1, "out", None)
    first, second = line["images"]
    assert first == second
    np.testing.assert_array_equal(decode_png(read_png(tmp_path, first) or b""), PICTURE)


def test_tensorboard_shows_texts_and_images(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = build_loggers(["tensorboard"], LoggerContext(tmp_path))
    loggers.log_generations(3, [LoggedGeneration("in", "<b>out</b>", 0.5, (PICTURE,))])
    loggers.log(3, 0.5, {"actor/entropy": 0.25})
    loggers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (text,) = events.Tensors("val/generations/1")
    assert b"score 0.5" in text.tensor_proto.string_val[0]
    assert b"    <b>out</b>" in text.tensor_proto.string_val[0]
    assert events.SummaryMetadata("val/generations/1").plugin_data.plugin_name == "text"
    (image,) = events.Images("val/generations/1/image_1")
    assert (image.step, image.width, image.height) == (3, 6, 4)
    np.testing.assert_array_equal(decode_png(image.encoded_image_string), PICTURE)


def test_a_run_whose_loggers_show_no_generations_says_so() -> None:
    assert not build_loggers(["console"], LoggerContext(Path())).log_generations(1, [])
