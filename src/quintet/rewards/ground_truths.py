"""Ground truths that no response can be compared with: errors of the data, found before a run or when a row is used."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from quintet.config.native.data import RewardConfig
from quintet.errors import ConfigError
from quintet.records import Failure, PromptRow
from quintet.rewards.data_sources import BUILT_IN, Route, route
from quintet.rewards.score import GroundTruthError
from quintet.rewards.verifiers.registry import VERIFIERS
from quintet.rewards.verifiers.truth_checks import check_ground_truth
from quintet.sandbox.json_lines import decode, encode

KEY: Final = "data.truth_key"
CHECK_SECONDS: Final = 2.0
"""Time limit of checking rows before a run; further rows are checked when they are used."""
MAX_SHOWN: Final = 5
"""Number of rows that an error names."""
HINT: Final = (
    "correct or remove such rows, which `quintet data check FILE --verifier NAME` lists, or"
    f" {KEY}=COLUMN, or reward.kind=VERIFIER"
)
"""With alternatives in the form that `ComposedConfig.hint_for_user` translates."""


def check_rows(rows: Iterable[PromptRow], config: RewardConfig, seconds: float = CHECK_SECONDS) -> int:
    """Check the ground truths of rows that built-in verifiers score, for at most `seconds`; return the number of rows.

    Raises:
        ConfigError: rows have a ground truth that their verifier cannot compare with, or there is no verifier.
    """
    deadline = time.monotonic() + seconds
    routes = dict[str, Route]()
    problems = list[tuple[PromptRow, str]]()
    count = 0
    for row in rows:
        if not _has_verifier(row, config):
            continue
        if row.data_source not in routes:
            routes[row.data_source] = route(row.data_source, config)
        problem = ground_truth_problem(row, routes[row.data_source])
        problems += [] if problem is None else [(row, problem)]
        count += 1
        if time.monotonic() > deadline:
            break
    if problems:
        raise _error(problems, f"; so {len(problems):,} of {count:,} rows" if len(problems) > 1 else "")
    return count


def _has_verifier(row: PromptRow, config: RewardConfig) -> bool:
    chosen = config.verifiers.get(row.data_source)
    is_judged = config.judge is not None or (chosen is not None and chosen.judge is not None)
    return config.function is None and config.model is None and not is_judged


def ground_truth_problem(row: PromptRow, chosen: Route) -> str | None:
    """Return why a built-in verifier cannot compare with the ground truth of a row; None if it can."""
    try:
        _check(chosen, row)
    except ValueError as error:
        return f"the verifier {chosen.verifier!r} cannot compare with: {error}"
    except (TypeError, KeyError, AttributeError, IndexError) as error:
        return f"the verifier {chosen.verifier!r} cannot read: {type(error).__name__}: {error}"
    return None


def _check(chosen: Route, row: PromptRow) -> None:
    """Check a ground truth with the values that its verifier gets in a worker process."""
    if str(VERIFIERS.get(chosen.verifier).target).startswith(BUILT_IN):
        ground_truth, extra = decode(encode([row.ground_truth, {**row.extra, **chosen.extra}]))
        check_ground_truth(chosen.verifier, ground_truth, extra, chosen.options)


def raise_data_error(row: PromptRow, chosen: Route, failure: Failure) -> None:
    """Raise an error if the failure of a verifier is due to the ground truth of its row.

    Raises:
        ConfigError: the verifier cannot compare with it.
    """
    problem = ground_truth_problem(row, chosen)
    if problem is None and failure.error_type == GroundTruthError.__name__:
        problem = f"the verifier {chosen.verifier!r} cannot compare with: {failure.message}"
    if problem is not None:
        raise _error([(row, problem)])


def _described(row: PromptRow, problem: str) -> str:
    if row.ground_truth is None and row.columns:
        return f"has no ground truth; its columns are {', '.join(row.columns)}"
    return f"has the ground truth {row.ground_truth!r:.80}, which {problem}"


def _error(problems: Sequence[tuple[PromptRow, str]], count: str = "") -> ConfigError:
    """Return the error that names rows; rows with the same problem are counted."""
    rows = dict[str, list[str]]()
    for row, problem in problems:
        rows.setdefault(_described(row, problem), []).append(row.location or f"row {row.id}")
    lines = [f"{_names(locations)} {problem}" for problem, locations in rows.items()]
    shown = "\n  ".join(lines[:MAX_SHOWN])
    unused = next((column for row, _ in problems for column in row.columns if column in row.extra), "COLUMN")
    return ConfigError(f"{shown}{count}", key=KEY, hint=HINT.replace("COLUMN", unused))


def _names(locations: Sequence[str]) -> str:
    others = len(locations) - 1
    return locations[0] + (f" (and {others:,} other row{'s' * (others > 1)})" if others else "")


@contextmanager
def truth_errors_under_key(key: str) -> Iterator[None]:
    """Name another key than `data.truth_key` in errors of ground truths.

    Raises:
        ConfigError: the error that the block raises.
    """
    try:
        yield
    except ConfigError as error:
        if error.key != KEY:
            raise
        raise ConfigError(error.message, key=key, hint=str(error.hint).replace(KEY, key)) from None
