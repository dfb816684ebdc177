"""If these fail, a policy cannot be trained on the images of data files, or is trained on other tokens than it saw."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import grids_and_text, image_tokenizer, question_rows, write_rows
from PIL import Image
from rich.console import Console
from vision_models import load_in_transformers, save_qwen2_5_vl, transformers_logprobs

from quintet.config.checks.unsupported import refuse_unsupported
from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.data.prompt_source import open_split
from quintet.errors import ConfigError
from quintet.pipelines.rl import train
from quintet.pipelines.sft.episodes import build_solved_episodes
from quintet.pipelines.sft.fine_tuning import fine_tune
from quintet.pipelines.sft.rows import RowEncoder, build_sft_dataset
from quintet.policies.model_loading import load_model
from quintet.policies.token_statistics import compute_token_statistics
from quintet.rollout.chat.chat_format import ChatFormat, Dialogue
from quintet.rollout.chat.image_prompts import ImagePrompts
from quintet.tracking.progress import NullProgress
from quintet.training.packing import MicroBatchBudget, iter_micro_batches

COMMON = ("policy.preset=grid-vl", "training.threads=1", "tracking.loggers=[jsonl]", "name=run")
LAKE = ("env={name: frozenlake, size: 3, render: vision, tile_size: 8}", "rollout.think=false")


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.proves("verl", "data.image_key")
def test_engine_and_learner_agree_on_prompts_with_images(tmp_path: Path) -> None:
    """Two steps on rows like Geometry3k's, scored by its verifier, after a warm start on their responses."""
    name = write_rows(tmp_path / "geometry.parquet", question_rows(12))
    overrides = (
        *("env.name=prompts", f"data.train_files=[{name}]", "data.image_key=images"),
        "training={steps: 2, groups_per_step: 3, samples_per_group: 4, mini_batches: 1, threads: 1}",
        "warm_start={episodes: 12, updates: 60, turns_per_update: 12, until_success: null}",
        "rollout={max_prompt_tokens: 64, max_response_tokens: 24}",
        "validation.every_steps=-1",
    )
    train(load_experiment(None, (*COMMON, *overrides, f"output_dir={tmp_path}")), Console(file=io.StringIO()))
    steps = [row for row in metrics(tmp_path / "run") if "training/rollout_probs_diff_max" in row]
    assert len(steps) == 2
    assert max(row["training/rollout_probs_diff_max"] for row in steps) < 1e-4
    assert max(row["critic/score/max"] for row in steps) >= 0.9


def test_fine_tuning_learns_from_images(tmp_path: Path) -> None:
    """The answers differ only by the images of the rows."""
    name = write_rows(tmp_path / "geometry.parquet", question_rows(16))
    overrides = (f"data.train_files=[{name}]", "data.image_key=images", "sft.batch=16", "sft.epochs=2")
    rate = "sft.optimizer.learning_rate=3e-3"
    fine_tune(load_experiment(None, (*COMMON, *overrides, rate, f"output_dir={tmp_path}")), Console(file=io.StringIO()))
    losses = [row["train/loss"] for row in metrics(tmp_path / "run") if "train/loss" in row]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    refuse_unsupported(load_experiment(None, (*COMMON, *overrides)))


def test_the_loss_of_packed_conversations_is_that_of_transformers(tmp_path: Path) -> None:
    """With the positions of images, and without their tokens: sequence by sequence, by transformers' own pass."""
    directory = save_qwen2_5_vl(tmp_path / "model")
    rows = question_rows(4)
    for row, other in zip(rows, rows[::-1], strict=True):
        row["messages"] = [*row["prompt"], {"role": "assistant", "content": row.pop("response")}, *other["prompt"]]
        row["messages"] += [{"role": "assistant", "content": "Left"}]
        row["images"] = [*row["images"], {"bytes": None, "path": "other.png"}]
    (tmp_path / "other.png").write_bytes(rows[0]["images"][0]["bytes"])
    name = write_rows(tmp_path / "a.parquet", rows)
    text = write_rows(tmp_path / "b.jsonl", [{"messages": rows[0]["messages"][1:2]}])
    overrides = (f"data.train_files=[{name},{text}]", "data.messages_key=messages", "data.image_key=images")
    config = load_experiment(None, (*COMMON, *overrides, "sft.batch=5")).experiment
    assert config.data is not None
    images = ImagePrompts.from_directory(directory, config.policy.vision)
    splits = [open_split(config.data, None, split) for split in ("train", "validation")]
    dataset = build_sft_dataset(config, image_tokenizer(), *splits, NullProgress(), images)
    batch = dataset.train.batch(range(5))
    assert not bool((batch.loss_mask & (batch.tokens < 0)).any())
    model, ours = load_model(directory), torch.zeros(len(batch.tokens))
    with torch.no_grad():
        for micro in iter_micro_batches(batch, MicroBatchBudget(150)):
            ours[micro.index] = compute_token_statistics(model, micro.packed, 1.0).logprobs
        expected = transformers_logprobs(load_in_transformers(directory), batch)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def lake(tmp_path: Path, *overrides: str) -> Experiment:
    sizes = ("sft.episodes.episodes=6", "sft.episodes.validation_episodes=2")
    return load_experiment(None, (*LAKE, *sizes, f"sft.episodes.directory={tmp_path}/data", *overrides)).experiment


@pytest.mark.parametrize("window", ["1", "2", "null"])
def test_a_row_of_a_solved_episode_shows_what_the_policy_sees(tmp_path: Path, window: str) -> None:
    """Token by token and byte by byte, in every turn."""
    save_qwen2_5_vl(tmp_path / "model")
    config = lake(tmp_path, f"rollout.window_size={window}")
    images = ImagePrompts.from_directory(tmp_path / "model", config.policy.vision)
    assert images is not None
    train_rows, _ = build_solved_episodes(config, NullProgress())
    encode, chat = (
        RowEncoder(config, image_tokenizer(), train_rows, images),
        ChatFormat(image_tokenizer(), images=images),
    )
    moves = 0
    for number in range(len(train_rows.rows)):
        row = train_rows.rows[number]
        if row["extra_info"]["turn"] == 0:
            dialogue = Dialogue.from_config(config.rollout, chat, row["prompt"][0]["content"])
        moves += row["extra_info"]["turn"] > 1
        prompt, _, _ = dialogue.observe(row["prompt"][-1]["content"], [decoded(row["images"][-1]["bytes"])])
        reply = (*chat.encode(row["response"]), chat.end_token_id)
        dialogue.add_response(reply)
        (sequence,) = encode(number)
        assert grids_and_text(sequence.tokens) == grids_and_text(prompt + reply)
        assert sequence.loss_mask == (False,) * len(prompt) + (True,) * len(reply)
        assert {image.patches for image in encode.images(number)} == {image.patches for image in dialogue.images}
    assert moves > 2


def decoded(file: bytes) -> Any:
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))


def test_solved_episodes_in_other_forms_have_no_images(tmp_path: Path) -> None:
    overrides = (*LAKE, "policy.preset=grid-vl", "rollout.window_size=null", "sft.episodes={}")
    with pytest.raises(ConfigError, match="only messages have images"):
        refuse_unsupported(load_experiment(None, (*overrides, "sft.episodes.form=base")))
    refuse_unsupported(load_experiment(None, (*overrides, "sft.episodes.form=message")))


def test_a_policy_is_fine_tuned_on_episodes_with_images(tmp_path: Path) -> None:
    """And validated in held-out episodes at the end."""
    overrides = (*COMMON, *LAKE, "sft.batch=4", "data.max_steps=2", f"sft.episodes.directory={tmp_path}/data")
    sizes = ("sft.episodes.episodes=12", "sft.episodes.validation_episodes=2", "validation.episodes=2")
    fine_tune(load_experiment(None, (*overrides, *sizes, f"output_dir={tmp_path}")), Console(file=io.StringIO()))
    rows = metrics(tmp_path / "run")
    assert len([row for row in rows if "train/loss" in row]) == 2
    assert any("val/frozenlake/success_rate" in row for row in rows)
