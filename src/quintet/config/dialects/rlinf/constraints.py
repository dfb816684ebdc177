"""Constraints between RLinf's keys."""

from __future__ import annotations

import math
from collections.abc import Iterator

from quintet.config.dialects.algorithm_choice import ADVANTAGE, config_class
from quintet.config.dialects.conversion import ForeignValues
from quintet.config.dialects.rlinf.algorithm import is_embodied
from quintet.config.dialects.rlinf.component_placement import Placement, parse_placements, placement_problems
from quintet.config.dialects.rlinf.value_maps import ADVANTAGES, DTYPES, KL_ESTIMATORS
from quintet.config.dialects.value_types import is_function_address
from quintet.config.divisors import nearest_divisor
from quintet.config.problems import ConfigProblem

ESTIMATOR, LOSS_TYPE, GROUP = "algorithm.adv_type", "algorithm.loss_type", "algorithm.group_size"
HAS_CRITIC, BACKEND, TASK = "critic.use_critic_model", "actor.training_backend", "runner.task_type"
SEQUENCE, DYNAMIC = "runner.seq_length", "runner.enable_dynamic_batch_size"
TENSOR, PIPELINE = "actor.model.tensor_model_parallel_size", "actor.model.pipeline_model_parallel_size"
ENGINE_TENSOR, ENGINE_PIPELINE = "rollout.tensor_parallel_size", "rollout.pipeline_parallel_size"
RECOMPUTE = "rollout.recompute_logprobs"
NUM_ENVS, EPOCHS, MAX_STEPS, CHUNK = (
    "env.train.total_num_envs",
    "algorithm.rollout_epoch",
    "env.train.max_episode_steps",
    "actor.model.num_action_chunks",
)


def samples_per_step(values: ForeignValues) -> int:
    """Return the action chunks of all environments in a training step; 0 if their number is not set."""
    chunks = math.ceil(values[MAX_STEPS] / values[CHUNK])
    return int((values[NUM_ENVS] or 0) * values[EPOCHS] * chunks)


def shared_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of keys that all runs have."""
    yield from placement_problems(values)
    estimator = values.describe(ESTIMATOR)
    advantage = config_class(ADVANTAGE, values[ESTIMATOR], ADVANTAGES)
    if advantage.needs_several_samples or values[ESTIMATOR] == "reinpp_baseline":
        if values[GROUP] < 2:
            problem = f"{estimator} compares several responses to the same prompt"
            yield values.problem(GROUP, problem, f"nearest valid value: {GROUP}=2")
        samples = "algorithm.sampling_params.do_sample"
        evaluates = str(values[TASK]).endswith("_eval")
        if not values[samples] and not evaluates and not is_embodied(values):
            problem = f"all responses to a prompt would be the same, and {values.describe(GROUP)}"
            yield values.problem(samples, problem, f"set {samples}=true")
    if not advantage.uses_values and not is_function_address(values[ESTIMATOR]):
        if values[LOSS_TYPE] in ("actor_critic", "decoupled_actor_critic"):
            problem, hint = f"trains a critic, which {estimator} does not use", f"set it to ppo, or {ESTIMATOR}=gae"
            yield values.problem(LOSS_TYPE, problem, hint)
        if values[HAS_CRITIC]:
            problem, hint = f"{estimator} does not use a critic", f"set {HAS_CRITIC}=false, or {ESTIMATOR}=gae"
            yield values.problem(HAS_CRITIC, problem, hint)
    if values[BACKEND] == "fsdp":
        yield from _autocast_problems(values)


def _autocast_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    autocast = "actor.fsdp_config.amp_autocast.enabled"
    keys = [f"actor.fsdp_config.mixed_precision.{name}_dtype" for name in ("param", "reduce", "buffer")]
    others = [key for key in keys if values[key] is not None and DTYPES[values[key]] != "float32"]
    if values[autocast] and others:
        problem = f"autocast needs weights in float32, and {values.describe(*others)}"
        yield values.problem(autocast, problem, f"set {' '.join(f'{key}=fp32' for key in others)}")


def math_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of runs on text."""
    if values[ESTIMATOR] == "gae" and not values[HAS_CRITIC]:
        yield values.problem(HAS_CRITIC, f"{values.describe(ESTIMATOR)} needs a critic", f"set {HAS_CRITIC}=true")
    reward_model, path = "reward.use_reward_model", "reward.model.model_path"
    if values[reward_model] and values[path] is None:
        hint = f"set {path} to the directory of a sequence classifier, or {reward_model}=false"
        yield values.problem(reward_model, f"needs {path}", hint)
    yield from _length_problems(values)
    yield from _learning_rate_problems(values)
    if values[BACKEND] == "megatron":
        yield from _megatron_problems(values)
    placement = None if any(placement_problems(values)) else parse_placements(values)
    if placement is not None:
        yield from _placement_mode_problems(values, placement)
        yield from _parallelism_problems(values, placement)
    yield from _batch_problems(values, placement)


def _length_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    prompt, response = "data.max_prompt_length", "algorithm.sampling_params.max_new_tokens"
    if values[SEQUENCE] <= values[prompt]:
        problem = f"leaves no tokens for a response after {values.describe(prompt)}"
        yield values.problem(SEQUENCE, problem, f"nearest valid value: {SEQUENCE}={values[prompt] + 1}")
    elif values[prompt] + values[response] > values[SEQUENCE]:
        problem = f"exceeds {values.describe(SEQUENCE)} together with {values.describe(prompt)}"
        yield values.problem(response, problem, f"nearest valid value: {response}={values[SEQUENCE] - values[prompt]}")
    tokens = "runner.max_tokens_per_mbs"
    if values[DYNAMIC] and values[tokens] < values[SEQUENCE]:
        problem = f"must hold the longest sequence, {values.describe(SEQUENCE)}"
        yield values.problem(tokens, problem, f"nearest valid value: {tokens}={values[SEQUENCE]}")


def _learning_rate_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    peak, maximum = "actor.optim.lr", "actor.lr_sched.max_lr"
    if values.is_set(maximum) and values[maximum] < values[peak]:
        peak = maximum
    elif values.is_set(maximum) and values[maximum] > values[peak]:
        problem = f"the learning rate never exceeds {values.describe(peak)}"
        yield values.problem(maximum, problem, f"leave it out, or nearest valid value: {maximum}={values[peak]}")
    for key in ("actor.optim.min_lr", "actor.lr_sched.min_lr"):
        if values.is_set(key) and values[key] > values[peak]:
            yield values.problem(key, f"is above {values.describe(peak)}", f"nearest valid value: {key}={values[peak]}")


def _megatron_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    checkpoint, from_hf = "actor.model.megatron_checkpoint", "actor.megatron.use_hf_ckpt"
    if values[from_hf] and values[checkpoint] is not None:
        problem = f"the run cannot also start from {values.describe(checkpoint)}"
        yield values.problem(from_hf, problem, f"set {from_hf}=false, or leave {checkpoint} out")
    if not values[from_hf] and values[checkpoint] is None:
        problem = f"there is no checkpoint to start from: {values.describe(checkpoint)}"
        yield values.problem(from_hf, problem, f"set {from_hf}=true, or set {checkpoint}")
    precision = "actor.model.precision"
    for flag, dtype in {"actor.optim.bf16": "bfloat16", "actor.optim.fp16": "float16"}.items():
        if values.is_set(flag) and values[flag] and DTYPES[values[precision]] != dtype:
            problem = f"requires {dtype}, and {values.describe(precision)}"
            yield values.problem(flag, problem, f"set {flag}=false")
    overlap, distributed = "actor.optim.overlap_param_gather", "actor.optim.use_distributed_optimizer"
    if values[overlap] and not values[distributed]:
        problem = f"needs the distributed optimizer: {values.describe(distributed)}"
        yield values.problem(overlap, problem, f"set {overlap}=false")
    number, devices = "actor.megatron.ckpt.use_gpu_num", "actor.megatron.ckpt.use_gpu_index"
    if values[devices] is not None and values[number] is not None and len(values[devices]) != values[number]:
        problem = f"must have as many devices as {values.describe(number)}"
        yield values.problem(devices, problem, f"nearest valid value: {number}={len(values[devices])}")


def _placement_mode_problems(values: ForeignValues, placement: Placement) -> Iterator[ConfigProblem]:
    """Yield problems unless all components share their devices, or each has devices of its own."""
    names = [name for name in ("actor", "rollout", "inference", "critic") if name in placement.processes]
    devices = {name: numbers for name in names if (numbers := placement.devices(name)) is not None}
    if "actor" not in devices or "rollout" not in devices or devices["actor"] == devices["rollout"]:
        return
    names = list(devices)
    for number, name in enumerate(names):
        for other in names[number + 1 :]:
            if not devices[name].isdisjoint(devices[other]):
                first, second = placement.keys[name], placement.keys[other]
                problem = f"{name} and {other} must have the same devices, or none in common: {values.describe(first)}"
                yield values.problem(second, problem, "give them the same devices, or different ones")
    actor = placement.keys["actor"]
    for key in (DYNAMIC, "actor.enable_dp_load_balance"):
        if values[key]:
            problem = (
                f"needs whole batches; a learner on its own devices gets single sequences: {values.describe(actor)}"
            )
            yield values.problem(key, problem, f"set {key}=false, or give actor and rollout the same devices")
    if "inference" in devices and not values[RECOMPUTE]:
        problem = f"inference has nothing to compute: {values.describe(RECOMPUTE)}"
        yield values.problem(placement.keys["inference"], problem, f"leave it out, or set {RECOMPUTE}=true")


def _parallelism_problems(values: ForeignValues, placement: Placement) -> Iterator[ConfigProblem]:
    """Yield problems of models that are split over more devices than fit."""
    for name, tensor, pipeline in (("rollout", ENGINE_TENSOR, ENGINE_PIPELINE), ("actor", TENSOR, PIPELINE)):
        devices = placement.devices(name)
        if devices is not None and len(devices) % (values[tensor] * values[pipeline]):
            others = values.describe(pipeline, placement.keys[name])
            problem = f"times the pipeline stages it must divide the {len(devices)} devices of {name}: {others}"
            per_stage = len(devices) // values[pipeline] if len(devices) % values[pipeline] == 0 else 0
            nearest = (
                f"nearest valid value: {tensor}={nearest_divisor(per_stage, values[tensor])}" if per_stage else None
            )
            yield values.problem(tensor, problem, nearest or f"also change {pipeline}")
    is_shared = placement.is_colocated is not False and values[BACKEND] == "megatron"
    if is_shared and values[TENSOR] % values[ENGINE_TENSOR]:
        problem = f"must divide {values.describe(TENSOR)} if engine and learner share devices"
        hint = f"nearest valid value: {ENGINE_TENSOR}={nearest_divisor(values[TENSOR], values[ENGINE_TENSOR])}"
        yield values.problem(ENGINE_TENSOR, problem, hint)


def _batch_problems(values: ForeignValues, placement: Placement | None) -> Iterator[ConfigProblem]:
    updates, prompts = "algorithm.n_minibatches", "data.rollout_batch_size"
    total = values[prompts] * values[GROUP]
    if total % values[updates]:
        yield from values.divisor_problems(
            updates, total, f"sequences of a step, from {values.describe(prompts, GROUP)}"
        )
        return
    devices = placement.devices("actor") if placement else None
    ranks = len(devices) // (values[TENSOR] * values[PIPELINE]) if devices else 0
    micro_batch, batch = "algorithm.training_batch_size_per_gpu", total // values[updates]
    if not ranks or values[DYNAMIC]:
        return
    if batch % ranks:
        problem = f"{ranks} data-parallel ranks cannot share the {batch} sequences of an optimizer step evenly"
        hint = f"change it, {prompts} or {GROUP}: {total} / {updates} must be a multiple of {ranks}"
        yield values.problem(updates, problem, hint)
    else:
        local = f"sequences that each of the {ranks} data-parallel ranks has in an optimizer step"
        yield from values.divisor_problems(micro_batch, batch // ranks, local)


def embodied_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of runs on simulators."""
    if not values[TASK].startswith("embodied"):
        hint = "set it to embodied, or leave the section env out"
        yield values.problem(TASK, "a run with a section env must be embodied", hint)
    if values[LOSS_TYPE] == "actor" and values[ESTIMATOR] == "gae":
        problem = f"trains no value head, which {values.describe(ESTIMATOR)} needs"
        yield values.problem(LOSS_TYPE, problem, "set it to ppo or actor_critic")
    yield from _duplicate_problems(values)
    save, check = "runner.save_interval", "runner.val_check_interval"
    if values[save] > 0 and values[check] > 0 and values[save] % values[check]:
        problem = f"must be a multiple of {values.describe(check)}"
        yield values.problem(
            save, problem, f"nearest valid value: {save}={_nearest_multiple(values[save], values[check])}"
        )
    placement = None if any(placement_problems(values)) else parse_placements(values)
    yield from _episode_problems(values, placement)
    if not _only_evaluates(values):
        yield from _update_problems(values, placement)
    mode = "rollout.mode"
    colocated = placement.is_colocated if placement and values.is_set(mode) else None
    if placement and colocated is not None and colocated == (values[mode] == "disaggregated"):
        keys = dict.fromkeys([placement.keys["actor"], placement.keys["rollout"]])
        yield values.problem(mode, f"contradicts the placement: {values.describe(*keys)}", "leave it out")


def _only_evaluates(values: ForeignValues) -> bool:
    return bool(values["runner.only_eval"]) or values[TASK] == "embodied_eval"


def _duplicate_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems of two keys for the same setting with different values."""
    for name in ("model_path", "model_type"):
        engine, learner = f"rollout.model.{name}", f"actor.model.{name}"
        if values.is_set(engine) and values.is_set(learner) and values[engine] != values[learner]:
            problem = f"the engine runs the policy that is trained: {values.describe(learner)}"
            yield values.problem(engine, problem, f"leave it out, or write ${{{learner}}}")
    shared, own = "algorithm.kl_penalty_type", "algorithm.kl_penalty"
    if values.is_set(shared) and values.is_set(own) and KL_ESTIMATORS[values[shared]] != KL_ESTIMATORS[values[own]]:
        problem = f"has the same meaning as {own}, and differs from {values.describe(own)}"
        yield values.problem(shared, problem, "keep one of them")


def _episode_problems(values: ForeignValues, placement: Placement | None) -> Iterator[ConfigProblem]:
    """Yield problems unless environments fill groups, and groups fill the stages of each process."""
    env_group, eval_group = "env.train.group_size", "env.eval.group_size"
    if values[env_group] not in (1, values[GROUP]):
        yield values.problem(env_group, f"must be {values.describe(GROUP)}", f"write {env_group}=${{{GROUP}}}")
    validates = values["runner.val_check_interval"] > 0 or _only_evaluates(values)
    sides = [("train", GROUP)] * (not _only_evaluates(values)) + [("eval", eval_group)] * validates
    stages = "rollout.pipeline_stage_num"
    has_processes = placement and "env" in placement.processes and placement.devices("env")
    processes = len(placement.processes["env"]) if placement and has_processes else 1
    for side, size in sides:
        num_envs, steps = f"env.{side}.total_num_envs", f"env.{side}.max_episode_steps"
        unit = processes * values[stages] * values[size]
        if values[num_envs] and values[num_envs] % unit:
            source = f"{processes} process{'es' * (processes > 1)}, {values.describe(stages, size)}"
            problem = f"must be a multiple of {unit}, from {source}"
            nearest = _nearest_multiple(values[num_envs], unit)
            yield values.problem(num_envs, problem, f"nearest valid value: {num_envs}={nearest}")
        if values.is_set(steps) and values[steps] % values[CHUNK]:
            problem = f"must be a multiple of {values.describe(CHUNK)}"
            nearest = _nearest_multiple(values[steps], values[CHUNK])
            yield values.problem(steps, problem, f"nearest valid value: {steps}={nearest}")


def _update_problems(values: ForeignValues, placement: Placement | None) -> Iterator[ConfigProblem]:
    """Yield problems unless the samples of a step fill optimizer steps, and these fill passes on every device."""
    batch, micro_batch, total = "actor.global_batch_size", "actor.micro_batch_size", samples_per_step(values)
    if total:
        source = values.describe(NUM_ENVS, EPOCHS, MAX_STEPS, CHUNK)
        yield from values.divisor_problems(batch, total, f"samples of a step, from {source}")
    devices = placement.devices("actor") if placement else None
    if devices and values[batch] % (values[micro_batch] * len(devices)):
        problem = f"times {len(devices)} devices it must divide {values.describe(batch)}"
        local = values[batch] // len(devices) if values[batch] % len(devices) == 0 else 0
        nearest = f"nearest valid value: {micro_batch}={nearest_divisor(local, values[micro_batch])}" if local else None
        multiple = _nearest_multiple(values[batch], len(devices))
        yield values.problem(micro_batch, problem, nearest or f"nearest valid value: {batch}={multiple}")


def _nearest_multiple(number: int, unit: int) -> int:
    """Return the nearest multiple that is not 0."""
    return max(unit, round(number / unit) * unit)
