"""Keys of pipelined training in runs that cannot have it."""

from collections.abc import Iterator

from quintet.config.composed import ComposedConfig
from quintet.config.native.experiment import Experiment
from quintet.config.plan.overlap import engines_on_learner_devices, overlaps_training
from quintet.config.plan.placement import has_log_prob_workers
from quintet.config.plan.process_layout import process_layout
from quintet.config.problems import ConfigProblem
from quintet.config.schema import format_value

SHARDED_REWARD = "reward.model.min_sharded_parameters"
PIPELINED_OFF = "training.pipelined=false"
Obstacle = tuple[str, str, str | None]
"""A key, why its value excludes pipelined training, and a setting that does not."""


def overlap_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield why training cannot be pipelined if it should."""
    config = composed.experiment
    if not config.training.pipelined or config.generation is not None:
        return
    if obstacle := engines_on_learner_devices(config):
        yield composed.problem("training.pipelined", f"{obstacle}, so that they cannot compute together", PIPELINED_OFF)
    obstacles = (*_batch_obstacles(config), *_policy_obstacles(config), *_reward_obstacles(config))
    for key, reason, setting in obstacles:
        problem = f"training.pipelined trains on a mini-batch before the others are generated, but {reason}"
        yield composed.problem(key, problem, f"{setting}, or {PIPELINED_OFF}" if setting else PIPELINED_OFF)


def sharded_reward_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield a reward model sharded over the ranks of the actor, which train while episodes are scored."""
    reward, layout = composed.experiment.reward, process_layout(composed.experiment)
    if reward is None or reward.model is None or reward.model.min_sharded_parameters == 0:
        return
    if len(layout.learner_ranks) > 1 and not layout.has_standalone("reward") and overlaps_training(composed.experiment):
        problem = "the ranks of the actor train while they would score; placement.reward.devices gives it devices"
        yield composed.problem(SHARDED_REWARD, problem, f"{SHARDED_REWARD}=0")


def _batch_obstacles(config: Experiment) -> Iterator[Obstacle]:
    """Yield what makes mini-batches depend on the whole step, and engines wait for updates."""
    training = config.training
    if training.mini_batches == 1:
        yield "training.mini_batches", "the only mini-batch is the whole step", None
    if training.groups_per_step % training.mini_batches:
        key = "training.mini_batches"
        yield key, f"it does not divide training.groups_per_step = {training.groups_per_step}: groups are split", None
    for name in ("sleep_between_steps", "offload"):
        if getattr(config.rollout.engine_options, name):
            key = f"rollout.engine_options.{name}"
            yield key, "engines generate during updates", f"{key}=false"
    if training.mini_batch_sequences is not None:
        key = "training.mini_batch_sequences"
        yield key, "mini-batches of sequences are not those of groups", f"{key}=null"
    if training.epochs > 1:
        yield "training.epochs", "further epochs mix the mini-batches", "training.epochs=1"
    if config.actor.shuffle:
        yield "actor.shuffle", "mini-batches are drawn from all episodes of the step", "actor.shuffle=false"
    filters = config.algorithm.filter
    for name in ("keep_share", "top_p", "min_p", "drop_zero", "min_mean", "max_mean"):
        default = type(filters).model_fields[name].default
        if getattr(filters, name) != default:
            remedy = f"algorithm.filter.{name}={format_value(default)}"
            yield f"algorithm.filter.{name}", "groups are selected from the step", remedy


def _policy_obstacles(config: Experiment) -> Iterator[Obstacle]:
    """Yield what must be computed with the weights before the first update."""
    algorithm = config.algorithm
    if not has_log_prob_workers(config):
        yield from _log_prob_obstacles(config)
    elif algorithm.correction is not None and algorithm.correction.normalize:
        key = "algorithm.correction.normalize"
        yield key, "its weights are normalized over the step", f"{key}=false"
    if config.needs_critic:
        yield "algorithm.advantage.name", "the critic's values are those before the first update of the step", None
    kl = algorithm.kl
    if kl is not None and kl.refresh_every_steps:
        key = "algorithm.kl.refresh_every_steps"
        yield key, "the reference is renewed before the first update of the step", f"{key}=0"
    penalty = algorithm.kl_in_reward
    if penalty is not None and (penalty.target is not None or penalty.estimator == "full"):
        key = "algorithm.kl.apply_to" if algorithm.reward_kl is None else "algorithm.reward_kl.target"
        yield key, "this penalty is computed over the whole step", None


def _log_prob_obstacles(config: Experiment) -> Iterator[Obstacle]:
    """Yield what needs the log-probs of weights that only log-prob workers keep until the end of the step."""
    algorithm = config.algorithm
    reason = "its log-probs are those before the first update of the step, which needs log-prob workers (docs/async.md)"
    if config.rollout.recompute_logprobs:
        yield "rollout.recompute_logprobs", reason, "rollout.recompute_logprobs=false"
    if algorithm.correction is not None:
        yield "algorithm.correction", reason, "algorithm.correction=null"
    if algorithm.train_on_observations:
        yield "algorithm.train_on_observations", reason, "algorithm.train_on_observations=false"
    if algorithm.loss.weighs_rollout_gap:
        yield "algorithm.loss.name", reason, None


def _reward_obstacles(config: Experiment) -> Iterator[Obstacle]:
    """Yield what compares episodes of different groups."""
    algorithm, advantage = config.algorithm, config.algorithm.advantage
    others = advantage.needs_greedy_baseline or advantage.needs_sum_squared_probs
    if not config.needs_critic and (others or not advantage.compares_within_group):
        yield "algorithm.advantage.name", "this estimator needs all episodes of the step", None
    if getattr(advantage, "length_weight", False):
        key = "algorithm.advantage.length_weight"
        yield key, "advantages depend on the mean length over the step", f"{key}=false"
    if getattr(advantage, "deviation_weight", False):
        key = "algorithm.advantage.deviation_weight"
        yield key, "advantages depend on the largest deviation over the step", f"{key}=false"
    if advantage.whiten:
        key = "algorithm.advantage.whiten"
        yield key, "advantages are normalized over the step", f"{key}=false"
    if algorithm.drop_groups_without_signal and advantage.zero_for_equal_rewards:
        key = "algorithm.drop_groups_without_signal"
        yield key, "the remaining groups of the step are divided into mini-batches", f"{key}=false"
    for name in ("center", "divide"):
        if getattr(algorithm.shaping, name) == "batch":
            key = f"algorithm.shaping.{name}"
            yield key, "rewards are compared over the step", f"{key}=group"
