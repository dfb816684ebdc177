"""Index of the trajectory files of a run: what lists and filters need of each episode, without its turns.

A line is read only up to its turns; the numbers of the turns are found by a pattern. So 100,000 episodes are indexed in
about a second, on a thread, the newest file first.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from quintet.contained_files import contained_path, lines_of, open_contained
from quintet.errors import MachineError
from quintet.tracking.trajectories import StoredEpisode, parse_trajectory

_TURNS = b', "turns": ['
_TURN_NUMBERS = re.compile(rb'"finish_reason": "(\w+)", "prompt_tokens": \d+, "response_tokens": (\d+)')
"""Quotes inside JSON strings are escaped, so no text of a turn matches."""
SPLITS = ("train", "validation")
_STEP = re.compile(r"step_(\d+)\.jsonl")


class EpisodeSummary(NamedTuple):
    """Location of a stored episode, and the numbers by which it is filtered."""

    split: str
    step: int
    line: int
    """Number of its line in the file, from 0."""
    offset: int
    """Position of its line in the file, bytes."""
    env: str
    seed: int
    group: int
    sample: int
    outcome: str
    success: bool
    reward: float
    failure: str | None
    """Place and type of the error that ended the episode."""
    turns: int
    response_tokens: int
    stop_reason: str
    """Finish reason of the last turn."""


class TrajectoryFile(NamedTuple):
    """A file with the episodes of one step."""

    path: Path
    split: str
    step: int
    modified: int
    """Time of its last change, nanoseconds."""


class TrajectoryIndex:
    """Summaries of all stored episodes of a run, kept up to date by a thread."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._summaries: dict[TrajectoryFile, list[EpisodeSummary]] = {}
        self._damage: dict[TrajectoryFile, list[str]] = {}
        self._thread: threading.Thread | None = None
        self.version = 0
        """Grows with each file that is added or removed."""

    def refresh(self, wait_seconds: float = 0.0) -> None:
        """Start to index new files on a thread, and wait up to `wait_seconds` for its end."""
        with self._lock:
            files = set(trajectory_files(self.directory))
            for removed in self._summaries.keys() - files:
                del self._summaries[removed], self._damage[removed]
                self.version += 1
            added = sorted(files - self._summaries.keys(), key=lambda file: (file.step, file.split), reverse=True)
            if added and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._index, args=(added,), daemon=True)
                self._thread.start()
        if self._thread is not None:
            self._thread.join(wait_seconds)

    @property
    def is_complete(self) -> bool:
        """Whether all files that the last `refresh` saw are indexed."""
        return self._thread is None or not self._thread.is_alive()

    def episodes(self) -> list[EpisodeSummary]:
        """Return the episodes indexed so far: the newest step first, in the order of their file."""
        with self._lock:
            files = sorted(self._summaries, key=lambda file: (-file.step, file.split))
            return [summary for file in files for summary in self._summaries[file]]

    @property
    def damage(self) -> list[str]:
        """Reasons why lines and files are left out; each names its line or file."""
        with self._lock:
            return [text for file in sorted(self._damage) for text in self._damage[file]]

    def file(self, split: str, step: int) -> Path:
        """Return the file of a step.

        Raises:
            MachineError: the split is none of a run, or the file is a link out of the run's directory.
        """
        if split not in SPLITS:
            raise MachineError(f"{split!r:.60} is no split of a run", f"the splits are {', '.join(SPLITS)}")
        return contained_path(self.directory, f"trajectories/{split}/step_{step:06d}.jsonl")

    def _index(self, files: list[TrajectoryFile]) -> None:
        for file in files:
            damage: list[str] = []
            try:
                summaries = list(summarize(self.directory, file, damage.append))
            except (OSError, MachineError) as error:
                summaries = []  # removed meanwhile, or a link: the others can still be shown
                damage = [str(error)]
            with self._lock:
                self._summaries[file], self._damage[file] = summaries, damage
                self.version += 1


def trajectory_files(directory: Path) -> Iterator[TrajectoryFile]:
    """Yield the trajectory files of a run."""
    for split in SPLITS:
        for path in (directory / "trajectories" / split).glob("step_*.jsonl"):
            if match := _STEP.fullmatch(path.name):
                yield TrajectoryFile(path, split, int(match[1]), path.lstat().st_mtime_ns)


def summarize(directory: Path, file: TrajectoryFile, reject: Callable[[str], None]) -> Iterator[EpisodeSummary]:
    """Yield the summary of each episode in a file of a run; `reject(reason)` is called for each line that is not a
    trajectory.

    Raises:
        MachineError: it is a link out of the run's directory, or no file.
    """
    offset = 0
    with open_contained(directory, file.path.absolute()) as lines:
        for number, line in enumerate(lines_of(lines)):
            try:
                yield _summary(file, number, offset, line)
            except MachineError as error:
                reject(error.message)
            offset += len(line)


def _summary(file: TrajectoryFile, number: int, offset: int, line: bytes) -> EpisodeSummary:
    """Return the summary of an episode.

    Raises:
        MachineError: the line is not a trajectory.
    """
    head, separator, turns = line.partition(_TURNS)
    numbers = _TURN_NUMBERS.findall(turns)
    episode = _parse_head(head) if separator else None
    if episode is None:
        # written by an earlier version with other keys
        stored = parse_trajectory(file.path, number + 1, line.decode(errors="replace"))
        numbers = [(turn["finish_reason"].encode(), turn.get("response_tokens", 0)) for turn in stored["turns"]]
        episode = StoredEpisode.model_validate(stored)
    failure = episode.failure
    return EpisodeSummary(
        file.split,
        file.step,
        number,
        offset,
        episode.env,
        episode.seed,
        episode.group,
        episode.sample,
        episode.outcome,
        episode.success,
        episode.reward,
        f"{failure.where}: {failure.error_type}" if failure else None,
        len(numbers),
        sum(int(tokens) for _, tokens in numbers),
        numbers[-1][0].decode() if numbers else "",
    )


def _parse_head(head: bytes) -> StoredEpisode | None:
    """Return the keys before the turns, None if some are missing."""
    try:
        return StoredEpisode.model_validate_json(head + b"}")
    except ValidationError:
        return None
