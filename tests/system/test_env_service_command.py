"""If these fail, a run on an environment service is not the run that it is in one process, or its page is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import warm_processes

from quintet.tracking.metrics import without_timing

DOCS = Path(__file__).parents[2] / "docs"
PAGE, ENVS_PAGE = (DOCS / "env-service.md").read_text(), (DOCS / "envs.md").read_text()
Serve = Any
CONFIG = """\
training: {steps: 2, groups_per_step: 4, samples_per_group: 4, mini_batches: 2, threads: 1}
env: {slippery: true}
warm_start: {episodes: 60, updates: 12, turns_per_update: 32, until_success: null}
rollout: {max_turns: 4, think: false, max_response_tokens: 8}
validation: {episodes: 8, every_steps: 1}
checkpoint: {every_steps: 2}
"""


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = [without_timing(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "env/episodes_reassigned"} for line in lines]


def weights(run: Path) -> dict[str, str]:
    files = (run / "checkpoints/global_step_2").rglob("*.safetensors")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_run_on_two_servers_has_the_numbers_of_a_run_in_one_process(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "lake.yaml").write_text(CONFIG)
    servers = [serve("--env", "frozenlake", "--workers", "2", QUINTET_TOKEN="secret") for _ in range(2)]
    urls = json.dumps([url for _, url in servers])
    for name, words in (("alone", ()), ("served", (f"env.service={{urls: {urls}}}",))):
        warm_processes.run(
            [sys.executable, "-m", "quintet", "train", "lake.yaml", f"name={name}", *words],
            cwd=tmp_path,
            env={**os.environ, "QUINTET_TOKEN": "secret"},
            check=True,
            capture_output=True,
            timeout=240,
        )
    alone, served = tmp_path / "runs/alone", tmp_path / "runs/served"
    assert metrics(served) == metrics(alone)
    assert metrics(alone)[-1]["response/valid_format"] > 0.5
    assert weights(served) == weights(alone)
    for process, url in servers:
        with urllib.request.urlopen(f"{url}/health", timeout=20) as response:
            assert json.loads(response.read())["sessions"] == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM


def test_the_page_is_executed_as_it_stands(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "treasure.py").write_text(re.findall(r"```python\n(.*?)```", ENVS_PAGE, re.S)[0])
    command = re.search(r"^quintet serve-envs (.*) --port 5000$", PAGE, re.M)
    assert command is not None
    _, url = serve(*command[1].split())
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    done = warm_processes.run(
        [sys.executable, "-c", program.replace("http://127.0.0.1:5000", url)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    *grid, rewards, sums = done.stdout.splitlines()
    assert len(grid) == 6
    assert json.loads(rewards) in ([0.0, 0.0], [0.0], [0.0, 1.0])
    assert sums.startswith("[{'reward': ")


def test_options_of_the_page_are_those_of_the_command() -> None:
    help_text = warm_processes.run(
        [sys.executable, "-m", "quintet", "serve-envs", "--help"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    rows = re.search(r"\| option \|.*?\n\n", PAGE, re.S)
    assert rows is not None
    assert set(re.findall(r"--[a-z][a-z-]+", rows[0])) == set(re.findall(r"--[a-z][a-z-]+", help_text)) - {"--help"}
