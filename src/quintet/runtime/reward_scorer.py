"""Build what scores responses: reward functions in processes, a reward model, or a language-model judge."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.config.native.data import RewardConfig, RewardModelConfig
from quintet.config.native.experiment import Experiment

if TYPE_CHECKING:
    from quintet.policies.reward_model import ResponseScorer
    from quintet.rewards.reward_managers import RewardScorer


def build_reward_scorer(
    config: Experiment,
    policy: Path,
    sources: Iterable[str] = (),
    load_model: Callable[[RewardModelConfig, int], ResponseScorer] | None = None,
) -> RewardScorer:
    """Build the scorer that `config.reward` names.

    `policy` is the policy's model directory, and `sources` are the data sources of the prompts. `load_model` loads the
    reward model; by default it is loaded into this process.

    Raises:
        ConfigError: the reward function does not exist, or a user-defined one cannot be loaded.
        MachineError: the reward model does not exist.
    """
    reward, max_tokens = config.reward or RewardConfig(function_arguments={}), config.rollout.max_response_tokens
    if reward.model is not None:
        from quintet.policies.reward_model import RewardModel, RewardModelScorer

        load_model = load_model or (lambda model, max_length: RewardModel.load(model, policy, max_length))
        model = load_model(reward.model, config.rollout.max_prompt_tokens + max_tokens)
        return RewardModelScorer(model, reward, max_tokens)
    if reward.judge is not None:
        from quintet.rewards.llm_judge import LlmJudge

        return LlmJudge(reward, max_tokens)
    from quintet.rewards.factory import build_verifier_scorer

    return build_verifier_scorer(reward, max_tokens, sources)
