"""If these fail, somebody does what an error says, in the format of their framework, and gets the same error again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pytest
from hints import SRC, followed, hint_sites, printed_hints, recorded_sites

from quintet import hardware
from quintet.config.checks.processes import planned_rank
from quintet.config.dialects.composition.foreign_config import compose_config, config_from_tree
from quintet.config.dialects.loader import conversion_problems, convert
from quintet.config.dialects.registry import DIALECTS
from quintet.config.dialects.roll.judge import JUDGE, PROMPT_NAME
from quintet.config.dotted import unflatten
from quintet.config.plan.run_plan import plan_run
from quintet.config.yaml_reader import parse_override
from quintet.errors import UserError

A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GPUS = "trainer.n_gpus_per_node=4"
CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode=true"
DAPO = ["reward_model.reward_manager=dapo", "reward_model.reward_kwargs.overlong_buffer_cfg.enable=true"]
MEGATRON = [f"{A}.strategy=megatron"]
TEACHER_ENGINE = "distillation.teacher_models.teacher_model.inference"
TEACHER = "distillation.teacher_models.teacher_model.model_path=DIRECTORY"
VERL = [
    # batches
    ["data.train_batch_size=1000"],
    [f"{A}.ppo_mini_batch_size=100"],
    [GPUS, "data.train_batch_size=1022", f"{A}.ppo_mini_batch_size=511"],
    [GPUS, f"{A}.ulysses_sequence_parallel_size=3", "actor_rollout_ref.model.use_remove_padding=true"],
    [f"{A}.ppo_micro_batch_size_per_gpu=3"],
    [GPUS, f"{A}.ppo_mini_batch_size=2", f"{A}.ppo_micro_batch_size_per_gpu=1"],
    [GPUS, f"{A}.ppo_micro_batch_size=6"],
    [f"{A}.ppo_micro_batch_size_per_gpu=2", f"{A}.ppo_micro_batch_size=2"],
    [f"{A}.use_dynamic_bsz=true", f"{A}.ppo_max_token_len_per_gpu=100"],
    # keys beside each other
    ["algorithm.adv_estimator=grpo_passk"],
    [GPUS, f"{A}.ulysses_sequence_parallel_size=2", "actor_rollout_ref.model.use_remove_padding=false"],
    ["trainer.resume_mode=resume_path"],
    ["data.custom_cls.path=x.py"],
    [f"{R}.do_sample=false", f"{R}.n=4"],
    [f"{R}.prompt_length=7"],
    [*MEGATRON, f"{A}.optim.min_lr=1.0"],
    [*MEGATRON, f"{A}.optim.min_lr=0.0", f"{A}.optim.lr_warmup_steps=10", f"{A}.optim.lr_decay_steps=5"],
    [*MEGATRON, f"{A}.optim.min_lr=0.0", f"{A}.optim.clip_grad=1.0", f"{A}.grad_clip=2.0"],
    ["model_engine=veomni", GPUS, f"{A}.veomni.fsdp_size=3"],
    ["model_engine=torchtitan", GPUS, f"{A}.torchtitan.data_parallel_shard_size=2"],
    ["model_engine=torchtitan", GPUS, f"{A}.torchtitan.tensor_parallel_size=3"],
    # critic
    ["algorithm.adv_estimator=gae", "critic.ppo_epochs=7"],
    ["algorithm.adv_estimator=gae", "critic.strategy=megatron"],
    ["algorithm.adv_estimator=gae", "critic.optim.total_training_steps=7"],
    ["algorithm.adv_estimator=gae", GPUS, "critic.ulysses_sequence_parallel_size=2"],
    # objective
    [f"{A}.policy_loss.loss_mode=dro"],
    [f"{CORRECTION}.rollout_rs='token_k1,seq_sum_k2'", f"{CORRECTION}.rollout_rs_threshold='1.0,2.0,3.0'"],
    [f"{CORRECTION}.rollout_rs=token_k2", f"{CORRECTION}.rollout_rs_threshold=0.5_2.0"],
    [
        "algorithm.adv_estimator=gdpo",
        f"{R}.n=4",
        "algorithm.gdpo_reward_keys=[a, b]",
        "algorithm.gdpo_reward_weights=[1.0]",
    ],
    [f"{A}.policy_loss.loss_mode=bypass_mode"],
    [f"{R}.agent.default_agent_loop=tool_agent"],
    # distillation
    ["distillation.enabled=true"],
    [TEACHER, "distillation.enabled=true", "distillation.distillation_loss.loss_mode=k1"],
    [TEACHER, "distillation.enabled=true", f"{TEACHER_ENGINE}.max_model_len=9"],
    [TEACHER, "distillation.enabled=true", "distillation.nnodes=1", "distillation.n_gpus_per_node=3", GPUS],
    # reward
    [*DAPO, "reward_model.reward_kwargs.overlong_buffer_cfg.len=null"],
    [*DAPO, "reward_model.reward_kwargs.overlong_buffer_cfg.len=100000"],
    [*DAPO, "reward_model.reward_kwargs.overlong_buffer_cfg.len=8", "reward_model.reward_kwargs.max_resp_len=9"],
    # unknown keys, and sections without keys
    ["data.train_batch_sise=8"],
    ["trainer=5"],
    [
        "actor_rollout_ref.model.path=DIRECTORY",
        "actor_rollout_ref.model.override_config.model_config.num_hidden_layer=2",
    ],
    ["actor_rollout_ref.model.path=DIRECTORY", "actor_rollout_ref.model.override_config.model_config.zzzzzzzzz=2"],
    # values that contradict each other only natively
    [f"{R}.min_tokens=900"],
    [f"{A}.policy_loss.loss_mode=clip_cov", f"{A}.policy_loss.clip_cov_lb=9.0", f"{A}.policy_loss.clip_cov_ub=5.0"],
    [BYPASS, f"{R}.do_sample=false", f"{R}.temperature=0.5"],
    [f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.5"],
    ["async_training.staleness_threshold=0.5", f"{R}.free_cache_engine=true"],
    [f"{CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is_threshold=null"],
    # engines with devices of their own
    [GPUS, f"{R}.name=vllm", f"{R}.tensor_model_parallel_size=3"],
    [GPUS, "rollout.nnodes=2", "rollout.n_gpus_per_node=5"],
    # fine-tuning
    ["model.partial_pretrain=DIRECTORY", "trainer.resume_mode=resume_path"],
    ["model.partial_pretrain=DIRECTORY", "data.custom_cls.path=x.py"],
    ["model.partial_pretrain=DIRECTORY", "engine.strategy=automodel", "engine.dp_replicate_size=3"],
    # generation
    ["data.output_path=x.parquet", "rollout.temperature=0.0"],
    ["data.output_path=x.parquet", "rollout.do_sample=false"],
    ["data.output_path=x.parquet", "rollout.tensor_model_parallel_size=3"],
    # checks of the native run
    [f"{A}.strategy=megatron", f"{A}.optim.optimizer=muon"],
    [GPUS, f"{A}.fsdp_config.fsdp_size=3"],
    [GPUS, *MEGATRON, f"{A}.ulysses_sequence_parallel_size=2", "actor_rollout_ref.model.use_remove_padding=true"],
]
AGENTS, TRAINED = ["es_manager.train.env_groups=8", "es_manager.train.group_size=16"], "es_manager.train.env_configs"
RAGEN = [
    ["training.ppo_batch_size=3"],
    ["training.train_data_num=2"],
    ["training.val_batch_size=1000"],
    ["system.n_gpus=8"],
    ["system.n_gpus=4", "system.cuda_visible_devices='0,1,2,3'", "training.rollout_tp_size=3"],
    # runs of agents
    [*AGENTS, "ppo_mini_batch_size=30"],
    [*AGENTS, "ppo_mini_batch_size=64", "actor_rollout_ref.rollout.rollout_filter_ratio=0.25"],
    [*AGENTS, f"{R}.rollout_filter_ratio=0.01"],
    [*AGENTS, f"{R}.max_model_len=400"],
    [*AGENTS, "critic.ppo_mini_batch_size=16"],
    [*AGENTS, "algorithm.bi_level_gae=true", "algorithm.adv_estimator=grpo"],
    [*AGENTS, f"{TRAINED}.tags=[]"],
    [*AGENTS, f"{TRAINED}.n_groups=[4]"],
]
LAKES = [f"{name}.env_name=frozenlake" for name in ("lake", "pond")]
LISTS = ["train_envs.env1.n_envs=1000", "val_envs.env1.n_envs=8", f"{A}.ppo_mini_batch_size=128"]
VAGEN = [
    [f"{A}.ppo_mini_batch_size=7", f"{A}.strategy=megatron"],
    ["data.max_trajectory_length=5"],
    [f"{A}.optim.total_training_steps=8", "trainer.total_training_steps=9"],
    ["trainer.total_training_steps=null", "lake.env_name=frozenlake", "lake.train_size=3"],
    [*LAKES, "lake.env_config.format_reward=0.25"],
    [f"{R}.min_tokens=9000"],
    ["rollout_manager.max_trajectory_length=2000"],
    ["critic.use_reward_mask=true"],
    # runs with lists of environments
    [*LISTS, "train_envs.env1.n_envs=100"],
    [*LISTS, f"{A}.ppo_mini_batch_size=100"],
    [*LISTS, "train_envs.env1.seed=[5,3]"],
    [*LISTS, "train_envs.env1.seed=[1,9,1]"],
    [*LISTS, "train_envs.env1.seed_list=[1,2]"],
    [*LISTS, "train_envs.env1.config.num_boxes=2"],
    [*LISTS, "train_envs.env1.config.prompt_format=free_wm"],
    [*LISTS, "train_envs.env1.name=Sokoban", "train_envs.env1.config.min_solution_steps=[5,2]"],
    [*LISTS, "algorithm.adv_estimator=no_concat_gae", "critic.enable=true"],
    [*LISTS, "algorithm.adv_estimator=no_concat_gae", "trainer.concat_multi_turn=false"],
    [*LISTS, f"{R}.agent.agent_loop_config_path=agent_no_concat.yaml"],
]
PLACED = "cluster.component_placement"
EMBODIED = ["env.train.total_num_envs=160"]
GRPO, CRITIC = "algorithm.adv_type=grpo", "critic.use_critic_model"
CONVERSION = "actor.megatron.ckpt"
RLINF = [
    ["algorithm.group_size=1", GRPO],
    ["algorithm.sampling_params.do_sample=false", GRPO],
    ["algorithm.loss_type=actor_critic", GRPO],
    [f"{CRITIC}=true", GRPO],
    ["data.train_data_paths=null"],
    ["actor.training_backend=fsdp", "actor.fsdp_config.amp_autocast.enabled=true"],
    ["reward.use_reward_model=true", "reward.model.model_path=null"],
    ["runner.seq_length=100", "data.max_prompt_length=100"],
    ["runner.seq_length=100", "data.max_prompt_length=60", "algorithm.sampling_params.max_new_tokens=50"],
    ["runner.enable_dynamic_batch_size=true", "runner.max_tokens_per_mbs=5"],
    ["actor.optim.lr=0.1", "actor.lr_sched.max_lr=0.2"],
    ["actor.optim.lr=0.1", "actor.optim.min_lr=0.2"],
    ["algorithm.importance_sampling_fix=true", "rollout.recompute_logprobs=false"],
    ["algorithm.adv_type=reinpp", "algorithm.use_reinpp_baseline=true", "algorithm.group_size=1"],
    # Megatron
    ["actor.model.megatron_checkpoint=x"],
    ["actor.megatron.use_hf_ckpt=false"],
    ["actor.model.precision=fp32", "actor.optim.bf16=true"],
    ["actor.optim.use_distributed_optimizer=false", "actor.optim.overlap_param_gather=true"],
    [f"{CONVERSION}.use_gpu_num=1", f"{CONVERSION}.use_gpu_index=[0, 1]"],
    ["actor.spec_name=te_gpt"],
    ["actor.model.encoder_seq_length=8"],
    ["actor.megatron.distributed_backend=nccl"],
    ["actor.megatron.ckpt_format=zarr"],
    # values that contradict each other only natively
    ["algorithm.sampling_params.min_new_tokens=90000"],
    ["algorithm.filter_rewards=true", "algorithm.rewards_lower_bound=0.5", "algorithm.rewards_upper_bound=0.1"],
    [*EMBODIED, "algorithm.length_params.min_length=90000"],
    # placement
    ["cluster.num_nodes=100000"],
    [f"{PLACED}.actor=0-3", f"{PLACED}.actor,rollout=0-3"],
    [f"{PLACED}.actor=0-3", f"{PLACED}.rollout=2-5"],
    [f"{PLACED}.actor,inference=0-3", f"{PLACED}.rollout=4-7"],
    [f"{PLACED}.actor=0-3", f"{PLACED}.rollout,inference=4-7"],
    [f"{PLACED}.actor=0-3", f"{PLACED}.rollout=4-7", f"{PLACED}.inference=2-5"],
    [f"{PLACED}.actor=0-1:0-3", f"{PLACED}.rollout=0-1"],
    [f"{PLACED}.actor=0-3:0", f"{PLACED}.rollout=0-3"],
    [f"{PLACED}.actor=0-3", f"{PLACED}.rollout=4-7", "runner.enable_dynamic_batch_size=true"],
    [f"{PLACED}.actor=0-3", f"{PLACED}.rollout=4-7", f"{PLACED}.inference=8-9", "rollout.recompute_logprobs=false"],
    [f"{PLACED}.actor,rollout=0-3", "actor.model.tensor_model_parallel_size=3"],
    [f"{PLACED}.actor,rollout=0-3", "actor.model.pipeline_model_parallel_size=3"],
    [f"{PLACED}.actor,rollout=0-3", "rollout.tensor_parallel_size=2"],
    # batches
    ["algorithm.n_minibatches=5"],
    [f"{PLACED}.actor,rollout=0-3", "algorithm.training_batch_size_per_gpu=3"],
    # simulators
    [*EMBODIED, "runner.task_type=math"],
    [*EMBODIED, "algorithm.loss_type=actor", "algorithm.adv_type=gae"],
    [*EMBODIED, "algorithm.loss_type=ppo", "algorithm.adv_type=gae", "actor.model.add_value_head=false"],
    [*EMBODIED, "actor.model.model_path=''"],
    [*EMBODIED, "runner.save_interval=5", "runner.val_check_interval=3"],
    [*EMBODIED, "rollout.model.precision=fp32", "actor.model.precision=bf16"],
    [*EMBODIED, "env.train.group_size=3"],
    [*EMBODIED, "env.train.reward_mode=raw"],
    [*EMBODIED, "env.train.env_type=maniskill", "actor.model.policy_setup=google_robot_static"],
    ["env.train.total_num_envs=161", "algorithm.group_size=2"],
    [*EMBODIED, "env.train.max_episode_steps=81"],
    [*EMBODIED, "actor.global_batch_size=150"],
    [*EMBODIED, f"{PLACED}.actor,rollout,env=0-3", "actor.micro_batch_size=3"],
    [*EMBODIED, f"{PLACED}.actor,rollout,env=0-2"],
]
CONFIG = "strategy_args.strategy_config"
TRAIN, INFER = f"actor_train.{CONFIG}", f"actor_infer.{CONFIG}"
ROLL_BASE = ["pretrain=DIRECTORY", "actor_train.data_args.file_name=x.json"]
FOUR = [f"{name}.device_mapping=list(range(0,4))" for name in ("actor_train", "actor_infer", "reference")]
FSDP = ["actor_train.strategy_args.strategy_name=fsdp2_train", "reference.strategy_args.strategy_name=fsdp2_infer"]
CRITICS = ["adv_estimator=gae", "critic.strategy_args.strategy_name=fsdp2_train"]
WORDS, PATH, READABLE = "rewards.words", "model_name_or_path=DIRECTORY", f"judge_prompt={PROMPT_NAME}"
SERVED = ("judge_model_type=inference", READABLE, f"model_args.{PATH}")
JUDGED = [f"{WORDS}.worker_cls={JUDGE}", "actor_train.data_args.domain_interleave_probs={words: 1.0}"]
ROLL = [
    ["profiler_timeline=true", "profiler_memory=true"],
    ["actor_train.worker_cls=roll.pipeline.agentic.agentic_actor_pg_worker.ActorWorker"],
    ["importance_sampling=seq", "actor_train.pg_variant=topr"],
    ["actor_train.device_mapping=x"],
    ["actor_train.data_args.messages=m", "actor_train.data_args.prompt=p"],
    ["actor_train.data_args.file_name=[]"],
    ["actor_train.data_args.prompt=null"],
    ["actor_train.data_args.domain_interleave_probs.other=1.0"],
    ["rewards.words.world_size=2", "rewards.code.world_size=2"],
    [*JUDGED],
    [*JUDGED, f"{WORDS}.judge_model_type=inference", f"{WORDS}.judge_prompt=mine", f"{WORDS}.model_args.{PATH}"],
    [*JUDGED, f"{WORDS}.judge_model_type=api", f"{WORDS}.{READABLE}"],
    [*JUDGED, f"{WORDS}.judge_model_type=inference", f"{WORDS}.{READABLE}"],
    [*JUDGED, *(f"{WORDS}.{each}" for each in SERVED), f"{WORDS}.device_mapping=x"],
    ["response_length=null"],
    ["validation.generating_args.max_new_tokens=7"],
    [*CRITICS, "critic.data_args.prompt=p"],
    [*CRITICS, "critic.pg_variant=topr"],
    [*FSDP, f"{TRAIN}.overlap_grad_reduce=true"],
    ["actor_infer.model_args.ulysses_size=2"],
    ["actor_infer.strategy_args.strategy_name=hf_infer", f"{INFER}.load_format=dummy"],
    [*FSDP, *FOUR, "actor_train.model_args.ulysses_size=3"],
    [f"{TRAIN}.virtual_pipeline_model_parallel_size=2"],
    [*FSDP, *FOUR, f"{TRAIN}.fsdp_size=3"],
    [*FOUR, "actor_infer.num_gpus_per_worker=3"],
    ["actor_train.training_args.gradient_accumulation_steps=7"],
    ["actor_train.training_args.per_device_train_batch_size=7"],
    [*FSDP, *CRITICS, "critic.training_args.gradient_accumulation_steps=5"],
    ["actor_train.strategy_args.strategy_name=deepspeed_train"],
    # checks of the native run
    ["pretrain=null"],
    ["reference.model_args.dtype=fp32"],
]

MANAGER, CHECKED = "train_env_manager", "val_env_manager"
LAKE_AGENTS = {
    "pretrain": "DIRECTORY",
    "custom_envs.Lake.env_type": "frozen_lake",
    "custom_envs.Lake.env_config.env_instruction": "go",
    **{f"{name}.tags": "[Lake]" for name in (MANAGER, CHECKED)},
    **{f"{name}.num_env_groups": "8" for name in (MANAGER, CHECKED)},
    **{f"{name}.num_groups_partition": "[8]" for name in (MANAGER, CHECKED)},
    f"{MANAGER}.group_size": "4",
    f"{CHECKED}.group_size": "1",
    "rollout_batch_size": "32",
    "val_batch_size": "8",
    "sequence_length": "4096",
}
ROLL_AGENTS = [
    [f"{key}={value}" for key, value in {**LAKE_AGENTS, **changes}.items() if value]
    for changes in (
        *({"rollout_batch_size": "30"}, {"val_batch_size": "30"}, {"sequence_length": ""}),
        *({f"{MANAGER}.num_groups_partition": numbers} for numbers in ("[4,4]", "[4]")),
        {"custom_envs.Lake.env_type": "frozenlake"},
    )
]
CASES = {
    "verl": VERL,
    "ragen": RAGEN,
    "vagen": VAGEN,
    "rlinf": RLINF,
    "roll": [*([*ROLL_BASE, *words] for words in ROLL), *ROLL_AGENTS],
}
PAIRS = [(dialect, tuple(words)) for dialect, cases in CASES.items() for words in cases]
MODEL = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 16, "vocab_size": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
LATER = "is not supported yet"
ROUNDS = 6
"""Hints that are followed one after another until a configuration is valid."""


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without a GPU; the working directory has a model."""
    monkeypatch.setattr(hardware, "num_gpus", lambda: 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIRECTORY").mkdir()
    (tmp_path / "DIRECTORY/config.json").write_text(json.dumps(MODEL | HEADS))


def printed(dialect: str, words: Sequence[str], gib: float | None = None) -> str:
    """What `quintet plan` refuses and lists, in its words."""
    tree = unflatten(dict(parse_override(word, {}) for word in words))
    try:
        result = convert(config_from_tree(tree, "run.yaml"), DIALECTS[dialect], to_plan=True)
        lines = [str(problem) for problem in conversion_problems(result, planned_rank(result.composed.experiment))]
        plan_run(result.composed, None if gib is None else int(gib * 2**30))
    except UserError as error:
        return str(error)
    return "\n".join(lines)


@cache
def refused(dialect: str, words: tuple[str, ...]) -> tuple[str, frozenset[tuple[str, int]]]:
    """What is printed, and the places that give its hints."""
    with recorded_sites() as places:
        return printed(dialect, words), frozenset(places)


def behind(text: str, before: Iterable[str]) -> list[str]:
    """The messages that were not there before, except of what a later version can do."""
    return [message for message in printed_hints(text) if message not in before and LATER not in message]


@pytest.mark.parametrize(
    ("dialect", "words"), PAIRS, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_following_hints_removes_their_errors_and_ends_at_a_valid_configuration(
    dialect: str, words: tuple[str, ...]
) -> None:
    text, _ = refused(dialect, words)
    hints = printed_hints(text)
    assert hints, text or "a valid configuration"
    for message, hint in hints.items():
        for changed in followed(message, hint, words):
            left = printed(dialect, changed)
            assert message not in left, changed
            for _ in range(ROUNDS):
                if errors := behind(left, hints):
                    changed = next(followed(errors[0], printed_hints(left)[errors[0]], changed))
                    left = printed(dialect, changed)
            assert not behind(left, hints), (changed, left)


NATIVELY_INVALID = {
    ("verl", f"{R}.min_tokens=900"): f"{R}.min_tokens = 900 (run.yaml) and {R}.response_length = 512 (reference): "
    f"{R}.min_tokens = 900 is above {R}.response_length = 512\n  "
    f"{R}.min_tokens=512, or data.max_response_length=900",
    ("verl", "trainer.experiment_name=/"): "trainer.experiment_name = '/' (run.yaml): gives name = '/', which must be ",
    ("ragen", "training.temperature=11"): "training.temperature = 11 (run.yaml): must be a number > 0 and ≤ 10\n"
    "  training.temperature: Sampling temperature",
    ("rlinf", "algorithm.sampling_params.min_new_tokens=2000"): "algorithm.sampling_params.min_new_tokens = 2000 "
    "(run.yaml) and algorithm.sampling_params.max_new_tokens = 1024 (reference): ",
    ("roll", "exp_name=/"): "exp_name = '/' (run.yaml): must be text that matches ",
}
"""Starts of messages, by dialect and setting."""


@pytest.mark.parametrize(("dialect", "word"), NATIVELY_INVALID)
def test_values_that_are_only_natively_invalid_are_named_by_the_keys_of_the_framework(dialect: str, word: str) -> None:
    words = [*(ROLL_BASE if dialect == "roll" else ()), word]
    assert printed(dialect, words).startswith(NATIVELY_INVALID[dialect, word])


def test_memory_is_saved_by_keys_of_the_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "num_gpus", lambda: 8)
    words = ["actor_rollout_ref.model.path=DIRECTORY", "data.train_batch_size=8", f"{A}.ppo_mini_batch_size=8"]
    words.append("actor_rollout_ref.model.enable_gradient_checkpointing=false")
    ((message, hint),) = printed_hints(printed("verl", words, gib=0.004)).items()
    (changed,) = followed(message, hint, words)
    assert "more devices" not in hint
    assert not printed("verl", changed, gib=0.004)


def test_a_change_without_a_counterpart_is_made_in_the_native_format() -> None:
    composed = convert(config_from_tree({}), DIALECTS["ragen"], to_plan=True).composed
    change = "actor.sharding.backward_prefetch=pre"
    assert composed.hint_for_user(change) == f"in the native format (`quintet translate CONFIG -o FILE`): {change}"


EXEMPT = {
    "composition/": "the syntax of files and overrides has no keys",
    "scripts/": "neither has that of scripts",
    "key_checks.py illegal_values": "a value of the wrong type: what the key means",
    "release_choice.py": "--release is an option; test_release_choice.py reads the list of releases",
    "unknown_keys.py _fork_problem": "test_fork_keys.py leaves keys of forks out in both ways",
    "unknown_keys.py _undocumented_problem": "test_known_keys.py leaves such a key out",
    "supported_runs.py": "a translation that another framework can do",
    "verl/converter.py base_tree": "the same",
    "vagen/env_sections.py envs_tree": "the same",
    "vagen/env_sections.py env_problems": "lists envs, or names another file",
    "vagen/service_env.py": "for clients of the environment service; test_service_vector_env.py reads them",
    "vagen/env_rows.py": "files of start states, which test_start_state_files.py reads",
    "vagen/env_config_file.py": "the same",
    "vagen/env_lists.py _entries": "files of lists, which test_vagen_agents.py reads",
    "vagen/evaluation_file.py read_evaluation": "a file without a list, which test_vagen_evaluation.py reads",
    "vagen/agent_runs.py conflicts": "the same",
    "vagen/agent_envs.py env_list_problems": "names files",
    "vagen/agent_envs.py entry_problems": "of its hints one lists the user's names",
    "rlinf/component_placement.py _place_components": "the syntax of placements",
    "aliases.py _keep_documented": "test_rlinf.py reads both spellings beside each other",
    "passthrough.py _unknown_entries": "test_passthrough.py has a model's config.json",
    "ragen/agent_runs.py _device_problems": "a list of devices is a text in quotes",
    "ragen/custom_envs.py env_problems": "a name is the user's choice",
    "ragen/custom_envs.py _option_problems": "leaves an option of an environment out, or shows one",
    "ragen/custom_envs.py envs_tree": "a translation that another framework can do",
    "roll/agentic.py _group_problems": "of its hints one lists the user's names",
    "roll/unsupported_runs.py": "lists the kinds of runs",
}


def test_every_hint_about_foreign_keys_is_followed() -> None:
    places = {place for dialect, words in PAIRS for place in refused(dialect, words)[1]}
    sites = [
        site
        for site in hint_sites(SRC / "config/dialects")
        if not any((site.path, line) in places for line in site.lines)
    ]
    names = [re.sub(r"config/dialects/(.*):\d+", r"\1", str(site)) for site in sites]
    assert not [name for name in names if not name.startswith(tuple(EXEMPT))]


def test_a_hint_also_sets_the_keys_that_follow_from_several_values() -> None:
    """An optimizer step of 256 sequences: 8 at a time on 8 GPUs are 4 passes, on 4 pairs of GPUs 8."""
    file = Path(__file__).parents[4] / "examples/roll/qwen2.5-1.5b_sglang_8gpu.yaml"
    composed = convert(compose_config(file, []), DIALECTS["roll"], to_plan=True).composed
    changes = "actor_train.model_args.ulysses_size=2 actor_train.training_args.gradient_accumulation_steps=8"
    assert composed.translate_hint("nearest valid value: actor.parallel.ulysses=2") == f"nearest valid value: {changes}"
