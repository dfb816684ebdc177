"""Parsing of responses: `<think>…</think><answer>action || action</answer>`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Literal, Self

from quintet.config.native.rollout import RolloutConfig, Thoughts
from quintet.envs.env import NUMBER, TEXT
from quintet.rollout.chat.thought_sections import format_response, response_pattern

Form = Literal["whole", "anywhere", "answer", "strict"]
SHOWN_CHARACTERS = 40
_ANSWER = r"<answer>(?P<answer>(?:(?!</?answer>).)*)</answer>"
_THOUGHT = r"<think>(?:(?!</?think>).)*</think>\s*"
_CLOSED_THOUGHTS = re.compile(r"\A(?:(?!<think>).)*?</think>|<think>.*?</think>", re.DOTALL)
"""Thoughts with a closing tag; the prompt may have the opening tag of the first one."""
_PLACEHOLDERS = {NUMBER: r"[+-]?\d{1,9}(?:\.\d{1,9})?", TEXT: r".+"}
_ELEMENT = re.compile(rf"(<\w+){re.escape(TEXT)}(</\w+>)")
_NUMBERED = re.compile(r"(\d{1,3})\s*(?:\((.*)\))?")


@dataclass(frozen=True, slots=True)
class ParsedResponse:
    """Legal actions in order; `valid` is True if the format was followed and all actions were legal."""

    actions: tuple[str, ...]
    valid: bool
    sections: Mapping[str, str] = field(default_factory=dict)
    """Content of the sections of thoughts by name."""


class ResponseFormat:
    """Formats and parses responses with the actions of one env."""

    def __init__(
        self,
        actions: tuple[str, ...],
        *,
        think: bool,
        separator: str,
        max_actions: int,
        form: Form = "whole",
        ignore_case: bool = True,
        numbers: bool = False,
        skip_unknown: bool = False,
        special: Sequence[str] = (),
        thoughts: Thoughts | None = None,
    ) -> None:
        """`form` says how strictly the format is checked (see `rollout.response_format`); the text of `special` tokens
        is removed before parsing; `thoughts` is `rollout.thoughts`."""
        self._fold = str.casefold if ignore_case else str
        self._actions = actions
        names = [action for action in actions if NUMBER not in action and TEXT not in action]
        self._legal = {self._fold(name): name for name in names}
        self._templates = _action_templates(actions, ignore_case=ignore_case)
        self._is_free_text = actions == (TEXT,) and max_actions == 1
        self._element = element_pattern(actions)
        self._think = think
        self._separator = separator
        self._max_actions = max_actions
        self._form = form
        self._numbers = numbers
        self._skip = skip_unknown
        self._thoughts = thoughts if think else None
        self._has_thought = think and form != "answer"
        thought = _THOUGHT if self._has_thought else ""
        pattern = f"{thought}{_ANSWER}" if self._thoughts is None else response_pattern(self._thoughts, _ANSWER)
        self._pattern = re.compile(pattern, re.DOTALL)
        longest_first = sorted(filter(None, special), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    @classmethod
    def from_config(cls, config: RolloutConfig, actions: tuple[str, ...], special: Sequence[str] = ()) -> Self:
        """Build the format from the configuration; `special` are the tokenizer's special tokens."""
        return cls(
            actions,
            think=config.think,
            separator=config.action_separator,
            max_actions=config.max_actions_per_turn,
            form=config.response_format,
            ignore_case=config.ignore_case,
            numbers=config.numbered_actions,
            skip_unknown=config.unknown_actions == "skip",
            special=special if config.strip_special_tokens else (),
            thoughts=config.thoughts,
        )

    def parse(self, text: str) -> ParsedResponse:
        """Parse a response. Text without the format has no actions. An unknown action makes the response invalid; it is
        skipped, or ends the list of actions. Actions beyond the limit are dropped."""
        match, follows_format = self._match(text)
        if self._element is not None:
            answer = _CLOSED_THOUGHTS.sub("", text) if match is None else match["answer"]
            return self._parse_elements(answer, follows_format)
        if match is None:
            return ParsedResponse((), valid=False)
        sections = {name: content.strip() for name, content in match.groupdict().items()}
        answer = sections.pop("answer")
        parts = [answer] if self._is_free_text else answer.split(self._separator)
        # RAGEN and VAGEN ignore separators with nothing between them
        action_texts = [part.strip() for part in parts if part.strip()] or [""]
        parsed = list(map(self._action, action_texts))
        legal = [action for action in parsed if action is not None]
        if len(legal) < len(parsed) and not self._skip:
            legal = [action for action in parsed[: parsed.index(None)] if action is not None]
        valid = follows_format and None not in parsed
        return ParsedResponse(tuple(legal[: self._max_actions]), valid, sections)

    def _parse_elements(self, answer: str, follows_format: bool) -> ParsedResponse:
        """Parse the answer of an env whose actions are elements, or a whole response without the format. One without an
        element is the empty action, which the env handles."""
        matches = [self._element.search(part) for part in answer.split(self._separator)] if self._element else []
        elements = [match[0] for match in matches if match is not None]
        valid = follows_format and len(elements) == len(matches)
        return ParsedResponse(tuple(elements[: self._max_actions]) or ("",), valid=valid)

    def problem(self, text: str) -> str:
        """Return in words why `parse` calls a response invalid."""
        match, _ = self._match(text)
        if "</answer>" not in _CLOSED_THOUGHTS.sub("", text):
            return "it has no <answer>…</answer>"
        if match is None and self._has_thought and "</think>" not in text:
            return "it has no <think>…</think> before <answer>"
        parts = [] if match is None or self._is_free_text else match["answer"].split(self._separator)
        actions = [part.strip() for part in parts if part.strip() or len(parts) == 1]
        unknown = [action for action in actions if self._element is None and self._action(action) is None]
        if unknown:
            return f"{shorten(repr(unknown[0]), SHOWN_CHARACTERS, placeholder=' …')} is none of the actions"
        return "it has other parts, or text around them"

    def format(self, thought: str, actions: tuple[str, ...], *, observation: str = "", prediction: str = "") -> str:
        """Format a response that `parse` understands; parts of the thoughts that the format lacks are omitted."""
        answer = f" {self._separator} ".join(actions)
        if self._thoughts is not None:
            thoughts = {"reasoning": thought, "think": thought}
            content = {"observation": observation, "prediction": prediction, "answer": answer, **thoughts}
            return format_response(self._thoughts, content)
        head = f"<think> {thought} </think>" if self._think else ""
        return f"{head}<answer> {answer} </answer>"

    def _match(self, text: str) -> tuple[re.Match[str] | None, bool]:
        """Match of thoughts and answer, None if there is none that counts, and whether the format is followed."""
        match = full_match = self._pattern.fullmatch(self._plain(text))
        is_strict = self._form == "strict" or (self._form == "whole" and self._thoughts is None)
        if full_match is None and not is_strict:
            # an answer in a thought is not one, where thoughts are no part of the pattern
            outside = text if self._has_thought else _CLOSED_THOUGHTS.sub("", text)
            match = self._pattern.search(self._plain(outside))
        return match, bool(full_match or (match and self._form not in ("whole", "strict")))

    def _plain(self, text: str) -> str:
        """Return a text without special tokens."""
        return (text if self._special is None else self._special.sub("", text)).strip()

    def _action(self, text: str) -> str | None:
        """The env's name of an action, or the word itself if the action has placeholders; None if unknown."""
        if any(template.fullmatch(text) for template in self._templates):
            return text
        legal = self._legal.get(self._fold(text))
        if legal is not None or not self._numbers:
            return legal
        match = _NUMBERED.fullmatch(text)
        if match is None or not 1 <= int(match[1]) <= len(self._actions):
            return None
        action = self._actions[int(match[1]) - 1]
        name = match[2]
        return action if name is None or self._legal.get(self._fold(name.strip())) == action else None


def element_pattern(actions: Sequence[str]) -> re.Pattern[str] | None:
    """Return the pattern of an env's only action if it is an element; see `Env.actions`."""
    match = _ELEMENT.fullmatch(actions[0]) if len(actions) == 1 else None
    return None if match is None else re.compile(f"{match[1]}.*?{match[2]}", re.DOTALL)


def _action_templates(actions: Sequence[str], *, ignore_case: bool) -> list[re.Pattern[str]]:
    """Return patterns of the actions with placeholders; spaces around a placeholder are ignored."""
    patterns = []
    for action in actions:
        parts = re.split(f"({re.escape(NUMBER)}|{re.escape(TEXT)})", action)
        if len(parts) > 1:
            pattern = "".join(
                rf"\s*{_PLACEHOLDERS[part]}\s*" if part in _PLACEHOLDERS else re.escape(part) for part in parts
            )
            patterns.append(re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else 0)))
    return patterns
