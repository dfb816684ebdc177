"""If these fail, robots of LIBERO or ManiSkill start elsewhere, see or do something else than their policies expect, or
what a package lacks is not named. The packages are replaced; `test_installed_simulators.py` runs the real ones."""

from __future__ import annotations

import ctypes.util
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from robot_packages import LiberoEnv, install_libero, install_maniskill

from quintet.config.native.envs import SimulatorConfig
from quintet.envs.simulators import headless, libero
from quintet.envs.simulators.libero import build_libero
from quintet.envs.simulators.maniskill import build_maniskill, control_mode
from quintet.envs.simulators.metaworld import TASKS
from quintet.envs.simulators.registry import build_simulator
from quintet.envs.simulators.robosuite import axis_angle
from quintet.errors import ConfigError, MachineError
from quintet.policies.vla.robot_actions import robot_settings, to_robot

ROBOTS = np.arange(2)


@pytest.fixture
def libero_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "home"))
    root = tmp_path / "libero"
    root.mkdir()
    install_libero(monkeypatch, root)
    names = {"bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets"}
    monkeypatch.setattr(libero, "_installed_paths", lambda: {key: str(root / name) for key, name in names.items()})
    return root


@pytest.fixture
def maniskill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list:
    (tmp_path / "bridge").mkdir()
    return install_maniskill(monkeypatch, tmp_path)


def libero_config(**values) -> SimulatorConfig:
    return SimulatorConfig(simulator="libero", task_suite="libero_spatial", camera_height=2, camera_width=3, **values)


def maniskill_config(**values) -> SimulatorConfig:
    return SimulatorConfig(simulator="maniskill", **values)


def test_start_states_of_libero_are_numbered_as_in_rlinf(libero_files: Path) -> None:
    simulator = build_libero(libero_config(), 2, 0)
    assert (simulator.num_start_states, simulator.num_robots) == (5, 2)
    assert [simulator.task(state)[-1] for state in range(5)] == ["0", "0", "1", "1", "1"]
    simulator.reset(ROBOTS, np.array([1, 4]))
    observation = simulator.observe(ROBOTS)
    assert observation.state[:, 0].tolist() == [1.0, 12.0]
    assert observation.instructions == ("libero spatial task 0", "libero spatial task 1")
    simulator.reset(ROBOTS[:1], np.array([2]))
    assert simulator.observe(ROBOTS).state[:, 0].tolist() == [10.0, 12.0]
    # An instance performs one task.
    assert [env.is_open for env in LiberoEnv.made] == [False, True, True]
    simulator.close()
    assert not any(env.is_open for env in LiberoEnv.made)


def test_libero_130_has_the_tasks_of_all_suites(libero_files: Path) -> None:
    config = SimulatorConfig(simulator="libero", task_suite="LIBERO_130")
    suites = [name[:12] for name in build_libero(config, 1, 0).tasks]
    assert suites == ["libero_spati"] * 2 + ["libero_goal_"] * 2 + ["libero_10_ta"] * 2


def test_the_policy_sees_liberos_cameras_as_in_its_data_sets(libero_files: Path) -> None:
    simulator = build_libero(libero_config(), 1, 0)
    simulator.reset(ROBOTS[:1], np.array([0]))
    observation = simulator.observe(ROBOTS[:1])
    assert observation.images.shape == (1, 2, 2, 3, 3)
    # The corner that MuJoCo renders first is the last one of an image that is turned by 180 degrees.
    assert observation.images[0, :, -1, -1, 0].tolist() == [10, 20]
    assert observation.images.sum() == 90
    assert observation.state[0] == pytest.approx([0, 0, 0, 0, 0, 0.5, 0.04, -0.04])
    assert simulator.render(ROBOTS[:1]).shape == (1, 2, 3, 3)


@pytest.mark.parametrize(("is_openvla", "sent"), [(True, [-1, 1]), (False, [0.8, 0.2])])
def test_the_gripper_of_libero_opens_as_the_policy_says(libero_files: Path, is_openvla: bool, sent: list) -> None:
    """RLinf: -sign(2 a - 1) for OpenVLA and OpenVLA-OFT; actions of other policies are LIBERO's own."""
    simulator = build_libero(libero_config(options={"wait_steps": 3}), 2, 0)
    simulator.reset(ROBOTS, np.zeros(2, int))
    actions = np.full((2, 7), 0.25, np.float32)
    actions[:, 0], actions[:, 6] = [0.9, 0.1], [0.8, 0.2]
    gripper = robot_settings("libero", None, 7)["gripper"] if is_openvla else None
    step = simulator.step(ROBOTS, to_robot(actions, gripper, None))
    assert (step.success.tolist(), step.rewards.tolist()) == ([True, False], [1.0, 0.0])
    for env, value in zip(LiberoEnv.made, sent, strict=True):
        assert [action[:6].any() for action in env.actions] == [False, False, False, True]
        assert [action[6] for action in env.actions] == pytest.approx([-1, -1, -1, value])


def test_an_error_of_one_robot_costs_only_its_episode(libero_files: Path) -> None:
    simulator = build_libero(libero_config(), 2, 0)
    simulator.reset(ROBOTS, np.zeros(2, int))
    simulator.observe(ROBOTS)
    actions = np.zeros((2, 7), np.float32)
    actions[1, 0] = -0.5
    step = simulator.step(ROBOTS, actions)
    assert list(step.failures) == [1]
    assert "the simulation is unstable" in step.failures[1].message
    assert simulator.observe(ROBOTS).images[:, 0, -1, -1, 0].tolist() == [10, 0]
    assert simulator.render(ROBOTS)[:, -1, -1, 0].tolist() == [10, 0]
    simulator.reset(ROBOTS[1:], np.array([3]))
    assert simulator.observe(ROBOTS).state[:, 0].tolist() == [0.0, 11.0]


def test_libero_never_asks_and_names_what_is_missing(libero_files: Path, tmp_path: Path) -> None:
    assert build_libero(libero_config(), 1, 0).num_start_states == 5
    config = tmp_path / "home" / "config.yaml"
    assert str(libero_files / "init_files") in config.read_text()
    (libero_files / "assets").rmdir()
    with pytest.raises(MachineError, match=r"textures are missing: .*assets\n  put the folder `assets` .* there"):
        build_libero(libero_config(), 1, 0)
    (libero_files / "assets").mkdir()
    state_file = libero_files / "init_files" / "libero_spatial_task_1.pruned_init"
    state_file.unlink()
    with pytest.raises(MachineError, match=r"start states are missing: .*task_1.pruned_init\n  put .*init_files"):
        build_libero(libero_config(), 1, 0)
    state_file.touch()
    (libero_files / "bddl_files" / "libero_spatial_task_0.bddl").unlink()
    with pytest.raises(MachineError, match=r"file is missing: .*task_0.bddl\n  put the folder `bddl_files`"):
        build_libero(libero_config(), 1, 0)


def test_liberos_configuration_of_another_environment_is_refused(libero_files: Path, tmp_path: Path) -> None:
    config = tmp_path / "home" / "config.yaml"
    config.parent.mkdir()
    config.write_text("bddl_files: /nowhere\ninit_states: /nowhere\n")
    with pytest.raises(MachineError, match=r"bddl_files is '/nowhere', which is no directory\n  delete the file"):
        build_libero(libero_config(), 1, 0)
    config.unlink()
    build_libero(libero_config(), 1, 0)


def test_a_directory_that_cannot_be_written_is_named(
    libero_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(tmp_path / "file" / "below"))
    with pytest.raises(MachineError, match=r"Not a directory\n  set LIBERO_CONFIG_PATH to a directory"):
        build_libero(libero_config(), 1, 0)


def test_unknown_suites_and_tasks_name_the_valid_ones(libero_files: Path) -> None:
    with pytest.raises(ConfigError, match=r"env.task_suite=libero_11 is unknown\n  valid: libero_spatial"):
        build_libero(SimulatorConfig(simulator="libero", task_suite="libero_11"), 1, 0)
    with pytest.raises(ConfigError, match=r"libero_spatial has no such task\n  did you mean 'libero_spatial_task_1'"):
        build_libero(libero_config(task="libero_spatial_task1"), 1, 0)
    simulator = build_libero(libero_config(task="libero_spatial_task_1"), 1, 0)
    assert (simulator.tasks, simulator.num_start_states) == (("libero_spatial_task_1",), 3)


def test_a_simulator_that_is_not_installed_names_the_script() -> None:
    with pytest.raises(
        ConfigError, match=r"mani_skill, .* not installed\n  bash scripts/install_simulator.sh maniskill"
    ):
        build_simulator(SimulatorConfig(simulator="maniskill"), 1, 0)


def test_the_suites_of_metaworld_are_rlinfs() -> None:
    instructions, suites = TASKS["instructions"], TASKS["suites"]
    train, test = (suites[name]["tasks"] for name in ("metaworld_45_ind", "metaworld_45_ood"))
    assert (len(instructions), len(train), len(test)) == (50, 45, 5)
    assert {*train, *test} == {*instructions}


def test_orientations_are_axis_times_angle() -> None:
    assert axis_angle(np.array([0.0, 0.0, 0.0, 1.0])).tolist() == [0, 0, 0]
    assert axis_angle(np.array([0.6, 0.0, 0.8, 0.0])) == pytest.approx(np.pi * np.array([0.6, 0.0, 0.8]))


def test_mujoco_renders_by_a_library_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    with pytest.raises(MachineError, match="neither EGL nor OSMesa is installed\n  install libegl1"):
        headless.select_renderer()
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.delenv("MUJOCO_GL")
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: name if name == "OSMesa" else None)
    headless.select_renderer()
    assert os.environ["MUJOCO_GL"] == "osmesa"


def test_start_states_of_digital_twins_are_rlinfs(maniskill: list) -> None:
    simulator = build_maniskill(maniskill_config(), 3, 5)
    assert (simulator.num_start_states, simulator.action_dim, simulator.control_frequency) == (24, 7, 5.0)
    simulator.reset(np.array([2, 0]), np.array([7, 23]))
    seeds, options = zip(*(reset for env in maniskill for reset in env.resets), strict=True)
    assert seeds == (5, 5)
    assert [option["episode_id"].tolist() for option in options] == [[23], [7]]
    observation = simulator.observe(np.array([2, 0]))
    assert observation.instructions == ("put carrot on plate 7", "put carrot on plate 23")
    assert observation.images[:, 0, 0, 0, 0].tolist() == [9, 25]
    assert observation.state.tolist() == [[7.0] * 8, [23.0] * 8]
    assert simulator.render(np.array([2, 0]))[:, 0, 0, 0].tolist() == [7, 23]


def test_robots_on_the_gpu_are_reset_and_moved_together(maniskill: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    simulator = build_maniskill(maniskill_config(), 4, 0)
    (env,) = maniskill
    assert env.arguments["sim_backend"] == "gpu"
    simulator.reset(np.arange(4), np.array([3, 3, 8, 9]))
    assert "env_idx" not in env.resets[-1][1]
    simulator.reset(np.array([1, 3]), np.array([4, 5]))
    assert env.resets[-1][1]["env_idx"].tolist() == [1, 3]
    assert simulator.observe(np.arange(4)).state[:, 0].tolist() == [3, 4, 8, 5]
    renders = env.renders
    actions = np.full((2, 7), 0.7, np.float32)
    actions[:, 2], actions[1, 6] = [1, -1], 0.4
    step = simulator.step(np.array([0, 2]), actions)
    assert env.renders == renders
    assert env.actions[-1][1].tolist() == env.actions[-1][3].tolist() == [0.0] * 7
    # widowx: above 0.5 opens (1), below closes (-1)
    assert env.actions[-1][[0, 2], 6].tolist() == [1, -1]
    assert (step.success.tolist(), step.failed.tolist()) == ([True, False], [False, True])
    # 0.1 for the grasp, and nothing for a success without one
    assert step.rewards.tolist() == pytest.approx([0.0, 0.1])


def test_robots_of_a_group_start_alike_if_the_task_draws_its_start_states(
    maniskill: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options = {"policy_setup": "panda-qpos", "wrap_obs_mode": "simple", "reward_mode": "raw"}
    simulator = build_maniskill(maniskill_config(task="PickCube-v1", options=options), 3, 0)
    simulator.reset(np.arange(3), np.array([8, 8, 9]))
    observation = simulator.observe(np.arange(3))
    assert observation.state[0] == observation.state[1] != observation.state[2]
    assert observation.instructions == ("pick cube",) * 3
    # base_camera first
    difference = observation.images[0, :, 0, 0, 0].astype(int) - int(observation.images[0, 0, 0, 0, 0])
    assert difference.tolist() == [0, 2, 1]
    actions = np.full((3, 7), 0.25, np.float32)
    assert simulator.step(np.arange(3), actions).rewards.tolist() == [0.5] * 3
    (env,) = maniskill
    assert (env.actions[-1] == 0.25).all()
    assert env.arguments["control_mode"] == "pd_joint_delta_pos"
    assert env.arguments["sensor_configs"] == {"shader_pack": "default", "height": 256, "width": 256}


def test_the_state_policy_needs_no_images(maniskill: list) -> None:
    options = {"policy_setup": "panda-ee-dpos", "obs_mode": "state", "reward_mode": "only_success"}
    simulator = build_maniskill(maniskill_config(task="PickCube-v1", options=options), 2, 0)
    simulator.reset(ROBOTS, np.array([1, 2]))
    observation = simulator.observe(ROBOTS)
    assert (observation.images.shape, observation.state.shape) == ((2, 0, 1, 1, 3), (2, 3))


def test_controllers_follow_from_the_robot() -> None:
    assert control_mode("widowx_bridge") == "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos"
    assert control_mode("panda_wristcam") == "pd_ee_body_target_delta_pose_real_root_frame"
    with pytest.raises(ConfigError, match="no controller is known for this robot\n  valid: widowx_bridge, panda-qpos"):
        control_mode("google_robot_static")


def test_what_maniskill_lacks_is_named(maniskill: list, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ManiSkill has no such task\n  did you mean 'PutCarrotOnPlateInScene-v1'"):
        build_maniskill(maniskill_config(task="PutCarrotOnPlateInScene-v2"), 1, 0)
    with pytest.raises(MachineError, match=r"has no GPU\n  set env.options.sim_backend=cpu"):
        build_maniskill(maniskill_config(options={"sim_backend": "gpu"}), 1, 0)
    build_maniskill(maniskill_config(options={"sim_backend": "cpu"}), 1, 0)
    (tmp_path / "bridge").rmdir()
    with pytest.raises(
        MachineError, match=r"are missing: .*/bridge\n  run `python -m mani_skill.*download_asset bridge`"
    ):
        build_maniskill(maniskill_config(), 1, 0)
    (tmp_path / "bridge").mkdir()

    def make(**_):
        raise RuntimeError("vk::createInstanceUnique: ErrorIncompatibleDriver")

    monkeypatch.setattr("gymnasium.make", make)
    with pytest.raises(MachineError, match=r"cannot render on this machine .*\n  install libvulkan1"):
        build_maniskill(maniskill_config(), 1, 0)


def test_settings_that_the_task_does_not_have_are_refused(maniskill: list, monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = build_maniskill(maniskill_config(), 1, 0)
    simulator.reset(np.arange(1), np.zeros(1, int))
    step = maniskill[0].step

    def ungrasped(actions):
        *others, info = step(actions)
        return *others, {"success": info["success"]}

    monkeypatch.setattr(maniskill[0], "step", ungrasped)
    with pytest.raises(
        ConfigError, match=r"does not report grasps\n  set env.options.reward_mode=raw, or only_success"
    ):
        simulator.step(np.arange(1), np.zeros((1, 7), np.float32))
    get_obs = maniskill[0].get_obs
    monkeypatch.setattr(maniskill[0], "get_obs", lambda info: {**get_obs(info), "sensor_data": {"base_camera": {}}})
    with pytest.raises(ConfigError, match=r"no camera 3rd_view_camera\n  set env.options.wrap_obs_mode=simple"):
        simulator.observe(np.arange(1))
