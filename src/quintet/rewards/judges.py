"""The judge that the reward section names."""

from __future__ import annotations

import os
from collections.abc import Iterable

from quintet.config.native.data import RewardConfig
from quintet.errors import ConfigError
from quintet.rewards.appraisal import Appraiser
from quintet.rewards.managers import BY_FUNCTION, BatchJudge, Judge, PoolJudge
from quintet.rewards.pool import Crew, Pool
from quintet.rewards.sources import Route, route
from quintet.rewards.worker import Setup

__all__ = ["Judge", "make_judge"]

ONE_PROCESS = frozenset({"naive", "batch", "dapo", "gdpo"})
OVERFLOW = 16
"""Further processes of our own rules while some are slow: so many answers that never end hold up no others."""


def make_judge(config: RewardConfig, longest_reply: int, sources: Iterable[str] = ()) -> Judge:
    """The judge of answers of at most `longest_reply` tokens. Rows' `sources`, where they are known, are looked up at
    once, and what judges them is loaded meanwhile.

    Raises:
        ConfigError: there are no such rules, a user's function can't be loaded or called, or what is asked for doesn't
            fit together.
    """
    _check(config, longest_reply)
    routes = _routes(config, sources)
    pool = Pool(_crew(config))
    try:
        if config.function is not None:
            pool.start(BY_FUNCTION, wait=True)
        elif routes:
            pool.start(routes[0].lane)
    except BaseException:
        pool.close()
        raise
    appraiser = Appraiser(config, longest_reply)
    if config.manager == "batch" and config.function is not None:
        return BatchJudge(pool, appraiser)
    return PoolJudge(pool, appraiser, strip_end_marks=config.manager == "dapo")


def _check(config: RewardConfig, longest_reply: int) -> None:
    if config.manager == "dapo" and config.overlong is None:
        raise ConfigError(
            "reward.manager = 'dapo' takes a penalty off long answers, and there is none",
            key="reward.overlong",
            hint="give reward.overlong.buffer, or take reward.manager: naive",
        )
    if config.overlong is not None and config.overlong.buffer > longest_reply:
        raise ConfigError(
            f"reward.overlong.buffer = {config.overlong.buffer} is more than the longest reply, {longest_reply} tokens",
            key="reward.overlong.buffer",
            value=config.overlong.buffer,
            hint="give at most rollout.max_response_tokens",
        )
    if config.manager == "remote" and config.function is None:
        raise ConfigError(
            "reward.manager = 'remote' asks a function elsewhere, and there is none",
            key="reward.function",
            hint="give an address, http://… or https://…, or file.py:function",
        )


def _routes(config: RewardConfig, sources: Iterable[str]) -> list[Route]:
    """How rows are judged, as far as it is known before they come; the one that loads most first."""
    if config.function is not None:
        return []
    named = dict.fromkeys(sources) or ([""] if config.kind != "rules" else [])
    return sorted((route(source, config.kind) for source in named), key=lambda found: not found.lane.modules)


def _crew(config: RewardConfig) -> Crew:
    setup = Setup(
        config.function,
        config.function_arguments,
        batched=config.manager == "batch" and config.function is not None,
        seal=config.function is None,
        timeout_seconds=config.timeout_seconds,
    )
    many = 1 if config.manager in ONE_PROCESS else _cores()
    limited = config.requests_per_minute if config.manager == "rate_limited" else None
    return Crew(
        setup,
        config.workers or many,
        # a user's function may count on being called one after another; nothing does on our own rules
        OVERFLOW if config.function is None else 0,
        60.0 / limited if limited else 0.0,
    )


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
