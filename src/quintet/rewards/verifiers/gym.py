"""Problems of reasoning-gym (Stojanovski et al. 2025), scored by the scoring function of their generator.

Some of these functions evaluate the answer as Python. They get data and expressions only, and only run in processes
that cannot start others, write files or open connections, see `quintet.sandbox.seccomp`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from quintet.rewards.answer_extraction import extract_boxed, extract_tagged
from quintet.rewards.score import GroundTruthError, Score
from quintet.rewards.thoughts import text_after_thoughts
from quintet.rewards.verifiers.evaluated_answers import without_code
from quintet.sandbox.seccomp import is_confined


def verify(text: str, ground_truth: Any, extra: Mapping[str, Any]) -> Score:
    """Return the generator's score, 0 to 1.

    `ground_truth` is the generated entry (`question`, `answer`, `metadata`), as JSON or a mapping, or only its answer,
    with the rest in `extra`. The generator is `extra["generator"]` or the entry's `metadata["source_dataset"]`.

    Raises:
        GroundTruthError: the row has no answer, or does not name its generator.
        RuntimeError: this process is not confined.
    """
    if not is_confined():
        raise RuntimeError(
            "scoring functions of reasoning-gym may evaluate responses as code: they only run in confined processes"
        )
    name, entry = read_entry(ground_truth, extra)
    final = text_after_thoughts(text)
    answer = extract_tagged(final) or extract_boxed(final) or final.strip()
    score = float(_score_function(name)(without_code(name, answer, entry), entry))
    return Score(min(max(score, 0.0), 1.0) if math.isfinite(score) else score, answer)


def read_entry(ground_truth: Any, extra: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the generator and the generated entry of a row.

    Raises:
        GroundTruthError: the row has no answer, or does not name its generator.
    """
    entry = _entry(ground_truth, extra)
    name = extra.get("generator") or entry["metadata"].get("source_dataset")
    if not name:
        raise GroundTruthError("the row does not name its generator", "set data_source to reasoning_gym/GENERATOR")
    if entry["answer"] is None and not entry["metadata"]:
        raise GroundTruthError("the row has neither an answer nor metadata")
    return str(name), entry


def _entry(ground_truth: Any, extra: Mapping[str, Any]) -> dict[str, Any]:
    entry = extra.get("entry", ground_truth)
    if isinstance(entry, str) and entry.lstrip().startswith("{"):
        entry = json.loads(entry)
    if isinstance(entry, dict) and "answer" in entry:
        return {"question": "", **entry, "metadata": entry.get("metadata") or {}}
    return {"question": extra.get("question", ""), "answer": ground_truth, "metadata": extra.get("metadata") or {}}


@lru_cache(maxsize=256)
def _score_function(name: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(name)


def preload() -> None:
    """Load before forking everything that is slow to load."""
    _score_function("chain_sum")
