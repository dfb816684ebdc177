"""Micro-batches of each rank in one optimizer step."""

import math
from dataclasses import dataclass

from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import BudgetConfig
from quintet.config.native.training import SftConfig
from quintet.config.plan.robot_batches import robot_arithmetic

OPENVLA_IMAGE_TOKENS = 256
"""Patches of an image of 224 pixels in OpenVLA and OpenVLA-OFT."""


def max_sequence_tokens(config: Experiment) -> int:
    """Return the tokens of the longest possible sequence, prompt and response."""
    vla = config.policy.vla
    images = OPENVLA_IMAGE_TOKENS * vla.images if config.env.is_simulator and vla else 0
    return images + config.rollout.max_prompt_tokens + config.rollout.max_response_tokens


def max_sequences_per_episode(config: Experiment) -> int:
    """Return how many training sequences an episode yields at most.

    The first `window_size` turns are one sequence; the window then slides, and each further turn is another.
    """
    rollout = config.rollout
    if rollout.window_size is None or config.env.reads_prompts or config.env.is_simulator:
        return 1
    return 1 + max(0, rollout.max_turns - rollout.window_size)


def max_mini_batches(config: Experiment) -> int:
    """Return the maximum number of mini-batches in a step: those of the groups that `algorithm.filter` keeps."""
    training, groups = config.training, config.training.groups_per_step
    if config.env.is_simulator:
        return training.mini_batches
    size, episodes = groups * training.samples_per_group // training.mini_batches, max_selected_episodes(config)
    if training.mini_batch_sequences is not None:
        return -(-episodes * max_sequences_per_episode(config) // training.mini_batch_sequences)
    return -(-episodes // size)


def max_selected_episodes(config: Experiment) -> int:
    """Return the maximum number of episodes of a step that `algorithm.filter` keeps."""
    return config.algorithm.filter.max_selected(config.training.groups_per_step) * config.training.samples_per_group


@dataclass(frozen=True, slots=True)
class MicroBatchLimits:
    """Limits of one micro-batch. None sets no limit of that kind."""

    sequences: int | None
    tokens: int | None
    key: str
    """Native key that sets the limit."""

    @property
    def description(self) -> str:
        sequences = f"{self.sequences:,} sequence{'s' * (self.sequences > 1)}" if self.sequences else None
        tokens = f"{self.tokens:,} tokens" if self.tokens else None
        return "at most " + " and ".join(filter(None, (sequences, tokens)))

    def max_tokens(self, sequence: int) -> int:
        """Return the tokens of a full micro-batch; a sequence longer than the budget is a micro-batch alone."""
        limits = (self.sequences and self.sequences * sequence, self.tokens and max(self.tokens, sequence))
        return min(limit for limit in limits if limit is not None)


def micro_batch_limits(config: Experiment, learner: str, *, inference: bool = False) -> MicroBatchLimits:
    """Return the limits of a learner, or those of `training` if it sets none."""
    name = "inference_budget" if inference else "budget"
    limits: BudgetConfig = getattr(getattr(config, learner), name)
    if limits.sequences is None and limits.tokens is None:
        return MicroBatchLimits(None, config.training.micro_batch_tokens, "training.micro_batch_tokens")
    part = "sequences" if limits.tokens is None else "tokens"
    return MicroBatchLimits(limits.sequences, limits.tokens, f"{learner}.{name}.{part}")


@dataclass(frozen=True, slots=True)
class RankWorkload:
    """Work of one data-parallel rank in one optimizer step."""

    data_parallel_ranks: int
    episodes_per_rank: int
    sequences_per_rank: int
    """Maximum: an episode that ends early has fewer turns."""
    tokens_per_micro_batch: int
    """Maximum."""
    predicted_tokens_per_micro_batch: int
    """Maximum tokens that have a loss."""
    micro_batches: int
    """Maximum micro-batches whose gradients are accumulated."""
    budget: MicroBatchLimits


def rank_workload(config: Experiment, learner: str, ranks: int, *, inference: bool = False) -> RankWorkload:
    """Return the work of one of `ranks` data-parallel ranks; `inference` for forward-only passes."""
    training = config.training
    parts = ranks if inference else training.mini_batches * ranks
    units = training.groups_per_step * training.samples_per_group
    if config.env.is_simulator:
        # a sequence is a sample: one chunk of actions of one robot
        units = robot_arithmetic(config).samples
    episodes = -(-units // parts)
    sequences = episodes * max_sequences_per_episode(config)
    if training.mini_batch_sequences is not None and not inference:
        sequences = min(
            -(-training.mini_batch_sequences // ranks), -(-units // ranks) * max_sequences_per_episode(config)
        )
        episodes = min(episodes, sequences)
    budget, length = micro_batch_limits(config, learner, inference=inference), max_sequence_tokens(config)
    micro_batches = -(-sequences * length // budget.tokens) if budget.tokens else 0
    micro_batches += -(-sequences // budget.sequences) if budget.sequences else 0
    tokens = min(budget.max_tokens(length), sequences * length)
    predicted = min(tokens, min(budget.sequences or sequences, sequences) * _max_predicted_tokens(config))
    return RankWorkload(ranks, episodes, sequences, tokens, predicted, min(micro_batches, sequences), budget)


def _max_predicted_tokens(config: Experiment) -> int:
    """Return the tokens of one sequence that have a loss: response tokens, or everything after the prompt."""
    rollout = config.rollout
    if config.algorithm.train_on_observations:
        return max_sequence_tokens(config)
    visible = min(rollout.max_turns, rollout.window_size or rollout.max_turns) * rollout.max_response_tokens
    return min(visible, config.max_episode_tokens)


def sft_passes_per_step(config: Experiment, stage: SftConfig) -> int:
    """Return the maximum micro-batches of one optimizer step."""
    if stage.sequences_per_pass is not None:
        return -(-stage.batch // stage.sequences_per_pass)
    return min(stage.batch, -(-stage.batch * stage.max_tokens // config.training.micro_batch_tokens))


def num_sft_validations(config: Experiment, stage: SftConfig, steps: int, epoch_steps: int) -> int:
    """Return how often the held-out loss is computed: at the start, after each epoch of `epoch_steps` steps, every
    `validation.every_steps` steps, and at the end."""
    interval = config.validation.every_steps
    at_epochs = interval >= 0 or stage.final_weights == "best"
    periods = [epoch_steps] * at_epochs + [interval] * (interval > 0)
    count = sum(steps // period for period in periods) - (steps // math.lcm(*periods) if len(periods) > 1 else 0)
    at_end = at_epochs and steps > 0 and all(steps % period for period in periods)
    return stage.before_training + count + at_end
