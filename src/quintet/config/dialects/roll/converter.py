"""Conversion of ROLL's pipelines: workers that train, generate and score, on prompts from files or on episodes.

The reference omits much of what a ROLL file needs. In its place:

- No key names the run or its model; the keys of `roll_run.yaml` do. Without `pretrain` the policy is the native
  schema's small model. The critic starts from the policy.
- The kind of run follows from the sections of a file (`kinds.py`). In files with `train_env_manager`, environments are
  those of `custom_envs` (`agentic.py`). In others, prompts come from `actor_train.data_args.file_name` if the user set
  it; otherwise the native default environment runs, after its warm start.
- Without a section `rewards`, the verifier is that of ROLL's `MathRuleRewardWorker`, the native `math_rule`.
- No key names the estimator; `adv_estimator` and others of `roll_algorithm.yaml` do. Without it, a `critic` section
  means PPO with GAE, ROLL's own default, and otherwise the responses to a prompt are compared (GRPO).
- A `reference` section creates a reference model. ROLL measures the divergence from it by `k1` with coefficient 0,
  unless `add_token_level_kl` or `use_kl_loss` is true: these create one without such a section, too.
- Everything else has ROLL's defaults: AdamW with linear decay to 0, losses with ratios clipped by 0.2.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import Same, file_list
from quintet.config.dialects.engine_choice import arguments_from_native, arguments_to_native
from quintet.config.dialects.ledger import load_constants
from quintet.config.dialects.roll.agentic import envs_to_native
from quintet.config.dialects.roll.algorithm import algorithm_from_native, algorithm_to_native
from quintet.config.dialects.roll.constraints import conflicts as run_conflicts
from quintet.config.dialects.roll.deepspeed import deepspeed_problems
from quintet.config.dialects.roll.judge import served_devices
from quintet.config.dialects.roll.kinds import Kind, kind_of
from quintet.config.dialects.roll.learners import WeightDtype, learners_from_native, learners_to_native, strategy_name
from quintet.config.dialects.roll.rewards import domain_names, filters_from_native, rewards_to_native
from quintet.config.dialects.roll.run_settings import (
    RESUME,
    model_to_native,
    paths_to_native,
    profile_problems,
    run_to_native,
    settings_from_native,
)
from quintet.config.dialects.roll.sft import STUDENT, TEACHER, WORKER, distillation_to_native, sft_to_native
from quintet.config.dialects.roll.unsupported_runs import refuse_unsupported_run
from quintet.config.dialects.roll.workers import (
    STRATEGY,
    STRATEGY_OPTIONS,
    Worker,
    exported_learners,
    ineffective_worker_keys,
    is_agentic,
    max_response,
    placement_from_native,
    placement_to_native,
    workers,
)
from quintet.config.dialects.supported_runs import require_env, require_no_stages
from quintet.config.dotted import unflatten
from quintet.config.native.experiment import Experiment
from quintet.config.problems import ConfigProblem

WARMUP_STEPS = "actor_train.training_args.warmup_steps"
FILE = "actor_train.data_args.file_name"
TEMPLATE = "actor_train.data_args.template"
PROMPT = "actor_train.data_args.prompt"
MESSAGES = "actor_train.data_args.messages"
GLOBAL_TEMPLATE, WORKERS = "global_template", "actor_train.data_args.preprocessing_num_workers"
ASYNC_RATIO, WORKER_GPUS = "async_generation_ratio", "actor_infer.num_gpus_per_worker"
SAMPLES, TEMPERATURE = "validation.generating_args.do_sample", "validation.generating_args.temperature"
TRAIN_FILES = file_list("data.train_files", FILE, empty="xxx/train.json")
VALIDATION_FILES = file_list("data.validation_files", "validation.data_args.file_name")
GENERATION_RULES = (
    WeightDtype("rollout.engine_options.dtype", "actor_infer.model_args.dtype"),
    Same("placement.rollout.devices_per_worker", WORKER_GPUS),
    Same("rollout.async_ratio", ASYNC_RATIO, to_value=float),
)
LOAD_FORMAT = Same(
    "rollout.engine_options.load_format", "actor_infer.strategy_args.strategy_config.load_format", export_none=False
)
VALIDATION_SAMPLING = (
    Same("validation.sampling.temperature", TEMPERATURE),
    Same("validation.sampling.top_p", "validation.generating_args.top_p"),
    Same("validation.sampling.top_k", "validation.generating_args.top_k", to_value=lambda top_k: max(0, top_k)),
)

STAGES = {Kind.SFT: (WORKER,), Kind.DISTILLATION: (STUDENT, TEACHER)}
"""Workers of supervised runs."""


def conflicts(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems between keys.

    Raises:
        UnsupportedRunError: this version has no such runs.
    """
    kind = _kind(values)
    refuse_unsupported_run(kind, values)
    yield from profile_problems(values)
    if kind not in STAGES:
        yield from run_conflicts(values)
        return
    for name in STAGES[kind]:
        yield from deepspeed_problems(Worker(values, name))


def _kind(values: ForeignValues) -> Kind:
    tree: dict[str, Any] = unflatten(dict.fromkeys(values.merged.leaves()))
    return kind_of(tree)


def to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Convert a ROLL configuration."""
    stages = {Kind.SFT: sft_to_native, Kind.DISTILLATION: distillation_to_native}
    if stage := stages.get(_kind(values)):
        stage(values, native)
        return
    native.set_constants(load_constants("roll", "roll"))
    algorithm_to_native(values, native, Worker(values, "critic").is_set)
    absent = _absent_sections(worker.name for worker in workers(values))
    native.set_from_keys(spec for spec in values.dialect.specs().values() if not spec.key.startswith(absent))
    if values[WARMUP_STEPS]:
        # transformers reads the share only if there are no steps
        native.set("actor.optimizer.warmup_ratio", 0.0, WARMUP_STEPS)
    paths_to_native(values, native)
    if is_agentic(values):
        _engine_to_native(Worker(values, "actor_infer"), native)
        envs_to_native(values, native)
    else:
        _prompts_to_native(values, native)
        _generation_to_native(Worker(values, "actor_infer"), native)
        _validation_to_native(values, native)
    run_to_native(values, native)
    model_to_native(values, native)
    learners_to_native(values, native)
    judged = () if is_agentic(values) else (f"rewards.{name}" for name in domain_names(values))
    placement_to_native(values, native, served_devices(values, judged))
    native.remarks += ineffective_worker_keys(values)


def _absent_sections(present: Iterable[str]) -> tuple[str, ...]:
    """Return the prefixes of the keys of workers that a run does not have."""
    return tuple(f"{name}." for name in {"reference", "critic"}.difference(present))


def _prompts_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set prompts from files, each answered in one turn."""
    if not values.is_set(FILE) or values[FILE] is None:
        native.remarks.append(f"{FILE} names no file, so the run uses the native default environment")
        unused = [values.describe(key) for key in (TEMPLATE, PROMPT, MESSAGES) if values.is_set(key)]
        native.remarks += [f"{setting} has no effect: {FILE} names no file" for setting in unused]
        return
    native.set("env", {"name": "prompts"}, FILE)
    TRAIN_FILES.to_native(values, native)
    template = GLOBAL_TEMPLATE if values[GLOBAL_TEMPLATE] is not None else TEMPLATE
    if values[template] != "native":
        native.set("data.template", values[template], template)
    if values[WORKERS] is not None:
        native.set("data.filter_workers", values[WORKERS], WORKERS)
    if values[MESSAGES] is None:
        native.set("data.prompt_key", values[PROMPT], PROMPT)
    else:
        native.set("data.messages_key", values[MESSAGES], MESSAGES)
    native.set("data.filter_long_prompts", True)
    single_turn = {"rollout.max_turns": 1, "rollout.format_penalty": 0.0, "rollout.think": False}
    for key, value in {"warm_start": None, **single_turn}.items():
        native.set(key, value, FILE)
    rewards_to_native(values, native)


def _generation_to_native(engine: Worker, native: NativeBuilder) -> None:
    values = engine.values
    response, lengths = max_response(values)
    native.set("rollout.max_response_tokens", response, *lengths, "validation.generating_args.max_new_tokens")
    _engine_to_native(engine, native)


def _engine_to_native(engine: Worker, native: NativeBuilder) -> None:
    values, ratio = engine.values, engine.values[ASYNC_RATIO]
    native.apply(GENERATION_RULES)
    native.set("rollout.max_staleness", math.ceil(ratio) or None, ASYNC_RATIO)
    native.set("rollout.partial", ratio > 0, ASYNC_RATIO)
    _context_to_native(engine, native)
    if engine.strategy != "hf":
        _parallel_to_native(engine, native)
        LOAD_FORMAT.to_native(values, native)
    arguments_to_native(values, native)


def _parallel_to_native(engine: Worker, native: NativeBuilder) -> None:
    """Set the devices of an engine: ROLL takes vLLM's from its own options if these are set."""
    values = engine.values
    tensor, pipeline = engine.option("tensor_parallel_size"), engine.option("pipeline_parallel_size")
    if engine.strategy == "vllm" and (values[tensor] or values[pipeline]):
        sizes = (values[tensor] or 1, values[pipeline] or 1)
        native.set("rollout.engine_options.tensor_parallel", sizes[0], tensor)
        native.set("rollout.engine_options.pipeline_parallel", sizes[1], pipeline)
        native.set("placement.rollout.devices_per_worker", math.prod(sizes), tensor, pipeline)
    else:
        native.set("rollout.engine_options.tensor_parallel", values[WORKER_GPUS], WORKER_GPUS)


def _context_to_native(engine: Worker, native: NativeBuilder) -> None:
    """Set vLLM's context only if the file does: the reference shows one, and ROLL leaves it to the model."""
    values = engine.values
    target = "rollout.engine_options.max_model_tokens"
    limit = engine.option("max_model_len")
    if native.get(target) is None:
        return
    if not values.is_set(limit):
        native.set(target, None, limit)


def _validation_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set how validation samples: greedily, unless the user wrote a section for it."""
    is_configured = any(key.startswith("validation.") for key in values.merged.sources)
    samples = is_configured and values[SAMPLES] and values[TEMPERATURE] > 0
    native.set("validation.sampling.do_sample", samples, SAMPLES, TEMPERATURE)
    if samples:
        native.apply(VALIDATION_SAMPLING)
    if values[VALIDATION_FILES.foreign] is not None and "data" in native.tree:
        VALIDATION_FILES.to_native(values, native)


def base_tree(experiment: Experiment) -> dict[str, Any]:
    """Return what has a meaning by its mere presence: prompt files, sampled validation, critic, reference, context.

    Raises:
        ConfigError: ROLL has no such environment, or no such kind of run.
    """
    require_env(experiment, "ROLL", ("prompts", "frozenlake"))
    require_no_stages(experiment, "ROLL")
    tree: dict[str, Any] = {}
    if experiment.validation.sampling.do_sample:
        tree[SAMPLES] = True
    if experiment.env.name == "prompts":
        tree[FILE] = TRAIN_FILES.from_value(experiment.data.train_files if experiment.data else ())
    for name in exported_learners(experiment)[1:]:
        tree[f"{name}.{STRATEGY}"] = strategy_name(experiment, name)
    if experiment.resume == "never":
        tree[RESUME] = False
    limit = experiment.rollout.engine_options.max_model_tokens
    if experiment.rollout.engine == "vllm" and limit is not None:
        tree["actor_infer.strategy_args.strategy_config.max_model_len"] = limit
    return unflatten(tree)


def from_native(foreign: ForeignBuilder) -> None:
    """Convert a native run to ROLL's format."""
    run = foreign.experiment
    foreign.set("pretrain", run.policy.path)
    if run.reference.path is not None:
        paths = {"actor_train": run.policy.path, "actor_infer": run.policy.path, "reference": run.reference.path}
        for worker, path in paths.items():
            foreign.set(f"{worker}.model_args.model_name_or_path", path)
    for key in [key for key in foreign.values if key.startswith(_absent_sections(exported_learners(run)))]:
        del foreign.values[key]
    _prompts_from_native(foreign)
    algorithm_from_native(foreign)
    placement_from_native(foreign)
    _generation_from_native(foreign)
    _validation_from_native(foreign)
    learners_from_native(foreign)
    settings_from_native(foreign)
    filters_from_native(foreign)


def _prompts_from_native(foreign: ForeignBuilder) -> None:
    data = foreign.experiment.data
    if foreign.experiment.env.name != "prompts":
        foreign.set(FILE, None)
    elif data is not None:
        TRAIN_FILES.from_native(foreign)
        foreign.set(TEMPLATE, data.template or "native")
        foreign.set(MESSAGES, data.messages_key)
        if data.messages_key is None:
            foreign.set(PROMPT, data.prompt_key)
        if data.filter_workers > 1:
            foreign.set(WORKERS, data.filter_workers)
        if foreign.experiment.reward is not None and foreign.experiment.reward.workers is not None:
            foreign.set("rewards.math_rule.world_size", foreign.experiment.reward.workers)


def _generation_from_native(foreign: ForeignBuilder) -> None:
    rollout = foreign.experiment.rollout
    foreign.set("response_length", rollout.max_response_tokens)
    foreign.apply(GENERATION_RULES)
    if rollout.engine != "hf":
        LOAD_FORMAT.from_native(foreign)
    if rollout.engine == "vllm" and rollout.engine_options.pipeline_parallel > 1:
        for name in ("tensor", "pipeline"):
            size = getattr(rollout.engine_options, f"{name}_parallel")
            foreign.set(f"actor_infer.{STRATEGY_OPTIONS}.{name}_parallel_size", size)
    arguments_from_native(foreign, dict.fromkeys(("vllm", "sglang"), f"actor_infer.{STRATEGY_OPTIONS}"))


def _validation_from_native(foreign: ForeignBuilder) -> None:
    run, sampling = foreign.experiment, foreign.experiment.validation.sampling
    files = run.data.validation_files if run.data else ()
    if sampling.do_sample:
        foreign.apply(VALIDATION_SAMPLING)
    elif sampling.samples > 1 or files:
        foreign.set(SAMPLES, False)
    if files:
        VALIDATION_FILES.from_native(foreign)
