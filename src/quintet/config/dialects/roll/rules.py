"""What keys of a ROLL configuration must have to do with each other."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.config.dialects.conversion import Values
from quintet.config.dialects.roll.algorithm import algorithm_rules
from quintet.config.dialects.roll.keys import ROLL_KEYS
from quintet.config.dialects.roll.sampling_keys import VALIDATION
from quintet.config.dialects.roll.workers import LEARNERS, Worker, counts, workers
from quintet.config.dialects.takes import Takes
from quintet.config.divisors import nearest_divisor
from quintet.config.faults import Fault

__all__ = ["PER_DEVICE", "disagreements", "updates"]

PER_DEVICE = "training_args.per_device_train_batch_size"
_ACCUMULATED = "training_args.gradient_accumulation_steps"
_DEFAULTS = {PER_DEVICE: 8, _ACCUMULATED: 1}
"""ROLL's own, for the critic; its reference shows only those of the policy."""
_GLOBAL = ("rollout_batch_size", "num_return_sequences_in_group")
_STEP = " × ".join(_GLOBAL)
_DATA = "data_args."


def disagreements(values: Values) -> Iterator[Fault]:
    """Everything that is wrong between keys."""
    present = workers(values)
    broken = [fault for worker in present for fault in _mapping(worker)]
    yield from broken
    yield from _columns(values)
    yield from _lengths(values)
    yield from _elsewhere(values)
    yield from algorithm_rules(values)
    for worker in present:
        yield from _strangers(worker)
    if not broken:
        split = [fault for worker in present if worker.name in LEARNERS for fault in _split(worker)]
        yield from split
        yield from _engines(present[1])
        yield from () if split else _batches(values)


def _mapping(worker: Worker) -> Iterator[Fault]:
    try:
        _ = worker.devices
    except ValueError as error:
        hint = "write it as list(range(0,8)), as [0, 1, 2, 3], or as a sum of such lists"
        yield worker.values.fault(worker.key("device_mapping"), str(error), hint)


def _columns(values: Values) -> Iterator[Fault]:
    file, text, chat = (f"actor_train.{_DATA}{name}" for name in ("file_name", "prompt", "messages"))
    if values[chat] is not None and values.given(text) and values[text] is not None:
        yield values.fault(chat, f"excludes {values.told(text)}", "keep the one that names the column of the prompts")
    if not values.given(file) or values[file] is None:
        return
    if not values[file]:
        yield values.fault(file, "names no file", "name one, or set it to null")
    if values[chat] is None and values[text] is None:
        yield values.fault(text, "nothing says which column holds the prompts", f"set it, or {chat}")


def _lengths(values: Values) -> Iterator[Fault]:
    whole, reply = "response_length", "actor_infer.generating_args.max_new_tokens"
    if values[whole] is None and values[reply] is None:
        yield values.fault(whole, "nothing says how long a reply may be", f"set it, or {reply}")
        return
    room = "actor_infer.strategy_args.strategy_config.max_model_len"
    longest = values["prompt_length"] + min(length for length in (values[whole], values[reply]) if length is not None)
    if values.given(room) and values[room] is not None and values[room] < longest:
        problem = f"prompt and reply together take {longest}, from {values.told('prompt_length')} and "
        problem += values.told(whole if values[whole] is not None else reply)
        yield values.fault(room, problem, f"nearest: {room}={longest}")
    own, most = f"{VALIDATION}max_new_tokens", longest - values["prompt_length"]
    if values.given(own) and values[own] != most:
        problem = f"replies of validation are as long as those of training, {most} tokens"
        yield values.fault(own, problem, f"leave it out, or {own}={most}")


def _elsewhere(values: Values) -> Iterator[Fault]:
    """A critic learns from the policy's data."""
    for row in ROLL_KEYS:
        if row.key.startswith(f"actor_train.{_DATA}"):
            key = "critic" + row.key.removeprefix("actor_train")
            if values.given(key) and values[key] != values[row.key]:
                yield values.fault(
                    key, f"the critic learns from the policy's data: {values.told(row.key)}", "leave it out"
                )


def _strangers(worker: Worker) -> Iterator[Fault]:
    """Options of another strategy than the worker's, with values that ask for something."""
    values, strategy = worker.values, worker.key("strategy_args.strategy_name")
    section = "actor_infer" if worker.name == "actor_infer" else "actor_train"
    for row in ROLL_KEYS:
        key = worker.name + row.key.removeprefix(section)
        if row.only_if is None or (row.state == "honoured" and ".strategy_config." not in key):
            continue
        if row.key.startswith(f"{section}.") and values.given(key) and not counts(row, worker.strategy):
            by_value = row.noop and not any(isinstance(value, Takes) for value in row.noop)
            unless = row.noop if by_value else (row.default, None)
            if values[key] not in unless:
                theirs = row.only_if[1]
                yield values.fault(key, f"belongs to {theirs}, and {values.told(strategy)}", "leave it out")
    for name in ("ulysses_size", "disable_gradient_checkpointing"):
        key = worker.key(f"model_args.{name}")
        if worker.name == "actor_infer" and values.given(key) and values[key] not in (1, False):
            yield values.fault(key, "an engine doesn't learn: it belongs to actor_train", "leave it out")
    weights = worker.option("load_format")
    if worker.strategy == "hf" and values.given(weights):
        yield values.fault(weights, f"belongs to vllm and sglang, and {values.told(strategy)}", "leave it out")


def _split(worker: Worker) -> Iterator[Fault]:
    """The devices hold a whole number of models, and of FSDP's groups."""
    values, mapping, world = worker.values, worker.key("device_mapping"), worker.world
    if world % worker.shards:
        told = " and ".join(values.told(key) for key in worker.splits if (values[key] or 1) > 1)
        nearest = max(1, round(world / worker.shards)) * worker.shards
        problem = f"its {world} devices must be a multiple of the {worker.shards} that share a model, from {told}"
        yield values.fault(mapping, problem, f"nearest: {mapping}=list(range(0,{nearest}))")
    pieces, stages = (worker.option(f"{name}pipeline_model_parallel_size") for name in ("virtual_", ""))
    if worker.strategy == "megatron" and (values[pieces] or 1) > 1 and (values[stages] or 1) == 1:
        yield values.fault(
            pieces, f"there is but one stage of the pipeline: {stages} = 1", f"set {stages} to at least 2"
        )
    group = worker.option("fsdp_size")
    size = values[group] if worker.strategy == "fsdp2" else None
    if size is not None and 1 < size < world and world % size:
        problem = f"must divide the {world} devices of {values.told(mapping)}"
        yield values.fault(group, problem, f"nearest: {group}={nearest_divisor(world, size)}")


def _engines(engine: Worker) -> Iterator[Fault]:
    values, key, devices = engine.values, engine.key("num_gpus_per_worker"), engine.devices
    if devices is not None and len(devices) % values[key]:
        problem = f"must divide the {len(devices)} devices of {values.told(engine.key('device_mapping'))}"
        yield values.fault(key, problem, f"nearest: {key}={nearest_divisor(len(devices), values[key])}")


def updates(worker: Worker) -> tuple[int, int]:
    """Sequences of a step, and sequences of one of the worker's optimizer steps."""
    values = worker.values
    sequences = values[_GLOBAL[0]] * values[_GLOBAL[1]]
    return sequences, _of(worker, PER_DEVICE) * _of(worker, _ACCUMULATED) * worker.world // worker.shards


def _of(worker: Worker, name: str) -> int:
    value = worker.values[worker.key(name)]
    return _DEFAULTS[name] if value is None else int(value)


def _batches(values: Values) -> Iterator[Fault]:
    """A step is a whole number of optimizer steps, the same for policy and critic."""
    policy, critic = Worker(values, "actor_train"), Worker(values, "critic")
    sequences, each = updates(policy)
    if sequences % each:
        problem = (
            f"an optimizer step of {each} sequences doesn't divide the {sequences} of a step, from {_told(policy)}"
        )
        yield values.fault(policy.key(_ACCUMULATED), problem, _fitting(policy))
    elif any(values.given(critic.key(name)) for name in (PER_DEVICE, _ACCUMULATED)):
        theirs = updates(critic)[1]
        if theirs != each:
            key = next(critic.key(name) for name in (_ACCUMULATED, PER_DEVICE) if values.given(critic.key(name)))
            problem = f"the critic would learn from {theirs} sequences at a time, the policy learns from {each}: "
            yield values.fault(key, problem + f"{_told(critic)}; {_told(policy)}", _one_like(critic, each))


def _told(worker: Worker) -> str:
    """All that the arithmetic of batches needs."""
    names = [worker.key(name) for name in (PER_DEVICE, _ACCUMULATED, "device_mapping")]
    needed = (*_GLOBAL, *names, *(key for key in worker.splits if (worker.values[key] or 1) > 1))
    return ", ".join(worker.values.told(key) for key in needed if worker.values[key] is not None)


def _fitting(worker: Worker) -> str:
    """The nearest number of passes, and the one with which a step is one optimizer step."""
    sequences = worker.values[_GLOBAL[0]] * worker.values[_GLOBAL[1]]
    at_once = _of(worker, PER_DEVICE) * worker.world // worker.shards
    key = worker.key(_ACCUMULATED)
    if sequences % at_once:
        prompts = max(1, round(worker.values[_GLOBAL[0]] / at_once)) * at_once
        return f"nearest: {_GLOBAL[0]}={prompts}, a multiple of the {at_once} sequences that are learnt from at once"
    nearest = nearest_divisor(sequences // at_once, _of(worker, _ACCUMULATED))
    degrees = "".join(f" × {name.rpartition('.')[2]}" for name in worker.splits)
    formula = f"{_STEP}{degrees} / per_device_train_batch_size / the {worker.world} devices = {sequences // at_once}"
    return f"nearest: {key}={nearest}; for one update a rollout: {key} = {formula}"


def _one_like(critic: Worker, each: int) -> str:
    passes = each * critic.shards / _of(critic, PER_DEVICE) / critic.world
    key = critic.key(_ACCUMULATED)
    return f"set {key}={passes:.0f}" if passes >= 1 and passes == int(passes) else f"leave {key} out"
