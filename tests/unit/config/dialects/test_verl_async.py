"""If these fail, a file of verl's trainers with devices of their own for engines is another run than there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted

from quintet.cli.configuration import inspect_config
from quintet.config.dialects.loader import ConversionResult
from quintet.config.native.experiment import Experiment
from quintet.errors import ConfigError

ACTOR, ROLLOUT, ASYNC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "async_training"
ONE_STEP_OFF: dict[str, Any] = {
    "actor_rollout_ref.model.path": "some/model",
    "data.train_batch_size": 64,
    f"{ACTOR}.ppo_mini_batch_size": 16,
    f"{ROLLOUT}.name": "hf",
    f"{ROLLOUT}.n": 2,
    "algorithm.rollout_correction.bypass_mode": True,
    "trainer.n_gpus_per_node": 2,
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 6,
}
FULLY_ASYNC: dict[str, Any] = {
    **ONE_STEP_OFF,
    "data.train_batch_size": 0,
    f"{ASYNC}.require_batches": 2,
    f"{ASYNC}.trigger_parameter_sync_step": 3,
    f"{ASYNC}.staleness_threshold": 0.5,
}
MODULES = "verl.experimental."


def run(tmp_path: Path, keys: dict[str, Any]) -> ConversionResult:
    return converted(tmp_path, "verl", changed({}, keys))


def experiment(tmp_path: Path, keys: dict[str, Any]) -> Experiment:
    return run(tmp_path, keys).composed.experiment


@pytest.mark.proves("verl", "rollout.nnodes", "rollout.n_gpus_per_node")
@pytest.mark.parametrize(
    ("learners", "engines", "nodes", "devices", "learner_devices"),
    [
        ((1, 2), (1, 6), 1, 8, (0, 1)),
        ((2, 2), (2, 6), 2, 8, (0, 1, 8, 9)),
        ((1, 8), (2, 8), 3, 8, tuple(range(8))),
        ((1, 2), (3, 2), 4, 2, (0, 1)),
    ],
)
def test_learners_and_engines_have_devices_of_their_own(
    tmp_path: Path,
    learners: tuple[int, int],
    engines: tuple[int, int],
    nodes: int,
    devices: int,
    learner_devices: tuple[int, ...],
) -> None:
    sizes = {"trainer.nnodes": learners[0], "trainer.n_gpus_per_node": learners[1]}
    sizes |= {"rollout.nnodes": engines[0], "rollout.n_gpus_per_node": engines[1]}
    placement = experiment(tmp_path, {**ONE_STEP_OFF, **sizes}).placement
    assert (placement.nodes, placement.devices_per_node) == (nodes, devices)
    assert placement.actor.devices == placement.reference.devices == placement.critic.devices == learner_devices
    others = tuple(device for device in range(nodes * devices) if device not in learner_devices)
    assert placement.rollout.devices == others


def test_nodes_of_different_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"for example rollout\.n_gpus_per_node=2"):
        run(tmp_path, {**ONE_STEP_OFF, "rollout.nnodes": 2})


def test_the_next_batch_is_generated_while_the_policy_trains(tmp_path: Path) -> None:
    config = experiment(tmp_path, ONE_STEP_OFF)
    assert (config.rollout.async_ratio, config.rollout.partial) == (1.0, False)
    assert not config.rollout.engine_options.sleep_between_steps
    assert (config.training.groups_per_step, config.training.mini_batches) == (64, 4)


@pytest.mark.proves("verl", f"{ASYNC}.require_batches", f"{ASYNC}.trigger_parameter_sync_step")
@pytest.mark.proves("verl", f"{ASYNC}.concurrent_samples_per_replica", "rollout.total_rollout_steps")
def test_a_step_of_the_fully_asynchronous_trainer_ends_with_a_weight_sync(tmp_path: Path) -> None:
    """2 mini-batches of 16 prompts, 3 times, before the weights are synchronized."""
    keys = {"rollout.total_rollout_steps": 1000, f"{ASYNC}.concurrent_samples_per_replica": 4}
    config = experiment(tmp_path, {**FULLY_ASYNC, **keys, f"{ROLLOUT}.tensor_model_parallel_size": 2})
    assert (config.training.groups_per_step, config.training.mini_batches) == (96, 6)
    assert config.training.samples_per_group == 2
    assert config.data is not None
    assert config.data.max_steps == 10
    assert (config.rollout.async_ratio, config.rollout.partial) == (0.5, True)
    assert config.rollout.max_concurrent == 4 * 2 * 3
    assert not config.rollout.recompute_logprobs


def test_its_batch_size_has_no_effect(tmp_path: Path) -> None:
    """verl's own file of this trainer has 1024."""
    found = run(tmp_path, {**FULLY_ASYNC, "data.train_batch_size": 64})
    assert found.composed.experiment.training.groups_per_step == 96
    assert any("data.train_batch_size = 64" in remark for remark in found.composed.remarks)


def test_mini_batches_need_not_be_divisible_by_its_devices(tmp_path: Path) -> None:
    """verl pads them."""
    sizes = {"trainer.n_gpus_per_node": 3, "rollout.n_gpus_per_node": 3, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1}
    config = experiment(tmp_path, {**FULLY_ASYNC, **sizes, f"{ACTOR}.use_dynamic_bsz": True})
    assert config.training.groups_per_step == 96


def test_several_epochs_over_each_update_wait(tmp_path: Path) -> None:
    unsupported = run(tmp_path, {**FULLY_ASYNC, f"{ACTOR}.ppo_epochs": 2}).unsupported
    assert any("ppo_epochs" in problem.message for problem in unsupported)


@pytest.mark.proves("verl", "rollout.n", f"{ASYNC}.use_trainer_do_validate", f"{ACTOR}.use_rollout_log_probs")
def test_keys_that_verl_does_not_read_change_nothing(tmp_path: Path) -> None:
    keys = {"rollout.n": 7, f"{ASYNC}.use_trainer_do_validate": True, f"{ACTOR}.use_rollout_log_probs": False}
    assert experiment(tmp_path, {**FULLY_ASYNC, **keys}) == experiment(tmp_path, FULLY_ASYNC)


@pytest.mark.proves("verl", f"{ROLLOUT}.enable_sleep_mode")
def test_a_key_of_all_rollouts_is_refused_outside_of_asynchronous_trainers(tmp_path: Path) -> None:
    """verl's class `RolloutConfig` has it since 0.7, and the trainers' files don't."""
    synchronous = {key: value for key, value in ONE_STEP_OFF.items() if not key.startswith("rollout.")}
    for trainer in (FULLY_ASYNC, synchronous):
        keys = {**trainer, f"{ROLLOUT}.enable_sleep_mode": False}
        assert experiment(tmp_path, keys) == experiment(tmp_path, trainer)


@pytest.mark.parametrize(
    ("key", "value"),
    [(f"{ASYNC}.use_dynamic_resource_scheduling", True), (f"{ROLLOUT}.standalone_gpu_memory_utilization", 0.5)],
)
def test_engines_on_the_devices_of_the_trainer_wait(tmp_path: Path, key: str, value: Any) -> None:
    unsupported = run(tmp_path, {**FULLY_ASYNC, key: value}).unsupported
    assert any(key in problem.message and "asynchronous" in problem.message for problem in unsupported)


@pytest.mark.parametrize(
    ("module", "keys", "async_ratio", "groups"),
    [
        ("one_step_off_policy.main_ppo", {"data.train_batch_size": 64}, 1.0, 64),
        ("fully_async_policy.fully_async_main", {"data.train_batch_size": 0}, 0.1, 64),
    ],
)
def test_a_script_of_these_trainers_has_the_defaults_of_their_files(
    tmp_path: Path, module: str, keys: dict[str, Any], async_ratio: float, groups: int
) -> None:
    words = {"actor_rollout_ref.model.path": "m", f"{ACTOR}.ppo_mini_batch_size": 16, f"{ROLLOUT}.name": "hf", **keys}
    command = " ".join(f"{key}={value}" for key, value in words.items())
    (tmp_path / "run.sh").write_text(f"python3 -m {MODULES}{module} {command}\n")
    config = inspect_config(str(tmp_path / "run.sh"), [], None, "refuse").composed.experiment
    assert config.rollout.async_ratio == async_ratio
    assert config.training.groups_per_step == groups
    assert not config.rollout.recompute_logprobs
    assert config.placement.rollout.devices == tuple(range(8, 16))
