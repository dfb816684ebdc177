"""Options of verifiers: `reward.function_arguments`, or the arguments of a verifier of one data source."""

from collections.abc import Iterator
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from quintet.config.native.section import Section


class CrossThinkQaOptions(Section):
    """Options of `crossthinkqa`."""

    reward_type: Literal["loose", "soft", "strict"] = "soft"
    r"""Reward of a right letter without `\boxed{}`: 1 (`loose`), 0.5 (`soft`) or −1 (`strict`). A wrong letter in a box
    is −0.5 with `soft`; everything else wrong is −1, and a right letter in a box 1."""
    length_coefficient: float = 0.0
    """Weight of the length reward, a constant: ROLL computes it from the length to which it pads responses."""
    padded_length: PositiveInt | None = None
    """Tokens to which ROLL pads responses, its `response_length`, for `length_coefficient`."""

    def conflicts(self) -> Iterator[tuple[str, ...]]:
        if self.length_coefficient and self.padded_length is None:
            yield "`length_coefficient` needs `padded_length`", "length_coefficient=0.0"


class CodeSandboxOptions(Section):
    """Options of `code_sandbox`."""

    test_seconds: PositiveFloat = 20.0
    """Wall-clock time limit of one test; all tests of a response share `reward.timeout_seconds`."""


class MathRuleOptions(Section):
    """Options of `math_rule`."""

    thinking_started: bool = False
    """The prompt ends with `<think>`, so that a response must not contain it. Set for prompts that do, as in ROLL."""
