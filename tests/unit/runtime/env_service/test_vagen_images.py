"""If these fail, images do not survive VAGEN's protocol."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quintet.config.dialects.vagen.service_env import env_from_vagen
from quintet.config.native.envs import FrozenLakeConfig, SvgConfig
from quintet.envs.frozenlake import FrozenLake
from quintet.envs.service.payload import encode_payload, image_from_message
from quintet.envs.service.vagen_host import _observation
from quintet.envs.svg.env import SvgEnv
from quintet.envs.svg.targets import icon_code
from quintet.records import Observation, Step
from quintet.runtime.env_service.served_envs import ServedEnvs
from quintet.runtime.env_service.vagen_episode import VagenEpisode
from quintet.runtime.http_service.request_error import RequestError

FIRST, SECOND = (np.random.default_rng(seed).integers(0, 256, (6, 5, 3), dtype=np.uint8) for seed in range(2))


RESPONSES: dict[str, Any] = {"think": False, "thoughts": None, "separator": ",", "max_actions": 2}
RESPONSES |= {"format_reward": 0.25, "format_penalty": 0.0, "state_reward": None, "ignore_case": False, "form": "whole"}


class Seen:
    """Env that shows an image before and another one after the first step."""

    actions = ("Look",)

    def instruction(self) -> str:
        return "Look."

    def reset(self, seed: int) -> Observation:
        return Observation(f"seed {seed}", (FIRST,))

    def step(self, action: str) -> Step:
        return Step(Observation("again", (FIRST, SECOND)), 1.0, True, False, {"success": True})

    def close(self) -> None: ...


@pytest.fixture
def episode() -> VagenEpisode:
    return VagenEpisode(Seen, RESPONSES)


def received(result: object) -> list[object]:
    return list(json.loads(encode_payload(result, "json"))["result"])


def test_images_of_observations_arrive_as_they_are(episode: VagenEpisode) -> None:
    observation, info = received(episode.call("reset", [7]))
    assert isinstance(observation, dict)
    assert observation["obs_str"].count("<image>") == 1
    assert "seed 7" in observation["obs_str"]
    (image,) = _observation(observation, image_from_message).images
    assert (image == FIRST).all()
    assert info == {}
    observation, reward, done, info = received(episode.call("step", ["<answer>Look,Look</answer>"]))
    assert isinstance(observation, dict)
    images = _observation(observation, image_from_message).images
    assert all((image == other).all() for image, other in zip(images, (FIRST, SECOND), strict=True))
    assert (reward, done) == (1.25, True)
    assert isinstance(info, dict)
    assert "relations" not in observation
    assert info["metrics"]["traj_metrics"] == {"success": True}


def test_the_rewards_of_a_response_that_cancel_are_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """In floats, 0.1 + 0.2 - 0.3 is 5.6e-17."""
    rewards = iter((0.1, 0.2))
    monkeypatch.setattr(Seen, "step", lambda *_: Step(Observation("again"), next(rewards), False, False, {}))
    episode = VagenEpisode(Seen, RESPONSES | {"format_reward": -0.3})
    episode.call("reset", [7])
    assert received(episode.call("step", ["<answer>Look,Look</answer>"]))[1] == 0.0


def test_a_response_without_actions_shows_the_last_observation_again(episode: VagenEpisode) -> None:
    first, _ = received(episode.call("reset", [7]))
    again, reward, done, _ = received(episode.call("step", ["I do not know"]))
    assert isinstance(first, dict)
    assert isinstance(again, dict)
    assert again["multi_modal_data"] == first["multi_modal_data"]
    assert (reward, done) == (0.0, False)


SVG_RESPONSES = RESPONSES | {"separator": "~~", "max_actions": 1}


def test_svg_code_is_executed_without_tags_and_only_valid_code_earns_the_format_reward() -> None:
    config, responses = env_from_vagen("svg", {"structural_weight": 2.0, "format_penalty": -0.5, "device": {"dino": 1}})
    assert (config["dino_device"], config["accumulate_scores"], responses.max_actions) == ("cuda:1", True, 1)
    drawn = VagenEpisode(lambda: SvgEnv(SvgConfig(dataset=None, **_fields(config))), SVG_RESPONSES)
    observation, _ = drawn.call("reset", [3])["result"]
    assert len(observation["multi_modal_data"]["<image>"]) == 1
    code = icon_code(3, 2)
    for response, reward, valid in (
        (f"<answer>{code}</answer>", 2.25, True),
        (f"I draw {code}", 2.0, False),
        ("<answer><svg><script/></svg></answer>", -0.5, False),
        ("<answer>nothing</answer>", -0.5, False),
    ):
        _, earned, done, info = drawn.call("step", [response])["result"]
        assert (earned, done) == (reward, False)
        assert info["metrics"]["turn_metrics"]["action_is_valid"] == valid
    drawn.close()


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("name", "dataset")} | {"image_size": 32}


@pytest.mark.attack
def test_clients_reach_no_files_outside_of_the_servers_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    served = ServedEnvs(["svg"])
    for path in ("/etc", "../other", "~/icons"):
        for fields in ({"dataset": path}, {"dino_weight": 1.0, "dino_path": path}):
            with pytest.raises(RequestError, match="outside") as error:
                served.config({"name": "svg", **fields})
            assert error.value.status == 403
    assert "icons/train" in served.config({"name": "svg", "dataset": "icons/train"})


def test_descriptions_of_states_are_rewarded_and_relations_reach_quintets_clients() -> None:
    """As VAGEN's servers do for `use_state_reward`."""
    config = FrozenLakeConfig(render="vision", max_steps=1)
    thoughts = {"think": True, "thoughts": "grounding", "state_reward": {"grounding": 0.5, "worldmodeling": 0.5}}
    served = VagenEpisode(lambda: FrozenLake(config), RESPONSES | thoughts, config.relation_scoring)
    observation, _ = received(served.call("reset", [3]))
    assert isinstance(observation, dict)
    relations = _observation(observation, image_from_message).relations
    assert relations == FrozenLake(config).reset(3).relations
    assert relations
    actual = json.dumps(
        [{"object_id": r.name, "vertical_relation": r.vertical, "horizontal_relation": r.horizontal} for r in relations]
    )
    response = "<think><observation>{}</observation><reasoning>-</reasoning></think><answer>Left</answer>"
    _, reward, _, info = received(served.call("step", [response.format(actual)]))
    assert isinstance(info, dict)
    assert info["metrics"]["turn_metrics"]["grounding_reward"] == 0.5
    assert reward == 0.25 + 0.5
    served.call("reset", [3])
    _, reward, _, info = received(served.call("step", ["<answer>Left</answer>"]))
    assert isinstance(info, dict)
    assert "grounding_reward" not in info["metrics"]["turn_metrics"]
    assert reward == 0.0
