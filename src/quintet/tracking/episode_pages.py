"""Episodes as HTML pages with drawn observations and responses, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template

from quintet.records import Trajectory
from quintet.tracking.atomic_files import translate_os_errors, write_atomic
from quintet.tracking.episode_html import OUTCOMES
from quintet.tracking.grid_svg import GridSheet, visible


def write_episode_pages(directory: Path, step: int, trajectories: Sequence[Trajectory]) -> None:
    """Write one self-contained page per episode, `step_N/trajectory_data_I.html` (RAGEN's file names).

    Raises:
        MachineError: A file cannot be written.
    """
    step_directory = directory / f"step_{step}"
    with translate_os_errors(step_directory):
        step_directory.mkdir(parents=True, exist_ok=True)
    for number, episode in enumerate(trajectories):
        page = _page(episode, f"Step {step}, episode {number}: {episode.env}, map {episode.seed}")
        write_atomic(step_directory / f"trajectory_data_{number}.html", page.encode(errors="backslashreplace"))


def _page(episode: Trajectory, title: str) -> str:
    boards = GridSheet()
    turns = "\n".join(
        f"<li>{boards.show(episode.env_type or episode.env, turn.observation)}<pre>{visible(turn.text)}</pre></li>"
        for turn in episode.turns
    )
    outcome = OUTCOMES.get(episode.outcome.value, episode.outcome.value)
    return Template(_asset("episode.html")).substitute(
        title=visible(title),
        outcome=visible(f"{outcome}, reward {episode.reward:g}"),
        style=_asset("report.css"),
        tiles=boards.definitions(_asset("tiles.svg")),
        turns=turns,
    )


def _asset(name: str) -> str:
    return (resources.files("quintet.tracking") / "assets" / name).read_text(encoding="utf-8")
