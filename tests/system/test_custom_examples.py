"""If these fail, a user who follows a page to code of their own (environment, simulator, reward, …) learns nothing."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_processes

ROOT = Path(__file__).parents[2]
MIDDLE = "between.yaml name=middle reward.function=between.py:near_middle 'reward.function_arguments={reach: 10}'"
EXAMPLES = {
    "environment": ("envs.md", "treasure.yaml", "val/custom/success_rate"),
    "environment with images": ("environments.md", "square.yaml", "val/custom/success_rate"),
    "simulator": ("embodied.md", "point.yaml", "val/simulator/success_rate"),
    "verifier": ("rewards.md", "between.yaml", "val/prompts/reward"),
    "reward": ("rewards.md", MIDDLE, "val/prompts/reward"),
    "advantage and loss": ("algorithms.md", "advantage.yaml", "val/frozenlake/success_rate"),
}


@pytest.mark.parametrize(("page", "arguments", "metric"), EXAMPLES.values(), ids=EXAMPLES.keys())
def test_the_example_of_a_page_learns(quintet: Any, tmp_path: Path, page: str, arguments: str, metric: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert f"$ quintet train {arguments}\n" in text
    for file in (ROOT / "examples/custom").glob(f"{arguments.partition('.')[0]}.*"):
        assert file.read_text() in text, file.name
        shutil.copy(file, tmp_path)
    if page == "rewards.md":
        assert "$ python between.py\n" in text
        subprocess.run([sys.executable, "between.py"], cwd=tmp_path, check=True, timeout=60)
    done = quintet("train", *shlex.split(arguments))
    assert "after RL" in done.stdout
    (path,) = tmp_path.glob("runs/*/metrics.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[-1][metric] >= lines[0][metric] + 0.2
    if page == "algorithms.md":
        # rewards are at least -0.4, 0.1 for each of 4 invalid turns, so halved differences at least -1.4 * 7 / 8 / 2
        assert min(line["critic/advantages/min"] for line in lines[1:]) >= -0.62


def test_the_environment_of_the_page_is_tried_by_hand_and_served(quintet: Any, tmp_path: Path) -> None:
    page = (ROOT / "docs/environments.md").read_text()
    for file in (ROOT / "examples/custom").glob("square.*"):
        shutil.copy(file, tmp_path)
    code = re.search(r"`by_hand.py`:\n\n```python\n(.*?)```", page, re.S)
    assert code
    (tmp_path / "by_hand.py").write_text(code[1])
    tried = subprocess.run(
        [sys.executable, "by_hand.py"], cwd=tmp_path, check=True, timeout=60, capture_output=True, text=True
    )
    assert (tmp_path / "square.png").read_bytes().startswith(b"\x89PNG")
    for line in tried.stdout.splitlines():
        assert f"`{line}`" in page
    command = re.search(r"^quintet (serve-envs .*) --port 5000$", page, re.M)
    train = re.search(r"^\$ quintet (train .*name=served.*)http://127.0.0.1:5000$", page, re.M)
    assert command
    assert train
    argv = [sys.executable, "-m", "quintet", *shlex.split(command[1]), "--port", "0", "--workers", "1"]
    with warm_processes.Popen(argv, cwd=tmp_path, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as server:
        try:
            assert server.stdout
            url = server.stdout.readline().split()[-1]
            less = ("warm_start.updates=2", "training.steps=1", "training.groups_per_step=4", "validation.episodes=6")
            quintet(*shlex.split(f"{train[1]}{url}"), *less)
        finally:
            server.terminate()
    assert len((tmp_path / "runs/served/metrics.jsonl").read_text().splitlines()) == 2
    assert list((tmp_path / "runs/served/trajectories/validation/images").glob("*.png"))
