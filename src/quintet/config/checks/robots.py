"""Settings that a run on a simulator cannot have, and settings of simulators in other runs."""

from collections.abc import Iterator
from typing import Any

from quintet.config.composed import ComposedConfig, config_value
from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.robot_simulators import ManiSkillOptions, option_errors
from quintet.config.problems import ConfigProblem
from quintet.config.schema import format_value

NO_TEXT = "a policy of robots outputs actions, not text"
UNREAD: dict[str, tuple[str, ...]] = {
    NO_TEXT: (
        *("rollout.ignore_end", "rollout.stop", "rollout.thoughts"),
        *("rollout.state_reward", "rollout.binary_reward", "rollout.window_size", "rollout.top_p"),
        *("rollout.repetition_penalty", "validation.sampling.top_p", "validation.sampling.repetition_penalty"),
        *("rollout.think", "rollout.response_format", "rollout.action_separator", "rollout.ignore_case"),
        *("rollout.numbered_actions", "rollout.unknown_actions", "rollout.strip_special_tokens"),
        *("rollout.format_penalty", "rollout.format_reward", "rollout.min_p", "validation.sampling.min_p"),
        *("rollout.end_token", "rollout.pad_token", "rollout.max_start_tokens", "rollout.max_observation_tokens"),
        *("rollout.max_concurrent", "validation.prompts_per_device"),
        *("policy.vision.freeze", "policy.vision.min_pixels", "policy.vision.max_pixels"),
    ),
    "rollouts of robots do not overlap with training": (
        *("rollout.async_ratio", "rollout.partial", "rollout.max_staleness", "training.pipelined"),
    ),
    "robots are scored by their simulator": ("reward",),
    "robots act in their simulator, not on prompts": ("data",),
    "start states of robots come from their simulator": (
        *("training.start_states", "training.start_state_files", "training.shuffle_start_states"),
        "validation.start_state_files",
    ),
    "the reference of robots is their own policy at the start": ("reference.path",),
    "the value head of robots is a part of their policy": ("critic.path",),
    "each rank trains on the chunks of its own robots": ("actor.balance_ranks",),
}
"""Keys that a run on a simulator does not read, by the reason."""
OF_SIMULATORS = (*("policy.vla", "critic.shares_policy", "placement.offload_envs", "validation.simulator"),)
"""Keys that only a run on a simulator reads, besides those of its algorithm (`chunk_algorithms.py`)."""
SPLITS = ("tensor", "pipeline", "context", "ulysses", "expert")


def robot_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield the settings that contradict the kind of run: on a simulator, or not."""
    config = composed.experiment
    if not config.env.is_simulator:
        yield from _unread(composed, OF_SIMULATORS, "only a run on a simulator (env.name=simulator) reads it")
        for name in (name for name, entry in config.envs.items() if entry.env.is_simulator):
            problem = "robots are not mixed with other environments"
            yield composed.problem(f"envs.{name}.env", problem, "envs={} env.name=simulator")
        return
    for reason, names in UNREAD.items():
        yield from _unread(composed, names, reason)
    if config.sft is not None:
        problem = "runs on simulators learn from demonstrations by warm_start"
        yield composed.problem("sft", problem, "sft=null")
    yield from _option_problems(composed)
    yield from _learner_problems(composed)
    if not config.validation.only:
        yield from _algorithm_problems(composed)


def _option_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield a problem of each option that a simulator lacks, or whose value it does not take, and of another robot in
    ManiSkill than the policy controls."""
    config = composed.experiment
    for section, env in (("env", config.env), ("validation.simulator", config.validation.simulator)):
        if isinstance(env, SimulatorConfig):
            for option, reason in option_errors(env.simulator, env.options):
                others = {name: value for name, value in env.options.items() if name != option.partition(".")[0]}
                rest = ", ".join(f"{name}: {format_value(value)}" for name, value in others.items())
                yield composed.problem(f"{section}.options.{option}", reason, f"{section}.options={{{rest}}}")
            yield from _setup_problems(composed, section, env)


def _setup_problems(composed: ComposedConfig, section: str, env: SimulatorConfig) -> Iterator[ConfigProblem]:
    vla, option = composed.experiment.policy.vla, f"{section}.options.policy_setup"
    robot = env.options.get("policy_setup", ManiSkillOptions.model_fields["policy_setup"].default)
    if env.simulator == "maniskill" and vla is not None and vla.policy_setup not in (None, robot):
        problem = f"the simulator has another robot, {option} = {format_value(robot)}; set both to the same"
        yield composed.problem("policy.vla.policy_setup", problem)


def _unread(composed: ComposedConfig, names: tuple[str, ...], reason: str) -> Iterator[ConfigProblem]:
    # what a framework fixes is no wish of the user
    for key in (name for name in names if _is_set(composed, name)):
        value, default = composed.value(key), config_value(Experiment(), key)
        if value != default and value not in (None, ()):
            yield composed.problem(key, reason, f"{key}={format_value(_plain(default))}")


def _is_set(composed: ComposedConfig, key: str) -> bool:
    sources = [source for name, source in composed.provenance.items() if name == key or name.startswith(f"{key}.")]
    return any(source not in ("default", "this dialect") and not source.endswith(": reference") for source in sources)


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json") if hasattr(value, "model_dump") else value


def _learner_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    config = composed.experiment
    if config.rollout.engine != "hf":
        key = "rollout.engine"
        yield composed.problem(key, "the policy of robots computes its actions itself", f"{key}=hf")
    if config.actor.backend == "megatron":
        key = "actor.backend"
        yield composed.problem(key, "this backend has no action policies", f"{key}=fsdp2")
    for name in SPLITS:
        if getattr(config.actor.parallel, name) > 1:
            key = f"actor.parallel.{name}"
            yield composed.problem(key, "an action policy is not split over devices", f"{key}=1")


def _algorithm_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    config, algorithm = composed.experiment, composed.experiment.algorithm
    if config.needs_critic and not config.critic.shares_policy:
        key = "critic.shares_policy"
        problem = f"{algorithm.advantage.name} of robots learns from a value head in the policy"
        yield composed.problem(key, problem, f"{key}=true, or algorithm.advantage.name=grpo")
    yield from _group_problems(composed, config)


def _group_problems(composed: ComposedConfig, config: Experiment) -> Iterator[ConfigProblem]:
    key = "env.fixed_start_states"
    if config.algorithm.advantage.needs_several_samples and not composed.value(key):
        name = config.algorithm.advantage.name
        problem = f"{name} compares the episodes of a group, which must start from the same state"
        yield composed.problem(key, problem, f"{key}=true")
