"""Construction of the reward scorer with verifiers or a user's function."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

from quintet.config.native.data import RewardConfig
from quintet.errors import ConfigError
from quintet.hardware import cpu_cores
from quintet.rewards.data_sources import Route, route
from quintet.rewards.dispatcher import PoolConfig
from quintet.rewards.reward_computation import RewardComputation
from quintet.rewards.reward_managers import FUNCTION_PROCESS, BatchRewardScorer, PooledRewardScorer, RewardScorer
from quintet.rewards.verifier_pool import VerifierPool
from quintet.rewards.verifier_worker import Setup

SINGLE_PROCESS_MANAGERS = frozenset({"naive", "batch", "dapo", "gdpo"})
OVERFLOW = 16
"""Additional processes with built-in verifiers while some are slow: this many endless responses delay no others."""


def build_verifier_scorer(config: RewardConfig, max_response_tokens: int, sources: Iterable[str] = ()) -> RewardScorer:
    """Return the scorer of responses of at most `max_response_tokens`. The known `sources` of rows are checked at once,
    and their verifier is loaded in the background.

    Raises:
        ConfigError: there is no such verifier, the user's function cannot be loaded or called, or keys contradict each
            other.
    """
    _check(config, max_response_tokens)
    routes = _routes(config, sources)
    pool = VerifierPool(_pool_config(config))
    with ExitStack() as failure:
        failure.callback(pool.close)
        if config.function is not None:
            pool.start(FUNCTION_PROCESS, wait=True)
        elif routes:
            pool.start(routes[0].process_kind)
        failure.pop_all()
    terms = RewardComputation(config, max_response_tokens)
    if config.manager == "batch" and config.function is not None:
        return BatchRewardScorer(pool, terms)
    return PooledRewardScorer(pool, terms, strip_end_marks=config.manager == "dapo")


def _check(config: RewardConfig, max_response_tokens: int) -> None:
    if config.manager == "dapo" and config.overlong is None:
        raise ConfigError(
            "reward.manager = 'dapo' penalizes long responses, but reward.overlong is not set",
            key="reward.overlong",
            hint="set reward.overlong.buffer, or use reward.manager: naive",
        )
    if config.overlong is not None and config.overlong.buffer > max_response_tokens:
        buffer = config.overlong.buffer
        raise ConfigError(
            f"reward.overlong.buffer = {buffer} is more than the longest response, {max_response_tokens} tokens",
            key="reward.overlong.buffer",
            value=buffer,
            hint="use at most rollout.max_response_tokens",
        )
    if config.manager == "remote" and config.function is None:
        raise ConfigError(
            "reward.manager = 'remote' calls a function elsewhere, but reward.function is not set",
            key="reward.function",
            hint="write a URL, http://… or https://…, or file.py:function",
        )


def _routes(config: RewardConfig, sources: Iterable[str]) -> list[Route]:
    """Return the routes that are known in advance, those with modules to load first."""
    if config.function is not None:
        return []
    listed = dict.fromkeys([*sources, *config.verifiers])
    names = [name for name in listed if name not in config.verifiers or config.verifiers[name].judge is None]
    names += [""] if config.kind != "rules" and not listed else []
    return sorted((route(source, config) for source in names), key=lambda chosen: not chosen.process_kind.modules)


def _pool_config(config: RewardConfig) -> PoolConfig:
    setup = Setup(
        config.function,
        config.function_arguments,
        batched=config.manager == "batch" and config.function is not None,
        confined=config.function is None,
        timeout_seconds=config.timeout_seconds,
    )
    workers = 1 if config.manager in SINGLE_PROCESS_MANAGERS else cpu_cores()
    per_minute = config.requests_per_minute if config.manager == "rate_limited" else None
    return PoolConfig(
        setup,
        config.workers or workers,
        # users' functions may rely on sequential calls; built-in verifiers do not
        OVERFLOW if config.function is None else 0,
        60.0 / per_minute if per_minute else 0.0,
    )
