"""If these fail, a ROLL user's run is something else than what their file says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign import changed, converted, machine, natively, translated
from test_roll_keys import (
    CRITIC,
    ENGINE,
    FILTERS,
    FSDP2,
    INFER,
    OPTION,
    PENALTY,
    PG_WORKER,
    PLAIN,
    REFERENCE_OPTION,
    TERM,
    VALIDATION,
    VARIANT,
    refused,
    roll,
)

from quintet.config.checks.processes import planned_rank
from quintet.config.dialects.composition.foreign_config import config_from_tree
from quintet.config.dialects.loader import ConversionResult, conversion_problems, convert, load_config
from quintet.config.dialects.registry import DIALECTS
from quintet.config.native.algorithm import KlConfig, RewardKlConfig
from quintet.config.torchrun import current_rank
from quintet.errors import ConfigError

EXAMPLES = sorted((Path(__file__).parents[4] / "examples" / "roll").glob("*.yaml"))
CRITIC_ARGS = "critic.training_args."


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_an_example_comes_back_as_it_was(path: Path, tmp_path: Path) -> None:
    found = converted(tmp_path, "roll", yaml.safe_load(path.read_text()))
    assert found.composed.remarks == ()
    assert translated(found, "roll").lost == {}


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 8


def test_experts_dont_change_the_sequences_of_an_update_and_other_splits_do(tmp_path: Path) -> None:
    splits = {"expert_model_parallel_size": 4, "context_parallel_size": 2, "pipeline_model_parallel_size": 2}
    changes = {f"{OPTION}{name}": degree for name, degree in splits.items()}
    assert natively(roll(tmp_path, changes), "training.mini_batches") == 4
    ulysses = {**FSDP2, "actor_train.model_args.ulysses_size": 2}
    assert natively(roll(tmp_path, ulysses), "training.mini_batches") == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"actor_train.training_args.gradient_accumulation_steps": 24, f"{OPTION}tensor_model_parallel_size": 2},
            (
                *("gradient_accumulation_steps = 24", "given.yaml", "192 sequences does not divide the 512"),
                *("rollout_batch_size = 64 (given.yaml", "num_return_sequences_in_group = 8 (given.yaml"),
                *("per_device_train_batch_size = 1", "device_mapping = 'list(range(0,16))'"),
                *("tensor_model_parallel_size = 2", "nearest valid value: actor_train.training_args."),
                *("gradient_accumulation_steps=16", "one optimizer step per rollout", "/ the 16 devices = 64"),
            ),
        ),
        (
            {"rollout_batch_size": 3, "num_return_sequences_in_group": 1},
            ("nearest valid value: rollout_batch_size=16",),
        ),
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
        ({f"{ENGINE}mem_fraction_static": 0.5}, ("mem_fraction_static = 0.5", "belongs to sglang", "'vllm'")),
        ({**FSDP2, f"{OPTION}tensor_model_parallel_size": 2}, ("tensor_model_parallel_size", "megatron_train")),
        ({f"{OPTION}fsdp_size": 4}, ("fsdp_size = 4", "belongs to fsdp2_train", "'megatron_train'")),
        ({INFER: "hf_infer", f"{ENGINE}load_format": "auto"}, ("load_format", "vllm and sglang")),
        ({f"{OPTION}virtual_pipeline_model_parallel_size": 2}, ("virtual_pipeline", "more than one pipeline stage")),
        (
            {f"{CRITIC_ARGS}gradient_accumulation_steps": 4, f"{CRITIC_ARGS}per_device_train_batch_size": 2},
            (f"{CRITIC_ARGS}gradient_accumulation_steps = 4", "has 128 sequences", "the policy's 512", "steps=16"),
        ),
        ({"critic.data_args.template": "qwen3"}, ("critic.data_args.template", "policy's data")),
        ({"reference.strategy_args.strategy_config.context_parallel_size": 32}, ("reference.device_mapping", "32")),
        ({"importance_sampling": "seq", VARIANT: "cispo"}, (f"{VARIANT} = 'cispo'", "importance_sampling = 'seq'")),
        (
            {"actor_train.worker_cls": PG_WORKER},
            ("worker_cls", f"{VARIANT}=vanilla"),
        ),
        ({"critic.pg_variant": "topr"}, ("critic.pg_variant = 'topr'", "only the policy")),
        ({FILTERS: [{"enabled": True, "agg_type": "word"}]}, (FILTERS, "ratio_low")),
        ({"advantage_clipp": 2.0}, ("unknown key advantage_clipp", "did you mean advantage_clip?")),
    ],
)
def test_keys_that_disagree_are_told_with_a_way_out(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    told = refused(tmp_path, changes)
    assert [word for word in words if word not in told] == []


def test_what_a_snippet_shows_of_another_strategy_asks_for_nothing(tmp_path: Path) -> None:
    shown = {**FSDP2, f"{OPTION}tensor_model_parallel_size": 1, f"{OPTION}moe_grouped_gemm": False}
    roll(tmp_path, shown)
    roll(tmp_path, {"actor_train.model_args.disable_gradient_checkpointing": True})


def test_a_column_of_messages_takes_the_place_of_the_prompt_that_the_reference_shows(tmp_path: Path) -> None:
    found = roll(tmp_path, {"actor_train.data_args.messages": "chat"})
    assert natively(found, "data.prompt_key") == "prompt"
    assert natively(found, "data.messages_key") == "chat"


@pytest.mark.parametrize("size", [-1, 0, 1, 16, 64])
def test_one_group_or_all_devices_is_sharding_over_all(tmp_path: Path, size: int) -> None:
    found = roll(tmp_path, {**FSDP2, f"{OPTION}fsdp_size": size})
    assert natively(found, "actor.sharding.group_size") is None


def test_where_dtypes_are_null_they_are_the_models_own(tmp_path: Path) -> None:
    names = ("actor_train", "actor_infer", "reference")
    found = roll(tmp_path, {f"{name}.model_args.dtype": None for name in names})
    assert natively(found, "policy.dtype") == "auto"
    assert natively(found, "rollout.engine_options.dtype") is None
    assert natively(found, "reference.dtype") is None
    assert translated(found, "roll").lost == {}


def test_a_critic_makes_it_ppo_and_a_reference_measures_how_far_it_went(tmp_path: Path) -> None:
    run = roll(tmp_path, {}).composed.experiment
    assert (run.algorithm.advantage.name, run.algorithm.kl) == ("grpo", None)
    found = roll(tmp_path, {"critic": {}, "reference": {"infer_batch_size": 4}, **CRITIC})
    run = found.composed.experiment
    assert run.algorithm.advantage.model_dump() == {"name": "gae", "gamma": 1.0, "lam": 0.95, "whiten": False}
    kl = run.algorithm.kl
    assert kl is not None
    assert (kl.apply_to, kl.estimator, kl.coefficient) == ("reward", "k1", 0.0)
    assert run.critic.optimizer.learning_rate == 5e-5
    assert translated(found, "roll").lost == {}


def test_a_critic_that_is_all_like_the_policy_differs_in_nothing(tmp_path: Path) -> None:
    found = roll(tmp_path, {**FSDP2, "critic": "${actor_train}"})
    run = found.composed.experiment
    assert run.critic.optimizer.learning_rate == run.actor.optimizer.learning_rate
    assert (run.critic.gradient_checkpointing, run.critic.dtype) == (None, None)
    assert run.critic.budget == run.actor.budget
    assert translated(found, "roll").lost == {}


def test_devices_are_counted_over_machines_of_eight(tmp_path: Path) -> None:
    found = roll(tmp_path, {})
    assert [natively(found, f"placement.{key}") for key in ("nodes", "devices_per_node", "colocated")] == [2, 8, True]
    assert natively(found, "placement.actor.devices") is None
    halves = {"actor_train.device_mapping": "list(range(0,8))", "actor_infer.device_mapping": "list(range(8,16))"}
    found = roll(tmp_path, halves)
    assert natively(found, "placement.rollout.devices") == tuple(range(8, 16))
    assert natively(found, "placement.colocated") is False


def test_a_run_without_a_file_plays_the_native_env_and_needs_no_machines() -> None:
    tree = {
        "rollout_batch_size": 8,
        "prompt_length": 512,
        "response_length": 64,
        "num_return_sequences_in_group": 8,
        "actor_train": {
            "training_args": {"gradient_accumulation_steps": 16, "per_device_train_batch_size": 2},
            "device_mapping": None,
        },
        "actor_infer": {"device_mapping": "[0]", "strategy_args": {"strategy_name": "hf_infer"}},
    }
    run = load_config(config_from_tree(tree), DIALECTS["roll"])
    assert run.experiment.env.name == "frozenlake"
    assert run.experiment.warm_start is not None
    assert run.experiment.policy.preset is not None
    assert run.experiment.training.mini_batches == 2
    assert run.experiment.actor.backend == "megatron"  # as ROLL has it where nobody says
    remarks = "\n".join(run.remarks)
    assert "actor_train.data_args.file_name names no file" in remarks
    assert "reference.device_mapping" not in remarks


def test_a_reference_on_every_device_is_one_copy_each(tmp_path: Path) -> None:
    found = roll(tmp_path, {"reference.strategy_args.strategy_name": "fsdp2_infer"})
    assert natively(found, "reference.backend") == "fsdp2"
    assert natively(found, "reference.sharding.policy") == "full_shard"


def test_a_env_that_roll_doesnt_know_cant_be_said(tmp_path: Path) -> None:
    found = converted(tmp_path, "ragen", {"sft": {"env_type": "sokoban"}})
    with pytest.raises(ConfigError, match="no environment sokoban"):
        translated(found, "roll")


def test_the_estimator_that_is_named_decides_whether_a_critic_learns(tmp_path: Path) -> None:
    assert roll(tmp_path, {"adv_estimator": "gae"}).composed.experiment.needs_critic
    idle = {"adv_estimator": "reinforce", "critic.infer_batch_size": 2}
    found = roll(tmp_path, idle).composed
    assert not found.experiment.needs_critic
    assert "adv_estimator" in "".join(found.remarks)
    own = roll(tmp_path, {**idle, "adv_estimator": "mine.py:mine"})
    assert own.composed.experiment.needs_critic
    assert translated(own, "roll").lost == {}


@pytest.mark.parametrize("also", [{"gamma": 0.9}, {"reward_clip": 2.0}, PENALTY])
def test_rewards_compared_in_groups_are_summed_by_token_where_that_differs(
    tmp_path: Path, also: dict[str, Any]
) -> None:
    """ROLL's `grpo` normalises rewards by group, clips them, takes the penalty off and discounts, in this order."""
    found = roll(tmp_path, {"adv_estimator": "grpo", **also})
    run = found.composed.experiment
    shaping = run.algorithm.shaping
    assert (run.algorithm.advantage.name, shaping.center, shaping.divide) == ("reinforce", "group", "group")
    assert translated(found, "roll").lost == {}


def test_grpo_takes_groups_whatever_the_norm_types_say(tmp_path: Path) -> None:
    found = roll(tmp_path, {"adv_estimator": "grpo", "norm_mean_type": "batch"})
    run = found.composed.experiment
    assert (run.algorithm.advantage.name, run.algorithm.shaping.center) == ("grpo", "none")


def test_a_filter_of_words_bounds_learner_over_engine(tmp_path: Path) -> None:
    filters = [
        {"enabled": True, "agg_type": "geometric", "ratio_low": 0.5, "ratio_high": 4.0},
        {"enabled": False, "agg_type": "token"},
    ]
    found = roll(tmp_path, {FILTERS: filters})
    correction = found.composed.experiment.algorithm.correction
    assert correction is not None
    (reject,) = correction.reject
    assert (reject.estimator, reject.over, reject.upper, reject.lower) == ("k1", "sequence_mean", 2.0, 0.25)
    assert translated(found, "roll").lost == {}


def test_truncated_weights_are_between_0_and_1(tmp_path: Path) -> None:
    loss: Any = roll(tmp_path, {VARIANT: "tis"}).composed.experiment.algorithm.loss
    assert 1.0 - loss.clip_low == pytest.approx(0.0, abs=1e-11)
    assert 1.0 + loss.clip_high == pytest.approx(1.0, abs=1e-11)


def test_a_penalty_makes_a_reference_without_a_section_for_one(tmp_path: Path) -> None:
    kl = roll(tmp_path, PENALTY).composed.experiment.algorithm.kl
    assert kl is not None
    assert (kl.apply_to, kl.estimator, kl.coefficient) == ("reward", "k1", 0.2)
    kl = roll(tmp_path, {**TERM, "kl_loss_coef": 0.1}).composed.experiment.algorithm.kl
    assert kl is not None
    assert (kl.apply_to, kl.estimator, kl.coefficient) == ("loss", "k3", 0.1)


def test_a_penalty_beside_a_term_of_the_loss_has_its_own_settings(tmp_path: Path) -> None:
    found = roll(tmp_path, {**PENALTY, **TERM, "kl_loss_coef": 0.1, "kl_penalty": "mse", "target_kl": 0.05})
    algorithm = found.composed.experiment.algorithm
    assert algorithm.kl == KlConfig(apply_to="loss", estimator="k3", coefficient=0.1)
    assert algorithm.reward_kl == RewardKlConfig(estimator="k2", coefficient=0.2, target=0.05)
    assert translated(found, "roll").lost == {}


def test_a_section_for_validation_draws_by_rolls_own_numbers(tmp_path: Path) -> None:
    found = roll(tmp_path, {f"{VALIDATION}num_return_sequences": 2})
    sampling = found.composed.experiment.validation.sampling
    assert (sampling.do_sample, sampling.temperature, sampling.top_p, sampling.top_k) == (True, 0.95, 0.7, 50)
    assert not roll(tmp_path, {}).composed.experiment.validation.sampling.do_sample
    cold = roll(tmp_path, {f"{VALIDATION}temperature": 0})
    assert not cold.composed.experiment.validation.sampling.do_sample
    assert translated(cold, "roll").lost == {}


def test_generation_that_waits_for_learning_is_neither_partial_nor_old(tmp_path: Path) -> None:
    rollout = roll(tmp_path, {}).composed.experiment.rollout
    assert (rollout.async_ratio, rollout.partial, rollout.max_staleness) == (0.0, False, None)


def planned(changes: dict[str, Any]) -> ConversionResult:
    """The conversion for a plan, which assumes the processes that the file needs."""
    return convert(config_from_tree(changed(PLAIN, changes), "given.yaml:1"), DIALECTS["roll"], to_plan=True)


def test_a_reference_may_have_other_sizes_than_the_policy() -> None:
    """As in most of ROLL's own files."""
    sizes = {f"{OPTION}tensor_model_parallel_size": 2, f"{OPTION}pipeline_model_parallel_size": 2}
    own = {f"{REFERENCE_OPTION}tensor_model_parallel_size": 1, f"{REFERENCE_OPTION}pipeline_model_parallel_size": 1}
    found = planned({**PENALTY, **sizes, **own})
    assert [natively(found, f"{name}.parallel.pipeline") for name in ("actor", "reference")] == [2, 1]
    problems = conversion_problems(found, planned_rank(found.composed.experiment))
    assert not [problem.key for problem in problems if not problem.elsewhere]


def test_an_engine_on_several_devices_only_needs_a_process_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, gpus=8, packages=("vllm", "megatron.core"))
    changes = {"actor_infer.num_gpus_per_worker": 2, "actor_infer.strategy_args.strategy_name": "vllm"}
    found = planned(changes)
    assert natively(found, "rollout.engine_options.tensor_parallel") == 2
    key = "actor_infer.num_gpus_per_worker"
    assert key not in [problem.key for problem in conversion_problems(found, planned_rank(found.composed.experiment))]
    alone = convert(config_from_tree(changed(PLAIN, changes), "given.yaml:1"), DIALECTS["roll"])
    assert key in [problem.key for problem in conversion_problems(alone, current_rank())]


@pytest.mark.parametrize("name", ["critic", "reference"])
def test_a_learner_without_devices_of_its_own_is_on_those_of_the_policy(tmp_path: Path, name: str) -> None:
    mapping = "list(range(0,8))"
    workers = {f"{worker}.device_mapping": mapping for worker in ("actor_train", "actor_infer")}
    further = {"adv_estimator": "gae"} if name == "critic" else {"use_kl_loss": True, "init_kl_coef": 0.1}
    found = converted(tmp_path, "roll", changed(PLAIN, workers | further))
    placement = found.composed.experiment.placement
    assert getattr(placement, name).devices is None
    assert placement.nodes * placement.devices_per_node == 8
    assert not [problem for problem in found.unsupported if problem.key.startswith(name)]
    remarks = [remark for remark in found.composed.remarks if remark.startswith(f"{name}.device_mapping is not set")]
    assert remarks
    assert "actor_train.device_mapping" in remarks[0]
