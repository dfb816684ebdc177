"""If these fail, navigation or manipulation plays by other rules than VAGEN's, or needs what is not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from quintet.config.native.envs import NavigationConfig, PrimitiveSkillConfig
from quintet.data.demonstrations import collect_demonstrations
from quintet.envs.env import UnsolvableError
from quintet.envs.factory import env_factory
from quintet.envs.navigation.env import Navigation, task_number
from quintet.envs.navigation.house import ACTIONS
from quintet.envs.primitive_skill.env import PrimitiveSkill
from quintet.envs.ray_casting import Box, Camera, Sphere, cast_rays
from quintet.errors import ConfigError
from quintet.records import Step

SETS = ("base", "common_sense", "complex_instruction", "visual_appearance", "long_horizon")
TASKS = ("AlignTwoCube", "PlaceTwoCube", "PutAppleInDrawer", "StackThreeCube")


# ---- pictures


def test_nearer_things_hide_farther_ones_and_cover_the_right_pixels() -> None:
    """Worked out by hand: at distance 2 and 90 degrees, 16 pixels are 4 meters."""
    camera = Camera((0, 0, 0), (0, 1, 0), (0, 0, 1), fov=90)
    red = Box((-1, 2, -1), (1, 3, 1), (255, 0, 0))
    blue = Sphere((0, 1, 0), 0.25, (0, 0, 255))
    picture = cast_rays(camera, [red], 16)
    is_red = (picture[..., 0] > 2 * picture[..., 2]) & (picture[..., 0] > 0)
    rows, columns = np.nonzero(is_red)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (4, 11, 4, 11)
    assert is_red.sum() == 64
    for shapes in ([red, blue], [blue, red]):
        both = cast_rays(camera, shapes, 16)
        assert both[8, 8].argmax() == 2
        assert both[5, 5].argmax() == 0


# ---- navigation


def navigation(**fields: Any) -> Navigation:
    return Navigation(NavigationConfig(**{"render": "text", **fields}))


def solve(env: Navigation | PrimitiveSkill, seed: int, limit: int = 40) -> list[Step]:
    env.reset(seed)
    steps: list[Step] = []
    while len(steps) < limit:
        steps.append(env.step(env.expert_action()))
        if steps[-1].terminated or steps[-1].truncated:
            break
    return steps


@pytest.mark.parametrize("eval_set", SETS)
def test_the_expert_walks_to_the_object_of_the_instruction(eval_set: str) -> None:
    env = navigation(eval_set=eval_set)
    instructions = set()
    for seed in range(12):
        instructions.add(env.reset(seed).text.partition("Human Instruction: ")[2])
        last = solve(env, seed)[-1]
        assert (last.terminated, last.reward, last.info["success"]) == (True, 10.0, True)
        assert last.info["distance"] <= 1.5
    assert len(instructions) > 6
    assert all("as close as possible to it" in instruction for instruction in instructions)


def test_moves_have_vagens_directions_and_walls_stop_them() -> None:
    env = navigation(eval_set="long_horizon", max_steps=1000)
    env.reset(0)
    house: Any = env._house
    assert env.actions == ACTIONS
    headings = []
    for turn in ("rotateright", "rotateright", "rotateleft", "rotateleft"):
        env.step(turn)
        headings.append(house._heading)
    start = house._layout.heading
    assert headings == [(start + degrees) % 360 for degrees in (90, 180, 90, 0)]
    moved = 0
    for move, back in (("moveahead", "moveback"), ("moveright", "moveleft"), ("moveback", "moveahead")):
        before = house._x, house._y
        if "not executed" not in env.step(move).observation.text:
            moved += 1
            assert np.hypot(house._x - before[0], house._y - before[1]) == pytest.approx(0.5)
            env.step(back)
        assert (house._x, house._y) == pytest.approx(before)
    assert moved
    steps = [env.step("moveahead") for _ in range(30)]
    assert steps[-1].info["env_feedback"] == "Last action is not executed successfully."
    tilts = [env.step("lookup").info["env_feedback"] for _ in range(3)]
    assert [("not" in tilt) for tilt in tilts] == [False, False, True]


def test_rewards_are_for_arrival_and_on_demand_for_every_meter() -> None:
    plain, dense = solve(navigation(), 5), solve(navigation(distance_reward=2.0), 5)
    assert [step.reward for step in plain[:-1]] == [0.0] * (len(plain) - 1)
    env = navigation()
    env.reset(5)
    meters = env._house.distance - plain[-1].info["distance"]
    assert sum(step.reward for step in dense) == pytest.approx(10 + 2 * meters, abs=0.01)
    lost = navigation(max_steps=2, eval_set="base")
    lost.reset(8)
    assert [lost.step("lookup").truncated, lost.step("lookdown").truncated] == [False, True]


def test_moves_arrival_and_their_reward_are_as_configured() -> None:
    env = navigation(step_length=0.25, success_threshold=2.5, success_reward=3.0)
    for seed in range(5):
        last = solve(env, seed, limit=100)[-1]
        assert (last.terminated, last.reward) == (True, 3.0)
        # a smaller step would have arrived before
        assert 2.25 - 1e-6 <= last.info["distance"] <= 2.5


def test_only_the_nearest_objects_are_listed() -> None:
    shown = [navigation(max_objects=count).reset(3).text.partition("Human")[0] for count in (1, 2)]
    first, second = (text.replace("\n", "; ").strip("; ").split("; ") for text in shown)
    assert (len(first), len(second)) == (1, 2)
    assert first[0] == second[0]


def test_only_objects_in_the_field_of_view_are_listed() -> None:
    """The chair at 2.91 m is beside the direction of view, the bookshelf in it."""
    shown = {fov: navigation(fov=fov).reset(0).text.partition("\nHuman")[0] for fov in (30, 100)}
    assert shown[30] == "orange bookshelf ahead 3.41"
    assert shown[100] == f"red chair ahead 2.91\n{shown[30]}"


def test_pictures_follow_the_agent_and_the_map_is_a_second_one() -> None:
    env = navigation(render="vision", resolution=32, multiview=True)
    first = env.reset(3)
    assert first.text.startswith("<image><image>\nHuman Instruction: navigate to the ")
    assert [image.shape for image in first.images] == [(32, 32, 3)] * 2
    turned = env.step("rotateright").observation
    assert (turned.images[0] != first.images[0]).any()
    assert turned.text.startswith(
        "<image><image>\nThe environment feedback is: Last action is executed successfully.\n"
    )
    for _ in range(3):
        back = env.step("rotateright").observation
    assert (back.images[0] == first.images[0]).all()
    assert (env.reset(3).images[1] == first.images[1]).all()


def test_the_object_is_seen_from_the_start_unless_it_is_in_another_room() -> None:
    for seed in range(6):
        env = navigation()
        text = env.reset(seed).text
        seen, _, instruction = text.partition("Human Instruction: navigate to the ")
        assert instruction.partition(" in the room")[0] in seen
    env = navigation(eval_set="long_horizon")
    far = [env.reset(seed).text.partition("Human Instruction: navigate to the ") for seed in range(6)]
    assert any(instruction.partition(" in the other room")[0] not in seen for seen, _, instruction in far)


def test_tasks_are_reduced_and_no_split_has_another_ones() -> None:
    sixty = NavigationConfig(num_tasks=60)
    numbers = {split: {task_number(sixty, None, seed) for seed in range(split, 300, 3)} for split in range(3)}
    assert set.union(*numbers.values()) == set(range(60))
    assert sum(map(len, numbers.values())) == 60
    tenth = NavigationConfig(num_tasks=60, down_sample_ratio=0.1)
    assert {task_number(tenth, None, seed) for seed in range(300)} == {0, 10, 20, 30, 40, 50}
    assert [task_number(NavigationConfig(), None, seed) for seed in range(5)] == list(range(5))
    assert task_number(NavigationConfig(down_sample_ratio=0.5), None, 7) == 13
    assert {task_number(NavigationConfig(), 6, seed) for seed in range(30)} == set(range(6))


# ---- AI2-THOR


class FakeController:
    """Records calls, and moves the agent as AI2-THOR names it."""

    calls: ClassVar[list[Any]] = []

    def __init__(self, **options: Any) -> None:
        self.calls.append(("init", options))
        self.z = 0.0

    def reset(self, scene: str) -> Any:
        self.calls.append(("reset", scene))
        self.z = 0.0
        return self._event()

    def step(self, action: str, **arguments: Any) -> Any:
        self.calls.append((action, arguments))
        if action == "MoveAhead":
            self.z += arguments["moveMagnitude"]
        return self._event(succeeded=action != "MoveBack")

    def _event(self, succeeded: bool = True) -> Any:
        agent = {"position": {"x": 1.0, "y": 0.9, "z": self.z}, "rotation": {"x": 0, "y": 0.0, "z": 0}}
        bread = {"objectType": "Bread", "visible": True, "position": {"x": 1.0, "y": 1.0, "z": 3.0}}
        hidden = {"objectType": "Pot", "visible": False, "position": {"x": 0.0, "y": 1.0, "z": 0.0}}
        metadata = {
            "agent": agent,
            "objects": [bread, hidden],
            "lastActionSuccess": succeeded,
            "actionReturn": {"fieldOfView": 40},
        }
        frame = np.full((64, 64, 3), int(self.z * 10), np.uint8)
        return SimpleNamespace(metadata=metadata, frame=frame, third_party_camera_frames=[frame[:, ::-1]])


@pytest.fixture
def thor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The options of a config with a fake package, a build and one task."""
    parts = {
        "controller": {"Controller": FakeController},
        "platform": {"CloudRendering": "cloud"},
        "build": {"COMMIT_ID": "abc"},
    }
    package = ModuleType("ai2thor")
    package.__spec__ = SimpleNamespace(name="ai2thor")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "ai2thor", package)
    for name, values in parts.items():
        module = ModuleType(f"ai2thor.{name}")
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, f"ai2thor.{name}", module)
    monkeypatch.setattr(FakeController, "calls", [])
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ai2thor/releases/thor-CloudRendering-abc").mkdir(parents=True)
    task = {
        "instruction": "navigate to the Bread",
        "scene": "FloorPlan11",
        "target_position": {"x": 1.0, "y": 1.0, "z": 3.0},
        "agentPose": {"position": {"x": 1.0, "y": 0.9, "z": 0.0}, "rotation": 90.0, "horizon": 30.0},
    }
    (tmp_path / "base.json").write_text(json.dumps({"tasks": [task]}))
    return {"backend": "ai2thor", "thor_tasks": str(tmp_path), "resolution": 64, "render": "vision"}


def test_ai2thor_gets_vagens_calls_and_gives_its_observations(thor: dict[str, Any]) -> None:
    config = NavigationConfig(**thor, multiview=True, gpu_device=1)
    env = env_factory(config)()
    first = env.reset(7)
    (_, options), *calls = FakeController.calls
    assert (options["platform"], options["commit_id"], options["gpu_device"]) == ("cloud", "abc", 1)
    assert (options["width"], options["fieldOfView"], options["visibilityDistance"]) == (64, 100.0, 10)
    assert [name for name, _ in calls] == ["reset", "GetMapViewCameraProperties", "AddThirdPartyCamera", "Teleport"]
    assert (calls[2][1]["orthographic"], calls[2][1]["fieldOfView"]) == (True, 40)
    assert calls[3][1] == {
        "position": {"x": 1.0, "y": 0.9, "z": 0.0},
        "rotation": {"x": 0, "y": 90.0, "z": 0},
        "horizon": 30.0,
        "standing": True,
    }
    assert first.text == "<image><image>\nHuman Instruction: navigate to the Bread"
    assert [image.shape for image in first.images] == [(64, 64, 3)] * 2
    del FakeController.calls[:]
    steps = [
        env.step(action) for action in ("rotateleft", "lookdown", "moveback", "moveahead", "moveahead", "moveahead")
    ]
    assert FakeController.calls[:3] == [
        ("RotateLeft", {"degrees": 90}),
        ("LookDown", {"degrees": 30}),
        ("MoveBack", {"moveMagnitude": 0.5}),
    ]
    assert "not executed" in steps[2].observation.text
    assert [step.info["distance"] for step in steps[3:]] == [2.5, 2.0, 1.5]
    assert (steps[-1].terminated, steps[-1].reward) == (True, 10.0)
    env.close()


def test_ai2thor_starts_one_controller_for_episodes_after_each_other(thor: dict[str, Any]) -> None:
    config = NavigationConfig(**thor | {"render": "text"})
    for seed in range(3):
        env = Navigation(config)
        assert env.reset(seed).text == "Bread ahead 3.00\nHuman Instruction: navigate to the Bread"
        with pytest.raises(UnsolvableError, match="AI2-THOR has no expert"):
            env.expert_action()
        env.close()
    assert [name for name, _ in FakeController.calls].count("init") == 1


def test_ai2thor_without_its_parts_says_what_it_needs_and_downloads_nothing(
    thor: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(message: str, **fields: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            env_factory(NavigationConfig(**thor | fields))

    refused(r"needs tasks\n.*set env\.thor_tasks.*vagen/env/navigation/datasets", thor_tasks=None)
    refused(r"no readable common_sense\.json", eval_set="common_sense")
    refused(r"env\.thor_build = '/none' is no file", thor_build="/none")
    (tmp_path / ".ai2thor/releases/thor-CloudRendering-abc").rmdir()
    refused(r"no build in .*thor-CloudRendering-abc, and Quintet downloads none\n.*pip install ai2thor.*Vulkan")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(r"ai2thor is not installed\n.*pip install ai2thor.*CloudRendering.*Vulkan.*env\.thor_build=EXECUTABLE")
    assert FakeController.calls == []


# ---- primitive skills


def skills(task: str = "StackThreeCube", **fields: Any) -> PrimitiveSkill:
    return PrimitiveSkill(PrimitiveSkillConfig(**{"task": task, "render": "text", **fields}))


@pytest.mark.parametrize("task", TASKS)
def test_the_expert_solves_every_task_for_vagens_reward(task: str) -> None:
    """Its reward is 10 minus 0.1 per skill, whatever the stages in between give."""
    env, starts = skills(task), set()
    for seed in range(20):
        starts.add(env.reset(seed).text)
        steps = solve(env, seed)
        assert (steps[-1].terminated, steps[-1].info["success"]) == (True, True)
        assert sum(step.reward for step in steps) == pytest.approx(10 - 0.1 * len(steps))
    assert len(starts) == 20


def test_stages_earn_two_each_and_lose_them_when_they_are_undone() -> None:
    env = skills("PlaceTwoCube")
    env.reset(3)
    x, y, z = env._table.positions()["red_cube"]
    actions = (f"pick({x},{y},{z})", "place(80,-100,50)", "pick(80,-100,20)", "place(-60,150,20)")
    assert [env.step(action).reward for action in actions] == pytest.approx([1.9, 1.9, -2.1, -2.1])


def test_stages_and_success_pay_what_is_configured() -> None:
    env = skills("PlaceTwoCube", stage_reward=3.0, success_reward=20.0, step_penalty=0.5)
    env.reset(0)
    steps = solve(env, 0)
    assert sum(step.reward for step in steps) == pytest.approx(20 - 0.5 * len(steps))
    assert {step.reward for step in steps[:-1] if step.reward > 0} == {2.5}


def test_cubes_are_stacked_fall_and_slide_where_they_find_no_hold() -> None:
    env = skills()
    env.reset(0)
    table: Any = env._table
    red, green = table._scene.bodies["red_cube"], table._scene.bodies["green_cube"]
    for dx, expected in ((0, 60), (15, 60), (30, 20)):
        env.reset(0)
        red, green = table._scene.bodies["red_cube"], table._scene.bodies["green_cube"]
        env.step(f"pick({red.x},{red.y},{red.z})")
        assert table.information(masked=False)["is_red_cube_grasped"]
        env.step(f"place({green.x + dx},{green.y},120)")
        assert red.z == expected
    assert red.x - green.x == 40
    assert env.step("pick(150,200,200)").info["stage"] == 0
    assert not table.information(masked=False)["is_red_cube_grasped"]


def test_a_covered_cube_cannot_be_picked_and_a_pushed_one_moves_ahead() -> None:
    env = skills()
    solve_two = solve(env, 4, limit=2)
    assert solve_two[-1].info["stage"] == 2
    table: Any = env._table
    green = table._scene.bodies["green_cube"]
    env.step(f"pick({green.x},{green.y},{green.z})")
    assert table._scene.held is None
    purple = table._scene.bodies["purple_cube"]
    x, y = purple.x, purple.y
    env.step(f"push({x - 40},{y},20,{x},{y},20)")
    assert (purple.x, purple.y, purple.z) == (x + 30, y, 20)


def test_observations_are_vagens_with_masked_success_and_a_picture() -> None:
    shown = skills("PutAppleInDrawer").reset(1).text
    assert shown.startswith("Human Instruction: Please put the apple in the drawer and close the drawer.\n")
    assert "x_workspace_limit: (-500, -100)\n" in shown
    assert shown.endswith("Other information:\n{'drawer_open_value': 300}")
    assert "is_apple_grasped" in skills("PutAppleInDrawer", mask_success=False).reset(1).text
    env = skills("AlignTwoCube", render="vision", resolution=40)
    first = env.reset(1)
    assert first.text.startswith("<image>\nHuman Instruction: Please align")
    assert first.text.endswith("No other information needed")
    assert first.images[0].shape == (40, 40, 3)
    assert (env.step(env.expert_action()).observation.images[0] != first.images[0]).any()


def test_coordinates_are_kept_in_the_workspace_and_episodes_end() -> None:
    env = skills("AlignTwoCube", max_steps=3)
    env.reset(2)
    first = [env.step(env.expert_action()), env.step("PLACE( 900 , 0, 20 )")]
    red = env._table.positions()["red_cube"]
    assert red == (150, 0, 20)
    assert [step.truncated for step in (*first, env.step("pick(0,0,20)"))] == [False, False, True]


def test_demonstrations_of_both_envs_can_be_made() -> None:
    for build in (navigation, lambda: skills("AlignTwoCube")):
        assert len(collect_demonstrations(build, 3, max_turns=20, max_actions_per_turn=2)) == 3


# ---- ManiSkill


class FakeSimulation:
    """Records actions, and has the attributes of VAGEN's tasks."""

    workspace_x, workspace_y, workspace_z = (-0.1, 0.15), (-0.2, 0.2), (0.01, 0.2)
    state_keys = ("red_cube_position", "green_cube_position")
    vlm_info_keys = ("cube_size",)
    built: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self.actions: list[np.ndarray] = []

    @property
    def unwrapped(self) -> FakeSimulation:
        return self

    def instruction(self) -> str:
        return "Stack them."

    def reset(self, seed: int) -> Any:
        self.actions.clear()
        return None, self._info()

    def step(self, action: np.ndarray) -> Any:
        self.actions.append(action.copy())
        return None, 0.0, False, False, self._info()

    def render(self) -> np.ndarray:
        return np.full((1, 30, 30, 3), 7, np.uint8)

    def _info(self) -> dict[str, Any]:
        count = len(self.actions)
        positions = {
            "red_cube_position": np.array([[0.0621, -0.055, 0.02]]),
            "green_cube_position": np.array([0.1, 0.2, 0.3]),
        }
        stages = {
            "stage0_success": np.array([count > 0]),
            "stage_1_success": np.array(count > 1),
            "success": np.array(count > 2),
        }
        return {**positions, **stages, "cube_size": np.full(3, 0.04), "elapsed_steps": count}


def fake_builder(task: str, record_dir: str | None) -> FakeSimulation:
    FakeSimulation.built.append((task, record_dir))
    if task == "PutAppleInDrawer":
        raise RuntimeError("vk::createInstanceUnique: ErrorIncompatibleDriver")
    return FakeSimulation()


@pytest.fixture
def maniskill(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    package = ModuleType("mani_skill")
    package.__spec__ = SimpleNamespace(name="mani_skill")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "mani_skill", package)
    monkeypatch.setattr(FakeSimulation, "built", [])
    return {"backend": "maniskill", "maniskill_builder": f"{__file__}:fake_builder", "resolution": 20}


def test_maniskill_gets_vagens_actions_and_gives_its_observations(maniskill: dict[str, Any]) -> None:
    env: Any = env_factory(PrimitiveSkillConfig(**maniskill, task="StackThreeCube"))()
    first = env.reset(3)
    assert "Object positions:\n[(62, -55, 20), (100, 200, 300)]" in first.text
    assert "x_workspace_limit: (-100, 150)\n" in first.text
    assert first.text.endswith("{'cube_size': (40, 40, 40)}")
    assert (first.images[0] == np.full((20, 20, 3), 7)).all()
    actions = ("pick(62,-55,999)", "place(1,2,30)", "push(1,2,30,4,5,60)")
    steps = [env.step(action) for action in actions]
    made = np.stack(env._table._env.actions)
    assert made[:, :3].tolist() == np.eye(3).tolist()
    assert made[0, 3:].tolist() == pytest.approx([0.062, -0.055, 0.2, 0, 0, 0])
    assert made[2, 3:].tolist() == pytest.approx([0.001, 0.002, 0.03, 0.004, 0.005, 0.06])
    assert [step.reward for step in steps] == pytest.approx([1.9, 1.9, 5.9])
    assert [step.terminated for step in steps] == [False, False, True]
    with pytest.raises(UnsolvableError, match="ManiSkill has no expert"):
        env.expert_action()
    env.close()


def test_maniskill_without_its_parts_says_what_it_needs(
    maniskill: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"PutAppleInDrawer cannot be built: vk::.*\n.*GPU and its Vulkan driver"):
        PrimitiveSkill(PrimitiveSkillConfig(**maniskill, task="PutAppleInDrawer"))
    missing = maniskill | {"maniskill_builder": "no_such_package.tasks:build_env"}
    with pytest.raises(ConfigError, match=r"env\.maniskill_builder = .*\n.*VAGEN's package.*env\.backend=kinematic"):
        env_factory(PrimitiveSkillConfig(**missing))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"mani_skill is not installed\n.*pip install mani_skill"):
        env_factory(PrimitiveSkillConfig(**maniskill))
