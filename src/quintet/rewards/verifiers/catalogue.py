"""The rules that come with Quintet."""

from __future__ import annotations

from quintet.registry import Registry
from quintet.rewards.score import Score

__all__ = ["VERIFIERS"]

VERIFIERS: Registry[Score] = Registry("verifier", entry_points="quintet.verifiers")
"""Each a function `(text, truth, extra) -> Score`, run in a process of its own."""

_HOME = "quintet.rewards.verifiers"
_MATH = ("math_verify",)

VERIFIERS.add("math", f"{_HOME}.math:anywhere", help="equal in value, wherever the answer stands", requires=_MATH)
VERIFIERS.add("math_boxed", f"{_HOME}.math:in_a_box", help=r"equal in value, in \boxed{}", requires=_MATH)
VERIFIERS.add("math_dapo", f"{_HOME}.math:on_a_line", help="equal in value, after `Answer:`", requires=_MATH)
VERIFIERS.add("geometry3k", f"{_HOME}.math:geometry", help="0.9 for the boxed value, 0.1 for the form", requires=_MATH)
VERIFIERS.add("rstar2", f"{_HOME}.math:anywhere", help="as `math`, under RLinf's name", requires=_MATH)
VERIFIERS.add("gsm8k", f"{_HOME}.gsm8k:strict", help="the same number after the first `####`")
VERIFIERS.add("gsm8k_flexible", f"{_HOME}.gsm8k:flexible", help="the same number, last in the text")
VERIFIERS.add("choice", f"{_HOME}.choice:judge", help="the letter of a multiple choice")
VERIFIERS.add("exact", f"{_HOME}.matching:exact", help="the same words, case aside")
VERIFIERS.add("searchr1", f"{_HOME}.matching:tagged_words", help="the same words in <answer>, as SQuAD compares")
VERIFIERS.add("vqa", f"{_HOME}.matching:visual", help="the same letter, number or words in <answer>")
VERIFIERS.add("numeric", f"{_HOME}.numeric:judge", help="the same number, or within a tolerance")
VERIFIERS.add("countdown", f"{_HOME}.countdown:judge", help="an expression of given numbers that reaches a target")
VERIFIERS.add("code", f"{_HOME}.code:judge", help="Python that passes tests, run under limits")
VERIFIERS.add(
    "reasoning_gym",
    f"{_HOME}.gym:judge",
    help="the rules of the reasoning-gym generator that asked",
    requires=("reasoning_gym",),
    extra="tasks",
)
