"""Who judges answers: rules in processes of their own, a reward model, or a language model behind an endpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.config.native import Experiment, RewardConfig

if TYPE_CHECKING:
    from quintet.rewards.judges import Judge

__all__ = ["open_judge"]


def open_judge(config: Experiment, policy: Path, sources: Iterable[str] = ()) -> Judge:
    """The judge that the configuration names; `policy` is where the policy's model lies, `sources` are those of the
    questions.

    Raises:
        ConfigError: there are no such rules, or the user's own can't be loaded.
        MachineError: there is no such model.
    """
    reward, longest = config.reward or RewardConfig(function_arguments={}), config.rollout.max_response_tokens
    if reward.model is not None:
        from quintet.policies.reward_model import RewardModel, RewardModelJudge

        whole = config.rollout.max_prompt_tokens + longest
        return RewardModelJudge(RewardModel.load(reward.model, policy, whole), reward, longest)
    if reward.judge is not None:
        from quintet.rewards.judge_model import LanguageModelJudge

        return LanguageModelJudge(reward, longest)
    from quintet.rewards.judges import make_judge

    return make_judge(reward, longest, sources)
