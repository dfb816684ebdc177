"""Settings that a run on a simulator cannot have, and settings of simulators in other runs."""

from collections.abc import Iterator
from typing import Any

from quintet.config.checks.unread_keys import refused_keys
from quintet.config.composed import ComposedConfig, config_value
from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.robot_simulators import ManiSkillOptions, option_errors
from quintet.config.problems import ConfigProblem
from quintet.config.schema import format_value

SPLITS = ("tensor", "pipeline", "context", "ulysses", "expert")


def robot_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield the settings that contradict the kind of run: on a simulator, or not."""
    config = composed.experiment
    if not config.env.is_simulator:
        yield from _unread(composed)
        for name in (name for name, entry in config.envs.items() if entry.env.is_simulator):
            problem = "robots are not mixed with other environments"
            yield composed.problem(f"envs.{name}.env", problem, "envs={} env.name=simulator")
        return
    yield from _unread(composed)
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


def _unread(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield the keys of the user without which the run would be as it is, and which say that it is another one."""
    # what a framework fixes is no wish of the user
    for key, reason in refused_keys(composed.experiment):
        value, default = composed.value(key), config_value(Experiment(), key)
        if _is_set(composed, key) and value != default and value not in (None, ()):
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
