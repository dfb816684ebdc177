"""If these fail, checkpoints fill a disk in the middle of a run, or a run that would fit is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from example_models import PARAMETERS, at

from quintet.config.compose import load_experiment
from quintet.config.composed import ComposedConfig
from quintet.config.plan.disk import LOG_BYTES, disk_problem
from quintet.config.plan.run_plan import plan_run, planned_disk

P = PARAMETERS["Qwen2.5-0.5B"]
CRITIC = P + 896 + 1
ADAPTERS = 24 * 8 * ((896 + 896) * 2 + (896 + 128) * 2 + (896 + 4864) * 3)


def run(tmp_path: Path, *words: str) -> ComposedConfig:
    """A run of Qwen2.5-0.5B that saves after every 10 of 100 steps."""
    model = ("policy.preset=null", f"policy.path={at(tmp_path, 'Qwen2.5-0.5B')}", f"output_dir={tmp_path}/runs")
    return load_experiment(None, [*model, "training.steps=100", "checkpoint.every_steps=10", *words])


@pytest.mark.parametrize(
    ("words", "checkpoint", "checkpoints"),
    [
        ((), 12 * P, 3),
        (("checkpoint.keep=5",), 12 * P, 6),
        (("checkpoint.contents=[model]",), 4 * P, 3),
        (("algorithm.advantage.name=gae",), 12 * (P + CRITIC), 3),
        (("algorithm.kl={coefficient: 0.1}",), 16 * P, 3),
        (("policy.lora={rank: 8}",), 8 * P + 8 * ADAPTERS + 8 * ADAPTERS, 3),
    ],
)
def test_a_checkpoint_has_weights_and_two_moments_of_every_learner(
    words: tuple[str, ...], checkpoint: int, checkpoints: int, tmp_path: Path
) -> None:
    """In float32. With adapters it has the merged weights, and those of the learner with the adapters beside them."""
    use = planned_disk(run(tmp_path, *words))
    assert (use.checkpoint, use.checkpoints) == (checkpoint, checkpoints)
    assert use.total == checkpoint * checkpoints


def test_the_first_checkpoint_has_no_moments(tmp_path: Path) -> None:
    """A run that keeps all 11."""
    use = planned_disk(run(tmp_path, "checkpoint.keep=100"))
    assert use.total == 4 * P + 10 * 12 * P


def test_final_weights_of_fine_tuning_take_space(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n" * 64)
    words = ("sft.batch=16", f"data.train_files=[{tmp_path}/rows.jsonl]", "checkpoint.every_steps=0")
    use = planned_disk(run(tmp_path, *words))
    assert (use.checkpoints, use.total) == (1, 12 * P + 4 * P)
    assert planned_disk(run(tmp_path, *words, "sft.epochs=5")).total == 3 * 12 * P + 4 * P


def test_a_run_that_would_fill_the_disk_is_refused_with_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed = run(tmp_path, "checkpoint.keep=100")
    use = planned_disk(composed)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=use.total + LOG_BYTES))
    assert disk_problem(composed, use) is None
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=5 * 12 * P + LOG_BYTES))
    problem = disk_problem(composed, use)
    assert problem is not None
    assert problem.message.startswith("checkpoint.keep = 100 (command line): 11 checkpoints of up to 5.5 GiB at a time")
    assert problem.hint == "checkpoint.keep=4, or output_dir=DIRECTORY"
    fitting = run(tmp_path, "checkpoint.keep=4")
    assert disk_problem(fitting, planned_disk(fitting)) is None
    assert any("a run does not start with them" in line for line in plan_run(composed).warnings)


def test_checkpoints_that_are_there_count_as_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    composed = run(tmp_path)
    use = planned_disk(composed)
    stored = tmp_path / "runs" / composed.experiment.name / "checkpoints/global_step_10/weights"
    stored.parent.mkdir(parents=True)
    with stored.open("wb") as file:
        file.truncate(12 * P)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2 * 12 * P + LOG_BYTES))
    assert disk_problem(composed, use) is None
    stored.unlink()
    assert disk_problem(composed, use) is not None
