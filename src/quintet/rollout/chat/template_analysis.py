"""Analysis of chat templates: the literals around messages, and where token-exact multi-turn prompts must differ.

A template is a program. Its literals are found by rendering dialogues whose messages are marker strings, messages
surrounded by whitespace, and responses with thoughts. `TemplateReport` lists where the rendered text differs from the
prompts that the policy saw and the responses that it sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from quintet.data.chat_template_renderer import TemplateRenderingError, render_chat_template
from quintet.data.chat_templates import chat_template
from quintet.data.reply_rendering import shared_length
from quintet.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SYSTEM, USER, RESPONSE, NEXT_USER = (f"\ue000\ue001{letter}\ue001\ue000" for letter in "SURA")
THOUGHT = "\ue000\ue001T\ue001\ue000"
"""Marker strings in place of messages: private-use characters, which no template strips."""
SEPARATOR: Final = "\n\n"
"""Between the system and the first user message, where they are merged into one."""
FIXED_DATE: Final = date(2024, 7, 26)
"""Today's date for templates: the default of the Llama 3.1 template."""
OTHER_DATE: Final = date(1999, 12, 31)
THINK: Final = ("<think>", "</think>")

Message = Mapping[str, str]


class DifferenceKind(StrEnum):
    """Ways in which a multi-turn prompt differs from the template rendered over the whole dialogue."""

    THOUGHTS = "thoughts"
    """The template drops thoughts of earlier responses."""
    RESPONSE_WHITESPACE = "reply_blanks"
    """The template strips whitespace around responses."""
    GENERATION_PROMPT = "asked_with"
    """The generation prompt differs from the text before an earlier response."""
    LEAD = "lead"
    """Text before an earlier response is not part of the generation prompt."""
    BEFORE_END = "before_end"
    """Text between a response and its end token."""
    SYSTEM_MERGED = "system_merged"
    """The template has no system message."""
    SYSTEM_STAYS = "system_stays"
    """The template moves the system message as the dialogue continues."""
    OTHER_END = "other_end"
    """A response ended with another token than the template's end token."""
    DATE = "date"
    """The template writes today's date."""
    IMITABLE = "imitable"
    """Turns are marked by plain text that messages may contain."""
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class TemplateDifference:
    """Behaviour of a template that a growing token sequence cannot follow, and what is done instead."""

    kind: DifferenceKind
    template: str
    instead: str

    def __str__(self) -> str:
        return f"{self.kind}: the template {self.template}; {self.instead}"


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """End tokens of a chat template, and its differences from token-exact prompts. Without `differences`, and as long
    as responses are tokenized canonically, a dialogue's tokens are those of its template over the whole dialogue."""

    end_token: str
    """The token that ends a response in the template."""
    stop_tokens: tuple[str, ...]
    """All tokens that end a response, that one first."""
    differences: tuple[TemplateDifference, ...]

    def lines(self) -> list[str]:
        """Return one readable line per difference."""
        return [str(difference) for difference in self.differences]


class Renderer:
    """Renders dialogues with a chat template, always with the same date."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, template: str | None = None, *, thinking: bool | None = None
    ) -> None:
        """`template` names a template (default: the tokenizer's), see `chat_template`; `thinking` is passed to it as
        `enable_thinking`, unless the named template sets it.

        Raises:
            ConfigError: the template does not exist, or the tokenizer has none.
        """
        named = chat_template(template)
        if not (named.text or tokenizer.chat_template):
            raise _unsupported("the policy's tokenizer has no chat template", "writes every message once, in order")
        self._tokenizer = tokenizer
        self._template = replace(named, thinking=thinking) if named.thinking is None else named

    def __call__(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, day: date = FIXED_DATE
    ) -> str:
        """Return the dialogue as text.

        Raises:
            TemplateRenderingError: the template raises an error for these messages.
            TemplateLimitError: the template exceeds a limit.
        """
        text = render_chat_template(
            self._tokenizer, messages, self._template, add_generation_prompt=add_generation_prompt, day=day
        )
        return f"{text}{self._template.response_prefix}" if add_generation_prompt else text


def _unsupported(problem: str, needed: str) -> ConfigError:
    """Return the error of a template; `needed` describes a supported template."""
    hint = f"save a chat_template.jinja next to the tokenizer that {needed}, as those in docs/exact-tokens.md do"
    return ConfigError(problem, key="policy.path", hint=hint)


def chat_message(role: str, content: str) -> Message:
    """Build a message."""
    return {"role": role, "content": content}


class WhitespaceRule(StrEnum):
    """Whitespace around a message that a template strips."""

    AS_IS = "as_is"
    STRIP = "strip"
    STRIP_BEFORE = "strip_before"
    STRIP_AFTER = "strip_after"
    STRIP_LINES = "strip_lines"
    STRIP_LINES_BEFORE = "strip_lines_before"
    STRIP_LINES_AFTER = "strip_lines_after"

    def __call__(self, text: str) -> str:
        """Return the text as the template writes it."""
        return _WHITESPACE_RULES[self](text)


_WHITESPACE_RULES: Mapping[WhitespaceRule, Callable[[str], str]] = {
    WhitespaceRule.AS_IS: lambda text: text,
    WhitespaceRule.STRIP: str.strip,
    WhitespaceRule.STRIP_BEFORE: str.lstrip,
    WhitespaceRule.STRIP_AFTER: str.rstrip,
    WhitespaceRule.STRIP_LINES: lambda text: text.strip("\n"),
    WhitespaceRule.STRIP_LINES_BEFORE: lambda text: text.lstrip("\n"),
    WhitespaceRule.STRIP_LINES_AFTER: lambda text: text.rstrip("\n"),
}
PADDED = ("\n {} \n", " \n{}\n ")


def whitespace_rule(render: Callable[[str], str], marker: str) -> WhitespaceRule | None:
    """The rule that `render` applies to a message; None if it does something else."""
    plain = render(marker)
    for rule in WhitespaceRule:
        if all(render(pad.format(marker)) == plain.replace(marker, rule(pad.format(marker))) for pad in PADDED):
            return rule
    return None


@dataclass(frozen=True, slots=True)
class TemplateParts:
    """Literals that a template writes around messages."""

    first: tuple[str, ...]
    """Before, between and after the system and the first user message; before and after the user message if the system
    message is merged into it."""
    before_end: str
    """Between a response and its end token."""
    end: str
    """The end token."""
    after_end: str
    """Between the end token and the next user message."""
    header: str
    """Between the next user message and a response."""
    system: WhitespaceRule
    user: WhitespaceRule
    """Rule of the first user message."""
    next_user: WhitespaceRule
    control: frozenset[str]
    """Tokens that no message may become."""
    history_only: str
    """Text before earlier responses that the generation prompt does not contain."""
    prompt_only: str
    """Text of the generation prompt that is not before earlier responses."""
    differences: tuple[TemplateDifference, ...]

    @property
    def merges_system(self) -> bool:
        """Whether the system message becomes part of the first user message."""
        return len(self.first) == 2

    @property
    def response_prefix(self) -> str:
        """The part of the generation prompt that belongs to the response: an opened thought."""
        at = self.header.rfind(THINK[0])
        return self.header[at:] if at >= 0 and THINK[1] not in self.header[at:] else ""

    def merge(self, system: str, user: str) -> str:
        """Join system and user message."""
        return f"{system}{SEPARATOR}{user}" if system else user

    def opening_texts(self, system: str, user: str) -> tuple[str, ...]:
        """Return the texts between the literals of `first`, as the template writes them."""
        if self.merges_system:
            return (self.user(self.merge(system, user)),)
        return self.system(system), self.user(user)

    def messages(self, system: str, observations: Sequence[str], responses: Sequence[str]) -> list[Message]:
        """Build the messages of a dialogue: observations with the responses between them."""
        head = [] if self.merges_system else [chat_message("system", system)]
        users = list(observations)
        if self.merges_system:
            users[0] = self.merge(system, users[0])
        turns = [chat_message("user", users[0])]
        for response, user in zip(responses, users[1:], strict=True):
            turns += [chat_message("assistant", response), chat_message("user", user)]
        return head + turns


def analyze_template(
    render: Renderer, special_tokens: Collection[str], added_tokens: Collection[str], stop_tokens: Sequence[str]
) -> TemplateParts:
    """Find the literals of a template. `added_tokens` are all tokens added to the vocabulary; the template may use some
    of them as turn markers. `stop_tokens` end a response, the tokenizer's EOS token first.

    Raises:
        ConfigError: it does not write a sequence of messages whose responses end with a token.
    """
    first, later, system_difference = _literals(render)
    between, header = later[-2], later[-1]
    control = frozenset(special_tokens) | turn_markers(added_tokens, "".join((*first[:-1], *later[:-1])))
    end, at = _end_token(between, control, stop_tokens)
    history_only, prompt_only = _around_response(later[-3], header)
    merges = len(first) == 2
    system = WhitespaceRule.AS_IS
    if not merges:
        system = _require_rule(lambda text: render(_opening(text, USER)), SYSTEM)
    parts = TemplateParts(
        first=first,
        before_end=between[:at],
        end=end,
        after_end=between[at + len(end) :],
        header=header,
        system=system,
        user=_require_rule(lambda text: render(_opening(None if merges else SYSTEM, text)), USER),
        next_user=_require_rule(lambda text: render(_dialogue(None, RESPONSE, text)), NEXT_USER),
        control=control,
        history_only=history_only,
        prompt_only=prompt_only,
        differences=(),
    )
    return _with_differences(parts, render, system_difference)


def _opening(system: str | None, user: str) -> list[Message]:
    return [*([] if system is None else [chat_message("system", system)]), chat_message("user", user)]


def _dialogue(system: str | None, response: str, next_user: str) -> list[Message]:
    return [*_opening(system, USER), chat_message("assistant", response), chat_message("user", next_user)]


def _require_rule(render: Callable[[str], str], marker: str) -> WhitespaceRule:
    rule = whitespace_rule(render, marker)
    if rule is None:
        problem = f"the chat template changes the text of messages: {render(PADDED[0].format(marker))!r}"
        raise _unsupported(problem, "writes messages unchanged or stripped")
    return rule


def _literals(render: Renderer) -> tuple[tuple[str, ...], tuple[str, ...], TemplateDifference | None]:
    """Literals around the first messages and around those of a longer dialogue, and what happens to the system
    message."""
    try:
        opening, longer = render(_opening(SYSTEM, USER)), render(_dialogue(SYSTEM, RESPONSE, NEXT_USER))
    except TemplateRenderingError as error:
        return *_literals_without_system(render), _merged_system(f"takes no system message ({error})")
    if SYSTEM not in opening:
        return *_literals_without_system(render), _merged_system("leaves the system message out")
    first = _split_at_markers(opening, SYSTEM, USER)
    if SYSTEM in longer and longer.find(SYSTEM) < longer.find(USER):
        later = _split_at_markers(longer, SYSTEM, USER, RESPONSE, NEXT_USER)
        if later[:2] == first[:2]:
            return first, later, None
    difference = TemplateDifference(
        DifferenceKind.SYSTEM_STAYS,
        "moves the system message as the dialogue continues",
        "it stays in the first prompt",
    )
    return first, _literals_without_system(render)[1], difference


def _literals_without_system(render: Renderer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    try:
        opening, longer = render(_opening(None, USER)), render(_dialogue(None, RESPONSE, NEXT_USER))
    except TemplateRenderingError as error:
        problem = f"the chat template rejects a dialogue of user and assistant messages: {error}"
        raise _unsupported(problem, "accepts user and assistant messages in turns") from error
    return _split_at_markers(opening, USER), _split_at_markers(longer, USER, RESPONSE, NEXT_USER)


def _merged_system(reason: str) -> TemplateDifference:
    instead = "system message and an empty line go before the first user message"
    return TemplateDifference(DifferenceKind.SYSTEM_MERGED, reason, instead)


def _split_at_markers(text: str, *markers: str) -> tuple[str, ...]:
    """Literals around markers, which must occur once each and in order."""
    literals: list[str] = []
    rest = text
    for marker in markers:
        head, separator, rest = rest.partition(marker)
        if not separator:
            raise _unsupported(f"the chat template drops a message: {text!r}", "writes every message, in order")
        literals.append(head)
    if any(marker in literal for literal in (*literals, rest) for marker in markers):
        raise _unsupported(f"the chat template writes a message twice: {text!r}", "writes every message once")
    return (*literals, rest)


def turn_markers(added_tokens: Collection[str], rendered: str) -> set[str]:
    """Added tokens that a template marks turns with: not whitespace, not words, not thinking tags."""
    bracketed = {token for token in added_tokens if token and not (token[0] + token[-1]).isspace() and len(token) > 2}
    bracketed -= {token for token in bracketed if token[0].isalnum() or token[-1].isalnum()}
    return {token for token in bracketed if token in rendered and token not in THINK}


def _end_token(between: str, control: Collection[str], stop_tokens: Sequence[str]) -> tuple[str, int]:
    """The token that ends a response and its offset: the first one after the response. A single control token must be
    one of the stop tokens, such as GLM's `<|user|>`, as it might only begin the next turn otherwise."""
    offsets = sorted((between.find(token), -len(token), token) for token in control if token in between)
    if not offsets or (len(offsets) == 1 and offsets[0][2] not in stop_tokens):
        problem = f"the chat template does not end every response with the end token, but with {between!r}"
        end = next(iter(stop_tokens), "a token that is the eos_token in tokenizer_config.json")
        raise _unsupported(problem, f"ends every response with {end}")
    at, _, token = offsets[0]
    return token, at


def _around_response(history_header: str, header: str) -> tuple[str, str]:
    """Text only before earlier responses, and text only in the generation prompt."""
    shared = shared_length(history_header, header)
    return history_header[shared:], header[shared:]


def _with_differences(parts: TemplateParts, render: Renderer, system: TemplateDifference | None) -> TemplateParts:
    differences = [] if system is None else [system]
    differences += [*_literal_differences(parts), *_response_differences(parts, render)]
    opening = _opening(None if parts.merges_system else SYSTEM, USER)
    if render(opening) != render(opening, day=OTHER_DATE):
        instead = f"it is always {FIXED_DATE:%d %b %Y}"
        differences.append(TemplateDifference(DifferenceKind.DATE, "writes today's date", instead))
    return replace(parts, differences=tuple(differences))


def _literal_differences(parts: TemplateParts) -> list[TemplateDifference]:
    differences: list[TemplateDifference] = []
    if parts.prompt_only:
        template = f"adds {parts.prompt_only!r} to the generation prompt and leaves it out of earlier turns"
        instead = "it stays as the policy saw it"
        differences.append(TemplateDifference(DifferenceKind.GENERATION_PROMPT, template, instead))
    if parts.history_only:
        template = f"writes {parts.history_only!r} before an earlier response and not in the generation prompt"
        instead = "earlier responses stay as sampled"
        differences.append(TemplateDifference(DifferenceKind.LEAD, template, instead))
    if parts.before_end:
        template = f"writes {parts.before_end!r} between a response and {parts.end}"
        instead = "a response that ends with that token stays as sampled"
        differences.append(TemplateDifference(DifferenceKind.BEFORE_END, template, instead))
    plain = [literal.strip() for literal in (parts.after_end, parts.header) if literal.strip()]
    imitable = [literal for literal in plain if not any(token in literal for token in parts.control)]
    if imitable:
        template = f"marks turns by plain text ({', '.join(map(repr, dict.fromkeys(imitable)))})"
        instead = "messages that contain it read as a turn"
        differences.append(TemplateDifference(DifferenceKind.IMITABLE, template, instead))
    return differences


def _response_differences(parts: TemplateParts, render: Renderer) -> list[TemplateDifference]:
    """Changes that the template makes to earlier responses."""
    system = None if parts.merges_system else SYSTEM

    def render_response(response: str) -> str:
        return render(_dialogue(system, response, NEXT_USER))

    differences: list[TemplateDifference] = []
    if THOUGHT not in render_response(f"{THINK[0]}\n{THOUGHT}\n{THINK[1]}\n\n{RESPONSE}"):
        template = "leaves out earlier thoughts"
        differences.append(TemplateDifference(DifferenceKind.THOUGHTS, template, "they stay as sampled"))
    if whitespace_rule(render_response, RESPONSE) is not WhitespaceRule.AS_IS:
        template = "strips whitespace from earlier responses"
        differences.append(TemplateDifference(DifferenceKind.RESPONSE_WHITESPACE, template, "it stays as sampled"))
    return differences
