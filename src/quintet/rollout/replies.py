"""What a reply says: `<think>…</think><answer>action || action</answer>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from quintet.config.native import RolloutConfig

__all__ = ["ParsedReply", "ReplyFormat"]

Form = Literal["whole", "anywhere", "answer"]
_ANSWER = r"<answer>((?:(?!</?answer>).)*)</answer>"
_THOUGHT = r"<think>(?:(?!</?think>).)*</think>\s*"
_NUMBERED = re.compile(r"(\d{1,3})\s*(?:\((.*)\))?")


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """`actions` are legal and in order; `valid` says that the form was kept and every word legal."""

    actions: tuple[str, ...]
    valid: bool


class ReplyFormat:
    """Writes and reads replies for one world's action words."""

    def __init__(
        self,
        actions: tuple[str, ...],
        *,
        think: bool,
        separator: str,
        max_actions: int,
        form: Form = "whole",
        fold_case: bool = True,
        numbers: bool = False,
        skip_unknown: bool = False,
        special: Sequence[str] = (),
    ) -> None:
        """`form` says how much of a reply must be as wanted (see `rollout.reply_form`), `special` are tokens whose text
        is taken out before a reply is read."""
        self._fold = str.casefold if fold_case else str
        self._actions = actions
        self._legal = {self._fold(action): action for action in actions}
        self._think = think
        self._separator = separator
        self._max_actions = max_actions
        self._form = form
        self._numbers = numbers
        self._skip = skip_unknown
        thought = _THOUGHT if think and form != "answer" else ""
        self._pattern = re.compile(f"{thought}{_ANSWER}", re.DOTALL)
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    @classmethod
    def under(cls, config: RolloutConfig, actions: tuple[str, ...], special: Sequence[str] = ()) -> Self:
        """As the configuration wants it; `special` are the tokenizer's special tokens as texts."""
        return cls(
            actions,
            think=config.think,
            separator=config.action_separator,
            max_actions=config.max_actions_per_turn,
            form=config.reply_form,
            fold_case=config.fold_case,
            numbers=config.numbered_actions,
            skip_unknown=config.unknown_actions == "skip",
            special=special if config.strip_special_tokens else (),
        )

    def parse(self, text: str) -> ParsedReply:
        """Unparsable text gives no action. An unknown word makes the reply invalid; it ends the actions, and the legal
        ones before it stand, or is skipped. Actions beyond the limit are dropped."""
        answer = self._answer(text)
        if answer is None:
            return ParsedReply((), valid=False)
        found = [self._action(word.strip()) for word in answer.split(self._separator)]
        known = [action for action in found if action is not None]
        if len(known) < len(found) and not self._skip:
            known = [action for action in found[: found.index(None)] if action is not None]
        return ParsedReply(tuple(known[: self._max_actions]), valid=None not in found)

    def write(self, thought: str, actions: tuple[str, ...]) -> str:
        """The reply that `parse` reads back; `thought` is left out where the format has none."""
        answer = f" {self._separator} ".join(actions)
        head = f"<think> {thought} </think>" if self._think else ""
        return f"{head}<answer> {answer} </answer>"

    def _answer(self, text: str) -> str | None:
        """What stands between the tags; None where the form isn't kept."""
        plain = text if self._special is None else self._special.sub("", text)
        match = self._pattern.fullmatch(plain.strip()) if self._form == "whole" else self._pattern.search(plain)
        return None if match is None else match[1]

    def _action(self, word: str) -> str | None:
        """The world's own word for what was written; None where there is none."""
        known = self._legal.get(self._fold(word))
        if known is not None or not self._numbers:
            return known
        match = _NUMBERED.fullmatch(word)
        if match is None or not 1 <= int(match[1]) <= len(self._actions):
            return None
        action = self._actions[int(match[1]) - 1]
        said = match[2]
        return action if said is None or self._legal.get(self._fold(said.strip())) == action else None
