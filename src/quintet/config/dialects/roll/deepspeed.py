"""Conversion of DeepSpeed's options of ROLL's workers: ZeRO stages, offloading and number types, which FSDP2 has."""

from collections.abc import Iterator

from quintet.config.dialects.conversion import ForeignValues, NativeBuilder
from quintet.config.dialects.roll.deepspeed_keys import DEEPSPEED, TARGETS
from quintet.config.dialects.roll.workers import STRATEGY, Worker
from quintet.config.problems import ConfigProblem

POLICIES = {1: "shard_grad_op", 2: "shard_grad_op", 3: "full_shard"}
"""Native sharding policies by ZeRO stage."""
STAGE, DTYPE = "zero_optimization.stage", "sharding.parameter_dtype"
OFFLOADS = {"optimizer": "memory.offload_optimizer", "param": "memory.sharded_offload"}


def uses_deepspeed(worker: Worker) -> bool:
    """Whether the strategy of a worker is one of DeepSpeed's."""
    return DEEPSPEED in str(worker.values[worker.key(STRATEGY)])


def deepspeed_problems(worker: Worker) -> Iterator[ConfigProblem]:
    """Yield a stage that ROLL refuses: 0 in training, and all but 3 for log-probs."""
    if not uses_deepspeed(worker) or worker.name not in TARGETS:
        return
    values = worker.values
    stage = worker.option(STAGE)
    strategy = worker.key(STRATEGY)
    needed = (1, 2, 3) if values[strategy].endswith("_train") else (3,)
    if values[stage] not in needed:
        stages = " or ".join(map(str, needed))
        yield values.problem(stage, f"{values.describe(strategy)} needs ZeRO stage {stages}", f"set {stage}=3")


def deepspeed_to_native(worker: Worker, native: NativeBuilder) -> None:
    """Set sharding, offloading and number types of a worker under DeepSpeed."""
    if not uses_deepspeed(worker):
        return
    values = worker.values
    target = TARGETS[worker.name]
    stage = worker.option(STAGE)
    native.set(f"{target}.sharding.policy", POLICIES[values[stage]], stage)
    _offloads_to_native(worker, native, target)
    _dtypes_to_native(worker, native, target)


def _offloads_to_native(worker: Worker, native: NativeBuilder, target: str) -> None:
    values, stage = worker.values, worker.option(STAGE)
    for part, option in OFFLOADS.items():
        device, pin = (worker.option(f"zero_optimization.offload_{part}.{name}") for name in ("device", "pin_memory"))
        if values[device] == "cpu" and (part == "optimizer" or values[stage] == 3):
            native.set(f"{target}.{option}", True, device)
            if values[pin]:
                native.set(f"{target}.memory.pin", True, pin)


def _dtypes_to_native(worker: Worker, native: NativeBuilder, target: str) -> None:
    """Set the type of matrix products, null if it is that of the model, and the scale of losses in float16."""
    values = worker.values
    bf16 = worker.option("bf16.enabled")
    fp16 = worker.option("fp16.enabled")
    dtype = "bfloat16" if values[bf16] else "float16" if values[fp16] else "float32"
    is_models = dtype == (native.get(f"{target}.dtype") or native.get("policy.dtype"))
    native.set(f"{target}.{DTYPE}", None if is_models else dtype, bf16, fp16)
    reduction = worker.option("communication_data_type")
    native.set(f"{target}.sharding.reduce_dtype", values.native(reduction), reduction)
    if dtype == "float16" and target != "reference":
        _loss_scale_to_native(worker, native, target)


def _loss_scale_to_native(worker: Worker, native: NativeBuilder, target: str) -> None:
    values = worker.values
    power = worker.option("fp16.initial_scale_power")
    window = worker.option("fp16.loss_scale_window")
    native.set(f"{target}.sharding.grad_scaler", True, worker.option("fp16.enabled"))
    native.set(f"{target}.sharding.grad_scaler_start", 2.0 ** _integer_or_default(values, power, 16), power)
    native.set(f"{target}.sharding.grad_scaler_growth_steps", _integer_or_default(values, window, 1000), window)


def _integer_or_default(values: ForeignValues, key: str, default: int) -> int:
    """Return the value of a key, or DeepSpeed's default if the section that a file refers to lacks it."""
    value = values[key]
    return default if value is None else int(value)
