"""Conversion of ROLL's supervised fine-tuning (`SFTPipeline`)."""

from collections.abc import Mapping
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.conversion import ForeignValues, NativeBuilder, as_list
from quintet.config.dialects.roll.run_settings import run_to_native
from quintet.config.dialects.roll.workers import ACCUMULATION, MICRO_BATCH, STRATEGY, STRATEGY_OPTIONS, Worker

WORKER = "sft_train"
FILE, VALIDATION_FILE = f"{WORKER}.data_args.file_name", "validation.data_args.file_name"
TEMPLATE, SEQUENCE = f"{WORKER}.data_args.template", "sequence_length"
SPLITS = {
    "megatron": ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    "fsdp2": (),
}
ULYSSES = f"{WORKER}.model_args.ulysses_size"


def sft_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set supervised fine-tuning; ROLL's Megatron splits wait, as this stage is sharded by FSDP2 here."""
    specs = values.dialect.specs().values()
    native.set_from_keys(spec for spec in specs if not any(key.startswith("actor.") for key in spec.native))
    native.set("policy.preset", None, "pretrain")
    native.set("policy.path", values["pretrain"], "pretrain")
    native.set("warm_start", None)
    native.set("data.kind", "conversations")
    native.set("data.train_files", as_list(values[FILE]), FILE)
    if values[VALIDATION_FILE] is not None:
        native.set("data.validation_files", as_list(values[VALIDATION_FILE]), VALIDATION_FILE)
    template = "global_template" if values["global_template"] is not None else TEMPLATE
    if values[template] not in (None, "native"):
        native.set("data.template", values[template], template)
    _training_to_native(Worker(values, WORKER), native)
    run_to_native(values, native)


def _training_to_native(worker: Worker, native: NativeBuilder) -> None:
    """Set devices, batch, optimizer and precision."""
    values, arguments = worker.values, f"{WORKER}.training_args."
    for key in _split_keys(worker):
        if (values[key] or 1) > 1:
            native.require(key, Capability.ROLL_LEARNERS)
    devices = worker.world_size
    native.set("sft.devices", devices, worker.key("device_mapping"))
    native.set("placement.devices_per_node", devices, worker.key("device_mapping"))
    shared = 1
    for key in _split_keys(worker):
        shared *= values[key] or 1
    micro_batch, accumulation = worker.training_argument(MICRO_BATCH), worker.training_argument(ACCUMULATION)
    batch = max(1, micro_batch * accumulation * devices // shared)
    native.set("sft.batch", batch, worker.key(MICRO_BATCH), worker.key(ACCUMULATION), worker.key("device_mapping"))
    native.set("sft.sequences_per_pass", micro_batch, worker.key(MICRO_BATCH))
    if values[SEQUENCE] is not None:
        native.set("sft.max_tokens", values[SEQUENCE], SEQUENCE)
    native.set("data.truncation", "right")
    checkpointing = values[worker.key("model_args.disable_gradient_checkpointing")]
    native.set("sft.gradient_checkpointing", not checkpointing, worker.key("model_args.disable_gradient_checkpointing"))
    dtype = {"fp32": "float32", "fp16": "float16"}.get(values[worker.key("model_args.dtype")], "bfloat16")
    native.set("policy.dtype", dtype, worker.key("model_args.dtype"))
    epochs = values[f"{arguments}num_train_epochs"]
    native.set("sft.epochs", max(1, int(epochs or 1)), f"{arguments}num_train_epochs")
    _optimizer_to_native(values, arguments, native)


def _optimizer_to_native(values: ForeignValues, arguments: str, native: NativeBuilder) -> None:
    defaults: Mapping[str, tuple[str, Any]] = {
        "learning_rate": ("learning_rate", 5.0e-05),
        "weight_decay": ("weight_decay", 0.0),
        "warmup_steps": ("warmup_steps", 0),
        "lr_scheduler_type": ("schedule", "linear"),
    }
    for name, (option, default) in defaults.items():
        key = f"{arguments}{name}"
        value = default if values[key] is None else values[key]
        native.set(f"sft.optimizer.{option}", SCHEDULES.get(value, value), key)
    betas = [values[f"{arguments}adam_beta1"] or 0.9, values[f"{arguments}adam_beta2"] or 0.999]
    native.set("sft.optimizer.betas", betas, f"{arguments}adam_beta1", f"{arguments}adam_beta2")
    native.set("sft.warmup_ratio", float(values[f"{arguments}warmup_ratio"] or 0.0), f"{arguments}warmup_ratio")
    native.set("sft.optimizer.min_learning_rate_ratio", 0.0)


SCHEDULES = {"constant_with_warmup": "constant", "inverse_sqrt": "inverse_square_root"}


def _split_keys(worker: Worker) -> tuple[str, ...]:
    """Return the keys by which the model is split."""
    options = _strategy_options(worker)
    names = SPLITS.get(worker.strategy, ())
    return (*(f"{worker.key(STRATEGY_OPTIONS)}.{name}" for name in names if name in options), ULYSSES)


def _strategy_options(worker: Worker) -> dict[str, object]:
    """Return the options of the worker's strategy."""
    return dict(worker.values[worker.key(STRATEGY_OPTIONS)] or {}) if worker.values[worker.key(STRATEGY)] else {}
