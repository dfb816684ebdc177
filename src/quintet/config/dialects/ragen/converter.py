"""Conversion of RAGEN's `config/base.yaml` of early 2025: multi-turn agents in a text environment."""

from collections.abc import Iterator
from typing import Any

from quintet.config.capabilities import Capability
from quintet.config.checks.engines import runs_by_default
from quintet.config.dialects.algorithm_choice import ADVANTAGE, choose, export_name, set_options
from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import Derived, MiniBatches, OptionalSection, Same, loggers, lora_section
from quintet.config.dialects.ledger import load_constants
from quintet.config.dialects.ragen import agent_runs
from quintet.config.dialects.ragen.custom_envs import envs_tree
from quintet.config.dialects.ragen.dialect import is_agent_run
from quintet.config.dialects.ragen.key_values import format_devices, parse_devices, parse_loggers
from quintet.config.dialects.supported_runs import require_env
from quintet.config.native.experiment import Experiment
from quintet.config.problems import ConfigProblem

DEFAULT_START_STATES = 10_000
"""Start states in RAGEN's training and validation files."""
GROUPS = "training.train_batch_size"
SAMPLES = "training.n_rollout"
BATCH = "training.ppo_batch_size"
STEPS = "training.total_training_steps"
EPOCHS = "training.total_epochs"
START_STATES = "training.train_data_num"
VALIDATION_EPISODES, VALIDATION_BATCH = "training.val_data_num", "training.val_batch_size"
START = "training.max_start_length"
RESPONSE = "training.max_response_length"
OBSERVATION = "training.max_obs_length"
TURNS, ESTIMATOR, PROJECT = "training.max_turns", "optimization.adv_estimator", "trainer.project_name"
DEVICES, ENV = "system.cuda_visible_devices", "sft.env_type"
ALONE, FIRST = "rl_or_sft", "training.use_sft"
EARLY_ENVS = ("frozenlake", "sokoban")


def _start_states(drawn: int | None) -> int:
    """Return the number of start states: those of RAGEN's file, or fewer if only some are drawn."""
    return min(drawn or DEFAULT_START_STATES, DEFAULT_START_STATES)


RULES = (
    Same("rollout.max_turns", TURNS),
    Same("rollout.max_start_tokens", START, fallback="rollout.max_prompt_tokens"),
    Same("rollout.max_observation_tokens", OBSERVATION, fallback="rollout.max_prompt_tokens"),
    Same("rollout.max_response_tokens", RESPONSE),
    MiniBatches(BATCH, (GROUPS, SAMPLES), ("training.groups_per_step", "training.samples_per_group")),
    # `mask_state` is another name of `state_masking`
    Derived(
        "algorithm.train_on_observations",
        ("training.state_masking", "training.mask_state"),
        lambda masking, mask: not (masking or mask),
        lambda trains: (not trains,),
    ),
    # RAGEN's code never reads the value of `length_penalty`
    Derived(
        "algorithm.shaping.length_penalty",
        ("training.length_penalty",),
        lambda penalty: 1.0 if penalty else None,
        lambda penalty: (penalty > 0,),
        import_none=False,
    ),
    OptionalSection("algorithm.kl", "optimization.kl_coef", off_value=0),
    Derived(
        "training.start_states",
        (START_STATES,),
        lambda states: states if 0 < (states or 0) < DEFAULT_START_STATES else None,
        lambda states: (states,),
        import_none=False,
        export_none=False,
    ),
    # episodes that fill no whole batch are dropped
    Derived(
        "validation.episodes",
        (VALIDATION_EPISODES, VALIDATION_BATCH),
        lambda episodes, batch: _start_states(episodes) // batch * batch,
        lambda episodes: (episodes, 1 if episodes % 10 else 10),
    ),
    loggers("tracking.loggers", "logging.mode", parse=parse_loggers),
    Derived(
        "tracking.rendered_episodes",
        ("logging.log_images", "logging.log_n_image_per_batch"),
        lambda enabled, episodes: episodes if enabled else None,
        lambda episodes: (True, episodes) if episodes else (False,),
        import_none=False,
    ),
    Derived("placement.visible_devices", (DEVICES,), parse_devices, format_devices, export_none=False),
)
SFT_RULES = (
    loggers("sft.loggers", "sft.training.logger", parse=parse_loggers),
    lora_section("sft.training", scalar=False),
)


def conflicts(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield the problems between keys: batch sizes that do not divide, too few start states, wrong device lists."""
    if is_agent_run(values.dialect):
        yield from agent_runs.conflicts(values)
        return
    total = values[GROUPS] * values[SAMPLES]
    step = f"episodes of a step, from {values.describe(GROUPS, SAMPLES)}"
    yield from values.divisor_problems(BATCH, total, step)
    states = _start_states(values[START_STATES])
    if values[STEPS] is None and values[GROUPS] > states:
        problem = f"there are only {states} start states, from {values.describe(START_STATES)}"
        yield values.problem(GROUPS, problem, f"at most: {GROUPS}={states}")
    episodes, batch = values[VALIDATION_EPISODES], values[VALIDATION_BATCH]
    if 0 < (episodes or 0) < batch:
        problem = f"fewer than one validation batch, {values.describe(VALIDATION_BATCH)}"
        yield values.problem(
            VALIDATION_EPISODES, problem, f"at least: {VALIDATION_EPISODES}={batch}, or {VALIDATION_BATCH}={episodes}"
        )


def to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Convert a RAGEN configuration."""
    if is_agent_run(values.dialect):
        agent_runs.to_native(values, native)
        return
    native.set("policy.preset", None, "model.base_model")
    native.set("warm_start", None, ALONE)
    native.set_from_keys(values.dialect.specs().values())
    estimator = values.native(ESTIMATOR)
    if values[SAMPLES] == 1 and estimator == "grpo":
        estimator = "arpo"
        settings = f"{values.describe(ESTIMATOR)} with {values.describe(SAMPLES)}"
        native.remarks.append(f"{settings}: there is nothing to compare, and each episode has its reward as advantage")
    choose(native, ADVANTAGE, estimator, ESTIMATOR, SAMPLES)
    set_options(native, ADVANTAGE, dict.fromkeys(("lam", "turn_gamma", "turn_lam"), (1.0, ())))
    if values[ENV] not in EARLY_ENVS:
        native.require(ENV, Capability.ENV_VARIANTS)
    native.set_constants(load_constants("ragen", "ragen"))
    if runs_by_default("vllm"):
        native.set("rollout.engine", "vllm")
    native.apply(RULES)
    turns = values[TURNS]
    longest = values[START] + values[RESPONSE] * (turns - 1) + values[OBSERVATION] * turns
    native.set("rollout.max_prompt_tokens", longest, START, RESPONSE, OBSERVATION, TURNS)
    steps = values[STEPS] or _start_states(values[START_STATES]) // values[GROUPS] * values[EPOCHS]
    native.set("training.steps", steps, STEPS, EPOCHS, GROUPS, START_STATES)
    native.set("tracking.project", values[PROJECT], PROJECT)
    native.set("output_dir", f"runs/{values[PROJECT]}", PROJECT)
    if values[ALONE] != "sft" and not values[FIRST]:
        native.set("sft", None, ALONE, FIRST)
        return
    native.set("sft.then_reinforce", values[ALONE] != "sft", FIRST, ALONE)
    native.set("sft.final_weights", "best")
    native.apply(SFT_RULES)


def base_tree(experiment: Experiment) -> dict[str, Any]:
    """Return the keys that select RAGEN's reference for a run.

    Raises:
        ConfigError: RAGEN has no such environment.
    """
    sft, lists_coordinates = experiment.sft, "coordinates" in getattr(experiment.env, "observation", "")
    if sft is None and (experiment.envs or experiment.env.name not in EARLY_ENVS or lists_coordinates):
        return agent_runs.agent_tree(envs_tree(experiment))
    require_env(experiment, "RAGEN", EARLY_ENVS)
    if sft is None:
        return {}
    return {"training": {"use_sft": True}} if sft.then_reinforce else {"rl_or_sft": "sft"}


def from_native(foreign: ForeignBuilder) -> None:
    """Convert a native run to RAGEN's format."""
    if is_agent_run(foreign.dialect):
        agent_runs.from_native(foreign)
        return
    run, sft = foreign.experiment, foreign.experiment.sft
    export_name(foreign, ADVANTAGE, ESTIMATOR)
    foreign.apply(RULES)
    foreign.set(STEPS, run.training.steps)
    foreign.set(PROJECT, run.tracking.project or run.output_dir.removeprefix("runs/"))
    foreign.set(ALONE, "sft" if sft and not sft.then_reinforce else "rl")
    foreign.set(FIRST, sft is not None and sft.then_reinforce)
    if sft is not None:
        foreign.apply(SFT_RULES)
