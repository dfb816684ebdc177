"""Build what scores responses: reward functions in processes, a reward model, or a language-model judge."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.config.native.data import RewardConfig, RewardModelConfig
from quintet.config.native.experiment import Experiment

if TYPE_CHECKING:
    from quintet.policies.reward_model import ResponseScorer
    from quintet.rewards.judge_server import JudgeServer
    from quintet.rewards.llm_judge import LlmJudge
    from quintet.rewards.reward_managers import RewardScorer


def build_reward_scorer(
    config: Experiment,
    policy: Path,
    sources: Iterable[str] = (),
    load_model: Callable[[RewardModelConfig, int], ResponseScorer] | None = None,
    start_judges: Callable[[Experiment], Sequence[tuple[str, JudgeServer]]] | None = None,
) -> RewardScorer:
    """Build the scorer that `config.reward` names.

    `policy` is the policy's model directory, and `sources` are the data sources of the prompts. `load_model` loads the
    reward model; by default it is loaded into this process. `start_judges` starts the servers of judges, and returns
    them with the sections of the judges; by default they are started by this process.

    Raises:
        ConfigError: the reward function does not exist, or a user-defined one cannot be loaded.
        MachineError: the reward model does not exist, or the server of a judge does not start.
    """
    reward, max_tokens = config.reward or RewardConfig(function_arguments={}), config.rollout.max_response_tokens
    if reward.model is not None:
        from quintet.policies.reward_model import RewardModel, RewardModelScorer

        load_model = load_model or (lambda model, max_length: RewardModel.load(model, policy, max_length))
        model = load_model(reward.model, config.rollout.max_prompt_tokens + max_tokens)
        return RewardModelScorer(model, reward, max_tokens)
    judges = _build_judges(config, reward, start_judges or started_servers)
    if reward.judge is not None:
        return judges["judge"]
    from quintet.rewards.factory import build_verifier_scorer

    others = build_verifier_scorer(reward, max_tokens, sources)
    if not judges:
        return others
    from quintet.rewards.reward_managers import DomainScorers

    by_section = {f"verifiers.{name}.judge": name for name in reward.verifiers}
    return DomainScorers(others, {by_section[section]: judge for section, judge in judges.items()})


def _build_judges(
    config: Experiment, reward: RewardConfig, start_judges: Callable[[Experiment], Sequence[tuple[str, JudgeServer]]]
) -> dict[str, LlmJudge]:
    """Build all judges, after starting their servers."""
    if not reward.judges:
        return {}
    from quintet.rewards.llm_judge import LlmJudge

    started = start_judges(config) if any(judge.server for judge in reward.judges.values()) else ()
    return {
        section: LlmJudge(
            reward, judge, config.rollout.max_response_tokens, [server for name, server in started if name == section]
        )
        for section, judge in reward.judges.items()
    }


def started_servers(config: Experiment) -> list[tuple[str, JudgeServer]]:
    """Start the servers of judges by this process."""
    from quintet.runtime.judge_servers import JudgeServers, judge_server

    servers = JudgeServers(config)
    return [judge_server(config, *address, servers.close) for address in servers.addresses]
