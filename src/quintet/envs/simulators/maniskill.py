"""Tasks of ManiSkill 3 (`mani_skill` 3.0), simulated together on the GPU or one by one on the CPU."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import gymnasium
import numpy as np
import torch

from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.robot_simulators import ManiSkillOptions
from quintet.embodied_records import RobotObservation, SimulatorStep
from quintet.envs.simulators.registry import simulator_options
from quintet.errors import ConfigError, MachineError, did_you_mean
from quintet.seeds import derive_seed

RLINF_TASKS = "rlinf.envs.maniskill"
"""Module of RLinf that registers `PutCarrotOnPlateInScene-v2`, `PutOnPlateInScene25Main-v3` and its variants."""
TWIN_CAMERA = "3rd_view_camera"
"""Camera of digital twins, whose background is a picture of the camera's size."""


def control_mode(policy_setup: str) -> str:
    """Return ManiSkill's controller of a robot, as in RLinf (`rlinf/config.py`).

    Raises:
        ConfigError: the robot is unknown, or ManiSkill 3 has no task for it.
    """
    exact = {
        "panda-qpos": "pd_joint_delta_pos",
        "panda-ee-dpos": "pd_ee_delta_pos",
        "panda-ee-target-dpos": "pd_ee_target_delta_pose",
    }
    if policy_setup in exact:
        return exact[policy_setup]
    if "widowx" in policy_setup:
        return "arm_pd_ee_target_delta_pose_align2_gripper_pd_joint_pos"
    if "panda" in policy_setup:
        return "pd_ee_body_target_delta_pose_real_root_frame"
    raise ConfigError(
        f"env.options.policy_setup={policy_setup}: no controller is known for this robot",
        key="env.options",
        value=policy_setup,
        hint=f"valid: widowx_bridge, {', '.join(exact)}, or set env.options.control_mode, too",
    )


def robot_actions(actions: np.ndarray, policy_setup: str) -> np.ndarray:
    """Return actions as the controller takes them: for `widowx`, whose policies open the gripper above 0.5, 1 opens it
    and -1 closes it (RLinf, `prepare_actions_for_maniskill`)."""
    actions = actions.astype(np.float32)
    if "widowx" in policy_setup:
        actions[..., -1] = np.where(actions[..., -1] > 0.5, 1.0, -1.0)
    return actions


def build_maniskill(config: SimulatorConfig, num_robots: int, seed: int) -> ManiSkillSimulator:
    """Return `env.task`, which is `PutCarrotOnPlateInScene-v1` by default.

    Raises:
        ConfigError: the task, the robot or an option is unknown.
        MachineError: assets, a GPU or a Vulkan driver are missing.
    """
    options = cast("ManiSkillOptions", simulator_options(config, ManiSkillOptions))
    task = config.task or "PutCarrotOnPlateInScene-v1"
    _check_task(task)
    is_gpu = options.sim_backend == "gpu" or (options.sim_backend == "auto" and torch.cuda.is_available())
    if is_gpu and not torch.cuda.is_available():
        raise MachineError("env.options.sim_backend=gpu: this machine has no GPU", "set env.options.sim_backend=cpu")
    size = (config.camera_height, config.camera_width)
    return ManiSkillSimulator(task, options, num_robots, seed, size, is_gpu=is_gpu)


def _check_task(task: str) -> None:
    """
    Raises:
        ConfigError: no installed package registers the task.
        MachineError: its assets are missing. ManiSkill would ask on stdin whether it may download them.
    """
    # The assets are checked below; nothing may ask for them on stdin.
    os.environ.setdefault("MS_SKIP_ASSET_DOWNLOAD_PROMPT", "1")
    importlib.import_module("mani_skill.envs")
    registered = importlib.import_module("mani_skill.utils.registration").REGISTERED_ENVS
    if task not in registered and importlib.util.find_spec("rlinf") is not None:
        importlib.import_module(RLINF_TASKS)
    if task not in registered:
        hint = did_you_mean(task, registered) or f"RLinf's package registers its tasks ({RLINF_TASKS})"
        raise ConfigError(f"env.task={task}: ManiSkill has no such task", key="env.task", value=task, hint=hint)
    assets = importlib.import_module("mani_skill.utils.assets")
    names = [
        source
        for name in registered[task].asset_download_ids or ()
        for source in (
            assets.expand_data_group_into_individual_data_source_ids(name) if name in assets.DATA_GROUPS else [name]
        )
    ]
    missing = [name for name in names if not assets.is_data_source_downloaded(name)]
    if missing:
        source = assets.DATA_SOURCES[missing[0]]
        raise MachineError(
            f"env.task={task}: assets of ManiSkill are missing: {source.output_dir / source.target_path}",
            f"run `python -m mani_skill.utils.download_asset {missing[0]}`; MS_ASSET_DIR is its directory",
        )


class ManiSkillSimulator:
    """Robots that perform one task of ManiSkill.

    On the GPU one env simulates all robots; robots that do not act get actions of zeros. On the CPU each robot has an
    env. Tasks that number their start states use these numbers, as in RLinf; robots of other tasks are reset one by
    one, each by the seed of its start state, so that robots of a group start from the same one.
    """

    def __init__(
        self,
        task: str,
        options: ManiSkillOptions,
        num_robots: int,
        seed: int,
        camera_size: tuple[int, int],
        *,
        is_gpu: bool,
    ) -> None:
        """
        Raises:
            MachineError: a file or a Vulkan driver is missing.
        """
        self.num_robots, self.tasks = num_robots, (task,)
        self._options, self._seed = options, seed
        self._robots_per_env = num_robots if is_gpu else 1
        arguments = _arguments(task, options, camera_size, is_gpu=is_gpu)
        with _machine_errors(task):
            self._envs = [
                gymnasium.make(num_envs=self._robots_per_env, **arguments)
                for _ in range(num_robots // self._robots_per_env)
            ]
        self._infos: dict[Any, Mapping[str, Any]] = {}
        """What each env reported last. Asking it again would count grasps twice."""
        base: Any = self._envs[0].unwrapped
        self.action_dim = int(base.single_action_space.shape[0])
        self.control_frequency = float(base.control_freq)
        numbered = _numbered_start_states(base)
        self._is_numbered = numbered is not None
        self.num_start_states = numbered or options.start_states

    def task(self, start_state: int) -> str:
        del start_state
        return self.tasks[0]

    def reset(self, robots: np.ndarray, start_states: np.ndarray) -> None:
        for env, rows, members in self._by_env(robots):
            if self._is_numbered:
                self._reset(env, members, self._seed, start_states[rows])
                continue
            for member, start_state in zip(members, start_states[rows].tolist(), strict=True):
                seed = derive_seed("maniskill", self.tasks[0], self._seed, start_state) % 2**31
                self._reset(env, np.array([member]), seed, None)

    def _reset(self, env: Any, members: np.ndarray, seed: int, start_states: np.ndarray | None) -> None:
        device, options = env.unwrapped.device, {}
        if len(members) < self._robots_per_env:
            options["env_idx"] = torch.as_tensor(members, device=device)
        if start_states is not None:
            options["episode_id"] = torch.as_tensor(start_states, device=device)
        with _without_observation(env.unwrapped):
            _, self._infos[env] = env.reset(seed=seed, options=options)

    def step(self, robots: np.ndarray, actions: np.ndarray) -> SimulatorStep:
        rewards, success = np.zeros(len(robots), np.float32), np.zeros(len(robots), bool)
        failed = np.zeros(len(robots), bool)
        for env, rows, members in self._by_env(robots):
            moves = np.zeros((self._robots_per_env, self.action_dim), np.float32)
            moves[members] = robot_actions(actions[rows], self._options.policy_setup)
            with _without_observation(env.unwrapped):
                _, reward, _, _, info = env.step(torch.as_tensor(moves, device=env.unwrapped.device))
            self._infos[env] = info
            rewards[rows] = self._reward(_array(reward), info)[members]
            success[rows] = _array(info["success"])[members]
            failed[rows] = _array(info.get("fail", np.zeros(self._robots_per_env, bool)))[members]
        return SimulatorStep(rewards, success, failed)

    def _reward(self, reward: np.ndarray, info: Mapping[str, Any]) -> np.ndarray:
        """Return the rewards of an env, float32 [its robots].

        Raises:
            ConfigError: the task does not say whether the object is grasped.
        """
        mode = self._options.reward_mode
        if mode == "raw":
            return reward.reshape(-1)
        success = _array(info["success"]).astype(np.float32)
        if mode == "only_success":
            return success
        if "is_src_obj_grasped" not in info:
            raise ConfigError(
                f"env.options.reward_mode=default: {self.tasks[0]} does not report grasps",
                key="env.options",
                value=mode,
                hint="set env.options.reward_mode=raw, or only_success",
            )
        grasped = _array(info["is_src_obj_grasped"]).astype(np.float32)
        lasting = _array(info["consecutive_grasp"]).astype(np.float32)
        return np.asarray(0.1 * grasped + 0.1 * lasting + success * grasped, np.float32)

    def observe(self, robots: np.ndarray) -> RobotObservation:
        images, states, instructions, order = [], [], [], []
        for env, rows, members in self._by_env(robots):
            image, state = _observation(env.unwrapped, self._infos[env], self._options)
            images.append(image[members])
            states.append(state[members])
            instructions += _instructions(env.unwrapped, self.tasks[0], members)
            order.append(rows)
        observation = RobotObservation(np.concatenate(images), np.concatenate(states), tuple(instructions))
        return observation.select(np.argsort(np.concatenate(order)))

    def render(self, robots: np.ndarray) -> np.ndarray:
        envs = list(self._by_env(robots))
        frames: np.ndarray = np.concatenate([_array(env.unwrapped.render())[members] for env, _, members in envs])
        return frames.astype(np.uint8)[np.argsort(np.concatenate([rows for _, rows, _ in envs]))]

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _by_env(self, robots: np.ndarray) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
        """Yield each env of `robots` in ascending order, their rows, and their numbers in the env."""
        envs = robots // self._robots_per_env
        for number in np.unique(envs).tolist():
            rows = np.flatnonzero(envs == number)
            yield self._envs[number], rows, robots[rows] % self._robots_per_env


def _arguments(task: str, options: ManiSkillOptions, camera_size: tuple[int, int], *, is_gpu: bool) -> dict[str, Any]:
    """Return the arguments of ManiSkill's env."""
    height, width = camera_size
    is_twin = options.wrap_obs_mode == "default"
    size = {} if is_twin else {"height": height, "width": width}
    optional = {"obj_set": options.obj_set, "use_multiple_plates": options.use_multiple_plates}
    return {
        "id": task,
        "obs_mode": options.obs_mode or ("rgb+segmentation" if is_twin else "rgb"),
        "control_mode": options.control_mode or control_mode(options.policy_setup),
        "render_mode": options.render_mode,
        "sim_backend": "gpu" if is_gpu else "cpu",
        "sim_config": options.sim_config.model_dump(exclude_none=True),
        "sensor_configs": options.sensor_configs.model_dump() | size,
        "human_render_camera_configs": options.human_render_camera_configs.model_dump(exclude_none=True),
        # `env.max_steps` limits episodes.
        "max_episode_steps": 2**31 - 1,
    } | {name: value for name, value in optional.items() if value is not None}


@contextmanager
def _machine_errors(task: str) -> Iterator[None]:
    """Raise errors of missing libraries and drivers of this machine with a hint.

    Raises:
        MachineError: a file or a Vulkan driver is missing.
    """
    try:
        yield
    except FileNotFoundError as error:
        hint = "put the assets there that the documentation of the task names"
        raise MachineError(f"env.task={task}: {error.filename} is missing", hint) from error
    except RuntimeError as error:
        if not re.search(r"vk::|vulkan|render\w* device|physical device", str(error), re.IGNORECASE):
            raise
        raise MachineError(
            f"ManiSkill cannot render on this machine ({error})",
            "install libvulkan1 and a Vulkan driver that SAPIEN supports; it also needs one for obs_mode=state",
        ) from error


@contextmanager
def _without_observation(base: Any) -> Iterator[None]:
    """Render nothing: observations are rendered once per chunk of actions."""
    mode, base._obs_mode = base._obs_mode, "none"
    try:
        yield
    finally:
        base._obs_mode = mode


def _numbered_start_states(base: Any) -> int | None:
    """Return how many start states a task numbers (`episode_id`), as RLinf counts them; None if it does not."""
    if hasattr(base, "total_num_trials"):
        return int(base.total_num_trials)
    if hasattr(base, "xyz_configs") and hasattr(base, "quat_configs"):
        return len(base.xyz_configs) * len(base.quat_configs)
    return None


def _observation(base: Any, info: Mapping[str, Any], options: ManiSkillOptions) -> tuple[np.ndarray, np.ndarray]:
    """Return images, uint8 [robots, cameras, height, width, 3], and states, float32 [robots, S], of an env."""
    observed = base.get_obs(info)
    if not isinstance(observed, Mapping):
        state = _array(observed).astype(np.float32)
        return np.zeros((len(state), 0, 1, 1, 3), np.uint8), state
    cameras = _cameras(observed["sensor_data"], options)
    images = np.stack([_array(observed["sensor_data"][camera]["rgb"]) for camera in cameras], axis=1)
    if options.wrap_obs_mode == "default":
        return images.astype(np.uint8), _array(base.agent.robot.get_qpos()).astype(np.float32)
    return images.astype(np.uint8), _state(base, info, observed, options)


def _cameras(sensors: Mapping[str, Any], options: ManiSkillOptions) -> list[str]:
    """Return the names of the cameras that the policy observes.

    Raises:
        ConfigError: the task is no digital twin.
    """
    if options.wrap_obs_mode == "simple":
        return sorted(sensors, key=lambda name: (name != "base_camera", name))
    if TWIN_CAMERA not in sensors:
        raise ConfigError(
            f"env.options.wrap_obs_mode=default: the task has no camera {TWIN_CAMERA}",
            key="env.options",
            value="default",
            hint="set env.options.wrap_obs_mode=simple",
        )
    return [TWIN_CAMERA]


def _state(base: Any, info: Mapping[str, Any], observed: Mapping[str, Any], options: ManiSkillOptions) -> np.ndarray:
    flatten = importlib.import_module("mani_skill.utils.common").flatten_state_dict
    if options.use_full_state:
        mode, base._obs_mode = base._obs_mode, "state"
        try:
            state = base.get_obs(info)
        finally:
            base._obs_mode = mode
    else:
        parts = {name: value for name, value in observed.items() if name not in ("sensor_data", "sensor_param")}
        state = flatten(parts, use_torch=True, device=base.device)
    return _array(state).astype(np.float32)


def _instructions(base: Any, task: str, members: np.ndarray) -> list[str]:
    """Return the instructions of robots of an env: by default the words of the task's name."""
    if hasattr(base, "get_language_instruction"):
        texts = base.get_language_instruction()
        return [str(texts[member]) for member in members.tolist()]
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", re.sub(r"-v\d+$", "", task)).lower()
    return [words] * len(members)


def _array(value: Any) -> np.ndarray:
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
