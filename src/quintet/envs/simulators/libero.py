"""LIBERO's task suites (`hf-libero` 0.1, or `libero` with robosuite 1.4)."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import yaml

from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.robot_simulators import LiberoOptions
from quintet.envs.simulators.headless import select_renderer
from quintet.envs.simulators.registry import simulator_options
from quintet.envs.simulators.robosuite import camera_image, proprioception
from quintet.envs.simulators.separate_robots import RobotTask, SeparateRobots, select_tasks, suite_choice
from quintet.errors import MachineError
from quintet.seeds import derive_seed

SUITES: Final = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90", "libero_130")
CONFIG_DIRECTORY = "LIBERO_CONFIG_PATH"
"""Environment variable with the directory of LIBERO's `config.yaml`."""
ASSETS_SOURCE = "the folder `assets` of LIBERO's repository, or the Hugging Face data set lerobot/libero-assets"


def build_libero(config: SimulatorConfig, num_robots: int, seed: int) -> SeparateRobots:
    """Return the tasks of `env.task_suite`, which is `libero_10` by default.

    Raises:
        ConfigError: the suite, the task or an option is unknown.
        MachineError: a file of LIBERO is missing, its configuration cannot be written, or nothing renders without a
            display.
    """
    options = cast("LiberoOptions", simulator_options(config, LiberoOptions))
    name = suite_choice(config.task_suite, SUITES, "libero_10")
    select_renderer()
    paths = _prepare_paths()
    # LIBERO prints while it is imported.
    with contextlib.redirect_stdout(sys.stderr):
        _check_assets(paths)
        suite = LiberoSuite(name)
        size = (config.camera_height, config.camera_width)

        def build(task: RobotTask) -> LiberoRobot:
            with contextlib.redirect_stdout(sys.stderr):
                return LiberoRobot(suite, task.name, options, seed, size)

        return SeparateRobots(select_tasks(suite.tasks, config.task, name), build, num_robots)


def _prepare_paths() -> Mapping[str, Any]:
    """Return LIBERO's paths, and write its configuration if there is none: importing LIBERO would ask for it on stdin.

    Raises:
        MachineError: the configuration cannot be written, or it names directories that do not exist.
    """
    directory = Path(os.environ.get(CONFIG_DIRECTORY, "~/.libero")).expanduser()
    file = directory / "config.yaml"
    try:
        if not file.exists():
            directory.mkdir(parents=True, exist_ok=True)
            # Other processes may do the same.
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(yaml.safe_dump(_installed_paths()), encoding="utf-8")
            part.replace(file)
        paths = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        hint = f"set {CONFIG_DIRECTORY} to a directory that can be written"
        raise MachineError(f"LIBERO's configuration {file}: {error.strerror}", hint) from error
    for key in ("bddl_files", "init_states"):
        if not Path(str(paths.get(key))).is_dir():
            message = f"{file}: {key} is {paths.get(key)!r}, which is no directory"
            raise MachineError(message, "delete the file; it is written again with the paths of the installed package")
    return cast("Mapping[str, Any]", paths)


def _installed_paths() -> dict[str, str]:
    """Return the paths of the installed package, under the names of LIBERO's configuration."""
    spec = importlib.util.find_spec("libero")
    locations = list(spec.submodule_search_locations or ()) if spec else []
    root = Path(locations[0]) / "libero"
    names = {"bddl_files": "bddl_files", "init_states": "init_files", "datasets": "../datasets", "assets": "assets"}
    return {"benchmark_root": str(root)} | {key: str(root / name) for key, name in names.items()}


def _check_assets(paths: Mapping[str, Any]) -> None:
    """
    Raises:
        MachineError: LIBERO's meshes and textures are not there, and its package cannot download them.
    """
    module = importlib.import_module("libero.libero")
    directory = Path(module.get_assets_path() if hasattr(module, "get_assets_path") else str(paths.get("assets")))
    if not directory.is_dir():
        raise MachineError(f"LIBERO's meshes and textures are missing: {directory}", f"put {ASSETS_SOURCE} there")


class LiberoSuite:
    """Tasks of a suite with their start states."""

    def __init__(self, name: str) -> None:
        """
        Raises:
            MachineError: a file of start states is missing.
        """
        self._benchmark = importlib.import_module("libero.libero.benchmark")
        names = self._benchmark.libero_suites if name == "libero_130" else [name]
        self._suites: dict[str, tuple[Any, int]] = {}
        """LIBERO's suite, and the number in it, of each task."""
        for suite in (self._benchmark.get_benchmark(suite_name)() for suite_name in names):
            for number in range(suite.get_num_tasks()):
                self._suites.setdefault(suite.get_task(number).name, (suite, number))
        self._start_states = {task: self._load(suite, number) for task, (suite, number) in self._suites.items()}
        self.tasks = [
            RobotTask(task, suite.get_task(number).language, len(self._start_states[task]))
            for task, (suite, number) in self._suites.items()
        ]

    @staticmethod
    def _load(suite: Any, number: int) -> Any:
        try:
            return suite.get_task_init_states(number)
        except FileNotFoundError as error:
            hint = "put the folder `init_files` of LIBERO's repository there"
            raise MachineError(f"LIBERO's start states are missing: {error.filename}", hint) from error

    def start_state(self, task: str, trial: int) -> np.ndarray:
        """Return the state of MuJoCo, float64 [S]."""
        return np.asarray(self._start_states[task][trial])

    def task_file(self, task: str) -> str:
        """Return the BDDL file of a task."""
        suite, number = self._suites[task]
        return str(suite.get_task_bddl_file_path(number))


class LiberoRobot:
    """A Panda arm: actions move the gripper's position and orientation, -1 to 1, and open (-1) or close (1) it."""

    action_dim = 7
    control_frequency = 20.0

    def __init__(
        self, suite: LiberoSuite, task: str, options: LiberoOptions, seed: int, camera_size: tuple[int, int]
    ) -> None:
        """
        Raises:
            MachineError: the task's file is missing.
        """
        self._suite, self._task, self._options, self._seed = suite, task, options, seed
        self._camera_size = camera_size
        file = suite.task_file(task)
        if not Path(file).is_file():
            hint = "put the folder `bddl_files` of LIBERO's repository there"
            raise MachineError(f"the task's file is missing: {file}", hint)
        self._env: Any = importlib.import_module("libero.libero.envs").OffScreenRenderEnv(
            bddl_file_name=file,
            # Cameras are rendered when the policy observes, not after each action.
            use_camera_obs=False,
            control_freq=self.control_frequency,
            # `env.max_steps` limits episodes.
            ignore_done=True,
        )
        self._observed: Mapping[str, np.ndarray] = {}

    def reset(self, trial: int) -> None:
        self._env.seed(derive_seed("libero", self._task, self._seed, trial) % 2**32)
        self._env.reset()
        self._observed = self._env.set_init_state(self._suite.start_state(self._task, trial))
        still = np.zeros(self.action_dim)
        still[-1] = -1 if self._options.reset_gripper_open else 0
        for _ in range(self._options.wait_steps):
            self._observed = self._env.step(still)[0]

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        self._observed, reward, solved, _ = self._env.step(action.astype(np.float64))
        return float(reward), bool(solved)

    def observe(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the cameras, and the gripper's position, m, axis-angle, rad, and fingers, m, float32 [8].

        Images are turned by 180°, as in the data sets of OpenVLA: MuJoCo's are upside down.
        """
        images = [camera_image(self._env.sim, camera, self._camera_size)[:, ::-1] for camera in self._options.cameras]
        return np.stack(images), proprioception(self._observed)

    def render(self) -> np.ndarray:
        return np.ascontiguousarray(camera_image(self._env.sim, "agentview", self._camera_size)[:, ::-1])

    def close(self) -> None:
        self._env.close()
