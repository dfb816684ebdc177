"""RLinf's runs on simulators: vision-language-action policies; and a simulator's own file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from quintet.config.dialects.conversion import Native, Values
from quintet.config.dialects.rlinf.math import convert_backend, express_backend
from quintet.config.dialects.rlinf.rules import samples
from quintet.config.native import TrainingConfig
from quintet.config.native.worlds import SimulatorConfig

if TYPE_CHECKING:
    from quintet.config.native.policy import LoraConfig
    from quintet.config.native.tracking import VideoConfig
    from quintet.config.translate import Foreign

__all__ = ["convert_embodied", "convert_world", "express_embodied", "express_world"]

WEIGHT_DECAY = 0.01
"""Of RLinf's FSDP learner; its reference has none for embodied runs."""
WORLDS = {"train": "world", "eval": "validation.simulator"}
VIDEOS = {"train": "tracking.video", "eval": "tracking.validation_video"}


def convert_world(values: Values, native: Native) -> None:
    """A run with the simulator of that file, all else as the native schema has it."""
    native.take_rows(values.dialect.rows().values())
    native.put("world.name", "simulator", "env_type")
    native.put("world.max_steps", values["max_episode_steps"], "max_episode_steps")
    total, group = "total_num_envs", "group_size"
    native.put("world.environments", values[total], total)
    # one of its kind makes no group: how large those are is left to the run
    if values[group] > 1:
        native.put("training.samples_per_group", values[group], group)
    if values[total]:
        native.put("training.groups_per_step", max(1, values[total] // values[group]), total, group)
    _video(values, native, "video_cfg", "tracking.video")


def _video(values: Values, native: Native, section: str, ours: str) -> None:
    switch, overlay, directory = (f"{section}.{name}" for name in ("save_video", "info_on_video", "video_base_dir"))
    if not values[switch]:
        native.put(ours, None, switch)
        return
    native.put(f"{ours}.overlay", values[overlay], overlay, switch)
    native.put(f"{ours}.directory", values[directory], directory, switch)


def convert_embodied(values: Values, native: Native) -> None:
    """What such a run is, natively."""
    _policy(values, native)
    _games(values, native)
    _lengths(values, native)
    _learning(values, native)
    convert_backend(values, native)


def _policy(values: Values, native: Native) -> None:
    path = _said("rollout.model.model_path", "actor.model.model_path", values)
    kind = _said("rollout.model.model_type", "actor.model.model_type", values)
    native.put("policy.preset", None, path)
    native.put("policy.path", values[path], path)
    native.put("policy.kind", values[kind], kind)
    words = "actor.tokenizer.tokenizer_model"
    # the reference's tokenizer is that of its own model
    other = values.given(words) and values[words] != values[path]
    native.put("policy.tokenizer", values[words] if other else None, words)
    adapted, rank, start = (f"actor.model.{name}" for name in ("is_lora", "lora_rank", "lora_path"))
    if not values[adapted]:
        native.put("policy.lora", None, adapted)
        return
    native.put("policy.lora.rank", values[rank], rank, adapted)
    native.put("policy.lora.alpha", float(values[rank]), rank, adapted)
    # nobody means adapters that they didn't write
    native.put("policy.lora.path", values[start] if values.given(start) else None, start, adapted)


def _said(first: str, usual: str, values: Values) -> str:
    """Of two keys that say the same, the one that was given."""
    return first if values.given(first) and not values.given(usual) else usual


def _games(values: Values, native: Native) -> None:
    task, only = "runner.task_type", "runner.only_eval"
    native.put("world.name", "simulator", task, "env.train.env_type")
    native.put("validation.only", values[only] or values[task] == "embodied_eval", only, task)
    for kind, world in WORLDS.items():
        for name in ("auto_reset", "ignore_terminations"):
            key, older = f"env.{kind}.{name}", f"algorithm.{name}"
            if values.given(older) and not values.given(key):
                native.put(f"{world}.{name}", values[older], older)
        total, longest = f"env.{kind}.total_num_envs", f"env.{kind}.max_episode_steps"
        native.put(f"{world}.environments", values[total], total)
        native.put(f"{world}.max_steps", values[longest], longest)
        _video(values, native, f"env.{kind}.video_cfg", VIDEOS[kind])
    total, times, group = "env.train.total_num_envs", "algorithm.rollout_epoch", "algorithm.group_size"
    native.put("world.epochs", values[times], times)
    native.put("training.samples_per_group", values[group], group, "env.train.group_size")
    if values[total]:
        groups = values[total] * values[times] // values[group]
        native.put("training.groups_per_step", groups, total, times, group)
        batch = "actor.global_batch_size"
        updates = max(1, samples(values) // values[batch])
        native.put("training.mini_batches", updates, batch, total, times, "env.train.max_episode_steps")
    held_out, each = "env.eval.total_num_envs", "env.eval.group_size"
    native.put("validation.sampling.samples", values[each], each)
    if values[held_out]:
        native.put("validation.games", max(1, values[held_out] // values[each]), held_out, each)


def _lengths(values: Values, native: Native) -> None:
    chunk, numbers, steps = "actor.model.num_action_chunks", "actor.model.action_dim", "env.train.max_episode_steps"
    reply = "algorithm.length_params.max_new_token"
    tokens = values[reply] or values[chunk] * values[numbers]
    native.put("rollout.max_response_tokens", tokens, reply, chunk, numbers)
    native.put("rollout.max_actions_per_turn", values[chunk], chunk)
    native.put("rollout.max_turns", math.ceil(values[steps] / values[chunk]), steps, chunk)
    whole, longest = "runner.seq_length", "algorithm.length_params.max_length"
    native.put("rollout.engine_options.max_model_tokens", min(values[whole], values[longest]), longest, whole)
    native.put("rollout.think", False)
    native.put("rollout.format_penalty", 0.0)
    if values["actor.model.do_sample"]:
        temperature = "algorithm.sampling_params.temperature"
        native.put("validation.sampling.temperature", values[temperature], temperature, "actor.model.do_sample")


def _learning(values: Values, native: Native) -> None:
    epochs, most = "runner.max_epochs", "runner.max_steps"
    steps = values[epochs] if values[most] < 0 else min(values[epochs], values[most])
    native.put("training.steps", steps, epochs, most)
    first, second = "actor.optim.adam_beta1", "actor.optim.adam_beta2"
    native.put("actor.optimizer.betas", [values[first], values[second]], first, second)
    native.put("actor.optimizer.schedule", "constant")
    native.put("actor.optimizer.warmup_steps", 0)
    native.put("actor.optimizer.weight_decay", WEIGHT_DECAY)
    for part in ("parameters", "optimizer"):
        native.put(f"actor.memory.offload_{part}", values["actor.enable_offload"], "actor.enable_offload")
    inference = "algorithm.logprob_forward_micro_batch_size"
    for component in ("actor", "reference"):
        native.put(f"{component}.inference_budget.sequences", values[inference], inference)
    mode = "rollout.mode"
    if "placement.colocated" not in native.origins:
        native.put("placement.colocated", values[mode] != "disaggregated", mode)


def express_world(foreign: Foreign) -> None:
    """A simulator's own file."""
    run = foreign.experiment
    if isinstance(run.world, SimulatorConfig):
        foreign.put("total_num_envs", run.world.environments)
        foreign.put("max_episode_steps", run.world.max_steps)
    usual = run.training.samples_per_group == TrainingConfig().samples_per_group
    foreign.put("group_size", 1 if usual else run.training.samples_per_group)
    _express_video(foreign, "video_cfg", run.tracking.video)


def _express_video(foreign: Foreign, section: str, video: VideoConfig | None) -> None:
    foreign.put(f"{section}.save_video", video is not None)
    if video is not None:
        foreign.put(f"{section}.info_on_video", video.overlay)
        if video.directory is not None:
            foreign.put(f"{section}.video_base_dir", video.directory)


def express_embodied(foreign: Foreign) -> None:
    """Such a run in RLinf's words."""
    run = foreign.experiment
    if run.policy.path is not None:
        foreign.put("actor.model.model_path", run.policy.path)
    foreign.put("actor.model.model_type", run.policy.kind or "openvla_oft")
    foreign.put("actor.tokenizer.tokenizer_model", run.policy.tokenizer or run.policy.path)
    _express_lora(foreign, run.policy.lora)
    _express_games(foreign)
    _express_lengths(foreign)
    foreign.put("runner.max_epochs", max(1, run.training.steps))
    if run.training.steps == 0:
        foreign.put("runner.max_steps", 0)
    foreign.put("actor.optim.adam_beta1", run.actor.optimizer.betas[0])
    foreign.put("actor.optim.adam_beta2", run.actor.optimizer.betas[1])
    foreign.put("actor.enable_offload", run.actor.memory.offload_parameters)
    if run.actor.inference_budget.sequences is not None:
        foreign.put("algorithm.logprob_forward_micro_batch_size", run.actor.inference_budget.sequences)
    foreign.put("rollout.mode", "collocate" if run.placement.colocated else "disaggregated")
    express_backend(foreign)


def _express_lora(foreign: Foreign, lora: LoraConfig | None) -> None:
    foreign.put("actor.model.is_lora", lora is not None)
    if lora is not None:
        foreign.put("actor.model.lora_rank", lora.rank)
        if lora.path is not None:
            foreign.put("actor.model.lora_path", lora.path)


def _express_games(foreign: Foreign) -> None:
    run, training = foreign.experiment, foreign.experiment.training
    world, held_out = run.world, run.validation.simulator
    if not isinstance(world, SimulatorConfig):
        return
    foreign.put("runner.only_eval", run.validation.only)
    foreign.put("algorithm.rollout_epoch", world.epochs)
    foreign.put("env.train.total_num_envs", world.environments)
    foreign.put("env.train.max_episode_steps", world.max_steps)
    chunk = run.policy.vla.action_chunk if run.policy.vla else 1
    if world.environments:
        total = world.environments * world.epochs * math.ceil(world.max_steps / chunk)
        foreign.put("actor.global_batch_size", total // training.mini_batches)
    foreign.put("env.eval.group_size", run.validation.sampling.samples)
    if held_out is not None:
        foreign.put("env.eval.total_num_envs", held_out.environments)
    for kind, video in (("train", run.tracking.video), ("eval", run.tracking.validation_video)):
        _express_video(foreign, f"env.{kind}.video_cfg", video)


def _express_lengths(foreign: Foreign) -> None:
    run = foreign.experiment
    usual = run.policy.vla.action_chunk * run.policy.vla.action_dim if run.policy.vla else None
    reply = run.rollout.max_response_tokens
    foreign.put("algorithm.length_params.max_new_token", None if reply == usual else reply)
    if (longest := run.rollout.engine_options.max_model_tokens) is not None:
        foreign.put("algorithm.length_params.max_length", longest)
        foreign.put("runner.seq_length", max(longest, 2048))
