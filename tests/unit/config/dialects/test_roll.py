"""If these fail, a ROLL user's run is something else than what their file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign import changed, converted, natively, translated

from quintet.config.dialects.loader import load_foreign
from quintet.config.dialects.registry import DIALECTS
from quintet.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[4] / "examples" / "roll").glob("*.yaml"))
TRAIN, INFER = "actor_train.strategy_args.strategy_name", "actor_infer.strategy_args.strategy_name"
OPTION, ENGINE = "actor_train.strategy_args.strategy_config.", "actor_infer.strategy_args.strategy_config."
PLAIN: dict[str, Any] = {"actor_train": {"data_args": {"file_name": "train.json"}}}
FSDP2 = {TRAIN: "fsdp2_train"}
SGLANG = {INFER: "sglang"}
CRITIC = {"critic.device_mapping": "list(range(0,16))"}

REACHED: list[tuple[str, Any, Any, str, Any, dict[str, Any]]] = [
    ("rollout_batch_size", 128, 0, "training.groups_per_step", 128, {}),
    ("prompt_length", 512, "long", "rollout.max_prompt_tokens", 512, {}),
    ("response_length", 1000, 0, "rollout.max_response_tokens", 1000, {}),
    ("num_return_sequences_in_group", 16, 0, "training.samples_per_group", 16, {}),
    ("actor_train.model_args.dtype", "fp32", "int8", "policy.dtype", "float32", {}),
    (
        "actor_train.model_args.disable_gradient_checkpointing",
        True,
        "no",
        "actor.gradient_checkpointing",
        False,
        FSDP2,
    ),
    ("actor_train.model_args.ulysses_size", 4, 0, "actor.parallel.ulysses", 4, FSDP2),
    ("actor_train.training_args.learning_rate", 2e-6, 0, "actor.optimizer.learning_rate", 2e-6, {}),
    ("actor_train.training_args.weight_decay", 0.1, -1, "actor.optimizer.weight_decay", 0.1, {}),
    (
        "actor_train.training_args.per_device_train_batch_size",
        2,
        0,
        "actor.budget.sequences",
        2,
        {
            "actor_train.training_args.gradient_accumulation_steps": 16,
        },
    ),
    ("actor_train.training_args.gradient_accumulation_steps", 8, 0, "training.mini_batches", 4, {}),
    ("actor_train.training_args.warmup_steps", 0, -1, "actor.optimizer.warmup_steps", 0, {}),
    ("actor_train.data_args.template", "qwen2_5", 1, "data.template", "qwen2_5", {}),
    ("actor_train.data_args.file_name", ["a.json", "b.csv"], 1, "data.train_files", ("a.json", "b.csv"), {}),
    ("actor_train.data_args.prompt", "question", 1, "data.prompt_key", "question", {}),
    ("actor_train.data_args.messages", "chat", 1, "data.messages_key", "chat", {}),
    (TRAIN, "fsdp2_train", "deepspeed_train", "actor.backend", "fsdp2", {}),
    (f"{OPTION}tensor_model_parallel_size", 2, 0, "actor.parallel.tensor", 2, {}),
    (f"{OPTION}pipeline_model_parallel_size", 4, 0, "actor.parallel.pipeline", 4, {}),
    (f"{OPTION}expert_model_parallel_size", 8, 0, "actor.parallel.expert", 8, {}),
    (f"{OPTION}context_parallel_size", 2, 0, "actor.parallel.context", 2, {}),
    (
        f"{OPTION}virtual_pipeline_model_parallel_size",
        3,
        0,
        "actor.parallel.virtual_pipeline",
        3,
        {f"{OPTION}pipeline_model_parallel_size": 2},
    ),
    (f"{OPTION}sequence_parallel", True, 1, "actor.parallel.sequence", True, {}),
    (f"{OPTION}recompute_granularity", "selective", "half", "actor.megatron.recompute_granularity", "selective", {}),
    (f"{OPTION}moe_layer_recompute", True, 1, "actor.megatron.moe_layer_recompute", True, {}),
    (
        f"{OPTION}moe_token_dispatcher_type",
        "allgather",
        "flex",
        "actor.megatron.moe_token_dispatcher_type",
        "allgather",
        {},
    ),
    (f"{OPTION}moe_grouped_gemm", True, 1, "actor.megatron.moe_grouped_gemm", True, {}),
    (f"{OPTION}moe_shared_expert_overlap", True, 1, "actor.megatron.moe_shared_expert_overlap", True, {}),
    (f"{OPTION}overlap_grad_reduce", True, 1, "actor.megatron.overlap_grad_reduce", True, {}),
    (f"{OPTION}fsdp_size", 4, -2, "actor.sharding.group_size", 4, FSDP2),
    (f"{OPTION}param_dtype", "float", "int8", "actor.sharding.parameter_dtype", "float32", FSDP2),
    (f"{OPTION}reduce_dtype", "half", "int8", "actor.sharding.reduce_dtype", "float16", FSDP2),
    (f"{OPTION}reshard_after_forward", None, 1, "actor.sharding.reshard_after_forward", None, FSDP2),
    (f"{OPTION}offload_policy", True, 1, "actor.memory.sharded_offload", True, FSDP2),
    ("actor_train.infer_batch_size", 2, 0, "actor.inference_budget.sequences", 2, {}),
    ("actor_train.device_mapping", "list(range(0,8))", 8, "placement.actor.devices", tuple(range(8)), {}),
    ("actor_infer.model_args.dtype", "fp16", "int8", "rollout.engine_options.dtype", "float16", {}),
    ("actor_infer.generating_args.max_new_tokens", 100, 0, "rollout.max_response_tokens", 100, {}),
    ("actor_infer.generating_args.temperature", 0.5, 0, "rollout.temperature", 0.5, {}),
    (INFER, "hf_infer", "tgi", "rollout.engine", "hf", {}),
    (f"{ENGINE}gpu_memory_utilization", 0.9, 1.1, "rollout.engine_options.memory_share", 0.9, {}),
    (f"{ENGINE}block_size", 32, 7, "rollout.engine_options.block_size", 32, {}),
    (f"{ENGINE}max_model_len", 9000, 0, "rollout.engine_options.max_model_tokens", 9000, {}),
    (f"{ENGINE}load_format", "auto", "zip", "rollout.engine_options.load_format", "auto", {}),
    (f"{ENGINE}mem_fraction_static", 0.7, 1, "rollout.engine_options.memory_share", 0.7, SGLANG),
    ("actor_infer.num_gpus_per_worker", 4, 0, "rollout.engine_options.tensor_parallel", 4, {}),
    ("actor_infer.device_mapping", [4, 5, 6, 7], [-1], "placement.rollout.devices", (4, 5, 6, 7), {}),
    ("reference.model_args.dtype", "fp32", "int8", "reference.dtype", "float32", {}),
    (
        "reference.strategy_args.strategy_name",
        "hf_infer",
        "megatron_train",
        "reference.sharding.policy",
        "no_shard",
        {},
    ),
    (
        "reference.strategy_args.strategy_config.tensor_model_parallel_size",
        8,
        0,
        "reference.parallel.tensor",
        8,
        {},
    ),
    ("reference.infer_batch_size", 1, 0, "reference.inference_budget.sequences", 1, {}),
    ("reference.device_mapping", "[0, 1]", [0.5], "placement.reference.devices", (0, 1), {}),
    ("critic.strategy_args.strategy_name", "fsdp2_train", "vllm", "critic.backend", "fsdp2", CRITIC),
    ("critic.device_mapping", "list(range(0,4))", True, "placement.critic.devices", (0, 1, 2, 3), {}),
]
"""Key, a legal value, an illegal one, the native key, what that becomes, and what else is written."""

LIKE: list[tuple[str, Any, str, Any]] = [
    ("critic.training_args.learning_rate", 1e-5, "critic.optimizer.learning_rate", 1e-5),
    ("critic.training_args.warmup_steps", 7, "critic.optimizer.warmup_steps", 7),
    ("critic.infer_batch_size", 2, "critic.inference_budget.sequences", 2),
    ("critic.model_args.dtype", "fp32", "critic.dtype", "float32"),
    ("critic.strategy_args.strategy_config.tensor_model_parallel_size", 2, "critic.parallel.tensor", 2),
    ("critic.strategy_args.strategy_config.moe_grouped_gemm", True, "critic.megatron.moe_grouped_gemm", True),
    ("critic.strategy_args.strategy_config.recompute_granularity", "full", "critic.gradient_checkpointing", True),
    ("critic.training_args.per_device_train_batch_size", 32, "critic.budget.sequences", 32),
    ("reference.strategy_args.strategy_config.pipeline_model_parallel_size", 4, "reference.parallel.pipeline", 4),
    ("reference.strategy_args.strategy_config.sequence_parallel", True, "reference.parallel.sequence", True),
]
"""Keys that ROLL documents for `actor_train` and that other workers take, too."""


def given(key: str, value: Any, others: dict[str, Any] | None = None) -> dict[str, Any]:
    return changed(PLAIN, {**(others or {}), key: value})


def refused(tmp_path: Path, changes: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        converted(tmp_path, "roll", changed(PLAIN, changes))
    return str(error.value)


@pytest.mark.proves("roll", *(case[0] for case in REACHED))
@pytest.mark.parametrize(
    ("key", "value", "illegal", "native", "expected", "others"), REACHED, ids=[r[0] for r in REACHED]
)
def test_a_key_reaches_the_run(
    tmp_path: Path, key: str, value: Any, illegal: Any, native: str, expected: Any, others: dict[str, Any]
) -> None:
    found = converted(tmp_path, "roll", given(key, value, others))
    assert natively(found, native) == expected
    assert f"{key}: given.yaml:1" in found.composed.provenance[native]
    assert key in refused(tmp_path, {**others, key: illegal})


def test_answers_to_prompts_from_files_are_judged_as_mathematics(tmp_path: Path) -> None:
    found = converted(tmp_path, "roll", PLAIN)
    assert (natively(found, "reward.kind"), natively(found, "env.name")) == ("math", "prompts")


def test_each_key_has_a_row_in_these_tables() -> None:
    assert {row[0] for row in REACHED} == set(DIALECTS["roll"].specs())


@pytest.mark.parametrize(("key", "value", "native", "expected"), LIKE, ids=[row[0] for row in LIKE])
def test_other_workers_take_keys_of_the_policys(
    tmp_path: Path, key: str, value: Any, native: str, expected: Any
) -> None:
    found = converted(tmp_path, "roll", given(key, value))
    assert natively(found, native) == expected
    assert key in found.composed.provenance[native]
    assert translated(found, "roll").lost == {}


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_an_example_comes_back_as_it_was(path: Path, tmp_path: Path) -> None:
    found = converted(tmp_path, "roll", yaml.safe_load(path.read_text()))
    assert found.composed.remarks == ()
    assert translated(found, "roll").lost == {}


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 8


def test_a_step_is_a_whole_number_of_updates_and_the_message_says_how(tmp_path: Path) -> None:
    told = refused(
        tmp_path,
        {"actor_train.training_args.gradient_accumulation_steps": 24, f"{OPTION}tensor_model_parallel_size": 2},
    )
    for word in (
        "gradient_accumulation_steps = 24",
        "given.yaml",
        "192 sequences does not divide the 512",
        "rollout_batch_size = 64 (reference)",
        "num_return_sequences_in_group = 8 (reference)",
        "per_device_train_batch_size = 1",
        "device_mapping = 'list(range(0,16))'",
        "tensor_model_parallel_size = 2",
        "nearest valid value: actor_train.training_args.gradient_accumulation_steps=16",
        "one optimizer step per rollout",
        "/ the 16 devices = 64",
    ):
        assert word in told


def test_experts_dont_change_the_sequences_of_an_update_and_other_splits_do(tmp_path: Path) -> None:
    splits = {"expert_model_parallel_size": 4, "context_parallel_size": 2, "pipeline_model_parallel_size": 2}
    changes = {f"{OPTION}{name}": degree for name, degree in splits.items()}
    assert natively(converted(tmp_path, "roll", changed(PLAIN, changes)), "training.mini_batches") == 4
    ulysses = {**FSDP2, "actor_train.model_args.ulysses_size": 2}
    assert natively(converted(tmp_path, "roll", changed(PLAIN, ulysses)), "training.mini_batches") == 2


def test_prompts_too_few_for_one_pass_are_told(tmp_path: Path) -> None:
    told = refused(tmp_path, {"rollout_batch_size": 3, "num_return_sequences_in_group": 1})
    assert "nearest valid value: rollout_batch_size=16" in told


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"actor_train.device_mapping": "eval('1')"}, ("actor_train.device_mapping", "eval('1')", "list(range")),
        ({"actor_infer.device_mapping": [1, 1]}, ("actor_infer.device_mapping", "each once")),
        ({f"{OPTION}tensor_model_parallel_size": 3}, ("device_mapping", "multiple of the 3", "list(range(0,15))")),
        ({**FSDP2, f"{OPTION}fsdp_size": 5}, ("fsdp_size = 5", "16 devices", "fsdp_size=4")),
        ({"actor_infer.num_gpus_per_worker": 3}, ("num_gpus_per_worker = 3", "16", "num_gpus_per_worker=2")),
        (
            {"actor_train.data_args.messages": "chat", "actor_train.data_args.prompt": "text"},
            ("messages = 'chat'", "excludes actor_train.data_args.prompt = 'text'", "keep the one"),
        ),
        ({"actor_train.data_args.prompt": None}, ("column of the prompts", "actor_train.data_args.messages")),
        ({"actor_train.data_args.file_name": []}, ("is empty",)),
        ({"response_length": None}, ("response_length = null", "max_new_tokens")),
        ({f"{ENGINE}max_model_len": 4096}, ("max_model_len = 4096", "6144", "prompt_length = 2048")),
        ({f"{ENGINE}mem_fraction_static": 0.5}, ("mem_fraction_static = 0.5", "belongs to sglang", "'vllm'")),
        ({**FSDP2, f"{OPTION}tensor_model_parallel_size": 2}, ("tensor_model_parallel_size", "megatron_train")),
        ({f"{OPTION}fsdp_size": 4}, ("fsdp_size = 4", "belongs to fsdp2_train", "'megatron_train'")),
        ({INFER: "hf_infer", f"{ENGINE}load_format": "auto"}, ("load_format", "vllm and sglang")),
        ({f"{OPTION}virtual_pipeline_model_parallel_size": 2}, ("virtual_pipeline", "more than one pipeline stage")),
        (
            {
                "critic.training_args.gradient_accumulation_steps": 4,
                "critic.training_args.per_device_train_batch_size": 2,
            },
            (
                "critic.training_args.gradient_accumulation_steps = 4",
                "has 128 sequences",
                "the policy's 512",
                "steps=16",
            ),
        ),
        ({"critic.data_args.template": "qwen3"}, ("critic.data_args.template", "policy's data")),
        ({"reference.strategy_args.strategy_config.context_parallel_size": 32}, ("reference.device_mapping", "32")),
    ],
)
def test_keys_that_disagree_are_told_with_a_way_out(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    told = refused(tmp_path, changes)
    assert [word for word in words if word not in told] == []


def test_what_a_snippet_shows_of_another_strategy_asks_for_nothing(tmp_path: Path) -> None:
    shown = {**FSDP2, f"{OPTION}tensor_model_parallel_size": 1, f"{OPTION}moe_grouped_gemm": False}
    converted(tmp_path, "roll", changed(PLAIN, shown))
    converted(tmp_path, "roll", given("actor_train.model_args.disable_gradient_checkpointing", True))


def test_a_column_of_messages_takes_the_place_of_the_prompt_that_the_reference_shows(tmp_path: Path) -> None:
    found = converted(tmp_path, "roll", given("actor_train.data_args.messages", "chat"))
    assert natively(found, "data.prompt_key") == "prompt"
    assert natively(found, "data.messages_key") == "chat"


@pytest.mark.parametrize("size", [-1, 0, 1, 16, 64])
def test_one_group_or_all_devices_is_sharding_over_all(tmp_path: Path, size: int) -> None:
    found = converted(tmp_path, "roll", given(f"{OPTION}fsdp_size", size, FSDP2))
    assert natively(found, "actor.sharding.group_size") is None


def test_where_dtypes_are_null_they_are_the_models_own(tmp_path: Path) -> None:
    names = ("actor_train", "actor_infer", "reference")
    found = converted(tmp_path, "roll", changed(PLAIN, {f"{name}.model_args.dtype": None for name in names}))
    assert natively(found, "policy.dtype") == "auto"
    assert natively(found, "rollout.engine_options.dtype") is None
    assert natively(found, "reference.dtype") is None
    assert translated(found, "roll").lost == {}


def test_a_critic_makes_it_ppo_and_a_reference_measures_how_far_it_went(tmp_path: Path) -> None:
    run = converted(tmp_path, "roll", PLAIN).composed.experiment
    assert (run.algorithm.advantage.name, run.algorithm.kl) == ("grpo", None)
    found = converted(tmp_path, "roll", changed(PLAIN, {"critic": {}, "reference": {"infer_batch_size": 4}, **CRITIC}))
    run = found.composed.experiment
    assert run.algorithm.advantage.model_dump() == {"name": "gae", "gamma": 1.0, "lam": 0.95, "whiten": False}
    assert run.algorithm.kl is not None
    assert (run.algorithm.kl.apply_to, run.algorithm.kl.estimator, run.algorithm.kl.coefficient) == (
        "reward",
        "k1",
        0.0,
    )
    assert run.critic.optimizer.learning_rate == 5e-5
    assert translated(found, "roll").lost == {}


def test_a_critic_that_is_all_like_the_policy_differs_in_nothing(tmp_path: Path) -> None:
    found = converted(tmp_path, "roll", {**changed(PLAIN, FSDP2), "critic": "${actor_train}"})
    run = found.composed.experiment
    assert run.critic.optimizer.learning_rate == run.actor.optimizer.learning_rate
    assert (run.critic.gradient_checkpointing, run.critic.dtype) == (None, None)
    assert run.critic.budget == run.actor.budget
    assert translated(found, "roll").lost == {}


def test_devices_are_counted_over_machines_of_eight(tmp_path: Path) -> None:
    found = converted(tmp_path, "roll", PLAIN)
    assert [natively(found, f"placement.{key}") for key in ("nodes", "devices_per_node", "colocated")] == [2, 8, True]
    assert natively(found, "placement.actor.devices") is None
    halves = {"actor_train.device_mapping": "list(range(0,8))", "actor_infer.device_mapping": "list(range(8,16))"}
    found = converted(tmp_path, "roll", changed(PLAIN, halves))
    assert natively(found, "placement.rollout.devices") == tuple(range(8, 16))
    assert natively(found, "placement.colocated") is False


def test_a_run_without_a_file_plays_the_native_env_and_needs_no_machines(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    tree = {
        "rollout_batch_size": 8,
        "prompt_length": 512,
        "response_length": 64,
        "actor_train": {
            "training_args": {"gradient_accumulation_steps": 16, "per_device_train_batch_size": 2},
            "device_mapping": None,
        },
        "actor_infer": {"device_mapping": "[0]", "strategy_args": {"strategy_name": "hf_infer"}},
    }
    path.write_text(yaml.safe_dump(tree))
    run = load_foreign(path, [], DIALECTS["roll"])
    assert run.experiment.env.name == "frozenlake"
    assert run.experiment.warm_start is not None
    assert run.experiment.policy.preset is not None
    assert run.experiment.training.mini_batches == 2
    assert run.experiment.actor.backend == "megatron"  # as ROLL has it where nobody says
    remarks = "\n".join(run.remarks)
    assert "actor_train.data_args.file_name names no file" in remarks
    assert "reference.device_mapping" not in remarks


def test_a_reference_on_every_device_is_one_copy_each(tmp_path: Path) -> None:
    found = converted(tmp_path, "roll", given("reference.strategy_args.strategy_name", "fsdp2_infer"))
    assert natively(found, "reference.backend") == "fsdp2"
    assert natively(found, "reference.sharding.policy") == "full_shard"


def test_a_env_that_roll_doesnt_know_cant_be_said(tmp_path: Path) -> None:
    found = converted(tmp_path, "ragen", {"sft": {"env_type": "sokoban"}})
    with pytest.raises(ConfigError, match="no environment sokoban"):
        translated(found, "roll")


@pytest.mark.proves("roll", "pretrain", "exp_name", "seed", "max_steps", "save_steps", "eval_steps")
def test_the_run_and_its_model_can_be_named(tmp_path: Path) -> None:
    """Its reference has no key for either; no file of ROLL's is without them."""
    named = {"exp_name": "mine", "seed": 7, "pretrain": "some/model", "max_steps": 3, "save_steps": 2, "eval_steps": 5}
    found = converted(tmp_path, "roll", changed(PLAIN, named))
    reached = {
        "name": "mine",
        "seed": 7,
        "policy.path": "some/model",
        "policy.preset": None,
        "training.steps": 3,
        "checkpoint.every_steps": 2,
        "validation.every_steps": 5,
    }
    assert {key: natively(found, key) for key in reached} == reached
    assert translated(found, "roll").lost == {}
    with pytest.raises(ConfigError, match="max_steps = 'many'"):
        converted(tmp_path, "roll", changed(PLAIN, {"max_steps": "many"}))
