"""If these fail, the viewer shows nothing, wrong data, or its data to a web page or a stranger."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fastapi.testclient import TestClient
from tests.unit.viewer.conftest import turn

from quintet.records import PROMPTS, Outcome, Trajectory
from quintet.runtime.http_service.address import Address
from quintet.tracking.image_files import write_image
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.trajectories import write_trajectories
from quintet.viewer.app import assets, build_app
from quintet.viewer.run_catalog import RunCatalog

LOCAL = "http://127.0.0.1:8080"


def client(*paths: Path, token: str | None = None, base_url: str = LOCAL) -> TestClient:
    app = build_app(RunCatalog(list(paths)), Address(token=token))
    return TestClient(app, base_url=base_url, raise_server_exceptions=False)


@pytest.fixture
def viewer(run_path: Path) -> TestClient:
    return client(run_path.parent)


def test_runs_are_listed_with_state_and_headline_metric(viewer: TestClient, run_path: Path) -> None:
    (run,) = viewer.get("/api/runs").json()
    assert (run["name"], run["state"], run["step"], run["seconds"]) == ("lake", "finished", 3, 6.0)
    other = run_path.parent / "deep" / "lake"
    shutil.copytree(run_path, other)
    names = [run["name"] for run in client(run_path, other).get("/api/runs").json()]
    assert sorted(names) == ["deep/lake", "lake"]


def test_the_diagnosis_says_what_it_could_not_judge_yet(viewer: TestClient, run_path: Path) -> None:
    diagnosis = viewer.get("/api/findings", params={"run": "lake"}).json()
    assert diagnosis["findings"] == []
    assert diagnosis["verdict"].startswith("nothing looks wrong so far, after 3 steps; ")
    assert any("The entropy of the policy has collapsed" in line for line in diagnosis["waiting"])
    (run_path / "metrics.jsonl").unlink()
    diagnosis = viewer.get("/api/findings", params={"run": "lake"}).json()
    assert diagnosis == {
        "findings": [],
        "verdict": "nothing could be judged: no metrics have been logged",
        "waiting": [],
    }


def test_an_error_names_its_hint_once(viewer: TestClient) -> None:
    answer = viewer.get("/api/findings", params={"run": "nowhere"})
    assert answer.json() == {"error": "no run is named nowhere", "hint": "reload the page"}


def test_a_run_that_starts_later_appears(viewer: TestClient, run_path: Path) -> None:
    assert len(viewer.get("/api/runs").json()) == 1
    shutil.copytree(run_path, run_path.parent / "second")
    assert {run["name"] for run in viewer.get("/api/runs").json()} == {"lake", "second"}


def test_curves_have_steps_times_and_values_with_meaning_and_healthy_range(viewer: TestClient) -> None:
    curves = viewer.get("/api/curves", params={"run": "lake", "metric": ["actor/entropy", "timing_s/gen"]}).json()
    assert curves["lake"]["timing_s/gen"] == {"steps": [1, 2, 3], "seconds": [2.0, 4.0, 6.0], "values": [0.75] * 3}
    definitions = {each["name"]: each for each in viewer.get("/api/metrics", params={"run": "lake"}).json()}
    assert {"actor/entropy", "timing_s/gen", "timing_s/step"} <= set(definitions)
    assert len(definitions) == 5
    assert definitions["actor/entropy"]["unit"] == "nats"


def test_episodes_are_filtered_and_shown_with_their_group(viewer: TestClient) -> None:
    page = viewer.get("/api/episodes", params={"run": "lake", "success": "true", "count": 1}).json()
    assert (page["complete"], page["total"], page["solved"], len(page["rows"])) == (True, 3, 3, 1)
    group = viewer.get("/api/group", params={"run": "lake", "split": "train", "step": 2, "line": 1}).json()
    assert [each["sample"] for each in group] == [1, 0]
    facets = viewer.get("/api/facets", params={"run": "lake"}).json()["facets"]
    assert facets["split"] == [["validation", 6], ["train", 2]]


def test_changes_between_two_validations_are_counted(viewer: TestClient) -> None:
    changes = viewer.get("/api/changes", params={"run": "lake", "before": 0, "after": 3}).json()
    assert (changes["total"], changes["lost"], changes["gained"]) == (3, 1, 1)
    assert changes["rows"][0]["before"]["success"] is True


def test_timeline_lists_phases_in_the_order_of_a_step(viewer: TestClient) -> None:
    timeline = viewer.get("/api/timeline", params={"run": "lake", "first": 1}).json()
    assert (timeline["rows"], [step["step"] for step in timeline["steps"]]) == (3, [2, 3])
    (step,) = timeline["steps"][0]["phase"]["parts"]
    assert [(part["name"], part["seconds"]) for part in step["parts"]] == [("gen", 0.75), ("other", 0.25)]


def test_settings_are_shown_with_their_sources_and_compared(viewer: TestClient, run_path: Path) -> None:
    shutil.copytree(run_path, run_path.parent / "second")
    config = (run_path.parent / "second/config.yaml").read_text()
    (run_path.parent / "second/config.yaml").write_text(config.replace("steps: 3", "steps: 9"))
    single = viewer.get("/api/config", params={"run": "lake"}).json()["values"]
    assert single["training.steps"] == {"text": "3", "source": "lake.yaml:4"}
    both = viewer.get("/api/config", params={"run": ["lake", "second"]}).json()
    assert both["differences"] == {"training.steps": ["3", "9"]}


def test_images_and_videos_are_served_and_no_other_file(viewer: TestClient, run_path: Path) -> None:
    folder = RunDirectory(run_path).trajectories("train", 2).parent
    name = write_image(folder, np.zeros((2, 2, 3), np.uint8))
    assert viewer.get("/api/image", params={"run": "lake", "split": "train", "name": name}).content.startswith(
        b"\x89PNG"
    )
    (run_path / "videos/seed_0").mkdir(parents=True)
    (run_path / "videos/seed_0/1.mp4").write_bytes(b"video")
    assert viewer.get("/api/videos", params={"run": "lake"}).json() == ["seed_0/1.mp4"]
    assert viewer.get("/api/video", params={"run": "lake", "name": "seed_0/1.mp4"}).content == b"video"
    for path in ("../config.yaml", "seed_0/../../config.yaml", str(run_path / "config.yaml")):
        assert viewer.get("/api/video", params={"run": "lake", "name": path}).status_code == 404
        assert viewer.get("/api/image", params={"run": "lake", "split": "train", "name": path}).status_code == 404
    assert viewer.get("/static/..%2f..%2fcli%2fview.py").status_code == 404


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/api/curves?run=nothing&metric=a", "no run is named nothing"),
        ("/api/group?run=lake&split=train&step=2&line=99", "no train episode 99 of step 2"),
        ("/api/image?run=lake&split=train&name=images/0.png", "no image"),
    ],
)
def test_errors_say_what_is_missing(viewer: TestClient, path: str, part: str) -> None:
    response = viewer.get(path)
    assert response.status_code == 404
    assert part in response.json()["error"]


def test_other_hosts_names_and_missing_tokens_are_refused(run_path: Path) -> None:
    assert client(run_path, base_url="http://evil.example").get("/api/runs").status_code == 403
    protected = client(run_path, token="secret", base_url="http://10.0.0.5:8080")
    assert protected.get("/api/runs").status_code == 401
    assert protected.get("/api/runs", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert protected.get("/?token=wrong", follow_redirects=False).status_code == 401
    redirect = protected.get("/?token=secret", follow_redirects=False)
    assert redirect.headers["location"] == "/"
    assert "HttpOnly" in redirect.headers["set-cookie"]
    assert protected.get("/api/runs").status_code == 200  # the cookie


def test_the_page_needs_no_network_and_little_script(viewer: TestClient) -> None:
    page = viewer.get("/")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    addresses = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert addresses
    assert all(address.startswith(("/static/", "data:")) for address in addresses)
    scripts = {name: text for name, text in assets().items() if name.endswith(".js")}
    assert sum(map(len, scripts.values())) <= 300_000
    for name, text in scripts.items():
        imported = re.findall(r'from "view/([\w.]+)"', text)
        assert set(imported) <= set(scripts), name
        assert viewer.get(f"/static/{name}").headers["content-type"].startswith("text/javascript")


def test_the_headline_of_fine_tuning_is_its_held_out_loss_and_of_a_reward_function_the_reward(run_path: Path) -> None:
    rows = [
        {"step": 1, "train/loss": 2.0, "train/lr": 0.1},
        {"step": 2, "train/loss": 1.0, "train/lr": 0.1, "val/loss": 1.5},
    ]
    (run_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run,) = client(run_path.parent).get("/api/runs").json()
    assert (run["metric"], run["values"]) == ("val/loss", [1.5])
    row = {"step": 1, "critic/score/mean": 0.4, "val/prompts/reward": 0.8}
    (run_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (run,) = client(run_path.parent).get("/api/runs").json()
    assert (run["metric"], run["values"]) == ("val/prompts/reward", [0.8])


def test_responses_to_prompts_are_described_without_words_of_games(run_path: Path) -> None:
    prompt = replace(turn("42"), actions=(), valid_format=False, reward=0.8, frames=())
    graded, scored = (
        Trajectory("sums", 3, group, 0, (prompt,), Outcome.TERMINATED, env_type=PROMPTS, measures_success=group == 0)
        for group in (0, 1)
    )
    run = RunDirectory(run_path)
    write_trajectories(run.trajectories("train", 9), 9, "train", [graded, scored], decode=lambda _: "<system>Be short.")
    viewer = client(run_path.parent)
    rows = viewer.get("/api/episodes", params={"run": "lake", "step": 9}).json()["rows"]
    words = sorted((row["outcome_text"], row["success_word"]) for row in rows)
    assert words == [("complete", ""), ("not correct", "correct")]
    line = {"run": "lake", "split": "train", "step": 9, "line": 0}
    (shown,) = viewer.get("/api/group", params=line).json()
    assert (shown["answers_prompt"], shown["checks_format"]) == (True, False)
    assert shown["turns"][0]["prompt_text"] == "<system>Be short."
