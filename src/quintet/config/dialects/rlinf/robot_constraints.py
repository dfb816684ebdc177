"""Constraints between RLinf's keys of runs on simulators."""

import math
from collections.abc import Iterator

from quintet.config.dialects.conversion import ForeignValues
from quintet.config.dialects.rlinf.algorithm import ESTIMATOR, GROUP, LOSS_TYPE, TASK, only_evaluates
from quintet.config.dialects.rlinf.backend import PRECISION
from quintet.config.dialects.rlinf.component_placement import ComponentPlacement, parse_placements
from quintet.config.dialects.rlinf.simulators import SIDES, episode_steps, option_problems
from quintet.config.divisors import divisors, nearest_divisor, nearest_multiple, nearest_number
from quintet.config.problems import ConfigProblem

NUM_ENVS, MAX_STEPS = "env.train.total_num_envs", "env.train.max_episode_steps"
EVAL_ENVS = "env.eval.total_num_envs"
EVAL_EPOCHS = "env.eval.rollout_epoch"
EVAL_GROUP = "env.eval.group_size"
EPOCHS, CHUNK, STAGES = "algorithm.rollout_epoch", "actor.model.num_action_chunks", "rollout.pipeline_stage_num"
BATCH, MICRO_BATCH = "actor.global_batch_size", "actor.micro_batch_size"
KIND = "actor.model.model_type"
PATH = "actor.model.model_path"
VALUE_HEAD = "actor.model.add_value_head"
SETUP = "actor.model.policy_setup"


def waits(values: ForeignValues, *keys: str) -> bool:
    """Whether a key has a value that this version lacks; the rules of such values are unknown here."""
    specs = values.dialect.specs()
    return any(specs[key].requires is not None and values[key] not in specs[key].noop for key in keys)


def steps_key(values: ForeignValues, side: str) -> str:
    """Return the key that sets the actions of each environment per epoch."""
    steps = f"env.{side}.max_steps_per_rollout_epoch"
    return steps if values[steps] is not None else f"env.{side}.max_episode_steps"


def chunk_steps(values: ForeignValues, side: str) -> int:
    """Return the chunks of each environment per epoch."""
    steps = values[steps_key(values, side)] or episode_steps(values, f"env.{side}.")
    return math.ceil(int(steps) / int(values[CHUNK]))


def samples_per_step(values: ForeignValues) -> int:
    """Return the action chunks of all environments in a training step."""
    num_envs = values[NUM_ENVS] or default_num_envs(values)
    return int(num_envs * values[EPOCHS] * chunk_steps(values, "train"))


def default_num_envs(values: ForeignValues) -> int:
    """Return the fewest environments that fill groups, stages and processes, and whose samples fill optimizer steps."""
    unit, per_env = _env_unit(values, GROUP), values[EPOCHS] * chunk_steps(values, "train")
    return math.lcm(unit, values[BATCH] // math.gcd(values[BATCH], per_env))


def _env_unit(values: ForeignValues, group: str) -> int:
    """Return the number of which the environments must be a multiple."""
    return int(env_processes(parse_placements(values)) * values[STAGES] * values[group])


def env_processes(placement: ComponentPlacement) -> int:
    """Return the processes of the environments; 1 if the number of devices is unknown."""
    return len(placement.processes["env"]) if placement.devices("env") else 1


def embodied_problems(values: ForeignValues, placement: ComponentPlacement) -> Iterator[ConfigProblem]:
    """Yield problems of runs on simulators."""
    if not values[TASK].startswith("embodied") and values[TASK] != "offline":
        hint = f"{TASK}=embodied, or leave env out"
        yield values.problem(TASK, "a run with a section env must be embodied", hint)
    evaluates = only_evaluates(values)
    if not waits(values, KIND):
        yield from _policy_problems(values)
        yield from _duplicate_problems(values)
    yield from _simulator_problems(values)
    save, check = "runner.save_interval", "runner.val_check_interval"
    if values[save] > 0 and values[check] > 0:
        yield from values.multiple_problems(save, values[check], values.describe(check))
    yield from _episode_problems(values, placement, evaluates=evaluates)
    if not evaluates and not waits(values, LOSS_TYPE, ESTIMATOR, TASK):
        yield from _value_problems(values)
        yield from _update_problems(values, placement)


def _policy_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield a problem of a policy without weights, unless it starts with random ones."""
    if values.is_set(PATH) and not values[PATH] and values[KIND] != "mlp_policy":
        problem = f"names no policy, and {values.describe(KIND)} does not start from random weights"
        yield values.problem(PATH, problem, f"{PATH}=DIRECTORY")


def _simulator_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of options that a simulator does not take, and of robots that ManiSkill does not have."""
    simulators = {values[f"{prefix}env_type"] for prefix in SIDES}
    for prefix in SIDES:
        yield from option_problems(values, prefix)
    setup = values[SETUP]
    if "maniskill" in simulators and setup is not None and not any(robot in setup for robot in ("widowx", "panda")):
        hint = f"{SETUP}=widowx_bridge, or {SETUP}=panda-qpos"
        yield values.problem(SETUP, "no controller of ManiSkill is known for this robot", hint)


def _value_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of runs whose estimator and loss disagree about a value head."""
    if values[LOSS_TYPE] == "actor" and values[ESTIMATOR] == "gae":
        problem = f"trains no value head, which {values.describe(ESTIMATOR)} needs"
        yield values.problem(LOSS_TYPE, problem, f"{LOSS_TYPE}=ppo, or {LOSS_TYPE}=actor_critic")
    elif values[VALUE_HEAD] is False and values[ESTIMATOR] == "gae":
        problem = f"{values.describe(ESTIMATOR)} needs the value head"
        yield values.problem(VALUE_HEAD, problem, f"{VALUE_HEAD}=true")


def _duplicate_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of two keys for the same setting with different values."""
    pairs = [("rollout.model.model_type", KIND), ("rollout.model.precision", PRECISION)]
    pairs += [("rollout.unnorm_key", "actor.model.unnorm_key")]
    for engine, learner in pairs:
        both_set = values.is_set(engine) and values.is_set(learner) and values[engine] is not None
        if both_set and values.native(engine) != values.native(learner):
            problem = f"the engine runs the policy that is trained: {values.describe(learner)}"
            yield values.problem(engine, problem, f"leave it out, or {engine}=${{{learner}}}")


def _episode_problems(
    values: ForeignValues, placement: ComponentPlacement, *, evaluates: bool
) -> Iterator[ConfigProblem]:
    """Yield problems unless environments fill groups, and groups fill the stages of each process."""
    env_group = "env.train.group_size"
    if values[env_group] not in (1, values[GROUP]):
        yield values.problem(env_group, f"must be {values.describe(GROUP)}", f"{env_group}=${{{GROUP}}}")
    groups = {} if evaluates or waits(values, LOSS_TYPE, ESTIMATOR, TASK) else {"train": GROUP}
    if evaluates or values["runner.val_check_interval"] > 0:
        groups["eval"] = EVAL_GROUP
    processes = env_processes(placement)
    for side, size in groups.items():
        if waits(values, f"env.{side}.env_type"):
            continue
        num_envs, steps = f"env.{side}.total_num_envs", steps_key(values, side)
        if values[num_envs]:
            unit = processes * values[STAGES] * values[size]
            source = f"{unit}, from {processes} process{'es' * (processes > 1)}, {values.describe(STAGES, size)}"
            yield from values.multiple_problems(num_envs, unit, source)
        if values.is_set(steps) and values[steps] is not None:
            yield from values.multiple_problems(steps, values[CHUNK], values.describe(CHUNK))


def _update_problems(values: ForeignValues, placement: ComponentPlacement) -> Iterator[ConfigProblem]:
    """Yield problems unless the samples of a step fill optimizer steps, and these fill passes on every device."""
    total = samples_per_step(values) if values[NUM_ENVS] else 0
    if total:
        source = values.describe(NUM_ENVS, EPOCHS, steps_key(values, "train"), CHUNK)
        yield from values.divisor_problems(BATCH, total, f"samples of a step, from {source}")
    devices = len(placement.devices("actor") or ())
    if devices and values[BATCH] % (values[MICRO_BATCH] * devices):
        problem = f"times {devices} devices it must divide {values.describe(BATCH)}"
        if values[BATCH] % devices:
            yield values.problem(MICRO_BATCH, problem, _fitting_batch(values, devices, total))
        else:
            nearest = nearest_divisor(values[BATCH] // devices, values[MICRO_BATCH])
            yield values.nearest_problem(MICRO_BATCH, problem, nearest)


def _fitting_batch(values: ForeignValues, devices: int, total: int) -> str:
    """Return a hint with a batch that the devices can share and that divides the samples of a step."""
    if not total:
        return f"nearest valid value: {BATCH}={nearest_multiple(values[BATCH], devices)}"
    per_env = total // values[NUM_ENVS]
    num_envs = nearest_multiple(values[NUM_ENVS], devices // math.gcd(devices, per_env))
    valid = [size for size in divisors(num_envs * per_env) if size % devices == 0]
    envs = "" if num_envs == values[NUM_ENVS] else f"{NUM_ENVS}={num_envs} "
    return f"nearest valid value: {envs}{BATCH}={nearest_number(values[BATCH], valid)}"
