"""If these fail, a policy does not see the state of an environment that shows images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quintet.config.native.envs import FrozenLakeConfig, SokobanConfig
from quintet.data.demonstrations import run_episode, with_images
from quintet.envs.factory import build_env

ENVS = {
    "frozenlake": lambda **fields: build_env(FrozenLakeConfig(**fields)),
    "sokoban": lambda **fields: build_env(SokobanConfig(**fields)),
}


@pytest.mark.proves("vagen", "env1.env_config.render_mode")
@pytest.mark.parametrize("name", ENVS)
def test_images_show_the_same_state_as_text(name: str) -> None:
    """Over several start states and moves, two images are equal exactly if the texts are."""
    text, vision = ENVS[name](observation="grid"), ENVS[name](render="vision", tile_size=16)
    shown: dict[str, bytes] = {}
    for seed in range(12):
        observations = [(text.reset(seed), vision.reset(seed))]
        for action in vision.actions:
            steps = text.step(action), vision.step(action)
            observations.append((steps[0].observation, steps[1].observation))
            assert (steps[0].reward, steps[0].terminated) == (steps[1].reward, steps[1].terminated)
            if steps[0].terminated:
                break
        for written, pictured in observations:
            assert pictured.text == "<image>"
            rows = written.text.split("\n")
            assert pictured.images[0].shape == (16 * len(rows), 16 * len(rows[0].split()), 3)
            assert pictured.images[0].dtype == np.uint8
            assert shown.setdefault(written.text, pictured.images[0].tobytes()) == pictured.images[0].tobytes()
    assert len(set(shown.values())) == len(shown) > 12


@pytest.mark.parametrize("name", ENVS)
def test_demonstrations_show_the_images_of_their_observations(name: str) -> None:
    env: Any = ENVS[name](render="vision")
    episode = next(
        solved for seed in range(100, 150) if (solved := run_episode(env, seed, 30)) and len(solved.turns) > 1
    )
    assert all(len(turn.images) == 1 for turn in episode.turns)
    again = with_images(env, [episode])[0]
    for turn, replayed in zip(episode.turns, again.turns, strict=True):
        assert np.array_equal(turn.images[0], replayed.images[0])
    assert not np.array_equal(episode.turns[0].images[0], episode.turns[1].images[0])
