"""If these fail, a run directory from somebody else shows files of this machine, or one damaged file hides the rest."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from tests.unit.viewer.test_app import client

from quintet.tracking.image_files import write_image
from quintet.tracking.report import write_report
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.trajectories import read_trajectories

SECRET = "the secret of this machine"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory outside of the run, with a file of each kind that the viewer shows."""
    directory = tmp_path / "outside"
    directory.mkdir()
    return directory


def link(path: Path, target: Path, content: str | bytes) -> None:
    """Replace a file of a run by a link to a new file outside of it."""
    target.write_bytes(content if isinstance(content, bytes) else content.encode())
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def everything(viewer: TestClient, run: str) -> str:
    """Return what the viewer says of a run by all routes that read its files."""
    routes: dict[str, dict[str, Any]] = {
        "runs": {},
        "facets": {"run": run},
        "episodes": {"run": run},
        "config": {"run": run},
        "metrics": {"run": run},
        "curves": {"run": run, "metric": "leak"},
        "timeline": {"run": run},
        "videos": {"run": run},
        "traces": {"run": run},
        "trace": {"run": run, "step": 1, "rank": 0},
        "video": {"run": run, "name": "leak.gif"},
        "group": {"run": run, "split": "train", "step": 2, "line": 0},
    }
    return "".join(viewer.get(f"/api/{route}", params=params).text for route, params in routes.items())


def test_links_out_of_a_run_directory_show_nothing(run_path: Path, outside: Path) -> None:
    run = RunDirectory(run_path)
    stored = run.trajectories("train", 2)
    link(stored, outside / "train.jsonl", stored.read_text().replace("first", SECRET))
    link(run.config, outside / "config.yaml", f"name: {SECRET}\n")
    link(run.metrics, outside / "metrics.jsonl", json.dumps({"step": 1, SECRET: 1.0, "leak": 1.0}) + "\n")
    link(run.profile / "step_000001_rank_0.json", outside / "trace.json", json.dumps({"traceEvents": [SECRET]}))
    link(run_path / "videos/leak.gif", outside / "leak.gif", SECRET)
    assert SECRET not in everything(client(run_path), "lake")


def test_links_out_of_a_run_directory_are_not_in_its_report(run_path: Path, outside: Path) -> None:
    run = RunDirectory(run_path)
    stored = run.trajectories("validation", 3)
    link(stored, outside / "validation.jsonl", stored.read_text().replace("Right", SECRET))
    link(run.metrics, outside / "metrics.jsonl", json.dumps({"step": 1, SECRET: 1.0}) + "\n")
    report = write_report(run_path, "lake", {}, [], episodes=3).read_text()
    assert SECRET not in report
    assert "step_000003.jsonl leads out of" in report
    assert "metrics.jsonl leads out of" in report


def test_an_image_that_is_a_link_or_of_another_directory_is_not_shown(run_path: Path, outside: Path) -> None:
    folder = RunDirectory(run_path).trajectories("train", 2).parent
    name = write_image(folder, np.zeros((2, 2, 3), np.uint8))
    link(folder / name, outside / "image.png", SECRET)
    viewer = client(run_path)
    assert SECRET not in viewer.get("/api/image", params={"run": "lake", "split": "train", "name": name}).text
    (outside / "images").mkdir()
    shutil.copy(outside / "image.png", outside / name)
    elsewhere = {"run": "lake", "split": "../../../outside", "name": name}
    refused = viewer.get("/api/image", params=elsewhere)
    assert (refused.status_code, "is no split" in refused.text, SECRET in refused.text) == (404, True, False)


@pytest.mark.parametrize(
    "damaged",
    [
        "{",
        "[]",
        '{"turns": []}',
        '{"env": "lake", "seed": 0, "turns": [{"finish_reason": "stop"}]}',
        '{"env": 7, "turns": [7]}',
        "[" * 100_000,
        "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    ],
)
def test_a_damaged_line_costs_only_itself_and_is_named(run_path: Path, damaged: str) -> None:
    path = RunDirectory(run_path).trajectories("validation", 3)
    first, second, third = path.read_text().splitlines()
    path.write_text("\n".join((first, damaged, third, second)) + "\n")
    viewer = client(run_path)
    episodes = viewer.get("/api/episodes", params={"run": "lake"}).json()
    assert [(row["step"], row["line"]) for row in episodes["rows"] if row["step"] == 3] == [(3, 0), (3, 2), (3, 3)]
    (reason,) = episodes["damage"]
    assert "step_000003.jsonl:2" in reason
    stored = read_trajectories(path)
    assert (list(stored.by_line), len(stored.damage)) == ([1, 3, 4], 1)
    assert "step_000003.jsonl:2" in write_report(run_path, "lake", {}, [], episodes=3).read_text()


def test_a_line_that_is_damaged_in_its_turns_does_not_hide_the_list(run_path: Path) -> None:
    path = RunDirectory(run_path).trajectories("validation", 3)
    lines = path.read_text().splitlines()
    path.write_text("\n".join((lines[0][:-40], *lines[1:])) + "\n")
    rows = client(run_path).get("/api/episodes", params={"run": "lake"}).json()["rows"]
    assert len([row for row in rows if row["step"] == 3]) == 3
    assert "step_000003.jsonl:1 is not JSON" in next(r["preview"] for r in rows if (r["step"], r["line"]) == (3, 0))


def test_a_run_with_a_damaged_state_does_not_hide_the_others(run_path: Path) -> None:
    damaged = shutil.copytree(run_path, run_path.parent / "damaged")
    RunDirectory(damaged).state.write_text("{")
    RunDirectory(damaged).progress.write_text('{"phase": [], "done": "x", "total": null, "unit": 1}')
    states = {run["name"]: run["state"] for run in client(run_path.parent).get("/api/runs").json()}
    assert states == {"lake": "finished", "damaged": "unknown"}


def test_the_token_is_not_sent_to_another_host(run_path: Path) -> None:
    viewer = client(run_path, token="secret")
    for path in ("//evil.example/x", "/\\evil.example/x", "///evil.example"):
        answer = viewer.get(f"http://127.0.0.1:8080{path}?token=secret", follow_redirects=False)
        location = answer.headers.get("location", "/")
        assert location.startswith("/")
        assert not location.startswith(("//", "/\\"))


@pytest.mark.parametrize("points", [-5, 0, "x"])
def test_a_wrong_number_of_points_is_a_clients_error(run_path: Path, points: object) -> None:
    params = {"run": "lake", "metric": "actor/entropy", "points": str(points)}
    assert client(run_path).get("/api/curves", params=params).status_code == 422


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        '{"step": 2, "actor/entropy": 1' + "0" * 400 + "}",
        '{"step": 2, "actor/entropy": NaN}',
        '{"step": 2, "time_seconds": 1e999}',
        '{"step": 2, "time_seconds": [7]}',
        '{"step": true}',
        "{}",
    ],
)
def test_a_damaged_line_of_metrics_costs_only_itself_and_is_named(run_path: Path, line: str) -> None:
    run = RunDirectory(run_path)
    first, _, third = run.metrics.read_text().splitlines()
    run.metrics.write_text(f"{first}\n{line}\n{third}\n")
    viewer = client(run_path)
    assert viewer.get("/api/runs").json()[0]["step"] == 3
    curves = viewer.get("/api/curves", params={"run": "lake", "metric": "actor/entropy"}).json()
    assert curves["lake"]["actor/entropy"]["steps"] == [1, 3]
    assert "metrics.jsonl:2 is not a line of metrics" in write_report(run_path, "lake", {}, []).read_text()


@pytest.mark.parametrize("kind", ["pipe", "directory", "dangling link"])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.yaml", "run.json", "trajectories/validation/step_000000.jsonl"]
)
def test_what_is_no_file_hides_nothing_else(run_path: Path, name: str, kind: str) -> None:
    """Opening a pipe would block the viewer for ever."""
    (run_path / name).unlink()
    if kind == "pipe":
        os.mkfifo(run_path / name)
    elif kind == "directory":
        (run_path / name).mkdir()
    else:
        (run_path / name).symlink_to("missing")
    viewer = client(run_path)
    (row,) = viewer.get("/api/runs").json()
    assert name == "metrics.jsonl" or row["step"] == 3
    assert name == "config.yaml" or viewer.get("/api/config", params={"run": "lake"}).json()["values"]
    rows = viewer.get("/api/episodes", params={"run": "lake"}).json()["rows"]
    assert len([row for row in rows if row["step"] == 3]) == 3
    assert "step_000003" not in write_report(run_path, "lake", {}, [], episodes=3).read_text()


def test_numbers_that_are_no_json_are_shown_as_null(run_path: Path) -> None:
    path = RunDirectory(run_path).trajectories("validation", 3)
    lines = path.read_text().splitlines()
    stored = json.loads(lines[0])
    stored["turns"][0] |= {"logprobs": [float("nan")], "text": "\ud800"}
    path.write_text("\n".join((json.dumps(stored), *lines[1:])) + "\n")
    where = {"run": "lake", "split": "validation", "step": 3, "line": 0}
    episode = client(run_path).get("/api/group", params=where).json()[0]
    assert episode["turns"][0]["logprobs"] == [None]


@pytest.mark.parametrize(
    "text",
    [
        "a: &a [x]\n"
        + "\n".join(f"{n}: &{n} [{', '.join([f'*{m}'] * 9)}]" for m, n in zip("abcdefgh", "bcdefghi", strict=True)),
        "[" * 10_000,
        "a: &a [*a]",
        "\udcff",
        "a: 'x\u2028y'\nb: 1",
    ],
)
def test_a_hostile_configuration_does_not_keep_the_viewer(run_path: Path, text: str) -> None:
    RunDirectory(run_path).config.write_bytes(text.encode(errors="surrogateescape"))
    assert client(run_path).get("/api/config", params={"run": "lake"}).status_code == 200


def test_an_image_with_a_hostile_name_costs_only_itself_in_the_report(run_path: Path) -> None:
    path = RunDirectory(run_path).trajectories("validation", 3)
    stored = [json.loads(line) for line in path.read_text().splitlines()]
    for episode in stored:
        episode["turns"][0]["image_files"] = ["../../../../outside/image.png"]
    path.write_text("".join(json.dumps(episode) + "\n" for episode in stored))
    report = write_report(run_path, "lake", {}, [], episodes=3).read_text()
    assert "is no image of a trajectory" in report
    assert "3 of the 3 held-out episodes" in report
