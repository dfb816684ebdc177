"""VAGEN's overrides of verl's trainer, and its env_config.yaml: multi-turn agents on text and in pictures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from quintet.config.dialects.chosen import choose, express_choice, give_options, is_outside, option_of
from quintet.config.dialects.conversion import Native, Values, native_word
from quintet.config.dialects.dialect import DIALECTS, narrowed
from quintet.config.dialects.ledger import Row
from quintet.config.dialects.vagen.sections import convert_worlds, express_worlds, sections, world_faults, world_frame
from quintet.config.dialects.vagen.world_keys import WORLD
from quintet.config.dialects.verl.actor_keys import KL_WORDS
from quintet.config.dialects.verl.batches import (
    ACTOR,
    ROLLOUT,
    Step,
    pass_faults,
    passes,
    share_faults,
)
from quintet.config.dialects.verl.convert import (
    REWARDED,
    clipping,
    express_learning,
    express_rewards,
    express_surroundings,
    learning,
    policy_frame,
    rewards,
    surroundings,
)
from quintet.config.dialects.verl.critic import critic_defaults, express_critic
from quintet.config.dialects.verl.rules import divergence_faults, group_faults, shared_faults
from quintet.config.divisors import nearest_divisor
from quintet.config.faults import Fault
from quintet.config.native import Experiment
from quintet.config.native.data import DataConfig
from quintet.errors import ConfigError

if TYPE_CHECKING:
    from quintet.config.translate import Foreign

__all__ = ["convert", "disagreements", "express", "frame"]

GROUPS, GAMES = "data.train_batch_size", "rollout_manager.n_trajectory"
MINI = f"{ACTOR}.ppo_mini_batch_size"
STEPS, EPOCHS = "trainer.total_training_steps", "trainer.total_epochs"
LONGEST, FIRST, REPLY = (f"data.max_{name}_length" for name in ("trajectory", "prompt", "response"))
MASKED, WINDOW = "rollout_manager.use_gae_mask", "rollout_manager.window_size"


def disagreements(values: Values) -> Iterator[Fault]:
    """What VAGEN or verl under it asserts, and what would play another game than was meant."""
    step = _step(values)
    estimator = values["algorithm.adv_estimator"]
    yield from world_faults(values)
    yield from _mini_batch_faults(values, step)
    yield from _length_faults(values)
    yield from share_faults(values, step)
    valued = estimator != "grpo" and not is_outside(estimator)
    kinds = passes(values, critic=valued, reference=_divergence_key(values) is not None)
    yield from pass_faults(values, step, kinds)
    if values[f"{ROLLOUT}.n"] == 1:
        yield from group_faults(values, GAMES)
    yield from divergence_faults(values)
    yield from shared_faults(values)
    yield from _step_faults(values)


def _step(values: Values) -> Step:
    """VAGEN counts mini-batches in games."""
    replies = values[f"{ROLLOUT}.n"]
    return Step(
        sequences=values[GROUPS] * values[GAMES] * replies,
        update=values[MINI] * replies,
        longest=values[LONGEST],
        of=(GROUPS, GAMES),
        update_of=MINI,
        longest_of=(LONGEST,),
    )


def _mini_batch_faults(values: Values, step: Step) -> Iterator[Fault]:
    games = values[GROUPS] * values[GAMES]
    if games % values[MINI]:
        problem = (
            f"the {games} games of a step, from {values.told(GROUPS)} and {values.told(GAMES)}, must be a multiple"
        )
        yield values.fault(MINI, f"{problem} of it", f"nearest: {MINI}={nearest_divisor(games, step.update)}")


def _length_faults(values: Values) -> Iterator[Fault]:
    least = values[FIRST] + values[REPLY]
    if values[LONGEST] < least:
        problem = f"a whole game can't be shorter than {values.told(FIRST)} and {values.told(REPLY)} together"
        yield values.fault(LONGEST, problem, f"at least: {LONGEST}={least}")


def _step_faults(values: Values) -> Iterator[Fault]:
    """A number of steps, or passes over the start states that make whole steps."""
    inner = f"{ACTOR}.optim.total_training_steps"
    if (values[inner] or -1) > 0 and values[inner] != values[STEPS]:
        yield values.fault(inner, f"the trainer puts {values.told(STEPS)} there", f"set {STEPS} instead")
    worlds = sections(values)
    size, made = worlds[0].key("train_size"), sum(one["train_size"] for one in worlds)
    if values[STEPS] is None and made < values[GROUPS]:
        all_of_them = f", and all worlds together have {made}" if len(worlds) > 1 else ""
        problem = f"a step takes more start states: {values.told(GROUPS)}{all_of_them}"
        yield values.fault(size, problem, f"at least: {size}={values[GROUPS] - made + worlds[0]['train_size']}")


def convert(values: Values, native: Native) -> None:
    """What a VAGEN run is, natively."""
    native.put("warm_start", None)
    critic_defaults(values, native)
    rows = values.dialect.rows().values()
    native.take_rows(row for row in rows if not row.key.startswith(f"{WORLD}.") and not _feeds(row, "data.", "reward."))
    convert_worlds(values, native)
    _data(values, native)
    _batches(values, native)
    _algorithm(values, native)
    learning(values, native)
    surroundings(values, native)


def _feeds(row: Row, *sections: str) -> bool:
    return bool(row.native) and row.native[0].startswith(sections)


def _data(values: Values, native: Native) -> None:
    """Rows of verl's data files that VAGEN's don't have are only looked at where somebody gave them."""
    plain = DataConfig()
    for row in values.dialect.rows().values():
        if row.key.startswith("data.") and _feeds(row, "data.") and values.given(row.key):
            field, value = row.native[0].removeprefix("data."), native_word(row, values[row.key])
            if row.key != "data.image_key" and hasattr(plain, field) and value != getattr(plain, field):
                native.put(row.native[0], value, row.key)
    if values["data.image_key"] != "images":
        native.put("data.image_key", values["data.image_key"], "data.image_key")
    if any(key.startswith(REWARDED) for key in values.written.sources):
        rewards(values, native)
        native.take_rows(row for row in values.dialect.rows().values() if _feeds(row, "reward."))


def _batches(values: Values, native: Native) -> None:
    games, replies = values[GROUPS] * values[GAMES], f"{ROLLOUT}.n"
    native.put("training.samples_per_group", values[GAMES] * values[replies], GAMES, replies)
    native.put("training.mini_batches", games // values[MINI], MINI, GROUPS, GAMES)
    worlds = sections(values)
    made, sizes = sum(one["train_size"] for one in worlds), [one.key("train_size") for one in worlds]
    passes = made // values[GROUPS] * values[EPOCHS]
    steps = min(values[STEPS] or passes, passes) or values[STEPS]
    native.put("training.steps", steps, STEPS, EPOCHS, *sizes, GROUPS)
    if steps * values[GROUPS] > made:
        for one, size in zip(worlds, sizes, strict=True):
            key = f"worlds.{one.name}.start_states" if one.several else "training.start_states"
            native.put(key, one["train_size"], size)
    reply = f"{ROLLOUT}.response_length"
    native.put("rollout.max_response_tokens", values[reply], reply, REPLY)
    native.put("rollout.max_prompt_tokens", values[LONGEST] - values[reply], LONGEST, reply, REPLY)
    past = values[WINDOW]
    native.put("rollout.window_size", None if past is None else past + 1, WINDOW)


def _algorithm(values: Values, native: Native) -> None:
    estimator, turns, gamma, lam = (f"algorithm.{key}" for key in ("adv_estimator", "high_level_gamma", "gamma", "lam"))
    written = values[estimator]
    choose(native, "algorithm.advantage", written, {"masked_gae": "gae"}, estimator)
    discount = turns if written == "turn_wise_gae" else gamma
    keys = {"gamma": discount, "lam": lam, "turn_gamma": turns, "turn_lam": lam}
    give_options(native, "algorithm.advantage", {name: (float(values[key]), (key,)) for name, key in keys.items()})
    # `gae` goes over the world's words, too
    own = values[MASKED] and written != "gae"
    native.put("algorithm.advantage_over_own_tokens", own, MASKED, *([estimator] if written == "gae" else []))
    clipping(values, native)
    _divergence(values, native)


def _divergence_key(values: Values) -> str | None:
    """Which key gives the divergence from the reference its weight: that of the loss, or that of the rewards."""
    loss, reward, weight = f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward", "algorithm.kl_ctrl.kl_coef"
    if values[loss]:
        return f"{ACTOR}.kl_loss_coef"
    wanted = values[reward] if values.given(reward) else values[weight] > 0
    return weight if wanted else None


def _divergence(values: Values, native: Native) -> None:
    """verl under VAGEN takes the divergence off the rewards wherever the loss doesn't have it."""
    loss, reward = f"{ACTOR}.use_kl_loss", "algorithm.use_kl_in_reward"
    penalty, kind, target, horizon = (
        f"algorithm.{key}" for key in ("kl_penalty", "kl_ctrl.type", "kl_ctrl.target_kl", "kl_ctrl.horizon")
    )
    weight = _divergence_key(values)
    if weight is None:
        native.put("algorithm.kl", None, loss, reward, "algorithm.kl_ctrl.kl_coef")
        return
    native.put("algorithm.kl.coefficient", float(values[weight]), weight)
    native.put("algorithm.kl.place", "loss" if values[loss] else "reward", loss, reward, weight)
    if not values[loss]:
        native.put("algorithm.kl.estimator", KL_WORDS.get(values[penalty], values[penalty]), penalty)
        native.put("algorithm.kl.horizon", values[horizon], horizon)
        steered = values[kind] == "adaptive"
        native.put("algorithm.kl.target", values[target] if steered else None, target, kind)


def frame(experiment: Experiment) -> dict[str, Any]:
    """A section for each world.

    Raises:
        ConfigError: VAGEN has no such world, or plays none in such a run.
    """
    if experiment.sft is not None or experiment.evaluation is not None:
        raise ConfigError("VAGEN plays worlds and nothing else", key="sft" if experiment.sft else "evaluation")
    taken = {key.partition(".")[0] for key in DIALECTS["vagen"].rows()} - {WORLD}
    return world_frame(experiment, taken) | policy_frame(experiment)


def express(foreign: Foreign) -> None:
    """A native run in VAGEN's words, as far as it has them."""
    run = foreign.experiment
    rows = narrowed(DIALECTS["vagen"], frame(run)).rows()
    games = run.training.groups_per_step * run.training.samples_per_group
    foreign.put(GAMES, run.training.samples_per_group)
    foreign.put(MINI, max(1, games // run.training.mini_batches))
    foreign.put(STEPS, run.training.steps or None)
    foreign.put(REPLY, run.rollout.max_response_tokens)
    foreign.put(LONGEST, run.rollout.max_prompt_tokens + run.rollout.max_response_tokens)
    foreign.put(FIRST, run.rollout.max_start_tokens or run.rollout.max_prompt_tokens)
    foreign.put(WINDOW, None if run.rollout.window_size is None else run.rollout.window_size - 1)
    express_worlds(foreign)
    express_learning(foreign, rows)
    _express_algorithm(foreign)
    if run.data:
        foreign.put("data.image_key", run.data.image_key or "images")
        foreign.put("data.truncation", run.data.truncation)
    express_rewards(foreign)
    express_surroundings(foreign)
    express_critic(foreign, rows)


def _express_algorithm(foreign: Foreign) -> None:
    algorithm = foreign.experiment.algorithm
    advantage, own = algorithm.advantage, algorithm.advantage_over_own_tokens
    masked = {"masked_gae": "gae"} if own else {}
    express_choice(foreign, "algorithm.advantage", "algorithm.adv_estimator", masked)
    foreign.put(MASKED, own)
    foreign.put("algorithm.high_level_gamma", option_of(advantage, "turn_gamma", 1.0))
    discount = "algorithm.high_level_gamma" if advantage.name == "turn_wise_gae" else "algorithm.gamma"
    foreign.put(discount, option_of(advantage, "gamma", 1.0))
    foreign.put("algorithm.lam", option_of(advantage, "lam", 1.0))
    kl = algorithm.kl
    in_reward = kl is not None and kl.place == "reward"
    foreign.put("algorithm.kl_ctrl.kl_coef", kl.coefficient if kl and in_reward else 0.0)
    if in_reward and kl and kl.coefficient == 0:
        foreign.put("algorithm.use_kl_in_reward", True)
    if kl and in_reward:
        words = {ours: theirs for theirs, ours in reversed(KL_WORDS.items())}
        foreign.put("algorithm.kl_penalty", words.get(kl.estimator, kl.estimator))
        foreign.put("algorithm.kl_ctrl.horizon", kl.horizon)
        foreign.put("algorithm.kl_ctrl.type", "fixed" if kl.target is None else "adaptive")
        foreign.put("algorithm.kl_ctrl.target_kl", 0.1 if kl.target is None else kl.target)
