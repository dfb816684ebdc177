"""Several envs in one run: their order by share, and one vector env over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from fractions import Fraction
from itertools import islice
from typing import Any

from quintet.config.native.experiment import Experiment
from quintet.config.native.mixed_envs import RunEnv
from quintet.envs.factory import build_vector_env, env_errors_under_key
from quintet.envs.start_states import SeedStartStates, StartStates, env_index, env_seed, env_start
from quintet.envs.vector_env import EnvEvent, VectorEnv
from quintet.errors import ConfigError

POLL_SECONDS = 0.005
"""Time to wait for one env before the next is polled, if several have requests in progress."""


class ShareSchedule:
    """Infinite sequence of indices in proportion to `shares`: the next index is always the one whose count is furthest
    below its share.

    No index is ever more than one turn ahead, and whole-number shares are met exactly.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        total = sum(map(Fraction, shares))
        self._shares = [Fraction(share) / total for share in shares]
        self.counts = [0] * len(shares)
        """Number of turns of each index."""

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        number = sum(self.counts) + 1
        deficits = [share * number - count for share, count in zip(self._shares, self.counts, strict=True)]
        index = deficits.index(max(deficits))
        self.counts[index] += 1
        return index


class MixedStartStates:
    """Seeds of several envs by share; see `StartStates`. A checkpoint keeps the number drawn from each env."""

    def __init__(self, envs: Sequence[RunEnv], seed: int) -> None:
        self._envs = envs
        self._starts = [SeedStartStates(env.start_states, seed, env.validation_episodes) for env in envs]
        self._names = [env.name for env in envs]
        self._schedule = self._new_schedule()

    def _new_schedule(self) -> ShareSchedule:
        return ShareSchedule([env.share for env in self._envs])

    def take(self, count: int) -> list[int]:
        return [env_start(env, self._starts[env].take(1)[0]) for env in islice(self._schedule, count)]

    def held_out(self) -> list[int]:
        """See `StartStates.held_out`; one env after another."""
        return [env_start(env, seed) for env, starts in enumerate(self._starts) for seed in starts.held_out()]

    def warm_start_check_starts(self, count: int) -> list[int]:
        """See `StartStates.warm_start_check_starts`; also by share."""
        order = list(islice(self._new_schedule(), count))
        seeds = [iter(starts.warm_start_check_starts(order.count(env))) for env, starts in enumerate(self._starts)]
        return [env_start(env, next(seeds[env])) for env in order]

    def state(self) -> dict[str, Any]:
        return {"envs": self._names, "drawn": list(self._schedule.counts)}

    def load(self, state: Mapping[str, Any]) -> None:
        """See `StartStates.load`.

        Raises:
            ConfigError: the order of the envs has changed, by which their starts are numbered.
        """
        # "worlds" was the name of this key in the first version
        stored = state["envs"] if "envs" in state else state["worlds"]
        if stored != self._names:
            message = f"envs: the checkpoint has the order {', '.join(stored)}, the run {', '.join(self._names)}"
            raise ConfigError(message, key="envs", value=self._names, hint="restore the order of the checkpoint")
        self._schedule.counts = [int(number) for number in state["drawn"]]
        for starts, number in zip(self._starts, self._schedule.counts, strict=True):
            starts.load({"drawn": number})


class MixedVectorEnv:
    """Vector env over several vector envs; the start of an episode selects its env. See `VectorEnv`."""

    def __init__(self, envs: Sequence[VectorEnv]) -> None:
        self._envs = envs
        self._env_by_episode: dict[int, VectorEnv] = {}

    @property
    def seconds(self) -> float:
        return sum(env.seconds for env in self._envs)

    def start(self, episode: int, seed: int) -> None:
        """See `VectorEnv.start`; `seed` is a start as in `env_start`."""
        self._env_by_episode[episode] = self._envs[env_index(seed)]
        self._env_by_episode[episode].start(episode, env_seed(seed))

    def step(self, episode: int, actions: Sequence[Any]) -> None:
        self._env_by_episode[episode].step(episode, actions)

    def drop(self, episode: int) -> None:
        env = self._env_by_episode.pop(episode, None)
        if env is not None:
            env.drop(episode)

    def poll(self, *, wait: bool = False, seconds: float | None = None) -> list[EnvEvent]:
        events = [event for env in self._envs for event in env.poll()]
        while wait and not events and (pending := [env for env in self._envs if env.pending]):
            limit = seconds if len(pending) == 1 else POLL_SECONDS
            events = [event for env in pending for event in env.poll(wait=True, seconds=limit)]
            wait = seconds is None
        return events

    @property
    def pending(self) -> bool:
        return any(env.pending for env in self._envs)

    def pop_metrics(self) -> Mapping[str, float]:
        return {}

    def close(self) -> None:
        self._env_by_episode.clear()
        for env in self._envs:
            env.close()


def build_start_states(config: Experiment) -> StartStates:
    """Return the start states of a run with interactive envs."""
    envs = config.run_envs
    if len(envs) > 1:
        return MixedStartStates(envs, config.seed)
    return SeedStartStates(envs[0].start_states, config.seed, envs[0].validation_episodes)


def build_run_envs(config: Experiment) -> VectorEnv:
    """Return the vector env of a run with one or several envs.

    Raises:
        ConfigError: a custom env cannot be loaded; the message names its key.
        MachineError: no worker process can be started.
    """
    built: list[VectorEnv] = []
    with ExitStack() as started:
        for run_env in config.run_envs:
            with env_errors_under_key(run_env.key):
                built.append(build_vector_env(run_env.config, run_env.rollout))
            started.callback(built[-1].close)
        started.pop_all()  # all have started: none is closed
    return built[0] if len(built) == 1 else MixedVectorEnv(built)
