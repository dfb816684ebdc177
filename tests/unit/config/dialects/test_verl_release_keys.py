"""If these fail, a file of verl's current releases is refused, or is a different run than there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from foreign import changed, converted, natively, translated

from quintet.cli.config_source import read_config_source
from quintet.config.capabilities import Capability
from quintet.config.checks.processes import planned_rank
from quintet.config.dialects.composition.foreign_config import compose_config
from quintet.config.dialects.dialect import key_files, tables
from quintet.config.dialects.ledger import KeySpec, is_effective
from quintet.config.dialects.loader import conversion_problems, convert
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.value_types import ValueType
from quintet.config.dotted import flatten
from quintet.config.native.algorithm import KlConfig, RewardKlConfig
from quintet.errors import ConfigError, UnsupportedRunError

PPO = {"actor_rollout_ref": {"model": {"path": "some/model"}}}
ACTOR, MODEL, REF, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "ref", "rollout"))
OPTIM, FSDP, PARALLEL, SIZES = f"{ACTOR}.optim", f"{ACTOR}.fsdp_config", "actor.parallel", f"{ACTOR}.megatron"
REF_SIZES, KINDS = f"{REF}.megatron", ("tensor", "pipeline")
SPLIT = {f"{SIZES}.tensor_model_parallel_size": 2}
BRIDGE = {f"{MODEL}.lora.rank": 16}
STORED, FROM = "use_dist_checkpointing", "dist_checkpointing_path"
LORA = {f"{MODEL}.lora_rank": 8}
TURNS = f"{ROLLOUT}.multi_turn"
TOOL_FILE, USER_FILE = f"{TURNS}.tool_config_path", f"{TURNS}.interaction_config_path"
FUNCTION_FILE = f"{TURNS}.function_tool_path"
LOOP = f"{ROLLOUT}.agent.default_agent_loop"
CALLS = {f"{TURNS}.enable": True, TOOL_FILE: "tools.yaml"}
ON_MEGATRON = {f"{ACTOR}.strategy": "megatron"}
FILES = [name for name in tables("verl")["release_files"] if name not in ("verl_newer", "verl_distillation")]
ROWS = [row for name in (*FILES, "verl_fsdp_optim") for (file,) in [key_files("verl", [name])] for row in file.load()]
MEGATRON_OPTIMIZER = [*key_files("verl", ["verl_megatron_optim_newer"])[0].load()]
HONOURED = [row for row in (*ROWS, *MEGATRON_OPTIMIZER) if row.state == "honoured"]

COMPUTED: list[tuple[str, Any, str, Any, dict[str, Any]]] = [
    (f"{SIZES}.sequence_parallel", False, f"{PARALLEL}.sequence", False, SPLIT),
    (f"{SIZES}.{STORED}", True, "actor.megatron.checkpoint", "w", {f"{SIZES}.{FROM}": "w"}),
    (f"{SIZES}.{FROM}", "w", "actor.megatron.checkpoint", "w", {f"{SIZES}.{STORED}": True}),
    (f"{REF}.megatron.sequence_parallel", False, "reference.parallel.sequence", False, SPLIT),
    (f"{REF_SIZES}.{STORED}", True, "reference.megatron.checkpoint", "w", {f"{REF_SIZES}.{FROM}": "w"}),
    (f"{REF_SIZES}.{FROM}", "w", "reference.megatron.checkpoint", "w", {f"{REF_SIZES}.{STORED}": True}),
    (f"{SIZES}.use_distributed_optimizer", True, "actor.megatron.use_distributed_optimizer", True, {}),
    (f"{REF_SIZES}.use_distributed_optimizer", True, "reference.megatron.use_distributed_optimizer", True, {}),
    (f"{OPTIM}.clip_grad", 0.5, "actor.optimizer.max_grad_norm", 0.5, {f"{ACTOR}.grad_clip": 1.0}),
    (f"{MODEL}.override_config.attn_implementation", "eager", "policy.overrides.attn_implementation", "eager", {}),
    (f"{MODEL}.override_config.max_position_embeddings", 64, "policy.overrides.max_position_embeddings", 64, {}),
    (f"{MODEL}.override_config.attention_dropout", 0.1, "policy.overrides.attention_dropout", 0.1, {}),
    (f"{MODEL}.override_config.embd_pdrop", 0.1, "policy.overrides.embd_pdrop", 0.1, {}),
    (f"{MODEL}.override_config.resid_pdrop", 0.1, "policy.overrides.resid_pdrop", 0.1, {}),
    (f"{MODEL}.lora_rank", 32, "policy.lora.rank", 32, {}),
    (f"{MODEL}.lora_alpha", 64, "policy.lora.alpha", 64.0, LORA),
    (f"{MODEL}.target_modules", ["q_proj"], "policy.lora.target_modules", ("q_proj",), LORA),
    (f"{MODEL}.lora_adapter_path", "adapters", "policy.lora.path", "adapters", LORA),
    (f"{MODEL}.lora.rank", 16, "policy.lora.target_modules", ("all-linear",), {}),
    (f"{MODEL}.lora.alpha", 64, "policy.lora.alpha", 64.0, BRIDGE),
    (f"{MODEL}.lora.target_modules", ["linear_qkv"], "policy.lora.target_modules", ("linear_qkv",), BRIDGE),
    (f"{MODEL}.lora.adapter_path", "adapters", "policy.lora.path", "adapters", BRIDGE),
    (f"{ROLLOUT}.enable_prefix_caching", False, "rollout.engine_options.arguments.enable_prefix_caching", False, {}),
    (f"{ROLLOUT}.cudagraph_capture_sizes", [1, 8, 2], "rollout.engine_options.cuda_graph_max_batch", 8, {}),
    (
        "critic.ulysses_sequence_parallel_size",
        2,
        "critic.parallel.ulysses",
        2,
        {"critic.model.use_remove_padding": True},
    ),
    ("data.dataloader_num_workers", 2, "data.workers", 2, {}),
    ("trainer.rollout_data_dir", "rollouts", "tracking.trajectories_every_steps", 1, {}),
    ("trainer.max_actor_ckpt_to_keep", 5, "checkpoint.keep", 5, {}),
    ("actor_rollout_ref.nccl_timeout", 1200, "placement.call_timeout_seconds", 1200.0, {}),
    (f"{TURNS}.enable", True, "rollout.tool_calls.file", "tools.yaml", {TOOL_FILE: "tools.yaml"}),
    (TOOL_FILE, "tools.yaml", "rollout.tool_calls.file", "tools.yaml", {f"{TURNS}.enable": True}),
    (FUNCTION_FILE, "tools.py", "rollout.tool_calls.function_file", "tools.py", {f"{TURNS}.enable": True}),
    (USER_FILE, "users.yaml", "rollout.interactions.file", "users.yaml", {f"{TURNS}.enable": True}),
    (f"{TURNS}.max_assistant_turns", 5, "rollout.max_turns", 5, CALLS),
    (f"{TURNS}.max_user_turns", 5, "rollout.max_turns", 6, CALLS),
    (f"{TURNS}.max_parallel_calls", 3, "rollout.tool_calls.max_parallel_calls", 3, CALLS),
    (f"{TURNS}.max_tool_response_length", 99, "rollout.tool_calls.max_result_chars", 99, CALLS),
    (f"{TURNS}.tool_response_truncate_side", "left", "rollout.tool_calls.kept_part", "end", CALLS),
    ("model_engine", "megatron", "actor.backend", "megatron", {}),
    (f"{ACTOR}.tis_imp_ratio_cap", 5, "algorithm.correction.upper", 5.0, {}),
]  # fmt: skip
CANDIDATES = (True, False, 7, 0.25, "other", ["a"], [1], {"some": 1}, ["model"])


def other_value(row: KeySpec) -> Any:
    """A legal value that is neither the default nor one that needs no capability."""
    usual = [value for value in (row.default, *row.noop) if not isinstance(value, ValueType)]
    legal = [value for value in (*CANDIDATES, *row.value_type.choices) if row.value_type.accepts(value)]
    return next(value for value in legal if all(value != one or type(value) is not type(one) for one in usual))


def specs_of(changes: dict[str, Any]) -> Mapping[str, KeySpec]:
    """The keys of a run with these changes."""
    return DIALECTS["verl"].narrowed(changed(PPO, changes)).specs()


DIRECT = [row for row in HONOURED if row.direct]
WITHOUT_EFFECT = [row for row in HONOURED if not row.native and row.requires is None]
SFT: dict[str, Any] = {"model": {"path": "some/model"}, "data": {"train_files": "a.parquet"}}
EVALUATION = {"data": {"path": "answers.parquet"}}
(SFT_FILE, EVALUATION_FILE) = (key_files("verl", [f"verl_{name}"])[0] for name in ("sft_engine", "evaluation_newer"))
OF_SFT = [row for row in SFT_FILE.load() if row.state == "honoured"]
SFT_DIRECT = [row for row in OF_SFT if row.direct]
WITHOUT_EFFECT_ELSEWHERE = [
    row for row in (*OF_SFT, *EVALUATION_FILE.load()) if not row.native and row.requires is None
]


def native_value(row: KeySpec, value: Any) -> Any:
    expected = row.native_values.get(value, value) if not isinstance(value, list) else value
    return tuple(expected) if isinstance(expected, list) else expected


def changing_value(row: KeySpec, run: Any) -> Any:
    """A legal value that changes the run."""
    if row.key == f"{OPTIM}.betas":
        return [0.8, 0.9]
    legal = [value for value in (*row.value_type.choices, 1.5, *CANDIDATES) if row.value_type.accepts(value)]
    return next(value for value in legal if native_value(row, value) != natively(run, row.native[0]))


@pytest.mark.proves("verl", *(row.key for row in DIRECT))
@pytest.mark.parametrize("strategy", ["fsdp", "megatron"])
def test_a_key_with_a_native_counterpart_reaches_the_run_and_its_translation(tmp_path: Path, strategy: str) -> None:
    """`recompute_granularity` and the like need Megatron, `fsdp_config` FSDP; the others hold in both."""
    base = {f"{ACTOR}.strategy": strategy, f"{ACTOR}.use_kl_loss": True, f"{ROLLOUT}.name": "sglang"}
    plain = converted(tmp_path, "verl", changed(PPO, base))
    specs = specs_of(base)
    rows = [row for row in DIRECT if specs.get(row.key) == row and is_effective(row, specs, base.get)]
    values = {row.key: changing_value(row, plain) for row in rows if row.key not in base}
    found = converted(tmp_path, "verl", changed(PPO, {**base, **values}))
    lost = translated(found, "verl").lost
    assert len(rows) > 20
    for row in rows:
        for native in row.native:
            assert natively(found, native) == native_value(row, values[row.key]), row.key
            assert native not in lost, row.key


@pytest.mark.proves("verl", *(case[0] for case in COMPUTED))
@pytest.mark.parametrize(("key", "value", "native", "expected", "others"), COMPUTED, ids=[one[0] for one in COMPUTED])
def test_a_key_that_counts_beside_others_reaches_the_run(
    tmp_path: Path, key: str, value: Any, native: str, expected: Any, others: dict[str, Any]
) -> None:
    beside = ON_MEGATRON if ".megatron." in key else {}
    found = converted(tmp_path, "verl", changed(PPO, {**beside, **others, key: value}))
    without = converted(tmp_path, "verl", changed(PPO, {**beside, **others}))
    assert natively(found, native) == expected
    assert flatten(without.composed.experiment.model_dump()).get(native) != expected


@pytest.mark.proves("verl", *(row.key for row in WITHOUT_EFFECT))
@pytest.mark.parametrize("beside", [{}, ON_MEGATRON], ids=["fsdp", "megatron"])
def test_a_key_without_effect_changes_nothing_and_says_why(tmp_path: Path, beside: dict[str, Any]) -> None:
    enabled = {"reward_model.enable": True, **beside}
    specs = specs_of(beside)
    values = {row.key: other_value(row) for row in WITHOUT_EFFECT if specs.get(row.key) == row}
    assert all("has no effect here" in row.effect.lower() for row in WITHOUT_EFFECT)
    with_them = converted(tmp_path, "verl", changed(PPO, {**enabled, **values}))
    without = converted(tmp_path, "verl", changed(PPO, enabled))
    assert with_them.composed.experiment == without.composed.experiment
    assert {problem.key for problem in with_them.unsupported} == {problem.key for problem in without.unsupported}


@pytest.mark.proves("verl", *(row.key for row in SFT_DIRECT))
@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_a_key_of_fine_tuning_with_a_native_counterpart_reaches_the_run(tmp_path: Path, strategy: str) -> None:
    base = {"engine.strategy": strategy}
    plain = converted(tmp_path, "verl", changed(SFT, base))
    specs = DIALECTS["verl"].narrowed(SFT).specs()
    rows = [row for row in SFT_DIRECT if is_effective(row, specs, {"model.strategy": strategy}.get)]
    values = {row.key: changing_value(row, plain) for row in rows} | base
    found = converted(tmp_path, "verl", changed(SFT, values))
    assert len(rows) > 15
    for row in rows:
        for native in row.native:
            assert natively(found, native) == native_value(row, values[row.key]), row.key


@pytest.mark.proves("verl", *(row.key for row in WITHOUT_EFFECT_ELSEWHERE))
@pytest.mark.parametrize("tree", [SFT, EVALUATION], ids=["sft", "evaluation"])
def test_a_key_without_effect_on_fine_tuning_or_an_evaluation_changes_nothing(
    tmp_path: Path, tree: dict[str, Any]
) -> None:
    specs = DIALECTS["verl"].narrowed(tree).specs()
    values = {row.key: other_value(row) for row in WITHOUT_EFFECT_ELSEWHERE if specs.get(row.key) == row}
    assert values
    with_them, without = (converted(tmp_path, "verl", changed(tree, changes)) for changes in (values, {}))
    assert with_them.composed.experiment == without.composed.experiment
    assert all("has no effect here" in row.effect.lower() for row in WITHOUT_EFFECT_ELSEWHERE)


@pytest.mark.parametrize("beside", [{}, ON_MEGATRON], ids=["fsdp", "megatron"])
def test_a_key_that_waits_is_named_with_its_capability(tmp_path: Path, beside: dict[str, Any]) -> None:
    waiting = [row for row in ROWS if row.requires is not None and row.key != "model_engine"]
    switches = {"custom_reward_function.path": "mine.py", "reward_model.enable": True, "algorithm.use_pf_ppo": True}
    values = {**switches, **LORA, f"{MODEL}.lora.rank": 8, **beside}
    specs = specs_of(beside)
    values |= {row.key: other_value(row) for row in waiting if row.key not in values and row.key in specs}
    values |= {
        "reward_model.reward_loop_source": "importlib",
        f"{SIZES}.override_transformer_config.recompute_granularity": "selective",
    }
    values |= {f"{REF}.megatron.override_transformer_config.recompute_granularity": "selective"}
    found = converted(tmp_path, "verl", changed(PPO, values))
    named = {problem.key: problem.message for problem in found.unsupported}
    merged = {**{key: spec.default for key, spec in specs.items()}, **values}
    effective = [row for row in waiting if row.key in specs and is_effective(row, specs, merged.get)]
    assert len(effective) > 90
    for row in effective:
        assert str(row.requires) in named.get(row.key, ""), row.key


@pytest.mark.parametrize("engine", ["automodel", "mlite"])
def test_another_backend_waits_and_is_never_fsdp(tmp_path: Path, engine: str) -> None:
    found = converted(tmp_path, "verl", changed(PPO, {"model_engine": engine}))
    assert natively(found, "actor.backend") == engine
    assert "model_engine" in {problem.key for problem in found.unsupported}


def test_megatron_shuffles_without_a_seed_as_in_the_first_releases_and_with_that_of_the_latest(tmp_path: Path) -> None:
    """The tree of 0.3 shuffles and has no such key; that of 0.9 has 42."""
    found = converted(tmp_path, "verl", changed(PPO, {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.shuffle": True}))
    assert (natively(found, "actor.shuffle"), natively(found, "actor.shuffle_seed")) == (True, 42)
    seedless = {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.shuffle": True, f"{ACTOR}.data_loader_seed": None}
    assert natively(converted(tmp_path, "verl", changed(PPO, seedless)), "actor.shuffle_seed") is None


def test_model_engine_chooses_megatron_and_its_optimizer(tmp_path: Path) -> None:
    sizes = {f"{SIZES}.{name}_model_parallel_size": size for name, size in (("tensor", 4), ("pipeline", 2))}
    found = converted(tmp_path, "verl", changed(PPO, {"model_engine": "megatron", **sizes, f"{OPTIM}.min_lr": 1e-7}))
    actor = found.composed.experiment.actor
    assert (actor.backend, actor.parallel.tensor, actor.parallel.pipeline) == ("megatron", 4, 2)
    assert actor.optimizer.min_learning_rate_ratio == pytest.approx(0.1)
    # the reference has the sizes of the actor, and no data-parallel rank is left to share
    assert found.composed.experiment.reference.parallel.tensor == 4


def test_model_engine_may_be_written_among_the_keys_of_the_actor(tmp_path: Path) -> None:
    """As verl's README of 2026-08 says."""
    found = converted(tmp_path, "verl", changed(PPO, {f"{ACTOR}.model_engine": "megatron"}))
    assert natively(found, "actor.backend") == "megatron"


def test_a_recipe_that_computes_no_advantages_waits(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedRunError, match=r"adv_estimator = null.*trainers of verl's recipes"):
        converted(tmp_path, "verl", changed(PPO, {"algorithm.adv_estimator": None}))


def test_a_reward_manager_of_a_recipe_waits(tmp_path: Path) -> None:
    found = converted(tmp_path, "verl", changed(PPO, {"reward_model.reward_manager": "collabllm"}))
    (problem,) = found.unsupported
    assert (problem.key, str(Capability.REWARD_MANAGERS) in problem.message) == ("reward_model.reward_manager", True)


def test_tools_of_verl_keep_its_turns_rewards_and_file(tmp_path: Path) -> None:
    found = converted(tmp_path, "verl", changed(PPO, {**CALLS, f"{TURNS}.max_assistant_turns": 5}))
    rollout = found.composed.experiment.rollout
    assert rollout.tool_calls is not None
    # verl only passes rewards of tools on to the reward function, and its tools have time limits of their own
    assert (rollout.tool_calls.reward_weight, rollout.tool_calls.timeout_seconds) == (0.0, 300.0)
    assert not {"rollout.tool_calls.file", "rollout.max_turns"} & set(translated(found, "verl").lost)
    # verl changed the meaning of the side
    for side, kept, before in (("left", "end", "beginning"), ("right", "beginning", "end"), ("middle", "", "")):
        sided = converted(tmp_path, "verl", changed(PPO, {**CALLS, f"{TURNS}.tool_response_truncate_side": side}))
        remarks = [remark for remark in sided.composed.remarks if "until 0.7" in remark]
        assert len(remarks) == (side != "middle")
        assert all(f"keeps the {kept} of" in remark and remark.endswith(f"kept the {before}") for remark in remarks)
    # without a limit of turns, each has at least one token
    unlimited = converted(tmp_path, "verl", changed(PPO, {**CALLS, "data.max_response_length": 300}))
    assert natively(unlimited, "rollout.max_turns") == 300
    without = converted(tmp_path, "verl", changed(PPO, {f"{TURNS}.enable": True}))
    assert (without.composed.experiment.rollout.tool_calls, natively(without, "rollout.max_turns")) == (None, 1)


def test_users_of_verl_keep_its_turns_rewards_and_file(tmp_path: Path) -> None:
    changes = {f"{TURNS}.enable": True, USER_FILE: "users.yaml", f"{TURNS}.max_user_turns": 5}
    found = converted(tmp_path, "verl", changed(PPO, changes))
    rollout = found.composed.experiment.rollout
    assert rollout.interactions is not None
    # verl only passes rewards of users on to the reward function; after five replies there is one more response
    assert (rollout.interactions.reward_weight, rollout.tool_calls, rollout.max_turns) == (0.0, None, 6)
    assert not {"rollout.interactions.file", "rollout.max_turns"} & set(translated(found, "verl").lost)
    without = converted(tmp_path, "verl", changed(PPO, {USER_FILE: "users.yaml", f"{TURNS}.enable": False}))
    assert (without.composed.experiment.rollout.interactions, natively(without, "rollout.max_turns")) == (None, 1)
    by_name = converted(tmp_path, "verl", changed(PPO, {USER_FILE: "users.yaml", LOOP: "tool_agent", **CALLS}))
    rollout = by_name.composed.experiment.rollout
    assert rollout.interactions is not None
    assert rollout.tool_calls is not None


def test_functions_of_verl_are_tools_with_or_without_a_tool_file(tmp_path: Path) -> None:
    changes = {LOOP: "tool_agent", FUNCTION_FILE: "tools.py", f"{TURNS}.max_parallel_calls": 3}
    found = converted(tmp_path, "verl", changed(PPO, {**changes, f"{TURNS}.max_assistant_turns": 4}))
    rollout = found.composed.experiment.rollout
    assert rollout.tool_calls is not None
    assert (rollout.tool_calls.file, rollout.tool_calls.function_file) == (None, "tools.py")
    assert (rollout.tool_calls.max_parallel_calls, rollout.max_turns) == (3, 4)
    assert not {"rollout.tool_calls.function_file", "rollout.max_turns"} & set(translated(found, "verl").lost)
    both = converted(tmp_path, "verl", changed(PPO, {**changes, TOOL_FILE: "tools.yaml"}))
    rollout = both.composed.experiment.rollout
    assert rollout.tool_calls is not None
    assert (rollout.tool_calls.file, rollout.tool_calls.function_file) == ("tools.yaml", "tools.py")


@pytest.mark.proves("verl", LOOP)
@pytest.mark.parametrize(
    ("changes", "loop"),
    [
        (CALLS, None),  # earlier releases have no names of agent loops
        ({TOOL_FILE: "tools.yaml", LOOP: "tool_agent"}, "tool_agent"),
        ({**CALLS, LOOP: "tool_agent"}, "tool_agent"),
        ({**CALLS, LOOP: "single_turn_agent"}, "single_turn_agent"),
        ({**CALLS, LOOP: "single_turn_agent", f"{ROLLOUT}.mode": "sync"}, None),
    ],
)
def test_rows_without_a_name_have_the_agent_loop_of_the_file(
    tmp_path: Path, changes: dict[str, Any], loop: str | None
) -> None:
    found = converted(tmp_path, "verl", changed(PPO, {**changes, f"{TURNS}.max_parallel_calls": 3}))
    run = found.composed.experiment
    assert run.data is not None
    assert run.rollout.tool_calls is not None
    assert (run.rollout.tool_calls.file, run.rollout.tool_calls.max_parallel_calls) == ("tools.yaml", 3)
    assert (run.data.agent_loop, run.data.agent_loop_key) == (loop, "agent_name")
    assert loop == "single_turn_agent" or "data.agent_loop" not in translated(found, "verl").lost
    assert not found.unsupported


def test_agent_loops_of_user_code_wait_and_one_with_tools_needs_some(tmp_path: Path) -> None:
    (problem,) = converted(tmp_path, "verl", changed(PPO, {LOOP: "react_agent"})).unsupported
    assert "requires agent loops and engine servers from user code" in problem.message
    with pytest.raises(ConfigError, match=r"default_agent_loop = 'tool_agent' .* needs tools") as error:
        converted(tmp_path, "verl", changed(PPO, {LOOP: "tool_agent"}))
    assert f"{LOOP}=single_turn_agent" in str(error.value)


@pytest.mark.proves("verl", f"{TURNS}.format")
def test_calls_in_the_format_of_qwen_are_those_of_hermes_and_others_wait(tmp_path: Path) -> None:
    problems = {}
    for form in ("qwen", "hermes", "gpt-oss"):
        found = converted(tmp_path, "verl", changed(PPO, {**CALLS, f"{TURNS}.format": form}))
        problems[form] = [problem.key for problem in found.unsupported]
    assert problems == {"qwen": [], "hermes": [], "gpt-oss": [f"{TURNS}.format"]}


def test_torch_compile_is_no_option_of_megatron_that_nobody_set(tmp_path: Path) -> None:
    found = converted(tmp_path, "verl", changed(PPO, {"model_engine": "megatron"}))
    assert natively(found, "actor.memory.torch_compile") is False
    assert [problem.key for problem in found.unsupported] == []


def test_two_spellings_count_as_one_when_one_is_unset_or_the_default(tmp_path: Path) -> None:
    both = {
        f"{OPTIM}.warmup_style": None,
        f"{OPTIM}.lr_scheduler_type": "cosine",
        f"{ACTOR}.ulysses_sequence_parallel_size": 1,
        f"{FSDP}.ulysses_sequence_parallel_size": 2,
        f"{MODEL}.use_remove_padding": True,
        f"{OPTIM}.total_training_steps": -1,
        "trainer.total_training_steps": 200,
        "reward_model.reward_manager": None,
        "reward.reward_manager.name": "prime",
        "custom_reward_function.path": None,
        "custom_reward_function.name": None,
        "reward.custom_reward_function.path": "mine.py",
        "reward.custom_reward_function.name": "score",
    }
    run = converted(tmp_path, "verl", changed(PPO, both)).composed.experiment
    assert (run.actor.optimizer.schedule, run.actor.parallel.ulysses, run.training.steps) == ("cosine", 2, 200)
    assert run.reward is not None
    assert (run.reward.manager, run.reward.function) == ("prime", "mine.py:score")


@pytest.mark.parametrize(
    ("first", "second", "native", "expected"),
    [
        ((f"{OPTIM}.warmup_style", "cosine"), (f"{OPTIM}.lr_scheduler_type", "constant"), "schedule", "cosine"),
        ((f"{OPTIM}.clip_grad", 1.0), (f"{ACTOR}.grad_clip", 0.3), "max_grad_norm", 0.3),
        ((f"{OPTIM}.clip_grad", 0.5), (f"{ACTOR}.grad_clip", 0.3), "max_grad_norm", 0.5),
    ],
)
def test_of_two_spellings_the_one_counts_that_verl_reads(
    tmp_path: Path, first: tuple[str, Any], second: tuple[str, Any], native: str, expected: Any
) -> None:
    found = converted(tmp_path, "verl", changed(PPO, dict((first, second))))
    assert natively(found, f"actor.optimizer.{native}") == expected


@pytest.mark.proves("verl", "algorithm.use_kl_in_reward", f"{ACTOR}.use_kl_loss")
def test_both_kl_terms_have_their_own_coefficients_and_alone_each_counts(tmp_path: Path) -> None:
    terms = {f"{ACTOR}.use_kl_loss": True, "algorithm.use_kl_in_reward": True}
    in_loss = {f"{ACTOR}.kl_loss_coef": 0.1, f"{ACTOR}.kl_loss_type": "k2"}
    in_reward = {"algorithm.kl_penalty": "abs", "algorithm.kl_ctrl": {"kl_coef": 0.2, "type": "adaptive"}}
    found = converted(tmp_path, "verl", changed(PPO, terms | in_loss | in_reward))
    algorithm = found.composed.experiment.algorithm
    assert not found.unsupported
    assert algorithm.kl == KlConfig(apply_to="loss", coefficient=0.1, estimator="k2")
    assert algorithm.reward_kl == RewardKlConfig(coefficient=0.2, estimator="abs", target=0.1, horizon=10000)
    assert translated(found, "verl").lost == {}
    for key, place in zip(terms, ("loss", "reward"), strict=True):
        alone = converted(tmp_path, "verl", changed(PPO, {key: True}))
        assert (alone.unsupported, natively(alone, "algorithm.kl.apply_to")) == ((), place)


def test_passes_without_a_size_are_filled_and_that_is_told(tmp_path: Path) -> None:
    """verl's own file leaves the size to the user."""
    key = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    found = converted(tmp_path, "verl", changed(PPO, {key: None}))
    assert natively(found, "actor.budget.sequences") is None
    assert f"{key} is not set: passes are filled up to training.micro_batch_tokens" in found.composed.remarks


def test_a_file_of_verl_composes_as_hydra_does_and_is_known_by_its_defaults_list(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    (tmp_path / "model_engine").mkdir()
    (tmp_path / "model_engine/dp.yaml").write_text("# @package _global_\nmodel_engine: dp\n")
    (tmp_path / "model_engine/megatron.yaml").write_text("# @package _global_\nmodel_engine: megatron\n")
    (tmp_path / "actor/dp_actor.yaml").write_text("strategy: fsdp\nppo_epochs: 1\n")
    (tmp_path / "actor/megatron_actor.yaml").write_text(
        "strategy: megatron\nmegatron: {tensor_model_parallel_size: 2}\nppo_epochs: 3\n"
    )
    (tmp_path / "ppo_trainer.yaml").write_text(
        "defaults:\n  - model_engine: dp\n  - actor@actor_rollout_ref.actor: ${model_engine}_actor\n  - _self_\n"
        "actor_rollout_ref: {rollout: {name: '???'}}\n"
    )
    file = tmp_path / "ppo_megatron_trainer.yaml"
    file.write_text("defaults:\n  - ppo_trainer\n  - override model_engine: megatron\n  - _self_\n")
    source = read_config_source(str(file), [], None, quiet=True)
    assert source.dialect == "verl"
    run = convert(compose_config(file, []), DIALECTS["verl"]).composed.experiment
    assert (run.actor.backend, run.actor.parallel.tensor, run.training.epochs) == ("megatron", 2, 3)


def test_the_text_of_a_list_names_loggers(tmp_path: Path) -> None:
    """Quotes within quotes of a script leave it."""
    found = converted(tmp_path, "verl", changed(PPO, {"trainer.logger": "[console,wandb]"}))
    assert found.composed.experiment.tracking.loggers == ("jsonl", "console", "wandb")


def test_fine_tuning_has_the_devices_that_its_parallel_sizes_need_if_torchrun_decides(tmp_path: Path) -> None:
    split = {"engine.ulysses_sequence_parallel_size": 2, "trainer.n_gpus_per_node": 1}
    sft = converted(tmp_path, "verl", changed(SFT, split)).composed.experiment.sft
    assert sft is not None
    assert sft.devices == 2


def test_groups_beside_a_linked_file_are_found(tmp_path: Path) -> None:
    """RAGEN's config/ppo_trainer.yaml is a link into a submodule, which has the groups of its defaults list."""
    framework, config = tmp_path / "verl", tmp_path / "config"
    (framework / "actor").mkdir(parents=True)
    config.mkdir()
    (framework / "actor/dp_actor.yaml").write_text("ppo_epochs: 3\n")
    (framework / "ppo_trainer.yaml").write_text("defaults:\n  - actor@actor_rollout_ref.actor: dp_actor\n  - _self_\n")
    (config / "ppo_trainer.yaml").symlink_to("../verl/ppo_trainer.yaml")
    (config / "base.yaml").write_text("defaults: [ppo_trainer]\n")
    assert compose_config(config / "base.yaml", []).plain()["actor_rollout_ref"] == {"actor": {"ppo_epochs": 3}}


@pytest.mark.proves("verl", "data.messages_key", "data.use_dynamic_bsz", "data.max_token_len_per_gpu")
@pytest.mark.proves("verl", "optim.min_lr_ratio", "optim.lr_decay_style", "trainer.max_ckpt_to_keep")
@pytest.mark.proves("verl", "engine.use_distributed_optimizer")
def test_verls_fine_tuning_of_newer_releases_is_read(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"model": {"path": "some/model"}, "data": {"messages_key": "messages"}}
    changes = {
        "engine.strategy": "megatron",
        "engine.tensor_model_parallel_size": 2,
        "engine.use_distributed_optimizer": True,
        "engine.override_transformer_config.recompute_granularity": "full",
        "data.use_dynamic_bsz": True,
        "data.max_token_len_per_gpu": 4096,
        "optim.lr": 1e-5,
        "optim.min_lr": 1e-6,
        "optim.lr_decay_style": "cosine",
        "trainer.max_ckpt_to_keep": 3,
    }
    run = converted(tmp_path, "verl", changed(tree, changes)).composed.experiment
    assert run.sft is not None
    assert run.data is not None
    assert (run.actor.backend, run.actor.parallel.tensor) == ("megatron", 2)
    assert run.actor.megatron is not None
    assert run.actor.megatron.recompute_granularity == "full"
    assert run.actor.megatron.use_distributed_optimizer
    assert (run.sft.sequences_per_pass, run.training.micro_batch_tokens) == (None, 4096)
    assert run.sft.optimizer.min_learning_rate_ratio == pytest.approx(0.1)
    assert (run.sft.optimizer.schedule, run.data.messages_key, run.checkpoint.keep) == ("cosine", "messages", 3)
    share = converted(tmp_path, "verl", changed(tree, {"optim.min_lr_ratio": 0.25})).composed.experiment.sft
    assert share is not None
    assert share.optimizer.min_learning_rate_ratio == 0.25


def test_cuda_graphs_go_with_a_freed_cache(tmp_path: Path) -> None:
    graphs = {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.enforce_eager": False, f"{ROLLOUT}.free_cache_engine": True}
    found = converted(tmp_path, "verl", changed(PPO, graphs))
    assert natively(found, "rollout.engine_options.eager") is False


def test_values_that_a_framework_leaves_to_others_are_not_set(tmp_path: Path) -> None:
    tree = changed(PPO, {f"{ROLLOUT}.name": "???", f"{ACTOR}._target_": "verl.workers.config.FSDPActorConfig"})
    found = converted(tmp_path, "verl", tree, f"{ROLLOUT}.n=4")
    assert found.composed.experiment.training.samples_per_group == 4
    other = converted(tmp_path, "verl", changed(PPO, {f"{ACTOR}._target_": "mine.OwnActorConfig"}))
    assert [problem.key for problem in other.unsupported] == [f"{ACTOR}._target_"]


def test_entries_of_a_section_that_waits_are_told_by_the_section(tmp_path: Path) -> None:
    found = converted(tmp_path, "verl", PPO, "+data.apply_chat_template_kwargs.date_string=today")
    (problem,) = found.unsupported
    assert problem.key == "data.apply_chat_template_kwargs"
    assert "command line" in problem.message


def test_sequences_are_shared_out_over_copies_of_the_model_under_megatron(tmp_path: Path) -> None:
    """8 GPUs with tensor 2 × pipeline 2 have 2 copies: 2 prompts × 5 samples divide by 2, not by 8."""
    sizes = {f"{SIZES}.tensor_model_parallel_size": 2, f"{SIZES}.pipeline_model_parallel_size": 2}
    batch = {"data.train_batch_size": 2, f"{ACTOR}.ppo_mini_batch_size": 2, f"{ROLLOUT}.n": 5}
    tree = changed(PPO, {**ON_MEGATRON, **sizes, **batch, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 5})
    assert natively(converted(tmp_path, "verl", tree), "training.mini_batches") == 1


def test_a_reference_may_have_other_sizes_than_the_actor_under_megatron(tmp_path: Path) -> None:
    sizes = {f"{SIZES}.pipeline_model_parallel_size": 2, f"{REF_SIZES}.pipeline_model_parallel_size": 1}
    tree = changed(PPO, {**ON_MEGATRON, **SPLIT, **sizes, f"{ACTOR}.use_kl_loss": True})
    found = converted(tmp_path, "verl", tree)
    parallel = [natively(found, f"{name}.parallel.{size}") for name in ("actor", "reference") for size in KINDS]
    assert parallel == [2, 2, 2, 1]
    keys = [problem.key for problem in conversion_problems(found, planned_rank(found.composed.experiment))]
    assert not [key for key in keys if "parallel" in key]


def test_options_of_a_reward_model_that_is_off_do_not_wait(tmp_path: Path) -> None:
    """verl's `ppo_megatron_trainer.yaml` has them until 0.6, with `enable: false`."""
    megatron = {"reward_model.megatron.tensor_model_parallel_size": 4, "reward_model.strategy": "megatron"}
    assert not converted(tmp_path, "verl", changed(PPO, megatron)).unsupported
    enabled = megatron | {"reward_model.enable": True, "reward_model.model.path": "some/model"}
    keys = {problem.key for problem in converted(tmp_path, "verl", changed(PPO, enabled)).unsupported}
    assert "reward_model.megatron" in keys


@pytest.mark.proves("verl", "data.enable_thinking_default")
@pytest.mark.parametrize(
    ("changes", "template"),
    [
        ({"data.enable_thinking_default": False}, "native_nonthinking"),
        ({"data.enable_thinking_default": True}, "native_thinking"),
        ({"data.enable_thinking_default": "none"}, None),
        ({"data.apply_chat_template_kwargs": {"enable_thinking": False}}, "native_nonthinking"),
        (
            {"data.enable_thinking_default": True, "data.apply_chat_template_kwargs": {"enable_thinking": False}},
            "native_thinking",
        ),
    ],
)
def test_thinking_of_rows_without_their_own_reaches_the_template(
    tmp_path: Path, changes: dict[str, Any], template: str | None
) -> None:
    run = converted(tmp_path, "verl", changed(SFT, changes))
    assert (natively(run, "data.template"), run.unsupported) == (template, ())
    assert translated(run, "verl").lost == {}


@pytest.mark.proves("verl", f"{MODEL}.custom_chat_template", "data.apply_chat_template_kwargs")
@pytest.mark.parametrize("base", [PPO, {**PPO, "data": {"output_path": "responses.parquet"}}], ids=["ppo", "server"])
def test_a_chat_template_of_the_file_formats_prompts(tmp_path: Path, base: dict[str, Any]) -> None:
    text = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    custom, options = f"{MODEL}.custom_chat_template", "data.apply_chat_template_kwargs"
    for changes, template in (
        ({custom: text}, text),
        ({options: {"enable_thinking": False}}, "native_nonthinking"),
        ({options: {"enable_thinking": True}}, "native_thinking"),
        ({options: {}}, None),
    ):
        run = converted(tmp_path, "verl", changed(base, changes))
        assert (natively(run, "data.template"), run.unsupported) == (template, ())
    both = converted(tmp_path, "verl", changed(base, {custom: text, options: {"enable_thinking": False}}))
    assert [problem.key for problem in both.unsupported] == [options]


@pytest.mark.parametrize("key", [f"{MODEL}.custom_chat_template", "data.apply_chat_template_kwargs"])
def test_a_translated_run_keeps_its_chat_template(tmp_path: Path, key: str) -> None:
    value = {"enable_thinking": False} if key.startswith("data.") else "{{ messages[0]['content'] }}"
    run = converted(tmp_path, "verl", changed(PPO, {key: value}))
    assert translated(run, "verl").lost == {}
