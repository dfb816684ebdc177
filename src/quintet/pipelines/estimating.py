"""From the games of a step to a batch that can be learnt: log-probs, values, rewards, advantages."""

from __future__ import annotations

from dataclasses import replace

import torch

from quintet.algorithms.advantages import ADVANTAGES, played, trajectory_rewards, turn_ends
from quintet.algorithms.aggregation import token_weights
from quintet.algorithms.correction import correction
from quintet.algorithms.drift import drift, tolerated
from quintet.algorithms.filters import has_signal, keep_trajectories
from quintet.algorithms.kl import KlControl, penalised, token_divergence
from quintet.algorithms.shaping import shape
from quintet.algorithms.tokens import whiten
from quintet.config.native import AlgorithmConfig, Experiment
from quintet.errors import MachineError
from quintet.pipelines.playing import Played
from quintet.records import UNPLAYED, Batch
from quintet.rollout.assemble import assemble, learn_observations, reward_at_end
from quintet.runtime.local import Components
from quintet.training.packing import select_trajectories

__all__ = ["compare_with_reference", "complete_logprobs", "estimate_advantages", "estimate_values", "gather"]


COMPARING = ("grpo", "grpo_passk", "rloo", "opo", "gpg")
"""Estimators under which a group whose rewards are all the same gives no gradient."""
RECURSIVE = ("gae", "bi_level_gae", "turn_wise_gae", "reinforce", "reinforce_plus_plus")
"""Those that run over the tokens of a game."""


def gather(games: Played, config: Experiment) -> Batch:
    """The games as a batch; those whose world failed are left out.

    Raises:
        MachineError: no game of the step has a turn.
    """
    whole = [game for game in games.trajectories if game.outcome not in UNPLAYED and game.turns]
    if not whole:
        raise _nothing_played(games, config)
    batch = assemble(whole)
    if games.baseline is not None:
        known = [games.baseline[int(group)] for group in batch.group]
        batch = replace(batch, baseline=torch.tensor(known, dtype=batch.rewards.dtype))
    return batch if config.algorithm.turn_rewards else reward_at_end(batch)


def _nothing_played(games: Played, config: Experiment) -> MachineError:
    failure = next((game.failure for game in games.trajectories if game.failure is not None), None)
    if failure is None:
        told = f"no game began: every first prompt is longer than {config.rollout.max_prompt_tokens} tokens"
        return MachineError(told, "raise rollout.max_prompt_tokens")
    told = f"every game of the step failed (first, in {failure.where}: {failure.kind}: {failure.message})"
    return MachineError(told, "mend the world, or its options")


def complete_logprobs(components: Components, batch: Batch) -> tuple[Batch, dict[str, float]]:
    """The batch with the learner's own log-probs where the engine's aren't wanted or there are none: of the
    world's words, where those are learnt. Their gap to the engine's is told, since it is lost with them."""
    config = components.experiment
    own = batch.loss_mask
    if config.algorithm.train_on_observations:
        batch = learn_observations(batch)
    elif not _recomputes(config):
        return _with_mass(components, batch), {}
    logprobs = components.actor.scorer.logprobs(batch)
    gaps = _gaps(logprobs[own], batch.logprobs[own], components.actor.scorer.dtype)
    if not _recomputes(config):
        return _with_mass(components, replace(batch, logprobs=torch.where(own, batch.logprobs, logprobs))), {}
    batch = _with_mass(
        components, replace(batch, logprobs=logprobs, rollout_logprobs=torch.where(own, batch.logprobs, logprobs))
    )
    if config.algorithm.correction is None:
        return batch, gaps
    weights, learnt, found = correction(batch, config.algorithm.correction)
    return replace(batch, correction=weights, learnt=learnt), gaps | found


def _gaps(learner: torch.Tensor, engine: torch.Tensor, dtype: torch.dtype) -> dict[str, float]:
    """How far the engine's log-probs of its own tokens are from the learner's."""
    if not len(learner):
        return {}
    found = drift(learner, engine, tolerated(dtype))
    return {
        "training/rollout_probs_diff_max": found.probs_diff_max,
        "training/rollout_probs_diff_mean": found.probs_diff_mean,
        "training/rollout_probs_diff_std": found.probs_diff_std,
        "training/rollout_probs_diff_beyond": found.beyond,
        "rollout_corr/kl": found.kl,
        "rollout_corr/k3_kl": found.k3_kl,
    }


def _recomputes(config: Experiment) -> bool:
    """Whether the learner's own log-probs are asked for, or something needs them beside the engine's."""
    algorithm = config.algorithm
    return (
        config.rollout.recompute_logprobs or algorithm.correction is not None or algorithm.loss.name == "decoupled_ppo"
    )


def _with_mass(components: Components, batch: Batch) -> Batch:
    """The batch with the sum of squared probabilities, where the estimator wants it."""
    if not components.experiment.algorithm.advantage.name.endswith("optimal_token_baseline"):
        return batch
    return replace(batch, squared_mass=components.actor.scorer.squared_mass(batch))


def estimate_values(components: Components, batch: Batch) -> Batch:
    """The batch with the critic's values, also of the world's words where advantages go through them."""
    if components.critic is None:
        return batch
    whole = batch if components.experiment.algorithm.advantage_over_own_tokens else learn_observations(batch)
    return replace(batch, values=components.critic.values(whole))


def compare_with_reference(components: Components, batch: Batch, step: int) -> Batch:
    """The batch with the reference's log-probs; the reference is renewed first where it is due."""
    kl = components.experiment.algorithm.kl
    if kl and kl.refresh_every_steps and step % kl.refresh_every_steps == 0:
        components.keep_reference()
    if components.reference is None:
        return batch
    batch = replace(batch, ref_logprobs=components.reference.logprobs(batch))
    if kl and kl.place == "reward" and kl.estimator == "full":
        whole = components.actor.scorer.divergence(batch, components.reference, swapped=kl.swapped)
        batch = replace(batch, divergence=whole)
    return batch


def estimate_advantages(
    batch: Batch, config: Experiment, kl: KlControl | None = None
) -> tuple[Batch, dict[str, float]]:
    """The batch with advantages and returns, and the share of groups that teach anything.

    What `algorithm.filter` drops by the rewards as they are takes no further part. Then rewards are shaped, and a
    divergence that is a penalty comes off them. Groups without signal are left out of the update where the
    configuration says so and there is no critic to teach.
    """
    algorithm = config.algorithm
    scores = trajectory_rewards(batch)
    telling = has_signal(scores, batch.group, algorithm.signal_threshold)
    metrics = {"training/groups_with_signal": _share_of_groups(batch, telling)}
    kept = keep_trajectories(scores, batch.group, algorithm.filter)
    if not bool(kept.all()):
        metrics["training/groups_kept"] = _share_of_groups(batch, kept)
        batch = select_trajectories(batch, kept)
    batch = shape(batch, algorithm.shaping, config.longest_game)
    if kl and kl.config.place == "reward":
        batch, penalty = _penalise(batch, kl)
        metrics |= penalty
    batch = _advantages(batch, config)
    if _drops_silent(algorithm) and bool((telling & kept).any()):
        batch = select_trajectories(batch, telling & kept)
    if batch.learnt is not None:
        batch = replace(batch, loss_mask=batch.loss_mask & batch.learnt)
    return batch, metrics


def _drops_silent(algorithm: AlgorithmConfig) -> bool:
    """Whether groups whose rewards don't differ are left out: only where nothing else could teach by them."""
    advantage = algorithm.advantage
    compares = advantage.name in COMPARING and not advantage.whiten and algorithm.loss.name != "distillation"
    off_rewards = algorithm.kl is not None and algorithm.kl.place == "reward"
    return (
        algorithm.drop_groups_without_signal and compares and not off_rewards and not algorithm.shaping.length_penalty
    )


def _share_of_groups(batch: Batch, trajectories: torch.Tensor) -> float:
    """Of all groups, those with one of the `trajectories`, bool [R]."""
    return float(torch.isin(torch.unique(batch.group), batch.group[trajectories]).float().mean())


def _advantages(batch: Batch, config: Experiment) -> Batch:
    """The estimator at work, over the policy's own tokens or through the world's words, too."""
    own, advantage = config.algorithm.advantage_over_own_tokens, config.algorithm.advantage
    estimate = ADVANTAGES.get(advantage.name).load()
    if own or advantage.name not in RECURSIVE:
        advantages, returns = estimate(batch, advantage)
        return replace(batch, advantages=advantages, returns=returns)
    plain = advantage.model_copy(update={"whiten": False})
    advantages, returns = estimate(learn_observations(batch), plain)
    if advantage.whiten:
        ends = turn_ends(batch) if advantage.name == "turn_wise_gae" else None
        advantages = whiten(advantages, batch.loss_mask, over=ends)
    advantages = advantages * batch.loss_mask
    return replace(batch, advantages=advantages, returns=returns * batch.loss_mask)


def _penalise(batch: Batch, control: KlControl) -> tuple[Batch, dict[str, float]]:
    """Rewards less the divergence from the reference; the coefficient is steered by it."""
    each = token_divergence(batch.logprobs, batch.ref_logprobs, control.config, batch.divergence)
    own = batch.loss_mask
    rewards = penalised(batch.rewards, batch.logprobs, batch.ref_logprobs, own, control, batch.divergence)
    weights = token_weights("seq-mean-token-mean", own, batch.token_trajectory)
    divergence = float((each * weights).sum())
    penalised_batch, games = replace(batch, rewards=rewards), played(batch)
    metrics = {
        "actor/reward_kl_penalty": divergence,
        "actor/reward_kl_penalty_coeff": control.coefficient,
        "critic/rewards/mean": float(trajectory_rewards(penalised_batch)[games].mean()),
    }
    control.observe(divergence, int(games.sum()))
    return penalised_batch, metrics
