"""The last trajectory files of a run, as the rules read them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.trajectories import read_trajectories

MAX_EPISODES = 2000
"""Episodes that are read of a file."""


@dataclass(frozen=True, slots=True)
class EpisodeFile:
    """The first episodes of a trajectory file."""

    name: str
    """Path in the run directory."""
    step: int
    by_line: Mapping[int, dict[str, Any]]
    """Episodes by the number of their line, from 1; lines that are damaged are left out."""
    damage: Sequence[str] = ()
    """Why lines are left out; each text names its line."""

    @property
    def episodes(self) -> Sequence[dict[str, Any]]:
        """Episodes in the order of their lines."""
        return list(self.by_line.values())

    @property
    def responses(self) -> list[tuple[int, str, str]]:
        """Return line, observation and response of each turn."""
        return [
            (line, str(turn.get("observation", "")), str(turn.get("text", "")))
            for line, episode in self.by_line.items()
            for turn in episode["turns"]
        ]

    @property
    def failure(self) -> str | None:
        """Return place, kind and message of the first failure, with its line; None if no episode failed."""
        for line, episode in self.by_line.items():
            if failure := episode.get("failure"):
                details = ": ".join(str(failure.get(name, "")) for name in ("where", "error_type", "message"))
                return f"{self.name}, line {line}: {details}"
        return None

    @property
    def solved(self) -> float:
        return sum(bool(episode.get("success")) for episode in self.episodes) / max(1, len(self.episodes))


def latest_files(directory: Path) -> list[EpisodeFile]:
    """Return the last trajectory file of training and that of validation, if there are any.

    Raises:
        MachineError: a file cannot be read.
    """
    files = []
    for split in ("train", "validation"):
        folder = RunDirectory(directory).trajectories("train", 0).parent.parent / split
        paths = sorted(folder.glob("step_*.jsonl"))
        if paths:
            step = int(re.sub(r"\D", "", paths[-1].stem) or 0)
            stored = read_trajectories(paths[-1], MAX_EPISODES, directory=directory)
            files.append(EpisodeFile(str(paths[-1].relative_to(directory)), step, stored.by_line, stored.damage))
    return files
