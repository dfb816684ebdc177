"""verl's `ppo_trainer.yaml`, `sft_trainer.yaml` and `evaluation.yaml`: one answer to each prompt from a file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from quintet.config.dialects.chosen import choose, express_choice, give_options, option_of
from quintet.config.dialects.conversion import Native, Values
from quintet.config.dialects.dialect import DIALECTS, narrowed
from quintet.config.dialects.engine_choice import express_arguments, hand_arguments_on
from quintet.config.dialects.ledger import Row
from quintet.config.dialects.one_world import refuse_mixtures
from quintet.config.dialects.verl.batches import (
    ACTOR,
    GPUS,
    MODEL,
    ROLLOUT,
    budgets,
    devices,
    express_budgets,
    pass_faults,
    passes,
    share_faults,
)
from quintet.config.dialects.verl.critic import critic, critic_defaults, express_critic
from quintet.config.dialects.verl.objective import clipping, express_objective, refine
from quintet.config.dialects.verl.other_keys import UNCLIPPED
from quintet.config.dialects.verl.rules import (
    divergence_faults,
    group_faults,
    mini_batch_faults,
    shared_faults,
    step_of,
)
from quintet.config.faults import Fault
from quintet.config.native import Experiment, TrainingConfig
from quintet.errors import ConfigError

if TYPE_CHECKING:
    from quintet.config.translate import Foreign

__all__ = [
    "REWARDED",
    "clipping",
    "convert",
    "disagreements",
    "express",
    "express_learning",
    "express_rewards",
    "express_surroundings",
    "frame",
    "learning",
    "policy_frame",
    "rewards",
    "surroundings",
]

ESTIMATORS = {"grpo_vectorized": "grpo", "rloo_vectorized": "rloo"}
"""verl's names of estimators that are called otherwise here."""
LOGGERS = {"file": "jsonl", "tracking": "wandb"}
RESUME = {"auto": "auto", "disable": "never"}
REWARDED = ("custom_reward_function.", "reward_model.")
"""Sections that say what judges a reply."""
FUNCTION = ("custom_reward_function.path", "custom_reward_function.name")
ARGUMENTS, MANAGER = "custom_reward_function.reward_kwargs", "reward_model.reward_manager"
LONGEST, OVERLONG = "reward_model.reward_kwargs.max_resp_len", "reward_model.reward_kwargs.overlong_buffer_cfg"
STEPS = f"{ACTOR}.optim.total_training_steps"
ASYNC = "async_training"
STORE = "trainer.default_hdfs_dir"
DTYPES = {"half": "float16", "float": "float32"}


def _kind(values: Values) -> str:
    names = {reference.name for reference in values.dialect.references}
    return next((kind for kind in ("sft", "evaluation") if any(f"verl_{kind}" in name for name in names)), "ppo")


def disagreements(values: Values) -> Iterator[Fault]:
    """What verl asserts when it starts, and where its reference leaves two keys to contradict each other."""
    if _kind(values) != "ppo":
        return
    step, with_critic = step_of(values), values["algorithm.adv_estimator"] == "gae"
    yield from mini_batch_faults(values)
    yield from share_faults(values, step)
    yield from pass_faults(values, step, passes(values, critic=with_critic, reference=_has_reference(values)))
    yield from group_faults(values, f"{ROLLOUT}.n")
    yield from divergence_faults(values)
    yield from shared_faults(values)
    yield from _overlong_faults(values)


def convert(values: Values, native: Native) -> None:
    """What a verl run is, natively."""
    native.put("warm_start", None)
    native.put("world", {"name": "prompts"})
    kind = _kind(values)
    if kind == "ppo":
        _reinforced(values, native)
    elif kind == "sft":
        _supervised(values, native)
    else:
        native.take_rows(values.dialect.rows().values())
        native.put("evaluation.function", _function(values), *FUNCTION)
        native.put("name", _name_of(values["data.path"]), "data.path")


def _name_of(path: str) -> str:
    """A run's name from that of the file that it judges."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", PurePath(path).stem).strip("-._") or "evaluation"


def _reinforced(values: Values, native: Native) -> None:
    critic_defaults(values, native)
    native.take_rows(values.dialect.rows().values())
    _data(values, native)
    rewards(values, native)
    mini = (f"{ACTOR}.ppo_mini_batch_size", "data.train_batch_size")
    native.put("training.mini_batches", values[mini[1]] // values[mini[0]], *mini)
    _steps(values, native)
    _algorithm(values, native)
    learning(values, native)
    for ours, engine, data in (
        ("rollout.max_prompt_tokens", f"{ROLLOUT}.prompt_length", "data.max_prompt_length"),
        ("rollout.max_response_tokens", f"{ROLLOUT}.response_length", "data.max_response_length"),
    ):
        native.put(ours, values[engine], engine, data)
    native.put("rollout.max_turns", 1)
    native.put("rollout.think", False)
    native.put("rollout.format_penalty", 0.0)
    surroundings(values, native)


def _data(values: Values, native: Native) -> None:
    for ours, theirs in {"train_files": "data.train_files", "validation_files": "data.val_files"}.items():
        native.put(f"data.{ours}", _list(values[theirs]), theirs)
    keys = ("data.custom_cls.path", "data.custom_cls.name")
    if values[keys[0]] is not None:
        native.put("data.dataset_class", f"{values[keys[0]]}:{values[keys[1]]}", *keys)


def rewards(values: Values, native: Native) -> None:
    """What judges a reply."""
    native.put("reward.kind", "rules")
    native.put("reward.function", _function(values), *FUNCTION)
    if values[FUNCTION[0]] is not None:
        native.put("reward.function_arguments", values[ARGUMENTS] or {}, ARGUMENTS)
    _overlong(values, native)
    enabled, path, libraries = (f"reward_model.{key}" for key in ("enable", "model.path", "model.external_lib"))
    if values[enabled]:
        native.put("reward.model.path", values[path], path, enabled)
        native.put("reward.model.external_libs", _list(values[libraries]), libraries)
    else:
        native.put("reward.model", None, enabled)


def _overlong(values: Values, native: Native) -> None:
    """DAPO's penalty on long replies; without it, its manager judges as the naive one does."""
    if values[MANAGER] != "dapo":
        return
    enabled, buffer, penalty = (f"{OVERLONG}.{key}" for key in ("enable", "len", "penalty_factor"))
    native.put("reward.manager", "dapo" if values[enabled] else "naive", MANAGER, enabled)
    if not values[enabled]:
        return
    native.put("reward.overlong.buffer", values[buffer], buffer, LONGEST)
    native.put("reward.overlong.penalty", float(values[penalty]), penalty)


def _overlong_faults(values: Values) -> Iterator[Fault]:
    enabled, buffer, longest = f"{OVERLONG}.enable", f"{OVERLONG}.len", f"{ROLLOUT}.response_length"
    if values[MANAGER] != "dapo" or not values[enabled]:
        return
    if values[buffer] is None:
        yield values.fault(buffer, f"{values.told(enabled)} needs it", f"give a number of tokens, or {enabled}=false")
    elif values[buffer] > values[longest]:
        problem = f"is more than the longest reply, {values.told(longest)}"
        yield values.fault(buffer, problem, f"at most: {buffer}={values[longest]}")
    if values[LONGEST] not in (None, values[longest]):
        problem = f"says otherwise than {values.told(longest)}"
        yield values.fault(LONGEST, problem, "leave it out: it follows data.max_response_length")


def _function(values: Values) -> str | None:
    """The user's own rules as `file.py:function`."""
    path, name = (values[key] for key in FUNCTION)
    return None if path is None else f"{path}:{name}"


def _list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _steps(values: Values, native: Native) -> None:
    """A number of steps, or passes over the data; where both were given, whichever ends first."""
    passes, limited = "trainer.total_epochs", (values[STEPS] or -1) > 0
    if limited and not values.given(passes):
        native.put("training.steps", values[STEPS], STEPS)
        native.put("data.epochs", None, STEPS)
        return
    native.put("data.epochs", values[passes], passes)
    native.put("data.max_steps", values[STEPS] if limited else None, STEPS)


def learning(values: Values, native: Native) -> None:
    """Policy, critic and reference: how they learn `algorithm`, which is there already. VAGEN does the same, on
    games."""
    native.put("policy.preset", None, f"{MODEL}.path")
    _generation(values, native)
    libraries, overrides = f"{MODEL}.external_lib", f"{MODEL}.override_config.model_config"
    native.put("external_libs", _list(values[libraries]), libraries)
    native.put("policy.overrides", values[overrides] or {}, overrides)
    critic(values, native)
    algorithm = native.tree["algorithm"]
    with_critic, reference = algorithm["advantage"]["name"].endswith("gae"), algorithm["kl"] is not None
    budgets(values, native, passes(values, critic=with_critic, reference=reference))
    native.put("actor.optimizer.betas", [0.9, 0.999])
    if values[f"{ACTOR}.optim.weight_decay"] is None:
        native.put("actor.optimizer.weight_decay", 0.01)
    for part, section in (("actor", f"{ACTOR}.optim"), ("critic", "critic.optim")):
        _warmup(values, native, part, section)
        _megatron(values, native, part, section)
    for part in ("actor", "reference"):
        native.put(f"{part}.backend", values[f"{ACTOR}.strategy"], f"{ACTOR}.strategy")
        padding = f"{MODEL}.use_remove_padding"
        native.put(f"{part}.memory.remove_padding", values[padding], padding)
    refine(values, native)


def _generation(values: Values, native: Native) -> None:
    """The engine's type, its further arguments, and games that outlast their step."""
    key = f"{ROLLOUT}.dtype"
    dtype = DTYPES.get(values[key], values[key])
    shared = dtype in ("bfloat16", "float32")
    native.put("policy.dtype", dtype if shared else "bfloat16", key)
    native.put("rollout.engine_options.dtype", None if shared else dtype, key)
    hand_arguments_on(values, native)
    ahead, partial, freed = f"{ASYNC}.staleness_threshold", f"{ASYNC}.partial_rollout", f"{ROLLOUT}.free_cache_engine"
    native.put("rollout.async_ratio", float(values[ahead]), ahead)
    native.put("rollout.partial", values[partial] and values[ahead] > 0, partial, ahead)
    if values[ahead] and not values.given(freed):
        native.put("rollout.engine_options.sleep_between_steps", False, ahead)


def _algorithm(values: Values, native: Native) -> None:
    estimator = "algorithm.adv_estimator"
    choose(native, "algorithm.advantage", values[estimator], ESTIMATORS, estimator)
    keys = {name: f"algorithm.{name}" for name in ("gamma", "lam")}
    give_options(native, "algorithm.advantage", {name: (float(values[key]), (key,)) for name, key in keys.items()})
    clipping(values, native)
    _divergence(values, native)


def _has_reference(values: Values) -> bool:
    return bool(values[f"{ACTOR}.use_kl_loss"] or values["algorithm.use_kl_in_reward"])


def _divergence(values: Values, native: Native) -> None:
    """The coefficient and the estimator of whichever is switched on are rows."""
    switches = (f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward")
    if not _has_reference(values):
        native.put("algorithm.kl", None, *switches)
        return
    native.put("algorithm.kl.place", "loss" if values[switches[0]] else "reward", *switches)
    control = ("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.type")
    steered = values[switches[1]] and values[control[1]] == "adaptive"
    native.put("algorithm.kl.target", values[control[0]] if steered else None, *control)


def _warmup(values: Values, native: Native, part: str, section: str) -> None:
    """Steps, or else a share of them; Megatron takes 0 steps for none said."""
    steps, ratio = f"{section}.lr_warmup_steps", f"{section}.lr_warmup_steps_ratio"
    given = -1 if values[steps] is None else values[steps]
    said = given > 0 or (given == 0 and not _is_megatron(values))
    share = 0.0 if said else float(values[ratio] or 0.0)
    total = values[f"{section}.lr_decay_steps"] or values[STEPS] or -1
    if share and total > 0:
        given, share = int(share * total), 0.0
    native.put(f"{part}.optimizer.warmup_steps", max(0, given), steps, ratio)
    native.put(f"{part}.optimizer.warmup_ratio", share, ratio, steps)


def _is_megatron(values: Values) -> bool:
    """Whether the optimizer's section is that of Megatron."""
    return values[f"{ACTOR}.optim.lr_decay_style"] is not None


def _megatron(values: Values, native: Native, part: str, section: str) -> None:
    """Megatron's optimizer has a lowest learning rate where others have a share, and a norm of its own."""
    least, peak = f"{section}.min_lr", f"{section}.lr"
    if values[least] is not None:
        rate = native.tree[part]["optimizer"]["learning_rate"]
        native.put(f"{part}.optimizer.min_learning_rate_ratio", values[least] / rate, least, peak)
    elif _is_megatron(values):
        native.put(f"{part}.optimizer.min_learning_rate_ratio", 0.0)
    norm, older = f"{section}.clip_grad", f"{section.removesuffix('.optim')}.grad_clip"
    if values.given(norm) or (values[norm] is not None and not values.given(older)):
        native.put(f"{part}.optimizer.max_grad_norm", float(values[norm] or UNCLIPPED), norm)


def surroundings(values: Values, native: Native) -> None:
    """Where the run writes, and where it goes on from."""
    written = values["trainer.logger"]
    names = [LOGGERS.get(name, name) for name in _list(written)]
    native.put("tracking.loggers", list(dict.fromkeys(["jsonl", *names])), "trainer.logger")
    _directory(values, native)
    mode, path = "trainer.resume_mode", "trainer.resume_from_path"
    if values[mode] is not None:
        native.put("resume", RESUME.get(values[mode]) or values[path], mode, path)
    if values.given(STORE):
        native.put("checkpoint.remote_dir", values[STORE], STORE)


def _directory(values: Values, native: Native) -> None:
    """The directory is split into its last part, the run's name, and what lies above; where that isn't the name
    of the experiment, the experiment gets a directory of its own below."""
    keys = ("trainer.default_local_dir", "trainer.experiment_name")
    directory, name = values[keys[0]].rstrip("/"), values[keys[1]]
    above, _, last = directory.rpartition("/")
    if last == name or not values.given(keys[1]):
        native.put("output_dir", above or ("/" if directory.startswith("/") else "."), *keys)
        native.put("name", last, *keys)
    else:
        native.put("output_dir", directory, *keys)
        native.put("name", name, *keys)


def _supervised(values: Values, native: Native) -> None:
    native.take_rows(values.dialect.rows().values())
    model = "model.partial_pretrain"
    native.put("policy.preset", None, model)
    native.put("policy.path", values[model], model)
    native.put("sft.path", values[model], model)
    native.put("external_libs", _list(values["model.external_lib"]), "model.external_lib")
    offload = ("model.fsdp_config.cpu_offload", "model.fsdp_config.offload_params")
    native.put("actor.memory.sharded_offload", values[offload[0]] and values[offload[1]], *offload)
    if values["model.lora_rank"]:
        for ours, theirs in {"rank": "lora_rank", "alpha": "lora_alpha"}.items():
            native.put(f"sft.lora.{ours}", values[f"model.{theirs}"], f"model.{theirs}")
        native.put("sft.lora.target_modules", _list(values["model.target_modules"]), "model.target_modules")
    else:
        native.put("sft.lora", None, "model.lora_rank")
    native.put("sft.devices", devices(values), *GPUS)
    native.put("sft.optimizer.warmup_steps", 0)
    native.put("sft.optimizer.min_learning_rate_ratio", 0.0)
    native.put("data.kind", "conversations")
    _data(values, native)
    _columns(values, native)
    surroundings(values, native)


def _columns(values: Values, native: Native) -> None:
    """Columns of prompt and answer, or of a conversation; names lead on into mappings."""
    for name in ("prompt", "response"):
        column, inside = f"data.{name}_key", f"data.{name}_dict_keys"
        if values[column] is not None:
            native.put(column, ".".join([values[column], *(values[inside] or ())]), column, inside)
    whole, messages = "data.multiturn.enable", "data.multiturn.messages_key"
    native.put("data.messages_key", values[messages] if values[whole] else None, whole, messages)


def frame(experiment: Experiment) -> dict[str, Any]:
    """The file by which verl says such a run.

    Raises:
        ConfigError: verl plays no worlds, and solves none.
    """
    if experiment.evaluation is not None:
        return {"data": {"path": experiment.evaluation.path}}
    if experiment.sft is not None:
        if experiment.sft.games is not None:
            message = "verl fine-tunes on conversations from files; games that a search solves are none"
            raise ConfigError(message, key="sft", hint="ragen has them")
        return {"model": {"partial_pretrain": experiment.sft.path or experiment.policy.path or "model"}}
    refuse_mixtures(experiment, "verl")
    if experiment.world.name != "prompts":
        message = f"verl answers prompts from files and has no world {experiment.world.name}"
        raise ConfigError(message, key="world.name", hint="ragen and vagen have worlds")
    return policy_frame(experiment)


def policy_frame(experiment: Experiment) -> dict[str, Any]:
    """The sections that make a file one of reinforcement learning, and Megatron's optimizer where it learns."""
    policy: dict[str, Any] = {"model": {"path": experiment.policy.path or "model"}}
    if experiment.actor.backend == "megatron":
        policy["actor"] = {"strategy": "megatron"}
    return {"actor_rollout_ref": policy}


def express(foreign: Foreign) -> None:
    """A native run in verl's words, as far as it has them."""
    run = foreign.experiment
    rows = narrowed(DIALECTS["verl"], frame(run)).rows()
    if run.evaluation is not None:
        _express_function(foreign, run.evaluation.function)
    elif run.sft is not None:
        _express_supervised(foreign)
    else:
        _express_reinforced(foreign, rows)
        express_critic(foreign, rows)


def _express_reinforced(foreign: Foreign, rows: Mapping[str, Row]) -> None:
    run = foreign.experiment
    foreign.put(f"{ACTOR}.ppo_mini_batch_size", max(1, run.training.groups_per_step // run.training.mini_batches))
    express_learning(foreign, rows)
    _express_algorithm(foreign)
    _express_data(foreign)
    if run.data and run.data.epochs and run.training.steps == TrainingConfig().steps:
        foreign.put("trainer.total_epochs", run.data.epochs)
        foreign.put(STEPS, run.data.max_steps or -1)
    else:
        foreign.put(STEPS, run.training.steps or -1)
    express_rewards(foreign)
    express_surroundings(foreign)


def express_rewards(foreign: Foreign) -> None:
    """What judges a reply, in verl's words."""
    reward = foreign.experiment.reward
    if reward is None:
        return
    _express_function(foreign, reward.function)
    foreign.put(ARGUMENTS, reward.function_arguments)
    if reward.overlong is not None:
        foreign.put(MANAGER, "dapo")
        foreign.put(f"{OVERLONG}.enable", True)
        foreign.put(f"{OVERLONG}.len", reward.overlong.buffer)
        foreign.put(f"{OVERLONG}.penalty_factor", reward.overlong.penalty)
    foreign.put("reward_model.enable", reward.model is not None)
    if reward.model:
        foreign.put("reward_model.model.path", reward.model.path)
        foreign.put("reward_model.model.external_lib", list(reward.model.external_libs) or None)


def _express_function(foreign: Foreign, function: str | None) -> None:
    path, _, name = (function or "").rpartition(":")
    foreign.put(FUNCTION[0], path or None)
    foreign.put(FUNCTION[1], name or "compute_score")


def _express_data(foreign: Foreign) -> None:
    data = foreign.experiment.data
    if data is None:
        return
    for key, files in {"train_files": data.train_files, "val_files": data.validation_files}.items():
        foreign.put(f"data.{key}", files[0] if len(files) == 1 else list(files))
    path, _, name = (data.dataset_class or "").rpartition(":")
    foreign.put("data.custom_cls.path", path or None)
    foreign.put("data.custom_cls.name", name or None)


def express_learning(foreign: Foreign, rows: Mapping[str, Row]) -> None:
    """Policy, critic and reference in verl's words."""
    run = foreign.experiment
    foreign.put(f"{MODEL}.external_lib", list(run.external_libs) or None)
    foreign.put(f"{MODEL}.override_config.model_config", run.policy.overrides)
    foreign.put(f"{MODEL}.use_remove_padding", run.actor.memory.remove_padding)
    foreign.put(f"{ACTOR}.strategy", run.actor.backend)
    _express_generation(foreign)
    foreign.put(f"{ACTOR}.use_kl_loss", run.algorithm.kl is not None and run.algorithm.kl.place == "loss")
    express_objective(foreign)
    _express_optimizers(foreign)
    express_budgets(foreign, rows)


def _express_generation(foreign: Foreign) -> None:
    rollout = foreign.experiment.rollout
    foreign.put(f"{ROLLOUT}.dtype", rollout.engine_options.dtype or foreign.experiment.policy.dtype)
    express_arguments(foreign, {engine: f"{ROLLOUT}.engine_kwargs.{engine}" for engine in ("vllm", "sglang")})
    foreign.put(f"{ASYNC}.staleness_threshold", rollout.async_ratio)
    foreign.put(f"{ASYNC}.partial_rollout", rollout.partial or not rollout.async_ratio)


def _express_algorithm(foreign: Foreign) -> None:
    kl = foreign.experiment.algorithm.kl
    express_choice(foreign, "algorithm.advantage", "algorithm.adv_estimator", {})
    for option in ("gamma", "lam"):
        foreign.put(f"algorithm.{option}", option_of(foreign.experiment.algorithm.advantage, option, 1.0))
    foreign.put("algorithm.use_kl_in_reward", kl is not None and kl.place == "reward")
    if kl and kl.target is not None:
        foreign.put("algorithm.kl_ctrl.type", "adaptive")
        foreign.put("algorithm.kl_ctrl.target_kl", kl.target)


def _express_optimizers(foreign: Foreign) -> None:
    run = foreign.experiment
    for learner, section in ((run.actor, f"{ACTOR}.optim"), (run.critic, "critic.optim")):
        optimizer = learner.optimizer
        if optimizer.warmup_steps:
            foreign.put(f"{section}.lr_warmup_steps", optimizer.warmup_steps)
        elif optimizer.warmup_ratio:
            foreign.put(f"{section}.lr_warmup_steps_ratio", optimizer.warmup_ratio)
        if run.actor.backend == "megatron" and optimizer.min_learning_rate_ratio:
            foreign.put(f"{section}.min_lr", optimizer.min_learning_rate_ratio * optimizer.learning_rate)


def express_surroundings(foreign: Foreign) -> None:
    """Where the run writes, and where it goes on from, in verl's words."""
    run = foreign.experiment
    foreign.put("trainer.logger", [name for name in run.tracking.loggers if name != "jsonl"])
    foreign.put("trainer.experiment_name", run.name)
    above = "" if run.output_dir == "." else run.output_dir.rstrip("/") + "/"
    foreign.put("trainer.default_local_dir", f"{above}{run.name}")
    modes = {ours: theirs for theirs, ours in RESUME.items()}
    foreign.put("trainer.resume_mode", modes.get(run.resume, "resume_path"))
    foreign.put("trainer.resume_from_path", None if run.resume in modes else run.resume)
    foreign.put(STORE, run.checkpoint.remote_dir)


def _express_supervised(foreign: Foreign) -> None:
    run = foreign.experiment
    sft = run.sft
    if sft is None:
        return
    foreign.put("model.external_lib", run.external_libs[0] if run.external_libs else None)
    for key in ("cpu_offload", "offload_params"):
        foreign.put(f"model.fsdp_config.{key}", run.actor.memory.sharded_offload)
    foreign.put("model.lora_rank", sft.lora.rank if sft.lora else 0)
    if sft.lora:
        foreign.put("model.lora_alpha", int(sft.lora.alpha))
        modules = list(sft.lora.target_modules)
        foreign.put("model.target_modules", modules[0] if len(modules) == 1 else modules)
    _express_data(foreign)
    if run.data:
        foreign.put("data.prompt_key", run.data.prompt_key)
        foreign.put("data.response_key", run.data.response_key)
        foreign.put("data.multiturn.enable", run.data.messages_key is not None)
        foreign.put("data.multiturn.messages_key", run.data.messages_key or "messages")
    express_surroundings(foreign)
