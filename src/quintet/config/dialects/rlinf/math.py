"""Conversion of RLinf's runs on text: prompts from files, verifiers, Megatron or FSDP."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import (
    ConversionRule,
    Derived,
    Same,
    apply_from_native,
    apply_to_native,
    file_list,
)
from quintet.config.dialects.rlinf.algorithm import text_algorithm_from_native, text_algorithm_to_native
from quintet.config.dialects.rlinf.backend import (
    LEARNER_RULES,
    backend_from_native,
    backend_to_native,
    megatron_from_native,
    megatron_to_native,
    tokenizer_to_native,
)
from quintet.config.native.data import DataConfig
from quintet.config.native.training import TrainingConfig

TASK, DATA_TYPE = "runner.task_type", "data.type"
IMAGE_FIELD = "image"
"""Field of images in RLinf's rows for vision-language models."""
BATCH, VALIDATION_BATCH = "data.rollout_batch_size", "data.val_rollout_batch_size"
MAX_EPOCHS, MAX_STEPS = "runner.max_epochs", "runner.max_steps"
SEQUENCE, PROMPT, RESPONSE = (
    "runner.seq_length",
    "data.max_prompt_length",
    "algorithm.sampling_params.max_new_tokens",
)
DYNAMIC, TOKENS, SEQUENCES = (
    "runner.enable_dynamic_batch_size",
    "runner.max_tokens_per_mbs",
    "algorithm.training_batch_size_per_gpu",
)
PEAK_RATE, MAX_RATE = "actor.optim.lr", "actor.lr_sched.max_lr"
MIN_RATES = ("actor.optim.min_lr", "actor.lr_sched.min_lr")
DECAY_STEPS, DECAY_STYLE, WARMUP_STEPS, WARMUP_SHARE = (
    f"actor.lr_sched.{name}" for name in ("lr_decay_iters", "lr_decay_style", "lr_warmup_iters", "lr_warmup_fraction")
)
DEFAULT_ANSWER_COLUMN: str = DataConfig.model_fields["truth_key"].default
NO_TEMPLATE = "none"
"""The native chat template that leaves prompts as they are."""
RULES: tuple[ConversionRule, ...] = (
    *LEARNER_RULES,
    Same("policy.path", "rollout.model.model_path"),
    Same("policy.kind", "rollout.model.model_type", from_value=lambda kind: kind or "qwen2.5"),
    Derived(
        "rollout.max_response_tokens",
        (RESPONSE, SEQUENCE, PROMPT),
        lambda response, sequence, prompt: response,
        lambda response: (response,),
    ),
    Derived(
        "actor.budget.tokens",
        (DYNAMIC, TOKENS),
        lambda dynamic, tokens: tokens if dynamic else None,
        lambda tokens: (False,) if tokens is None else (True, tokens),
    ),
    Derived(
        "reward.model",
        ("reward.use_reward_model", "reward.model.model_path"),
        lambda enabled, path: {"path": path} if enabled else None,
        lambda model: (False,) if model is None else (True, model.path),
    ),
)
DATA_RULES: tuple[ConversionRule, ...] = (
    file_list("data.train_files", "data.train_data_paths", scalar=False),
    file_list("data.validation_files", "data.val_data_paths", scalar=False),
    Same("data.epochs", MAX_EPOCHS, export_none=False),
    Same(
        "data.truth_key",
        "data.answer_key",
        to_value=lambda column: column or DEFAULT_ANSWER_COLUMN,
        from_value=lambda column: None if column == DEFAULT_ANSWER_COLUMN else column,
    ),
    Same(
        "data.template",
        "data.apply_chat_template",
        to_value=lambda applies: None if applies else NO_TEMPLATE,
        from_value=lambda template: template != NO_TEMPLATE,
    ),
    Same(
        ("data.train_rows", "data.validation_rows"),
        "data.data_size",
        to_value=lambda rows: None if rows == -1 else rows,
    ),
)


def math_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Convert a run on text."""
    native.set("policy.preset", None, "rollout.model.model_path")
    apply_to_native((*RULES, *DATA_RULES), values, native)
    tokenizer_to_native(values, native, "rollout.model.model_path")
    native.set("env", {"name": "prompts"}, TASK, "data.train_data_paths")
    is_evaluation = values[TASK].endswith("_eval")
    native.set("validation.only", is_evaluation, TASK)
    if is_evaluation:
        _sampling_as_in_training(values, native)
    _data_to_native(values, native)
    is_default = values[SEQUENCE] == values[PROMPT] + values[RESPONSE]
    native.set("rollout.engine_options.max_model_tokens", None if is_default else values[SEQUENCE], SEQUENCE)
    native.set_constants(
        {
            "rollout.max_turns": 1,
            "rollout.window_size": None,
            "rollout.think": False,
            "rollout.format_penalty": 0.0,
        }
    )
    native.set("actor.budget.sequences", None if values[DYNAMIC] else values[SEQUENCES], DYNAMIC, SEQUENCES)
    _optimizer_to_native(values, native)
    backend_to_native(values, native)
    megatron_to_native(values, native)
    text_algorithm_to_native(values, native)


def _sampling_as_in_training(values: ForeignValues, native: NativeBuilder) -> None:
    """A run that only evaluates samples by the keys of training."""
    for name, value in native.get("rollout").items():
        if name in ("do_sample", "temperature", "top_k", "top_p"):
            native.set(f"validation.sampling.{name}", value, *native.origins[f"rollout.{name}"])
    group = "algorithm.group_size"
    native.set("validation.sampling.samples", values[group], group)


def _data_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    data_type = values[DATA_TYPE]
    native.set("data.kind", "demonstrations" if data_type == "robot_demo" else "prompts", DATA_TYPE)
    native.set("data.image_key", IMAGE_FIELD if data_type in ("vision_language", "vlm") else None, DATA_TYPE)
    native.set("data.truncation", "right", PROMPT)
    native.set("data.validation_batch", values[VALIDATION_BATCH] or values[BATCH], VALIDATION_BATCH, BATCH)
    if values[MAX_STEPS] >= 0:
        native.set("data.max_steps", values[MAX_STEPS], MAX_STEPS)
    # a right answer earns `reward_scale`, a wrong one costs as much
    native.set("reward.wrong_reward", -1.0, "reward.reward_scale")


def _optimizer_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    # the reference's `max_lr` is no limit unless the user set it
    limits = [MAX_RATE] if values.is_set(MAX_RATE) else []
    rate = min(values[key] for key in (PEAK_RATE, *limits))
    native.set("actor.optimizer.learning_rate", rate, PEAK_RATE, MAX_RATE)
    minimum = max(values[key] for key in [key for key in MIN_RATES if values.is_set(key)] or MIN_RATES)
    ratio = min(1.0, minimum / rate)
    native.set("actor.optimizer.min_learning_rate_ratio", ratio, *MIN_RATES, PEAK_RATE)
    # a constant rate does not decay
    decay_steps = None if values[DECAY_STYLE] == "constant" else values[DECAY_STEPS]
    native.set("actor.optimizer.decay_steps", decay_steps, DECAY_STEPS, DECAY_STYLE)
    steps = native.get("training.steps", TrainingConfig().steps)
    total = values[DECAY_STEPS] or steps * values["algorithm.n_minibatches"]
    warmup = values[WARMUP_STEPS] or int((values[WARMUP_SHARE] or 0) * total)
    native.set("actor.optimizer.warmup_steps", warmup, WARMUP_STEPS, WARMUP_SHARE, DECAY_STEPS)


def math_from_native(foreign: ForeignBuilder) -> None:
    """Set the keys of a run on text."""
    run, data = foreign.experiment, foreign.experiment.data
    apply_from_native(RULES, foreign)
    if run.validation.only:
        foreign.set(TASK, "reasoning_eval")
    max_steps = data.max_steps if data and data.epochs is not None else run.training.steps
    foreign.set(MAX_STEPS, -1 if max_steps is None else max_steps)
    prompt, response = run.rollout.max_prompt_tokens, run.rollout.max_response_tokens
    foreign.set(SEQUENCE, run.rollout.engine_options.max_model_tokens or prompt + response)
    if data is not None:
        prompts = "vision_language" if data.image_key else "math"
        foreign.set(DATA_TYPE, "robot_demo" if data.kind == "demonstrations" else prompts)
        is_training_batch = data.validation_batch in (None, run.training.groups_per_step)
        foreign.set(VALIDATION_BATCH, None if is_training_batch else data.validation_batch)
        apply_from_native(DATA_RULES, foreign)
    if run.actor.budget.sequences is not None:
        foreign.set(SEQUENCES, run.actor.budget.sequences)
    _optimizer_from_native(foreign)
    backend_from_native(foreign)
    megatron_from_native(foreign)
    text_algorithm_from_native(foreign)


def _optimizer_from_native(foreign: ForeignBuilder) -> None:
    optimizer = foreign.experiment.actor.optimizer
    rate, is_constant = optimizer.learning_rate, optimizer.schedule == "constant"
    foreign.set(PEAK_RATE, rate)
    foreign.set(MIN_RATES[0], next(_min_rates(optimizer.min_learning_rate_ratio, rate)))
    if optimizer.decay_steps is not None or not is_constant:
        foreign.set(DECAY_STEPS, optimizer.decay_steps)
    foreign.set(WARMUP_STEPS, optimizer.warmup_steps)
    if optimizer.warmup_steps == 0 and not is_constant:
        foreign.set(WARMUP_SHARE, None)


def _min_rates(ratio: float, rate: float) -> Iterator[float]:
    """Yield learning rates that give exactly this ratio, the shortest first, and at last the nearest."""
    for digits in range(1, 18):
        minimum = float(f"{ratio * rate:.{digits}g}")
        if minimum / rate == ratio:
            yield minimum
    yield ratio * rate
