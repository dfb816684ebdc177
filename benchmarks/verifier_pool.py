"""Measure how fast answers are scored, and how long ten answers that never end delay a batch.

    python benchmarks/verifier_pool.py [--times 5] [--out FILE]

Writes one JSON file: boxed integers per second, the same for answers that are parsed, exactly or by
math-verify, and the time of a batch of 512 with ten answers that cannot be evaluated, beyond the timeout of one answer.
Uses two processes.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from machine import machine
from quintet.config.native.data import RewardConfig
from quintet.records import PromptRow, Response, RewardResult
from quintet.rewards.factory import RewardScorer, build_verifier_scorer

SOURCE = "lighteval/MATH"
ENDLESS = (
    r"\sum_{k=1}^{1} 9^{9^{9^{9}}}",
    r"\prod_{k=1}^{1} \binom{1000000000}{500000000}",
    r"\prod_{k=1}^{1} 100000000!",
    r"\sum_{k=1}^{1000000000} \frac{1}{k^k}",
)
"""Answers that math-verify never finishes; sums and products are outside of the exact comparison."""
BATCH, PATHOLOGICAL, TIMEOUT = 512, 10, 3.0
PROCESSES = 2


def integer(number: int) -> tuple[str, str]:
    """Return a plain integer answer and its ground truth."""
    return str(number), str(number)


def root(number: int) -> tuple[str, str]:
    """Return an answer that must be parsed, and its ground truth."""
    return f"1+\\sqrt{{{number + 2}}}", f"\\sqrt{{{number + 2}}}+1"


def total(number: int) -> tuple[str, str]:
    """Return an answer that only math-verify parses, and its ground truth."""
    return f"\\sum_{{k=1}}^{{3}} {number + 2}k", f"{6 * (number + 2)}"


def mixed(number: int) -> tuple[str, str]:
    """Return answers of which one in four must be parsed."""
    return root(number) if number % 4 == 0 else integer(number)


def judged(judge: RewardScorer, rows: list[tuple[str, str]]) -> tuple[float, list[RewardResult]]:
    """Return the seconds from the first answer to the last score."""
    started = time.perf_counter()
    for number, (content, truth) in enumerate(rows):
        question = PromptRow(number, SOURCE, (), truth)
        judge.submit(Response(number, question, f"Step by step, so the answer is $\\boxed{{{content}}}$.", 12))
    verdicts = judge.drain()
    return time.perf_counter() - started, verdicts


@contextmanager
def opened(seconds: float) -> Iterator[RewardScorer]:
    """Return a warmed-up reward scorer, so that process start is not measured."""
    judge = build_verifier_scorer(
        RewardConfig(manager="prime", workers=PROCESSES, timeout_seconds=seconds), 100, [SOURCE]
    )
    try:
        judged(judge, [root(number) for number in range(8)])
        yield judge
    finally:
        judge.close()


def rates(make: Callable[[int], tuple[str, str]], count: int, times: int) -> list[float]:
    """Return answers per second of each run."""
    with opened(30.0) as judge:
        found = []
        for run in range(times):
            seconds, verdicts = judged(judge, [make(run * count + number) for number in range(count)])
            if sum(verdict.score for verdict in verdicts) != count:
                raise SystemExit("a right answer was judged wrong")
            found.append(round(count / seconds))
    return found


def beyond(make: Callable[[int], tuple[str, str]], times: int) -> list[float]:
    """Return the seconds that a batch with pathological answers takes beyond the timeout, of each run."""
    found = []
    with opened(TIMEOUT) as judge:
        for run in range(times):
            rows = [make(run * BATCH + number) for number in range(BATCH)]
            for place in random.Random(run).sample(range(BATCH), PATHOLOGICAL):
                rows[place] = (ENDLESS[place % len(ENDLESS)], "7")
            seconds, verdicts = judged(judge, rows)
            failures = sum(verdict.failure is not None for verdict in verdicts)
            if failures != PATHOLOGICAL or sum(verdict.score for verdict in verdicts) != BATCH - PATHOLOGICAL:
                raise SystemExit("another number of answers has failed")
            found.append(round(seconds - TIMEOUT, 2))
    return found


def measured(unit: str, runs: list[float]) -> dict[str, object]:
    return {"unit": unit, "median": statistics.median(runs), "least": min(runs), "most": max(runs), "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    times = arguments.times
    result = {
        "machine": machine(),
        "processes": PROCESSES,
        "boxed_integers": measured("answers/s", rates(integer, 4096, times)),
        "parsed": measured("answers/s", rates(root, 256, times)),
        "parsed_by_math_verify": measured("answers/s", rates(total, 256, times)),
        "batch": {"answers": BATCH, "pathological": PATHOLOGICAL, "timeout_seconds": TIMEOUT},
        "beyond_timeout_integers": measured("s", beyond(integer, times)),
        "beyond_timeout_one_in_four_parsed": measured("s", beyond(mixed, times)),
    }
    text = json.dumps(result, indent=1) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
