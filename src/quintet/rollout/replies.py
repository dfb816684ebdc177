"""What a reply says: `<think>…</think><answer>action || action</answer>`."""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["ParsedReply", "ReplyFormat"]


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """`actions` are legal and in order; `valid` says that the form was kept and every word legal."""

    actions: tuple[str, ...]
    valid: bool


class ReplyFormat:
    """Writes and reads replies for one world's action words; letter case doesn't matter."""

    def __init__(self, actions: tuple[str, ...], *, think: bool, separator: str, max_actions: int) -> None:
        self._legal = {action.casefold(): action for action in actions}
        self._think = think
        self._separator = separator
        self._max_actions = max_actions
        thought = r"<think>(?:(?!</?think>).)*</think>\s*" if think else ""
        self._pattern = re.compile(rf"\s*{thought}<answer>((?:(?!</?answer>).)*)</answer>\s*", re.DOTALL)

    def parse(self, text: str) -> ParsedReply:
        """Unparsable text gives no action. An unknown word makes the reply invalid and ends its
        actions; the legal ones before it stand. Actions beyond the limit are dropped."""
        match = self._pattern.fullmatch(text)
        if match is None:
            return ParsedReply((), valid=False)
        words = [word.strip().casefold() for word in match[1].split(self._separator)]
        actions: list[str] = []
        for word in words:
            if word not in self._legal:
                return ParsedReply(tuple(actions[: self._max_actions]), valid=False)
            actions.append(self._legal[word])
        return ParsedReply(tuple(actions[: self._max_actions]), valid=True)

    def write(self, thought: str, actions: tuple[str, ...]) -> str:
        """The reply that `parse` reads back; `thought` is left out where the format has none."""
        answer = f" {self._separator} ".join(actions)
        head = f"<think> {thought} </think>" if self._think else ""
        return f"{head}<answer> {answer} </answer>"
