"""Constraints between ROLL's keys."""

from collections.abc import Iterator

from quintet.config.dialects.conversion import ForeignValues
from quintet.config.dialects.ledger import load_keys
from quintet.config.dialects.roll.agentic import env_problems
from quintet.config.dialects.roll.algorithm import algorithm_problems
from quintet.config.dialects.roll.deepspeed import deepspeed_problems
from quintet.config.dialects.roll.judge import is_judge, judge_problems
from quintet.config.dialects.roll.rewards import SHARES, domain_names
from quintet.config.dialects.roll.workers import (
    ACCUMULATION,
    LEARNERS,
    MICRO_BATCH,
    STEP,
    STRATEGY,
    STRATEGY_OPTIONS,
    Worker,
    applies_to,
    is_agentic,
    workers,
)
from quintet.config.divisors import nearest_divisor, nearest_multiple
from quintet.config.problems import ConfigProblem


def conflicts(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems between keys."""
    trains = any(key.startswith(("actor_train.", "val_env_manager.")) for key in values.merged.sources)
    if is_agentic(values) and not trains:
        problem = "no file sets actor_train: this one is for ROLL's rollout pipeline, which only generates"
        yield values.problem("actor_train.device_mapping", problem)
        return
    present = workers(values)
    # several workers may have the policy's devices
    malformed = list({problem.key: problem for worker in present for problem in _mapping_problems(worker)}.values())
    yield from malformed
    if is_agentic(values):
        yield from env_problems(values)
    else:
        yield from _column_problems(values)
        yield from _length_problems(values)
        yield from _domain_problems(values)
        for name in domain_names(values):
            section = f"rewards.{name}"
            yield from judge_problems(values, section) if is_judge(values, section) else ()
    yield from algorithm_problems(values)
    yield from _critic_problems(values)
    for worker in present:
        yield from _unused_options(worker)
        yield from deepspeed_problems(worker)
    if not malformed:
        splits = [problem for worker in present if worker.name in LEARNERS for problem in _split_problems(worker)]
        yield from splits
        engine = present[1]
        if engine.devices is not None:
            devices = f"devices of {values.describe(engine.key('device_mapping'))}"
            yield from values.divisor_problems(engine.key("num_gpus_per_worker"), len(engine.devices), devices)
        yield from () if splits or is_agentic(values) else _batch_problems(values)


def _mapping_problems(worker: Worker) -> Iterator[ConfigProblem]:
    try:
        _ = worker.devices
    except ValueError as error:
        key = worker.mapping
        yield worker.values.problem(key, str(error), f"for example {key}=list(range(0,8)), or {key}=[0,1,2,3]")


def _column_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    file, prompt, messages = (f"actor_train.data_args.{name}" for name in ("file_name", "prompt", "messages"))
    if values[messages] is not None and values.is_set(prompt) and values[prompt] is not None:
        hint = f"keep the one that names the prompt column: leave {messages} out, or leave {prompt} out"
        yield values.problem(messages, f"excludes {values.describe(prompt)}", hint)
    if not values.is_set(file) or values[file] is None:
        return
    if not values[file]:
        yield values.problem(file, "is empty", f"{file}=null, or {file}=FILE")
    if values[messages] is None and values[prompt] is None:
        yield values.problem(
            prompt, "no key names the column of the prompts", f"for example {prompt}=prompt, or {messages}=messages"
        )


def _domain_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield domains without shares, and shares of domains that have no rewards."""
    names, shares = domain_names(values), values[SHARES]
    unknown = [name for name, share in (shares or {}).items() if share and name not in names]
    changes = {**dict.fromkeys(unknown, 0), **{name: float(f"{1 / len(names):.3g}") for name in names}}
    hint = "for example " + " ".join(f"{SHARES}.{name}={share}" for name, share in changes.items())
    if shares is None and len(names) > 1:
        yield values.problem(SHARES, f"does not say how many prompts of a step {', '.join(names)} have", hint)
    elif unknown:
        yield values.problem(SHARES, f"`rewards` has no section {', '.join(unknown)}", hint)


def _length_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    total, response, prompt = "response_length", "actor_infer.generating_args.max_new_tokens", "prompt_length"
    sequence = values["sequence_length"]
    if sequence is not None and sequence <= values[prompt]:
        yield values.problem("sequence_length", f"leaves no tokens for a response: {values.describe(prompt)}")
        return
    if sequence is None and values[total] is None and values[response] is None:
        yield values.problem(
            total, "no key sets the maximum response length", f"for example {total}=1024, or {response}=1024"
        )
        return
    lengths = (values[total], values[response]) if sequence is None else (sequence - values[prompt],)
    max_response = min(length for length in lengths if length is not None)
    validation = "validation.generating_args.max_new_tokens"
    if values.is_set(validation) and values[validation] != max_response and sequence is None:
        problem = f"must be the maximum response length of training, {max_response} tokens"
        yield values.problem(validation, problem, f"leave it out, or {validation}={max_response}")


def _critic_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield keys of `actor_train` that the critic takes as they are, if the file changes them for the critic."""
    for spec in values.dialect.specs().values():
        key = "critic" + spec.key.removeprefix("actor_train")
        if not spec.key.startswith("actor_train.") or not values.is_set(key) or values[key] == values[spec.key]:
            continue
        if spec.key.startswith("actor_train.data_args."):
            problem = f"the critic trains on the policy's data: {values.describe(spec.key)}"
            yield values.problem(key, problem, "leave it out")
        if spec in load_keys("roll", "roll_algorithm"):
            yield values.problem(key, f"only the policy has it: {values.describe(spec.key)}", "leave it out")


def _unused_options(worker: Worker) -> Iterator[ConfigProblem]:
    """Yield options of another strategy than the worker's, if their values request something."""
    values, strategy = worker.values, worker.values.describe(worker.key(STRATEGY))
    section = "actor_infer" if worker.name == "actor_infer" else "actor_train"
    for spec in () if worker.strategy == "deepspeed" else load_keys("roll", "roll"):
        key = worker.name + spec.key.removeprefix(section)
        is_set = spec.key.startswith(f"{section}.{STRATEGY_OPTIONS}.") and values.is_set(key)
        requests_something = is_set and values[key] not in (spec.default, None)
        if requests_something and spec.only_if is not None and not applies_to(spec, worker.strategy):
            yield values.problem(key, f"belongs to {spec.only_if[1]}, and {strategy}", "leave it out")
    for name in ("ulysses_size", "disable_gradient_checkpointing"):
        key = worker.key(f"model_args.{name}")
        if worker.name == "actor_infer" and values.is_set(key) and values[key] not in (1, False):
            yield values.problem(key, "an engine does not train: the key belongs to actor_train", "leave it out")
    load_format = worker.option("load_format")
    if worker.strategy == "hf" and values.is_set(load_format):
        yield values.problem(load_format, f"belongs to vllm and sglang, and {strategy}", "leave it out")


def _split_problems(worker: Worker) -> Iterator[ConfigProblem]:
    """Yield problems unless the devices hold whole models, and whole FSDP groups."""
    values, mapping, size = worker.values, worker.mapping, worker.world_size
    if size % worker.model_devices:
        source = values.describe(*(key for key in worker.splits if (values[key] or 1) > 1))
        nearest = nearest_multiple(size, worker.model_devices)
        problem = f"its {size} devices must be a multiple of the {worker.model_devices} that share a model"
        hint = f"nearest valid value: {mapping}=list(range(0,{nearest}))"
        yield values.problem(mapping, f"{problem}, from {source}", hint)
    chunks, stages = (worker.option(f"{name}pipeline_model_parallel_size") for name in ("virtual_", ""))
    if worker.strategy == "megatron" and (values[chunks] or 1) > 1 and (values[stages] or 1) == 1:
        problem = f"needs more than one pipeline stage: {stages} = 1"
        yield values.problem(chunks, problem, f"at least: {stages}=2, or {chunks}=1")
    group = worker.option("fsdp_size")
    group_size = values[group] if worker.strategy == "fsdp2" else None
    if group_size is not None and 1 < group_size < size:
        yield from values.divisor_problems(group, size, f"devices of {values.describe(mapping)}")


def _batch_problems(values: ForeignValues) -> Iterator[ConfigProblem]:
    """Yield problems unless a step is a whole number of optimizer steps, the same for policy and critic."""
    policy, critic = Worker(values, "actor_train"), Worker(values, "critic")
    sequences, update = values[STEP[0]] * values[STEP[1]], policy.update_size
    if sequences % update:
        problem = f"an optimizer step of {update} sequences does not divide the {sequences} of a step"
        yield values.problem(policy.key(ACCUMULATION), f"{problem}, from {_sizes(policy)}", _fitting_sizes(policy))
        return
    critic_keys = [critic.key(name) for name in (ACCUMULATION, MICRO_BATCH) if values.is_set(critic.key(name))]
    if critic_keys and critic.update_size != update:
        problem = f"the critic's optimizer step has {critic.update_size} sequences, and the policy's {update}"
        passes = update * critic.model_devices / critic.training_argument(MICRO_BATCH) / critic.world_size
        key = critic.key(ACCUMULATION)
        hint = f"set {key}={passes:.0f}" if passes >= 1 and passes == int(passes) else f"leave {key} out"
        yield values.problem(critic_keys[0], f"{problem}: {_sizes(critic)}; {_sizes(policy)}", hint)


def _sizes(worker: Worker) -> str:
    """Describe all keys that batch sizes follow from."""
    names = [*(worker.key(name) for name in (MICRO_BATCH, ACCUMULATION)), worker.mapping]
    keys = (*STEP, *names, *(key for key in worker.splits if (worker.values[key] or 1) > 1))
    return ", ".join(worker.values.describe(key) for key in keys if worker.values[key] is not None)


def _fitting_sizes(worker: Worker) -> str:
    """Return a hint with the nearest number of accumulation steps, and the one for a single optimizer step."""
    values = worker.values
    size = worker.pass_size
    key = worker.key(ACCUMULATION)
    sequences = values[STEP[0]] * values[STEP[1]]
    if sequences % size:
        prompts = nearest_multiple(values[STEP[0]], size)
        return f"nearest valid value: {STEP[0]}={prompts}, a multiple of the {size} sequences in one pass"
    nearest = nearest_divisor(sequences // size, worker.training_argument(ACCUMULATION))
    factors = " × ".join([*STEP, *(name.rpartition(".")[2] for name in worker.splits)])
    formula = f"{factors} / per_device_train_batch_size / the {worker.world_size} devices = {sequences // size}"
    return f"nearest valid value: {key}={nearest}; for one optimizer step per rollout: {key} = {formula}"
