"""Checks whether a built-in verifier can compare with a ground truth, without a response."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quintet.config.native.registry_union import validate_options
from quintet.rewards.score import accepted_answers
from quintet.rewards.verifiers.registry import VERIFIERS

PROBES: Mapping[str, str] = {"numeric": "0", "gsm8k": "#### 0", "gsm8k_flexible": "0"}
"""Responses with which these verifiers read the ground truth; others read it with an empty one."""
MATH: Final = frozenset({"math", "math_boxed", "math_dapo", "geometry3k", "rstar2", "math_rule"})
"""Verifiers that parse the ground truth only in worker processes, where parsing can be interrupted. It has to be there
here."""
CHECKED_BEFORE_SCORING: Final = MATH | PROBES.keys()
"""Verifiers that don't read the ground truth if a response has no answer."""


def check_ground_truth(name: str, ground_truth: Any, extra: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Check the ground truth of a row with its built-in verifier; `extra` has the row's other fields.

    Raises:
        ValueError: the verifier cannot compare with it; other exceptions if it has an unexpected type.
    """
    if name == "code":
        from quintet.rewards.verifiers.code_tests import parse_tests

        parse_tests(ground_truth, extra)
    elif name == "reasoning_gym":
        from quintet.rewards.verifiers.gym import read_entry

        read_entry(ground_truth, extra)
    elif name in MATH:
        accepted_answers(ground_truth)
    else:
        entry = VERIFIERS.get(name)
        config = entry.config
        parsed = {} if config is None else {"options": validate_options(config, dict(options), "options")}
        for truth in accepted_answers(ground_truth) if name in PROBES else [ground_truth]:
            entry.load()(PROBES.get(name, ""), truth, extra, **parsed)
