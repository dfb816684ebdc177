"""Constraints between RLinf's keys."""

from collections.abc import Iterator
from itertools import combinations

from quintet.config.dialects.algorithm_choice import ADVANTAGE, config_class
from quintet.config.dialects.conversion import ForeignValues
from quintet.config.dialects.rlinf.algorithm import (
    ESTIMATOR,
    GROUP,
    HAS_CRITIC,
    LOSS_TYPE,
    RECOMPUTE,
    is_embodied,
    only_evaluates,
)
from quintet.config.dialects.rlinf.backend import (
    BACKEND,
    CHECKPOINT,
    FROM_HF,
    MIXED_PRECISION_FLAGS,
    PRECISION,
)
from quintet.config.dialects.rlinf.component_placement import (
    ENGINE_PIPELINE,
    ENGINE_TENSOR,
    PIPELINE,
    SECTION,
    TENSOR,
    ComponentPlacement,
)
from quintet.config.dialects.rlinf.key_values import AGENT_SECTIONS
from quintet.config.dialects.value_types import is_function_address
from quintet.config.divisors import nearest_divisor
from quintet.config.problems import ConfigProblem

SEQUENCE, DYNAMIC = "runner.seq_length", "runner.enable_dynamic_batch_size"
UPDATES, PROMPTS = "algorithm.n_minibatches", "data.rollout_batch_size"


def shared_problems(values: ForeignValues, placement: ComponentPlacement) -> Iterator[ConfigProblem]:
    """Yield problems of keys that all runs have."""
    yield from placement.problems
    estimator = values.describe(ESTIMATOR)
    advantage = config_class(ADVANTAGE, values.native(ESTIMATOR))
    trains = not only_evaluates(values)
    if trains and (advantage.needs_several_samples or values[ESTIMATOR] == "reinpp_baseline"):
        if values[GROUP] < 2:
            yield values.nearest_problem(GROUP, f"{estimator} compares several responses to the same prompt", 2)
        samples = "algorithm.sampling_params.do_sample"
        if not values[samples] and not is_embodied(values):
            problem = f"all responses to a prompt would be the same, and {values.describe(GROUP)}"
            yield values.problem(samples, problem, f"set {samples}=true")
    if trains and not advantage.uses_values and not is_function_address(values[ESTIMATOR]):
        if values[LOSS_TYPE] in ("actor_critic", "decoupled_actor_critic"):
            problem = f"trains a critic, which {estimator} does not use"
            yield values.problem(LOSS_TYPE, problem, f"{LOSS_TYPE}=ppo, or {ESTIMATOR}=gae")
        if values[HAS_CRITIC]:
            problem = f"{estimator} does not use a critic"
            yield values.problem(HAS_CRITIC, problem, f"set {HAS_CRITIC}=false, or {ESTIMATOR}=gae")
    autocast, weights = "actor.fsdp_config.amp_autocast.precision", "actor.fsdp_config.mixed_precision.param_dtype"
    is_enabled = values[BACKEND] == "fsdp" and values["actor.fsdp_config.amp_autocast.enabled"]
    if is_enabled and values.native(weights) not in ("float32", None, values.native(autocast)):
        problem = f"autocast needs weights in float32 or in its type: {values.describe(weights)}"
        yield values.problem(autocast, problem, f"set {weights}=fp32, or {autocast}={values[weights]}")


def math_problems(values: ForeignValues, placement: ComponentPlacement) -> Iterator[ConfigProblem]:
    """Yield problems of runs on text."""
    reward_model, path = "reward.use_reward_model", "reward.model.model_path"
    if values[reward_model] and values[path] is None:
        hint = f"{path}=DIRECTORY, of a sequence classifier, or {reward_model}=false"
        yield values.problem(reward_model, f"needs {path}", hint)
    training = "data.train_data_paths"
    if values[training] is None and not (only_evaluates(values) or any(values[each] for each in AGENT_SECTIONS)):
        yield values.problem(training, "names no prompts to train on", f"{training}=[FILE]")
    yield from _length_problems(values)
    yield from _learning_rate_problems(values)
    if values[BACKEND] == "megatron":
        yield from _megatron_problems(values)
    if not placement.problems and not any(values[section] for section in AGENT_SECTIONS):
        yield from _placement_mode_problems(values, placement)
        yield from _parallelism_problems(values, placement)
    yield from _batch_problems(values, placement)


def _length_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    prompt, response = "data.max_prompt_length", "algorithm.sampling_params.max_new_tokens"
    rest = values[SEQUENCE] - values[prompt]
    if rest <= 0:
        problem = f"leaves no tokens for a response after {values.describe(prompt)}"
        yield values.nearest_problem(SEQUENCE, problem, values[prompt] + 1)
    elif values[response] > rest:
        problem = f"exceeds {values.describe(SEQUENCE)} together with {values.describe(prompt)}"
        yield values.nearest_problem(response, problem, rest)
    tokens = "runner.max_tokens_per_mbs"
    if values[DYNAMIC] and values[tokens] < values[SEQUENCE]:
        problem = f"must hold the longest sequence, {values.describe(SEQUENCE)}"
        yield values.nearest_problem(tokens, problem, values[SEQUENCE])


def _learning_rate_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    peak, maximum = "actor.optim.lr", "actor.lr_sched.max_lr"
    if values.is_set(maximum) and values[maximum] < values[peak]:
        peak = maximum
    elif values.is_set(maximum) and values[maximum] > values[peak]:
        problem = f"the learning rate never exceeds {values.describe(peak)}"
        yield values.problem(maximum, problem, f"leave it out, or {maximum}={values[peak]}")
    for key in ("actor.optim.min_lr", "actor.lr_sched.min_lr"):
        if values.is_set(key) and values[key] > values[peak]:
            yield values.nearest_problem(key, f"is above {values.describe(peak)}", values[peak])


def _megatron_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    if values[FROM_HF] and values[CHECKPOINT] is not None:
        problem = f"the run cannot also start from {values.describe(CHECKPOINT)}"
        yield values.problem(FROM_HF, problem, f"set {FROM_HF}=false, or leave {CHECKPOINT} out")
    if not values[FROM_HF] and values[CHECKPOINT] is None:
        problem = f"there is no checkpoint to start from: {values.describe(CHECKPOINT)}"
        yield values.problem(FROM_HF, problem, f"{FROM_HF}=true, or {CHECKPOINT}=DIRECTORY")
    for name, dtype in MIXED_PRECISION_FLAGS.items():
        flag = f"actor.optim.{name}"
        if values.is_set(flag) and values[flag] and values.native(PRECISION) != dtype:
            problem = f"requires {dtype}, and {values.describe(PRECISION)}"
            yield values.problem(flag, problem, f"set {flag}=false")
    overlap, distributed = "actor.optim.overlap_param_gather", "actor.optim.use_distributed_optimizer"
    if values[overlap] and not values[distributed]:
        problem = f"needs the distributed optimizer: {values.describe(distributed)}"
        yield values.problem(overlap, problem, f"set {overlap}=false")
    number, devices = "actor.megatron.ckpt.use_gpu_num", "actor.megatron.ckpt.use_gpu_index"
    if None not in (values[devices], values[number]) and len(values[devices]) != values[number]:
        problem = f"must have as many devices as {values.describe(number)}"
        yield values.problem(devices, problem, f"nearest valid value: {number}={len(values[devices])}")


def _placement_mode_problems(values: ForeignValues, placement: ComponentPlacement) -> Iterator[ConfigProblem]:
    """Yield problems unless actor and rollout have the same devices, or all components have devices of their own; RLinf
    lets inference and critic share theirs."""
    devices_by_component = {name: placement.devices(name) for name in ("actor", "rollout", "inference", "critic")}
    devices = {name: numbers for name, numbers in devices_by_component.items() if numbers is not None}
    if "actor" not in devices or "rollout" not in devices or devices["actor"] == devices["rollout"]:
        return
    for name, other in combinations(devices, 2):
        if {name, other} != {"inference", "critic"} and not devices[name].isdisjoint(devices[other]):
            yield _shared_devices_problem(values, placement, name, other)
    actor = values.describe(placement.keys["actor"])
    together = f"{placement.keys['rollout']}={values[placement.keys['actor']]!r}"
    for key in (DYNAMIC, "actor.enable_dp_load_balance"):
        if values[key]:
            problem = f"needs whole batches; a learner on its own devices gets single sequences: {actor}"
            yield values.problem(key, problem, f"{key}=false, or {together}")
    if "inference" in devices and not values[RECOMPUTE]:
        problem = f"inference has nothing to compute: {values.describe(RECOMPUTE)}"
        yield values.problem(placement.keys["inference"], problem, f"leave it out, or {RECOMPUTE}=true")


def _shared_devices_problem(
    values: ForeignValues, placement: ComponentPlacement, name: str, other: str
) -> ConfigProblem:
    """Describe two components that share devices although actor and rollout have different ones."""
    actor = placement.keys["actor"]
    rollout = placement.keys["rollout"]
    key = placement.keys[other]
    placed = values.describe(*dict.fromkeys(each for each in (actor, rollout, placement.keys[name]) if each != key))
    rule = "no devices in common, since those of actor and rollout differ"
    rule = "the same devices, or none in common" if (name, other) == ("actor", "rollout") else rule
    problem = f"{name} and {other} must have {rule}: {placed}"
    if "inference" not in (name, other):
        return values.problem(key, problem, f"for the same devices: {rollout}={values[actor]!r}")
    key = placement.keys["inference"]
    components = key.removeprefix(f"{SECTION}.").split(",")
    others = ",".join(component for component in components if component.strip() != "inference")
    rest = f", and set {SECTION}.{others}={values[key]!r}" if others else ""
    return values.problem(key, problem, f"leave {key} out{rest}: actor then computes the log-probs")


def _parallelism_problems(values: ForeignValues, placement: ComponentPlacement) -> Iterator[ConfigProblem]:
    """Yield problems of models that are split over more devices than fit."""
    for name, tensor, pipeline in (("rollout", ENGINE_TENSOR, ENGINE_PIPELINE), ("actor", TENSOR, PIPELINE)):
        devices = len(placement.devices(name) or ())
        if devices % (values[tensor] * values[pipeline]):
            others = values.describe(pipeline, placement.keys[name])
            problem = f"times the pipeline stages it must divide the {devices} devices of {name}: {others}"
            if devices % values[pipeline]:
                yield values.problem(
                    tensor,
                    problem,
                    f"nearest valid value: {pipeline}={nearest_divisor(devices, values[pipeline])} {tensor}=1",
                )
            else:
                nearest = nearest_divisor(devices // values[pipeline], values[tensor])
                yield values.nearest_problem(tensor, problem, nearest)
    is_shared = placement.is_colocated is not False and values[BACKEND] == "megatron"
    if is_shared and values[TENSOR] % values[ENGINE_TENSOR]:
        problem = f"must divide {values.describe(TENSOR)} if engine and learner share devices"
        yield values.nearest_problem(ENGINE_TENSOR, problem, nearest_divisor(values[TENSOR], values[ENGINE_TENSOR]))


def _batch_problems(values: ForeignValues, placement: ComponentPlacement) -> Iterator[ConfigProblem]:
    total = values[PROMPTS] * values[GROUP]
    if total % values[UPDATES]:
        source = values.describe(PROMPTS, GROUP)
        yield from values.divisor_problems(UPDATES, total, f"sequences of a step, from {source}")
        return
    ranks = len(placement.devices("actor") or ()) // (values[TENSOR] * values[PIPELINE])
    batch = total // values[UPDATES]
    # ranks with different numbers of sequences, which RLinf refuses, only wait for each other here
    if ranks and not values[DYNAMIC] and batch % ranks == 0:
        local = f"sequences that each of the {ranks} data-parallel ranks has in an optimizer step"
        yield from values.divisor_problems("algorithm.training_batch_size_per_gpu", batch // ranks, local)
