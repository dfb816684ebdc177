"""Stand-ins for packages of simulators, with the signatures, names and shapes of the packages, without physics."""

from __future__ import annotations

import sys
from collections import namedtuple
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
import torch


def install(patch: pytest.MonkeyPatch, **modules: SimpleNamespace) -> None:
    """Make modules importable; `__` in a name is a dot."""
    for name, values in modules.items():
        module = ModuleType(name.replace("__", "."))
        module.__dict__.update(vars(values), __path__=[])
        patch.setitem(sys.modules, module.__name__, module)


class Sim:
    """robosuite's `MjSim`: images are upside down."""

    def render(self, camera_name: str, width: int, height: int) -> np.ndarray:
        image = np.zeros((height, width, 3), np.uint8)
        image[0, 0] = {"agentview": 10, "robot0_eye_in_hand": 20, "frontview": 30}[camera_name]
        return image


def robosuite_observation(position: float) -> dict[str, np.ndarray]:
    return {
        "robot0_eef_pos": np.full(3, position),
        "robot0_eef_quat": np.array([0.0, 0.0, np.sin(0.25), np.cos(0.25)]),
        "robot0_gripper_qpos": np.array([0.04, -0.04]),
        "bowl_to_robot0_eef_pos": np.full(3, 99.0),
    }


class LiberoEnv:
    """`libero.libero.envs.OffScreenRenderEnv`, solved by an action whose first dimension is above 0.8."""

    made: ClassVar[list[LiberoEnv]] = []

    def __init__(self, bddl_file_name: str, **arguments: Any) -> None:
        assert arguments == {"use_camera_obs": False, "control_freq": 20.0, "ignore_done": True}
        assert Path(bddl_file_name).is_file()
        self.task, self.sim, self.actions, self.is_open = Path(bddl_file_name).stem, Sim(), [], True
        self.made.append(self)

    def seed(self, seed: int) -> None:
        self.seeded = seed

    def reset(self) -> dict[str, np.ndarray]:
        self.actions = []
        return robosuite_observation(0.0)

    def set_init_state(self, state: np.ndarray) -> dict[str, np.ndarray]:
        self.position = float(state[0])
        return robosuite_observation(self.position)

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, dict[str, Any]]:
        self.actions.append(np.array(action))
        if action[0] == -0.5:
            raise ValueError("the simulation is unstable")
        solved = bool(action[0] > 0.8)
        return robosuite_observation(self.position), float(solved), solved, {}

    def close(self) -> None:
        self.is_open = False


Task = namedtuple("Task", "name language problem problem_folder bddl_file init_states_file")


class LiberoBenchmark:
    """`libero.libero.benchmark.Benchmark` of two tasks with 2 and 3 start states."""

    folder: Path
    suite = "libero_spatial"

    def get_num_tasks(self) -> int:
        return 2

    def get_task(self, number: int) -> Task:
        name = f"{self.suite}_task_{number}"
        return Task(name, name.replace("_", " "), "Libero", self.suite, f"{name}.bddl", f"{name}.pruned_init")

    def get_task_bddl_file_path(self, number: int) -> str:
        return str(self.folder / "bddl_files" / self.get_task(number).bddl_file)

    def get_task_init_states(self, number: int) -> np.ndarray:
        (self.folder / "init_files" / self.get_task(number).init_states_file).open().close()
        return np.arange(2 + number)[:, None] + 10.0 * number


LIBERO_FILES = ("bddl_files", "init_files", "assets")


def install_libero(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Install LIBERO with its files below `folder`, without its configuration."""
    for directory in LIBERO_FILES:
        (folder / directory).mkdir(exist_ok=True)
    patch.setattr(LiberoBenchmark, "folder", folder, raising=False)
    names = ("libero_spatial", "libero_goal", "libero_10")
    suites = {name: type(name, (LiberoBenchmark,), {"suite": name}) for name in names}
    for suite in suites.values():
        for task in map(suite().get_task, range(2)):
            (folder / "bddl_files" / task.bddl_file).touch()
            (folder / "init_files" / task.init_states_file).touch()
    benchmark = SimpleNamespace(libero_suites=list(suites), get_benchmark=suites.__getitem__)
    core = SimpleNamespace(get_assets_path=lambda: str(folder / "assets"))
    envs = SimpleNamespace(OffScreenRenderEnv=LiberoEnv)
    patch.setattr(LiberoEnv, "made", [])
    install(
        patch,
        libero=SimpleNamespace(),
        libero__libero=core,
        libero__libero__benchmark=benchmark,
        libero__libero__envs=envs,
    )


class ManiSkillEnv(gymnasium.Env):
    """ManiSkill's `BaseEnv` of one to many robots, which counts actions; a third action of 1 is a success."""

    controllers = "pd_"
    """Beginning of the names of the robot's controllers."""

    def __init__(self, num_envs: int, **arguments: Any) -> None:
        assert arguments["control_mode"].startswith(self.controllers)
        self.num_envs, self.arguments, self._obs_mode = num_envs, arguments, arguments["obs_mode"]
        self.device, self.control_freq = torch.device("cpu"), 5
        self.single_action_space = gymnasium.spaces.Box(-1, 1, (7,))
        self.observation_space = self.action_space = gymnasium.spaces.Dict()
        self.agent = SimpleNamespace(robot=SimpleNamespace(get_qpos=lambda: self.places[:, None].repeat(1, 8)))
        self.places, self.resets, self.actions = torch.zeros(num_envs), [], []
        self.renders = 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.resets.append((seed, options))
        robots = options.get("env_idx", torch.arange(self.num_envs))
        places = options.get("episode_id", torch.full((len(robots),), float(seed % 1000)))
        self.places[robots] = places.to(self.places)
        return self.get_obs({}), {"reconfigure": False}

    def step(self, actions: torch.Tensor) -> tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        self.actions.append(actions.numpy().copy())
        success, grasped = actions[:, 2] == 1, actions[:, 6] == -1
        info = {"success": success, "fail": actions[:, 2] == -1, "is_src_obj_grasped": grasped}
        info["consecutive_grasp"] = torch.zeros(self.num_envs, dtype=torch.bool)
        never = torch.zeros(self.num_envs, dtype=torch.bool)
        return self.get_obs(info), torch.full((self.num_envs,), 0.5), success, never, info

    def get_obs(self, info: dict[str, Any]) -> Any:
        if self._obs_mode == "none":
            return {}
        self.renders += 1
        if self._obs_mode == "state":
            return self.places[:, None].repeat(1, 3)
        rgb = (self.places[:, None, None, None] + torch.zeros(1, 4, 6, 3)).to(torch.uint8)
        sensors = {"hand_camera": {"rgb": rgb + 1}, "base_camera": {"rgb": rgb}, "3rd_view_camera": {"rgb": rgb + 2}}
        return {"agent": {"qpos": self.places[:, None]}, "extra": {}, "sensor_param": {}, "sensor_data": sensors}

    def render(self) -> torch.Tensor:
        return (self.places[:, None, None, None] + torch.zeros(1, 8, 8, 3)).to(torch.uint8)


class BridgeEnv(ManiSkillEnv):
    """Digital twin, which numbers its start states."""

    controllers = "arm_pd_"
    xyz_configs, quat_configs = np.zeros((6, 2, 3)), np.zeros((4, 2, 4))

    def get_language_instruction(self) -> list[str]:
        return [f"put carrot on plate {int(place)}" for place in self.places]


def install_maniskill(patch: pytest.MonkeyPatch, folder: Path) -> list[ManiSkillEnv]:
    """Install ManiSkill, and return a list of the envs that are made. The bridge's assets are `folder / "bridge"`."""
    made: list[ManiSkillEnv] = []
    tasks = {"PutCarrotOnPlateInScene-v1": (BridgeEnv, ["bridge"]), "PickCube-v1": (ManiSkillEnv, [])}

    def make(id: str, **arguments: Any) -> ManiSkillEnv:  # noqa: A002 - gymnasium's name
        made.append(tasks[id][0](**arguments))
        return made[-1]

    specs = {name: SimpleNamespace(asset_download_ids=assets) for name, (_, assets) in tasks.items()}
    source = SimpleNamespace(output_dir=folder, target_path="bridge")
    assets = SimpleNamespace(
        DATA_GROUPS={},
        DATA_SOURCES={"bridge": source},
        is_data_source_downloaded=lambda name: (folder / name).exists(),
    )
    flatten = lambda parts, **_: torch.cat([value for part in parts.values() for value in part.values()], 1)  # noqa: E731
    patch.setattr(gymnasium, "make", make)
    install(
        patch,
        mani_skill=SimpleNamespace(),
        mani_skill__envs=SimpleNamespace(),
        mani_skill__utils=SimpleNamespace(),
        mani_skill__utils__registration=SimpleNamespace(REGISTERED_ENVS=specs),
        mani_skill__utils__assets=assets,
        mani_skill__utils__common=SimpleNamespace(flatten_state_dict=flatten),
    )
    return made


def write_packages(directory: Path) -> None:
    """Write packages that stand in for LIBERO and ManiSkill, for other processes with `directory` in `PYTHONPATH`."""
    (directory / "mani_skill/bridge").mkdir(parents=True)
    for name in LIBERO_FILES:
        (directory / "libero/libero" / name).mkdir(parents=True)
    for package, call in (("libero", "libero({}, {} / 'libero')"), ("mani_skill", "maniskill({}, {})")):
        (directory / package / "__init__.py").write_text(
            "from pathlib import Path\n"
            "import pytest\n"
            "import robot_packages\n"
            f"robot_packages.install_{call.format('pytest.MonkeyPatch()', 'Path(__file__).parent')}\n"
        )
