"""Records of robots' episodes for people: camera images, actions and rewards, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from quintet.embodied_records import ChunkResult, RobotEpisode, RobotObservation
from quintet.records import FinishReason, Trajectory, Turn


class RobotTrajectories:
    """Records the first episode of each of the first robots of a rollout, one turn per chunk."""

    def __init__(self, columns: Sequence[int], group_size: int = 1) -> None:
        """`columns` are the robots, as columns of the batch, of which `group_size` next to each other are a group."""
        self._group_size = group_size
        self._turns: dict[int, list[Turn]] = {column: [] for column in columns}
        self._episodes: dict[int, RobotEpisode] = {}

    def record_actions(self, columns: Sequence[int], observation: RobotObservation, actions: np.ndarray) -> None:
        """Record the observations of robots and their actions, float32 [columns, C, D]."""
        for row, column in enumerate(columns):
            if column in self._turns and column not in self._episodes:
                self._turns[column].append(_turn(observation, row, actions[row]))

    def record_result(self, columns: Sequence[int], result: ChunkResult) -> None:
        """Record the rewards of robots, and the episodes that ended."""
        after = result.final_observation or result.observation
        for row, column in enumerate(columns):
            turns = self._turns.get(column)
            if turns and column not in self._episodes:
                reward = float(result.rewards[row].sum())
                turns[-1] = replace(turns[-1], reward=reward, images_after=tuple(after.images[row]))
        for episode in result.episodes:
            column = columns[episode.robot]
            if column in self._turns:
                self._episodes.setdefault(column, episode)

    def trajectories(self, env: str) -> list[Trajectory]:
        """Return the episodes that have ended; `env` is the name of the environment."""
        return [
            Trajectory(
                env=env,
                seed=episode.start_state,
                group=column // self._group_size,
                sample=column % self._group_size,
                turns=tuple(self._turns[column]),
                outcome=episode.outcome,
                failure=episode.failure,
                env_type=episode.task,
            )
            for column, episode in sorted(self._episodes.items())
        ]


def _turn(observation: RobotObservation, row: int, actions: np.ndarray) -> Turn:
    rounded = [[round(float(value), 4) for value in action] for action in actions]
    return Turn(
        observation=observation.instructions[row],
        prompt=(),
        continues=False,
        tokens=(),
        logprobs=(),
        weight_version=0,
        text="\n".join(", ".join(f"{value:+.3f}" for value in action) for action in rounded),
        actions=tuple(rounded),
        valid_format=True,
        reward=0.0,
        finish_reason=FinishReason.STOP,
        images=tuple(observation.images[row]),
    )
