"""If these fail, RLinf's own files for robots don't run: their keys, their simulators or their policies."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_processes
from tests.support.openvla_directories import robot_statistics, write_openvla_directory
from tests.support.robot_packages import write_packages

from quintet.pipelines.export import export
from quintet.tracking.metrics import without_timing

ROOT = Path(__file__).parents[2]
EXAMPLES, SUPPORT = ROOT / "examples" / "rlinf", ROOT / "tests" / "support"
SMALL_POLICY = ["actor.model.image_size=[14,14]", "runner.max_prompt_length=90"]
"""Sizes of the policies that `write_openvla_directory` writes, whose tokens are characters."""
SHORT = [
    *(f"env.{side}.max_episode_steps=16" for side in ("train", "eval")),
    *("env.eval.total_num_envs=4", "runner.max_steps=2", "runner.save_interval=1", "runner.val_check_interval=1"),
    "runner.logger.logger_backends=[tensorboard]",
]
MANISKILL = [
    *(f"cluster.component_placement.{part}=0" for part in ("env", "rollout", "actor")),
    *("actor.model.model_path=bridge", "actor.tokenizer.tokenizer_model=bridge", *SMALL_POLICY, *SHORT),
    *("env.train.total_num_envs=4", "actor.global_batch_size=4", "actor.micro_batch_size=2"),
]
LIBERO = [
    *("~cluster.component_placement", "actor.model.model_path=libero_10", *SMALL_POLICY, *SHORT),
    # a robot of the stand-in solves its task by chance in about every second of such episodes
    *("env.train.max_episode_steps=8", "env.train.total_num_envs=8", "algorithm.rollout_epoch=1"),
    *("actor.global_batch_size=4", "actor.micro_batch_size=4"),
]
STATE_POLICY = [
    *("env.train.total_num_envs=8", "env.eval.total_num_envs=4"),
    *(f"env.{side}.init_params.sim_backend=cpu" for side in ("train", "eval")),
    *(f"env.{side}.max_episode_steps=10" for side in ("train", "eval")),
    *(f"env.{side}.max_steps_per_rollout_epoch=10" for side in ("train", "eval")),
    *("actor.global_batch_size=40", "actor.micro_batch_size=20", "algorithm.update_epoch=2", "runner.max_epochs=2"),
    "runner.logger.logger_backends=[tensorboard]",
    # sizes of the robot of the stand-in
    *("actor.model.obs_dim=3", "actor.model.action_dim=7"),
]


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with policies, and with packages that stand in for simulators."""
    directory = tmp_path_factory.mktemp("robots")
    write_packages(directory / "packages")
    for policy, data_set in {"bridge": "bridge_orig", "libero_10": "libero_10_no_noops"}.items():
        write_openvla_directory(directory / policy, statistics=robot_statistics(data_set))
    return directory


def run(workdir: Path, file: Path, results: str, *overrides: str) -> str:
    """Run `quintet train` on a file; return what it prints."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(workdir / "packages"), str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
        "EMBODIED_PATH": str(file.parent),
        "REPO_PATH": str(file.parent),
        "LIBERO_CONFIG_PATH": str(workdir / "libero_config"),
        "MUJOCO_GL": "egl",
        "OMP_NUM_THREADS": "1",
    }
    overrides = (*overrides, f"runner.logger.log_path={workdir / results}")
    command = [sys.executable, "-m", "quintet", "train", str(file), *overrides]
    done = warm_processes.run(command, cwd=workdir, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def metrics(workdir: Path, results: str) -> list[dict[str, Any]]:
    """Return the metrics of each step of a run."""
    (file,) = (workdir / results).rglob("metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def assert_trained(lines: list[dict[str, Any]]) -> None:
    """Fail unless both steps changed the policy, and no episode failed."""
    assert [line["step"] for line in lines if line.get("actor/grad_norm", 0) > 0] == [1, 2]
    for line in lines:
        assert line.get("actor/skipped_updates", 0) == 0
        assert line.get("env/failed", 0) == 0


@pytest.fixture(scope="module")
def maniskill(workdir: Path) -> list[dict[str, Any]]:
    run(workdir, EXAMPLES / "maniskill_ppo_openvlaoft.yaml", "maniskill", *MANISKILL)
    return metrics(workdir, "maniskill")


@pytest.fixture(scope="module")
def libero(workdir: Path) -> list[dict[str, Any]]:
    run(workdir, EXAMPLES / "libero_10_grpo_openvlaoft.yaml", "libero", *LIBERO)
    return metrics(workdir, "libero")


def test_the_state_policy_of_rlinf_trains_two_steps(workdir: Path) -> None:
    run(workdir, SUPPORT / "rlinf_maniskill" / "maniskill_ppo_mlp.yaml", "state", *STATE_POLICY)
    assert_trained(metrics(workdir, "state"))


def test_ppo_of_openvla_oft_in_maniskill_trains_two_steps(maniskill: list[dict[str, Any]]) -> None:
    assert_trained(maniskill)


def test_grpo_of_openvla_oft_in_libero_trains_two_steps(libero: list[dict[str, Any]]) -> None:
    assert_trained(libero)


def test_videos_are_where_the_file_says(
    workdir: Path, maniskill: list[dict[str, Any]], libero: list[dict[str, Any]]
) -> None:
    films = [path for name in ("maniskill", "libero") for path in (workdir / name / "video").rglob("*.*")]
    assert {str(path.with_suffix("").relative_to(workdir)) for path in films} == {
        *(f"maniskill/video/train/seed_0/{rollout}" for rollout in (0, 1)),
        *(f"maniskill/video/train/validation/seed_0/{step}" for step in (1, 2)),
        *(f"libero/video/eval/seed_0/{step}" for step in (1, 2)),
    }


def test_a_run_that_is_resumed_after_a_step_has_the_metrics_of_the_whole_run(
    workdir: Path, maniskill: list[dict[str, Any]]
) -> None:
    (first,) = (workdir / "maniskill").rglob("global_step_1")
    overrides = (*MANISKILL, f"runner.resume_dir={first}")
    run(workdir, EXAMPLES / "maniskill_ppo_openvlaoft.yaml", "resumed", *overrides)
    assert without_timing(metrics(workdir, "resumed")[-1]) == without_timing(maniskill[-1])


def test_the_exported_policy_is_only_evaluated_and_acts_as_in_the_run(
    workdir: Path, libero: list[dict[str, Any]]
) -> None:
    export(str(next((workdir / "libero").rglob("global_step_2"))), workdir / "exported")
    assert "Set `policy.path`" in (workdir / "exported" / "README.md").read_text()
    overrides = (*LIBERO, "runner.only_eval=True", "actor.model.model_path=exported")
    shown = run(workdir, EXAMPLES / "libero_10_grpo_openvlaoft.yaml", "evaluated", *overrides)
    assert "success, libero_10_task_0" in shown
    (line,) = metrics(workdir, "evaluated")
    validated = {name: value for name, value in libero[-1].items() if name.startswith("val/")}
    assert {name: line[name] for name in validated} == validated
    assert "val/simulator/task/libero_10_task_1/success_once" in validated
    assert actions(workdir / "evaluated", 0) == actions(workdir / "libero", 2)


def actions(results: Path, step: int) -> list[Any]:
    """Return the actions of each chunk of the episodes of a validation."""
    (file,) = results.rglob(f"trajectories/validation/step_{step:06d}.jsonl")
    return [turn["actions"] for line in file.read_text().splitlines() for turn in json.loads(line)["turns"]]
