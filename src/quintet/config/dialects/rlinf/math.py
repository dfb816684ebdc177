"""Conversion of RLinf's runs on text: prompts from files, verifiers, Megatron or FSDP."""

from collections.abc import Iterator

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import Derived, Same, file_list, first_of, switched
from quintet.config.native.training import TrainingConfig

TASK, DATA_TYPE = "runner.task_type", "data.type"
BATCH, VALIDATION_BATCH, MAX_STEPS = "data.rollout_batch_size", "data.val_rollout_batch_size", "runner.max_steps"
SEQUENCE, PROMPT = "runner.seq_length", "data.max_prompt_length"
RESPONSE = "algorithm.sampling_params.max_new_tokens"
DYNAMIC, TOKENS = "runner.enable_dynamic_batch_size", "runner.max_tokens_per_mbs"
PEAK_RATE, MAX_RATE = "actor.optim.lr", "actor.lr_sched.max_lr"
MIN_RATES = ("actor.optim.min_lr", "actor.lr_sched.min_lr")
DECAY_STEPS, DECAY_STYLE, WARMUP_STEPS, WARMUP_SHARE = (
    f"actor.lr_sched.{name}" for name in ("lr_decay_iters", "lr_decay_style", "lr_warmup_iters", "lr_warmup_fraction")
)
RULES = (
    Derived(
        "validation.only",
        (TASK,),
        lambda task: task.endswith("_eval"),
        lambda only: ("reasoning_eval",) if only else (),
    ),
    first_of("rollout.max_response_tokens", RESPONSE, SEQUENCE, PROMPT),
    switched("actor.budget.sequences", DYNAMIC, "algorithm.training_batch_size_per_gpu", on_value=False),
    switched("actor.budget.tokens", DYNAMIC, TOKENS),
    switched(
        "reward.model",
        "reward.use_reward_model",
        "reward.model.model_path",
        lambda path: {"path": path},
        lambda model: model.path,
    ),
)
DATA_RULES = (
    file_list("data.train_files", "data.train_data_paths", scalar=False),
    file_list("data.validation_files", "data.val_data_paths", scalar=False),
    Same(
        "data.image_key",
        DATA_TYPE,
        export_none=False,
        to_value=lambda kind: "image" if kind in ("vision_language", "vlm") else None,
        from_value=lambda column: "vision_language",
    ),
    Same("data.epochs", "runner.max_epochs"),
)


def math_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Convert a run on text."""
    native.set("env", {"name": "prompts"}, TASK, "data.train_data_paths")
    native.set_constants({"rollout.max_turns": 1, "rollout.window_size": None})
    native.set_constants({"rollout.think": False, "rollout.format_penalty": 0.0})
    native.apply((*RULES, *DATA_RULES))
    if native.get("validation.only"):
        _sampling_as_in_training(values, native)
    native.set("data.truncation", "right", PROMPT)
    native.set("data.validation_batch", values[VALIDATION_BATCH] or values[BATCH], VALIDATION_BATCH, BATCH)
    if values[MAX_STEPS] >= 0:
        native.set("data.max_steps", values[MAX_STEPS], MAX_STEPS)
    # a right answer earns `reward_scale`, a wrong one costs as much
    native.set("reward.wrong_reward", -1.0, "reward.reward_scale")
    is_default = values[SEQUENCE] == values[PROMPT] + values[RESPONSE]
    native.set("rollout.engine_options.max_model_tokens", None if is_default else values[SEQUENCE], SEQUENCE)
    _optimizer_to_native(values, native)


def _sampling_as_in_training(values: ForeignValues, native: NativeBuilder) -> None:
    """A run that only evaluates samples by the keys of training."""
    for name, value in native.get("rollout").items():
        if name in ("do_sample", "temperature", "top_k", "top_p"):
            native.set(f"validation.sampling.{name}", value, *native.origins[f"rollout.{name}"])
    group = "algorithm.group_size"
    native.set("validation.sampling.samples", values[group], group)


def _optimizer_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    # the reference's `max_lr` is no limit unless the user set it
    rate = min(values[key] for key in (PEAK_RATE, MAX_RATE) if key == PEAK_RATE or values.is_set(key))
    native.set("actor.optimizer.learning_rate", rate, PEAK_RATE, MAX_RATE)
    minimum = max(values[key] for key in [key for key in MIN_RATES if values.is_set(key)] or MIN_RATES)
    native.set("actor.optimizer.min_learning_rate_ratio", min(1.0, minimum / rate), *MIN_RATES, PEAK_RATE)
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
    foreign.apply(RULES)
    max_steps = data.max_steps if data and data.epochs is not None else run.training.steps
    foreign.set(MAX_STEPS, -1 if max_steps is None else max_steps)
    prompt, response = run.rollout.max_prompt_tokens, run.rollout.max_response_tokens
    foreign.set(SEQUENCE, run.rollout.engine_options.max_model_tokens or prompt + response)
    if data is not None:
        is_training_batch = data.validation_batch in (None, run.training.groups_per_step)
        foreign.set(VALIDATION_BATCH, None if is_training_batch else data.validation_batch)
        foreign.apply(DATA_RULES)
    _optimizer_from_native(foreign)


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
