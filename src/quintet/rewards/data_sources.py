"""Verifiers of rows by their `data_source`, with the names of verl, RLinf and ROLL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from quintet.errors import ConfigError, nearest
from quintet.registry import Entry
from quintet.rewards.score import Score
from quintet.rewards.verifier_process import ProcessKind
from quintet.rewards.verifiers.registry import VERIFIERS

SOURCES: Mapping[str, str] = {
    "openai/gsm8k": "gsm8k",
    "gsm8k": "gsm8k",
    "lighteval/MATH": "math_boxed",
    "DigitalLearningGmbH/MATH-lighteval": "math_boxed",
    "HuggingFaceH4/MATH-500": "math_boxed",
    "math_dapo": "math_dapo",
    "math_dapo_reasoning": "math_dapo",
    "math": "math_dapo",
    "aime*": "math_dapo",
    **dict.fromkeys(
        (
            f"numina_{name}"
            for name in ("aops_forum", "synthetic_math", "amc_aime", "synthetic_amc", "cn_k12", "olympiads")
        ),
        "math",
    ),
    **dict.fromkeys(("codecontests", "apps", "codeforces", "taco"), "code"),
    "hiyouga/geometry3k": "geometry3k",
    **dict.fromkeys(
        (
            f"searchR1_{name}"
            for name in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
        ),
        "searchr1",
    ),
    "Jiayi-Pan/Countdown-Tasks-3to4": "countdown",
    **{
        f"{home}{name}": rules
        for home in ("", "quintet/")
        for name, rules in (("addition", "numeric"), ("arithmetic", "numeric"), ("countdown", "countdown"))
    },
    "reasoning_gym/*": "reasoning_gym",
}
"""Verifier by data source; `*` matches any text."""

BUILT_IN = "quintet.rewards.verifiers."
UNCONFINED = frozenset({"code"})
"""Built-in verifiers that start processes."""
GYM = "reasoning_gym/"


@dataclass(frozen=True, slots=True)
class Route:
    """Verifier with its process kind and extra fields besides those of the row."""

    verifier: str
    process_kind: ProcessKind
    extra: Mapping[str, Any] = field(default_factory=dict)


def route(source: str, kind: str = "rules") -> Route:
    """Return the verifier for rows of a source; `kind` is a verifier for all rows, or `rules`.

    Raises:
        ConfigError: the source or verifier is unknown, or a required package is missing.
    """
    name = _verifier_name(source) if kind == "rules" else kind
    entry = _entry(name) if kind != "rules" else VERIFIERS.get(name)
    entry.load()
    return Route(name, _process_kind(entry), {"generator": source.removeprefix(GYM)} if source.startswith(GYM) else {})


def _entry(name: str) -> Entry[Score]:
    try:
        return VERIFIERS.get(name)
    except ConfigError as error:
        known = ["rules", *(entry.name for entry in VERIFIERS)]
        close = nearest(name, known)
        hint = (f"did you mean {close!r}? " if close else "") + f"known: {', '.join(known)}"
        raise ConfigError(
            f"reward.kind = {name!r}: {error.message}", key="reward.kind", value=name, hint=hint
        ) from error


def _verifier_name(source: str) -> str:
    if source in SOURCES:
        return SOURCES[source]
    for pattern, name in SOURCES.items():
        if "*" in pattern and fnmatchcase(source, pattern):
            return name
    raise _unknown(source)


def _unknown(source: str) -> ConfigError:
    alternatives = "set a verifier for all rows, reward.kind, or your own reward.function (file.py:function)"
    if not source:
        message = "rows have no data_source to choose a verifier by, and reward.kind = 'rules'"
        return ConfigError(message, key="reward.kind", value="rules", hint=alternatives)
    close = nearest(source, SOURCES)
    hint = (f"did you mean {close!r}? else " if close else "") + alternatives
    return ConfigError(f"no verifier is known for data_source {source!r}", key="data_source", value=source, hint=hint)


def _process_kind(entry: Entry[Score]) -> ProcessKind:
    """Run built-in verifiers in confined processes, with their large imports done before forking."""
    module = entry.target.partition(":")[0] if isinstance(entry.target, str) else ""
    is_built_in = module.startswith(BUILT_IN)
    modules = (module,) if is_built_in and entry.requires else ()
    return ProcessKind(is_built_in and entry.name not in UNCONFINED, modules)
