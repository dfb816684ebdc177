"""Conversion of ROLL's supervised fine-tuning (`SFTPipeline`) and distillation (`DistillPipeline`)."""

from collections.abc import Mapping
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.dialects.conversion import ForeignValues, NativeBuilder, as_list
from quintet.config.dialects.roll.deepspeed import deepspeed_to_native
from quintet.config.dialects.roll.kinds import TABLES
from quintet.config.dialects.roll.run_settings import run_to_native
from quintet.config.dialects.roll.workers import ACCUMULATION, MICRO_BATCH, STRATEGY, STRATEGY_OPTIONS, Worker

WORKER, STUDENT, TEACHER = "sft_train", "student", "teacher"
VALIDATION_FILE, SEQUENCE, CLIPPING = "validation.data_args.file_name", "sequence_length", "max_grad_norm"
VISION_TEMPLATE = "vl"
"""Part of the names of templates of ROLL's separate pipelines for images, whose rows and prompts are fixed."""
UNCLIPPED = 1.0e9
"""Maximum norm of gradients that are not clipped."""
SPLITS = {
    "megatron": ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    "fsdp2": (),
}


def sft_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set supervised fine-tuning; ROLL's Megatron splits wait, as this stage is sharded by FSDP2 here."""
    _stage_to_native(Worker(values, WORKER), native, "pretrain")


def distillation_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the fine-tuning of a student on stored answers and the distributions of a teacher."""
    student, teacher = (f"{name}.model_args.model_name_or_path" for name in (STUDENT, TEACHER))
    # ROLL takes these only if both are set
    has_paths = values[student] is not None and values[teacher] is not None
    pretrained, teacher_key = (student, teacher) if has_paths else ("student_pretrain", "teacher_pretrain")
    _stage_to_native(Worker(values, STUDENT), native, pretrained)
    native.set("reference.path", values[teacher_key], teacher_key)
    worker = Worker(values, TEACHER)
    dtype, micro_batch = worker.key("model_args.dtype"), worker.key(MICRO_BATCH)
    native.set("reference.dtype", DTYPES.get(values[dtype], "bfloat16"), dtype)
    for key in _split_keys(worker):
        if (values[key] or 1) > 1:
            native.require(key, Capability.ROLL_LEARNERS)
    mapping = worker.key("device_mapping")
    if values[mapping] is not None and worker.devices != Worker(values, STUDENT).devices:
        native.require(mapping, Capability.ROLL_LEARNERS)
    deepspeed_to_native(worker, native)
    native.set("reference.inference_budget.sequences", worker.training_argument(MICRO_BATCH), micro_batch)
    for key, field in TABLES["divergence"].items():
        native.set(f"sft.distillation.{field}", float(values[key]), key)
    clipping = values[CLIPPING]
    native.set("sft.optimizer.max_grad_norm", float(clipping) or UNCLIPPED, CLIPPING)
    native.set("sft.before_training", False)


def _stage_to_native(worker: Worker, native: NativeBuilder, pretrained: str) -> None:
    """Set the stage of a worker that trains the model at the key `pretrained`."""
    values = worker.values
    specs = values.dialect.specs().values()
    native.set_from_keys(spec for spec in specs if not any(key.startswith("actor.") for key in spec.native))
    native.set("policy.preset", None, pretrained)
    native.set("policy.path", values[pretrained], pretrained)
    native.set("warm_start", None)
    files = worker.key("data_args.file_name")
    native.set("data.train_files", as_list(values[files]), files)
    if values[VALIDATION_FILE] is not None:
        native.set("data.validation_files", as_list(values[VALIDATION_FILE]), VALIDATION_FILE)
    template = "global_template" if values["global_template"] is not None else worker.key("data_args.template")
    if VISION_TEMPLATE in str(values[template]):
        native.require(template, Capability.MEDIA)
    elif values[template] not in (None, "native"):
        native.set("data.template", values[template], template)
    _training_to_native(worker, native)
    run_to_native(values, native)


def _training_to_native(worker: Worker, native: NativeBuilder) -> None:
    """Set devices, batch, optimizer and precision."""
    values, arguments = worker.values, worker.key("training_args.")
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
    dtype = DTYPES.get(values[worker.key("model_args.dtype")], "bfloat16")
    native.set("policy.dtype", dtype, worker.key("model_args.dtype"))
    epochs = values[f"{arguments}num_train_epochs"]
    deepspeed_to_native(worker, native)
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


DTYPES = {"fp32": "float32", "fp16": "float16"}
SCHEDULES = {"constant_with_warmup": "constant", "inverse_sqrt": "inverse_square_root"}


def _split_keys(worker: Worker) -> tuple[str, ...]:
    """Return the keys by which the model is split."""
    options = _strategy_options(worker)
    names = SPLITS.get(worker.strategy, ()) if options else ()
    return (
        *(f"{worker.key(STRATEGY_OPTIONS)}.{name}" for name in names if name in options),
        worker.key("model_args.ulysses_size"),
    )


def _strategy_options(worker: Worker) -> dict[str, object]:
    """Return the options of the worker's strategy."""
    return dict(worker.values[worker.key(STRATEGY_OPTIONS)] or {}) if worker.values[worker.key(STRATEGY)] else {}
