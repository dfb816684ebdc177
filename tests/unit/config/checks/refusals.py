"""Configurations of each framework that a check refuses, with the message, and the pairs of which there are none."""

from __future__ import annotations

from typing import Any

Case = tuple[dict[str, Any], str]
"""Dotted keys of a framework, and the first line of the refusal."""

VERL, RAGEN, VAGEN, RLINF, ROLL = FRAMEWORKS = ("verl", "ragen", "vagen", "rlinf", "roll")
WITH_VERL_KEYS = (VERL, RAGEN, VAGEN)
IN_ENVIRONMENTS = (RAGEN, VAGEN)

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{section}" for section in ("actor", "model", "rollout"))
RLVR = {"actor_train.data_args.file_name": "train.json"}
DISTILLED = {
    "student_pretrain": "some/student",
    "teacher_pretrain": None,
    "student.data_args.file_name": "train.json",
    "student.strategy_args.strategy_name": "fsdp2_train",
}
JUDGE = {
    "rewards.words.worker_cls": "roll.pipeline.rlvr.rewards.llm_judge_reward_worker.LLMJudgeRewardWorker",
    "rewards.words.judge_prompt": "Qwen2.5-7B-Instruct-RLVR-prompt",
    "rewards.words.judge_model_type": "inference",
    "rewards.words.model_args.model_name_or_path": "some/judge",
    "rewards.words.device_mapping": "list(range(8,10))",
}
LAKE = {
    "pretrain": "text_model",
    "sequence_length": 8192,
    "custom_envs.FrozenLake.env_type": "frozen_lake",
    "custom_envs.FrozenLake.env_config.render_mode": "rgb_array",
    **{f"{section}_env_manager.num_env_groups": 8 for section in ("train", "val")},
    **{f"{section}_env_manager.num_groups_partition": [8] for section in ("train", "val")},
    **{f"{section}_env_manager.tags": ["FrozenLake"] for section in ("train", "val")},
}
MATH = {"runner.task_type": "math", "rollout.model.model_path": "some/model"}
ROBOTS = {"runner.task_type": "embodied", "actor.model.model_path": "some/policy"}

NO_GPU = "vLLM starts no processes through Ray without GPUs, and this machine has none"
NO_LORA = "LoRA is not supported on Megatron"
NO_SHARDS = "one process has no shards to keep on the CPU"
NO_FLOAT16 = "not with the engine hf: it computes in float32 and bfloat16"
NO_IMAGES = "the policy reads no images"
NO_VISION_ENCODER = "the policy has no vision encoder"
FOUR_DEVICES = "the run needs 4 devices, and torchrun started 2 processes"

CASES: dict[tuple[str, str], Case] = {
    **{
        ("unsupported_value_problems", framework): (
            {"trainer.nnodes": 2},
            "trainer.nnodes = 2 (given.yaml:1) requires one process per device",
        )
        for framework in WITH_VERL_KEYS
    },
    ("unsupported_value_problems", RLINF): (
        {**MATH, "cluster.num_nodes": 2},
        "cluster.num_nodes = 2 (given.yaml:1) requires one process per device",
    ),
    ("unsupported_value_problems", ROLL): (
        {**RLVR, "actor_train.device_mapping": "[0,1]"},
        "actor_train.device_mapping = '[0,1]' (given.yaml:1) requires one process per device",
    ),
    **{
        ("engine_problems", framework): (
            {f"{ROLLOUT}.dtype": "float16", **({} if framework == RAGEN else {f"{ROLLOUT}.name": "hf"})},
            f"{ROLLOUT}.dtype = 'float16' (given.yaml:1): {NO_FLOAT16}",
        )
        for framework in WITH_VERL_KEYS
    },
    ("engine_problems", RLINF): (
        {**MATH, "rollout.backend": "sglang", "rollout.distributed_executor_backend": "ray"},
        "rollout.distributed_executor_backend = 'ray' (given.yaml:1): the engine sglang has no such option",
    ),
    ("engine_problems", ROLL): (
        {**RLVR, "actor_infer.model_args.dtype": "fp16"},
        f"actor_infer.model_args.dtype = 'fp16' (given.yaml:1): {NO_FLOAT16}",
    ),
    ("executor_problems", RLINF): (
        {**MATH, "rollout.backend": "vllm", "rollout.distributed_executor_backend": "ray"},
        "rollout.engine_options.executor = 'ray' (rollout.distributed_executor_backend: given.yaml:1): " + NO_GPU,
    ),
    **{
        ("backend_problems", framework): (
            {f"{ACTOR}.strategy": "megatron", f"{MODEL}.lora_rank": 4},
            f"policy.lora.rank = 4 ({MODEL}.lora_rank: given.yaml:1): {NO_LORA}",
        )
        for framework in WITH_VERL_KEYS
    },
    ("backend_problems", RLINF): (
        {**MATH, "actor.training_backend": "megatron", "rollout.model.model_path": "vision_model"},
        "policy.path = 'vision_model' (rollout.model.model_path: given.yaml:1): "
        "the Megatron learner does not support 'qwen2_5_vl'",
    ),
    ("backend_problems", ROLL): (
        {
            **RLVR,
            "actor_train.strategy_args.strategy_name": "megatron_train",
            "actor_train.model_args.lora_target": "all-linear",
            "actor_train.model_args.lora_rank": 4,
        },
        "policy.lora.rank = 4 (actor_train.model_args.lora_rank: given.yaml:1, "
        f"actor_train.model_args.lora_target: given.yaml:1): {NO_LORA}",
    ),
    **{
        ("sharding_problems", framework): (
            {
                f"{ACTOR}.strategy": "fsdp2",
                f"{ACTOR}.fsdp_config.offload_policy": True,
                **({} if framework == RAGEN else {"trainer.n_gpus_per_node": 1}),
                f"{ROLLOUT}.tensor_model_parallel_size": 1,
            },
            f"actor.memory.sharded_offload = true ({ACTOR}.fsdp_config.offload_policy: given.yaml:1): {NO_SHARDS}",
        )
        for framework in WITH_VERL_KEYS
    },
    ("sharding_problems", RLINF): (
        {
            **MATH,
            "actor.training_backend": "fsdp",
            "actor.fsdp_config.strategy": "fsdp2",
            "actor.fsdp_config.sharding_strategy": "full_shard",
            "actor.fsdp_config.backward_prefetch": "post",
            "cluster.component_placement.actor,rollout": "0-1",
        },
        "actor.sharding.backward_prefetch = 'post' (actor.fsdp_config.backward_prefetch: given.yaml:1): "
        "FSDP2 prefetches weights before it computes gradients",
    ),
    ("sharding_problems", ROLL): (
        {
            **RLVR,
            "actor_train.strategy_args.strategy_name": "fsdp2_train",
            "actor_train.strategy_args.strategy_config.offload_policy": True,
            "actor_train.device_mapping": "[0]",
            "actor_infer.device_mapping": "[0]",
        },
        "actor.memory.sharded_offload = true "
        f"(actor_train.strategy_args.strategy_config.offload_policy: given.yaml:1): {NO_SHARDS}",
    ),
    ("channel_problems", RLINF): (
        {
            **ROBOTS,
            "env.channel.name": "robots",
            "env.channel.queue_name": "steps",
            "actor.channel.name": "robots",
            "actor.channel.queue_name": "steps",
        },
        "placement.envs.channel.queue = 'steps' (env.channel.queue_name: given.yaml:1): "
        "placement.rollout.channel has the name robots/steps in metrics, too",
    ),
    ("sharded_reward_problems", VERL): (
        {
            "reward_model.enable": True,
            "reward_model.model.path": "some/model",
            "reward_model.model.fsdp_config.min_num_params": 1,
            "async_training.staleness_threshold": 1,
            "trainer.n_gpus_per_node": 2,
            "rollout.nnodes": 1,
            "rollout.n_gpus_per_node": 2,
            f"{ROLLOUT}.tensor_model_parallel_size": 1,
        },
        "reward.model.min_sharded_parameters = 1 (reward_model.model.fsdp_config.min_num_params: given.yaml:1): "
        "the ranks of the actor train while they would score; placement.reward.devices gives it devices",
    ),
    ("judge_problems", ROLL): (
        {**RLVR, **JUDGE, "actor_train.device_mapping": "[0,1]", "actor_infer.device_mapping": "[0,1]"},
        "reward.verifiers.words.judge.server.devices = [8, 9] (rewards.words.device_mapping: given.yaml:1): "
        "no device of the actor is on the nodes of 8, 9, to start the servers there",
    ),
    ("distillation_problems", ROLL): (
        DISTILLED,
        "reference.path = null (teacher_pretrain: given.yaml:1): distillation needs a teacher",
    ),
    ("processes_per_device_problems", RLINF): (
        {
            **ROBOTS,
            "rollout.gpu_memory_utilization": 0.6,
            "cluster.component_placement.actor": "0-1",
            "cluster.component_placement.env": "2-3",
            "cluster.component_placement.rollout": "2-3:0-3",
        },
        "rollout.engine_options.memory_share = 0.6 (rollout.gpu_memory_utilization: given.yaml:1): "
        "each of 2 engines on a device takes that share",
    ),
    ("chunk_algorithm_problems", RLINF): (
        {**ROBOTS, "algorithm.loss_type": "loss.py:loss"},
        "algorithm.loss.name = 'custom' (algorithm.loss_type: given.yaml:1): is not defined for chunks of actions",
    ),
    ("env_host_problems", RLINF): (
        {
            **ROBOTS,
            "cluster.component_placement.actor,rollout": "0-1",
            "cluster.component_placement.inference,env": "2-3",
        },
        "placement.envs.devices = [2, 3] (cluster.component_placement.inference,env: given.yaml:1): "
        "placement.logprobs.devices has 2-3, too; a process hosts environments alone",
    ),
    ("vision_problems", VERL): (
        {f"{MODEL}.path": "text_model", f"{ACTOR}.freeze_vision_tower": True},
        f"policy.vision.freeze = true ({ACTOR}.freeze_vision_tower: given.yaml:1): {NO_VISION_ENCODER}",
    ),
    ("vision_problems", RAGEN): (
        {
            "model_path": "text_model",
            "custom_envs.SimpleSokoban.env_config.render_mode": "rgb_array",
            **{f"es_manager.{side}.env_configs.tags": ["SimpleSokoban"] for side in ("train", "val")},
        },
        f"env.render = 'vision' (custom_envs.SimpleSokoban.env_config.render_mode: given.yaml:1): {NO_IMAGES}",
    ),
    ("vision_problems", VAGEN): (
        {f"{MODEL}.path": "text_model", "env1.env_name": "frozenlake", "env1.env_config.render_mode": "vision"},
        f"env.render = 'vision' (env1.env_config.render_mode: given.yaml:1): {NO_IMAGES}",
    ),
    ("vision_problems", RLINF): (
        {**MATH, "actor.training_backend": "megatron", "rollout.model.model_path": "vision_model"},
        "actor.backend = 'megatron' (actor.training_backend: given.yaml:1): this backend has no vision encoder",
    ),
    ("vision_problems", ROLL): (
        LAKE,
        f"env.render = 'vision' (custom_envs.FrozenLake.env_config.render_mode: given.yaml:1): {NO_IMAGES}",
    ),
    ("svg_problems", VAGEN): (
        {"env1.env_name": "svg", "env1.env_config.structural_weight": 0.0},
        "env.structural_weight = 0.0 (env1.env_config.structural_weight: given.yaml:1): "
        "all weights are 0, so that no score counts",
    ),
    ("tool_problems", VERL): (
        {f"{ROLLOUT}.multi_turn.enable": True, f"{ROLLOUT}.multi_turn.tool_config_path": "missing.yaml"},
        f"rollout.tool_calls.file = 'missing.yaml' ({ROLLOUT}.multi_turn.tool_config_path: given.yaml:1, "
        f"{ROLLOUT}.multi_turn.enable: given.yaml:1): no such file: missing.yaml",
    ),
    **{
        ("profile_problems", framework): (
            {
                "global_profiler.tool": "torch",
                "global_profiler.steps": [1],
                f"{ACTOR}.profiler.enable": True,
                f"{ACTOR}.profiler.ranks": [70],
            },
            f"tracking.profile.ranks = [70] ({ACTOR}.profiler.ranks: given.yaml:1): "
            "rank 70 has no device of the actor; the ranks that have one: "
            + ", ".join(map(str, range({VERL: 8, RAGEN: 1, VAGEN: 4}[framework]))),
        )
        for framework in WITH_VERL_KEYS
    },
    ("profile_problems", ROLL): (
        {**RLVR, "profiler_memory": True},
        "tracking.profile.memory_snapshot = true (profiler_memory: given.yaml:1): "
        "a snapshot of GPU memory needs a CUDA GPU, and this machine has none that the run may use",
    ),
    ("robot_problems", RLINF): (
        {**ROBOTS, "algorithm.group_size": 4, "env.train.use_fixed_reset_state_ids": False},
        "env.fixed_start_states = false (env.train.use_fixed_reset_state_ids: given.yaml:1): "
        "grpo compares the episodes of a group, which must start from the same state",
    ),
    **{
        ("process_problems", framework): (
            {"trainer.nnodes": 1, key: 4},
            f"placement.devices_per_node = 4 ({key}: given.yaml:1): {FOUR_DEVICES}",
        )
        for framework, key in {
            VERL: "trainer.n_gpus_per_node",
            RAGEN: "system.n_gpus",
            VAGEN: "trainer.n_gpus_per_node",
        }.items()
    },
    ("process_problems", RLINF): (
        {**MATH, "cluster.component_placement.actor,rollout": "0-3"},
        "placement.actor.devices = [0, 1, 2, 3] "
        f"(cluster.component_placement.actor,rollout: given.yaml:1): {FOUR_DEVICES}",
    ),
    ("process_problems", ROLL): (
        {**RLVR, "actor_train.device_mapping": "list(range(0,4))", "actor_infer.device_mapping": "list(range(0,4))"},
        f"placement.actor.devices = null (actor_train.device_mapping: given.yaml:1): {FOUR_DEVICES}",
    ),
}
"""A refused configuration, by check and framework."""

UNSET: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "executor_problems": (("rollout.engine_options.executor",), (*WITH_VERL_KEYS, ROLL)),
    "overlap_problems": (("training.pipelined",), FRAMEWORKS),
    "channel_problems": (
        ("placement.rollout.channel", "placement.rollout.action_channel", "placement.envs.channel"),
        (*WITH_VERL_KEYS, ROLL),
    ),
    "sharded_reward_problems": (("reward.model.min_sharded_parameters",), (RLINF, ROLL)),
    "judge_problems": (("reward.judge", "reward.verifiers"), (*WITH_VERL_KEYS, RLINF)),
    "distillation_problems": (("sft.distillation",), (*WITH_VERL_KEYS, RLINF)),
    "processes_per_device_problems": (("placement.rollout.processes_per_device",), (*WITH_VERL_KEYS, ROLL)),
    "chunk_algorithm_problems": (
        (
            *("env.simulator", "algorithm.level", "algorithm.entropy_level", "algorithm.reward_level"),
            *("algorithm.bootstrap", "critic.huber_delta"),
        ),
        (*WITH_VERL_KEYS, ROLL),
    ),
    "env_host_problems": (("placement.envs.devices",), (*WITH_VERL_KEYS, ROLL)),
    "weight_transfer_problems": (("placement.weight_transfer",), FRAMEWORKS),
    "svg_problems": (("env.structural_weight",), (VERL, RAGEN, RLINF, ROLL)),
    "tool_problems": (("rollout.tool_calls.file", "rollout.interactions.file"), (RLINF, ROLL)),
    "video_problems": (("tracking.video", "tracking.validation_video"), (*WITH_VERL_KEYS, ROLL)),
    "robot_problems": (
        ("env.simulator", "policy.vla", "critic.shares_policy", "placement.offload_envs", "validation.simulator"),
        (*WITH_VERL_KEYS, ROLL),
    ),
}
"""Native keys without which a check refuses nothing, and the frameworks that have no key for any of them."""

REFUSED_BEFORE: dict[tuple[str, str], Case] = {
    **{
        ("sharded_reward_problems", framework): (
            {"reward_model.enable": True, f"{ROLLOUT}.tensor_model_parallel_size": 1},
            "reward_model.enable = true (given.yaml:1) requires a run on prompts instead of environments",
        )
        for framework in IN_ENVIRONMENTS
    },
    **{
        ("tool_problems", framework): (
            {f"{ROLLOUT}.multi_turn.tool_config_path": "missing.yaml"},
            f"{ROLLOUT}.multi_turn.tool_config_path = 'missing.yaml' (given.yaml:1) is not supported yet: "
            "requires further tools and formats of tool calls, and simulated users",
        )
        for framework in IN_ENVIRONMENTS
    },
    ("video_problems", RLINF): (
        {**MATH, "env.train.video_cfg.save_video": True},
        "runner.task_type = 'math' (given.yaml:1): a run with a section env must be embodied",
    ),
}
"""Configurations that the conversion refuses, so that the check never sees them."""

NEVER: dict[tuple[str, str], str] = {
    ("profile_problems", RLINF): "its profiles are of all ranks, begin with the first step, and have no snapshots",
}
"""Pairs of check and framework for which there is no refused configuration, with the reason."""
