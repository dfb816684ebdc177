"""RAGEN's `config/base.yaml`: multi-turn agents on text worlds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import yaml

from quintet.config.dialects.chosen import choose, express_choice, give_options
from quintet.config.dialects.conversion import Native, Values
from quintet.config.dialects.one_world import refuse_mixtures
from quintet.config.engines import runnable
from quintet.config.faults import Fault
from quintet.config.native import Experiment
from quintet.errors import ConfigError

if TYPE_CHECKING:
    from quintet.config.translate import Foreign

__all__ = ["convert", "disagreements", "express", "frame"]

TRAINING_GAMES = 10_000
"""Start states of RAGEN's training file where nothing limits them."""
KL = {"kl": "k1", "abs": "abs", "mse": "k2", "low_var_kl": "k3"}
ESTIMATORS = {"masked_gae": "gae"}
"""RAGEN's names for estimators that are called otherwise here; `gae` leaps over observations in any case."""
BUDGETS = (
    *("actor.budget", "actor.inference_budget", "critic.budget", "critic.inference_budget"),
    "reference.inference_budget",
)
"""What one forward pass holds, of everything that makes one: RAGEN has one number for all."""
LENGTH_PENALTY = 1.0
"""RAGEN's code never reads `length_penalty`; switched on, all of a reply beyond its budget counts."""


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
    yield from _too_few(values)
    try:
        _devices(values["system.cuda_visible_devices"])
    except ValueError:
        yield values.fault("system.cuda_visible_devices", "must be a number, or numbers with commas such as 0,1,2,3")


def _too_few(values: Values) -> Iterator[Fault]:
    """Batches that nothing fills, and groups of one, which have nothing to be compared with."""
    prompts, side_by_side, held_out = "training.train_batch_size", "training.val_batch_size", "training.val_data_num"
    if values["training.total_training_steps"] is None and values[prompts] > _start_states(values):
        problem = f"there are {_start_states(values)} start states, from {values.told('training.train_data_num')}"
        yield values.fault(prompts, problem, f"at most: {prompts}={_start_states(values)}")
    if 0 < (values[held_out] or 0) < values[side_by_side]:
        problem = f"fewer than are validated side by side, {values.told(side_by_side)}"
        yield values.fault(held_out, problem, f"at least {values[side_by_side]}, or {side_by_side}={values[held_out]}")
    if values["training.n_rollout"] == 1 and values["optimization.adv_estimator"] == "grpo":
        problem = f"{values.told('optimization.adv_estimator')} compares games from the same start"
        yield values.fault("training.n_rollout", problem, "at least 2, or optimization.adv_estimator=gae")


def convert(values: Values, native: Native) -> None:
    """What a RAGEN run is, natively."""
    native.put("policy.preset", None, "model.base_model")
    native.put("warm_start", None, "rl_or_sft")
    native.take_rows(values.dialect.rows().values())
    _rollout(values, native)
    _training(values, native)
    _algorithm(values, native)
    _surroundings(values, native)
    _supervised(values, native)


def _rollout(values: Values, native: Native) -> None:
    lengths = ("training.max_start_length", "training.max_response_length", "training.max_obs_length")
    turns, (start, reply, seen) = values["training.max_turns"], (values[length] for length in lengths)
    native.take(
        {
            "rollout.max_turns": "training.max_turns",
            "rollout.max_start_tokens": "training.max_start_length",
            "rollout.max_observation_tokens": "training.max_obs_length",
            "rollout.max_response_tokens": "training.max_response_length",
        }
    )
    longest = start + reply * (turns - 1) + seen * turns
    native.put("rollout.max_prompt_tokens", longest, *lengths, "training.max_turns")
    native.put("rollout.window_size", None)
    if runnable("vllm"):
        native.put("rollout.engine", "vllm")
    native.put("rollout.top_p", 0.95)
    # RAGEN looks for an answer in the words of a reply, and takes the numbers of actions too
    native.put("rollout.reply_form", "answer")
    native.put("rollout.numbered_actions", True)
    native.put("rollout.strip_special_tokens", True)


def _training(values: Values, native: Native) -> None:
    prompts, games, batch = (values[f"training.{name}"] for name in ("train_batch_size", "n_rollout", "ppo_batch_size"))
    of_a_step = ("training.train_batch_size", "training.n_rollout")
    native.put("training.mini_batches", prompts * games // batch, "training.ppo_batch_size", *of_a_step)
    made = _start_states(values)
    steps = values["training.total_training_steps"] or made // prompts * values["training.total_epochs"]
    follows = ("training.total_training_steps", "training.total_epochs", of_a_step[0], "training.train_data_num")
    native.put("training.steps", steps, *follows)
    if made < TRAINING_GAMES:
        native.put("training.start_states", made, "training.train_data_num")
    for budget in BUDGETS:
        native.put(f"{budget}.sequences", values["training.micro_batch_size"], "training.micro_batch_size")
    whole = min(values["training.val_data_num"] or TRAINING_GAMES, TRAINING_GAMES)
    side_by_side = values["training.val_batch_size"]
    native.put("validation.games", whole - whole % side_by_side, "training.val_data_num", "training.val_batch_size")


def _start_states(values: Values) -> int:
    """Those of the training file, or so many of them as are drawn from it."""
    drawn: int = values["training.train_data_num"] or TRAINING_GAMES
    return min(drawn, TRAINING_GAMES)


def _algorithm(values: Values, native: Native) -> None:
    estimator = "optimization.adv_estimator"
    choose(native, "algorithm.advantage", values[estimator], ESTIMATORS, estimator)
    give_options(native, "algorithm.advantage", dict.fromkeys(("lam", "turn_gamma", "turn_lam"), (1.0, ())))
    _divergence(values, native)
    _masks(values, native)
    native.put("algorithm.loss.clip_high", 0.2)
    native.put("algorithm.loss.clip_dual", None)
    native.put("algorithm.entropy_coefficient", 0.001)
    if values["training.length_penalty"]:
        native.put("algorithm.shaping.length_penalty", LENGTH_PENALTY, "training.length_penalty")
    for part in ("actor", "critic"):
        native.put(f"{part}.optimizer.schedule", "constant")
        native.put(f"{part}.optimizer.warmup_steps", 0)
        native.put(f"{part}.optimizer.betas", [0.9, 0.999])
        native.put(f"{part}.optimizer.weight_decay", 0.01)
        native.put(f"{part}.optimizer.max_grad_norm", 1.0)


def _masks(values: Values, native: Native) -> None:
    """`mask_state` is another name for `state_masking`: either of them takes observations out of the loss."""
    masked = values["training.state_masking"] or values["training.mask_state"]
    native.put("algorithm.train_on_observations", not masked, "training.state_masking", "training.mask_state")


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
    native.put("tracking.loggers", ["jsonl", *_loggers(values["logging.mode"])], "logging.mode")
    native.put("tracking.project", values["trainer.project_name"], "trainer.project_name")
    native.put("output_dir", f"runs/{values['trainer.project_name']}", "trainer.project_name")
    if values["logging.log_images"]:
        native.put(
            "tracking.pictures",
            values["logging.log_n_image_per_batch"],
            "logging.log_images",
            "logging.log_n_image_per_batch",
        )
        native.put("tracking.pictures_dir", values["logging.log_image_dir"], "logging.log_image_dir")
    visible = _devices(values["system.cuda_visible_devices"])
    native.put("placement.visible_devices", visible, "system.cuda_visible_devices")


def _supervised(values: Values, native: Native) -> None:
    """The stages of `sft`: in place of reinforcement learning, or before it."""
    alone, first = "rl_or_sft", "training.use_sft"
    if values[alone] != "sft" and not values[first]:
        native.put("sft", None, alone, first)
        return
    native.put("sft.then_reinforce", values[alone] != "sft", first, alone)
    native.put("sft.choose", "best")
    native.put("sft.loggers", ["jsonl", *_loggers(values["sft.training.logger"])], "sft.training.logger")
    if values["sft.training.lora_rank"]:
        for ours, theirs in {"rank": "lora_rank", "alpha": "lora_alpha", "target_modules": "target_modules"}.items():
            value = values[f"sft.training.{theirs}"]
            listed = [value] if theirs == "target_modules" and isinstance(value, str) else value
            native.put(f"sft.lora.{ours}", listed, f"sft.training.{theirs}")
    else:
        native.put("sft.lora", None, "sft.training.lora_rank")


def _loggers(mode: str | list[str]) -> list[str]:
    """RAGEN takes a list, or the text of one."""
    read = yaml.safe_load(mode) if isinstance(mode, str) else mode
    return [read] if isinstance(read, str) else list(read)


def _devices(visible: int | str) -> list[int] | None:
    """The numbers of the devices; none where -1 hides them all."""
    numbers = [int(number) for number in str(visible).split(",")]
    if numbers == [-1]:
        return []
    if min(numbers) < 0:
        raise ValueError(visible)
    return numbers


def frame(experiment: Experiment) -> dict[str, Any]:
    """RAGEN writes every run by one reference.

    Raises:
        ConfigError: RAGEN knows no such world.
    """
    refuse_mixtures(experiment, "RAGEN")
    if experiment.world.name not in ("frozenlake", "sokoban"):
        raise ConfigError(f"RAGEN's reference has no world {experiment.world.name}", key="world.name")
    sft = experiment.sft
    if sft is None:
        return {}
    return {"training": {"use_sft": True}} if sft.then_reinforce else {"rl_or_sft": "sft"}


def express(foreign: Foreign) -> None:
    """A native run in RAGEN's words, as far as it has them."""
    run = foreign.experiment
    total = run.training.groups_per_step * run.training.samples_per_group
    foreign.put("training.ppo_batch_size", total // run.training.mini_batches)
    foreign.put("training.total_training_steps", run.training.steps)
    foreign.put("training.max_start_length", run.rollout.max_start_tokens or run.rollout.max_prompt_tokens)
    foreign.put("training.max_obs_length", run.rollout.max_observation_tokens or run.rollout.max_prompt_tokens)
    foreign.put("training.max_response_length", run.rollout.max_response_tokens)
    foreign.put("training.max_turns", run.rollout.max_turns)
    foreign.put("training.val_data_num", run.validation.games)
    foreign.put("training.val_batch_size", 1 if run.validation.games % 10 else 10)
    if run.actor.budget.sequences:
        foreign.put("training.micro_batch_size", run.actor.budget.sequences)
    _express_algorithm(foreign)
    visible = run.placement.visible_devices
    if visible is not None:
        foreign.put(
            "system.cuda_visible_devices", ",".join(map(str, visible)) if len(visible) > 1 else (*visible, -1)[0]
        )
    foreign.put("logging.mode", [name for name in run.tracking.loggers if name != "jsonl"])
    foreign.put("trainer.project_name", run.tracking.project or run.output_dir.removeprefix("runs/"))
    foreign.put("logging.log_images", run.tracking.pictures > 0)
    if run.tracking.pictures:
        foreign.put("logging.log_n_image_per_batch", run.tracking.pictures)
    if run.tracking.pictures_dir:
        foreign.put("logging.log_image_dir", run.tracking.pictures_dir)
    if run.training.start_states:
        foreign.put("training.train_data_num", run.training.start_states)
    _express_supervised(foreign)


def _express_algorithm(foreign: Foreign) -> None:
    algorithm = foreign.experiment.algorithm
    express_choice(foreign, "algorithm.advantage", "optimization.adv_estimator", {})
    foreign.put("optimization.kl_coef", algorithm.kl.coefficient if algorithm.kl else 0)
    foreign.put("training.state_masking", not algorithm.train_on_observations)
    foreign.put("training.length_penalty", algorithm.shaping.length_penalty > 0)
    if algorithm.kl:
        estimators = {ours: theirs for theirs, ours in KL.items()}
        foreign.put("training.use_kl_loss", algorithm.kl.place == "loss")
        foreign.put("optimization.kl_loss_type", estimators.get(algorithm.kl.estimator, "low_var_kl"))
        foreign.put("training.ref_update_steps", algorithm.kl.refresh_every_steps or None)


def _express_supervised(foreign: Foreign) -> None:
    sft = foreign.experiment.sft
    foreign.put("rl_or_sft", "sft" if sft and not sft.then_reinforce else "rl")
    foreign.put("training.use_sft", sft is not None and sft.then_reinforce)
    if sft is None:
        return
    if sft.loggers is not None:
        foreign.put("sft.training.logger", [name for name in sft.loggers if name != "jsonl"])
    foreign.put("sft.training.lora_rank", sft.lora.rank if sft.lora else 0)
    if sft.lora:
        foreign.put("sft.training.lora_alpha", int(sft.lora.alpha))
        foreign.put("sft.training.target_modules", list(sft.lora.target_modules))
