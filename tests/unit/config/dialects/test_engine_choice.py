"""If these fail, a foreign run generates with another engine than its user asked for, or one that isn't there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, machine, natively

from quintet.config.capabilities import Capability
from quintet.config.checks.unsupported import run_problems
from quintet.config.dialects.composition.foreign_config import compose_config, config_from_tree
from quintet.config.dialects.loader import convert, load_config
from quintet.config.dialects.registry import DIALECTS
from quintet.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
VERL: dict[str, Any] = {"actor_rollout_ref": {"model": {"path": "some/model"}}}
ONE = {"trainer.n_gpus_per_node": 1, f"{ROLLOUT}.tensor_model_parallel_size": 1}
RLINF: dict[str, Any] = {"runner": {"task_type": "math"}, "rollout": {"model": {"model_path": "some/model"}}}


def remarks(found: Any) -> str:
    return "\n".join(found.remarks)


def test_a_references_engine_runs_where_it_and_a_gpu_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=2, packages=("vllm",))
    found = converted(tmp_path, "verl", VERL)
    assert "rollout.engine" not in found.replaced_defaults
    assert natively(found, "rollout.engine") == "vllm"
    assert natively(found, "rollout.engine_options.load_format") == "dummy"


@pytest.mark.parametrize(
    ("gpus", "packages", "why"),
    [(0, ("vllm",), "vllm needs an accelerator, and this machine has none"), (2, (), "vllm is not installed here")],
)
def test_elsewhere_hf_generates_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, packages: tuple[str, ...], why: str
) -> None:
    machine(monkeypatch, gpus=gpus, packages=packages)
    found = converted(tmp_path, "verl", VERL)
    assert found.replaced_defaults["rollout.engine"] == "hf"
    assert found.replaced_defaults["rollout.engine_options.tensor_parallel"] == 1
    assert f"{why} (default: {ROLLOUT}.name = 'vllm'): using hf" in remarks(found)
    assert natively(found, "rollout.engine") == "vllm", "a translation keeps what the file says"


@pytest.mark.parametrize("name", ["vllm", "sglang", "hf"])
def test_an_engine_that_was_asked_for_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine(monkeypatch, gpus=0)
    found = converted(tmp_path, "verl", changed(VERL, {f"{ROLLOUT}.name": name}))
    assert "rollout.engine" not in found.replaced_defaults
    assert natively(found, "rollout.engine") == name
    assert "using hf" not in remarks(found)


def test_more_devices_than_there_are_and_that_nobody_asked_for_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, gpus=1, packages=("vllm",))
    found = converted(tmp_path, "verl", VERL)
    assert found.replaced_defaults["rollout.engine_options.tensor_parallel"] == 1
    assert "tensor_model_parallel_size = 2 needs more GPUs than this machine has: using 1" in remarks(found)
    machine(monkeypatch, gpus=2, packages=("vllm",))
    assert "rollout.engine_options.tensor_parallel" not in converted(tmp_path, "verl", VERL).replaced_defaults
    asked = changed(VERL, {f"{ROLLOUT}.tensor_model_parallel_size": 4})
    assert "rollout.engine_options.tensor_parallel" not in converted(tmp_path, "verl", asked).replaced_defaults


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{ROLLOUT}.tensor_model_parallel_size", 4),
        (f"{ROLLOUT}.engine_kwargs.vllm.swap_space", 8),
        (f"{ROLLOUT}.dtype", "float16"),
    ],
)
def test_an_option_that_was_asked_for_is_never_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, value: Any
) -> None:
    machine(monkeypatch, gpus=0)
    (fault,) = [one for one in converted(tmp_path, "verl", changed(VERL, {key: value})).unsupported if one.key == key]
    assert "engine hf" in fault.message
    assert "vllm is not installed here" in fault.message
    assert str(fault.hint).startswith(f"leave {key} out, or {ROLLOUT}.name=vllm")


def test_what_hf_honours_reaches_it_in_vllms_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=0)
    tree = changed(VERL, {**ONE, f"{ROLLOUT}.max_num_batched_tokens": 4096, "data.train_files": "a.parquet"})
    rollout = load_config(config_from_tree(tree, "given.yaml:1"), DIALECTS["verl"]).experiment.rollout
    options = rollout.engine_options
    assert (rollout.engine, options.max_batched_tokens, options.sleep_between_steps) == ("hf", 4096, True)


def test_an_engine_that_isnt_there_at_all_waits_by_name(tmp_path: Path) -> None:
    found = converted(tmp_path, "verl", changed(VERL, {f"{ROLLOUT}.name": "trtllm"}))
    (fault,) = [one for one in found.unsupported if one.key == f"{ROLLOUT}.name"]
    assert "is not supported yet: requires an engine of TensorRT-LLM" in fault.message


def test_rolls_engine_is_the_same_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=0)
    plain = {"actor_train": {"data_args": {"file_name": "train.json"}}}
    found = converted(tmp_path, "roll", plain)
    assert found.replaced_defaults["rollout.engine"] == "hf"
    assert found.replaced_defaults["rollout.engine_options.block_size"] is None
    asked = changed(plain, {"actor_infer.strategy_args.strategy_name": "sglang"})
    assert "rollout.engine" not in converted(tmp_path, "roll", asked).replaced_defaults
    assert found.composed.experiment.rollout.engine_options.block_size == 16


def test_a_few_held_out_prompts_at_a_time_are_only_what_somebody_asks_for(tmp_path: Path) -> None:
    key = "algorithm.val_rollout_batch_size_per_gpu"
    found = converted(tmp_path, "rlinf", RLINF)
    assert found.replaced_defaults["validation.prompts_per_device"] is None
    assert f"{key} = 4 is left out" in remarks(found)
    assert (
        "validation.prompts_per_device" not in converted(tmp_path, "rlinf", changed(RLINF, {key: 4})).replaced_defaults
    )


def test_episodes_that_outlast_their_step_keep_the_engine_awake(tmp_path: Path) -> None:
    ahead = {"async_training.staleness_threshold": 0.5}
    assert not natively(converted(tmp_path, "verl", changed(VERL, ahead)), "rollout.engine_options.sleep_between_steps")
    with pytest.raises(ConfigError, match=r"free_cache_engine excludes async_training\.staleness_threshold > 0"):
        converted(tmp_path, "verl", changed(VERL, {**ahead, f"{ROLLOUT}.free_cache_engine": True}))


def test_verls_own_file_of_engine_keys_is_no_wish_to_free_the_cache(tmp_path: Path) -> None:
    own = tmp_path / "trainer/config/rollout/rollout.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("free_cache_engine: true\n")
    file = own.parent.parent / "asynchronous.yaml"
    file.write_text(
        "defaults: [rollout@actor_rollout_ref.rollout: rollout, _self_]\n"
        "actor_rollout_ref: {model: {path: some/model}}\nasync_training: {staleness_threshold: 0.5}\n"
    )
    found = convert(compose_config(file, []), DIALECTS["verl"])
    assert not natively(found, "rollout.engine_options.sleep_between_steps")


def test_the_environment_loop_of_robots_waits_for_verls_experiments(tmp_path: Path) -> None:
    found = converted(tmp_path, "verl", changed(VERL, {f"{ROLLOUT}.mode": "async_envloop"}))
    assert str(Capability.RECIPES) in " ".join(problem.message for problem in found.unsupported)


def test_a_plan_tells_the_same_as_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=0)
    tree = changed(VERL, {f"{ROLLOUT}.name": "hf", f"{ROLLOUT}.dtype": "half"})
    found = converted(tmp_path, "verl", tree)
    assert [fault.key for fault in found.unsupported if "engine hf" in fault.message] == [f"{ROLLOUT}.dtype"]
    told = [fault.message for fault in run_problems(found.composed)]
    assert any("rollout.engine_options.dtype = 'float16'" in message for message in told)
