"""Conversion of RLinf's runs on simulators with vision-language-action policies, and of a simulator's own file."""

import math

from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.conversion_rules import Derived, OptionalSection, Same, first_of
from quintet.config.dialects.ledger import load_constants
from quintet.config.dialects.rlinf.constraints import CHUNK, EPOCHS, MAX_STEPS, NUM_ENVS, TASK, samples_per_step
from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.training import TrainingConfig

LORA, LORA_RANK, LORA_PATH = (f"actor.model.{name}" for name in ("is_lora", "lora_rank", "lora_path"))
EVAL_ENVS, EVAL_SAMPLES = "env.eval.total_num_envs", "env.eval.group_size"
GROUP, BATCH, ACTION_SIZE = "algorithm.group_size", "actor.global_batch_size", "actor.model.action_dim"
RESPONSE = "algorithm.length_params.max_new_token"


def _video(native: str, section: str) -> OptionalSection:
    switch = f"{section}.save_video"
    rules = (
        first_of(f"{native}.overlay", f"{section}.info_on_video", switch),
        first_of(f"{native}.directory", f"{section}.video_base_dir", switch, export_none=False),
    )
    return OptionalSection(native, switch, rules, on_value=True)


ENV_FILE_RULES = (
    Same("env.max_steps", "max_episode_steps"),
    Same("env.environments", "total_num_envs"),
    _video("tracking.video", "video_cfg"),
)
RULES = (
    _video("tracking.video", "env.train.video_cfg"),
    _video("tracking.validation_video", "env.eval.video_cfg"),
    Same("env.epochs", EPOCHS),
    Same("env.environments", NUM_ENVS),
    Same("env.max_steps", MAX_STEPS),
    Same("validation.simulator.environments", EVAL_ENVS),
    Same("validation.sampling.samples", EVAL_SAMPLES),
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
        "rollout.engine_options.max_model_tokens",
        ("algorithm.length_params.max_length", "runner.seq_length"),
        min,
        lambda longest: (longest, max(longest, 2048)),
        export_none=False,
    ),
)


def env_file_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Convert a simulator's own file to a run on that simulator with native defaults."""
    native.set_from_keys(values.dialect.specs().values())
    native.set("env.name", "simulator", "env_type")
    native.apply(ENV_FILE_RULES)
    num_envs, group = "total_num_envs", "group_size"
    # 1 leaves the group size to the run
    if values[group] > 1:
        native.set("training.samples_per_group", values[group], group)
    if values[num_envs]:
        native.set("training.groups_per_step", max(1, values[num_envs] // values[group]), num_envs, group)


def env_file_from_native(foreign: ForeignBuilder) -> None:
    """Set the keys of a simulator's own file."""
    foreign.apply(ENV_FILE_RULES)
    samples = foreign.experiment.training.samples_per_group
    foreign.set("group_size", 1 if samples == TrainingConfig().samples_per_group else samples)


def embodied_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Convert a run on simulators."""
    native.set("env.name", "simulator", TASK, "env.train.env_type")
    native.set_constants(load_constants("rlinf", "rlinf_embodied"))
    native.apply(RULES)
    if values[LORA]:
        # the reference's adapter is only an example
        native.set("policy.lora.path", values[LORA_PATH] if values.is_set(LORA_PATH) else None, LORA_PATH, LORA)
    _episodes_to_native(values, native)
    tokens = values[RESPONSE] or values[CHUNK] * values[ACTION_SIZE]
    native.set("rollout.max_response_tokens", tokens, RESPONSE, CHUNK, ACTION_SIZE)
    native.set("rollout.max_actions_per_turn", values[CHUNK], CHUNK)
    native.set("rollout.max_turns", math.ceil(values[MAX_STEPS] / values[CHUNK]), MAX_STEPS, CHUNK)
    if values["actor.model.do_sample"]:
        temperature = "algorithm.sampling_params.temperature"
        native.set("validation.sampling.temperature", values[temperature], temperature, "actor.model.do_sample")


def _episodes_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    for side, env in {"train": "env", "eval": "validation.simulator"}.items():
        for name in ("auto_reset", "ignore_terminations"):
            older = f"algorithm.{name}"
            if values.is_set(older) and not values.is_set(f"env.{side}.{name}"):
                native.set(f"{env}.{name}", values[older], older)
    if values[NUM_ENVS]:
        groups = values[NUM_ENVS] * values[EPOCHS] // values[GROUP]
        native.set("training.groups_per_step", groups, NUM_ENVS, EPOCHS, GROUP)
        updates = max(1, samples_per_step(values) // values[BATCH])
        native.set("training.mini_batches", updates, BATCH, NUM_ENVS, EPOCHS, MAX_STEPS)
    if values[EVAL_ENVS]:
        episodes = max(1, values[EVAL_ENVS] // values[EVAL_SAMPLES])
        native.set("validation.episodes", episodes, EVAL_ENVS, EVAL_SAMPLES)


def embodied_from_native(foreign: ForeignBuilder) -> None:
    """Set the keys of a run on simulators."""
    run, env, vla = foreign.experiment, foreign.experiment.env, foreign.experiment.policy.vla
    foreign.apply(RULES)
    if (adapter := foreign.native_value("policy.lora.path")) is not None:
        foreign.set(LORA_PATH, adapter)
    if isinstance(env, SimulatorConfig) and env.environments:
        samples = env.environments * env.epochs * math.ceil(env.max_steps / (vla.action_chunk if vla else 1))
        foreign.set(BATCH, samples // run.training.mini_batches)
    default = vla.action_chunk * vla.action_dim if vla else None
    response = run.rollout.max_response_tokens
    foreign.set(RESPONSE, None if response == default else response)
