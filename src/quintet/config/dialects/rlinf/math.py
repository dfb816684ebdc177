"""Conversion of RLinf's runs on text: prompts from files, verifiers, Megatron or FSDP."""

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import Derived, Same, file_list, first_of, switched
from quintet.config.dialects.rlinf.algorithm import GROUP
from quintet.config.dialects.rlinf.backend import BACKEND
from quintet.config.dialects.rlinf.optimizer import optimizer_from_native, optimizer_to_native

TASK, DATA_TYPE = "runner.task_type", "data.type"
BATCH, VALIDATION_BATCH, MAX_STEPS = "data.rollout_batch_size", "data.val_rollout_batch_size", "runner.max_steps"
SEQUENCE, PROMPT = "runner.seq_length", "data.max_prompt_length"
RESPONSE = "algorithm.sampling_params.max_new_tokens"
DYNAMIC, TOKENS = "runner.enable_dynamic_batch_size", "runner.max_tokens_per_mbs"
IMAGES, TEMPLATE, VISION_TEMPLATE = "data.image_keys", "data.apply_chat_template", "data.use_chat_template"
VISION = ("vision_language", "vlm")
RIGHT, WRONG, SCALE = "reward.reward_max_val", "reward.reward_min_val", "reward.reward_scale"
ENGINE_PRECISION, FIRST_SYNC = "rollout.model.precision", "rollout.validate_weight_first_sync"
PREFIX_CACHE, OFFLOAD = "rollout.vllm.enable_prefix_caching", "actor.enable_offload"
OPTIONS = "rollout.engine_options"
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
    Derived(
        "data.image_key",
        (DATA_TYPE, IMAGES),
        lambda kind, columns: ([*(columns or ()), "image"][0]) if kind in VISION else None,
        lambda column: ("vision_language", None if column == "image" else [column]),
        export_none=False,
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
    _reward_to_native(values, native)
    is_default = values[SEQUENCE] == values[PROMPT] + values[RESPONSE]
    native.set(f"{OPTIONS}.max_model_tokens", None if is_default else values[SEQUENCE], SEQUENCE)
    _engine_to_native(values, native)
    if values[BACKEND] == "fsdp" and values.is_set(OFFLOAD):
        for part in ("parameters", "optimizer"):
            native.set(f"actor.memory.offload_{part}", values[OFFLOAD], OFFLOAD)
    optimizer_to_native(values, native)


def _reward_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the rewards of right and wrong answers; natively that of a right one is 1, before the scale."""
    native.set("reward.wrong_reward", values[WRONG] / values[RIGHT], WRONG, RIGHT, SCALE)
    native.set("reward.scale", values[SCALE] * values[RIGHT], SCALE, RIGHT)
    if values[DATA_TYPE] in VISION and values.is_set(VISION_TEMPLATE):
        native.set("data.template", None if values[VISION_TEMPLATE] else "none", VISION_TEMPLATE)


def _engine_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the options of the engine that differ from the learner's, or are named by the engine."""
    dtype = values.native(ENGINE_PRECISION)
    is_policys = dtype == native.get("policy.dtype")
    native.set(f"{OPTIONS}.dtype", None if is_policys else dtype, ENGINE_PRECISION)
    if values[FIRST_SYNC]:
        native.set(f"{OPTIONS}.validate_weights", True, FIRST_SYNC)
    if values["rollout.backend"] == "vllm" and values.is_set(PREFIX_CACHE):
        native.set(f"{OPTIONS}.arguments.enable_prefix_caching", values[PREFIX_CACHE], PREFIX_CACHE)


def _sampling_as_in_training(values: ForeignValues, native: NativeBuilder) -> None:
    """A run that only evaluates samples by the keys of training."""
    for name, value in native.get("rollout").items():
        if name in ("do_sample", "temperature", "top_k", "top_p"):
            native.set(f"validation.sampling.{name}", value, *native.origins[f"rollout.{name}"])
    native.set("validation.sampling.samples", values[GROUP], GROUP)


def math_from_native(foreign: ForeignBuilder) -> None:
    """Set the keys of a run on text."""
    run, data = foreign.experiment, foreign.experiment.data
    foreign.apply(RULES)
    max_steps = data.max_steps if data and data.epochs is not None else run.training.steps
    foreign.set(MAX_STEPS, -1 if max_steps is None else max_steps)
    prompt, response = run.rollout.max_prompt_tokens, run.rollout.max_response_tokens
    foreign.set(SEQUENCE, run.rollout.engine_options.max_model_tokens or prompt + response)
    if run.reward is not None:
        foreign.set(SCALE, run.reward.scale)
        foreign.set(WRONG, run.reward.wrong_reward)
    foreign.set_native(ENGINE_PRECISION, run.rollout.engine_options.dtype)
    caching = run.rollout.engine_options.arguments.get("enable_prefix_caching")
    foreign.set(PREFIX_CACHE, True if caching is None else caching)
    if data is not None:
        is_training_batch = data.validation_batch in (None, run.training.groups_per_step)
        foreign.set(VALIDATION_BATCH, None if is_training_batch else data.validation_batch)
        foreign.apply(DATA_RULES)
    optimizer_from_native(foreign)
