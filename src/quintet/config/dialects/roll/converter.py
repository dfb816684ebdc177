"""Conversion of ROLL's pipelines: workers that train, generate and score, on prompts from files or on episodes.

The reference omits much of what a ROLL file needs. In its place:

- No key names the run or its model; the keys of `roll_run.yaml` do. Without `pretrain` the policy is the native
  schema's small model. The critic starts from the policy.
- No key names an environment. If the user set `actor_train.data_args.file_name`, prompts come from that file; otherwise
  the native default environment runs, after its warm start.
- No key names the verifier: it is that of ROLL's `MathRuleRewardWorker`, the native `math`.
- No key names the estimator; `adv_estimator` and others of `roll_algorithm.yaml` do. Without it, a `critic` section
  means PPO with GAE, ROLL's own default, and otherwise the responses to a prompt are compared (GRPO).
- A `reference` section creates a reference model. ROLL measures the divergence from it by `k1` with coefficient 0,
  unless `add_token_level_kl` or `use_kl_loss` is true: these create one without such a section, too.
- Everything else has ROLL's defaults: AdamW with linear decay to 0, losses with ratios clipped by 0.2.
"""

from __future__ import annotations

import math
from typing import Any

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import Same, file_list, inverted
from quintet.config.dialects.engine_choice import arguments_from_native, arguments_to_native
from quintet.config.dialects.roll.algorithm import algorithm_from_native, algorithm_to_native
from quintet.config.dialects.roll.constraints import conflicts as conflicts
from quintet.config.dialects.roll.key_values import MODEL_DTYPES, SAMPLING_KEYS, VALIDATION
from quintet.config.dialects.roll.learners import (
    dtype_override,
    learners_from_native,
    learners_to_native,
    scorer_strategy,
    trainer_strategy,
)
from quintet.config.dialects.roll.placement import placement_from_native, placement_to_native
from quintet.config.dialects.roll.workers import STRATEGY_OPTIONS, Worker
from quintet.config.dialects.supported_runs import require_env, require_no_stages
from quintet.config.native.experiment import Experiment

FILE, TEMPLATE, PROMPT, MESSAGES = (
    f"actor_train.data_args.{name}" for name in ("file_name", "template", "prompt", "messages")
)
ASYNC_RATIO, WORKER_GPUS = "async_generation_ratio", "actor_infer.num_gpus_per_worker"
ENGINE_DTYPE, LOAD_FORMAT = "actor_infer.model_args.dtype", f"actor_infer.{STRATEGY_OPTIONS}.load_format"
EXAMPLE_FILE = "xxx/train.json"
TRAIN_FILES = file_list("data.train_files", FILE, empty=EXAMPLE_FILE)
VALIDATION_FILES = file_list("data.validation_files", "validation.data_args.file_name")
ASYNC = Same("rollout.async_ratio", ASYNC_RATIO, to_value=float)
CONSTANTS: dict[str, Any] = {
    # more than any run writes: ROLL keeps all checkpoints
    "checkpoint.keep": 1_000_000,
    "rollout.recompute_logprobs": True,
    "algorithm.drop_groups_without_signal": False,
}


def to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Convert a ROLL configuration."""
    specs = values.dialect.specs().values()
    native.set_constants(CONSTANTS)
    native.set_from_keys(spec for spec in specs if not spec.key.startswith(("reference.", "critic.")))
    if values["pretrain"] is not None:
        native.set("policy.preset", None, "pretrain")
        native.set("policy.path", values["pretrain"], "pretrain")
        native.set("warm_start", None, "pretrain")
    _prompts_to_native(values, native)
    _generation_to_native(Worker(values, "actor_infer"), native)
    _validation_to_native(values, native)
    algorithm_to_native(values, native, Worker(values, "critic").is_set)
    learners_to_native(values, native)
    placement_to_native(values, native)


def _prompts_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set prompts from files, each answered in one turn."""
    if not values.is_set(FILE) or values[FILE] is None:
        native.remarks.append(f"{FILE} names no file, so the run uses the native default environment")
        unused = [values.describe(key) for key in (TEMPLATE, PROMPT, MESSAGES) if values.is_set(key)]
        native.remarks += [f"{setting} has no effect: {FILE} names no file" for setting in unused]
        return
    native.set("env", {"name": "prompts"}, FILE)
    TRAIN_FILES.to_native(values, native)
    if values[TEMPLATE] != "native":
        native.set("data.template", values[TEMPLATE], TEMPLATE)
    if values[MESSAGES] is None:
        native.set("data.prompt_key", values[PROMPT], PROMPT)
    else:
        native.set("data.messages_key", values[MESSAGES], MESSAGES)
    native.set("data.filter_long_prompts", True)
    single_turn = {"rollout.max_turns": 1, "rollout.format_penalty": 0.0, "rollout.think": False}
    for key, value in {"reward.kind": "math", "warm_start": None, **single_turn}.items():
        native.set(key, value, FILE)


def _generation_to_native(engine: Worker, native: NativeBuilder) -> None:
    values = engine.values
    lengths = ("response_length", engine.key("generating_args.max_new_tokens"))
    response = min(values[length] for length in lengths if values[length] is not None)
    native.set("rollout.max_response_tokens", response, *lengths, f"{VALIDATION}max_new_tokens")
    native.set("rollout.engine_options.dtype", dtype_override(values, ENGINE_DTYPE), ENGINE_DTYPE)
    native.set("placement.rollout.devices_per_worker", values[WORKER_GPUS], WORKER_GPUS)
    if engine.strategy != "hf":
        native.set("rollout.engine_options.tensor_parallel", values[WORKER_GPUS], WORKER_GPUS)
        native.set("rollout.engine_options.load_format", values[LOAD_FORMAT], LOAD_FORMAT)
    arguments_to_native(values, native)
    ASYNC.to_native(values, native)
    native.set("rollout.max_staleness", math.ceil(values[ASYNC_RATIO]) or None, ASYNC_RATIO)
    native.set("rollout.partial", values[ASYNC_RATIO] > 0, ASYNC_RATIO)


def _validation_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set how validation samples: greedily, unless the user wrote a section for it."""
    is_configured = any(key.startswith("validation.") for key in values.merged.sources)
    switch, temperature, top_p, top_k = (f"{VALIDATION}{name}" for name in ("do_sample", *SAMPLING_KEYS))
    samples = is_configured and values[switch] and values[temperature] > 0
    native.set("validation.sampling.do_sample", samples, switch, temperature)
    if samples:
        native.set("validation.sampling.temperature", float(values[temperature]), temperature)
        native.set("validation.sampling.top_p", float(values[top_p]), top_p)
        native.set("validation.sampling.top_k", max(0, values[top_k]), top_k)
    if values[VALIDATION_FILES.foreign] is not None and "data" in native.tree:
        VALIDATION_FILES.to_native(values, native)


def base_tree(experiment: Experiment) -> dict[str, Any]:
    """Return the sections whose mere presence has a meaning: prompt files, sampled validation, critic, reference.

    Raises:
        ConfigError: ROLL has no such environment, or no such kind of run.
    """
    require_env(experiment, "ROLL", ("prompts", "frozenlake"))
    require_no_stages(experiment, "ROLL")
    tree: dict[str, Any] = {}
    if experiment.validation.sampling.do_sample:
        tree["validation"] = {"generating_args": {"do_sample": True}}
    if experiment.env.name == "prompts":
        files = list(experiment.data.train_files) if experiment.data else []
        tree["actor_train"] = {"data_args": {"file_name": files[0] if len(files) == 1 else files or EXAMPLE_FILE}}
    if experiment.needs_critic:
        tree["critic"] = {"strategy_args": {"strategy_name": trainer_strategy(experiment.critic.backend)}}
    if experiment.algorithm.kl is not None:
        tree["reference"] = {"strategy_args": {"strategy_name": scorer_strategy(experiment)}}
    return tree


def from_native(foreign: ForeignBuilder) -> None:
    """Convert a native run to ROLL's format."""
    run = foreign.experiment
    foreign.set("pretrain", run.policy.path)
    absent = ["reference."] if run.algorithm.kl is None else []
    absent += [] if run.needs_critic else ["critic."]
    for key in [key for key in foreign.values if key.startswith(tuple(absent))]:
        del foreign.values[key]
    _prompts_from_native(foreign)
    algorithm_from_native(foreign)
    placement_from_native(foreign)
    _generation_from_native(foreign)
    _validation_from_native(foreign)
    learners_from_native(foreign)


def _prompts_from_native(foreign: ForeignBuilder) -> None:
    data = foreign.experiment.data
    if foreign.experiment.env.name != "prompts":
        foreign.set(FILE, None)
        return
    TRAIN_FILES.from_native(foreign)
    if data is not None:
        foreign.set(TEMPLATE, data.template or "native")
        foreign.set(MESSAGES, data.messages_key)
        if data.messages_key is None:
            foreign.set(PROMPT, data.prompt_key)


def _generation_from_native(foreign: ForeignBuilder) -> None:
    run, rollout = foreign.experiment, foreign.experiment.rollout
    foreign.set("response_length", rollout.max_response_tokens)
    foreign.set(WORKER_GPUS, run.placement.rollout.devices_per_worker)
    if rollout.engine_options.load_format and rollout.engine != "hf":
        foreign.set(LOAD_FORMAT, rollout.engine_options.load_format)
    arguments_from_native(foreign, dict.fromkeys(("vllm", "sglang"), f"actor_infer.{STRATEGY_OPTIONS}"))
    foreign.set(ENGINE_DTYPE, inverted(MODEL_DTYPES)[rollout.engine_options.dtype or run.policy.dtype])
    ASYNC.from_native(foreign)


def _validation_from_native(foreign: ForeignBuilder) -> None:
    run, sampling = foreign.experiment, foreign.experiment.validation.sampling
    files = run.data.validation_files if run.data else ()
    if sampling.do_sample:
        for name in SAMPLING_KEYS:
            foreign.set(f"{VALIDATION}{name}", getattr(sampling, name))
    elif sampling.samples > 1 or files:
        foreign.set(f"{VALIDATION}do_sample", False)
    if files:
        VALIDATION_FILES.from_native(foreign)
