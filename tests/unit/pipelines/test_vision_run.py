"""If these fail, a vision-language policy cannot be trained on images from environments to checkpoints."""

from __future__ import annotations

import importlib.util
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText
from vision_models import SHAPE, save_qwen2_5_vl

from quintet.config.checks.unsupported import refuse_unsupported
from quintet.config.compose import load_experiment
from quintet.config.composed import ComposedConfig
from quintet.config.native.policy import VisionConfig
from quintet.pipelines.rl import train
from quintet.pipelines.warm_start import dump_episodes, load_episodes, solve_episodes
from quintet.policies.model_loading import load_model
from quintet.policies.tiny_models import create_preset_policy
from quintet.rollout.chat.image_prompts import ImagePrompts

OVERRIDES = (
    "env={name: frozenlake, size: 3, render: vision, tile_size: 16}",
    "policy.preset=grid-vl",
    "training={steps: 2, groups_per_step: 4, samples_per_group: 4, mini_batches: 2, threads: 1}",
    "warm_start={episodes: 60, updates: 40, turns_per_update: 32, until_success: null}",
    "rollout={max_turns: 3, max_response_tokens: 16}",
    "validation={episodes: 2, every_steps: -1}",
    "tracking.loggers=[jsonl]",
)


def experiment(tmp_path: Path, *overrides: str) -> ComposedConfig:
    return load_experiment(None, (*OVERRIDES, f"output_dir={tmp_path}", "name=run", *overrides))


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


SOKOBAN = "env={name: sokoban, width: 5, height: 5, render: vision, tile_size: 16}"


OBSERVATIONS = "algorithm={train_on_observations: true, turn_rewards: true}"
ADAPTERS = "policy.lora={rank: 4}"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("rollout.window_size=1", SOKOBAN, OBSERVATIONS),
        (ADAPTERS, "algorithm.advantage={name: gae}", "algorithm.kl={}"),
    ],
)
def test_engine_and_learner_agree_in_every_step(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    """Whole dialogues of several images, windows of one, and adapters with critic and reference."""
    train(experiment(tmp_path, *overrides), Console(file=io.StringIO()))
    steps = [row for row in metrics(tmp_path / "run") if "training/rollout_probs_diff_max" in row]
    assert len(steps) == 2
    assert max(row["training/rollout_probs_diff_max"] for row in steps) < 1e-5
    assert sum(row["actor/grad_norm"] for row in steps) > 0


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_vllm_and_learner_agree_in_every_step(tmp_path: Path) -> None:
    """The second step's episodes come from weights that vLLM has received. Its attention on a CPU needs heads of 32."""
    model = save_qwen2_5_vl(tmp_path / "model", replace(SHAPE, hidden=128))
    overrides = (f"policy.path={model}", "policy.preset=null", "warm_start=null", "rollout.engine=vllm")
    train(experiment(tmp_path, *overrides, "rollout.max_prompt_tokens=256"), Console(file=io.StringIO()))
    steps = [row for row in metrics(tmp_path / "run") if "training/rollout_probs_diff_max" in row]
    assert len(steps) == 2
    assert max(row["training/rollout_probs_diff_max"] for row in steps) < 1e-4


def test_checkpoints_load_in_transformers_with_the_image_processor(tmp_path: Path) -> None:
    train(experiment(tmp_path, "training.steps=1", "warm_start=null"), Console(file=io.StringIO()))
    (model,) = (tmp_path / "run" / "checkpoints").glob("*1/hf")
    loaded, report = AutoModelForImageTextToText.from_pretrained(model, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert all(bool(torch.isfinite(weight).all()) for weight in loaded.parameters())
    assert AutoImageProcessor.from_pretrained(model).patch_size == 8
    refuse_unsupported(experiment(tmp_path, f"policy.path={model}", "policy.preset=null"))


def test_a_resumed_warm_start_has_the_same_images(tmp_path: Path) -> None:
    config = experiment(tmp_path).experiment
    solved = solve_episodes(config, 5)
    loaded = load_episodes(config, dump_episodes(solved))
    pairs = [
        (mine.images[0], theirs.images[0])
        for before, after in zip(solved[0].episodes, loaded[0].episodes, strict=True)
        for mine, theirs in zip(before.turns, after.turns, strict=True)
    ]
    assert len(pairs) >= 5
    assert all((mine == theirs).all() for mine, theirs in pairs)


def test_a_frozen_vision_encoder_keeps_its_weights(tmp_path: Path) -> None:
    """The rest is trained; so are all weights without `freeze`."""
    changed: dict[bool, set[str]] = {}
    for freeze in (True, False):
        overrides = (f"policy.vision.freeze={freeze}", f"name=run{freeze}", "training.steps=1")
        train(experiment(tmp_path, "warm_start.updates=2", *overrides), Console(file=io.StringIO()))
        run = tmp_path / f"run{freeze}"
        (trained,) = (run / "checkpoints").glob("*1/hf")
        before, after = (load_file(directory / "model.safetensors") for directory in (run / "policy", trained))
        changed[freeze] = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    visual = {name for name in changed[False] if "visual" in name}
    assert len(visual) > 20
    assert changed[True] == changed[False] - visual


def test_pixel_limits_set_the_tokens_of_an_image(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    create_preset_policy("grid-vl", directory, ["user"], 0)
    model, image = load_model(directory), np.zeros((64, 64, 3), np.uint8)
    for limits, grid in (({}, (4, 4)), ({"max_pixels": 32 * 32}, (2, 2)), ({"min_pixels": 128 * 128}, (8, 8))):
        prompts = ImagePrompts.from_model(model, VisionConfig(**limits))
        assert prompts is not None
        assert prompts.process([image])[0].grid == grid
        # the data are read before the model is loaded
        assert ImagePrompts.from_directory(directory, VisionConfig(**limits)) == prompts
        assert prompts.measure(b"12345678", 64, 64).grid == grid
