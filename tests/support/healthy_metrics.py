"""Rows of metrics.jsonl as a healthy run writes them: curves with noise from step to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Row = dict[str, Any]


def healthy_rows(
    steps: int, *, seed: int = 0, noise: float = 0.03, first: float = 0.3, last: float = 0.9, critic: bool = False
) -> list[Row]:
    """Return the rows of a run whose success goes from `first` to `last`, with a validation every tenth step.

    Shares have additive noise, other metrics a factor with a log-normal distribution. The first step is slow.
    """
    random = Random(seed)
    return [_row(step, step / max(1, steps), random, noise, first, last, critic=critic) for step in range(1, steps + 1)]


def _row(step: int, done: float, random: Random, noise: float, first: float, last: float, *, critic: bool) -> Row:
    learned = 1 - math.exp(-4 * done)
    success = _share(first + (last - first) * learned, random, noise)

    def near(value: float) -> float:
        return value * math.exp(random.gauss(0, 3 * noise))

    slow = 4.0 if step == 1 else 1.0
    generation, update = near(4.0) * slow, near(3.0) * slow
    row: Row = {
        "step": step,
        "time_seconds": 30.0 + 7.5 * step,
        "actor/entropy": near(0.8 - 0.5 * learned),
        "actor/grad_norm": near(0.3) * (4.0 if random.random() < 0.02 else 1.0),
        "actor/lr": 1e-6,
        "actor/pg_clipfrac": near(0.02),
        "actor/ppo_kl": random.gauss(0.003, 0.1 * noise),
        "actor/kl_loss": near(0.05 * learned + 0.001),
        "actor/skipped_updates": 0.0,
        "critic/score/max": 1.0,
        "critic/score/mean": success - 0.1 * _share(0.05, random, noise),
        "critic/score/min": -0.1,
        "engine/restarts": 0.0,
        "perf/max_memory_rss_gb": 2.0 + 0.2 * learned,
        "perf/total_num_tokens": near(2e5),
        "response/valid_format": _share(0.9 + 0.08 * learned, random, noise),
        "response_length/clip_ratio": _share(0.03, random, noise / 3),
        "response_length/mean": near(100 + 80 * learned),
        "rollout_corr/kl": random.gauss(0.001, 0.01 * noise),
        "timing_s/env": near(0.3),
        "timing_s/engine": generation * 0.9,
        "timing_s/gen": generation,
        "timing_s/step": generation + update + 0.1,
        "timing_s/update_actor": update,
        "training/groups_with_signal": _share(0.7 - 0.4 * learned, random, noise),
        "training/rollout_probs_diff_beyond": 0.0,
        "training/rollout_probs_diff_mean": near(0.004),
        "trajectory/failed": 1.0 if random.random() < 0.01 else 0.0,
        "trajectory/outcome/failed": 0.0,
        "trajectory/success_rate": success,
    }
    if critic:
        row |= {"critic/vf_explained_var": _share(0.7 * learned, random, noise), "critic/vf_loss": near(0.1)}
    if step % 10 == 0:
        row["val/lake/success_rate"] = _share(first + (last - first) * learned + 0.03, random, noise)
    return row


def _share(value: float, random: Random, noise: float) -> float:
    return min(1.0, max(0.0, value + random.gauss(0, noise)))


def changed(rows: Sequence[Row], **curves: Callable[[float], float | None]) -> list[Row]:
    """Return the rows with other values of metrics, functions of the completed share of the run.

    A name has `__` in place of `/`.
    """
    values = {name.replace("__", "/"): curve for name, curve in curves.items()}
    return [
        {**row, **{name: curve(number / len(rows)) for name, curve in values.items()}}
        for number, row in enumerate(rows, 1)
    ]
