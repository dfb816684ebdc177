"""If these fail, an evaluation of VAGEN is not planned as what its files say, or without saying what it waits for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from quintet.cli.config_source import read_config_source
from quintet.config.capabilities import Capability
from quintet.config.dialects.composition.foreign_config import compose_config
from quintet.config.dialects.loader import ConversionResult, convert
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dotted import flatten
from quintet.config.plan.batch_arithmetic import compute_batch_arithmetic
from quintet.errors import ConfigError

LAKE = {"name": "FrozenLake", "n_envs": 128, "tag_id": "lake", "seed": [0, 128, 1], "config": {"size": 6}}
ROOM = {"name": "Sokoban", "n_envs": 12, "tag_id": "room", "seed": [0, 12, 1], "split": "test"}
FILE: dict[str, Any] = {
    "defaults": ["../shared/eval_default", "mine"],
    "fileroot": "/data/vagen",
    "envs": [LAKE],
    "experiment": {"dump_dir": "${fileroot}/rollouts/lakes", "default_max_turns": 7},
    "run": {"backend": "openai", "base_seed": 3, "max_concurrent_jobs": 9, "live_summary": False},
    "backends": {"openai": {"model": "gpt-4.1-mini", "api_key": "secret"}},
}
SCRIPT = """\
set -euo pipefail
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
CONFIG="${1:-$HERE/config.yaml}"
shift 2>/dev/null || true
python -m vagen.evaluate.run_eval --config "$CONFIG" run.max_concurrent_jobs=5 "$@" 2>&1 | tee run.log
"""


def evaluated(directory: Path, *words: str, script: bool = True, **changes: Any) -> ConversionResult:
    """What the file of an evaluation asks for, with or without the script that names it."""
    (directory / "config.yaml").write_text(yaml.safe_dump(FILE | changes))
    (directory / "mine.yaml").write_text("run: {max_concurrent_jobs: 64, resume: 'off'}\n")
    (directory / "run_eval.sh").write_text(SCRIPT)
    source = read_config_source(str(directory / ("run_eval.sh" if script else "config.yaml")), words, None, quiet=True)
    composed = compose_config(source.path, source.overrides, source.override_sources, source.environment)
    return convert(composed, DIALECTS[source.dialect], to_plan=True)


def natively(found: ConversionResult) -> dict[str, Any]:
    return flatten(found.composed.experiment.model_dump())


@pytest.mark.proves(
    "vagen",
    *(f"experiment.{name}" for name in ("dump_dir", "default_max_turns")),
    *(f"run.{name}" for name in ("base_seed", "max_concurrent_jobs", "resume", "live_summary")),
    *("fileroot", "backends", "train_envs.env1.split"),
)
def test_a_script_is_planned_as_the_validation_of_its_file(tmp_path: Path) -> None:
    """The numbers of the file, those of the script above it, and those of `mine.yaml` below."""
    found = evaluated(tmp_path)
    run = natively(found)
    assert (run["validation.only"], run["validation.episodes"], run["training.steps"]) == (True, 128, 0)
    assert (run["env.name"], run["env.size"], run["rollout.max_turns"]) == ("frozenlake", 6, 7)
    assert (run["seed"], run["rollout.max_concurrent"], run["policy.path"]) == (3, 5, "gpt-4.1-mini")
    assert (run["output_dir"], run["name"]) == ("/data/vagen/rollouts", "lakes")
    assert natively(evaluated(tmp_path, script=False))["rollout.max_concurrent"] == 9
    without = {name: value for name, value in FILE["run"].items() if name != "max_concurrent_jobs"}
    assert natively(evaluated(tmp_path, script=False, run=without))["rollout.max_concurrent"] == 64
    numbers = compute_batch_arithmetic(found.composed)
    assert (numbers.validations, numbers.episodes, numbers.optimizer_steps) == (1, 0, 0)
    (problem,) = found.unsupported
    assert (problem.key, str(Capability.API_MODELS) in problem.message) == ("run.backend", True)


@pytest.mark.proves("vagen", "default_chat_config", "train_envs.env1.chat_config")
def test_sampling_is_that_of_the_environment_before_that_of_all(tmp_path: Path) -> None:
    shared = {"max_tokens": 100, "temperature": 0.5}
    run = natively(evaluated(tmp_path, default_chat_config=shared))
    assert (run["rollout.max_response_tokens"], run["validation.sampling.temperature"]) == (100, 0.5)
    own = {"max_tokens": 1024, "temperature": 0, "top_p": 0.9}
    run = natively(evaluated(tmp_path, default_chat_config=shared, envs=[LAKE | {"chat_config": own}]))
    assert (run["rollout.max_response_tokens"], run["validation.sampling.do_sample"]) == (1024, False)
    assert (run["validation.sampling.top_p"], run["rollout.max_prompt_tokens"]) == (0.9, 7 * 1024)
    assert any("no max_tokens" in remark for remark in evaluated(tmp_path).composed.remarks)


@pytest.mark.proves("vagen", "train_envs.env1.tag_id", "train_envs.env1.concat_multi_turn")
def test_several_environments_are_named_by_their_tags_and_limits_that_differ_wait(tmp_path: Path) -> None:
    alone = ROOM | {"concat_multi_turn": False}
    assert natively(evaluated(tmp_path, envs=[alone]))["rollout.window_size"] == 1
    found = evaluated(tmp_path, envs=[LAKE, alone | {"max_turns": 3}])
    envs = found.composed.experiment.envs
    assert {name: (env.env.name, env.validation_episodes) for name, env in envs.items()} == {
        "lake": ("frozenlake", 128),
        "room": ("sokoban", 12),
    }
    waiting = {problem.key for problem in found.unsupported}
    assert waiting == {"run.backend", "val_envs.env1.max_turns", "val_envs.env1.concat_multi_turn"}


def test_files_that_are_no_evaluation_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no environments: it is no run"):
        evaluated(tmp_path, envs=[])
    with pytest.raises(ConfigError, match=r"FrozenLake has no such option"):
        evaluated(tmp_path, envs=[LAKE | {"config": {"num_boxes": 1}}])
    (tmp_path / "other.yaml").write_text("a: 1\n")
    (tmp_path / "run.sh").write_text("python -m vagen.evaluate.run_eval --config other.yaml\n")
    with pytest.raises(ConfigError, match=r"other\.yaml is no file of an evaluation"):
        read_config_source(str(tmp_path / "run.sh"), [], None, quiet=True)
