"""If these fail, a plan does not show what images cost, or starts runs whose images do not fit into a prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from example_models import at, measured, on

from quintet.config.compose import load_experiment
from quintet.config.plan.component_memory import MemoryUse
from quintet.config.plan.devices import find_device
from quintet.config.plan.images import plan_images
from quintet.config.plan.memory import plan_memory
from quintet.config.plan.models import find_models
from quintet.config.plan.placement import place_components
from quintet.config.plan.run_plan import plan_run
from quintet.config.plan.step_time import step_seconds
from quintet.errors import ConfigError

LAKE = ("policy.preset=grid-vl", "env.render=vision", "env.tile_size=16", "warm_start=null", "rollout.window_size=2")
REAL = ("env.render=vision", "env.tile_size=112", "rollout.max_turns=1")
"""A picture of 448 × 448 pixels: 16 × 16 tokens of 28 × 28 pixels."""


def actor(tmp_path: Path, *words: str) -> MemoryUse:
    return measured(on(tmp_path, "Qwen2.5-VL-3B", 1, 1, *REAL, *words)).active["actor"]


def test_an_image_has_as_many_tokens_as_the_environment_renders() -> None:
    """FrozenLake of 4 × 4 cells of 16 pixels; an image token of grid-vl is 16 × 16 pixels."""
    images = plan_run(load_experiment(None, LAKE)).images
    assert images is not None
    assert (images["tokens_per_image"], images["images_per_sequence"], images["is_exact"]) == (16, 2, True)
    assert images["encoder_parameters"] == 206_656
    assert 0.0 < images["encoder_share_of_update"] < 0.5


@pytest.mark.parametrize(("multiview", "images"), [("false", 3), ("true", 6)])
def test_an_observation_of_several_images_counts_them_all(multiview: str, images: int) -> None:
    words = ("policy.preset=grid-vl", "env.name=navigation", "env.resolution=32", "rollout.window_size=3")
    planned = plan_run(load_experiment(None, (*words, f"env.multiview={multiview}"))).images
    assert planned is not None
    assert (planned["tokens_per_image"], planned["images_per_sequence"]) == (4, images)


def test_max_pixels_limits_the_tokens_of_an_image(tmp_path: Path) -> None:
    """A quarter of the pixels: 8 × 8 tokens instead of 16 × 16."""
    grids = []
    for words in ((), (f"policy.vision.max_pixels={224 * 224}",)):
        config = on(tmp_path, "Qwen2.5-VL-3B", 1, 1, *REAL, *words).experiment
        shape = find_models(config).of("actor")
        assert shape is not None
        assert shape.encoder is not None
        grids += [(images.rows, images.columns) for images in plan_images(config, shape.encoder)]
    assert grids == [(16, 16), (8, 8)]


def test_the_limits_of_the_image_processor_are_read(tmp_path: Path) -> None:
    directory = Path(at(tmp_path, "Qwen2.5-VL-3B"))
    (directory / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 3136, "max_pixels": 224 * 224}))
    images = plan_run(on(tmp_path, "Qwen2.5-VL-3B", 1, 1, *REAL)).images
    assert images is not None
    assert images["tokens_per_image"] == 64


def test_activations_of_the_encoder_count_unless_it_is_frozen(tmp_path: Path) -> None:
    """All sequences of a micro-batch show an image of 16 × 16 tokens; recomputed, blocks only keep their inputs."""
    budget = ("actor.budget.sequences=2",)
    with_images, without = actor(tmp_path, *budget), actor(tmp_path, *budget, "env.render=text")
    patches = 2 * 4 * 256
    per_patch = 32 * (13 * 1280 + 4 * 3420) + 3 * 2 * 14 * 14 + 2 * 80 + 5 * 1280
    assert with_images.activations - without.activations == patches * per_patch * 2
    frozen = actor(tmp_path, *budget, "policy.vision.freeze=true")
    assert frozen.activations == without.activations
    recomputed = actor(tmp_path, *budget, "actor.gradient_checkpointing=true")
    assert recomputed.activations < with_images.activations / 10


def test_the_time_of_a_step_includes_the_encoder(tmp_path: Path) -> None:
    """A frozen encoder runs forward only: a third of the time of its updates."""
    times = []
    for words in ((), ("policy.vision.freeze=true",), ("env.render=text",)):
        config = on(tmp_path, "Qwen2.5-VL-3B", 1, 1, *REAL, *words).experiment
        placement, models = place_components(config), find_models(config)
        memory = plan_memory(config, placement, models)
        times.append(step_seconds(config, placement, models, memory, find_device("h100")))
    trained, frozen, text = times
    assert trained["images of actor"] == pytest.approx(3 * frozen["images of actor"])
    assert "images of actor" not in text
    assert trained["prefill"] > text["prefill"]
    assert trained["update of actor"] == text["update of actor"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("env.tile_size=256", "policy.vision.max_pixels=16000000"), ["64 × 64 = 4,096 tokens", "the 512 tokens"]),
        (("env.tile_size=64",), ["all of rollout.window_size = 4", "1,024", "rollout.window_size=2"]),
    ],
)
def test_images_that_alone_exceed_the_prompt_are_refused(words: tuple[str, ...], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        plan_run(load_experiment(None, [*LAKE, "rollout.window_size=4", *words]))
    assert all(part in str(error.value) for part in ("rollout.max_prompt_tokens", *expected))


def test_a_dialogue_whose_images_exceed_the_prompt_later_is_a_warning() -> None:
    words = (*LAKE, "env.tile_size=64", "rollout.window_size=null", "rollout.max_turns=5")
    assert any(
        "images of 5 turns take 1,280 tokens" in line for line in plan_run(load_experiment(None, words)).warnings
    )


def test_images_of_unknown_size_are_a_warning() -> None:
    words = ("policy.preset=grid-vl", "env={name: custom, path: 'mine.py:Mine'}", "warm_start=null")
    assert any("unknown size" in line for line in plan_run(load_experiment(None, words)).warnings)
