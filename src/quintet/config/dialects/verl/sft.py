"""Conversion of verl's `sft_trainer.yaml`: supervised fine-tuning on conversations from files."""

import math
from collections.abc import Iterator

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder, as_list
from quintet.config.dialects.conversion_rules import Derived, Same, lora_section
from quintet.config.dialects.verl.batches import GPUS, num_gpus
from quintet.config.dialects.verl.key_values import parse_betas
from quintet.config.dialects.verl.run_settings import (
    DATA_RULES,
    TEMPLATE_OPTIONS,
    THINKING_TEMPLATES,
    run_from_native,
    run_to_native,
)
from quintet.config.problems import ConfigProblem

PARALLEL_SIZES = ("tensor", "pipeline", "context", "ulysses")
DYNAMIC, TOKENS = "data.use_dynamic_bsz", "data.max_token_len_per_gpu"
SHARDS = "engine.use_distributed_optimizer"
REPLICATE = "engine.dp_replicate_size"
STRATEGY = "model.strategy"
THINKING = "data.enable_thinking_default"
TEST_FREQ = "trainer.test_freq"
DECAY, MAX_CHECKPOINTS = "optim.lr_decay_style", "trainer.max_ckpt_to_keep"
RULES = (
    Derived("external_libs", ("model.external_lib",), as_list, lambda modules: (modules[0] if modules else None,)),
    Derived(
        "actor.memory.sharded_offload",
        ("model.fsdp_config.cpu_offload", "model.fsdp_config.offload_params", "engine.offload_policy"),
        lambda offloads, parameters, newer: (offloads and parameters) or newer,
        lambda offloads: (offloads, offloads),
    ),
    lora_section("model"),
    Same("sft.optimizer.betas", "optim.betas", to_value=parse_betas),
)
COLUMN_RULES = (
    *(
        Derived(
            f"data.{name}_key",
            (f"data.{name}_key", f"data.{name}_dict_keys"),
            lambda column, inner: None if column is None else ".".join([column, *(inner or ())]),
            lambda column: (column,),
            import_none=False,
        )
        for name in ("prompt", "response")
    ),
    Derived(
        "data.messages_key",
        ("data.multiturn.enable", "data.multiturn.messages_key", "data.messages_key"),
        lambda enabled, column, newer: newer or (column if enabled else None),
        lambda column: (column is not None, column or "messages"),
    ),
)


def sft_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the native keys of supervised fine-tuning."""
    native.set_constants({"sft.optimizer.warmup_steps": 0, "sft.optimizer.min_learning_rate_ratio": 0.0})
    native.set_from_keys(values.dialect.specs().values())
    native.set("policy.preset", None, "model.partial_pretrain")
    native.set("sft.devices", max(num_gpus(values), _least_devices(values, native)), *GPUS)
    native.apply((*RULES, *DATA_RULES, *COLUMN_RULES))
    _engine_to_native(values, native)
    _thinking_to_native(values, native)
    run_to_native(values, native)
    if values[TEST_FREQ] <= 0:
        # verl measures the held-out loss after the last step all the same
        native.set("validation.every_steps", 0, TEST_FREQ)


def _thinking_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the template's option `enable_thinking` for rows without that column."""
    default, option = values[THINKING], (values[TEMPLATE_OPTIONS] or {}).get("enable_thinking")
    thinking = option if default in (None, "none") else bool(default)
    if isinstance(thinking, bool):
        native.set("data.template", THINKING_TEMPLATES[thinking], THINKING, TEMPLATE_OPTIONS)


def _least_devices(values: ForeignValues, native: NativeBuilder) -> int:
    """Return the devices that share a sequence or a model, if verl's own file, which has one device, leaves their
    number to torchrun."""
    if num_gpus(values) > 1:
        return 1
    least = math.prod(int(native.get(f"actor.parallel.{size}") or 1) for size in PARALLEL_SIZES)
    if REPLICATE in values.dialect.specs():
        split = values["engine.tp_size"] * values["engine.pp_size"]
        least = split * math.lcm(least // split, values["engine.ep_size"])
    if least > 1:
        native.remarks.append(f"{GPUS[1]} is 1: using {least}, the least that the parallel sizes need")
    return least


def _engine_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set what the keys of newer releases decide together."""
    if values[DYNAMIC]:
        native.set("sft.sequences_per_pass", None, DYNAMIC)
        native.set("training.micro_batch_tokens", values[TOKENS], TOKENS, DYNAMIC)
    if REPLICATE in values.dialect.specs():
        _automodel_to_native(values, native)
        return
    dtype, own_dtype = "engine.dtype", "engine.mixed_precision.param_dtype"
    if values[STRATEGY] in ("fsdp", "fsdp2") and values.is_set(dtype) and values[own_dtype] is None:
        native.set("actor.sharding.parameter_dtype", "bfloat16", dtype)
    rate, ratio, minimum = values["optim.lr"], values["optim.min_lr_ratio"], values["optim.min_lr"]
    final = (ratio or 0.0) if minimum is None else min(1.0, minimum / rate)
    native.set("sft.optimizer.min_learning_rate_ratio", final, "optim.min_lr_ratio", "optim.min_lr")
    if values[DECAY] is not None:
        native.set("sft.optimizer.schedule", values[DECAY].lower().replace("-", "_"), DECAY)
    if values.is_set(SHARDS):
        native.set("actor.megatron.use_distributed_optimizer", values[SHARDS], SHARDS)
    if values[MAX_CHECKPOINTS] is not None:
        native.set("checkpoint.keep", values[MAX_CHECKPOINTS], MAX_CHECKPOINTS)


def _automodel_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set what several keys of Automodel decide."""
    sequence, tensor = "engine.sequence_parallel", "engine.tp_size"
    native.set("actor.parallel.sequence", values[sequence] and values[tensor] > 1, sequence, tensor)
    context = values["engine.cp_size"]
    ranks = num_gpus(values) // (values[tensor] * values["engine.pp_size"] * context)
    copies = values[REPLICATE]
    native.set("actor.sharding.group_size", ranks // copies * context if copies > 1 else None, REPLICATE, *GPUS)
    start, final = "optim.init_lr_ratio", "optim.min_lr_ratio"
    first = 0.1 if values[start] is None else values[start]
    native.set("sft.optimizer.warmup_start", first * values["optim.lr"], start, "optim.lr")
    last = 0.01 if values[final] is None else values[final]
    native.set("sft.optimizer.min_learning_rate_ratio", last, final)
    if values[MAX_CHECKPOINTS] is not None:
        native.set("checkpoint.keep", values[MAX_CHECKPOINTS], MAX_CHECKPOINTS)


def automodel_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield a number of copies that the GPUs do not make up."""
    if REPLICATE not in values.dialect.specs() or values[REPLICATE] == 1:
        return
    sizes = ("engine.tp_size", "engine.pp_size", "engine.cp_size")
    devices = math.prod(values[key] for key in (REPLICATE, *sizes))
    if num_gpus(values) % devices:
        problem = f"with {values.describe(*sizes)} needs a multiple of {devices} GPUs: {values.describe(*GPUS)}"
        yield values.problem(REPLICATE, problem, f"for example {GPUS[1]}={devices}")


def sft_from_native(foreign: ForeignBuilder) -> None:
    """Set the keys of verl's supervised fine-tuning."""
    foreign.set("optim.min_lr_ratio", foreign.native_value("sft.optimizer.min_learning_rate_ratio"))
    foreign.apply((*RULES, *DATA_RULES))
    is_dynamic = foreign.native_value("sft.sequences_per_pass") is None
    foreign.set(DYNAMIC, is_dynamic)
    if is_dynamic:
        foreign.set(TOKENS, foreign.native_value("training.micro_batch_tokens"))
    if foreign.experiment.data:
        foreign.apply(COLUMN_RULES)
        if foreign.experiment.data.template in THINKING_TEMPLATES.values():
            foreign.set(THINKING, foreign.native_value("data.template") == THINKING_TEMPLATES[True])
    run_from_native(foreign)
