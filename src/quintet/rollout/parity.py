"""A dialogue held against its template, and tokens held against their own text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from quintet.rollout.templates import THINK, Anatomy, Refused, Renderer, Rule, Wording, said

__all__ = ["Comparison", "Departure", "Reply", "Respelling", "compare", "respellings"]


@dataclass(frozen=True, slots=True)
class Reply:
    """What the policy wrote, as text: its words, and the token that ended them, empty where none did."""

    words: str
    ending: str


@dataclass(frozen=True, slots=True)
class Departure:
    """One place in which a dialogue isn't as its template writes it."""

    rule: Rule
    turn: int
    """The reply that it belongs to, from 0; what stands before the first counts to it."""
    start: int
    """Where it begins in the template's text."""
    template: str
    ours: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """A dialogue as text, twice. `template` with every departure's words put in place gives `ours`."""

    ours: str
    template: str
    departures: tuple[Departure, ...]


def compare(
    anatomy: Anatomy, render: Renderer, system: str, observations: Sequence[str], replies: Sequence[Reply]
) -> Comparison:
    """The prompt that such a dialogue comes to, against the template over the whole of it: one observation more than
    there are replies."""
    ours = _our_parts(anatomy, system, observations, replies)
    given = [_content(anatomy, reply) for reply in replies]
    try:
        theirs = _their_parts(anatomy, render, system, observations, given)
        template = render(anatomy.messages(system, observations, given))
    except Refused as error:
        told = f"the template refuses it: {error}"
        return Comparison("".join(ours), told, (Departure(Rule.OTHER, 0, 0, told, "".join(ours)),))
    words = _said(anatomy, system, observations)
    text = "".join(_woven(ours, words))
    if theirs is None or "".join(_woven(theirs, words)) != template:
        return Comparison(text, template, _unexplained(text, template))
    found: list[Departure] = []
    at = 0
    for number, (own, other, seen) in enumerate(zip(ours, theirs, (*words, ""), strict=True)):
        found += _departed(anatomy, own, other, at, max(0, number - 1), replies)
        at += len(other) + len(seen)
    return Comparison(text, template, tuple(found))


def _content(anatomy: Anatomy, reply: Reply) -> str:
    """A reply as the template is given it: with what it was asked to go on from, without what the template itself
    puts before it."""
    return anatomy.begun + reply.words.removeprefix(anatomy.lead)


def _said(anatomy: Anatomy, system: str, observations: Sequence[str]) -> list[str]:
    """What is said between two parts, as the template writes it."""
    first = anatomy.opening(system, observations[0])[-1]
    return [first, *map(anatomy.again, observations[1:])]


def _our_parts(anatomy: Anatomy, system: str, observations: Sequence[str], replies: Sequence[Reply]) -> list[str]:
    """What stands around the observations in a dialogue of ours."""
    head = anatomy.first[0]
    if not anatomy.merges:
        head += anatomy.system(system) + anatomy.first[1]
    parts, header = [head], anatomy.first[-1]
    for reply in replies:
        closed = reply.ending == anatomy.end
        end = reply.ending if closed else f"{reply.ending}{anatomy.before_end}{anatomy.end}"
        parts.append(f"{header}{reply.words}{end}{anatomy.after_end}")
        header = anatomy.header
    return [*parts, header]


def _their_parts(
    anatomy: Anatomy, render: Renderer, system: str, observations: Sequence[str], replies: Sequence[str]
) -> list[str] | None:
    """What the template writes around the observations, None where it doesn't write each once and in order. A mark is
    put into the midst of each, so that a template that looks at how one begins or ends sees what it would see."""
    messages = anatomy.messages(system, observations, replies)
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    spots = [f"\ue000\ue001{number}\ue001\ue000" for number in range(len(users))]
    halves: list[tuple[str, str]] = []
    for number, spot in zip(users, spots, strict=True):
        content = messages[number]["content"]
        marked = f"{content[: len(content) // 2]}{spot}{content[len(content) // 2 :]}"
        messages[number] = said("user", marked)
        before, _, after = (anatomy.again if halves else anatomy.user)(marked).partition(spot)
        halves.append((before, after))
    parts, rest = [], render(messages)
    for spot, (before, after) in zip(spots, halves, strict=True):
        part, found, rest = rest.partition(spot)
        if not (found and part.endswith(before) and rest.startswith(after)):
            return None
        parts.append(part.removesuffix(before))
        rest = rest.removeprefix(after)
    return [*parts, rest]


def _woven(parts: Sequence[str], said: Sequence[str]) -> Iterator[str]:
    for part, words in zip(parts, (*said, ""), strict=True):
        yield part
        yield words


def _departed(
    anatomy: Anatomy, ours: str, template: str, at: int, turn: int, replies: Sequence[Reply]
) -> Iterator[Departure]:
    """The pieces in which two parts differ; `at` is where the part begins in the template's text."""
    if ours == template:
        return
    pieces = _of_reply(anatomy, replies[turn], template) if turn < len(replies) else None
    if pieces is None or "".join(own for _, own, _ in pieces) != ours:
        rule = Rule.SYSTEM_STAYS if Rule.SYSTEM_STAYS in _known(anatomy) else Rule.OTHER
        pieces = [(rule, ours, template)]
    for rule, own, other in pieces:
        head, tail = _shared(own, other)
        if own != other:
            mine, its = own[head : len(own) - tail], other[head : len(other) - tail]
            yield Departure(rule, turn, at + head, its, mine)
        at += len(other)


def _known(anatomy: Anatomy) -> set[Rule]:
    return {difference.rule for difference in anatomy.differences}


Piece = tuple[Rule, str, str]
"""Why it may differ, ours, the template's."""


def _of_reply(anatomy: Anatomy, reply: Reply, template: str) -> list[Piece] | None:
    """Piece by piece, what we and the template write from one observation to the next; None where the template
    doesn't write a reply between its marks."""
    head = anatomy.header.removesuffix(anatomy.asked_with)
    closing = f"{anatomy.end}{anatomy.after_end}"
    if not template.startswith(head):
        return None
    asked, rest = _split_off(template[len(head) :], anatomy.asked_with)
    lead, rest = _split_off(rest, anatomy.lead)
    own_lead, words = _split_off(reply.words, anatomy.lead)
    at = _closed_at(anatomy, rest, words)
    if at is None:
        return None
    rest, behind = rest[:at], rest[at:]
    before_end = anatomy.before_end if rest.endswith(anatomy.before_end) else ""
    content = rest.removesuffix(before_end)
    closed = reply.ending == anatomy.end
    return [
        (Rule.OTHER, head, head),
        (Rule.ASKED_WITH, anatomy.asked_with, asked),
        (Rule.LEAD, own_lead, lead),
        (_of_words(anatomy, words, content), words, content),
        (Rule.OTHER_END, "" if closed else reply.ending, ""),
        (Rule.BEFORE_END, "" if closed else anatomy.before_end, before_end),
        (Rule.SYSTEM_STAYS, closing, behind),
    ]


def _closed_at(anatomy: Anatomy, rest: str, words: str) -> int | None:
    """Where the end token stands that closes a reply: at the end, unless a system message moved there; then behind
    the words."""
    closing = f"{anatomy.end}{anatomy.after_end}"
    if rest.endswith(closing):
        return len(rest) - len(closing)
    written = (f"{wording(words)}{anatomy.before_end}" for wording in Wording)
    return next((len(text) for text in written if rest.startswith(f"{text}{anatomy.end}")), None)


def _split_off(text: str, beginning: str) -> tuple[str, str]:
    """The beginning, where it is there, and the rest."""
    return (beginning, text[len(beginning) :]) if text.startswith(beginning) else ("", text)


def _of_words(anatomy: Anatomy, ours: str, template: str) -> Rule:
    """Why a reply's words differ."""
    known = _known(anatomy)
    if Rule.THOUGHTS in known and THINK[1] in ours:
        return Rule.THOUGHTS
    return Rule.REPLY_BLANKS if Rule.REPLY_BLANKS in known and ours.strip() == template.strip() else Rule.OTHER


def _unexplained(ours: str, template: str) -> tuple[Departure, ...]:
    """The whole stretch in which they differ, where the template does what isn't known."""
    if ours == template:
        return ()
    head, tail = _shared(ours, template)
    own, other = ours[head : len(ours) - tail], template[head : len(template) - tail]
    return (Departure(Rule.OTHER, 0, head, other, own),)


def _shared(one: Sequence[Any], other: Sequence[Any]) -> tuple[int, int]:
    """How many of the elements are the same at the end, and how many of the rest at the beginning; those first."""
    longest = min(len(one), len(other))
    tail = next((back for back in range(longest) if one[-1 - back] != other[-1 - back]), longest)
    head = next((place for place in range(longest - tail) if one[place] != other[place]), longest - tail)
    return head, tail


@dataclass(frozen=True, slots=True)
class Respelling:
    """Tokens that would be others if somebody decoded them and encoded their text again."""

    turn: int
    own: bool
    """The policy's words are among them."""
    start: int
    """Place of the first of them."""
    tokens: tuple[int, ...]
    again: tuple[int, ...]
    """What they would become."""


def respellings(
    tokenizer: Any, tokens: Sequence[int], turns: Sequence[int], own: Sequence[bool]
) -> tuple[Respelling, ...]:
    """Every stretch of a sequence that re-encoding its text would change; `turns` and `own` say of each token which
    turn it belongs to and whether the policy wrote it."""
    given = list(tokens)
    text = tokenizer.decode(given, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    again = list(tokenizer.encode(text, add_special_tokens=False))
    if again == given:
        return ()
    return tuple(
        Respelling(turns[min(at, len(given) - 1)], any(own[at : at + len(mine)]), at, mine, its)
        for at, mine, its in _changed(given, again)
    )


def _changed(given: Sequence[int], again: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Each stretch that differs: its place among the given, the given, the others."""
    head, tail = _shared(given, again)
    inner, other = given[head : len(given) - tail], again[head : len(again) - tail]
    for tag, begin, end, first, last in SequenceMatcher(None, inner, other, autojunk=False).get_opcodes():
        if tag != "equal":
            yield head + begin, tuple(inner[begin:end]), tuple(other[first:last])
