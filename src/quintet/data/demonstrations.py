"""Demonstrations: successful episodes of an environment's expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Any, Final, Protocol, cast

from quintet.envs.env import Env, UnsolvableError
from quintet.envs.start_states import Split, split_seed
from quintet.errors import ConfigError
from quintet.records import Observation
from quintet.seeds import derive_seed

MAX_TRIES_PER_WIN: Final = 50
"""Tried episodes per successful one, after which the environment is considered too hard."""


class Expert(Env, Protocol):
    """An environment with an expert policy."""

    def expert_action(self) -> str:
        """Return an optimal action in the current state.

        Raises:
            UnsolvableError: the expert finds no action that leads to success.
        """

    def expert_thought(self) -> str:
        """Return a short description of the current state."""


class EpsilonGreedyExpert:
    """An expert that takes a random action of the environment with probability `epsilon`, chosen by the episode's
    seed."""

    def __init__(self, expert: Expert, epsilon: float) -> None:
        self._expert, self._epsilon = expert, epsilon

    def __getattr__(self, name: str) -> Any:
        return getattr(self._expert, name)

    def reset(self, seed: int) -> Observation:
        """See `Env.reset`."""
        self._random = Random(derive_seed("epsilon", seed))  # noqa: S311 - reproducible, not secret
        return self._expert.reset(seed)

    def expert_action(self) -> str:
        """See `Expert.expert_action`."""
        if self._random.random() < self._epsilon:
            return self._random.choice(self._expert.actions)
        return self._expert.expert_action()


@dataclass(frozen=True, slots=True)
class DemonstratedTurn:
    """Observation, thought and actions of one expert turn."""

    observation: str
    actions: tuple[str, ...]
    thought: str
    next_observation: str = ""
    images: tuple[Any, ...] = ()
    """Images of the observation, RGB `uint8[height, width, 3]`."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A successful episode of the expert."""

    seed: int
    turns: tuple[DemonstratedTurn, ...]
    actions: tuple[str, ...] = ()
    """Valid actions of the episode."""


def with_images(env: Env, episodes: Sequence[Demonstration]) -> Sequence[Demonstration]:
    """Return demonstrations with the images of their observations, if the environment shows images, by replaying
    them."""
    shows_images = bool(episodes) and bool(env.reset(episodes[0].seed).images)
    return [_with_images(env, episode) for episode in episodes] if shows_images else episodes


def _with_images(env: Env, episode: Demonstration) -> Demonstration:
    observation = env.reset(episode.seed)
    turns: list[DemonstratedTurn] = []
    for turn in episode.turns:
        turns.append(replace(turn, images=observation.images))
        for action in turn.actions:
            observation = env.step(action).observation
    return replace(episode, turns=tuple(turns))


def collect_demonstrations(
    build_env: Callable[[], Env],
    episodes: int,
    *,
    split: Split = Split.DEMONSTRATION,
    max_turns: int,
    max_actions_per_turn: int = 1,
    epsilon: float = 0.0,
) -> list[Demonstration]:
    """Collect `episodes` successful episodes of the split, in which actions are random with probability `epsilon`.

    The expert cannot predict slipping on ice; episodes in which it fails are skipped.

    Raises:
        ConfigError: the environment has no expert, too few episodes succeed within `max_turns`, or an environment
            without a list of actions is to take random ones.
    """
    env = build_env()
    if not hasattr(env, "expert_action"):
        raise ConfigError(
            "the environment has no expert, a method `expert_action`: the vocabulary of a new policy (policy.preset),"
            " the warm start and sft.episodes need its episodes",
            key="env.name",
            hint="add the method, or train an existing model without a warm start: policy.path=DIRECTORY"
            " policy.preset=null warm_start=null",
        )
    if epsilon and not env.actions:
        raise ConfigError(
            "the environment has no list of actions to choose a random one from",
            key="warm_start.epsilon",
            value=epsilon,
            hint="remove warm_start.epsilon",
        )
    expert = cast("Expert", EpsilonGreedyExpert(cast("Expert", env), epsilon) if epsilon else env)
    demonstrations, num_tries, env_error = _collect(expert, split, episodes, max_turns, max_actions_per_turn)
    if len(demonstrations) < episodes:
        cause = f"; the env failed: {type(env_error).__name__}: {env_error}" if env_error else ""
        raise ConfigError(
            f"the expert solved {len(demonstrations)} episodes in {num_tries} tries{cause}",
            key="rollout.max_turns",
            value=max_turns,
            hint="increase rollout.max_turns or make the environment easier",
        )
    return demonstrations


def _collect(
    expert: Expert, split: Split, episodes: int, max_turns: int, max_actions: int
) -> tuple[list[Demonstration], int, Exception | None]:
    """Return the demonstrations, the number of tries and the environment's last error.

    Stops when fewer than one in `MAX_TRIES_PER_WIN` episodes succeeds.
    """
    demonstrations: list[Demonstration] = []
    env_error: Exception | None = None
    for num_tries in count():
        if len(demonstrations) == episodes or num_tries >= MAX_TRIES_PER_WIN * (len(demonstrations) + 2):
            return demonstrations, num_tries, env_error
        episode = _try_episode(expert, split_seed(split, num_tries), max_turns, max_actions)
        if isinstance(episode, Demonstration):
            demonstrations.append(episode)
        env_error = episode if isinstance(episode, Exception) else env_error
    raise AssertionError("count() ends")


def _try_episode(env: Expert, seed: int, max_turns: int, max_actions: int) -> Demonstration | Exception | None:
    """Run an episode and return its demonstration, or the exception that the environment raised."""
    try:
        return run_episode(env, seed, max_turns, max_actions)
    except Exception as error:  # noqa: BLE001 - a user-defined environment may raise anything
        return error


def run_episode(env: Expert, seed: int, max_turns: int, max_actions: int = 1) -> Demonstration | None:
    """Run an episode by the expert, of turns with up to `max_actions` actions; None unless it succeeds."""
    observation = env.reset(seed)
    valid_actions = tuple(env.actions)
    done = False
    success = False
    turns: list[DemonstratedTurn] = []
    while not done and len(turns) < max_turns:
        try:
            turn, observation, done, success = _run_turn(env, observation, max_actions)
        except UnsolvableError:
            return None
        turns.append(turn)
    return Demonstration(seed, tuple(turns), valid_actions) if success else None


def _run_turn(env: Expert, observation: Observation, limit: int) -> tuple[DemonstratedTurn, Observation, bool, bool]:
    """Run a turn of up to `limit` actions; returns `(turn, next observation, done, success)`."""
    shown, thought = observation, env.expert_thought()
    actions: list[str] = []
    done = success = False
    while not done and len(actions) < limit:
        actions.append(env.expert_action())
        step = env.step(actions[-1])
        observation = step.observation
        done = step.terminated or step.truncated
        success = bool(step.info.get("success"))
    turn = DemonstratedTurn(shown.text, tuple(actions), thought, observation.text, shown.images)
    return turn, observation, done, success
