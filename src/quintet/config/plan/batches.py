"""Micro-batches of each rank in one optimizer step."""

import math
from dataclasses import dataclass, replace

from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import BudgetConfig
from quintet.config.native.training import SftConfig
from quintet.config.plan.robot_batches import robot_arithmetic

WARM_START_TRIALS = 256
"""Episodes that try out the policy of a warm start (`pipelines/setup.py`)."""
OPENVLA_IMAGE_TOKENS = 256
"""Patches of an image of 224 pixels in OpenVLA and OpenVLA-OFT."""


def max_sequence_tokens(config: Experiment) -> int:
    """Return the tokens of the longest possible sequence: prompt and response, or a row of fine-tuning."""
    if config.sft_only is not None:
        return config.sft_only.max_tokens
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
        """Return the tokens of a full micro-batch. The sequence that reaches the budget is its last one, so that a
        sequence longer than the budget is a micro-batch alone."""
        limits = (self.sequences, self.tokens and -(-self.tokens // sequence))
        return sequence * min(limit for limit in limits if limit is not None)


def micro_batch_limits(config: Experiment, learner: str, *, inference: bool = False) -> MicroBatchLimits:
    """Return the limits of a learner, or those of `training` if it sets none."""
    if config.sft_only is not None:
        limit = config.sft_only.sequences_per_pass
        tokens = None if limit else config.training.micro_batch_tokens
        return MicroBatchLimits(limit, tokens, "sft.sequences_per_pass" if limit else "training.micro_batch_tokens")
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
    if config.sft_only is not None:
        return _fine_tuning_workload(config, config.sft_only, ranks, inference=inference)
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
    budget = micro_batch_limits(config, learner, inference=inference)
    length = max_sequence_tokens(config)
    work = _workload(ranks, sequences, sequences * length, length, _max_predicted_tokens(config), budget)
    # the number of micro-batches stays a maximum, as in frameworks that do not share prompts
    tokens = min(work.tokens_per_micro_batch, packed_tokens(config, sequences, ranks))
    return replace(work, episodes_per_rank=episodes, tokens_per_micro_batch=tokens)


def warm_start_workload(config: Experiment, ranks: int) -> RankWorkload | None:
    """Return the work of a rank in one update of the warm start, whose sequences are demonstrated turns; None if there
    is none."""
    if config.warm_start is None or config.sft_only is not None or config.env.is_simulator:
        return None
    turns, length = -(-config.warm_start.turns_per_update // ranks), max_sequence_tokens(config)
    budget = micro_batch_limits(config, "actor")
    predicted = min(length, config.rollout.max_response_tokens)
    return _workload(ranks, turns, turns * length, length, predicted, budget)


def _fine_tuning_workload(config: Experiment, stage: SftConfig, ranks: int, *, inference: bool) -> RankWorkload:
    """Return the work of a rank on the rows of one optimizer step, or with `inference` on those of one pass over
    held-out rows."""
    held_out = (config.data.validation_batch if config.data else None) or stage.batch
    rows = -(-(held_out if inference else stage.batch) // ranks)
    length, budget = stage.max_tokens, micro_batch_limits(config, "actor")
    return _workload(ranks, rows, rows * length, length, length, budget)


def _workload(
    ranks: int, sequences: int, total: int, length: int, predicted: int, budget: MicroBatchLimits
) -> RankWorkload:
    """Return the work on sequences of `total` tokens, each of at most `length`, of which `predicted` have a loss."""
    micro_batches = -(-total // budget.tokens) if budget.tokens else 0
    micro_batches += -(-sequences // budget.sequences) if budget.sequences else 0
    tokens = min(budget.max_tokens(length), total)
    limit = min(budget.sequences or sequences, sequences) * predicted
    return RankWorkload(ranks, sequences, sequences, tokens, min(tokens, limit), min(micro_batches, sequences), budget)


def packed_tokens(config: Experiment, sequences: int, ranks: int) -> int:
    """Return the maximum tokens of sequences of one rank. The samples of a prompt share its tokens; several ranks also
    divide the samples of a prompt."""
    if config.sft_only is not None:
        return sequences * config.sft_only.max_tokens
    training, rollout = config.training, config.rollout
    if config.env.is_simulator or not (config.env.reads_prompts or rollout.max_turns == 1):
        return sequences * max_sequence_tokens(config)
    splits_groups = training.mini_batch_sequences is not None or training.groups_per_step % training.mini_batches
    prompts = min(sequences, training.groups_per_step)
    if not splits_groups:
        prompts = min(prompts, -(-sequences // training.samples_per_group) + (ranks > 1))
    return prompts * rollout.max_prompt_tokens + sequences * rollout.max_response_tokens


def _max_predicted_tokens(config: Experiment) -> int:
    """Return the tokens of one sequence that have a loss: response tokens, or everything after the prompt."""
    rollout = config.rollout
    if config.algorithm.train_on_observations:
        return max_sequence_tokens(config)
    visible = min(rollout.max_turns, rollout.window_size or rollout.max_turns) * rollout.max_response_tokens
    return min(visible, config.max_episode_tokens)


def max_requests(config: Experiment, validation_starts: int | None = None) -> int | None:
    """Return the maximum requests that all engines have at a time; None if the rows of a validation are unknown."""
    validation, generation = config.validation, config.generation
    episodes = config.groups_per_round * config.samples_per_prompt
    if generation is not None:
        return episodes
    starts = validation_starts if config.env.reads_prompts else config.validation_start_states
    has_validation = validation.before_training or validation.only or validation.every_steps >= 0
    if has_validation and starts is None:
        return None
    validated = (starts or 0) * validation.sampling.samples * has_validation
    warm_start = config.warm_start
    tried = WARM_START_TRIALS if warm_start is not None and warm_start.until_success is not None else 0
    return max(math.ceil(episodes * (1 + config.rollout.async_ratio)), validated, tried)


def num_sft_validations(config: Experiment, stage: SftConfig, steps: int, epoch_steps: int) -> int:
    """Return how often the held-out loss is computed: at the start, after each epoch of `epoch_steps` steps, every
    `validation.every_steps` steps, and at the end."""
    interval = config.validation.every_steps
    at_epochs = interval >= 0 or stage.final_weights == "best"
    periods = [epoch_steps] * at_epochs + [interval] * (interval > 0)
    count = sum(steps // period for period in periods) - (steps // math.lcm(*periods) if len(periods) > 1 else 0)
    at_end = at_epochs and steps > 0 and all(steps % period for period in periods)
    return stage.before_training + count + at_end
