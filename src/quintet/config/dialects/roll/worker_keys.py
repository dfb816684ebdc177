"""The keys of ROLL's workers that generate, score and judge, and what those of all workers have in common."""

from __future__ import annotations

from quintet.config.dialects.devices import parse_device_mapping
from quintet.config.dialects.ledger import Capability, Row, row
from quintet.config.dialects.takes import (
    COUNT,
    POSITIVE,
    POSITIVE_NUMBER,
    TEXT,
    Takes,
    choice,
    either,
    list_of,
    number,
    optional,
)

__all__ = [
    "BACKENDS",
    "DEGREE",
    "DEVICES",
    "FSDP2",
    "MEGATRON",
    "MODEL_DTYPE",
    "MODEL_DTYPES",
    "ONE_DEVICE",
    "PROOF",
    "ROLL_WORKER_KEYS",
    "SHARD_DTYPE",
    "SHARD_DTYPES",
    "TRAINING",
    "fitting",
]

PROOF = "tests/unit/config/dialects/test_roll.py::test_a_key_reaches_the_run"
TRAINER = "actor_train.strategy_args.strategy_name"
ENGINE = "actor_infer.strategy_args.strategy_name"
MEGATRON, FSDP2 = (TRAINER, "megatron_train"), (TRAINER, "fsdp2_train")
VLLM, SGLANG = (ENGINE, "vllm"), (ENGINE, "sglang")
BACKENDS = {"megatron_train": "megatron", "fsdp2_train": "fsdp2"}
MODEL_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", None: "auto"}
SHARD_DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "fp64": "float64",
    "float64": "float64",
}

MODEL_DTYPE = optional(choice("fp32", "bf16", "fp16"))
SHARD_DTYPE = optional(choice(*SHARD_DTYPES))
TRAINING = choice("fsdp2_train", "megatron_train")
_SCORING = choice("megatron_infer", "fsdp2_infer", "hf_infer")
_GENERATION = choice("vllm", "sglang", "hf_infer")
DEVICES = optional(either(TEXT, list_of(COUNT)))


def fitting(words: str) -> Takes:
    """Values that ask for nothing, though which of them do depends on other keys: what they come to is told then."""
    return Takes(words, lambda value: True)


def _is_one(mapping: object) -> bool:
    try:
        return mapping is None or (parse_device_mapping(mapping) if isinstance(mapping, str) else mapping) in (
            (0,),
            [0],
        )
    except ValueError:
        return False


ONE_DEVICE = (Takes("device 0 alone, or null", _is_one),)
DEGREE = optional(POSITIVE)

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

_ACTOR_INFER: tuple[Row, ...] = (
    row(
        "actor_infer.model_args.dtype",
        MODEL_DTYPE,
        "bf16",
        "Type of the policy's weights while it generates; null takes the one that the model's own configuration names.",
        native="rollout.engine_options.dtype",
        proof=PROOF,
        computed=True,
    ),
    row(
        "actor_infer.generating_args.max_new_tokens",
        POSITIVE,
        "${response_length}",
        "Tokens of one reply at most.",
        native="rollout.max_response_tokens",
        proof=PROOF,
        computed=True,
        unit="tokens",
    ),
    row(
        "actor_infer.generating_args.temperature",
        POSITIVE_NUMBER,
        0.99,
        "Divides the logits while sampling.",
        native="rollout.temperature",
        proof=PROOF,
    ),
    row(
        "actor_infer.strategy_args.strategy_name",
        _GENERATION,
        "vllm",
        "What generates: vLLM, SGLang, or the model itself through Hugging Face (`hf_infer`).",
        native="rollout.engine",
        proof=PROOF,
        words={"hf_infer": "hf"},
    ),
    row(
        "actor_infer.strategy_args.strategy_config.gpu_memory_utilization",
        number(above=0, most=1),
        0.6,
        "Share of a GPU's memory that vLLM takes for weights and key-value cache.",
        native="rollout.engine_options.memory_share",
        proof=PROOF,
        unit="share",
        only_if=VLLM,
    ),
    row(
        "actor_infer.strategy_args.strategy_config.block_size",
        optional(choice(1, 8, 16, 32, 64, 128, 256)),
        16,
        "Tokens of one block of vLLM's key-value cache; null lets vLLM choose.",
        proof=PROOF,
        native="rollout.engine_options.block_size",
        unit="tokens",
        only_if=VLLM,
    ),
    row(
        "actor_infer.strategy_args.strategy_config.max_model_len",
        optional(POSITIVE),
        8000,
        "Tokens of prompt and reply together that vLLM makes room for; null takes them from the model's configuration.",
        proof=PROOF,
        native="rollout.engine_options.max_model_tokens",
        unit="tokens",
        only_if=VLLM,
    ),
    row(
        "actor_infer.strategy_args.strategy_config.load_format",
        _LOAD_FORMATS,
        "dummy",
        "How vLLM or SGLang gets its first weights: `dummy` invents them, as the learner's replace them before the "
        "first step; others read files.",
        proof=PROOF,
        native="rollout.engine_options.load_format",
        computed=True,
    ),
    row(
        "actor_infer.strategy_args.strategy_config.mem_fraction_static",
        number(above=0, below=1),
        0.6,
        "Share of a GPU's free memory that SGLang takes for weights and key-value cache.",
        native="rollout.engine_options.memory_share",
        proof=PROOF,
        unit="share",
        only_if=SGLANG,
    ),
    row(
        "actor_infer.num_gpus_per_worker",
        POSITIVE,
        1,
        "GPUs of one copy of the generation engine; must divide the number of GPUs that generate.",
        pending=Capability.CLUSTER,
        noop=(1,),
        native=("placement.rollout.devices_per_worker", "rollout.engine_options.tensor_parallel"),
        unit="devices",
    ),
    row(
        "actor_infer.device_mapping",
        DEVICES,
        "list(range(0,16))",
        "Numbers of the GPUs on which the policy generates, counted over all nodes; null generates on the CPU.",
        pending=Capability.CLUSTER,
        noop=ONE_DEVICE,
        native=("placement.rollout.devices", "placement.nodes", "placement.devices_per_node", "placement.colocated"),
    ),
)

_REFERENCE_AND_CRITIC: tuple[Row, ...] = (
    row(
        "reference.model_args.dtype",
        MODEL_DTYPE,
        "bf16",
        "Type of the reference model's weights; null takes the one that the model's own configuration names.",
        proof="tests/unit/runtime/test_learner_options.py::test_a_reference_of_another_type_is_half_as_large",
        native="reference.dtype",
        computed=True,
    ),
    row(
        "reference.strategy_args.strategy_name",
        _SCORING,
        "megatron_infer",
        "What computes the reference model's log-probabilities: Megatron, FSDP2, or the model itself (`hf_infer`).",
        proof="tests/unit/runtime/test_megatron.py::test_a_run_on_megatron_does_what_any_does",
        native=("reference.backend", "reference.sharding.policy"),
    ),
    row(
        "reference.strategy_args.strategy_config.tensor_model_parallel_size",
        DEGREE,
        1,
        "GPUs over which Megatron splits each layer's matrices of the reference model; null keeps the checkpoint's "
        "number.",
        proof="tests/unit/runtime/test_following.py::test_two_ranks_do_what_one_does",
        native="reference.parallel.tensor",
        words={1: 1, None: 1},
        unit="devices",
        only_if=("reference.strategy_args.strategy_name", "megatron_infer"),
    ),
    row(
        "reference.infer_batch_size",
        POSITIVE,
        4,
        "Sequences of one forward pass of the reference model on a GPU. Changes memory, not the result.",
        native="reference.inference_budget.sequences",
        proof=PROOF,
        unit="sequences",
    ),
    row(
        "reference.device_mapping",
        DEVICES,
        "list(range(0,16))",
        "Numbers of the GPUs of the reference model, counted over all nodes; null keeps it on the CPU.",
        pending=Capability.CLUSTER,
        noop=ONE_DEVICE,
        native=("placement.reference.devices", "placement.nodes", "placement.devices_per_node"),
    ),
    row(
        "critic.strategy_args.strategy_name",
        TRAINING,
        "megatron_train",
        "What trains the critic: Megatron, or PyTorch's sharded data parallelism (FSDP2).",
        proof="tests/unit/runtime/test_megatron.py::test_a_run_on_megatron_does_what_any_does",
        native="critic.backend",
        words=BACKENDS,
    ),
    row(
        "critic.device_mapping",
        DEVICES,
        "list(range(0,16))",
        "Numbers of the GPUs on which the critic learns, counted over all nodes; null learns on the CPU.",
        pending=Capability.CLUSTER,
        noop=ONE_DEVICE,
        native=("placement.critic.devices", "placement.nodes", "placement.devices_per_node"),
    ),
)

ROLL_WORKER_KEYS: tuple[Row, ...] = (*_ACTOR_INFER, *_REFERENCE_AND_CRITIC)
