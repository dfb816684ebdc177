"""If these fail, `quintet view --terminal` shows nothing, or takes the policy's text for markup."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.viewer.conftest import episode, turn
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Label, Static

from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.trajectories import write_trajectories
from quintet.viewer.run_catalog import RunCatalog
from quintet.viewer.terminal import TerminalViewer

CURVES = [
    *("val/frozenlake/success_rate", "response/stop_reason/stop", "actor/entropy"),
    *("timing_s/step", "timing_s/gen"),
]
"""Metrics of the run, the one of the progress bar first."""


async def until(pilot: Pilot[None], condition: Callable[[], bool]) -> None:
    """Wait until a condition is met."""
    for _ in range(200):
        if condition():
            return
        await pilot.pause(0.05)
    raise AssertionError("the view did not change")


def rows(app: TerminalViewer, selector: str) -> int:
    return app.query_one(selector, DataTable).row_count


def shown(app: TerminalViewer, selector: str) -> str:
    return str(app.query_one(selector, Static).render())


def test_the_diagnosis_of_three_steps_says_what_needs_more(run_path: Path) -> None:
    async def use() -> None:
        app = TerminalViewer(RunCatalog([run_path.parent]))
        async with app.run_test(size=(140, 40)) as pilot:
            await until(pilot, lambda: rows(app, "#run-list") == 1)
            await pilot.press("3")
            await until(pilot, lambda: "Not judged yet" in shown(app, "#findings"))
            assert shown(app, "#findings").startswith("Nothing looks wrong so far, after 3 steps; ")

    asyncio.run(use())


def test_each_tab_shows_the_chosen_run(run_path: Path) -> None:
    async def use() -> None:
        app = TerminalViewer(RunCatalog([run_path.parent]))
        async with app.run_test(size=(140, 40)) as pilot:
            await until(pilot, lambda: rows(app, "#run-list") == 1)
            assert app.query_one("#run-list", DataTable).get_row("lake")[:2] == ["lake", "finished"]
            await pilot.press("2")
            await until(pilot, lambda: len(app.query(".curve")) == 5)
            labels = [str(label.render()) for label in app.query(".curve Label").results(Label)]
            assert [label.split()[0] for label in labels] == CURVES
            await pilot.press("slash", *"entropy", "escape")
            await until(pilot, lambda: len(app.query(".curve")) == 1)
            await pilot.press("4")
            await until(pilot, lambda: rows(app, "#episode-list") == 8)
            await pilot.press("5")
            await until(pilot, lambda: rows(app, "#change-list") == 3)
            await until(pilot, lambda: "After" in shown(app, "#change"))
            await pilot.press("6")
            await until(pilot, lambda: "gen" in shown(app, "#phases"))

    asyncio.run(use())


@pytest.mark.parametrize("text", ["[bold]not markup[/bold]", "unclosed [/", "\x1b[31mred"])
def test_text_of_the_policy_is_shown_as_it_is(tmp_path: Path, text: str) -> None:
    run = RunDirectory(tmp_path / "lake")
    run.path.mkdir()
    run.write_state("finished")
    write_trajectories(run.trajectories("train", 1), 1, "train", [episode(0, turn(text))])

    async def use() -> None:
        app = TerminalViewer(RunCatalog([run.path]))
        async with app.run_test(size=(140, 40)) as pilot:
            await pilot.press("4")
            await until(pilot, lambda: text.replace("\x1b", "") in shown(app, "#episode").replace("\x1b", ""))
            app.query_one("#episode-search", Input).value = "nothing has this"
            await app.query_one("#episode-search", Input).action_submit()
            await until(pilot, lambda: rows(app, "#episode-list") == 0)

    asyncio.run(use())
