"""Numbers of robots, chunk steps and samples of a run on a simulator."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from quintet.config.composed import ComposedConfig
from quintet.config.divisors import nearest_divisor, nearest_multiple
from quintet.config.native.envs import SimulatorConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.policy import VlaConfig
from quintet.config.native.robot_simulators import DATA_DIMENSION, METAWORLD_DIMENSIONS
from quintet.config.plan.chunk_steps import ChunkSteps, configured_chunk
from quintet.config.plan.process_layout import process_layout
from quintet.config.problems import ConfigProblem


@dataclass(frozen=True, slots=True)
class RobotArithmetic:
    """Counts of one training step. A sample is one chunk of actions of one robot."""

    robots: int
    """Robots that are simulated at the same time."""
    processes: int
    """Processes that simulate them."""
    simulated_on: tuple[int, ...]
    """Global numbers of the devices whose processes simulate them."""
    sampled_on: tuple[int, ...]
    """Global numbers of the devices that sample their actions."""
    stages: int
    """Parts of the robots that take turns."""
    robots_per_stage: int
    """Robots of one process whose actions one forward pass of a rollout computes."""
    epochs: int
    """Passes over all robots."""
    actions_per_chunk: int
    executed_dimensions: int | None
    """Dimensions of an action that the robot executes; null if all."""
    actions_per_epoch: int
    """Actions of each robot."""
    chunk_steps_per_epoch: int
    """Forward passes of a rollout for each stage."""
    samples: int
    samples_per_mini_batch: int
    optimizer_steps_per_step: int
    images: int
    """Camera images of all samples."""
    image_bytes: int
    """Bytes of these images, uint8 RGB."""


def configured_processes(config: Experiment) -> int:
    """Return the number of processes that the configuration gives to simulators."""
    envs = config.placement.envs
    if envs.devices:
        return len(envs.devices) * envs.processes_per_device
    return max(1, config.env.processes) if isinstance(config.env, SimulatorConfig) else 1


def simulating_ranks(config: Experiment) -> tuple[int, ...]:
    """Return the ranks that simulate robots: those on devices of their own, otherwise the controller if actions are
    sampled on other devices, otherwise all ranks of the actor."""
    layout = process_layout(config)
    if layout.has_standalone("envs"):
        return layout.standalone["envs"]
    return layout.learner_ranks[:1] if layout.has_standalone("rollout") else layout.learner_ranks


def _devices_of(config: Experiment, ranks: Sequence[int]) -> tuple[int, ...]:
    layout = process_layout(config)
    return tuple(sorted({layout.devices[rank] for rank in ranks}))


def robot_arithmetic(config: Experiment) -> RobotArithmetic:
    """Return the counts of a training step of a run on a simulator.

    Raises:
        TypeError: the run has no simulator.
    """
    env = config.env
    vla = config.policy.vla
    training = config.training
    if not isinstance(env, SimulatorConfig):
        raise TypeError("the run has no simulator")
    steps = ChunkSteps.from_config(config)
    layout = process_layout(config)
    ranks = simulating_ranks(config)
    processes = len(ranks) * max(1, env.processes)
    reads_images = "mlp" not in (config.policy.kind, (config.policy.preset or "").removeprefix("state-"))
    images = steps.samples * (vla or VlaConfig()).images * reads_images
    return RobotArithmetic(
        robots=steps.robots,
        processes=processes,
        simulated_on=_devices_of(config, ranks),
        sampled_on=_devices_of(config, layout.standalone.get("rollout", layout.learner_ranks)),
        stages=env.pipeline_stages,
        robots_per_stage=max(1, steps.robots // (processes * env.pipeline_stages)),
        epochs=env.epochs,
        actions_per_chunk=configured_chunk(config),
        executed_dimensions=_executed_dimensions(config, env),
        actions_per_epoch=env.steps_per_epoch or env.max_steps,
        chunk_steps_per_epoch=steps.chunks,
        samples=steps.samples,
        samples_per_mini_batch=steps.samples // training.mini_batches,
        optimizer_steps_per_step=training.mini_batches * training.epochs,
        images=images,
        image_bytes=images * 3 * env.camera_height * env.camera_width,
    )


def _executed_dimensions(config: Experiment, env: SimulatorConfig) -> int | None:
    """Return the dimensions of a published policy's action that the robot executes, None if all; the policy is trained
    on all of them."""
    policy = config.policy
    is_openvla = policy.path is not None and policy.kind in (None, "openvla", "openvla_oft")
    has_more = (policy.vla or VlaConfig()).action_dim == DATA_DIMENSION
    return len(METAWORLD_DIMENSIONS) if is_openvla and env.simulator == "metaworld" and has_more else None


def robot_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield problems unless robots fill groups, stages and processes, and samples fill optimizer steps."""
    config = composed.experiment
    env = config.env
    training = config.training
    numbers = robot_arithmetic(config)
    if not isinstance(env, SimulatorConfig):
        return
    if numbers.samples % training.mini_batches:
        key, steps = "training.mini_batches", numbers.chunk_steps_per_epoch
        factors = f"{numbers.robots:,} robots × {_epochs(env)} × {steps} chunk steps"
        problem = f"it does not divide the {numbers.samples:,} samples of a step, {factors}"
        nearest = nearest_divisor(numbers.samples, training.mini_batches)
        yield composed.problem(key, problem, f"nearest valid value: {key}={nearest}")
    episodes = training.groups_per_step * training.samples_per_group
    if episodes != numbers.robots * env.epochs:
        key, robots = "env.environments", max(1, episodes // env.epochs)
        problem = f"{_epochs(env)} of {numbers.robots:,} robots are not the {episodes:,} episodes of a step"
        groups = max(1, numbers.robots * env.epochs // training.samples_per_group)
        hint = f"nearest valid value: {key}={robots}, or training.groups_per_step={groups}"
        yield composed.problem(key, f"{problem}, groups_per_step × samples_per_group", hint)
    # the dialects name their own keys for these
    processes = configured_processes(config)
    # the robots of every rank are divided into stages
    if env.pipeline_stages > 1 and not config.placement.envs.devices:
        processes = math.lcm(processes, len(simulating_ranks(config)))
    unit = processes * env.pipeline_stages * training.samples_per_group
    if numbers.robots % unit:
        problem = f"the {numbers.robots:,} robots are no multiple of {unit}, from {_unit(composed, processes)}"
        nearest = nearest_multiple(numbers.robots, unit)
        groups = nearest * env.epochs // training.samples_per_group
        hint = f"nearest valid value: training.groups_per_step={groups}"
        hint += f" env.environments={nearest}" if env.environments else ""
        yield composed.problem("training.groups_per_step", problem, hint)


def _epochs(env: SimulatorConfig) -> str:
    return f"{env.epochs} epoch{'s' * (env.epochs > 1)}"


def _unit(composed: ComposedConfig, processes: int) -> str:
    """Return the factors of which the number of robots is a multiple."""
    keys = ("env.pipeline_stages", "training.samples_per_group")
    return f"{processes} process{'es' * (processes > 1)}, {' and '.join(map(composed.describe, keys))}"
