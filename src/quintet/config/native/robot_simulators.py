"""Options of the simulators of other packages, `env.options`."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from quintet.config.native.arm_simulator import ArmOptions
from quintet.config.native.section import Count, NotEmpty, Section

DATA_DIMENSION = 7
"""Dimensions of an action in OpenVLA's data sets: position, orientation and gripper."""
METAWORLD_DIMENSIONS = [0, 1, 2, 6]
"""Those that a robot of Meta-World executes: position and gripper."""
Cameras = Annotated[tuple[NotEmpty, ...], Field(strict=False)]


class LiberoOptions(Section):
    """LIBERO's task suites: a Panda arm at a table, simulated by robosuite. The last dimension of an action opens the
    gripper at -1 and closes it at 1."""

    cameras: Cameras = ("agentview", "robot0_eye_in_hand")
    """Cameras that the policy observes."""
    wait_steps: Count = 15
    """Actions without motion at the beginning of an episode, in which objects come to rest."""
    reset_gripper_open: bool = True
    """Open the gripper in these actions."""


class MetaWorldOptions(Section):
    """Tasks of Meta-World: a Sawyer arm at a table, simulated by MuJoCo."""

    reward_mode: Literal["success", "dense"] = "success"
    """`success` rewards each action after which the task is solved with 1; `dense` is Meta-World's reward, 0 to 10."""
    wait_steps: Count = 16
    """Actions without motion at the beginning of an episode, in which objects come to rest."""
    trials: PositiveInt | None = None
    """Start states per task; null uses RLinf's numbers: 20 in the suite `metaworld_45_ood`, otherwise 10."""


class RobosuiteOptions(Section):
    """Tasks of robosuite."""

    robots: NotEmpty = "Panda"
    """Robot, by robosuite's name."""
    controller: Annotated[str | None, Field(pattern=r"^\w+$")] = None
    """Composite controller by robosuite's name, such as `BASIC`; null uses the robot's default."""
    cameras: Cameras = ("agentview", "robot0_eye_in_hand")
    """Cameras that the policy observes."""
    control_frequency: PositiveFloat = 20.0
    """Actions per second of simulated time."""
    reward_shaping: bool = False
    """Use robosuite's dense reward; otherwise a solved task is rewarded only."""
    start_states: PositiveInt = 1_000_000
    """Number of distinct start states."""


class GymnasiumRoboticsOptions(Section):
    """Tasks of Gymnasium-Robotics with goals, such as Fetch."""

    goal_state: bool = True
    """Add the desired goal to the state. Images show it as well."""
    start_states: PositiveInt = 1_000_000
    """Number of distinct start states."""


class SimulationFrequencies(Section):
    """Frequencies of ManiSkill, Hz; null uses those of the task."""

    sim_freq: PositiveInt | None = None
    """Steps of physics per second."""
    control_freq: PositiveInt | None = None
    """Actions per second."""


class ShaderConfig(Section):
    """Rendering of ManiSkill's sensors."""

    shader_pack: NotEmpty = "default"
    """`minimal`, `default`, or ray tracing: `rt`, `rt-fast`."""


class HumanCameraConfig(ShaderConfig):
    """Pictures for people; null uses the size of the task."""

    width: PositiveInt | None = None
    """Pixels."""
    height: PositiveInt | None = None
    """Pixels."""


class ManiSkillOptions(Section):
    """Tasks of ManiSkill 3, simulated by SAPIEN."""

    policy_setup: NotEmpty = "widowx_bridge"
    """Robot and controller of the actions, as RLinf names them: `widowx_bridge`, `panda-qpos` (joint deltas),
    `panda-ee-dpos` (positions of the gripper), `panda-ee-target-dpos`, or another one with `panda` in it."""
    control_mode: NotEmpty | None = None
    """Controller by ManiSkill's name; null follows from `policy_setup`."""
    reward_mode: Literal["default", "raw", "only_success"] = "default"
    """`default` is RLinf's reward of put-on-plate tasks: 0.1 for a grasp, 0.1 for a lasting one, 1 for success. `raw`
    is ManiSkill's reward of the task, `only_success` is 1 when it is solved."""
    wrap_obs_mode: Literal["default", "simple"] = "default"
    """`default` observes the camera of the digital twins (`3rd_view_camera`, in the size of the task) and the positions
    of the joints; `simple` observes all cameras, `base_camera` first, and the whole state of `obs_mode`."""
    use_full_state: bool = False
    """With images, add the state of the objects (`simple` only)."""
    obs_mode: NotEmpty | None = None
    """ManiSkill's mode of observation: `state` has no images, `rgb` has. null is `rgb+segmentation`, or `rgb` for
    `simple`."""
    sim_backend: Literal["auto", "cpu", "gpu"] = "auto"
    """`gpu` simulates all robots together, `cpu` one after the other; `auto` is `gpu` where CUDA works."""
    render_mode: Literal["rgb_array", "sensors", "all"] = "rgb_array"
    """Pictures for people: the task's camera for people, the sensors, or all of them."""
    sim_config: SimulationFrequencies = SimulationFrequencies()
    """Frequencies."""
    sensor_configs: ShaderConfig = ShaderConfig()
    """Sensors."""
    human_render_camera_configs: HumanCameraConfig = HumanCameraConfig()
    """Pictures for people."""
    obj_set: NotEmpty | None = None
    """Objects of RLinf's tasks: `train`, `test` or `all`; null leaves it to the task."""
    use_multiple_plates: bool | None = None
    """Use several plates in RLinf's tasks; null leaves it to the task."""
    start_states: PositiveInt = 1_000_000
    """Number of distinct start states of tasks that do not number them."""


OPTIONS: dict[str, type[Section]] = {
    "arm": ArmOptions,
    "libero": LiberoOptions,
    "maniskill": ManiSkillOptions,
    "metaworld": MetaWorldOptions,
    "robosuite": RobosuiteOptions,
    "gymnasium_robotics": GymnasiumRoboticsOptions,
}
"""Class of `env.options` by simulator; those of other packages and of users check their own."""


def option_errors(simulator: str, options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the dotted name of each option that a simulator lacks, or whose value it does not take, and the reason."""
    options_class = OPTIONS.get(simulator)
    if options_class is None:
        return
    try:
        options_class.model_validate(dict(options))
    except ValidationError as error:
        for problem in error.errors():
            is_unknown = problem["type"] == "extra_forbidden"
            valid = ", ".join(options_class.model_fields)
            reason = f"{simulator} has no such option, but {valid}" if is_unknown else problem["msg"]
            yield ".".join(map(str, problem["loc"])), reason
