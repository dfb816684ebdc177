"""The keys of ROLL's configuration guide: the pipeline and its workers."""

from __future__ import annotations

from quintet.config.dialects.ledger import Capability, Row, row
from quintet.config.dialects.takes import (
    BOOLEAN,
    COUNT,
    POSITIVE,
    POSITIVE_NUMBER,
    TEXT,
    TEXTS,
    choice,
    either,
    integer,
    list_of,
    number,
    optional,
)

__all__ = ["ROLL_KEYS"]

_MODEL_DTYPE = optional(choice("fp32", "bf16", "fp16"))
_SHARD_DTYPE = optional(
    choice("bf16", "bfloat16", "fp16", "float16", "half", "fp32", "float32", "float", "fp64", "float64")
)
_TRAINING = choice("fsdp2_train", "megatron_train")
_SCORING = choice("megatron_infer", "fsdp2_infer", "hf_infer")
_GENERATION = choice("vllm", "sglang", "hf_infer")
_DEVICES = optional(either(TEXT, list_of(COUNT)))
_ONE_DEVICE = (None, "[0]", "list(range(0,1))", "list(range(0, 1))", "list(range(1))", [0])
_DEGREE = optional(POSITIVE)
_LOAD_FORMATS = choice(
    "auto",
    "dummy",
    "hf",
    "pt",
    "safetensors",
    "npcache",
    "sharded_state",
    "gguf",
    "bitsandbytes",
    "mistral",
    "tensorizer",
    "runai_streamer",
    "runai_streamer_sharded",
    "fastsafetensors",
    "instanttensor",
    "layered",
    "flash_rl",
    "remote",
    "remote_instance",
    "private",
)
"""Those of vLLM and those of SGLang."""

_PIPELINE: tuple[Row, ...] = (
    row(
        "rollout_batch_size",
        POSITIVE,
        64,
        "Prompts of a step; times `num_return_sequences_in_group` it gives the sequences of a step.",
        native="training.groups_per_step",
        pending=Capability.CONVERSION,
    ),
    row(
        "prompt_length",
        POSITIVE,
        2048,
        "Tokens of the longest prompt; longer ones from a data file are left out.",
        native="rollout.max_prompt_tokens",
        pending=Capability.CONVERSION,
    ),
    row(
        "response_length",
        optional(POSITIVE),
        4096,
        "Tokens of the longest reply; with null, `sequence_length` bounds prompt and reply together.",
        native="rollout.max_response_tokens",
        pending=Capability.CONVERSION,
    ),
    row(
        "num_return_sequences_in_group",
        POSITIVE,
        8,
        "Sequences generated for each prompt; they are the group that a sequence is compared with.",
        native="training.samples_per_group",
        pending=Capability.CONVERSION,
    ),
)

_ACTOR_TRAIN: tuple[Row, ...] = (
    row(
        "actor_train.model_args.dtype",
        _MODEL_DTYPE,
        "bf16",
        "Type of the policy's weights while it learns; null takes the one that the model's own configuration names.",
        native="policy.dtype",
        pending=Capability.CONVERSION,
    ),
    row(
        "actor_train.model_args.disable_gradient_checkpointing",
        BOOLEAN,
        False,
        "Keeps activations for the backward pass instead of recomputing them: more memory, less time. Only with "
        "`fsdp2_train`.",
        native="actor.gradient_checkpointing",
        pending=Capability.CONVERSION,
    ),
    row(
        "actor_train.model_args.ulysses_size",
        POSITIVE,
        1,
        "GPUs that share one sequence, each holding some heads of its attention; must divide the number of heads. Only "
        "with `fsdp2_train`.",
        pending=Capability.SHARDING,
        noop=(1,),
    ),
    row(
        "actor_train.training_args.learning_rate",
        POSITIVE_NUMBER,
        1.0e-6,
        "The policy's peak learning rate, reached after the warm-up.",
        native="actor.optimizer.learning_rate",
        pending=Capability.CONVERSION,
    ),
    row(
        "actor_train.training_args.weight_decay",
        number(least=0),
        0,
        "AdamW's decoupled decay of the policy's weights; 0 for none.",
        native="actor.optimizer.weight_decay",
        pending=Capability.CONVERSION,
    ),
    row(
        "actor_train.training_args.per_device_train_batch_size",
        POSITIVE,
        1,
        "Sequences of one forward and backward pass on a GPU; a factor of the sequences of one optimizer step.",
        native=("training.mini_batches", "training.micro_batch_tokens"),
        pending=Capability.BATCHING,
    ),
    row(
        "actor_train.training_args.gradient_accumulation_steps",
        POSITIVE,
        32,
        "Forward and backward passes of one optimizer step; times `per_device_train_batch_size` and the data-parallel "
        "ranks it gives its sequences.",
        native="training.mini_batches",
        pending=Capability.CONVERSION,
    ),
    row(
        "actor_train.training_args.warmup_steps",
        COUNT,
        20,
        "Optimizer steps in which the learning rate rises from 0 to its peak.",
        native="actor.optimizer.warmup_steps",
        pending=Capability.CONVERSION,
    ),
    row(
        "actor_train.data_args.template",
        TEXT,
        "native",
        "Chat format of the prompts, in training and generation: `native` is the tokenizer's own, other names are "
        "ROLL's.",
        pending=Capability.DATA,
        noop=("native",),
    ),
    row(
        "actor_train.data_args.file_name",
        optional(TEXTS),
        "xxx/train.json",
        "File or files of training prompts, as JSON, JSONL or CSV; null where the prompts come from worlds.",
        pending=Capability.DATA,
        noop=(None,),
    ),
    row(
        "actor_train.data_args.prompt",
        optional(TEXT),
        "instruction",
        "Column of the file that holds the prompt as plain text; null where `messages` names one.",
        pending=Capability.DATA,
        noop=(None,),
    ),
    row(
        "actor_train.data_args.messages",
        optional(TEXT),
        None,
        "Column of the file that holds the prompt as chat messages; null where `prompt` names one.",
        pending=Capability.DATA,
        noop=(None,),
    ),
    row(
        "actor_train.strategy_args.strategy_name",
        _TRAINING,
        "megatron_train",
        "What trains the policy: Megatron, or PyTorch's sharded data parallelism (FSDP2).",
        pending=Capability.MEGATRON,
    ),
    row(
        "actor_train.strategy_args.strategy_config.tensor_model_parallel_size",
        _DEGREE,
        1,
        "GPUs over which Megatron splits each layer's matrices; null keeps the checkpoint's number.",
        pending=Capability.MEGATRON,
        noop=(1, None),
    ),
    row(
        "actor_train.strategy_args.strategy_config.pipeline_model_parallel_size",
        _DEGREE,
        1,
        "Stages into which Megatron cuts the stack of layers, one GPU each; null keeps the checkpoint's number.",
        pending=Capability.MEGATRON,
        noop=(1, None),
    ),
    row(
        "actor_train.strategy_args.strategy_config.expert_model_parallel_size",
        _DEGREE,
        1,
        "GPUs over which Megatron spreads the experts of a mixture; null keeps the checkpoint's number. Doesn't change "
        "the sequences of an optimizer step.",
        pending=Capability.MEGATRON,
        noop=(1, None),
    ),
    row(
        "actor_train.strategy_args.strategy_config.context_parallel_size",
        _DEGREE,
        1,
        "GPUs over which Megatron spreads the tokens of one sequence; null keeps the checkpoint's number.",
        pending=Capability.MEGATRON,
        noop=(1, None),
    ),
    row(
        "actor_train.strategy_args.strategy_config.virtual_pipeline_model_parallel_size",
        _DEGREE,
        None,
        "Separate pieces of the stack of layers that each Megatron pipeline stage holds, so that it idles less; null "
        "or 1 is one piece.",
        pending=Capability.MEGATRON,
        noop=(None, 1),
    ),
    row(
        "actor_train.strategy_args.strategy_config.sequence_parallel",
        BOOLEAN,
        False,
        "Megatron's tensor-parallel GPUs also share the tokens of norms and dropout, which saves activation memory.",
        pending=Capability.MEGATRON,
        noop=(False,),
    ),
    row(
        "actor_train.strategy_args.strategy_config.recompute_granularity",
        optional(choice("full", "selective")),
        None,
        "What Megatron recomputes in the backward pass: whole layers, only the core of attention, or with null "
        "nothing.",
        native="actor.gradient_checkpointing",
        pending=Capability.MEGATRON,
        noop=(None,),
    ),
    row(
        "actor_train.strategy_args.strategy_config.moe_layer_recompute",
        BOOLEAN,
        False,
        "Megatron recomputes layers of experts in the backward pass: less memory, more time.",
        pending=Capability.MEGATRON,
        noop=(False,),
    ),
    row(
        "actor_train.strategy_args.strategy_config.moe_token_dispatcher_type",
        choice("alltoall", "allgather"),
        "alltoall",
        "How Megatron's GPUs pass tokens to experts: each only where it goes, or every token to all. Has no effect on "
        "a model without experts.",
        pending=Capability.MEGATRON,
        noop=("alltoall", "allgather"),
    ),
    row(
        "actor_train.strategy_args.strategy_config.moe_grouped_gemm",
        optional(BOOLEAN),
        False,
        "Megatron multiplies the matrices of all experts of a GPU in one kernel; null keeps the checkpoint's choice.",
        pending=Capability.MEGATRON,
        noop=(False, None),
    ),
    row(
        "actor_train.strategy_args.strategy_config.moe_shared_expert_overlap",
        BOOLEAN,
        False,
        "Megatron computes the shared experts while tokens travel to the others.",
        pending=Capability.MEGATRON,
        noop=(False,),
    ),
    row(
        "actor_train.strategy_args.strategy_config.overlap_grad_reduce",
        BOOLEAN,
        False,
        "Megatron's distributed optimizer sums gradients over GPUs while the backward pass still runs.",
        pending=Capability.MEGATRON,
        noop=(False,),
    ),
    row(
        "actor_train.strategy_args.strategy_config.fsdp_size",
        integer(least=-1),
        1,
        "GPUs over which FSDP2 shards the weights, the rest holding copies; 1 or less, or all of them, shards over "
        "all.",
        pending=Capability.SHARDING,
        noop=(1, 0, -1),
    ),
    row(
        "actor_train.strategy_args.strategy_config.param_dtype",
        _SHARD_DTYPE,
        "bf16",
        "Type to which FSDP2 casts weights for the forward and backward pass; null leaves them as they are.",
        native="policy.dtype",
        pending=Capability.SHARDING,
        noop=("bf16", "bfloat16"),
    ),
    row(
        "actor_train.strategy_args.strategy_config.reduce_dtype",
        _SHARD_DTYPE,
        "float32",
        "Type in which FSDP2 sums gradients over GPUs; null takes that of the weights.",
        pending=Capability.SHARDING,
        noop=("float32", "fp32", "float"),
    ),
    row(
        "actor_train.strategy_args.strategy_config.reshard_after_forward",
        optional(BOOLEAN),
        True,
        "FSDP2 frees gathered weights after the forward pass and gathers them again for the backward pass; null does "
        "so in all but the outermost module.",
        pending=Capability.SHARDING,
        noop=(True, False, None),
    ),
    row(
        "actor_train.strategy_args.strategy_config.offload_policy",
        BOOLEAN,
        False,
        "FSDP2 keeps weights, gradients and optimizer state in the machine's memory while the GPU doesn't need them.",
        pending=Capability.MEMORY,
        noop=(False,),
    ),
    row(
        "actor_train.infer_batch_size",
        POSITIVE,
        4,
        "Sequences of one forward pass on a GPU when the policy's log-probabilities are computed. Changes memory, not "
        "the result.",
        native="training.micro_batch_tokens",
        pending=Capability.BATCHING,
    ),
    row(
        "actor_train.device_mapping",
        _DEVICES,
        "list(range(0,16))",
        "Numbers of the GPUs on which the policy learns, counted over all nodes; null learns on the CPU.",
        pending=Capability.CLUSTER,
        noop=_ONE_DEVICE,
    ),
)

_ACTOR_INFER: tuple[Row, ...] = (
    row(
        "actor_infer.model_args.dtype",
        _MODEL_DTYPE,
        "bf16",
        "Type of the policy's weights while it generates; null takes the one that the model's own configuration names.",
        native="policy.dtype",
        pending=Capability.CONVERSION,
    ),
    row(
        "actor_infer.generating_args.max_new_tokens",
        POSITIVE,
        "${response_length}",
        "Tokens of one reply at most.",
        native="rollout.max_response_tokens",
        pending=Capability.CONVERSION,
    ),
    row(
        "actor_infer.generating_args.temperature",
        POSITIVE_NUMBER,
        0.99,
        "Divides the logits while sampling.",
        native="rollout.temperature",
        pending=Capability.CONVERSION,
    ),
    row(
        "actor_infer.strategy_args.strategy_name",
        _GENERATION,
        "vllm",
        "What generates: vLLM, SGLang, or the model itself through Hugging Face (`hf_infer`).",
        native="rollout.engine",
        pending=Capability.ENGINES,
        noop=("hf_infer",),
    ),
    row(
        "actor_infer.strategy_args.strategy_config.gpu_memory_utilization",
        number(above=0, most=1),
        0.6,
        "Share of a GPU's memory that vLLM takes for weights and key-value cache.",
        pending=Capability.ENGINES,
    ),
    row(
        "actor_infer.strategy_args.strategy_config.block_size",
        optional(choice(1, 8, 16, 32, 64, 128, 256)),
        16,
        "Tokens of one block of vLLM's key-value cache; null lets vLLM choose.",
        pending=Capability.ENGINES,
    ),
    row(
        "actor_infer.strategy_args.strategy_config.max_model_len",
        optional(POSITIVE),
        8000,
        "Tokens of prompt and reply together that vLLM makes room for; null takes them from the model's configuration.",
        pending=Capability.ENGINES,
    ),
    row(
        "actor_infer.strategy_args.strategy_config.load_format",
        _LOAD_FORMATS,
        "dummy",
        "How vLLM or SGLang gets its first weights: `dummy` invents them, as the learner's replace them before the "
        "first step; others read files.",
        pending=Capability.ENGINES,
    ),
    row(
        "actor_infer.strategy_args.strategy_config.mem_fraction_static",
        number(above=0, below=1),
        0.6,
        "Share of a GPU's free memory that SGLang takes for weights and key-value cache.",
        pending=Capability.ENGINES,
    ),
    row(
        "actor_infer.num_gpus_per_worker",
        POSITIVE,
        1,
        "GPUs of one copy of the generation engine; must divide the number of GPUs that generate.",
        pending=Capability.CLUSTER,
        noop=(1,),
    ),
    row(
        "actor_infer.device_mapping",
        _DEVICES,
        "list(range(0,16))",
        "Numbers of the GPUs on which the policy generates, counted over all nodes; null generates on the CPU.",
        pending=Capability.CLUSTER,
        noop=_ONE_DEVICE,
    ),
)

_REFERENCE_AND_CRITIC: tuple[Row, ...] = (
    row(
        "reference.model_args.dtype",
        _MODEL_DTYPE,
        "bf16",
        "Type of the reference model's weights; null takes the one that the model's own configuration names.",
        pending=Capability.ALGORITHMS,
    ),
    row(
        "reference.strategy_args.strategy_name",
        _SCORING,
        "megatron_infer",
        "What computes the reference model's log-probabilities: Megatron, FSDP2, or the model itself (`hf_infer`).",
        pending=Capability.MEGATRON,
    ),
    row(
        "reference.strategy_args.strategy_config.tensor_model_parallel_size",
        _DEGREE,
        1,
        "GPUs over which Megatron splits each layer's matrices of the reference model; null keeps the checkpoint's "
        "number.",
        pending=Capability.MEGATRON,
        noop=(1, None),
    ),
    row(
        "reference.infer_batch_size",
        POSITIVE,
        4,
        "Sequences of one forward pass of the reference model on a GPU. Changes memory, not the result.",
        native="training.micro_batch_tokens",
        pending=Capability.BATCHING,
    ),
    row(
        "reference.device_mapping",
        _DEVICES,
        "list(range(0,16))",
        "Numbers of the GPUs of the reference model, counted over all nodes; null keeps it on the CPU.",
        pending=Capability.CLUSTER,
        noop=_ONE_DEVICE,
    ),
    row(
        "critic.strategy_args.strategy_name",
        _TRAINING,
        "megatron_train",
        "What trains the critic: Megatron, or PyTorch's sharded data parallelism (FSDP2).",
        pending=Capability.MEGATRON,
    ),
    row(
        "critic.device_mapping",
        _DEVICES,
        "list(range(0,16))",
        "Numbers of the GPUs on which the critic learns, counted over all nodes; null learns on the CPU.",
        pending=Capability.CLUSTER,
        noop=_ONE_DEVICE,
    ),
)

ROLL_KEYS: tuple[Row, ...] = (*_PIPELINE, *_ACTOR_TRAIN, *_ACTOR_INFER, *_REFERENCE_AND_CRITIC)
