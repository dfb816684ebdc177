"""Built-in verifiers."""

from __future__ import annotations

from quintet.registry import Registry
from quintet.rewards.score import Score
from quintet.rewards.verifiers.options import CodeSandboxOptions, CrossThinkQaOptions, MathRuleOptions

VERIFIERS: Registry[Score] = Registry("verifier", entry_points="quintet.verifiers")
"""Functions `(text, ground_truth, extra) -> Score`, run in worker processes; see `quintet.rewards.score.Verifier`."""

_HOME = "quintet.rewards.verifiers"

VERIFIERS.add("math", f"{_HOME}.math:verify_anywhere", help="equal in value, anywhere in the text")
VERIFIERS.add("math_boxed", f"{_HOME}.math:verify_boxed", help=r"equal in value, in \boxed{}")
VERIFIERS.add("math_dapo", f"{_HOME}.math:verify_answer_line", help="equal in value, after `Answer:`")
VERIFIERS.add("geometry3k", f"{_HOME}.math:verify_geometry3k", help="0.9 for the boxed value, 0.1 for the format")
VERIFIERS.add("rstar2", f"{_HOME}.math:verify_anywhere", help="same as `math`, RLinf's name")
VERIFIERS.add(
    "math_rule",
    f"{_HOME}.math_rule:verify",
    help="equal in value, in the box or text after </think>: ROLL's MathRuleRewardWorker",
    config=MathRuleOptions,
)
VERIFIERS.add("gsm8k", f"{_HOME}.gsm8k:verify_strict", help="same number after the last `####`")
VERIFIERS.add("gsm8k_flexible", f"{_HOME}.gsm8k:verify_flexible", help="same number, last in the text")
VERIFIERS.add("choice", f"{_HOME}.choice:verify", help="letter of a multiple choice")
VERIFIERS.add(
    "multiple_choice_boxed",
    f"{_HOME}.boxed_choice:verify_boxed",
    help=r"letter in \boxed{}: ROLL's MultipleChoiceBoxedRuleRewardWorker",
)
VERIFIERS.add(
    "crossthinkqa",
    f"{_HOME}.boxed_choice:verify_crossthinkqa",
    help="letter, format and repetition: ROLL's CrossThinkQARuleRewardWorker",
    config=CrossThinkQaOptions,
)
VERIFIERS.add("ifeval", f"{_HOME}.ifeval:verify", help="constraint on the form of the text, as IFEval defines it")
VERIFIERS.add(
    "ifeval_roll",
    f"{_HOME}.ifeval:verify_as_roll",
    help="constraint on the form of the text, and repetition: ROLL's GeneralRuleRewardWorker",
)
VERIFIERS.add("exact", f"{_HOME}.text_match:verify_exact", help="same text, ignoring case")
VERIFIERS.add("searchr1", f"{_HOME}.text_match:verify_tagged", help="same words in <answer>, compared as in SQuAD")
VERIFIERS.add("vqa", f"{_HOME}.text_match:verify_visual", help="same letter, number or words in <answer>")
VERIFIERS.add("numeric", f"{_HOME}.numeric:verify", help="same number, or within a tolerance")
VERIFIERS.add("countdown", f"{_HOME}.countdown:verify", help="expression of the given numbers that reaches the target")
VERIFIERS.add("code", f"{_HOME}.code:verify", help="Python program that passes tests, run confined")
VERIFIERS.add(
    "code_sandbox",
    f"{_HOME}.code_sandbox:verify",
    help="Python program that passes all tests: ROLL's CodeSandboxRewardWorker with use_local",
    config=CodeSandboxOptions,
)
VERIFIERS.add(
    "reasoning_gym",
    f"{_HOME}.gym:verify",
    help="scoring function of the reasoning-gym generator",
    requires=("reasoning_gym",),
    extra="tasks",
)
