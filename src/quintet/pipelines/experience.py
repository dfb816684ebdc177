"""Turn the episodes of a step into a batch to train on: log-probs, values, rewards, advantages."""

from __future__ import annotations

from dataclasses import replace

import torch

from quintet.algorithms.advantages.custom import estimate
from quintet.algorithms.advantages.gae import turn_ends
from quintet.algorithms.advantages.groups import (
    has_response,
    num_response_tokens,
    trajectory_rewards,
)
from quintet.algorithms.aggregation import token_weights
from quintet.algorithms.correction import rollout_correction
from quintet.algorithms.drift import max_gap, measure_drift
from quintet.algorithms.filters import advantage_scale, drops_groups_without_signal, has_signal, select_groups
from quintet.algorithms.kl import KlControl, penalize_rewards, token_divergence
from quintet.algorithms.shaping import shape_rewards
from quintet.algorithms.tokens import whiten
from quintet.config.native.algorithm import AlgorithmConfig
from quintet.config.native.experiment import Experiment
from quintet.errors import MachineError
from quintet.pipelines.rollout_step import Rollout
from quintet.records import INCOMPLETE_OUTCOMES, Batch, Trajectory
from quintet.rollout.collate import collate, reward_at_end, train_on_observations
from quintet.runtime.components import Components
from quintet.training.packing import map_domains, select_trajectories
from quintet.training.protocols import LogProbScorer


def collate_rollout(rollout: Rollout, config: Experiment) -> Batch:
    """Return the episodes as a batch, without those whose environment failed.

    Raises:
        MachineError: no episode of the step has a turn.
    """
    completed = completed_episodes(rollout)
    if not completed:
        raise _no_episodes(rollout, config)
    batch = collate(completed)
    if rollout.baseline is not None:
        baseline = [rollout.baseline[int(group)] for group in batch.group]
        batch = replace(batch, baseline=torch.tensor(baseline, dtype=batch.rewards.dtype))
    if config.domains:
        batch = replace(batch, domain=torch.tensor([config.domains.index(episode.env) for episode in completed]))
    if config.algorithm.turn_rewards:
        return batch
    return reward_at_end(batch, across_groups=_compares_across_groups(config.algorithm))


def _compares_across_groups(config: AlgorithmConfig) -> bool:
    """Return whether rewards of different groups are compared with each other."""
    advantage, shaping = config.advantage, config.shaping
    return not advantage.compares_within_group or advantage.whiten or "batch" in (shaping.center, shaping.divide)


def completed_episodes(rollout: Rollout) -> list[Trajectory]:
    """Return the episodes that a batch is made of: with a turn, and without a failure."""
    return [each for each in rollout.trajectories if each.outcome not in INCOMPLETE_OUTCOMES and each.turns]


def _no_episodes(rollout: Rollout, config: Experiment) -> MachineError:
    failure = next((episode.failure for episode in rollout.trajectories if episode.failure is not None), None)
    if failure is None:
        message = f"no episode started: every first prompt is longer than {config.rollout.max_prompt_tokens} tokens"
        return MachineError(message, f"raise rollout.max_prompt_tokens above {config.rollout.max_prompt_tokens}")
    message = f"every episode of the step failed (first, in {failure.where}: {failure.error_type}: {failure.message})"
    return MachineError(message, "fix the environment, or its options")


def add_log_probs(components: Components, batch: Batch, step: int) -> tuple[Batch, dict[str, float]]:
    """Add the learner's log-probs, and return the gap between them and the engine's as metrics.

    They are not computed if the engine's are used and observations are not trained. Those of all batches of a step are
    of the weights before its first update.
    """
    config, response_mask = components.config, batch.loss_mask
    if not config.scores_rollout:
        return batch, {}
    scorer = components.learners.policy_scorer(step)
    if config.algorithm.train_on_observations:
        batch = train_on_observations(batch)
    elif not config.needs_learner_logprobs:
        return _with_sum_squared_probs(scorer, batch, config), {}
    log_probs = scorer.compute_log_probs(batch)
    dtype = components.learners.actor.scorer.dtype
    gap = _log_prob_gap(log_probs[response_mask], batch.logprobs[response_mask], dtype)
    rollout_log_probs = torch.where(response_mask, batch.logprobs, log_probs)
    if not config.needs_learner_logprobs:
        return _with_sum_squared_probs(scorer, replace(batch, logprobs=rollout_log_probs), config), {}
    batch = replace(batch, logprobs=log_probs, rollout_logprobs=rollout_log_probs)
    batch = _with_sum_squared_probs(scorer, batch, config)
    if config.algorithm.correction is None:
        return batch, gap
    weights, trained, metrics = rollout_correction(batch, config.algorithm.correction)
    return replace(batch, correction=weights, trained_mask=trained), gap | metrics


def _log_prob_gap(learner: torch.Tensor, engine: torch.Tensor, dtype: torch.dtype) -> dict[str, float]:
    """Return how far the engine's log-probs of the response tokens are from the learner's."""
    if not len(learner):
        return {}
    gap = measure_drift(learner, engine, max_gap(dtype))
    return {
        "training/rollout_probs_diff_max": gap.probs_diff_max,
        "training/rollout_probs_diff_mean": gap.probs_diff_mean,
        "training/rollout_probs_diff_std": gap.probs_diff_std,
        "training/rollout_probs_diff_beyond": gap.share_above_limit,
        "rollout_corr/kl": gap.kl,
        "rollout_corr/k3_kl": gap.k3_kl,
    }


def _with_sum_squared_probs(scorer: LogProbScorer, batch: Batch, config: Experiment) -> Batch:
    """Add the sum of squared probabilities if the advantage estimator needs it."""
    if not config.algorithm.advantage.needs_sum_squared_probs:
        return batch
    return replace(batch, sum_squared_probs=scorer.compute_sum_squared_probs(batch))


def add_values(components: Components, batch: Batch) -> Batch:
    """Add the critic's values; of observation tokens, too, if advantages are computed over them."""
    critic = components.learners.critic
    if critic is None:
        return batch
    scored = batch if components.config.algorithm.advantage_over_response_tokens else train_on_observations(batch)
    return replace(batch, values=critic.compute_values(scored))


def add_reference_log_probs(components: Components, batch: Batch, step: int) -> Batch:
    """Add the reference's log-probs; first renew the reference every `kl.refresh_every_steps`."""
    learners, kl = components.learners, components.config.algorithm.kl
    if kl and kl.refresh_every_steps and step % kl.refresh_every_steps == 0:
        learners.snapshot_reference()
    reference = learners.reference
    if reference is None:
        return batch
    batch = replace(batch, ref_logprobs=reference.compute_log_probs(batch))
    penalty = components.config.algorithm.kl_in_reward
    if penalty and penalty.estimator == "full":
        divergence = learners.actor.scorer.compute_divergence(batch, reference, swapped=penalty.swapped)
        batch = replace(batch, divergence=divergence)
    return batch


def add_advantages(batch: Batch, config: Experiment, kl: KlControl | None = None) -> tuple[Batch, dict[str, float]]:
    """Add advantages and returns; also return the metrics of rewards and groups.

    Groups that `algorithm.filter` rejects are removed, at the end with `filter.after_advantages`. Rewards are shaped,
    and the KL penalty `kl` is subtracted. Groups with equal rewards are left out of the update with
    `algorithm.drop_groups_without_signal`, if nothing other than their rewards could give a gradient.
    """
    algorithm = config.algorithm
    scores = trajectory_rewards(batch)
    masked = batch.truncated if algorithm.mask_truncated else None
    with_signal = has_signal(scores, batch.group, algorithm.signal_threshold, masked=masked)
    metrics = {"training/groups_with_signal": _share_of_groups(batch, with_signal)}
    accepted = select_groups(scores, batch.group, algorithm.filter, lengths=num_response_tokens(batch))
    share = 1.0
    if not bool(accepted.all()):
        share = metrics["training/groups_kept"] = _share_of_groups(batch, accepted)
        batch = batch if algorithm.filter.after_advantages else select_trajectories(batch, accepted)
    batch = map_domains(batch, lambda part: shape_rewards(part, algorithm.shaping, config.max_episode_tokens))
    has_episodes = bool(batch.loss_mask.any())
    if kl is not None and has_episodes:
        batch, penalty = _subtract_kl(batch, kl)
        metrics |= penalty
    if batch.truncated is not None and has_episodes:
        metrics["training/truncated_episodes"] = float(batch.truncated[has_response(batch)].float().mean())
        if masked is not None:
            batch = replace(batch, loss_mask=batch.loss_mask & ~batch.truncated[batch.token_trajectory])
    batch = map_domains(batch, lambda part: _advantages(part, config))
    batch = _scaled(batch, 0.0 if algorithm.zero_advantages else advantage_scale(share, algorithm.filter))
    if algorithm.filter.after_advantages and share < 1.0:
        batch = select_trajectories(batch, accepted)
    if drops_groups_without_signal(algorithm) and bool((with_signal & accepted).any()):
        batch = select_trajectories(batch, with_signal & accepted)
    return _without_rejected_tokens(batch), metrics


def _without_rejected_tokens(batch: Batch) -> Batch:
    """Return the batch whose loss mask has no token that the rollout correction rejected."""
    if batch.trained_mask is None:
        return batch
    return replace(batch, loss_mask=batch.loss_mask & batch.trained_mask)


def _scaled(batch: Batch, factor: float) -> Batch:
    """Return the batch with advantages times the factor."""
    if factor == 1.0 or batch.advantages is None:
        return batch
    return replace(batch, advantages=batch.advantages * factor)


def _share_of_groups(batch: Batch, trajectories: torch.Tensor) -> float:
    """Return the share of groups with at least one of the `trajectories`, bool [R]."""
    return float(torch.isin(torch.unique(batch.group), batch.group[trajectories]).float().mean())


def _advantages(batch: Batch, config: Experiment) -> Batch:
    """Compute advantages and returns, over response tokens alone or over observation tokens, too."""
    responses_only, advantage = config.algorithm.advantage_over_response_tokens, config.algorithm.advantage
    correction = config.algorithm.correction
    rejects_first = correction is not None and correction.reject_before_advantages
    batch = _without_rejected_tokens(batch) if rejects_first else batch
    if responses_only or not advantage.recurses_over_tokens:
        advantages, returns = estimate(batch, advantage)
        return replace(batch, advantages=_clip(advantages, config), returns=returns)
    unwhitened = advantage.model_copy(update={"whiten": False})
    with_observations = train_on_observations(batch)
    with_observations = _without_rejected_tokens(with_observations) if rejects_first else with_observations
    advantages, returns = estimate(with_observations, unwhitened)
    if advantage.whiten:
        ends = turn_ends(batch) if advantage.whitens_over_turns else None
        advantages = whiten(advantages, batch.loss_mask, over=ends)
    advantages = _clip(advantages * batch.loss_mask, config)
    return replace(batch, advantages=advantages, returns=returns * batch.loss_mask)


def _clip(advantages: torch.Tensor, config: Experiment) -> torch.Tensor:
    """Clip advantages [N] if the run asks for it."""
    bound = config.algorithm.advantage_clip
    return advantages if bound is None else advantages.clamp(-bound, bound)


def _subtract_kl(batch: Batch, control: KlControl) -> tuple[Batch, dict[str, float]]:
    """Subtract the KL penalty from the rewards, then adapt its coefficient."""
    per_token = token_divergence(batch.logprobs, batch.ref_logprobs, control.config, batch.divergence)
    mask = batch.loss_mask
    rewards = penalize_rewards(batch.rewards, batch.logprobs, batch.ref_logprobs, mask, control, batch.divergence)
    weights = token_weights("seq-mean-token-mean", mask, batch.token_trajectory)
    divergence = float((per_token * weights).sum())
    penalized_batch, episodes = replace(batch, rewards=rewards), has_response(batch)
    metrics = {
        "actor/reward_kl_penalty": divergence,
        "actor/reward_kl_penalty_coeff": control.coefficient,
        "critic/rewards/mean": float(trajectory_rewards(penalized_batch)[episodes].mean()),
    }
    control.observe(divergence, int(episodes.sum()))
    return penalized_batch, metrics
