"""RLinf's YAML files: runs on text, runs on simulators, and a simulator's own file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from quintet.config.dialects.chosen import choose, express_choice, give_options, is_outside, option_of
from quintet.config.dialects.conversion import Native, Values
from quintet.config.dialects.one_world import refuse_mixtures
from quintet.config.dialects.rlinf.embodied import convert_embodied, convert_world, express_embodied, express_world
from quintet.config.dialects.rlinf.math import convert_math, express_math
from quintet.config.dialects.rlinf.newer import convert_newer, express_newer, newer_rules
from quintet.config.dialects.rlinf.places import express_places, place, places
from quintet.config.dialects.rlinf.rules import embodied_rules, is_embodied, is_world, math_rules, shared_rules
from quintet.config.dialects.rlinf.words import ADVANTAGES, KL, LOSSES
from quintet.config.faults import Fault
from quintet.config.native import Experiment
from quintet.config.native.worlds import PromptsConfig, SimulatorConfig
from quintet.errors import ConfigError

if TYPE_CHECKING:
    from quintet.config.translate import Foreign

__all__ = ["convert", "disagreements", "express", "frame"]

VALUE_CLIP = 0.2
"""`algorithm.value_clip` of RLinf's own configurations of embodied runs; its reference doesn't document it."""
LOCAL = ("console", "jsonl")
"""Loggers that every run has."""


def disagreements(values: Values) -> Iterator[Fault]:
    """RLinf's own rules."""
    if is_world(values):
        return
    yield from shared_rules(values)
    if is_embodied(values):
        yield from embodied_rules(values)
        return
    yield from math_rules(values)
    yield from newer_rules(values)


def convert(values: Values, native: Native) -> None:
    """What an RLinf run is, natively; of a simulator's own file, a run with that world."""
    if is_world(values):
        convert_world(values, native)
        return
    native.put("warm_start", None)
    native.take_rows(values.dialect.rows().values())
    _surroundings(values, native)
    _algorithm(values, native)
    found = places(values)
    place(found, native)
    if found.together is not None:
        native.put("placement.colocated", found.together, found.lines["actor"], found.lines["rollout"])
    if is_embodied(values):
        convert_embodied(values, native)
    else:
        convert_math(values, native)
        convert_newer(values, native)
    if values["algorithm.adv_type"] == "gae" or native.tree["algorithm"]["advantage"].get("needs_critic"):
        _critic(values, native)


def _surroundings(values: Values, native: Native) -> None:
    of_a_run, inner = "hydra.run.dir", "hydra.output_subdir"
    directory = None if values[inner] is None else str(PurePath(values[of_a_run], values[inner]))
    native.put("tracking.config_dir", directory, of_a_run, inner)
    backends = values["runner.logger.logger_backends"] or []
    names = [backends] if isinstance(backends, str) else backends
    native.put("tracking.loggers", [*LOCAL, *names], "runner.logger.logger_backends")
    _names(values, native)
    native.put("validation.before_training", False)


def _names(values: Values, native: Native) -> None:
    """Loggers name the run where nothing else does; embodied runs lie where these write."""
    logs, shown = "runner.logger.log_path", "runner.logger.experiment_name"
    name, directory = "runner.experiment_name", "runner.output_dir"
    if values.given(shown) and not values.given(name):
        native.put("name", values[shown], shown)
    native.put("tracking.run_name", None if values[shown] == native.tree["name"] else values[shown], shown)
    if is_embodied(values) and values.given(logs) and not values.given(directory):
        native.put("output_dir", values[logs], logs)
        native.put("tracking.log_dir", None, logs)
        return
    usual = PurePath(values[directory], values[name])
    native.put("tracking.log_dir", None if PurePath(values[logs]) == usual else values[logs], logs)


def _algorithm(values: Values, native: Native) -> None:
    _advantage(values, native)
    native.put("algorithm.drop_groups_without_signal", False)
    loss, clip, dual = "algorithm.loss_type", "algorithm.ratio_clip_eps", "algorithm.clip_ratio_c"
    choose(native, "algorithm.loss", values[loss], LOSSES, loss)
    bounds = {"clip_low": clip, "clip_high": clip, "clip_dual": dual}
    give_options(native, "algorithm.loss", {name: (values[key], (key,)) for name, key in bounds.items()})
    bonus, counts = "algorithm.entropy_bonus", "algorithm.calculate_entropy"
    native.put("algorithm.entropy_coefficient", float(values[bonus]) if values[counts] else 0.0, bonus, counts)
    weight, estimator = "algorithm.kl_beta", _kl_estimator(values)
    if not values[weight]:
        native.put("algorithm.kl", None, weight)
        return
    native.put("algorithm.kl.place", "loss")
    native.put("algorithm.kl.coefficient", float(values[weight]), weight)
    native.put("algorithm.kl.estimator", KL[values[estimator]], estimator)


def _advantage(values: Values, native: Native) -> None:
    """The estimator; a loss that follows a teacher makes advantages of its own, and needs none."""
    chosen, loss, whiten = "algorithm.adv_type", "algorithm.loss_type", "algorithm.normalize_advantages"
    follows = LOSSES.get(values[loss]) == "distillation" and ADVANTAGES.get(values[chosen]) == "none"
    if follows:
        native.put("algorithm.advantage", {"name": "raw"}, chosen, loss)
    else:
        choose(native, "algorithm.advantage", values[chosen], ADVANTAGES, chosen)
    native.put("algorithm.advantage.whiten", values[whiten], whiten)
    give_options(native, "algorithm.advantage", {"lam": (1.0, ())})
    if is_outside(values[chosen]):
        separate = "critic.use_critic_model"
        native.put("algorithm.advantage.needs_critic", values[separate], separate)


def _kl_estimator(values: Values) -> str:
    """The key that says it: embodied runs have one of their own, beside the one that all have."""
    own, shared = "algorithm.kl_penalty", "algorithm.kl_penalty_type"
    return own if is_embodied(values) and (values.given(own) or not values.given(shared)) else shared


def _critic(values: Values, native: Native) -> None:
    """The critic learns as the policy does, where no key says otherwise."""
    separate, advantage = "critic.use_critic_model", "algorithm.adv_type"
    native.put("critic.shares_policy", not values[separate], separate, advantage)
    clip = "algorithm.value_clip"
    known = clip in values.dialect.rows()
    native.put("critic.value_clip", values[clip] if known else VALUE_CLIP, *((clip,) if known else ()))
    learner: dict[str, Any] = native.tree["actor"]
    for section in ("optimizer", "budget", "inference_budget"):
        for name, value in learner.get(section, {}).items():
            if f"critic.{section}.{name}" not in native.origins:
                native.put(f"critic.{section}.{name}", value, *native.origins[f"actor.{section}.{name}"])
    native.put("critic.backend", learner["backend"], *native.origins["actor.backend"])


def frame(experiment: Experiment) -> dict[str, Any]:
    """By which of its references RLinf writes such a run.

    Raises:
        ConfigError: RLinf knows no such run.
    """
    refuse_mixtures(experiment, "RLinf")
    world = experiment.world
    if not isinstance(world, PromptsConfig | SimulatorConfig):
        raise ConfigError(f"RLinf's reference has no world {world.name}", key="world.name")
    if experiment.sft is not None or experiment.evaluation is not None:
        key = "sft" if experiment.sft is not None else "evaluation"
        raise ConfigError(f"RLinf's reference has no runs with {key}", key=key)
    if isinstance(world, PromptsConfig):
        return {"runner": {"task_type": "math"}}
    if experiment.policy.path is None:
        return {"env_type": world.simulator}
    return {"runner": {"task_type": "embodied"}}


def express(foreign: Foreign) -> None:
    """A native run in RLinf's words, as far as it has them."""
    run = foreign.experiment
    if run.world.name == "simulator" and run.policy.path is None:
        express_world(foreign)
        return
    _express_surroundings(foreign)
    _express_algorithm(foreign)
    express_places(foreign)
    foreign.put("critic.use_critic_model", run.needs_critic and not run.critic.shares_policy)
    foreign.put("reward.use_reward_model", run.reward is not None and run.reward.model is not None)
    if run.world.name == "simulator":
        express_embodied(foreign)
    else:
        express_math(foreign)
        express_newer(foreign)


def _express_surroundings(foreign: Foreign) -> None:
    tracking = foreign.experiment.tracking
    if tracking.config_dir is not None:
        directory = PurePath(tracking.config_dir)
        foreign.put("hydra.run.dir", str(directory.parent))
        foreign.put("hydra.output_subdir", directory.name)
    foreign.put("runner.logger.logger_backends", [name for name in tracking.loggers if name not in LOCAL])
    if tracking.log_dir is not None:
        foreign.put("runner.logger.log_path", tracking.log_dir)
    if tracking.run_name is not None:
        foreign.put("runner.logger.experiment_name", tracking.run_name)


def _express_algorithm(foreign: Foreign) -> None:
    algorithm = foreign.experiment.algorithm
    express_choice(foreign, "algorithm.advantage", "algorithm.adv_type", ADVANTAGES)
    foreign.put("algorithm.normalize_advantages", algorithm.advantage.whiten)
    express_choice(foreign, "algorithm.loss", "algorithm.loss_type", LOSSES)
    foreign.put("algorithm.ratio_clip_eps", option_of(algorithm.loss, "clip_low", 0.2))
    foreign.put("algorithm.clip_ratio_c", option_of(algorithm.loss, "clip_dual", None))
    foreign.put("algorithm.entropy_bonus", algorithm.entropy_coefficient)
    foreign.put("algorithm.calculate_entropy", algorithm.entropy_coefficient > 0)
    foreign.put("algorithm.kl_beta", algorithm.kl.coefficient if algorithm.kl else 0.0)
    if algorithm.kl:
        words = {ours: theirs for theirs, ours in reversed(KL.items())}
        own = "algorithm.kl_penalty" if foreign.experiment.world.name == "simulator" else "algorithm.kl_penalty_type"
        if algorithm.kl.estimator in words:
            foreign.put(own, words[algorithm.kl.estimator])
