"""Houses of AI2-THOR (Kolve et al. 2017), with the tasks of EmbodiedBench, as VAGEN uses them."""

from __future__ import annotations

import importlib.util
import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from quintet.config.native.embodied_envs import NavigationConfig
from quintet.envs.env import UnsolvableError
from quintet.envs.navigation.house import MOVES, TILT_DEGREES, TURN_DEGREES, VisibleObject, direction_of, floor_angle
from quintet.errors import ConfigError

KEY = "env.backend"
REQUIREMENTS: Final = (
    "AI2-THOR needs its package (`pip install ai2thor`), its build for CloudRendering (in ~/.ai2thor/releases, where"
    " ai2thor's Controller downloads it with platform=CloudRendering and download_only=True), and a GPU with Vulkan; or"
    " env.thor_build=EXECUTABLE and a display"
)
THOR_ACTIONS = {
    "moveahead": "MoveAhead",
    "moveback": "MoveBack",
    "moveright": "MoveRight",
    "moveleft": "MoveLeft",
    "rotateright": "RotateRight",
    "rotateleft": "RotateLeft",
    "lookup": "LookUp",
    "lookdown": "LookDown",
}
"""AI2-THOR's names of the actions."""
VISIBILITY_METERS, GRID_METERS, TIMEOUT_SECONDS = 10, 0.1, 300.0
"""As in VAGEN."""

_idle: dict[NavigationConfig, list[Any]] = {}
"""Controllers without an episode, which take seconds to start."""


class ThorHouse:
    """See `House`. Its controller is used for one episode after another."""

    def __init__(self, config: NavigationConfig) -> None:
        """
        Raises:
            ConfigError: the package, the build or the tasks are missing.
        """
        self._config = config
        self._tasks = load_tasks(config)
        self.num_tasks: int | None = len(self._tasks)
        idle = _idle.get(config)
        self._controller: Any = idle.pop() if idle else _build_controller(config)

    def start(self, task: int) -> None:
        self._task = self._tasks[task]
        self.instruction = str(self._task["instruction"])
        self._event = self._controller.reset(scene=self._task["scene"])
        if self._config.multiview:
            pose = dict(self._act("GetMapViewCameraProperties", raise_for_failure=True).metadata["actionReturn"])
            pose |= {"orthographic": True, "skyboxColor": "white"}
            self._act("AddThirdPartyCamera", **pose, raise_for_failure=True)
        pose = self._task["agentPose"]
        rotation = {"x": 0, "y": pose["rotation"], "z": 0}
        self._act(
            "Teleport", position=dict(pose["position"]), rotation=rotation, horizon=pose["horizon"], standing=True
        )

    def act(self, action: str) -> bool:
        if action in MOVES:
            event = self._act(THOR_ACTIONS[action], moveMagnitude=self._config.step_length)
        else:
            event = self._act(THOR_ACTIONS[action], degrees=TILT_DEGREES if "look" in action else TURN_DEGREES)
        return bool(event.metadata["lastActionSuccess"])

    @property
    def distance(self) -> float:
        dx, dz = self._offset(self._task["target_position"])
        return math.hypot(dx, dz)

    def visible_objects(self) -> list[VisibleObject]:
        heading = self._event.metadata["agent"]["rotation"]["y"]
        visible = []
        for entry in self._event.metadata["objects"]:
            if entry.get("visible", False):
                dx, dz = self._offset(entry["position"])
                direction = direction_of(floor_angle(dx, dz) - heading)
                visible.append(VisibleObject(str(entry["objectType"]), direction, math.hypot(dx, dz)))
        return sorted(visible, key=lambda each: each.distance)

    def render(self) -> np.ndarray:
        return np.ascontiguousarray(self._event.frame[..., :3], np.uint8)

    def render_map(self) -> np.ndarray:
        return np.ascontiguousarray(self._event.third_party_camera_frames[0][..., :3], np.uint8)

    def expert_action(self) -> str:
        raise UnsolvableError("AI2-THOR has no expert: train an existing model without a warm start")

    def close(self) -> None:
        """Keep the controller for another episode."""
        controller, self._controller = self._controller, None
        if controller is not None:
            _idle.setdefault(self._config, []).append(controller)

    def _act(self, name: str, **arguments: Any) -> Any:
        self._event = self._controller.step(action=name, **arguments)
        return self._event

    def _offset(self, position: dict[str, float]) -> tuple[float, float]:
        agent = self._event.metadata["agent"]["position"]
        return position["x"] - agent["x"], position["z"] - agent["z"]


@lru_cache(maxsize=16)
def load_tasks(config: NavigationConfig) -> list[dict[str, Any]]:
    """Return the tasks of `env.eval_set`.

    Raises:
        ConfigError: `env.thor_tasks` is not set, or has no such file.
    """
    name = f"{config.eval_set}.json"
    hint = "set env.thor_tasks to a directory with EmbodiedBench's navigation tasks, in VAGEN's repository"
    hint += " vagen/env/navigation/datasets"
    if config.thor_tasks is None:
        raise ConfigError("env.backend=ai2thor needs tasks", key="env.thor_tasks", value=None, hint=hint)
    try:
        tasks: list[dict[str, Any]] = json.loads(
            (Path(config.thor_tasks).expanduser() / name).read_text(encoding="utf-8")
        )["tasks"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"env.thor_tasks = {config.thor_tasks!r} has no readable {name}: {error}"
        raise ConfigError(message, key="env.thor_tasks", value=config.thor_tasks, hint=hint) from error
    return tasks


def find_build(config: NavigationConfig) -> dict[str, Any]:
    """Return the arguments that select AI2-THOR's build, without a download.

    Raises:
        ConfigError: the package or the build is missing.
    """
    if importlib.util.find_spec("ai2thor") is None:
        raise ConfigError("env.backend=ai2thor: ai2thor is not installed", key=KEY, value="ai2thor", hint=REQUIREMENTS)
    if config.thor_build is not None:
        if not Path(config.thor_build).expanduser().is_file():
            message = f"env.thor_build = {config.thor_build!r} is no file"
            raise ConfigError(message, key="env.thor_build", value=config.thor_build, hint=REQUIREMENTS)
        return {"local_executable_path": str(Path(config.thor_build).expanduser())}
    from ai2thor.build import COMMIT_ID
    from ai2thor.platform import CloudRendering

    # the controller downloads a build that is not in this directory
    directory = Path.home() / ".ai2thor/releases" / f"thor-CloudRendering-{COMMIT_ID}"
    if not directory.is_dir():
        message = f"env.backend=ai2thor: there is no build in {directory}, and Quintet downloads none"
        raise ConfigError(message, key=KEY, value="ai2thor", hint=REQUIREMENTS)
    return {"platform": CloudRendering, "commit_id": COMMIT_ID}


def _build_controller(config: NavigationConfig) -> Any:
    build = find_build(config)
    from ai2thor.controller import Controller

    return Controller(
        agentMode="default",
        gridSize=GRID_METERS,
        visibilityDistance=VISIBILITY_METERS,
        renderDepthImage=False,
        renderInstanceSegmentation=False,
        width=config.resolution,
        height=config.resolution,
        fieldOfView=config.fov,
        gpu_device=config.gpu_device,
        server_timeout=TIMEOUT_SECONDS,
        server_start_timeout=TIMEOUT_SECONDS,
        **build,
    )
