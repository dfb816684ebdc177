"""Configuration of environments with a body in a room or at a table."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from quintet.config.native.env_section import InteractiveEnvSection, Rendered, register_env
from quintet.config.native.section import Count, NonNegative, NotEmpty, PositiveShare, RunsCode

VAGEN_BUILDER = "vagen.env.primitive_skill.maniskill.utils:build_env"
Resolution = Annotated[int, Field(ge=16, le=1024)]


@register_env("navigation.env:Navigation", "find an object in a house")
class NavigationConfig(InteractiveEnvSection, name="navigation"):
    """Walk through a house in first person to the object that an instruction names, as VAGEN's `navigation` does."""

    has_expert: ClassVar[bool] = True

    backend: Literal["rooms", "ai2thor"] = "rooms"
    """`rooms` are random furnished rooms that need no further package. `ai2thor` are the houses of AI2-THOR, which has
    no expert; it needs its package, its build and a GPU or a display."""
    eval_set: Literal["base", "common_sense", "complex_instruction", "visual_appearance", "long_horizon"] = "base"
    """What the instruction is like: `base` names the object, `common_sense` its use, `visual_appearance` its looks,
    `complex_instruction` says more than is needed, and with `long_horizon` the object is in another room."""
    num_tasks: PositiveInt | None = None
    """Number of different tasks of the set; VAGEN's sets have 60. Seeds repeat them, each split its own third. null
    gives each seed its own task, or uses all of AI2-THOR's tasks."""
    down_sample_ratio: PositiveShare = 1.0
    """Share of the tasks that is used: each `round(1 / ratio)`-th."""
    render: Rendered = "vision"
    """`vision` shows what the agent sees; `text` lists the visible objects with direction and distance."""
    resolution: Resolution = 255
    """Height and width of an image, pixels."""
    fov: Annotated[float, Field(ge=30.0, le=150.0)] = 100.0
    """Field of view, degrees."""
    multiview: bool = False
    """Add an image of the house from above."""
    step_length: Annotated[float, Field(gt=0.0, le=2.0)] = 0.5
    """Length of a move, meters."""
    success_threshold: PositiveFloat = 1.5
    """Maximum distance from the object at which the task is solved, meters on the floor."""
    success_reward: float = 10.0
    """Reward for reaching the object."""
    distance_reward: NonNegative = 0.0
    """Reward per meter by which an action brings the agent closer to the object."""
    max_steps: PositiveInt = 30
    """Actions after which the env truncates the episode."""
    max_objects: PositiveInt = 5
    """Number of visible objects in observations as text, the nearest first."""
    thor_tasks: NotEmpty | None = None
    """Directory with the tasks of AI2-THOR, `base.json` and so on, as in EmbodiedBench and in VAGEN's
    `vagen/env/navigation/datasets`."""
    thor_build: NotEmpty | None = None
    """Executable of AI2-THOR's build. null uses the build in `~/.ai2thor/releases`; Quintet never downloads one."""
    gpu_device: Count = 0
    """GPU that renders AI2-THOR."""

    @property
    def rendered_size(self) -> tuple[int, int]:
        return self.resolution, self.resolution

    @property
    def images_per_observation(self) -> int:
        return 2 if self.multiview else 1

    def data_paths(self) -> dict[str, str]:
        """See `EnvSection.data_paths`."""
        return {} if self.thor_tasks is None else {"thor_tasks": self.thor_tasks}

    def server_keys(self) -> tuple[str, ...]:
        """See `EnvSection.server_keys`."""
        return () if self.thor_build is None else ("thor_build",)


@register_env("primitive_skill.env:PrimitiveSkill", "move objects on a table by pick, place and push")
class PrimitiveSkillConfig(InteractiveEnvSection, name="primitive_skill"):
    """Move objects on a table with a robot arm's skills, as VAGEN's `primitive_skill` does."""

    has_expert: ClassVar[bool] = True

    backend: Literal["kinematic", "maniskill"] = "kinematic"
    """`kinematic` moves boxes without forces and needs no further package. `maniskill` is ManiSkill's simulation, which
    needs its package, VAGEN's tasks and a GPU with Vulkan."""
    task: Literal["AlignTwoCube", "PlaceTwoCube", "PutAppleInDrawer", "StackThreeCube"] = "AlignTwoCube"
    """Task (VAGEN's `env_id`)."""
    render: Rendered = "vision"
    """`vision` adds an image to workspace limits and positions; `text` does not."""
    resolution: Resolution = 300
    """Height and width of an image, pixels. ManiSkill's images are reduced or enlarged to it."""
    mask_success: bool = True
    """Leave out of the observation which stages of the task are solved, and what the arm holds."""
    max_steps: PositiveInt = 10
    """Skills after which the env truncates the episode."""
    stage_reward: NonNegative = 2.0
    """Reward for each solved stage; it is taken back if the stage is undone."""
    success_reward: float = 10.0
    """Total reward of all stages once the task is solved."""
    step_penalty: NonNegative = 0.1
    """Subtracted from the reward of each skill."""
    maniskill_builder: Annotated[NotEmpty, RunsCode()] = VAGEN_BUILDER
    """Function `module:name` that builds the task by its name with skills as actions, as VAGEN's does."""

    @property
    def rendered_size(self) -> tuple[int, int]:
        return self.resolution, self.resolution

    def server_keys(self) -> tuple[str, ...]:
        """See `EnvSection.server_keys`."""
        return () if self.maniskill_builder == VAGEN_BUILDER else ("maniskill_builder",)
