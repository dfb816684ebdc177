"""Stored episodes of a run as the viewer shows them: turns with grids, images and token statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from quintet.contained_files import MAX_LINE_BYTES, open_contained
from quintet.errors import MachineError
from quintet.tracking.atomic_files import translate_os_errors
from quintet.tracking.grid_svg import grid_svg
from quintet.tracking.trajectories import parse_trajectory
from quintet.viewer.trajectory_index import EpisodeSummary, TrajectoryIndex

PREVIEW = 160
"""Characters of the last response in lists."""
Identity = tuple[str, int, int]
"""Environment, seed and sample: what two evaluations of the same start state share."""


def list_rows(index: TrajectoryIndex, episodes: Sequence[EpisodeSummary]) -> list[dict[str, Any]]:
    """Return the rows of a list, each with the beginning of the last response."""
    return [episode._asdict() | {"preview": _preview(index, episode)} for episode in episodes]


def _preview(index: TrajectoryIndex, summary: EpisodeSummary) -> str:
    try:
        turns = read_episode(index, summary)["turns"]
    except MachineError as error:
        return error.message  # the other episodes of the list can still be read
    return str(turns[-1]["text"])[:PREVIEW] if turns else ""


def read_episode(index: TrajectoryIndex, summary: EpisodeSummary) -> dict[str, Any]:
    """Read an episode from its file.

    Raises:
        MachineError: its file was removed, or its line is damaged.
    """
    path = index.file(summary.split, summary.step)
    with translate_os_errors(path), open_contained(index.directory, path.absolute()) as file:
        file.seek(summary.offset)
        line = file.readline(MAX_LINE_BYTES)
    return parse_trajectory(path, summary.line + 1, line.decode(errors="replace"))


def episode_details(index: TrajectoryIndex, summary: EpisodeSummary, tokenizer: Path | None) -> dict[str, Any]:
    """Return an episode with the grids of its observations as SVG and, if its tokens are stored, their texts.

    `tokenizer` is the run's `tokenizer.json`.
    """
    episode = read_episode(index, summary)
    env_type = str(episode.get("env_type") or episode["env"])
    for turn in episode["turns"]:
        turn["grid"] = grid_svg(env_type, turn["observation"])
        turn["frame_grids"] = [grid_svg(env_type, frame) for frame in turn["frames"]]
        if "tokens" in turn and tokenizer is not None:
            turn["token_texts"] = _token_texts(tokenizer, turn["tokens"])
    return episode | summary._asdict() | {"turns": episode["turns"]}


def _token_texts(path: Path, tokens: Sequence[int]) -> list[str]:
    """Return the text of each token.

    A character whose bytes are several tokens is in the last of them. At most four tokens are one character of UTF-8.
    """
    tokenizer = _tokenizer(path)
    texts: list[str] = []
    pending: list[int] = []
    for number, token in enumerate(tokens, 1):
        pending.append(token)
        text = tokenizer.decode(pending, skip_special_tokens=False)
        if text.endswith("\ufffd") and len(pending) < 4 and number < len(tokens):
            texts.append("")
        else:
            texts.append(text)
            pending = []
    return texts


@lru_cache(maxsize=4)
def _tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def changed_episodes(
    before: Sequence[EpisodeSummary], after: Sequence[EpisodeSummary]
) -> Iterator[tuple[EpisodeSummary, EpisodeSummary]]:
    """Yield the episodes from the same start state in two evaluations: first episodes that were solved before and are
    lost now, then newly solved ones, then the others by the change of their reward, largest first."""
    earlier = {_identity(episode): episode for episode in before}
    pairs = [(earlier[key], episode) for episode in after if (key := _identity(episode)) in earlier]
    yield from sorted(pairs, key=lambda pair: (_change(*pair), -abs(pair[1].reward - pair[0].reward)))


def _change(before: EpisodeSummary, after: EpisodeSummary) -> int:
    """Return 0 if the episode is lost now, 1 if it is solved now, 2 if that did not change."""
    return 2 if before.success == after.success else int(after.success)


def _identity(episode: EpisodeSummary) -> Identity:
    return episode.env, episode.seed, episode.sample
