"""If these fail, a vision-language policy cannot be trained to write SVG code."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

Command = Callable[..., subprocess.CompletedProcess[str]]
RUN = """\
name: svg
env: {name: svg, max_shapes: 1, image_size: 32, format_penalty: -0.1}
policy: {preset: grid-vl}
rollout: {max_turns: 2, think: false, window_size: null, max_response_tokens: 48}
warm_start: {episodes: 24, updates: 3, turns_per_update: 8, until_success: null}
training: {steps: 2, groups_per_step: 2, samples_per_group: 4, mini_batches: 1, threads: 1}
algorithm: {advantage: {name: grpo}}
validation: {episodes: 4, every_steps: -1}
tracking: {trajectories_every_steps: 1}
"""


def test_two_steps_of_a_run_with_svg(tmp_path: Path, quintet: Command) -> None:
    (tmp_path / "svg.yaml").write_text(RUN)
    quintet("train", "svg.yaml")
    lines = [json.loads(line) for line in (tmp_path / "runs/svg/metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in lines) == 2
    assert all(line.get("training/rollout_probs_diff_max", 0.0) < 1e-4 for line in lines)
    (episodes,) = (tmp_path / "runs/svg/trajectories/train").glob("step_*1.jsonl")
    turns = json.loads(episodes.read_text().splitlines()[0])["turns"]
    assert len(turns) == 2
    assert "invalid" in turns[1]["observation"] or "scores" in turns[1]["observation"]
