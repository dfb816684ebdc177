"""If these fail, a verl file with a teacher trains with another loss, another teacher or other devices than in verl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively, translated

from quintet.config.dialects.loader import ConversionResult
from quintet.errors import ConfigError

LOSS = "distillation.distillation_loss"
TEACHER = "distillation.teacher_models.teacher_model"
ENABLED: dict[str, Any] = {
    "actor_rollout_ref.model.path": "some/model",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 2,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 2,
    "actor_rollout_ref.rollout.name": "hf",
    "distillation.enabled": True,
    f"{TEACHER}.model_path": "some/teacher",
}
POLICY_GRADIENT = {f"{LOSS}.use_policy_gradient": True, f"{LOSS}.loss_mode": "k1", f"{LOSS}.use_task_rewards": False}


def run(tmp_path: Path, changes: dict[str, Any], keys: dict[str, Any] = ENABLED) -> ConversionResult:
    return converted(tmp_path, "verl", changed({}, keys | changes))


@pytest.mark.proves("verl", "distillation.enabled", f"{TEACHER}.model_path", f"{LOSS}.loss_mode")
@pytest.mark.proves("verl", f"{LOSS}.use_policy_gradient", f"{LOSS}.loss_max_clamp", f"{LOSS}.use_task_rewards")
@pytest.mark.proves("verl", f"{LOSS}.clip_ratio_low", f"{LOSS}.clip_ratio_high")
def test_a_teacher_alone_trains_the_policy(tmp_path: Path) -> None:
    """As in verl's `on_policy_distillation_trainer/run_qwen3_8b_fsdp.sh`; of `loss` neither entropy nor KL count."""
    others = {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.entropy_coeff": 0.1}
    bounds = {f"{LOSS}.loss_max_clamp": 10.0, f"{LOSS}.clip_ratio_low": 0.1, f"{LOSS}.clip_ratio_high": 0.3}
    budget = {"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 2}
    config = run(tmp_path, POLICY_GRADIENT | others | bounds | budget).composed.experiment
    assert config.algorithm.loss.model_dump() == {
        "name": "distillation",
        "estimator": "k1",
        "gradient": "policy",
        "policy_logprobs": "current",
        "max_divergence": 10.0,
        "clip_low": 0.1,
        "clip_high": 0.3,
        "clip_dual": 3.0,
        "weight": 1.0,
        "task": None,
    }
    assert (config.algorithm.kl, config.algorithm.entropy_coefficient) == (None, 0.0)
    assert config.reference.path == "some/teacher"


@pytest.mark.proves("verl", f"{LOSS}.distillation_loss_coef")
def test_the_divergence_is_added_to_the_policy_loss(tmp_path: Path) -> None:
    """Releases with distillation set `clip_ratio_low` and `clip_ratio_high`, which override `clip_ratio`."""
    clips = {f"actor_rollout_ref.actor.{name}": 0.4 for name in ("clip_ratio_low", "clip_ratio_high")}
    keys = {f"{LOSS}.distillation_loss_coef": 0.5, **clips}
    loss = run(tmp_path, keys).composed.experiment.algorithm.loss.model_dump()
    assert (loss["gradient"], loss["estimator"], loss["weight"]) == ("direct", "k3", 0.5)
    assert (loss["task"]["name"], loss["task"]["clip_low"], loss["task"]["clip_high"]) == ("ppo", 0.4, 0.4)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({f"{LOSS}.loss_mode": "forward_kl_topk"}, f"{LOSS}.loss_mode"),
        ({"algorithm.use_kl_in_reward": True}, "algorithm.use_kl_in_reward"),
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}, "actor_rollout_ref.actor.policy_loss.loss_mode"),
        (
            {"distillation.teacher_models": {"a": {"model_path": "x", "key": "a"}, "b": {"model_path": "y"}}},
            "distillation.teacher_models",
        ),
    ],
)
def test_what_waits_is_named(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    budget = {"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 2}
    keys = {problem.key for problem in run(tmp_path, changes | budget).unsupported}
    assert keys in ({key}, {f"{key}.a", f"{key}.b"})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({f"{TEACHER}.model_path": None}, f"{TEACHER}.model_path"),
        ({f"{LOSS}.loss_mode": "k1"}, f"{LOSS}.loss_mode"),
        ({f"{TEACHER}.inference.max_model_len": 1024}, "max_model_len=1025"),
        (
            {"distillation.nnodes": 1, "distillation.n_gpus_per_node": 3},
            f"{TEACHER}.inference.tensor_model_parallel_size=1",
        ),
    ],
)
def test_what_verl_refuses_is_refused(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        run(tmp_path, changes)


@pytest.mark.proves("verl", "distillation.nnodes", "distillation.n_gpus_per_node")
@pytest.mark.proves("verl", "distillation.teacher_model.enable_resource_pool")
@pytest.mark.parametrize(
    ("learners", "teachers", "pool", "nodes", "devices", "teacher_devices", "actor_devices"),
    [
        ((1, 2), (1, 2), True, 1, 4, (2, 3), (0, 1)),
        ((2, 2), (2, 1), True, 2, 3, (2, 5), (0, 1, 3, 4)),
        ((1, 8), (1, 4), True, 2, 8, (8, 9, 10, 11), tuple(range(8))),
        ((1, 2), (1, 2), False, 1, 2, None, None),
    ],
)
def test_the_teacher_has_devices_of_its_own(
    tmp_path: Path,
    learners: tuple[int, int],
    teachers: tuple[int, int],
    pool: bool,
    nodes: int,
    devices: int,
    teacher_devices: tuple[int, ...] | None,
    actor_devices: tuple[int, ...] | None,
) -> None:
    keys = {"trainer.nnodes": learners[0], "trainer.n_gpus_per_node": learners[1]}
    keys |= {"distillation.nnodes": teachers[0], "distillation.n_gpus_per_node": teachers[1]}
    keys |= {"distillation.teacher_model.enable_resource_pool": pool}
    placement = run(tmp_path, keys).composed.experiment.placement
    assert (placement.nodes, placement.devices_per_node) == (nodes, devices)
    assert (placement.reference.devices, placement.actor.devices) == (teacher_devices, actor_devices)


@pytest.mark.proves("verl", f"{TEACHER}.inference.tensor_model_parallel_size", f"{TEACHER}.inference.dtype")
@pytest.mark.proves("verl", f"{TEACHER}.inference.max_num_batched_tokens")
def test_the_teacher_has_settings_of_its_own(tmp_path: Path) -> None:
    """Of the reference's it takes none; a forward pass holds a sequence of 512 + 512 tokens at least."""
    pool = {"distillation.nnodes": 1, "distillation.n_gpus_per_node": 4, "trainer.n_gpus_per_node": 4}
    reference = {"actor_rollout_ref.ref.fsdp_config.param_offload": True}
    inference = {"tensor_model_parallel_size": 4, "dtype": "half", "max_num_batched_tokens": 2000}
    keys = pool | reference | {f"{TEACHER}.inference.{key}": value for key, value in inference.items()}
    config = run(tmp_path, keys).composed.experiment.reference
    assert (config.parallel.tensor, config.dtype, config.inference_budget.tokens) == (4, "float16", 2000)
    assert not config.memory.offload_parameters
    smaller = run(tmp_path, keys | {f"{TEACHER}.inference.max_num_batched_tokens": 5})
    assert natively(smaller, "reference.inference_budget.tokens") == 1024
    # on the devices of the policy it is split as the policy is
    assert natively(run(tmp_path, {}), "reference.parallel.tensor") == 1


def test_one_teacher_may_have_any_name(tmp_path: Path) -> None:
    """verl drops its default teacher if there is another one."""
    section = {"distillation.teacher_models.math": {"key": "math", "model_path": "another/teacher", "num_replicas": 1}}
    config = run(tmp_path, {f"{TEACHER}.model_path": None} | section)
    assert natively(config, "reference.path") == "another/teacher"
    assert not config.unsupported


@pytest.mark.proves("verl", "distillation.num_workers")
def test_files_until_2026_04_have_one_teacher(tmp_path: Path) -> None:
    keys = {key: value for key, value in ENABLED.items() if not key.startswith(TEACHER)}
    older = {"model_path": "some/teacher", "enable_resource_pool": True, "nnodes": 1, "n_gpus_per_node": 1}
    inference = {"distillation.teacher_model.inference.tensor_model_parallel_size": 1}
    changes = {f"distillation.teacher_model.{key}": value for key, value in older.items()}
    devices = {"trainer.n_gpus_per_node": 1, "distillation.num_workers": 4}
    config = run(tmp_path, changes | inference | devices, keys)
    assert natively(config, "reference.path") == "some/teacher"
    assert natively(config, "placement.reference.devices") == (1,)
    assert all(problem.message.endswith("one process per device") for problem in config.unsupported)


@pytest.mark.proves("verl", "distillation.teacher_key", f"{LOSS}.topk", f"{LOSS}.use_chunked_topk")
@pytest.mark.proves("verl", f"{LOSS}.chunked_topk_chunk_size", f"{LOSS}.log_prob_min_clamp", f"{LOSS}.clip_ratio")
@pytest.mark.proves("verl", f"{LOSS}.policy_loss_mode", f"{TEACHER}.key", f"{TEACHER}.num_replicas")
@pytest.mark.proves("verl", f"{TEACHER}.inference.name", f"{TEACHER}.inference.gpu_memory_utilization")
@pytest.mark.proves("verl", f"{TEACHER}.inference.enforce_eager", f"{TEACHER}.inference.cudagraph_capture_sizes")
@pytest.mark.proves("verl", f"{TEACHER}.inference.free_cache_engine", f"{TEACHER}.inference.data_parallel_size")
@pytest.mark.proves("verl", f"{TEACHER}.inference.expert_parallel_size", f"{TEACHER}.inference.max_num_seqs")
@pytest.mark.proves("verl", f"{TEACHER}.inference.pipeline_model_parallel_size", f"{TEACHER}.inference.load_format")
@pytest.mark.proves("verl", f"{TEACHER}.inference.engine_kwargs", f"{TEACHER}.inference.limit_images")
@pytest.mark.proves("verl", f"{TEACHER}.inference.enable_chunked_prefill", f"{TEACHER}.inference.disable_log_stats")
@pytest.mark.proves("verl", f"{TEACHER}.inference.enable_prefix_caching", f"{TEACHER}.inference.skip_tokenizer_init")
@pytest.mark.proves("verl", f"{TEACHER}.inference.max_model_len", f"{TEACHER}.inference.prompt_length")
@pytest.mark.proves("verl", f"{TEACHER}.inference.response_length", f"{TEACHER}.inference.temperature")
def test_settings_of_the_teachers_engine_change_nothing(tmp_path: Path) -> None:
    plain = run(tmp_path, POLICY_GRADIENT)
    loss = {"topk": 5, "use_chunked_topk": True, "chunked_topk_chunk_size": 64, "log_prob_min_clamp": -5.0}
    engine: dict[str, Any] = {"name": "vllm", "gpu_memory_utilization": 0.3, "enforce_eager": False, "max_num_seqs": 7}
    engine |= {"cudagraph_capture_sizes": [1, 2], "free_cache_engine": False, "data_parallel_size": 2}
    engine |= {"expert_parallel_size": 2, "pipeline_model_parallel_size": 2, "load_format": "dummy"}
    engine |= {"engine_kwargs": {"vllm": {"max_logprobs": 64}}, "limit_images": 2, "enable_chunked_prefill": False}
    engine |= {"enable_prefix_caching": False, "disable_log_stats": False, "skip_tokenizer_init": False}
    engine |= {"max_model_len": 9999, "prompt_length": 9, "response_length": 9, "temperature": 0.5}
    keys: dict[str, Any] = {"distillation.teacher_key": "task", f"{LOSS}.clip_ratio": 0.3, f"{TEACHER}.key": "x"}
    keys |= {f"{LOSS}.policy_loss_mode": "vanilla", f"{TEACHER}.num_replicas": 2}
    keys |= {f"{LOSS}.{key}": value for key, value in loss.items()}
    keys |= {f"{TEACHER}.inference.{key}": value for key, value in engine.items()}
    config = run(tmp_path, POLICY_GRADIENT | keys)
    assert config.composed.experiment == plain.composed.experiment
    assert not config.unsupported


@pytest.mark.parametrize("changes", [POLICY_GRADIENT, {f"{LOSS}.distillation_loss_coef": 0.5}])
def test_a_translated_run_keeps_its_teacher(tmp_path: Path, changes: dict[str, Any]) -> None:
    converted_run = run(tmp_path, changes | {f"{TEACHER}.inference.tensor_model_parallel_size": 1})
    text = translated(converted_run, "verl")
    again = converted(tmp_path, "verl", text.tree)
    assert again.composed.experiment.algorithm.loss == converted_run.composed.experiment.algorithm.loss
    assert again.composed.experiment.reference.path == "some/teacher"


def test_settings_that_only_count_with_task_rewards_are_named(tmp_path: Path) -> None:
    keys = {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.entropy_coeff": 0.01}
    budget = {"actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 2}
    remarks = run(tmp_path, POLICY_GRADIENT | keys | budget).composed.remarks
    for key in keys:
        assert any(remark.startswith(key) and "use_task_rewards = false" in remark for remark in remarks)


def test_a_teacher_that_verl_drops_is_named(tmp_path: Path) -> None:
    """Of `teacher_model` and others, only the others count."""
    other = {"distillation.teacher_models.math": {"key": "math", "model_path": "another/teacher", "num_replicas": 1}}
    remarks = run(tmp_path, other).composed.remarks
    assert any("some/teacher" in remark and "verl drops teacher_model" in remark for remark in remarks)
