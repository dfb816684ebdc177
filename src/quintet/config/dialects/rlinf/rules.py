"""RLinf's own rules: keys of a configuration that contradict each other."""

from __future__ import annotations

import math
from collections.abc import Iterator

from quintet.config.dialects.chosen import is_outside
from quintet.config.dialects.conversion import Values
from quintet.config.dialects.rlinf.places import Places, places, wrong_places
from quintet.config.dialects.rlinf.words import DTYPES, KL
from quintet.config.divisors import nearest_divisor
from quintet.config.faults import Fault

__all__ = ["embodied_rules", "is_embodied", "is_world", "math_rules", "samples", "shared_rules"]

COMPARING = ("grpo", "grpo_dynamic", "reinpp_baseline")
"""Estimators that compare replies to one prompt."""


def is_world(values: Values) -> bool:
    """Whether it is an environment's own file, and no run."""
    return [reference.name for reference in values.dialect.references] == ["rlinf_env"]


def is_embodied(values: Values) -> bool:
    """Whether it is a run on simulators."""
    return values.dialect.references[0].name == "rlinf_embodied"


def samples(values: Values) -> int:
    """Samples of one training step: chunks of actions, of all environments; 0 where their number isn't said."""
    chunks = math.ceil(values["env.train.max_episode_steps"] / values["actor.model.num_action_chunks"])
    return int((values["env.train.total_num_envs"] or 0) * values["algorithm.rollout_epoch"] * chunks)


def shared_rules(values: Values) -> Iterator[Fault]:
    """What holds for every run."""
    yield from wrong_places(values)
    advantage, loss = values["algorithm.adv_type"], values["algorithm.loss_type"]
    told = values.told("algorithm.adv_type")
    if advantage in COMPARING and values["algorithm.group_size"] < 2:
        problem = f"{told} compares replies to one prompt and has nothing to compare"
        yield values.fault("algorithm.group_size", problem, "nearest: algorithm.group_size=2")
    drawn = "algorithm.sampling_params.do_sample"
    evaluates = str(values["runner.task_type"]).endswith("_eval")
    if advantage in COMPARING and not values[drawn] and not evaluates and not is_embodied(values):
        problem = f"the replies to a prompt would all be the same, and {values.told('algorithm.group_size')}"
        yield values.fault(drawn, problem, f"set {drawn}=true")
    valued = advantage == "gae" or is_outside(advantage)
    if loss in ("actor_critic", "decoupled_actor_critic") and not valued:
        hint = "write ppo or actor, or algorithm.adv_type=gae"
        yield values.fault("algorithm.loss_type", f"trains a critic, and {told} has no use for one", hint)
    if values["critic.use_critic_model"] and not valued:
        hint = "set critic.use_critic_model=false, or algorithm.adv_type=gae"
        yield values.fault("critic.use_critic_model", f"{told} has no use for a critic", hint)
    if values["actor.training_backend"] == "fsdp":
        yield from _mixed_precision(values)


def _mixed_precision(values: Values) -> Iterator[Fault]:
    switch = "actor.fsdp_config.amp_autocast.enabled"
    if not values[switch]:
        return
    keys = [f"actor.fsdp_config.mixed_precision.{name}_dtype" for name in ("param", "reduce", "buffer")]
    if others := [key for key in keys if values[key] is not None and DTYPES[values[key]] != "float32"]:
        problem = f"autocast needs weights in 32 bits, and there is {' and '.join(map(values.told, others))}"
        yield values.fault(switch, problem, f"set {' '.join(f'{key}=fp32' for key in others)}")


def math_rules(values: Values) -> Iterator[Fault]:
    """What holds for runs on text."""
    if values["algorithm.adv_type"] == "gae" and not values["critic.use_critic_model"]:
        problem = f"{values.told('algorithm.adv_type')} needs a critic"
        yield values.fault("critic.use_critic_model", problem, "set critic.use_critic_model=true")
    yield from _lengths(values)
    yield from _rates(values)
    if values["actor.training_backend"] == "megatron":
        yield from _megatron(values)
    where = None if any(wrong_places(values)) else places(values)
    if where is not None:
        yield from _modes(values, where)
        yield from _engines(values, where)
    yield from _batches(values, where)


def _lengths(values: Values) -> Iterator[Fault]:
    whole, prompt, reply = "runner.seq_length", "data.max_prompt_length", "algorithm.sampling_params.max_new_tokens"
    if values[whole] <= values[prompt]:
        problem = f"leaves no token for a reply beside {values.told(prompt)}"
        yield values.fault(whole, problem, f"nearest: {whole}={values[prompt] + 1}")
    elif values[prompt] + values[reply] > values[whole]:
        problem = f"with {values.told(prompt)} it exceeds {values.told(whole)}"
        yield values.fault(reply, problem, f"nearest: {reply}={values[whole] - values[prompt]}")
    cap = "runner.max_tokens_per_mbs"
    if values["runner.enable_dynamic_batch_size"] and values[cap] < values[whole]:
        problem = f"a sequence may have more tokens: {values.told(whole)}"
        yield values.fault(cap, problem, f"nearest: {cap}={values[whole]}")


def _rates(values: Values) -> Iterator[Fault]:
    peak, most = "actor.optim.lr", "actor.lr_sched.max_lr"
    if values.given(most) and values[most] < values[peak]:
        peak = most
    elif values.given(most) and values[most] > values[peak]:
        problem = f"the learning rate never rises above {values.told(peak)}"
        yield values.fault(most, problem, f"leave it out, or nearest: {most}={values[peak]}")
    for key in ("actor.optim.min_lr", "actor.lr_sched.min_lr"):
        if values.given(key) and values[key] > values[peak]:
            yield values.fault(key, f"is above {values.told(peak)}", f"nearest: {key}={values[peak]}")


def _megatron(values: Values) -> Iterator[Fault]:
    start, convert = "actor.model.megatron_checkpoint", "actor.megatron.use_hf_ckpt"
    if values[convert] and values[start] is not None:
        hint = f"set {convert}=false, or leave {start} out"
        yield values.fault(convert, f"the run can't start from {values.told(start)} as well", hint)
    if not values[convert] and values[start] is None:
        hint = f"set {convert}=true, or give {start}"
        yield values.fault(convert, f"there is nothing to start from: {values.told(start)}", hint)
    precision = "actor.model.precision"
    for flag, dtype in {"actor.optim.bf16": "bfloat16", "actor.optim.fp16": "float16"}.items():
        if values.given(flag) and values[flag] and DTYPES[values[precision]] != dtype:
            yield values.fault(flag, f"goes with {dtype}, and there is {values.told(precision)}", f"set {flag}=false")
    gather, shard = "actor.optim.overlap_param_gather", "actor.optim.use_distributed_optimizer"
    if values[gather] and not values[shard]:
        yield values.fault(gather, f"needs the distributed optimizer: {values.told(shard)}", f"set {gather}=false")
    number, index = "actor.megatron.ckpt.use_gpu_num", "actor.megatron.ckpt.use_gpu_index"
    if values[index] is not None and values[number] is not None and len(values[index]) != values[number]:
        problem = f"must name as many devices as {values.told(number)}"
        yield values.fault(index, problem, f"nearest: {number}={len(values[index])}")


def _modes(values: Values, where: Places) -> Iterator[Fault]:
    """Runs on text either take turns on the same devices or lie on devices of their own."""
    parts = {name: where.on(name) for name in ("actor", "rollout", "inference", "critic") if name in where.processes}
    known = {name: devices for name, devices in parts.items() if devices is not None}
    if "actor" not in known or "rollout" not in known or known["actor"] == known["rollout"]:
        return
    names = list(known)
    for number, one in enumerate(names):
        for other in names[number + 1 :]:
            if not known[one].isdisjoint(known[other]):
                told = values.told(where.lines[one])
                problem = f"{one} and {other} must have the same devices, or none in common: {told}"
                yield values.fault(where.lines[other], problem, "give them the same devices, or others")
    for key in ("runner.enable_dynamic_batch_size", "actor.enable_dp_load_balance"):
        if values[key]:
            told = values.told(where.lines["actor"])
            problem = f"learners on devices of their own get sequences one after the other, not a batch: {told}"
            yield values.fault(key, problem, f"set {key}=false, or give actor and rollout the same devices")
    recompute = "rollout.recompute_logprobs"
    if "inference" in known and not values[recompute]:
        problem = f"there is nothing to compute for inference: {values.told(recompute)}"
        yield values.fault(where.lines["inference"], problem, f"leave the line out, or set {recompute}=true")


def _engines(values: Values, where: Places) -> Iterator[Fault]:
    """Tensor parallelism of engine and learner, on the devices that they have."""
    engine, learner = "rollout.tensor_parallel_size", "actor.model.tensor_model_parallel_size"
    for name, tensor, pipeline in (
        ("rollout", engine, "rollout.pipeline_parallel_size"),
        ("actor", learner, "actor.model.pipeline_model_parallel_size"),
    ):
        devices = where.on(name)
        if devices is not None and len(devices) % (values[tensor] * values[pipeline]):
            others = f"{values.told(pipeline)} and {values.told(where.lines[name])}"
            problem = f"the {len(devices)} devices of {name} must be a multiple of it, with {others}"
            fits = len(devices) // values[pipeline] if len(devices) % values[pipeline] == 0 else 0
            hint = f"nearest: {tensor}={nearest_divisor(fits, values[tensor])}" if fits else f"change {pipeline}, too"
            yield values.fault(tensor, problem, hint)
    apart = where.together is False
    if not apart and values["actor.training_backend"] == "megatron" and values[learner] % values[engine]:
        problem = f"must divide {values.told(learner)} where both have the same devices"
        yield values.fault(engine, problem, f"nearest: {engine}={nearest_divisor(values[learner], values[engine])}")


def _batches(values: Values, where: Places | None) -> Iterator[Fault]:
    parts, prompts, each = "algorithm.n_minibatches", "data.rollout_batch_size", "algorithm.group_size"
    total = values[prompts] * values[each]
    if total % values[parts]:
        problem = f"the {total} sequences of a step, from {values.told(prompts)} and {values.told(each)}, must be a "
        problem += "multiple of it"
        yield values.fault(parts, problem, f"nearest: {parts}={nearest_divisor(total, values[parts])}")
        return
    devices = where.on("actor") if where else None
    split = values["actor.model.tensor_model_parallel_size"] * values["actor.model.pipeline_model_parallel_size"]
    ranks = len(devices) // split if devices else 0
    micro, batch = "algorithm.training_batch_size_per_gpu", total // values[parts]
    if not ranks or values["runner.enable_dynamic_batch_size"]:
        return
    if batch % ranks:
        problem = f"the {batch} sequences of an optimizer step can't be shared out to {ranks} data-parallel ranks"
        hint = f"change it, {prompts} or {each}: {total} / {parts} must be a multiple of {ranks}"
        yield values.fault(parts, problem, hint)
    elif batch % (values[micro] * ranks):
        problem = f"the {batch} sequences of an optimizer step must be a multiple of it times {ranks} ranks"
        yield values.fault(micro, problem, f"nearest: {micro}={nearest_divisor(batch // ranks, values[micro])}")


def embodied_rules(values: Values) -> Iterator[Fault]:
    """What holds for runs on simulators."""
    if not values["runner.task_type"].startswith("embodied"):
        hint = "write embodied, or leave the environments and their keys out"
        yield values.fault("runner.task_type", "a run with environments under `env` is embodied", hint)
    if values["algorithm.loss_type"] == "actor" and values["algorithm.adv_type"] == "gae":
        problem = f"trains no value head, and {values.told('algorithm.adv_type')} needs one"
        yield values.fault("algorithm.loss_type", problem, "write ppo or actor_critic")
    yield from _twice(values)
    save, check = "runner.save_interval", "runner.val_check_interval"
    if values[save] > 0 and values[check] > 0 and values[save] % values[check]:
        problem = f"must be a multiple of {values.told(check)}"
        yield values.fault(save, problem, f"nearest: {save}={_multiple(values[save], values[check])}")
    where = None if any(wrong_places(values)) else places(values)
    yield from _games(values, where)
    if not _only_evaluates(values):
        yield from _updates(values, where)
    mode = "rollout.mode"
    apart = values[mode] == "disaggregated"
    if where and where.together is not None and values.given(mode) and where.together == apart:
        lines = dict.fromkeys([where.lines["actor"], where.lines["rollout"]])
        told = " and ".join(map(values.told, lines))
        yield values.fault(mode, f"isn't what the placement says: {told}", "leave it out")


def _only_evaluates(values: Values) -> bool:
    return bool(values["runner.only_eval"]) or values["runner.task_type"] == "embodied_eval"


def _twice(values: Values) -> Iterator[Fault]:
    """What two keys say, and not the same."""
    for one, other in (
        ("rollout.model.model_path", "actor.model.model_path"),
        ("rollout.model.model_type", "actor.model.model_type"),
    ):
        if values.given(one) and values.given(other) and values[one] != values[other]:
            problem = f"the engine plays the policy that learns: {values.told(other)}"
            yield values.fault(one, problem, f"leave it out, or write ${{{other}}}")
    one, other = "algorithm.kl_penalty_type", "algorithm.kl_penalty"
    if values.given(one) and values.given(other) and KL[values[one]] != KL[values[other]]:
        yield values.fault(one, f"says the same as {other}, which differs: {values.told(other)}", "keep one of them")


def _games(values: Values, where: Places | None) -> Iterator[Fault]:
    """Environments fill groups, and groups the stages of each process."""
    group, own = "algorithm.group_size", "env.train.group_size"
    if values[own] not in (1, values[group]):
        yield values.fault(own, f"must be {values.told(group)}", f"write {own}=${{{group}}}")
    validates = values["runner.val_check_interval"] > 0 or _only_evaluates(values)
    kinds = [("train", group)] * (not _only_evaluates(values)) + [("eval", "env.eval.group_size")] * validates
    stages, chunk = "rollout.pipeline_stage_num", "actor.model.num_action_chunks"
    processes = len(where.processes["env"]) if where and "env" in where.processes and where.on("env") else 1
    for kind, size in kinds:
        key, steps = f"env.{kind}.total_num_envs", f"env.{kind}.max_episode_steps"
        unit = processes * values[stages] * values[size]
        if values[key] and values[key] % unit:
            told = f"{values.told(stages)} and {values.told(size)}"
            problem = f"must fill {processes} process{'es' * (processes > 1)}, {told}"
            yield values.fault(key, problem, f"nearest: {key}={_multiple(values[key], unit)}")
        if values.given(steps) and values[steps] % values[chunk]:
            problem = f"must be a multiple of {values.told(chunk)}"
            yield values.fault(steps, problem, f"nearest: {steps}={_multiple(values[steps], values[chunk])}")


def _updates(values: Values, where: Places | None) -> Iterator[Fault]:
    """The samples of a step fill whole optimizer steps, and those whole passes on every device."""
    batch, micro, total = "actor.global_batch_size", "actor.micro_batch_size", samples(values)
    if total and total % values[batch]:
        keys = ("env.train.total_num_envs", "algorithm.rollout_epoch", "env.train.max_episode_steps")
        told = ", ".join(map(values.told, (*keys, "actor.model.num_action_chunks")))
        problem = f"the {total} samples of a step must be a multiple of it: {told}"
        yield values.fault(batch, problem, f"nearest: {batch}={nearest_divisor(total, values[batch])}")
    devices = where.on("actor") if where else None
    if devices and values[batch] % (values[micro] * len(devices)):
        problem = f"{values.told(batch)} must be a multiple of it times {len(devices)} devices"
        fits = values[batch] // len(devices) if values[batch] % len(devices) == 0 else 0
        hint = f"nearest: {micro}={nearest_divisor(fits, values[micro])}" if fits else None
        yield values.fault(micro, problem, hint or f"nearest: {batch}={_multiple(values[batch], len(devices))}")


def _multiple(number: int, of: int) -> int:
    """The multiple nearest to a number, not 0."""
    return max(of, round(number / of) * of)
