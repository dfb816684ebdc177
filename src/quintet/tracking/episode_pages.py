"""Episodes as HTML pages with drawn observations and responses, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from string import Template

from quintet.envs.service.png import encode_png
from quintet.records import Trajectory, Turn
from quintet.tracking.atomic_files import translate_os_errors, write_atomic
from quintet.tracking.episode_html import observation_html, read_asset
from quintet.tracking.episode_words import outcome_text
from quintet.tracking.grid_svg import GridSheet, visible


def write_episode_pages(directory: Path, step: int, trajectories: Sequence[Trajectory]) -> None:
    """Write one self-contained page per episode, `trajectory_data_I.html` (RAGEN's file names), and remove the pages
    of an earlier run of the step.

    Raises:
        MachineError: A file cannot be written.
    """
    with translate_os_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
        for page in directory.glob("trajectory_data_*.html"):
            page.unlink()
    for number, episode in enumerate(trajectories):
        page_html = _page(episode, f"Step {step}, episode {number}: {episode.env}, map {episode.seed}")
        path = directory / f"trajectory_data_{number}.html"
        write_atomic(path, page_html.encode(errors="backslashreplace"), flush=False)


def _page(episode: Trajectory, title: str) -> str:
    boards = GridSheet()
    turns = "\n".join(_turn(number, turn, episode, boards) for number, turn in enumerate(episode.turns, 1))
    fields = {"env": episode.env, "env_type": episode.env_type, "outcome": episode.outcome.value}
    outcome = outcome_text({**fields, "measures_success": episode.measures_success})
    return Template(read_asset("episode.html")).substitute(
        title=visible(title),
        outcome=visible(f"{outcome}, reward {episode.reward:g}"),
        style=read_asset("report.css"),
        tiles=boards.definitions(read_asset("tiles.svg")),
        turns=turns,
    )


def _turn(number: int, turn: Turn, episode: Trajectory, boards: GridSheet) -> str:
    """Return the state before a response, drawn, and the response."""
    shown = {"observation": turn.observation, "image_files": [encode_png(image) for image in turn.images]}
    state = "".join(observation_html(episode.env_type or episode.env, shown, boards))
    return (
        f"<li><h2>Step {number}</h2><div><h3>State</h3>{state}</div>"
        f"<div><h3>Model Response</h3><pre>{visible(turn.text)}</pre></div></li>"
    )
