"""Routes of the viewer for episodes, images and videos."""

# the annotations of routes are evaluated by FastAPI
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from fastapi.responses import FileResponse

from quintet.contained_files import is_contained
from quintet.errors import MachineError
from quintet.tracking.image_files import read_png
from quintet.viewer.episode_filter import EpisodeFilter, count_facets
from quintet.viewer.episodes import changed_episodes, episode_details, list_rows
from quintet.viewer.run_catalog import RunCatalog, ViewedRun
from quintet.viewer.trajectory_index import EpisodeSummary

INDEX_SECONDS = 0.2
"""How long a request waits for new trajectory files to be indexed; what is missing then comes with a later one."""
MAX_ROWS, MAX_SAMPLES, CACHED_RESULTS = 500, 32, 8
MAX_DAMAGE = 20
"""Damaged lines that a list of episodes names."""
VIDEOS = "videos"
VIDEO_TYPES = {".mp4": "video/mp4", ".gif": "image/gif"}


class EpisodeRoutes:
    """Routes for the episodes of a catalog's runs. The last filtered lists are kept for scrolling."""

    def __init__(self, catalog: RunCatalog) -> None:
        self._catalog = catalog
        self._results: dict[tuple[str, int, EpisodeFilter], list[EpisodeSummary]] = {}

    def router(self) -> APIRouter:
        """Return the routes."""
        router = APIRouter(prefix="/api")
        for route in (self.facets, self.episodes, self.group, self.changes, self.image, self.videos, self.video):
            router.get(f"/{route.__name__}", response_model=None)(route)
        return router

    def facets(self, run: str) -> dict[str, Any]:
        """Return the values of each filter and their numbers of episodes."""
        each = self._indexed(run)
        return {"complete": each.trajectories.is_complete, "facets": count_facets(each.trajectories.episodes())}

    def episodes(
        self, run: str, conditions: Annotated[EpisodeFilter, Depends()], first: int = 0, count: int = 100
    ) -> dict[str, Any]:
        """Return `count` episodes that meet the conditions, from the `first`, and their total."""
        each = self._indexed(run) if first == 0 else self._catalog.get(run)
        selected = self._select(each, conditions)
        return {
            "complete": each.trajectories.is_complete,
            "damage": each.trajectories.damage[:MAX_DAMAGE],
            "total": len(selected),
            "solved": sum(episode.success for episode in selected),
            "rows": list_rows(each.trajectories, selected[first : first + min(count, MAX_ROWS)]),
        }

    def group(self, run: str, split: str, step: int, line: int) -> list[dict[str, Any]]:
        """Return the episode in a line of a file, then the other samples of its group."""
        each = self._indexed(run)
        stored = [e for e in each.trajectories.episodes() if (e.split, e.step) == (split, step)]
        shown = next((e for e in stored if e.line == line), None)
        if shown is None:
            raise MachineError(f"run {run} has no {split} episode {line} of step {step}")
        others = [e for e in stored if e.group == shown.group and e.env == shown.env and e is not shown]
        tokenizer = each.tokenizer()
        return [episode_details(each.trajectories, e, tokenizer) for e in (shown, *others[: MAX_SAMPLES - 1])]

    def changes(self, run: str, before: int, after: int, first: int = 0, count: int = 100) -> dict[str, Any]:
        """Return the start states of two validations with both of their episodes, and how many were gained and lost."""
        each = self._indexed(run)
        stored = [e for e in each.trajectories.episodes() if e.split == "validation"]
        pairs = list(changed_episodes([e for e in stored if e.step == before], [e for e in stored if e.step == after]))
        rows = [list_rows(each.trajectories, pair) for pair in pairs[first : first + min(count, MAX_ROWS)]]
        return {
            "total": len(pairs),
            "lost": sum(old.success and not new.success for old, new in pairs),
            "gained": sum(new.success and not old.success for old, new in pairs),
            "rows": [{"before": old, "after": new} for old, new in rows],
        }

    def image(self, run: str, split: str, name: str) -> Response:
        """Return an image of an episode."""
        folder = self._catalog.get(run).trajectories.file(split, 0).parent
        png = read_png(folder, name)
        if png is None:
            raise MachineError(f"{folder / name} is missing")
        return Response(png, media_type="image/png")

    def videos(self, run: str) -> list[str]:
        """Return the names of a run's videos."""
        folder = self._catalog.get(run).directory.path / VIDEOS
        paths = [path for path in folder.rglob("*") if path.suffix in VIDEO_TYPES and is_contained(folder, path)]
        return [str(path.relative_to(folder)) for path in sorted(paths)]

    def video(self, run: str, name: str) -> FileResponse:
        """Return a video."""
        if name not in self.videos(run):
            raise MachineError(f"run {run} has no video {name}")
        path = self._catalog.get(run).directory.path / VIDEOS / name
        return FileResponse(path, media_type=VIDEO_TYPES[path.suffix])

    def _indexed(self, name: str) -> ViewedRun:
        run = self._catalog.get(name)
        run.trajectories.refresh(INDEX_SECONDS)
        return run

    def _select(self, run: ViewedRun, conditions: EpisodeFilter) -> list[EpisodeSummary]:
        key = (run.name, run.trajectories.version, conditions)
        if key not in self._results:
            while len(self._results) >= CACHED_RESULTS:
                self._results.pop(next(iter(self._results)), None)
            self._results[key] = conditions.apply(run.trajectories.episodes(), run.trajectories.file)
        return self._results[key]
