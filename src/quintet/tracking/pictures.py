"""Played games as pages with drawings: what the policy saw, and what it answered, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template

from quintet.records import Trajectory
from quintet.tracking.boards import BoardSheet, visible
from quintet.tracking.games import OUTCOMES
from quintet.tracking.run_directory import machine_errors, write_atomic

__all__ = ["draw_games"]


def draw_games(directory: Path, step: int, trajectories: Sequence[Trajectory]) -> None:
    """One page for each game, `step_N/trajectory_data_I.html`, as RAGEN calls them; nothing is fetched by them.

    Raises:
        MachineError: the machine refuses to write.
    """
    place = directory / f"step_{step}"
    with machine_errors(place):
        place.mkdir(parents=True, exist_ok=True)
    for number, game in enumerate(trajectories):
        page = _page(game, f"Step {step}, game {number}: {game.world}, map {game.seed}")
        write_atomic(place / f"trajectory_data_{number}.html", page.encode(errors="backslashreplace"))


def _page(game: Trajectory, title: str) -> str:
    boards = BoardSheet()
    turns = "\n".join(
        f"<li>{boards.show(game.kind or game.world, turn.observation)}<pre>{visible(turn.text)}</pre></li>"
        for turn in game.turns
    )
    outcome = OUTCOMES.get(game.outcome.value, game.outcome.value)
    return Template(_asset("pictures.html")).substitute(
        title=visible(title),
        outcome=visible(f"{outcome}, reward {game.reward:g}"),
        style=_asset("report.css"),
        tiles=boards.definitions(_asset("tiles.svg")),
        turns=turns,
    )


def _asset(name: str) -> str:
    return (resources.files("quintet.tracking") / "assets" / name).read_text(encoding="utf-8")
