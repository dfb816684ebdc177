"""What is played."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from quintet.config.capability import Capability, Waits
from quintet.config.native.section import Section, Share

__all__ = [
    "CustomWorldConfig",
    "FrozenLakeConfig",
    "MixedWorldConfig",
    "NavigationConfig",
    "PlayedConfig",
    "PrimitiveSkillConfig",
    "PromptsConfig",
    "SimulatorConfig",
    "SokobanConfig",
    "SvgConfig",
    "WorldConfig",
    "WorldProcessesConfig",
]

Observed = Literal["grid", "grid_neighbors"]
Rendered = Annotated[Literal["text", "vision"], Waits(Capability.VISION)]


class WorldProcessesConfig(Section):
    """Each game's world in a process of its own, so that one that hangs or dies costs its own game alone."""

    most: PositiveInt = 256
    """Processes side by side; further games wait for one."""
    reset_timeout_seconds: PositiveFloat = 60.0
    """Time for a game's start; then its process is killed and the game has failed."""
    step_timeout_seconds: PositiveFloat = 10.0
    """Time for one action; then its process is killed and the game has failed."""
    games_per_process: PositiveInt | None = None
    """Games after which a process is replaced by a fresh one; 1 gives each game a fresh one. null keeps it as long as
    its games end well."""
    memory_gib: PositiveFloat | None = None
    """Address space of one process, GiB; null sets no limit."""


def _spelt_out(given: Any) -> Any:
    """`true` and `false` for a section or none, a number for so many processes."""
    if isinstance(given, bool):
        return {} if given else None
    return {"most": given} if isinstance(given, int) else given


Processes = Annotated[WorldProcessesConfig | None, BeforeValidator(_spelt_out)]


class PlayedConfig(Section):
    """What every world has that is played in turns."""

    name: str
    """Which world."""
    processes: Processes = None
    """Worlds live in processes of their own: a section, `true` for its defaults, or a number of processes. null plays
    them in the run's own process, which is faster where a world is."""
    max_actions: PositiveInt | None = None
    """Actions of the policy in one game, over all turns; then it ends as it stands. null leaves that to the world."""
    max_tokens: PositiveInt | None = None
    """Tokens of one game, what the policy read and what it wrote; a reply is cut there, and no further turn begins.
    null sets no limit beside those of the turns."""
    max_failed_share: Share = 0.5
    """Share of the games side by side whose world or engine failed that ends the run when it is passed; failed games
    are left out of the update."""


class FrozenLakeConfig(PlayedConfig):
    """Cross a frozen lake from a random start to a random goal without falling into a hole."""

    name: Literal["frozenlake"] = "frozenlake"
    """Which world."""
    size: Annotated[int, Field(ge=2, le=32)] = 4
    """Cells a side."""
    floor_density: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Probability that a cell is frozen rather than a hole (RAGEN's `p`)."""
    slippery: bool = False
    """The ice moves the agent sideways now and then."""
    success_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0 / 3.0
    """On slippery ice, probability that a move goes where it was meant to; the rest is split
    between the two sides."""
    max_steps: PositiveInt = 100
    """Actions until the world itself ends the game."""
    observation: Observed = "grid_neighbors"
    """`grid` shows the map; `grid_neighbors` adds a line that says what lies next to the player."""
    render: Rendered = "text"
    """`vision` shows a picture in place of the text."""


class SokobanConfig(PlayedConfig):
    """Push every box onto a target."""

    name: Literal["sokoban"] = "sokoban"
    """Which world."""
    width: Annotated[int, Field(ge=4, le=16)] = 6
    """Cells, walls included."""
    height: Annotated[int, Field(ge=4, le=16)] = 6
    """Cells, walls included."""
    boxes: Annotated[int, Field(ge=1, le=6)] = 1
    """Boxes, and as many targets."""
    max_steps: PositiveInt = 100
    """Actions until the world itself ends the game."""
    pull_steps: PositiveInt = 30
    """Moves of the reverse play that makes a puzzle from its solution."""
    min_solution_pushes: PositiveInt = 1
    """Puzzles whose boxes all lie closer than this many pushes (in sum) to their targets are not used."""
    observation: Observed = "grid_neighbors"
    """`grid` shows the room; `grid_neighbors` adds a line that says what lies next to the player."""
    render: Rendered = "text"
    """`vision` shows a picture in place of the text."""


class CustomWorldConfig(PlayedConfig):
    """A world of your own."""

    name: Literal["custom"]
    """Which world."""
    path: str
    """What makes it: `file.py:Class`, `module:Class`, or a name that a package registers as `quintet.worlds`. See
    `docs/faults.md` for what such a class has."""
    arguments: Annotated[dict[str, Any], Field(default_factory=dict)]
    """What it is called with, by name."""
    processes: Processes = WorldProcessesConfig()
    """Worlds live in processes of their own: a section, `true` for its defaults, or a number of processes. null plays
    them in the run's own process, where one that hangs or dies takes the run along."""


class PromptsConfig(Section):
    """A question from a data file and one answer, which a reward function judges."""

    name: Literal["prompts"]
    """Which world."""


class SvgConfig(Section):
    """Draw a picture as SVG code."""

    waits: ClassVar = Waits(Capability.WORLDS)

    name: Literal["svg"]
    """Which world."""
    render: Literal["text", "vision"] = "vision"
    """`vision` shows the target as a picture."""


class NavigationConfig(Section):
    """Walk through a house to what is asked for."""

    waits: ClassVar = Waits(Capability.WORLDS)

    name: Literal["navigation"]
    """Which world."""
    render: Literal["text", "vision"] = "vision"
    """`vision` shows what the agent sees."""


class PrimitiveSkillConfig(Section):
    """Move objects on a table by pick, place and push."""

    waits: ClassVar = Waits(Capability.WORLDS)

    name: Literal["primitive_skill"]
    """Which world."""
    render: Literal["text", "vision"] = "vision"
    """`vision` shows the table."""


class SimulatorConfig(Section):
    """A robot in a vectorised simulator, played in chunks of continuous actions."""

    waits: ClassVar = Waits(Capability.EMBODIED)

    name: Literal["simulator"] = "simulator"
    """Which world."""
    simulator: str = "libero"
    """Which simulator: `libero`, `maniskill`, `robotwin`."""
    task_suite: str | None = None
    """Which of its collections of tasks."""
    max_steps: PositiveInt = 512
    """Actions until the simulator itself ends the game."""
    auto_reset: bool = False
    """A game that ended is followed by another in the same step."""
    ignore_terminations: bool = False
    """A game goes on to `max_steps` though the task is done."""
    relative_reward: bool = False
    """The reward is the difference from the step before."""
    reward_coefficient: float = 1.0
    """Factor on every reward."""
    fixed_start_states: bool = True
    """Every step plays the same start states."""
    environments: PositiveInt | None = None
    """Games side by side; null takes those of a step."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Of the simulator's own draws."""
    camera_height: PositiveInt = 256
    """Pixels, as the simulator renders."""
    camera_width: PositiveInt = 256
    """Pixels, as the simulator renders."""
    pipeline_stages: PositiveInt = 1
    """Parts of the games that are simulated while the policy thinks about the others."""
    epochs: PositiveInt = 1
    """Times that all environments are played in one step."""


WorldConfig = Annotated[
    FrozenLakeConfig
    | SokobanConfig
    | CustomWorldConfig
    | PromptsConfig
    | SvgConfig
    | NavigationConfig
    | PrimitiveSkillConfig
    | SimulatorConfig,
    Field(discriminator="name"),
]


class MixedWorldConfig(Section):
    """One of several worlds that a run plays."""

    world: WorldConfig = FrozenLakeConfig()
    """What is played; it takes the keys of `world`."""
    share: PositiveFloat = 1.0
    """Its part of the groups of training and of `validation.games`, beside those of the other worlds: of shares 3 and
    1, the first has three of four. Held exactly, over all groups that are drawn."""
    start_states: PositiveInt | None = None
    """Start states that it has; once all were played they come again. null takes `training.start_states`."""
    validation_games: PositiveInt | None = None
    """Its held-out start states; null gives it its share of `validation.games`, at least one."""
    think: bool | None = None
    """As `rollout.think`, for this world; null takes that."""
    max_actions_per_turn: PositiveInt | None = None
    """As `rollout.max_actions_per_turn`, for this world; null takes that."""
    action_separator: Annotated[str, Field(min_length=1)] | None = None
    """As `rollout.action_separator`, for this world; null takes that."""
