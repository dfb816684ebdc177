"""Problems of reasoning-gym (Stojanovski et al. 2025), judged by the rules of the generator that made them.

Some of those rules read an answer with Python's own evaluator; they are run only in processes that can't start others,
write files or open connections, see `quintet.processes.confinement`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from quintet.processes.confinement import sealed
from quintet.rewards.reading import boxed, tagged
from quintet.rewards.score import Score

__all__ = ["judge", "warm"]


def judge(text: str, truth: Any, extra: Mapping[str, Any]) -> Score:
    """The generator's own score, 0 to 1.

    `truth` is the entry that the generator made (`question`, `answer`, `metadata`), as JSON or a mapping, or only its
    answer, with the rest in `extra`. The generator is `extra["generator"]`, else the entry's own
    `metadata["source_dataset"]`.

    Raises:
        ValueError: the row doesn't say which generator asked.
        RuntimeError: this process may do more than judge.
    """
    if not sealed():
        raise RuntimeError(
            "reasoning-gym's rules may evaluate what the policy wrote: they run in sealed processes only"
        )
    entry = _entry(truth, extra)
    name = extra.get("generator") or entry["metadata"].get("source_dataset")
    if not name:
        raise ValueError("the row doesn't say which generator asked")
    answer = tagged(text) or boxed(text) or text.strip()
    score = float(_rules(str(name))(answer, entry))
    return Score(min(max(score, 0.0), 1.0) if math.isfinite(score) else score, answer)


def _entry(truth: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    given = extra.get("entry", truth)
    if isinstance(given, str) and given.lstrip().startswith("{"):
        given = json.loads(given)
    if isinstance(given, dict) and "answer" in given:
        return {"question": "", **given, "metadata": given.get("metadata") or {}}
    return {"question": extra.get("question", ""), "answer": truth, "metadata": extra.get("metadata") or {}}


@lru_cache(maxsize=256)
def _rules(name: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(name)


def warm() -> None:
    """Load what the first answer would wait for."""
    _rules("chain_sum")
