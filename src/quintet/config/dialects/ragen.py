"""RAGEN's `config/base.yaml`: multi-turn agents on text worlds."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from quintet.config.dialects.conversion import Native, Values
from quintet.config.faults import Fault

__all__ = ["convert", "disagreements"]

TRAINING_GAMES = 10_000
"""Start states of RAGEN's training file where nothing limits them."""
KL = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}


def disagreements(values: Values) -> Iterator[Fault]:
    """The reference's own rule: the games of a step fill whole optimizer steps."""
    prompts, games, batch = (values[f"training.{name}"] for name in ("train_batch_size", "n_rollout", "ppo_batch_size"))
    total = prompts * games
    if total % batch:
        fits = [size for size in range(1, total + 1) if total % size == 0]
        nearest = min(fits, key=lambda size: abs(size - batch))
        others = f"{values.told('training.train_batch_size')} and {values.told('training.n_rollout')}"
        problem = f"the {total} games of a step, from {others}, must be a multiple of it"
        yield values.fault("training.ppo_batch_size", problem, f"nearest: training.ppo_batch_size={nearest}")


def convert(values: Values, native: Native) -> None:
    """What a RAGEN run is, natively."""
    _policy(native)
    _world(values, native)
    _rollout(values, native)
    _training(values, native)
    _algorithm(values, native)
    _surroundings(values, native)


def _policy(native: Native) -> None:
    native.put("policy.preset", None, "model.base_model")
    native.put("warm_start", None, "rl_or_sft")
    native.take(
        {
            "policy.path": "model.base_model",
            "name": "model.experiment_name",
            "actor.gradient_checkpointing": "model.gradient_checkpointing",
        }
    )


def _world(values: Values, native: Native) -> None:
    """RAGEN keeps the worlds in files of their own; this reference describes them in the section `sft`."""
    native.take({"world.name": "sft.env_type"})
    if values["sft.env_type"] == "sokoban":
        names = {"height": "dim_x", "width": "dim_y", "boxes": "num_boxes", "max_steps": "max_steps"}
        names["pull_steps"] = "search_depth"
    else:
        names = {"size": "size", "success_rate": "p", "slippery": "is_slippery"}
    native.take({f"world.{ours}": f"sft.{values['sft.env_type']}.{theirs}" for ours, theirs in names.items()})


def _rollout(values: Values, native: Native) -> None:
    lengths = ("training.max_start_length", "training.max_response_length", "training.max_obs_length")
    turns, (start, reply, seen) = values["training.max_turns"], (values[length] for length in lengths)
    native.take(
        {
            "rollout.max_turns": "training.max_turns",
            "rollout.max_start_tokens": "training.max_start_length",
            "rollout.max_observation_tokens": "training.max_obs_length",
            "rollout.max_response_tokens": "training.max_response_length",
            "rollout.temperature": "training.temperature",
        }
    )
    longest = start + reply * (turns - 1) + seen * turns
    native.put("rollout.max_prompt_tokens", longest, *lengths, "training.max_turns")
    native.put("rollout.window_size", None)
    native.take({"rollout.binary_reward": "training.binary_reward"})
    native.put("rollout.top_p", 0.95)
    native.put("rollout.think", not values["training.no_think_rl"], "training.no_think_rl")


def _training(values: Values, native: Native) -> None:
    prompts, games, batch = (values[f"training.{name}"] for name in ("train_batch_size", "n_rollout", "ppo_batch_size"))
    native.take(
        {
            "training.groups_per_step": "training.train_batch_size",
            "training.samples_per_group": "training.n_rollout",
        }
    )
    of_a_step = ("training.train_batch_size", "training.n_rollout")
    native.put("training.mini_batches", prompts * games // batch, "training.ppo_batch_size", *of_a_step)
    steps = values["training.total_training_steps"] or TRAINING_GAMES // prompts * values["training.total_epochs"]
    native.put("training.steps", steps, "training.total_training_steps", "training.total_epochs", of_a_step[0])
    longest = native.tree["rollout"]["max_prompt_tokens"] + native.tree["rollout"]["max_response_tokens"]
    micro = values["training.micro_batch_size"] * longest
    native.put("training.micro_batch_tokens", micro, "training.micro_batch_size")
    whole, side_by_side = values["training.val_data_num"] or TRAINING_GAMES, values["training.val_batch_size"]
    native.put("validation.games", whole - whole % side_by_side, "training.val_data_num", "training.val_batch_size")


def _algorithm(values: Values, native: Native) -> None:
    estimator = values["optimization.adv_estimator"]
    native.put("algorithm.advantage", {"name": estimator}, "optimization.adv_estimator")
    if estimator == "gae":
        native.put("algorithm.advantage.lam", 1.0)
    _divergence(values, native)
    native.put("algorithm.clip_high", 0.2)
    native.put("algorithm.clip_dual", None)
    native.put("algorithm.entropy_coefficient", 0.001)
    for part in ("actor", "critic"):
        rate = f"optimization.{part}_lr"
        native.put(f"{part}.optimizer.learning_rate", float(values[rate]), rate)
        native.put(f"{part}.optimizer.schedule", "constant")
        native.put(f"{part}.optimizer.warmup_steps", 0)
        native.put(f"{part}.optimizer.betas", [0.9, 0.999])
        native.put(f"{part}.optimizer.weight_decay", 0.01)
        native.put(f"{part}.optimizer.max_grad_norm", 1.0)


def _divergence(values: Values, native: Native) -> None:
    """One way for the divergence to count, where RAGEN's code lets it count twice."""
    if not values["optimization.kl_coef"]:
        native.put("algorithm.kl", None, "optimization.kl_coef")
        return
    native.put("algorithm.kl.coefficient", float(values["optimization.kl_coef"]), "optimization.kl_coef")
    native.put("algorithm.kl.place", "loss" if values["training.use_kl_loss"] else "reward", "training.use_kl_loss")
    native.put("algorithm.kl.estimator", KL[values["optimization.kl_loss_type"]], "optimization.kl_loss_type")
    refresh = "training.ref_update_steps"
    native.put("algorithm.kl.refresh_every_steps", values[refresh] or 0, refresh)


def _surroundings(values: Values, native: Native) -> None:
    for ours, theirs in {"checkpoint": "save_freq", "validation": "test_freq"}.items():
        native.put(f"{ours}.every_steps", max(0, values[f"trainer.{theirs}"]), f"trainer.{theirs}")
    native.put("tracking.loggers", ["jsonl", *_loggers(values["logging.mode"])], "logging.mode")
    native.put("output_dir", f"runs/{values['trainer.project_name']}", "trainer.project_name")
    native.take({"tracking.trajectories_every_steps": "logging.log_image_step_size"})


def _loggers(mode: str | list[str]) -> list[str]:
    """RAGEN takes a list, or the text of one."""
    read = yaml.safe_load(mode) if isinstance(mode, str) else mode
    return [read] if isinstance(read, str) else list(read)
