"""If these fail, a whole run on Megatron goes otherwise than others, or doesn't heed an option of such runs."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from quintet.config.compose import load_experiment
from quintet.config.native.experiment import Experiment
from quintet.errors import ConfigError
from quintet.pipelines.policy_optimization import shuffle_generator
from quintet.pipelines.rl import train

OVERRIDES = (
    "training.groups_per_step=2",
    "training.samples_per_group=2",
    "training.mini_batches=1",
    "training.threads=1",
    "warm_start={episodes: 20, updates: 2, turns_per_update: 8, until_success: null}",
    "rollout.max_turns=2",
    "validation.every_steps=-1",
    "validation.before_training=false",
    "checkpoint.every_steps=1",
    "checkpoint.keep=5",
    "tracking.loggers=[jsonl]",
)


pytestmark = pytest.mark.usefixtures("megatron_alone")


def rows(directory: Path, *overrides: str, name: str = "run") -> list[dict[str, float]]:
    run_overrides = (*OVERRIDES, f"output_dir={directory}", f"name={name}", *overrides)
    train(load_experiment(None, run_overrides), Console(file=io.StringIO()))
    return [json.loads(line) for line in (directory / name / "metrics.jsonl").read_text().splitlines()]


def test_a_megatron_run_matches_the_torch_backend(tmp_path: Path) -> None:
    ours = rows(tmp_path, "training.steps=2", "actor.backend=megatron", name="ours")
    theirs = rows(tmp_path, "training.steps=2", name="theirs")
    for one, two in zip(ours, theirs, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "warm_start/loss", "actor/lr"):
            if name in two:
                assert one[name] == pytest.approx(two[name], rel=2e-3, abs=1e-4), name
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ours/checkpoints/global_step_2/hf")


def test_a_mixture_of_experts_learns_as_elsewhere_and_goes_on_there(tmp_path: Path) -> None:
    """Beside the embedded engine, which gets the weights after each step; then on other backends, and back."""
    common = ("policy.preset=grid-moe", "algorithm.kl={place: loss, estimator: k3}", "algorithm.advantage={name: gae}")
    megatron = tuple(f"{name}.backend=megatron" for name in ("actor", "critic", "reference"))
    ours = rows(tmp_path, *common, *megatron, "training.steps=2", name="ours")
    theirs = rows(tmp_path, *common, "training.steps=2", name="theirs")
    same(ours, theirs)
    assert all(row["training/rollout_probs_diff_max"] < 1e-5 for row in ours if "training/global_step" in row)
    same(rows(tmp_path, *common, "training.steps=3", name="ours"), rows(tmp_path, *common, "training.steps=3"))
    rows(tmp_path, *common, *megatron, "training.steps=3", name="theirs")
    one, two = (dict(tensors(tmp_path / f"{name}/checkpoints/global_step_3/hf")) for name in ("ours", "theirs"))
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], atol=1e-3, rtol=1e-3)


def same(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    for one, two in zip(ours, theirs, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/vf_loss", "actor/kl_loss"):
            if name in two:
                assert one[name] == pytest.approx(two[name], rel=2e-3, abs=1e-4), name


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


LINEAR = "actor.optimizer={schedule: linear, warmup_steps: 0, min_learning_rate_ratio: 0.0, learning_rate: %s}"
KEPT = "actor.megatron={use_checkpoint_opt_param_scheduler: true}"


@pytest.mark.proves("verl", "optim.use_checkpoint_opt_param_scheduler")
@pytest.mark.parametrize(
    ("overrides", "rate"),
    [
        ((KEPT, LINEAR % 5e-4), 1e-3 * 1 / 4),
        (("actor.megatron={}", LINEAR % 1e-3), 1e-3 * 5 / 8),
    ],
)
def test_a_resumed_run_keeps_the_checkpoints_schedule_where_it_is_told_to(
    tmp_path: Path, overrides: tuple[str, str], rate: float
) -> None:
    """Down to nothing in four steps; gone on with for eight, and with half the rate."""
    keep, later = overrides
    common = ("actor.backend=megatron", keep)
    rows(tmp_path, *common, "training.steps=4", LINEAR % 1e-3)
    for step in (3, 4):
        shutil.rmtree(tmp_path / f"run/checkpoints/global_step_{step}")
    actual = rows(tmp_path, *common, "training.steps=8", later)
    (third,) = [row for row in actual if row.get("training/global_step") == 3][-1:]
    assert third["actor/lr"] == pytest.approx(rate, rel=1e-6)


def test_another_rate_is_refused_without_that(tmp_path: Path) -> None:
    rows(tmp_path, "training.steps=1", LINEAR % 1e-3)
    with pytest.raises(ConfigError, match=r"actor\.optimizer\.learning_rate"):
        rows(tmp_path, "training.steps=2", LINEAR % 5e-4)


@pytest.mark.proves("verl", "actor_rollout_ref.actor.data_loader_seed")
def test_mini_batch_shuffling_uses_its_own_seed() -> None:
    def order(seed: int, own: int | None) -> list[int]:
        run = Experiment.model_validate({"seed": seed, "actor": {"shuffle_seed": own}})
        return torch.randperm(32, generator=shuffle_generator(run, 3, 0)).tolist()

    assert order(1, 7) == order(2, 7) != order(1, None)
    assert order(1, None) != order(2, None)
    assert order(1, None) == order(5, 1)
    assert shuffle_generator(Experiment.model_validate({"actor": {"shuffle": False}}), 3, 0) is None


def test_a_model_without_experts_has_no_router_to_freeze(tmp_path: Path) -> None:
    for backend in ("fsdp2", "megatron"):
        with pytest.raises(ConfigError, match="no experts"):
            rows(tmp_path, "policy.freeze_router=true", f"actor.backend={backend}", name=backend)
