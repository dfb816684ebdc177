"""Configuration of each environment."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from quintet.config.native.alfworld_env import AlfWorldConfig
from quintet.config.native.blackjack_env import BlackjackConfig
from quintet.config.native.embodied_envs import NavigationConfig, PrimitiveSkillConfig
from quintet.config.native.env_section import (
    ENVS,
    EnvProcessesConfig,
    EnvSection,
    EnvServiceConfig,
    InteractiveEnvSection,
    Processes,
    Rendered,
)
from quintet.config.native.env_section import register_env as _register
from quintet.config.native.package_envs import GymnasiumConfig, TextArenaConfig
from quintet.config.native.puzzle_envs import Game2048Config, PocketCubeConfig, SudokuConfig
from quintet.config.native.registry_union import RegistryUnion
from quintet.config.native.relations import RelationScoring
from quintet.config.native.section import Count, NonNegative, NotEmpty, PositiveShare, RunsCode, Section, Seed
from quintet.config.native.text_envs import (
    BanditConfig,
    CountdownConfig,
    QuestionsConfig,
    SearchQuestionsConfig,
    WebShopConfig,
)

__all__ = [
    "ENVS",
    "AlfWorldConfig",
    "BanditConfig",
    "BlackjackConfig",
    "CountdownConfig",
    "EnvProcessesConfig",
    "EnvSection",
    "EnvServiceConfig",
    "Game2048Config",
    "GymnasiumConfig",
    "InteractiveEnvSection",
    "NavigationConfig",
    "PocketCubeConfig",
    "PrimitiveSkillConfig",
    "Processes",
    "QuestionsConfig",
    "SearchQuestionsConfig",
    "SudokuConfig",
    "TextArenaConfig",
    "WebShopConfig",
]

Observed = Literal["grid", "grid_neighbors", "coordinates", "grid_coordinates"]
SOKOBAN_SYMBOLS = "#_O√XPS"
"""Symbols of wall, floor, target, box on target, box, player, player on target."""
TileSize = Annotated[int, Field(ge=4, le=256)]


@_register("frozenlake:FrozenLake", "cross the ice to the goal")
class FrozenLakeConfig(InteractiveEnvSection, name="frozenlake"):
    """Cross a frozen lake from a random start to a random goal without falling into a hole."""

    has_expert: ClassVar[bool] = True
    relation_scoring: ClassVar = RelationScoring(
        {"target": 0.7, "hole": 0.3},
        partial=True,
        symbols={
            "P": ("player",),
            "X": ("player", "hole"),
            "√": ("player", "target"),
            "O": ("hole",),
            "G": ("target",),
        },
    )

    size: Annotated[int, Field(ge=2, le=32)] = 4
    """Cells per side."""
    floor_density: PositiveShare = 0.8
    """Probability that a cell is frozen rather than a hole (RAGEN's `p`)."""
    slippery: bool = False
    """The ice sometimes moves the agent sideways."""
    success_rate: PositiveShare = 1.0 / 3.0
    """Probability on slippery ice that a move has the intended direction; the rest is split between the two sides."""
    goal_reward: float = 1.0
    """Reward of the action that reaches the goal."""
    max_steps: PositiveInt = 100
    """Actions after which the env truncates the episode."""
    observation: Observed = "grid_neighbors"
    """`grid` shows the map; `grid_neighbors` adds a line with the cells next to the player, `grid_coordinates` the rows
    and columns of start, goal, player and holes; `coordinates` shows only these."""
    render: Rendered = "text"
    """`vision` shows an image instead of text."""
    tile_size: TileSize = 32
    """Height and width of a cell in the image, pixels."""

    @property
    def rendered_size(self) -> tuple[int, int] | None:
        return self.size * self.tile_size, self.size * self.tile_size


@_register("sokoban:Sokoban", "push boxes onto targets")
class SokobanConfig(InteractiveEnvSection, name="sokoban"):
    """Push every box onto a target."""

    ranges = (("min_solution_steps", "max_solution_steps"),)
    has_expert: ClassVar[bool] = True
    relation_scoring: ClassVar = RelationScoring(
        {"target": 0.5, "box": 0.5},
        symbols={
            "P": ("player",),
            "S": ("player", "target"),
            "O": ("target",),
            "X": ("box",),
            "√": ("target", "box"),
        },
    )

    width: Annotated[int, Field(ge=4, le=16)] = 6
    """Cells, including walls."""
    height: Annotated[int, Field(ge=4, le=16)] = 6
    """Cells, including walls."""
    boxes: Annotated[int, Field(ge=1, le=6)] = 1
    """Number of boxes and of targets."""
    max_steps: PositiveInt = 100
    """Actions after which the env truncates the episode."""
    pull_steps: PositiveInt = 30
    """Moves of the reverse play that generates a puzzle from its solution."""
    min_solution_pushes: PositiveInt = 1
    """Minimum total distance of the boxes to their nearest targets, in pushes; other puzzles are discarded."""
    min_solution_steps: PositiveInt | None = None
    """Minimum number of actions of a shortest solution; other puzzles are discarded. null does not search for one."""
    max_solution_steps: PositiveInt | None = None
    """Maximum number of actions of a shortest solution, in the same way."""
    step_reward: float = -0.1
    """Reward of every action."""
    box_reward: float = 1.0
    """Reward of each box that an action moves onto a target; subtracted for a box that leaves one."""
    solved_reward: float = 10.0
    """Reward of the action after which all boxes are on targets. The three defaults are those of gym-sokoban."""
    symbols: Annotated[str, Field(pattern=r"^\S{7}$")] = SOKOBAN_SYMBOLS
    """Characters of text for wall, floor, target, box on target, box, player, and player on target."""
    observation: Observed = "grid_neighbors"
    """`grid` shows the room; `grid_neighbors` adds a line with the cells next to the player, `grid_coordinates` the
    rows and columns of player, boxes and targets; `coordinates` shows only these."""
    render: Rendered = "text"
    """`vision` shows an image instead of text."""
    tile_size: TileSize = 32
    """Height and width of a cell in the image, pixels."""

    @property
    def rendered_size(self) -> tuple[int, int] | None:
        return self.height * self.tile_size, self.width * self.tile_size

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if len(set(self.symbols)) < len(self.symbols):
            yield f"`symbols` = {self.symbols} has a character twice", f"symbols={SOKOBAN_SYMBOLS}"


@_register("svg.env:SvgEnv", "draw an image as SVG code", requires=("resvg_py",), extra="svg")
class SvgConfig(InteractiveEnvSection, name="svg"):
    """Write SVG code that reproduces an image; each attempt is rendered and scored by its similarity."""

    has_expert: ClassVar[bool] = True
    dataset: str | None = None
    """SVG file, or Parquet, Arrow or JSON Lines file with a column `svg` or `Svg`, or directory with such files; null
    draws simple icons from the seed."""
    max_shapes: Annotated[int, Field(ge=1, le=16)] = 2
    """Maximum number of shapes of an icon, if `dataset` is null."""
    image_size: Annotated[int, Field(ge=16, le=1024)] = 224
    """Height and width of images, pixels."""
    render: Literal["vision"] = "vision"
    """Observations are images."""
    pixel_weight: NonNegative = 1.0
    """Weight of 1 − mean squared error of the RGB values."""
    structural_weight: NonNegative = 1.0
    """Weight of the intersection over union of the edges (Canny, thresholds 100 and 200)."""
    color_weight: NonNegative = 0.0
    """Weight of exp(−mean squared difference in CIELAB / 1000)."""
    code_weight: NonNegative = 0.0
    """Weight of the length of the code: 0.8 for that of the target, up to 1 for shorter code, less for longer code."""
    dino_weight: NonNegative = 0.0
    """Weight of the similarity of DINOv2 features; above 0 it needs `dino_path`."""
    dino_path: str | None = None
    """Directory of a DINOv2 model in the format of transformers, or its name in the local cache of the Hugging Face
    hub."""
    dino_device: NotEmpty = "cpu"
    """Device of the DINOv2 model: `cpu`, `cuda:1`."""
    dreamsim_weight: NonNegative = 0.0
    """Weight of the similarity by DreamSim; above 0 it needs `dreamsim_path` and the package `dreamsim`."""
    dreamsim_path: str | None = None
    """Directory of DreamSim's weights (`ensemble`)."""
    dreamsim_device: NotEmpty = "cpu"
    """Device of the DreamSim model: `cpu`, `cuda:1`."""
    format_penalty: float = 0.0
    """Reward of a response without SVG code, or with code that cannot be rendered."""
    success_score: PositiveShare = 0.9
    """Share of the score of the target's own code that is a success."""
    accumulate_scores: bool = False
    """Reward each attempt by its score, and let every episode continue, as VAGEN does. `false` rewards the difference
    from the score of the last valid attempt, so that an episode earns the score of its last one, and a success ends
    it."""

    @property
    def rendered_size(self) -> tuple[int, int]:
        return self.image_size, self.image_size

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each score that counts, by its name."""
        names = ("pixel", "structural", "color", "code", "dino", "dreamsim")
        weights = {name: float(getattr(self, f"{name}_weight")) for name in names}
        return {name: weight for name, weight in weights.items() if weight}

    def data_paths(self) -> dict[str, str]:
        """See `EnvSection.data_paths`."""
        keys = ("dataset", *(f"{name}_path" for name in ("dino", "dreamsim") if name in self.weights))
        return {key: getattr(self, key) for key in keys if getattr(self, key) is not None}


@_register("custom_env:build_custom_env", "your own env class")
class CustomEnvConfig(InteractiveEnvSection, name="custom"):
    """Custom env class."""

    runs_external_code: ClassVar[bool] = True
    relation_scoring: ClassVar = RelationScoring()

    path: Annotated[str, RunsCode()]
    """Env class or factory: `file.py:Class`, `module:Class`, or a name that a package registers as `quintet.envs`. See
    `docs/envs.md` for its methods."""
    arguments: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Keyword arguments; validated by the class's `config_class`, if it has one, and passed as its instance."""
    processes: Processes = EnvProcessesConfig()
    """Run envs in separate processes: a section, `true` for its defaults, or a number of processes. null runs them in
    the main process, where an env that hangs or dies stops the run."""


class PromptsConfig(EnvSection, name="prompts"):
    """Prompt from a data file and one response, which a reward function scores."""

    reads_prompts: ClassVar[bool] = True


class SimulatorConfig(EnvSection, name="simulator"):
    """Robot in a vectorized simulator, controlled in chunks of continuous actions."""

    is_simulator: ClassVar[bool] = True

    simulator: Annotated[NotEmpty, RunsCode()] = "libero"
    """Simulator: a name that `quintet list` shows, or your own class or function as `file.py:name` or `module:name`."""
    task_suite: str | None = None
    """Task suite of the simulator; null uses its default."""
    task: str | None = None
    """Only this task of the suite; null uses all."""
    options: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Further options of the simulator, which its documentation lists."""
    max_steps: PositiveInt = 512
    """Actions after which an episode is truncated."""
    steps_per_epoch: PositiveInt | None = None
    """Actions of each robot in an epoch, in which several episodes fit with `auto_reset`; null uses `max_steps`."""
    auto_reset: bool = False
    """Start another episode at the end of the chunk in which an episode ended. Otherwise the robot does not move any
    more until the next rollout."""
    ignore_terminations: bool = False
    """Continue episodes to `max_steps` after the task is solved."""
    relative_reward: bool = False
    """Use the difference from the reward of the previous action as the reward, so that a solved task pays once."""
    reward_coefficient: float = 1.0
    """Factor on every reward of the simulator."""
    step_penalty: NonNegative = 0.0
    """Subtracted from the reward of every action."""
    fixed_start_states: bool = True
    """Start all episodes of a group in a rollout from the same start state, also after automatic resets. `false` draws
    a start state for every episode."""
    start_state_order: Literal["random", "ordered"] = "random"
    """Start states of training: `random` draws them with replacement, `ordered` uses all of them in a shuffled order
    before one is repeated. Validation is always ordered."""
    start_state: Count | None = None
    """Use only the start state with this number; null uses all."""
    hold_out: bool = True
    """Use each start state in training, in validation or for demonstrations, never in two of them. `false` uses all of
    them for each, as the benchmarks of LIBERO do."""
    environments: PositiveInt | None = None
    """Number of robots that are simulated at the same time; null uses the number of episodes of a step."""
    seed: Seed = 0
    """Random seed of the simulator and of its start states."""
    camera_height: PositiveInt = 256
    """Rendered height, pixels."""
    camera_width: PositiveInt = 256
    """Rendered width, pixels."""
    pipeline_stages: PositiveInt = 1
    """Parts of the robots, of which one is simulated while the policy computes the actions of the others. They overlap
    if `processes` or `service` is set."""
    epochs: PositiveInt = 1
    """Number of passes over all environments in a step."""
    processes: Count = 0
    """Worker processes, each of which simulates a share of the robots of every stage. 0 simulates in the main process,
    where a simulator that hangs or dies stops the run."""
    reset_timeout_seconds: PositiveFloat = 300.0
    """Time limit of building the simulators of a worker process and of a reset of its robots; then the process is
    killed and the episodes of its robots have failed."""
    chunk_timeout_seconds: PositiveFloat = 120.0
    """Time limit of a chunk of actions in a worker process, with the images after it; then the process is killed and
    the episodes of its robots have failed."""
    service: EnvServiceConfig | None = None
    """Environment service that simulates, for simulators that need a Python environment of their own: started there by
    `quintet serve-envs`. `processes` is then the number of worker processes of each server that are used, at least 1.
    null simulates in this run."""

    def data_paths(self) -> dict[str, str]:
        """See `EnvSection.data_paths`; any option with a slash may be a path."""
        return dict(_texts_with_slash("options", self.options))


def _texts_with_slash(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield texts in nested options that may be paths, with their keys."""
    if isinstance(value, str) and "/" in value:
        yield key, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from _texts_with_slash(f"{key}.{name}", item)


ENV_UNION = RegistryUnion(ENVS, EnvSection, others=(PromptsConfig, SimulatorConfig), default="frozenlake")
EnvConfig = Annotated[EnvSection, ENV_UNION]


ROLLOUT_OVERRIDES = (
    "think",
    "max_actions_per_turn",
    "action_separator",
    "ignore_case",
    "response_format",
    "format_penalty",
)
"""Keys of `rollout` that an entry of `envs` may replace."""


class MixedEnvConfig(Section):
    """An environment of a run that has several."""

    env: EnvConfig = FrozenLakeConfig()
    """Environment, with the keys of `env`."""
    share: NonNegative = 1.0
    """Share of training groups and of `validation.episodes`, relative to the other envs' shares: with shares 3 and 1,
    the first env gets three of every four groups. 0 only validates; some env must have more."""
    start_states: PositiveInt | None = None
    """Number of distinct start states; after all were used they repeat. null uses `training.start_states`."""
    validation_episodes: Count | None = None
    """Number of held-out start states; null uses its share of `validation.episodes`, at least one. 0 only trains."""
    think: bool | None = None
    """Replaces `rollout.think` for this env; null keeps it."""
    max_actions_per_turn: PositiveInt | None = None
    """Replaces `rollout.max_actions_per_turn` for this env; null keeps it."""
    action_separator: NotEmpty | None = None
    """Replaces `rollout.action_separator` for this env; null keeps it."""
    ignore_case: bool | None = None
    """Replaces `rollout.ignore_case` for this env; null keeps it."""
    response_format: Literal["whole", "strict"] | None = None
    """Replaces `rollout.response_format` for this env; null keeps it."""
    format_penalty: float | None = None
    """Replaces `rollout.format_penalty` for this env; null keeps it."""

    def rollout_overrides(self) -> dict[str, Any]:
        """Return the keys of `rollout` that this env replaces."""
        return self.model_dump(include=set(ROLLOUT_OVERRIDES), exclude_none=True)
