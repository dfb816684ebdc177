"""Start states of robots: pure functions of seed, step and robot, whatever the number of processes and stages."""

from __future__ import annotations

import numpy as np

from quintet.config.native.envs import SimulatorConfig
from quintet.envs.start_states import Split, split_seed, start_state
from quintet.errors import ConfigError
from quintet.seeds import derive_seed

MAX_SHUFFLED = 1 << 20
"""Start states that are shuffled before they are used in order; more are used in their own order."""


class RobotStartStates:
    """Start states of training, validation and demonstrations of a simulator."""

    def __init__(
        self,
        config: SimulatorConfig,
        num_start_states: int,
        group_size: int = 1,
        max_episodes: int = 1,
        key: str = "env",
    ) -> None:
        """`group_size` robots next to each other are a group; `max_episodes` is the number of episodes of a robot in a
        rollout, more than one with automatic resets. `key` is the configuration key of `config`, for messages.

        Raises:
            ConfigError: the simulator has too few start states.
        """
        self._config, self._group_size, self._max_episodes = config, group_size, max_episodes
        self._num_start_states = num_start_states
        has = f"{config.simulator} has {num_start_states}"
        if config.start_state is not None and config.start_state >= num_start_states:
            message = f"{key}.start_state = {config.start_state}: {has} start states"
            valid = f"valid: 0 to {num_start_states - 1}"
            raise ConfigError(message, key=f"{key}.start_state", value=config.start_state, hint=valid)
        if config.hold_out and config.start_state is None and num_start_states < len(Split):
            message = f"{key}.hold_out = true needs {len(Split)} start states; {has}"
            raise ConfigError(message, key=f"{key}.hold_out", value=True, hint=f"set {key}.hold_out=false")

    def training(self, step: int, epoch: int, num_robots: int) -> np.ndarray:
        """Return the start states of the successive episodes of all robots in an epoch of a step, int64 [B, K].

        With `fixed_start_states`, K is 1: a robot repeats the start state of its group.
        """
        config = self._config
        is_fixed = config.fixed_start_states
        num_rows = num_robots // self._group_size if is_fixed else num_robots
        num_columns = self._max_episodes if config.auto_reset and not is_fixed else 1
        rollout = step * config.epochs + epoch
        if config.start_state_order == "ordered":
            first = rollout * num_rows * num_columns
            indices = self._ordered(Split.TRAIN, first, num_rows * num_columns, config.seed)
        else:
            generator = np.random.default_rng(derive_seed(config.seed, "start states", rollout))
            indices = generator.integers(self._size(Split.TRAIN), size=num_rows * num_columns)
        states = self._states(Split.TRAIN, indices).reshape(num_rows, num_columns)
        return states.repeat(num_robots // num_rows, axis=0)

    def validation(self, first: int, num_robots: int) -> np.ndarray:
        """Return the start states of the validation episodes from number `first` on, int64 [B, K]: successive episodes
        of a robot are B apart. They are in the same shuffled order in every validation."""
        num_columns = self._max_episodes if self._config.auto_reset else 1
        indices = self._ordered(Split.VALIDATION, first, num_robots * num_columns, 0)
        return self._states(Split.VALIDATION, indices).reshape(num_columns, num_robots).T

    def demonstrations(self, first: int, count: int) -> np.ndarray:
        """Return the start states of the demonstrations from number `first` on, int64 [count]."""
        indices = self._ordered(Split.DEMONSTRATION, first, count, self._config.seed)
        return self._states(Split.DEMONSTRATION, indices)

    def _size(self, split: Split) -> int:
        """Return the number of start states of a split."""
        if not self._config.hold_out:
            return self._num_start_states
        return len(range(split_seed(split, 0), self._num_start_states, len(Split)))

    def _ordered(self, split: Split, first: int, count: int, seed: int) -> np.ndarray:
        size = self._size(split) if self._config.start_state is None else 1
        shuffled = size if size <= MAX_SHUFFLED else None
        numbers = (start_state(number, shuffled, seed) % size for number in range(first, first + count))
        return np.fromiter(numbers, np.int64, count)

    def _states(self, split: Split, indices: np.ndarray) -> np.ndarray:
        if self._config.start_state is not None:
            return np.full(len(indices), self._config.start_state, np.int64)
        if not self._config.hold_out:
            return indices
        return split_seed(split, 0) + indices * len(Split)
