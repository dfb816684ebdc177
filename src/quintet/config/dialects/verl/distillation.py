"""Conversion of verl's on-policy distillation: its loss, the teacher, and the devices of the teacher."""

from collections.abc import Iterator

from quintet.config.capabilities import Capability
from quintet.config.dialects.algorithm_choice import LOSS
from quintet.config.dialects.conversion import ForeignBuilder, ForeignValues, NativeBuilder
from quintet.config.dialects.verl.dialect import DEFAULT_TEACHER, DISTILLS, TEACHERS, teacher_names
from quintet.config.dialects.verl.kl import KL_IN_LOSS, KL_IN_REWARD
from quintet.config.dialects.verl.separate_engines import DEVICES_OF_A_NODE
from quintet.config.dotted import get_value
from quintet.config.native.losses import DistillationLossConfig
from quintet.config.problems import ConfigProblem

SECTION = "distillation.distillation_loss"
MODE = "distillation.distillation_loss.loss_mode"
TASK_REWARDS = "distillation.distillation_loss.use_task_rewards"
WEIGHT = "distillation.distillation_loss.distillation_loss_coef"
BOUND = "distillation.distillation_loss.loss_max_clamp"
IS_POLICY_GRADIENT = "distillation.distillation_loss.use_policy_gradient"
LOW = "distillation.distillation_loss.clip_ratio_low"
HIGH = "distillation.distillation_loss.clip_ratio_high"
TOP_K = "forward_kl_topk"
NODES = "distillation.nnodes"
GPUS = "distillation.n_gpus_per_node"
HAS_POOL = "distillation.teacher_model.enable_resource_pool"
LENGTHS = ("actor_rollout_ref.rollout.prompt_length", "actor_rollout_ref.rollout.response_length")
ACTOR_LOSS, ENTROPY = "actor_rollout_ref.actor.policy_loss.loss_mode", "actor_rollout_ref.actor.entropy_coeff"


def distills(values: ForeignValues) -> bool:
    """Return whether a teacher trains the policy."""
    return values[DISTILLS] is True


def distillation_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield a teacher without a model, and a divergence without gradient, which verl refuses, too."""
    teacher = _teacher(values)
    if not distills(values) or teacher is None:
        return
    path = f"{teacher}.model_path"
    yield from _size_problems(values, teacher)
    if values[path] is None:
        yield values.problem(path, f"{values.describe(DISTILLS)} needs a teacher", f"{path}=DIRECTORY")
    if values.native(MODE) == "k1" and not values[IS_POLICY_GRADIENT]:
        problem = f"its gradient does not depend on the teacher: {values.describe(IS_POLICY_GRADIENT)}"
        yield values.problem(MODE, problem, f"{IS_POLICY_GRADIENT}=true, or {MODE}=k3")


def _size_problems(values: ForeignValues, teacher: str) -> Iterator[ConfigProblem]:
    """Yield sizes of the teacher that verl refuses: its sequences, and devices that do not divide by its engine's."""
    longest, limit = sum(values[key] for key in LENGTHS) + 1, f"{teacher}.inference.max_model_len"
    if values[limit] is not None and values[limit] < longest:
        problem = f"the teacher reads prompt and response, and a token more: {values.describe(*LENGTHS)}"
        yield values.problem(limit, problem, f"{limit}={longest}, or {limit}=null")
    if devices := _num_teacher_devices(values):
        tensor = f"{teacher}.inference.tensor_model_parallel_size"
        yield from values.divisor_problems(tensor, devices, f"GPUs of the teacher, from {values.describe(NODES, GPUS)}")


def distillation_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set loss, reference and placement of distillation; those of the run without it must be set already."""
    if not distills(values):
        return
    _loss_to_native(values, native)
    teacher = _teacher(values)
    default = "distillation.teacher_models.teacher_model.model_path"
    if teacher != f"{TEACHERS}.{DEFAULT_TEACHER}" and values.is_set(default) and values[default] is not None:
        native.remarks.append(f"{values.describe(default)} has no effect: verl drops {DEFAULT_TEACHER} beside others")
    if teacher is not None:
        _teacher_to_native(values, native, teacher)
    else:
        first = f"{TEACHERS}.{teacher_names(values.merged.plain)[0]}"
        native.set("reference.path", get_value(values[first], "model_path"), first)
    _placement_to_native(values, native)


def _teacher(values: ForeignValues) -> str | None:
    """Return the section of the teacher; None if there are several ones."""
    names = teacher_names(values.merged.plain)
    return f"{TEACHERS}.{names[0]}" if len(names) == 1 else None


def _loss_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Set the loss of distillation, which contains that of the run if it trains on rewards, too."""
    if values[TASK_REWARDS]:
        if native.get(f"{LOSS}.name") != "ppo":
            native.require(ACTOR_LOSS, Capability.MIXED_LOSSES)
            native.set(LOSS, {"name": "ppo"}, ACTOR_LOSS)
        if native.get("algorithm.kl") is not None:
            native.require(KL_IN_LOSS if values[KL_IN_LOSS] else KL_IN_REWARD, Capability.TEACHER_AND_REFERENCE)
        native.move(LOSS, f"{LOSS}.task")
    else:
        native.move(LOSS, None)
        unused = [key for key in (KL_IN_LOSS, KL_IN_REWARD, ENTROPY) if values.is_set(key) and values[key]]
        native.remarks += [f"{values.describe(key)} has no effect: {values.describe(TASK_REWARDS)}" for key in unused]
        native.set("algorithm.entropy_coefficient", 0.0, TASK_REWARDS)
    for section in ("algorithm.kl", "algorithm.reward_kl"):
        native.move(section, None)
        native.set(section, None, DISTILLS)
    native.set(f"{LOSS}.name", "distillation", DISTILLS)
    native.set(f"{LOSS}.policy_logprobs", "current")
    native.set(f"{LOSS}.estimator", "k3" if values[MODE] == TOP_K else values.native(MODE), MODE)
    native.set(f"{LOSS}.gradient", "policy" if values[IS_POLICY_GRADIENT] else "direct", IS_POLICY_GRADIENT)
    native.set(f"{LOSS}.weight", float(values[WEIGHT]) if values[TASK_REWARDS] else 1.0, WEIGHT, TASK_REWARDS)
    native.set(f"{LOSS}.max_divergence", values[BOUND], BOUND)
    if values[IS_POLICY_GRADIENT]:
        native.set(f"{LOSS}.clip_low", values[LOW], LOW)
        native.set(f"{LOSS}.clip_high", values[HIGH], HIGH)
        native.set(f"{LOSS}.clip_dual", 3.0)  # verl has no key for it here


def _teacher_to_native(values: ForeignValues, native: NativeBuilder, teacher: str) -> None:
    """Set the reference, to which `actor_rollout_ref.ref` does not apply."""
    path, tensor, dtype, tokens = (
        f"{teacher}.{key}"
        for key in (
            *("model_path", "inference.tensor_model_parallel_size", "inference.dtype"),
            "inference.max_num_batched_tokens",
        )
    )
    native.move("reference", None)
    native.set("reference.path", values[path], path)
    native.set("reference.dtype", values.native(dtype), dtype)
    # the devices of the policy have their own parallel sizes
    native.set("reference.parallel.tensor", values[tensor] if _num_teacher_devices(values) else 1, tensor)
    longest = sum(values[key] for key in LENGTHS)
    native.set("reference.inference_budget", {"tokens": max(values[tokens], longest)}, tokens, *LENGTHS)


def _num_teacher_devices(values: ForeignValues) -> int:
    """Return the number of devices of the teacher; 0 if it shares those of the policy."""
    return int(values[NODES] * values[GPUS]) if values[HAS_POOL] else 0


def _placement_to_native(values: ForeignValues, native: NativeBuilder) -> None:
    """Give the teacher devices on the nodes of the others if all fit, and otherwise on further nodes."""
    teacher = _num_teacher_devices(values)
    if not teacher:
        native.set("placement.reference.devices", None, HAS_POOL, NODES)
        return
    nodes, devices = native.get("placement.nodes", 1), native.get("placement.devices_per_node", 1)
    total = nodes * devices
    per_node = devices
    origins = (NODES, GPUS, HAS_POOL)
    if nodes == values[NODES] and devices + values[GPUS] <= DEVICES_OF_A_NODE:
        per_node = devices + values[GPUS]
    else:
        native.set("placement.nodes", nodes + -(-teacher // devices), *origins)
    renumbered = [device // devices * per_node + device % devices for device in range(total)]
    native.set("placement.devices_per_node", per_node, *native.origins_of("placement.devices_per_node"), *origins)
    for component in ("actor", "rollout", "critic"):
        key = f"placement.{component}.devices"
        numbers = native.get(key)
        native.set(key, renumbered if numbers is None else [renumbered[number] for number in numbers], *origins)
    others = [device for device in range(total + teacher) if device not in renumbered]
    native.set("placement.reference.devices", others[:teacher], *origins)


def distillation_from_native(foreign: ForeignBuilder) -> None:
    """Set verl's keys of a run with a teacher."""
    run, loss = foreign.experiment, foreign.experiment.algorithm.loss
    if not isinstance(loss, DistillationLossConfig):
        return
    foreign.set(DISTILLS, True)
    foreign.set_native(MODE, loss.estimator)
    foreign.set(TASK_REWARDS, loss.task is not None)
    foreign.set(WEIGHT, loss.weight)
    foreign.set(BOUND, loss.max_divergence)
    foreign.set(IS_POLICY_GRADIENT, loss.gradient == "policy")
    foreign.set(LOW, loss.clip_low)
    foreign.set(HIGH, loss.clip_high)
    teacher = f"{TEACHERS}.{DEFAULT_TEACHER}"
    foreign.set(f"{teacher}.model_path", run.reference.path)
    foreign.set(f"{teacher}.inference.tensor_model_parallel_size", run.reference.parallel.tensor)
    if run.reference.dtype is not None:
        foreign.set(f"{teacher}.inference.dtype", run.reference.dtype)
