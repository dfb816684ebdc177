"""Conversion of RLinf's runs on simulators."""

import math

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import Derived, OptionalSection, Same, first_of
from quintet.config.dialects.ledger import is_effective, load_constants
from quintet.config.dialects.rlinf.algorithm import GROUP, TASK, newer_algorithm_from_native, newer_algorithm_to_native
from quintet.config.dialects.rlinf.backend import PRECISION
from quintet.config.dialects.rlinf.dialect import INHERITED
from quintet.config.dialects.rlinf.robot_constraints import (
    BATCH,
    CHUNK,
    EPOCHS,
    EVAL_ENVS,
    EVAL_EPOCHS,
    EVAL_GROUP,
    KIND,
    MAX_STEPS,
    NUM_ENVS,
    SETUP,
    VALUE_HEAD,
    chunk_steps,
    default_num_envs,
    samples_per_step,
)
from quintet.config.dialects.rlinf.simulators import SIDES, episode_steps, simulator_from_native, simulator_to_native
from quintet.config.native.envs import SimulatorConfig
from quintet.config.plan.robot_batches import robot_arithmetic

LORA = "actor.model.is_lora"
LORA_RANK = "actor.model.lora_rank"
LORA_PATH = "actor.model.lora_path"
ACTION_SIZE = "actor.model.action_dim"
RESPONSE, PROMPT = "algorithm.length_params.max_new_token", "runner.max_prompt_length"
SAMPLES, TEMPERATURE = "actor.model.do_sample", "algorithm.sampling_params.temperature"
TRAIN_TEMPERATURE, EVAL_TEMPERATURE = (
    "algorithm.sampling_params.temperature_train",
    "algorithm.sampling_params.temperature_eval",
)
POLICY_PROMPT = "actor.model.max_prompt_length"
HIDDEN_SIZE = "actor.model.hidden_size"
STATE_HIDDEN_SIZE = "actor.model.hidden_dim"
WARMUP, UPDATE_EPOCHS = "actor.optim.critic_warmup_steps", "algorithm.update_epoch"
NORMALIZATION = "actor.model.unnorm_key"
IMAGE_SIZE = "actor.model.image_size"
VOCABULARY = "actor.model.vocab_size"
SETUP_OPTION = "options.policy_setup"
MIN_RATE, RATE = "actor.optim.min_lr", "actor.optim.lr"
RULES = (
    Same("env.epochs", EPOCHS),
    Derived(
        "validation.simulator.epochs",
        (EVAL_EPOCHS,),
        lambda epochs: max(1, epochs),
        lambda epochs: (epochs,),
        export_none=False,
    ),
    Same("validation.sampling.samples", EVAL_GROUP),
    first_of("training.samples_per_group", GROUP, "env.train.group_size"),
    OptionalSection(
        "policy.lora",
        LORA,
        (
            first_of("policy.lora.rank", LORA_RANK, LORA),
            Derived("policy.lora.alpha", (LORA_RANK, LORA), lambda rank, enabled: float(rank), lambda alpha: ()),
        ),
        on_value=True,
    ),
    Derived(
        "validation.only",
        ("runner.only_eval", TASK),
        lambda only_eval, task: only_eval or task == "embodied_eval",
        lambda only: (only,),
    ),
    Derived(
        "training.steps",
        ("runner.max_epochs", "runner.max_steps"),
        lambda epochs, limit: epochs if limit < 0 else min(epochs, limit),
        lambda steps: (steps,) if steps else (1, 0),
    ),
    Derived(
        "actor.optimizer.min_learning_rate_ratio",
        (MIN_RATE, RATE),
        lambda lowest, peak: min(1.0, lowest / peak),
        lambda ratio: (),
    ),
    Derived(
        "rollout.engine_options.max_model_tokens",
        ("algorithm.length_params.max_length", "runner.seq_length"),
        min,
        lambda longest: (longest, max(longest, 2048)),
        export_none=False,
    ),
)


def embodied_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Convert a run on simulators."""
    native.set("env.name", "simulator", TASK, "env.train.env_type")
    native.set_constants(load_constants("rlinf", "rlinf_embodied"))
    native.apply(RULES)
    newer_algorithm_to_native(native)
    for prefix, env in SIDES.items():
        simulator_to_native(values, native, prefix, env)
        if values[f"{prefix}env_type"] == "maniskill" and values[SETUP]:
            # the robot of the policy is that of the task; its controller follows from it
            native.set(f"{env}.{SETUP_OPTION}", values[SETUP], SETUP)
    _inherited_to_native(values, native)
    _aggregation_to_native(native)
    _offload_to_native(values, native)
    _policy_to_native(values, native)
    _episodes_to_native(values, native)
    _sampling_to_native(values, native)


def _policy_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    if values[LORA]:
        # the reference's adapter is only an example
        native.set("policy.lora.path", values[LORA_PATH] if values.is_set(LORA_PATH) else None, LORA_PATH, LORA)
    native.set("policy.vla.image_size", values[IMAGE_SIZE][-2:], IMAGE_SIZE)
    for key, name in ((HIDDEN_SIZE, "policy.vla.hidden_size"), (VOCABULARY, "policy.vla.vocabulary")):
        if not values.is_set(key):
            # the reference's sizes are those of its own policy
            native.set(name, None, key)
    if values[KIND] == "mlp_policy":
        native.set("policy.vla.hidden_size", values[STATE_HIDDEN_SIZE], STATE_HIDDEN_SIZE, KIND)
    for key, rollout_key, name in (
        (PRECISION, "rollout.model.precision", "policy.dtype"),
        (NORMALIZATION, "rollout.unnorm_key", "policy.vla.normalization_key"),
    ):
        if values[rollout_key] is not None and not values.is_set(key):
            native.set(name, values.native(rollout_key), rollout_key)
        elif values[rollout_key] is not None:
            native.set(name, values.native(key), key, rollout_key)
    if values[POLICY_PROMPT] is not None:
        native.set("rollout.max_prompt_tokens", values[POLICY_PROMPT], POLICY_PROMPT)
        if values.is_set(PROMPT) and values[PROMPT] != values[POLICY_PROMPT]:
            native.remarks.append(f"{values.describe(PROMPT)} has no effect: {values.describe(POLICY_PROMPT)}")
    tokens = values[RESPONSE] or values[CHUNK] * values[ACTION_SIZE]
    native.set("rollout.max_response_tokens", tokens, RESPONSE, CHUNK, ACTION_SIZE)
    native.set("rollout.max_actions_per_turn", values[CHUNK], CHUNK)
    native.set("rollout.max_turns", math.ceil(episode_steps(values, "env.train.") / values[CHUNK]), MAX_STEPS, CHUNK)


def _sampling_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the temperatures of training and of evaluations."""
    if values[TRAIN_TEMPERATURE] is not None:
        native.set("rollout.temperature", values[TRAIN_TEMPERATURE], TRAIN_TEMPERATURE)
    origins: tuple[str, ...] = (EVAL_TEMPERATURE,)
    temperature = values[EVAL_TEMPERATURE]
    if temperature is None:
        temperature, origins = (native.get("rollout.temperature") if values[SAMPLES] else 0.0), (SAMPLES, TEMPERATURE)
    if temperature > 0:
        native.set("validation.sampling.temperature", temperature, *origins)
    native.set("validation.sampling.do_sample", temperature > 0, *origins)


def _inherited_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set keys of environments that older files have in the section `algorithm`."""
    specs = values.dialect.specs()
    for prefix, env in SIDES.items():
        for name in INHERITED:
            older, key = f"algorithm.{name}", f"{prefix}{name}"
            is_used = values.is_set(older) and not values.is_set(key)
            if is_used and is_effective(specs[key], specs, values.__getitem__):
                native.set(f"{env}.{specs[key].native[0].rpartition('.')[2]}", values[older], older)


def _aggregation_to_native(native: NativeBuilder) -> None:
    """Weight episodes equally if each robot has one that may end early; RLinf masks no actions otherwise."""
    keys = ("env.auto_reset", "env.ignore_terminations")
    aggregation = "token-mean" if any(map(native.get, keys)) else "seq-mean-token-mean"
    native.set("algorithm.aggregation", aggregation, *(origin for key in keys for origin in native.origins[key]))


def _offload_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set whether simulators are freed outside rollouts: newer files say so for training and evaluation."""
    shared, training, evaluation = (f"env.{part}enable_offload" for part in ("", "train.", "eval."))
    newer = [key for key in (training, evaluation) if values.is_set(key)]
    keys = newer or [shared]
    native.set("placement.offload_envs", any(values[key] for key in keys), *keys)
    if newer and len({values[key] for key in newer}) > 1:
        native.remarks.append(f"{values.describe(*newer)}: both simulators are freed outside rollouts")


def _episodes_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    num_envs = values[NUM_ENVS] or default_num_envs(values)
    if not values[NUM_ENVS]:
        native.remarks.append(f"{NUM_ENVS} = null: using {num_envs}, whose samples fill {values.describe(BATCH)}")
    group, origins = values[GROUP], (NUM_ENVS, EPOCHS, GROUP)
    if num_envs * values[EPOCHS] % group:
        # only algorithms that this version lacks have no groups
        group = 1
        native.set("training.samples_per_group", group, *origins)
    native.set("training.groups_per_step", num_envs * values[EPOCHS] // group, *origins)
    total = samples_per_step(values)
    updates = 1 if total % values[BATCH] else total // values[BATCH]
    native.set("training.mini_batches", updates, BATCH, NUM_ENVS, EPOCHS, MAX_STEPS)
    if values[WARMUP] and native.get("algorithm.advantage.name") == "gae":
        steps = math.ceil(values[WARMUP] / (updates * values[UPDATE_EPOCHS]))
        native.set("critic.warmup_steps", steps, WARMUP, BATCH, UPDATE_EPOCHS)
    if values[VALUE_HEAD] and native.get("algorithm.advantage.name") != "gae":
        native.remarks.append(f"{values.describe(VALUE_HEAD)} has no effect: no value is trained")
    if values[EVAL_ENVS]:
        per_env = values[EVAL_EPOCHS] * _episodes_per_epoch(values)
        episodes = max(1, values[EVAL_ENVS] * per_env // values[EVAL_GROUP])
        native.set("validation.episodes", episodes, EVAL_ENVS, EVAL_GROUP, EVAL_EPOCHS)


def _episodes_per_epoch(values: ForeignValues) -> int:
    """Return the episodes that an environment completes in an epoch of an evaluation."""
    actions = chunk_steps(values, "eval") * values[CHUNK]
    return max(1, actions // episode_steps(values, "env.eval.")) if values["env.eval.auto_reset"] else 1


def embodied_from_native(foreign: ForeignBuilder) -> None:
    """Set the keys of a run on simulators."""
    run = foreign.experiment
    env = foreign.experiment.env
    vla = foreign.experiment.policy.vla
    foreign.apply(RULES)
    newer_algorithm_from_native(foreign)
    for prefix, section in SIDES.items():
        simulator_from_native(foreign, prefix, section)
    for part in ("", "train.", "eval."):
        foreign.set(f"env.{part}enable_offload", run.placement.offload_envs)
    if (setup := foreign.native_value(f"env.{SETUP_OPTION}")) is not None:
        foreign.set(SETUP, setup)
    if (adapter := foreign.native_value("policy.lora.path")) is not None:
        foreign.set(LORA_PATH, adapter)
    if isinstance(env, SimulatorConfig):
        numbers = robot_arithmetic(run)
        foreign.set(BATCH, numbers.samples // run.training.mini_batches)
        foreign.set(WARMUP, run.critic.warmup_steps * numbers.optimizer_steps_per_step)
    _sampling_from_native(foreign)
    foreign.set(MIN_RATE, run.actor.optimizer.min_learning_rate_ratio * run.actor.optimizer.learning_rate)
    default = vla.action_chunk * vla.action_dim if vla else None
    response = run.rollout.max_response_tokens
    foreign.set(RESPONSE, None if response == default else response)
    foreign.set(IMAGE_SIZE, list(vla.image_size) if vla else [224, 224])
    if run.policy.kind == "mlp":
        foreign.set(STATE_HIDDEN_SIZE, vla.hidden_size if vla else None)


def _sampling_from_native(foreign: ForeignBuilder) -> None:
    sampling, temperature = foreign.experiment.validation.sampling, foreign.experiment.rollout.temperature
    is_same = sampling.do_sample and sampling.temperature == temperature
    foreign.set(SAMPLES, is_same)
    foreign.set(EVAL_TEMPERATURE, sampling.temperature if sampling.do_sample and not is_same else None)
