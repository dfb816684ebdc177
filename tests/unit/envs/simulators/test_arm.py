"""If these fail, the arm moves differently from run to run, is drawn wrongly, or its tasks cannot be solved."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("mujoco")

from quintet.config.native.arm_simulator import ArmOptions
from quintet.config.native.envs import SimulatorConfig
from quintet.envs.simulators.arm import rendering
from quintet.envs.simulators.arm.scene import WORKSPACE_HIGH, WORKSPACE_LOW, joint_angles, tip_positions
from quintet.envs.simulators.arm.simulator import ArmSimulator
from quintet.envs.simulators.arm.tasks import TASKS
from quintet.envs.simulators.registry import build_simulator
from quintet.errors import ConfigError, MachineError

TASK_NAMES = sorted(TASKS)


def build(task: str, robots: int, *, seed: int = 0, size: tuple[int, int] = (32, 32), **options) -> ArmSimulator:
    return ArmSimulator(task, ArmOptions(**{"renderer": "numpy"} | options), robots, seed, size)


def solve(simulator: ArmSimulator, start_states: np.ndarray, max_steps: int, noise: float = 0.0) -> np.ndarray:
    """Return which episodes the expert solves, bool [n]."""
    robots, rng = np.arange(len(start_states)), np.random.default_rng(0)
    simulator.reset(robots, start_states)
    solved, failed = np.zeros((2, len(robots)), bool)
    for _ in range(max_steps):
        actions = simulator.expert_actions(robots)
        step = simulator.step(robots, actions + noise * rng.standard_normal(actions.shape).astype(np.float32))
        solved |= step.success & ~failed
        failed |= False if step.failed is None else step.failed & ~solved
    return solved


def egl_works() -> bool:
    simulator = build("reach", 1, renderer="auto")
    simulator.reset(np.arange(1), np.arange(1))
    simulator.observe(np.arange(1))
    works = isinstance(simulator._renderer, rendering.EglRenderer)
    simulator.close()
    return works


@pytest.mark.parametrize("control", ["tip", "joint"])
@pytest.mark.parametrize("task", TASK_NAMES)
def test_the_expert_solves_each_task(task, control):
    simulator = build(task, 256, control=control)
    assert solve(simulator, np.arange(256), 48 if task == "push" else 16).mean() >= 0.98


@pytest.mark.parametrize("task", TASK_NAMES)
def test_the_expert_recovers_from_noise(task):
    assert solve(build(task, 256), np.arange(256), 60, noise=0.3).mean() >= 0.9


@pytest.mark.parametrize("task", TASK_NAMES)
def test_what_happens_to_a_robot_does_not_depend_on_the_batch(task):
    many, single = build(task, 9), build(task, 1, renderer="numpy")
    robots, rng = np.arange(9), np.random.default_rng(1)
    many.reset(robots, robots + 100)
    single.reset(np.array([0]), np.array([105]))
    for _ in range(25):
        actions = (many.expert_actions(robots) + 0.5 * rng.standard_normal((9, 2))).astype(np.float32)
        order = rng.permutation(9)
        steps = many.step(order, actions[order])
        step = single.step(np.array([0]), actions[5:6])
        assert step.rewards[0] == steps.rewards[np.flatnonzero(order == 5)[0]]
    left, right = many.observe(np.array([5])), single.observe(np.array([0]))
    assert np.array_equal(many._states[5], single._states[0])
    assert np.array_equal(left.images, right.images)
    assert np.array_equal(left.state, right.state)


def test_the_seed_and_the_number_of_a_start_state_decide_it():
    robots = np.arange(2)
    states = []
    for seed, start_states in ((0, [3, 4]), (0, [3, 4]), (1, [3, 4])):
        simulator = build("reach", 2, seed=seed)
        simulator.reset(robots, np.array(start_states))
        states.append(simulator.observe(robots).state)
    assert np.array_equal(states[0], states[1])
    assert not np.array_equal(states[0], states[2])
    assert not np.array_equal(states[0][0], states[0][1])


def test_a_robot_that_does_not_act_stays_where_it_is():
    simulator = build("reach", 3)
    simulator.reset(np.arange(3), np.arange(3))
    before = simulator.observe(np.arange(3)).state
    simulator.step(np.array([1]), np.ones((1, 2), np.float32))
    after = simulator.observe(np.arange(3)).state
    assert np.array_equal(before[[0, 2]], after[[0, 2]])
    assert not np.array_equal(before[1], after[1])


def test_an_action_moves_the_tip_along_its_axis():
    simulator = build("reach", 2)
    simulator.reset(np.arange(2), np.arange(2))
    simulator._states[:, 1:3] = joint_angles(np.array([[0.0, 0.15]] * 2))
    simulator.step(np.arange(2), np.array([[1, 0], [0, -1]], np.float32))
    moved = tip_positions(simulator._states[:, 1:3]) - [0.0, 0.15]
    assert moved[0] == pytest.approx([0.03, 0], abs=0.008)
    assert moved[1] == pytest.approx([0, -0.03], abs=0.008)


def test_the_tip_stays_in_the_workspace():
    simulator = build("reach", 64)
    robots, rng = np.arange(64), np.random.default_rng(0)
    simulator.reset(robots, robots)
    direction = rng.choice([-1.0, 1.0], (64, 2)).astype(np.float32)
    for _ in range(30):
        simulator.step(robots, direction)
    tips = tip_positions(simulator._states[:, 1:3])
    assert (tips > WORKSPACE_LOW - 0.01).all()
    assert (tips < WORKSPACE_HIGH + 0.01).all()


def test_joint_angles_invert_tip_positions():
    tips = np.random.default_rng(0).uniform(WORKSPACE_LOW, WORKSPACE_HIGH, (1000, 2))
    assert tip_positions(joint_angles(tips)) == pytest.approx(tips, abs=1e-12)


def test_an_action_that_is_not_a_number_fails_only_its_robot():
    simulator, alone = build("reach", 2), build("reach", 1)
    simulator.reset(np.arange(2), np.arange(2))
    alone.reset(np.arange(1), np.arange(1))
    step = simulator.step(np.arange(2), np.array([[0.5, 0.5], [np.nan, 0]], np.float32))
    alone.step(np.arange(1), np.array([[0.5, 0.5]], np.float32))
    assert {robot: failure.message for robot, failure in step.failures.items()} == {1: "an action is not a number"}
    assert np.array_equal(simulator._states[0], alone._states[0])
    assert np.isfinite(simulator._states).all()


def test_the_arm_pushes_the_puck():
    simulator = build("push", 1)
    simulator.reset(np.array([0]), np.array([0]))
    before = simulator._objects[0].copy()
    for _ in range(30):
        simulator.step(np.array([0]), simulator.expert_actions(np.array([0])))
    assert np.linalg.norm(simulator._objects[0, 0] - before[0]) > 0.05
    assert np.array_equal(simulator._objects[0, 1], before[1])


def test_touching_the_ball_that_the_instruction_does_not_name_fails_the_task():
    simulator = build("reach_color", 2)
    robots = np.arange(2)
    simulator.reset(robots, np.array([10, 11]))
    assert simulator.observe(robots).instructions == ("touch the red ball", "touch the blue ball")
    simulator._states[:, 1:3] = joint_angles(simulator._objects[:, 0])
    step = simulator.step(robots, np.zeros((2, 2), np.float32))
    assert step.success.tolist() == [True, False]
    assert step.failed.tolist() == [False, True]
    assert step.rewards.tolist() == [1.0, 0.0]


def test_progress_rewards_add_up_to_the_distance():
    sparse, dense = build("reach", 8), build("reach", 8, progress_reward=0.5)
    robots, totals = np.arange(8), np.zeros((2, 8))
    for simulator in (sparse, dense):
        simulator.reset(robots, robots)
    distances = dense._distances(robots)
    for _ in range(4):
        actions = dense.expert_actions(robots)
        totals += [simulator.step(robots, actions).rewards for simulator in (sparse, dense)]
    expected = 0.5 * (distances - dense._distances(robots)) / 0.1
    assert totals[1] - totals[0] == pytest.approx(expected, abs=1e-5)


def test_the_state_has_positions_of_objects_only_if_asked():
    robots = np.arange(2)
    for options, size in (({}, 6), ({"privileged_state": True}, 10)):
        simulator = build("reach_color", 2, **options)
        simulator.reset(robots, robots)
        assert simulator.observe(robots).state.shape == (2, size)
    named = (2 * simulator._objects[[0, 1], [0, 1]] - WORKSPACE_LOW - WORKSPACE_HIGH) / (WORKSPACE_HIGH - WORKSPACE_LOW)
    assert simulator.observe(robots).state[:, 6:8] == pytest.approx(named, abs=1e-6)


def test_images_are_black_for_the_control():
    simulator = build("reach", 2, blank_images=True)
    simulator.reset(np.arange(2), np.arange(2))
    assert not simulator.observe(np.arange(2)).images.any()
    assert simulator.render(np.arange(2)).any()


@pytest.mark.parametrize("renderer", ["numpy", "egl"])
def test_images_show_objects_where_they_are(renderer):
    if renderer == "egl" and not egl_works():
        pytest.skip("EGL does not work on this machine")
    simulator = build("push", 4, size=(96, 128), renderer=renderer)
    robots = np.arange(4)
    simulator.reset(robots, robots)
    images = simulator.observe(robots).images[:, 0].astype(int)
    assert images.shape == (4, 96, 128, 3)
    red, green, blue = np.moveaxis(images, -1, 0)
    tips = tip_positions(simulator._states[:, 1:3])
    masks = (
        ((red > 120) & (green > 90) & (blue < 60), simulator._objects[:, 0]),
        ((green > 100) & (red < 100) & (blue < 120), simulator._objects[:, 1]),
        (images.max(axis=-1) < 60, tips),
    )
    for robot in robots:
        for mask, centers in masks:
            rows, columns = np.nonzero(mask[robot])
            shown = (columns.mean() - 63.5) * 0.4 / 96, (47.5 - rows.mean()) * 0.4 / 96 + 0.15
            # The arm may hide a part of an object.
            assert shown == pytest.approx(centers[robot], abs=0.02)
    simulator.close()


def test_both_renderers_show_the_same_scene():
    if not egl_works():
        pytest.skip("EGL does not work on this machine")
    images = []
    for renderer in ("egl", "numpy"):
        simulator = build("reach_color", 8, size=(64, 64), renderer=renderer)
        simulator.reset(np.arange(8), np.arange(8))
        images.append(simulator.observe(np.arange(8)).images.astype(int))
        simulator.close()
    assert np.abs(images[0] - images[1]).mean() < 8
    different = np.abs(images[0] - images[1]).max(axis=-1) > 80
    assert different.mean() < 0.01


def test_several_simulators_render_by_turns():
    if not egl_works():
        pytest.skip("EGL does not work on this machine")
    first, second = build("reach", 1, renderer="egl"), build("push", 1, renderer="egl", size=(48, 48))
    robot = np.array([0])
    for simulator in (first, second):
        simulator.reset(robot, robot)
    images = [[simulator.observe(robot).images for simulator in (first, second)] for _ in range(2)]
    assert all(np.array_equal(*pair) for pair in zip(*images, strict=True))
    first.close()
    assert np.array_equal(second.observe(robot).images, images[0][1])
    second.close()


def test_training_continues_after_egl_was_loaded():
    code = """
import numpy as np
from quintet.config.native.envs import SimulatorConfig
from quintet.envs.simulators.registry import build_simulator
simulator = build_simulator(SimulatorConfig(name="simulator", simulator="arm", camera_height=32, camera_width=32), 1, 0)
robot = np.array([0])
simulator.reset(robot, robot)
simulator.observe(robot)
import torch
torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
simulator.observe(robot)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")


def test_numpy_draws_where_egl_does_not_work(monkeypatch):
    def refuse(*_arguments):
        raise AttributeError("'NoneType' object has no attribute 'eglQueryString'")

    monkeypatch.setattr(rendering, "EglRenderer", refuse)
    simulator = build("reach", 1, renderer="auto")
    simulator.reset(np.arange(1), np.arange(1))
    drawn = build("reach", 1)
    drawn.reset(np.arange(1), np.arange(1))
    assert np.array_equal(simulator.observe(np.arange(1)).images, drawn.observe(np.arange(1)).images)
    with pytest.raises(MachineError, match=r"env\.options\.renderer=egl.*eglQueryString") as caught:
        build("reach", 1, renderer="egl").observe(np.arange(1))
    assert "env.options.renderer=numpy" in caught.value.hint


def test_the_configuration_selects_task_options_and_image_size():
    config = SimulatorConfig(
        name="simulator",
        simulator="arm",
        task="push",
        options={"privileged_state": True, "renderer": "numpy"},
        camera_height=24,
        camera_width=40,
    )
    simulator = build_simulator(config, 3, 0)
    simulator.reset(np.arange(3), np.arange(3))
    observation = simulator.observe(np.arange(3))
    assert observation.images.shape == (3, 1, 24, 40, 3)
    assert observation.state.shape == (3, 10)
    assert observation.instructions == ("push the puck onto the target",) * 3
    assert simulator.tasks == ("push",)


def test_an_unknown_task_lists_the_nearest():
    with pytest.raises(ConfigError, match=r"env\.task=reach_colour") as caught:
        build_simulator(SimulatorConfig(name="simulator", simulator="arm", task="reach_colour"), 1, 0)
    assert "'reach_color'" in caught.value.hint


def test_an_unknown_option_is_refused():
    with pytest.raises(ConfigError, match="rendered"):
        build_simulator(SimulatorConfig(name="simulator", simulator="arm", options={"rendered": "egl"}), 1, 0)
