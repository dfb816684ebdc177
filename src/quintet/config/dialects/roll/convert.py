"""ROLL's pipelines: prompts from files or games, and workers for learning, generation, reference and critic.

Its reference leaves out much of what a ROLL file says; what stands for that here:

- No key names the run or its model; those of `roll_run_keys` are read all the same. Without `pretrain` the policy is
  the small one that the native schema makes on the spot. The critic starts from the policy.
- No key names a world. Prompts come from `actor_train.data_args.file_name` where somebody gave it; else the native
  default world is played, after its warm start.
- No key names the rules that judge answers: they are those of ROLL's `MathRuleRewardWorker`, our `math`.
- No key names the estimator; ROLL's own `adv_estimator` and the others of `algorithm_keys` are read all the same.
  Without it a `critic` section makes the run PPO with GAE, as ROLL's own default is; without that, too, the sequences
  of `num_return_sequences_in_group` are compared with each other (GRPO).
- A `reference` section makes a reference model. ROLL measures the divergence from it by `k1` and takes nothing off for
  it, coefficient 0, unless `add_token_level_kl` or `use_kl_loss` is true: these make one without such a section, too.
- The rest has ROLL's defaults: AdamW with a linear decay to 0, losses whose ratio is clipped by 0.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from quintet.config.dialects.conversion import Native, Values
from quintet.config.dialects.engine_choice import hand_arguments_on
from quintet.config.dialects.ledger import Row
from quintet.config.dialects.roll.algorithm import (
    convert_algorithm,
    convert_kl,
    needs_reference,
    trains_critic,
)
from quintet.config.dialects.roll.expression import express, frame
from quintet.config.dialects.roll.rules import PER_DEVICE, disagreements, updates
from quintet.config.dialects.roll.sampling_keys import DRAWN, VALIDATION
from quintet.config.dialects.roll.worker_keys import MODEL_DTYPES, SHARD_DTYPES
from quintet.config.dialects.roll.workers import CRITIC, LEARNERS, Worker, alike, counts, workers

__all__ = ["convert", "disagreements", "express", "frame"]

GPUS_PER_NODE = 8
"""Of ROLL's machines; its reference has no key for it."""
AHEAD = "async_generation_ratio"
EVERY_CHECKPOINT = 1_000_000
"""More than any run writes: ROLL keeps them all."""
CONSTANTS: dict[str, Any] = {
    "checkpoint.keep": EVERY_CHECKPOINT,
    "rollout.recompute_logprobs": True,
    "algorithm.drop_groups_without_signal": False,
}
"""What ROLL does where its reference says nothing."""
OPTIMIZER: dict[str, Any] = {
    "schedule": "linear",
    "min_learning_rate_ratio": 0.0,
    "betas": [0.9, 0.999],
    "epsilon": 1e-8,
    "max_grad_norm": 1.0,
}


def convert(values: Values, native: Native) -> None:
    """What a ROLL run is, natively."""
    rows = values.dialect.rows()
    for key, value in CONSTANTS.items():
        native.put(key, value)
    native.take_rows(row for row in rows.values() if not row.key.startswith(("reference.", "critic.")))
    if values["pretrain"] is not None:
        native.put("policy.preset", None, "pretrain")
        native.put("policy.path", values["pretrain"], "pretrain")
        native.put("warm_start", None, "pretrain")
    _prompts(values, native)
    _batches(values, native)
    _generation(Worker(values, "actor_infer"), native)
    _validation(values, native)
    for worker in workers(values):
        if worker.name in LEARNERS:
            _learner(worker, native)
    convert_algorithm(values, native, Worker(values, "critic").given)
    _reference(Worker(values, "reference"), native, rows.values())
    _critic(Worker(values, "critic"), native, rows.values())
    _placement(values, native)


def _prompts(values: Values, native: Native) -> None:
    """Prompts from files, each answered in one turn."""
    file, template, prompt, messages = (
        f"actor_train.data_args.{name}" for name in ("file_name", "template", "prompt", "messages")
    )
    if not values.given(file) or values[file] is None:
        native.remarks.append(f"{file} names no file, so the world of the native schema is played")
        idle = [values.told(key) for key in (template, prompt, messages) if values.given(key)]
        native.remarks += [f"{told} has no effect: {file} names no file" for told in idle]
        return
    native.put("world", {"name": "prompts"}, file)
    native.put("data.train_files", [values[file]] if isinstance(values[file], str) else values[file], file)
    if values[template] != "native":
        native.put("data.template", values[template], template)
    if values[messages] is None:
        native.put("data.prompt_key", values[prompt], prompt)
    else:
        native.put("data.messages_key", values[messages], messages)
    native.put("data.filter_long_prompts", True)
    native.put("reward.kind", "math", file)
    native.put("warm_start", None, file)
    native.put("rollout.max_turns", 1, file)
    native.put("rollout.format_penalty", 0.0, file)
    native.put("rollout.think", False, file)


def _batches(values: Values, native: Native) -> None:
    policy = Worker(values, "actor_train")
    sequences, each = updates(policy)
    origins = [policy.key("training_args.gradient_accumulation_steps"), policy.key(PER_DEVICE)]
    origins += ["rollout_batch_size", "num_return_sequences_in_group", policy.key("device_mapping"), *policy.splits]
    native.put("training.mini_batches", sequences // each, *origins)
    native.put("actor.budget.sequences", values[policy.key(PER_DEVICE)], policy.key(PER_DEVICE))


def _generation(engine: Worker, native: Native) -> None:
    values = engine.values
    lengths = ("response_length", engine.key("generating_args.max_new_tokens"))
    reply = min(values[length] for length in lengths if values[length] is not None)
    native.put("rollout.max_response_tokens", reply, *lengths, f"{VALIDATION}max_new_tokens")
    dtype = engine.key("model_args.dtype")
    native.put("rollout.engine_options.dtype", _own_dtype(values, dtype), dtype)
    devices = engine.key("num_gpus_per_worker")
    native.put("placement.rollout.devices_per_worker", values[devices], devices)
    if engine.strategy != "hf":
        native.put("rollout.engine_options.tensor_parallel", values[devices], devices)
        weights = engine.option("load_format")
        native.put("rollout.engine_options.load_format", values[weights], weights)
    hand_arguments_on(values, native)
    ahead = values[AHEAD]
    native.put("rollout.async_ratio", float(ahead), AHEAD)
    native.put("rollout.max_staleness", math.ceil(ahead) or None, AHEAD)
    native.put("rollout.partial", ahead > 0, AHEAD)


def _validation(values: Values, native: Native) -> None:
    """How validation draws; without a section of its own it takes the likeliest token each time."""
    here = any(key.startswith("validation.") for key in values.written.sources)
    switch, temperature, share, most = (f"{VALIDATION}{name}" for name in ("do_sample", *DRAWN))
    drawn = here and values[switch] and values[temperature] > 0
    native.put("validation.sampling.do_sample", drawn, switch, temperature)
    if drawn:
        native.put("validation.sampling.temperature", float(values[temperature]), temperature)
        native.put("validation.sampling.top_p", float(values[share]), share)
        native.put("validation.sampling.top_k", max(0, values[most]), most)
    files = "validation.data_args.file_name"
    if values[files] is not None and "data" in native.tree:
        native.put("data.validation_files", [values[files]] if isinstance(values[files], str) else values[files], files)


def _own_dtype(values: Values, key: str) -> str | None:
    """The type of a worker's weights, None where it is the policy's."""
    policy = values["actor_train.model_args.dtype"]
    return None if values[key] == policy else MODEL_DTYPES[values[key]]


def _learner(worker: Worker, native: Native) -> None:
    """Options of a strategy that follow from several keys; those of `actor_train` where a worker takes them too."""
    values, ours = worker.values, LEARNERS[worker.name]
    if worker.name != "actor_train":
        rows = [row for row in alike(worker.name) if counts(row, worker.strategy)]
        native.take_given(rows, worker.name, "actor_train", {"actor": ours})
    if worker.strategy == "fsdp2":
        group, dtype = worker.option("fsdp_size"), worker.option("param_dtype")
        if values[group] is not None:
            native.put(
                f"{ours}.sharding.group_size", values[group] if 1 < values[group] < worker.world else None, group
            )
        if values[dtype] is not None:
            shard = SHARD_DTYPES[values[dtype]]
            same = shard == MODEL_DTYPES[_dtype(worker)]
            native.put(f"{ours}.sharding.parameter_dtype", None if same else shard, dtype)
    granularity = worker.option("recompute_granularity")
    if worker.strategy == "megatron" and (worker.name == "actor_train" or values.given(granularity)):
        native.put(f"{ours}.megatron.recompute_granularity", values[granularity], granularity)
        if ours != "reference":
            native.put(f"{ours}.gradient_checkpointing", values[granularity] == "full", granularity)


def _dtype(worker: Worker) -> str | None:
    """What a worker's `dtype` is; the policy's where nobody gave it to a critic."""
    key = worker.key("model_args.dtype")
    given = worker.name != "critic" or worker.values.given(key)
    dtype: str | None = worker.values[key if given else "actor_train.model_args.dtype"]
    return dtype


def _reference(reference: Worker, native: Native, rows: Iterable[Row]) -> None:
    values, own = reference.values, [row for row in rows if row.key.startswith("reference.")]
    if not reference.given and not needs_reference(values):
        native.put("algorithm.kl", None, *(row.key for row in own))
        return
    convert_kl(values, native)
    native.take_rows(own)
    strategy, dtype = (reference.key(name) for name in ("strategy_args.strategy_name", "model_args.dtype"))
    native.put("reference.backend", "megatron" if reference.strategy == "megatron" else "fsdp2", strategy)
    if reference.strategy == "hf":
        native.put("reference.sharding.policy", "no_shard", strategy)
    native.put("reference.dtype", _own_dtype(values, dtype), dtype)


def _critic(critic: Worker, native: Native, rows: Iterable[Row]) -> None:
    values, own = critic.values, [row for row in rows if row.key.startswith("critic.")]
    for key, value in OPTIMIZER.items():
        native.put(f"actor.optimizer.{key}", value)
        native.put(f"critic.optimizer.{key}", value)
    for key, value in CRITIC.items():
        if key not in native.origins:
            native.put(key, value)
    if not trains_critic(values, critic.given):
        idle = [values.told(key) for key in values.written.leaves() if key.startswith("critic.")]
        native.remarks += [f"{told} has no effect: {values.told('adv_estimator')} trains no critic" for told in idle]
        return
    native.take_rows(own)
    recomputes = "critic.gradient_checkpointing"
    if recomputes in native.origins and native.tree["critic"]["gradient_checkpointing"] == _recomputes(native):
        native.put(recomputes, None, *native.origins[recomputes])
    dtype = critic.key("model_args.dtype")
    if values.given(dtype):
        native.put("critic.dtype", _own_dtype(values, dtype), dtype)
    if values.given(critic.key(PER_DEVICE)):
        native.put("critic.budget.sequences", values[critic.key(PER_DEVICE)], critic.key(PER_DEVICE))


def _recomputes(native: Native) -> bool:
    """Whether the policy's learner computes activations again; a critic that does the same asks for nothing."""
    return bool(native.tree["actor"].get("gradient_checkpointing"))


def _placement(values: Values, native: Native) -> None:
    """Machines of 8 GPUs, as many as the highest number needs, and each worker's share of them."""
    places = {worker.name: worker.devices for worker in workers(values)}
    total = 1 + max((max(devices) for devices in places.values() if devices), default=0)
    nodes = -(-total // GPUS_PER_NODE)
    per_node = total if nodes == 1 else GPUS_PER_NODE
    # a worker on the first device alone asks for no more of them
    asking = [name for name, devices in places.items() if devices and max(devices) > 0] or list(places)
    origins = [f"{name}.device_mapping" for name in asking]
    native.put("placement.nodes", nodes, *origins)
    native.put("placement.devices_per_node", per_node, *origins)
    on_cpu = not any(places.values())
    for name, devices in places.items():
        everywhere = on_cpu or devices == tuple(range(nodes * per_node))
        ours = LEARNERS.get(name, "rollout")
        native.put(f"placement.{ours}.devices", None if everywhere else devices or (), f"{name}.device_mapping")
    learns, plays = (set(places[name] or ()) for name in ("actor_train", "actor_infer"))
    apart = bool(learns and plays and not learns & plays)
    native.put("placement.colocated", not apart, "actor_train.device_mapping", "actor_infer.device_mapping")
