"""Chat templates taken apart: what stands around messages, and where a template can't be followed token by token.

A template is a program, not a form. What it writes is found by letting it write: dialogues whose messages are marks,
messages with blanks around them, replies with thoughts. What comes out otherwise than the policy saw and wrote it is
named in the `TemplateReport`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from quintet.data.templates import chat_template
from quintet.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = [
    "Anatomy",
    "Refused",
    "Renderer",
    "Rule",
    "TemplateDifference",
    "TemplateReport",
    "Wording",
    "said",
    "take_apart",
]

SYSTEM, USER, REPLY, AGAIN = (f"\ue000\ue001{letter}\ue001\ue000" for letter in "SURA")
THOUGHT = "\ue000\ue001T\ue001\ue000"
"""Marks in place of words: letters of nobody's, which no template trims."""
JOINED: Final = "\n\n"
"""Between a system text and the first user's words, where they become one message."""
DAY: Final = date(2024, 7, 26)
"""What templates are told that today is: the day that Llama 3.1's takes where nobody says."""
ANOTHER_DAY: Final = date(1999, 12, 31)
THINK: Final = ("<think>", "</think>")

Message = Mapping[str, str]


class Rule(StrEnum):
    """In what a dialogue isn't as its template would write it as a whole."""

    THOUGHTS = "thoughts"
    """Thoughts of earlier replies are left out."""
    REPLY_BLANKS = "reply_blanks"
    """Blanks around replies are left out."""
    ASKED_WITH = "asked_with"
    """What the policy is asked with isn't what stands before its reply later."""
    LEAD = "lead"
    """Something stands before a reply that it isn't asked with."""
    BEFORE_END = "before_end"
    """Something stands between a reply and its end token."""
    SYSTEM_MERGED = "system_merged"
    """There is no place for a system message."""
    SYSTEM_STAYS = "system_stays"
    """The system message moves as the dialogue goes on."""
    OTHER_END = "other_end"
    """A reply ended with another token than the template's."""
    DATE = "date"
    """Today's date is written."""
    IMITABLE = "imitable"
    """Marks of a turn are words that anybody may write."""
    OTHER = "other"
    """Anything else."""


@dataclass(frozen=True, slots=True)
class TemplateDifference:
    """What a template does that a growing sequence of tokens can't follow, and what is done instead."""

    rule: Rule
    template: str
    done: str

    def __str__(self) -> str:
        return f"{self.rule}: the template {self.template}; {self.done}"


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """How a tokenizer's chat template is followed. Without `differences`, and as long as replies are spelled as the
    tokenizer would, a dialogue's tokens are those of its template over the whole of it."""

    end: str
    """The token by which the template ends a reply."""
    ends: tuple[str, ...]
    """All that end one, that first."""
    differences: tuple[TemplateDifference, ...]

    def lines(self) -> list[str]:
        """For people: nothing, where nothing differs."""
        return [str(difference) for difference in self.differences]


class Refused(Exception):
    """A template doesn't take these messages."""


class Renderer:
    """Lets a chat template write dialogues, on the same day always."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, template: str | None = None, *, thinking: bool | None = None
    ) -> None:
        """`template` names another than the tokenizer's own, see `chat_template`; `thinking` is told to it as
        `enable_thinking`, unless the template's name says that itself.

        Raises:
            ConfigError: there is no such template, or none at all.
        """
        named = chat_template(template)
        if not (named.text or tokenizer.chat_template):
            hint = "give it one: save the tokenizer with a chat_template.jinja beside it"
            raise ConfigError("the policy's tokenizer has no chat template", key="policy.path", hint=hint)
        self._tokenizer = tokenizer
        self._text: str = named.text or tokenizer.get_chat_template()
        self._ending = named.ending
        told = named.thinking if named.thinking is not None else thinking
        self._told: dict[str, Any] = {} if told is None else {"enable_thinking": told}

    def __call__(self, messages: Sequence[Message], *, ask: bool = True, day: date = DAY) -> str:
        """The dialogue as text; with `ask`, up to where the policy's reply begins.

        Raises:
            Refused: the template takes no such messages.
        """
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=self._text,
                tokenize=False,
                add_generation_prompt=ask,
                strftime_now=day.strftime,
                **self._told,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise Refused(str(error)) from error
        return f"{text}{self._ending}" if ask else str(text)


def said(role: str, content: str) -> Message:
    """A message."""
    return {"role": role, "content": content}


class Wording(StrEnum):
    """What a template does to the blanks around a message's words."""

    AS_IS = "as_is"
    STRIP = "strip"
    STRIP_BEFORE = "strip_before"
    STRIP_AFTER = "strip_after"
    STRIP_LINES = "strip_lines"
    STRIP_LINES_BEFORE = "strip_lines_before"
    STRIP_LINES_AFTER = "strip_lines_after"

    def __call__(self, text: str) -> str:
        """The words as the template writes them."""
        return _WORDINGS[self](text)


_WORDINGS: Mapping[Wording, Callable[[str], str]] = {
    Wording.AS_IS: lambda text: text,
    Wording.STRIP: str.strip,
    Wording.STRIP_BEFORE: str.lstrip,
    Wording.STRIP_AFTER: str.rstrip,
    Wording.STRIP_LINES: lambda text: text.strip("\n"),
    Wording.STRIP_LINES_BEFORE: lambda text: text.lstrip("\n"),
    Wording.STRIP_LINES_AFTER: lambda text: text.rstrip("\n"),
}
PADDED = ("\n {} \n", " \n{}\n ")


def _wording(write: Callable[[str], str], mark: str) -> Wording | None:
    """What `write(words)` does to blanks around them, None where it is something else."""
    plain = write(mark)
    for wording in Wording:
        if all(write(pad.format(mark)) == plain.replace(mark, wording(pad.format(mark))) for pad in PADDED):
            return wording
    return None


@dataclass(frozen=True, slots=True)
class Anatomy:
    """What a template writes around the words of messages."""

    first: tuple[str, ...]
    """Before, between and after the system's and the first user's words; before and after the user's, where the
    system's are part of them."""
    before_end: str
    """Between a reply and its end token."""
    end: str
    after_end: str
    """Between the end token and the user's next words."""
    header: str
    """Between the user's next words and a reply."""
    system: Wording
    user: Wording
    again: Wording
    """Of the first user's words and of those to come."""
    control: frozenset[str]
    """Tokens that no message may become."""
    lead: str
    """What stands before a reply later and isn't asked with."""
    asked_with: str
    """What it is asked with and doesn't stand there later."""
    differences: tuple[TemplateDifference, ...]

    @property
    def merges(self) -> bool:
        """Whether the system's words become part of the first user's."""
        return len(self.first) == 2

    @property
    def begun(self) -> str:
        """What the reply itself is asked with: a thought that is opened and not closed."""
        at = self.header.rfind(THINK[0])
        return self.header[at:] if at >= 0 and THINK[1] not in self.header[at:] else ""

    def merged(self, system: str, user: str) -> str:
        """Both as one message."""
        return f"{system}{JOINED}{user}" if system else user

    def opening(self, system: str, user: str) -> tuple[str, ...]:
        """The words between the literals of `first`, as the template writes them."""
        if self.merges:
            return (self.user(self.merged(system, user)),)
        return self.system(system), self.user(user)

    def messages(self, system: str, observations: Sequence[str], replies: Sequence[str]) -> list[Message]:
        """A dialogue as the template takes it: observations and the replies between them."""
        head = [] if self.merges else [said("system", system)]
        users = list(observations)
        if self.merges:
            users[0] = self.merged(system, users[0])
        turns = [said("user", users[0])]
        for reply, user in zip(replies, users[1:], strict=True):
            turns += [said("assistant", reply), said("user", user)]
        return head + turns


def take_apart(render: Renderer, tokens: Collection[str], added: Collection[str], eos: str | None) -> Anatomy:
    """Find out what a template writes. `tokens` are the special tokens, `added` all that were added to the
    vocabulary, of which a template may make marks of its own.

    Raises:
        ConfigError: it doesn't write a sequence of messages whose replies end with a token.
    """
    first, later, system_difference = _literals(render)
    between, header = later[-2], later[-1]
    control = frozenset(tokens) | _marks(added, "".join((*first[:-1], *later[:-1])))
    end, at = _end(between, control, eos)
    lead, asked_with = _around_reply(later[-3], header)
    merges = len(first) == 2
    anatomy = Anatomy(
        first=first,
        before_end=between[:at],
        end=end,
        after_end=between[at + len(end) :],
        header=header,
        system=Wording.AS_IS if merges else _known(lambda words: render(_opened(words, USER)), SYSTEM),
        user=_known(lambda words: render(_opened(None if merges else SYSTEM, words)), USER),
        again=_known(lambda words: render(_dialogue(None, REPLY, words)), AGAIN),
        control=control,
        lead=lead,
        asked_with=asked_with,
        differences=(),
    )
    return _with_differences(anatomy, render, system_difference)


def _opened(system: str | None, user: str) -> list[Message]:
    return [*([] if system is None else [said("system", system)]), said("user", user)]


def _dialogue(system: str | None, reply: str, again: str) -> list[Message]:
    return [*_opened(system, USER), said("assistant", reply), said("user", again)]


def _known(write: Callable[[str], str], mark: str) -> Wording:
    wording = _wording(write, mark)
    if wording is None:
        told = f"the chat template changes the words of messages: {write(PADDED[0].format(mark))!r}"
        raise ConfigError(told, key="policy.path", hint="take a template that writes them as they are, or stripped")
    return wording


def _literals(render: Renderer) -> tuple[tuple[str, ...], tuple[str, ...], TemplateDifference | None]:
    """What stands around the first messages, and around those of a longer dialogue; what became of the system."""
    try:
        alone, longer = (render(messages) for messages in (_opened(SYSTEM, USER), _dialogue(SYSTEM, REPLY, AGAIN)))
    except Refused as error:
        return *_without_system(render), _merged(f"takes no system message ({error})")
    if SYSTEM not in alone:
        return *_without_system(render), _merged("leaves the system message out")
    first = _between(alone, SYSTEM, USER)
    if SYSTEM in longer and longer.find(SYSTEM) < longer.find(USER):
        later = _between(longer, SYSTEM, USER, REPLY, AGAIN)
        if later[:2] == first[:2]:
            return first, later, None
    stays = TemplateDifference(
        Rule.SYSTEM_STAYS,
        "moves the system message as the dialogue goes on",
        "it stays where the first prompt has it",
    )
    return first, _without_system(render)[1], stays


def _without_system(render: Renderer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    try:
        alone, longer = render(_opened(None, USER)), render(_dialogue(None, REPLY, AGAIN))
    except Refused as error:
        told = f"the chat template takes no dialogue of a user and an assistant: {error}"
        raise ConfigError(told, key="policy.path", hint="take a template that does") from error
    return _between(alone, USER), _between(longer, USER, REPLY, AGAIN)


def _merged(why: str) -> TemplateDifference:
    done = "the system's words and an empty line go before the first user's"
    return TemplateDifference(Rule.SYSTEM_MERGED, why, done)


def _between(text: str, *marks: str) -> tuple[str, ...]:
    """What stands around marks that come once each, in their order."""
    parts: list[str] = []
    rest = text
    for mark in marks:
        head, found, rest = rest.partition(mark)
        if not found:
            raise ConfigError(f"the chat template drops a message: {text!r}", key="policy.path")
        parts.append(head)
    if any(mark in part for part in (*parts, rest) for mark in marks):
        raise ConfigError(f"the chat template writes a message twice: {text!r}", key="policy.path")
    return (*parts, rest)


def _marks(added: Collection[str], written: str) -> set[str]:
    """Of the tokens that were added to a vocabulary, those that a template marks turns by: neither blanks, nor words,
    nor the tags of thoughts."""
    bracketed = {token for token in added if token and not (token[0] + token[-1]).isspace() and len(token) > 2}
    bracketed -= {token for token in bracketed if token[0].isalnum() or token[-1].isalnum()}
    return {token for token in bracketed if token in written and token not in THINK}


def _end(between: str, control: Collection[str], eos: str | None) -> tuple[str, int]:
    """The token that ends a reply and where it stands in what follows one: the first there. Alone, it must be the
    tokenizer's own: another might begin the next turn."""
    places = sorted((between.find(token), -len(token), token) for token in control if token in between)
    if not places or (len(places) == 1 and places[0][2] != eos):
        told = f"the chat template doesn't close every reply with the end token: {between!r} follows one"
        raise ConfigError(told, key="policy.path", hint="take a template that does")
    at, _, token = places[0]
    return token, at


def _around_reply(later: str, header: str) -> tuple[str, str]:
    """What stands before a reply later and isn't asked with, and the other way round."""
    if later.startswith(header):
        return later[len(header) :], ""
    return "", header.removeprefix(later)


def _with_differences(anatomy: Anatomy, render: Renderer, system: TemplateDifference | None) -> Anatomy:
    found = [] if system is None else [system]
    found += [*_of_form(anatomy), *_of_replies(anatomy, render)]
    opened = _opened(None if anatomy.merges else SYSTEM, USER)
    if render(opened) != render(opened, day=ANOTHER_DAY):
        found.append(TemplateDifference(Rule.DATE, "writes today's date", f"it is always {DAY:%d %b %Y}"))
    return replace(anatomy, differences=tuple(found))


def _of_form(anatomy: Anatomy) -> list[TemplateDifference]:
    """What is seen in the literals themselves."""
    found: list[TemplateDifference] = []
    if anatomy.asked_with:
        does = f"asks with {anatomy.asked_with!r} and leaves it out of earlier turns"
        found.append(TemplateDifference(Rule.ASKED_WITH, does, "it stays as the policy saw it"))
    if anatomy.lead:
        does = f"writes {anatomy.lead!r} before an earlier reply, which the policy isn't asked with"
        found.append(TemplateDifference(Rule.LEAD, does, "what the policy wrote stands there alone"))
    if anatomy.before_end:
        does = f"writes {anatomy.before_end!r} between a reply and {anatomy.end}"
        found.append(TemplateDifference(Rule.BEFORE_END, does, "a reply that ends with it stays as sampled"))
    plain = [part.strip() for part in (anatomy.after_end, anatomy.header) if part.strip()]
    imitable = [part for part in plain if not any(token in part for token in anatomy.control)]
    if imitable:
        does = f"marks turns by plain words ({', '.join(map(repr, dict.fromkeys(imitable)))})"
        found.append(TemplateDifference(Rule.IMITABLE, does, "text that holds them reads as a turn"))
    return found


def _of_replies(anatomy: Anatomy, render: Renderer) -> list[TemplateDifference]:
    """What the template does to earlier replies."""
    system = None if anatomy.merges else SYSTEM

    def write(reply: str) -> str:
        return render(_dialogue(system, reply, AGAIN))

    found: list[TemplateDifference] = []
    if THOUGHT not in write(f"{THINK[0]}\n{THOUGHT}\n{THINK[1]}\n\n{REPLY}"):
        found.append(TemplateDifference(Rule.THOUGHTS, "leaves out earlier thoughts", "they stay as sampled"))
    if _wording(write, REPLY) is not Wording.AS_IS:
        does = "strips blanks off earlier replies"
        found.append(TemplateDifference(Rule.REPLY_BLANKS, does, "they stay as sampled"))
    return found
