"""Configuration of environments that other packages provide by name."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from quintet.config.native.env_section import (
    EnvProcessesConfig,
    InteractiveEnvSection,
    Processes,
    Rendered,
    register_env,
)
from quintet.config.native.section import ListOf, NotEmpty, RunsCode


class PackageEnvSection(InteractiveEnvSection):
    """Base class of the configuration of an environment by its name in a package."""

    runs_external_code: ClassVar[bool] = True

    kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]
    """Keyword arguments of the package's `make`."""
    processes: Processes = EnvProcessesConfig()
    """Run envs in separate processes: a section, `true` for its defaults, or a number of processes. null runs them in
    the main process, where an env that hangs or dies stops the run."""


@register_env("gymnasium_env:GymnasiumEnv", "an environment of Gymnasium by its id")
class GymnasiumConfig(PackageEnvSection, name="gymnasium"):
    """Environment of Gymnasium, or of a package that registers its environments there."""

    id: Annotated[NotEmpty, RunsCode()] = "FrozenLake-v1"
    """Registered id; `module:id` imports the module that registers it first. Clients of an environment service may not
    name modules."""
    actions: Annotated[ListOf[NotEmpty], Field(min_length=1)] | None = None
    """Names of the discrete actions, in the order of their numbers; the numbers are accepted as well. null leaves only
    the numbers."""
    instruction: NotEmpty | None = None
    """System message. null lists the actions and the form of the observations."""
    observation: Literal["space", "ansi"] = "space"
    """Text of observations: `space` writes the value of the observation space, `ansi` the env's drawing by its
    render mode `ansi`, with highlighted characters in square brackets."""
    render: Rendered = "text"
    """`vision` shows the image of the env's render mode `rgb_array` instead of text."""
    image_size: PositiveInt | None = None
    """Longer side of the image, pixels; null leaves its size."""
    success_return: float | None = None
    """Minimum sum of rewards of a successful episode; null uses the env's registered `reward_threshold`, or any
    positive sum if it has none."""
    success_key: NotEmpty | None = None
    """Key of the last step's `info` that says whether the task is solved; it replaces `success_return`."""

    def server_keys(self) -> tuple[str, ...]:
        """See `EnvSection.server_keys`."""
        return ("id",) if ":" in self.id else ()


@register_env("textarena_env:TextArenaEnv", "a game of TextArena by its id", requires=("textarena",), extra="textarena")
class TextArenaConfig(PackageEnvSection, name="textarena"):
    """Text game of TextArena for one player, or for two against a fixed opponent."""

    id: NotEmpty = "GuessTheNumber-v0"
    """Registered id, such as `Wordle-v0`, `2048-v0` or `TicTacToe-v0`."""
    players: Literal[1, 2] | None = None
    """Number of players; null uses one if the game allows it, and two otherwise."""
    opponent: Literal["random"] = "random"
    """Opponent in a game of two: `random` draws one of the legal moves that the game lists in its observations. Games
    without such a list are refused. The seed decides who moves first."""
