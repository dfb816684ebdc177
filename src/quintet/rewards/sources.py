"""Which rules judge which rows: by `data_source`, as verl, RLinf and ROLL name theirs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from quintet.errors import ConfigError, nearest
from quintet.registry import Entry
from quintet.rewards.processes import Lane
from quintet.rewards.score import Score
from quintet.rewards.verifiers.catalogue import VERIFIERS

__all__ = ["ROLL_WORKERS", "SOURCES", "Route", "check_sources", "route"]

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
"""A row's source and the verifier of its answers; `*` stands for anything."""

ROLL_WORKERS: Mapping[str, str] = {
    "MathRuleRewardWorker": "math",
    "GSM8KMathRewardWorker": "math",
    "CodeSandboxRewardWorker": "code",
    "MultipleChoiceBoxedRuleRewardWorker": "choice",
    "CrossThinkQARuleRewardWorker": "choice",
    "CrossthinkQARuleRewardWorker": "choice",
    "GeneralValRuleRewardWorker": "exact",
}
"""ROLL's reward workers (the last part of `worker_cls`) and the verifier that judges alike."""

OWN = "quintet.rewards.verifiers."
UNSEALED = frozenset({"code"})
"""Our own rules that start processes."""
GYM = "reasoning_gym/"


@dataclass(frozen=True, slots=True)
class Route:
    """A verifier, what it is told besides the row, and the process that it needs."""

    verifier: str
    lane: Lane
    extra: Mapping[str, Any] = field(default_factory=dict)


def route(source: str, kind: str = "rules") -> Route:
    """The rules for rows of a source; `kind` is the verifier of them all, or `rules`.

    Raises:
        ConfigError: nobody knows the source or the verifier, or a package that it needs is missing.
    """
    name = _of_source(source) if kind == "rules" else kind
    entry = _known(name) if kind != "rules" else VERIFIERS.get(name)
    entry.load()
    return Route(name, _lane(entry), {"generator": source.removeprefix(GYM)} if source.startswith(GYM) else {})


def check_sources(sources: Iterable[str], kind: str = "rules") -> None:
    """Whether rows of all these sources can be judged.

    Raises:
        ConfigError: one of them can't.
    """
    for source in dict.fromkeys(sources):
        route(source, kind)


def _known(name: str) -> Entry[Score]:
    try:
        return VERIFIERS.get(name)
    except ConfigError as error:
        known = ["rules", *(entry.name for entry in VERIFIERS)]
        close = nearest(name, known)
        hint = (f"did you mean {close!r}? " if close else "") + f"known: {', '.join(known)}"
        raise ConfigError(
            f"reward.kind = {name!r}: {error.message}", key="reward.kind", value=name, hint=hint
        ) from error


def _of_source(source: str) -> str:
    if source in SOURCES:
        return SOURCES[source]
    for pattern, name in SOURCES.items():
        if "*" in pattern and fnmatchcase(source, pattern):
            return name
    raise _unknown(source)


def _unknown(source: str) -> ConfigError:
    own = "name rules for all rows by reward.kind, or give your own by reward.function (file.py:function)"
    if not source:
        told = "rows don't say by which rules they are judged: they have no data_source, and reward.kind = 'rules'"
        return ConfigError(told, key="reward.kind", value="rules", hint=own)
    close = nearest(source, SOURCES)
    hint = (f"did you mean {close!r}? else " if close else "") + own
    return ConfigError(f"no rules are known for data_source {source!r}", key="data_source", value=source, hint=hint)


def _lane(entry: Entry[Score]) -> Lane:
    """Rules of ours are run in sealed processes, those that load much in processes that have loaded it."""
    module = entry.target.partition(":")[0] if isinstance(entry.target, str) else ""
    own = module.startswith(OWN)
    return Lane(own and entry.name not in UNSEALED, (module,) if own and entry.requires else ())
