"""Comparison of a dialogue's prompt with its chat template, and of sampled tokens with the tokens of their text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from quintet.data.chat_template_renderer import TemplateRenderingError
from quintet.rollout.chat.template_analysis import (
    THINK,
    DifferenceKind,
    Renderer,
    TemplateParts,
    WhitespaceRule,
    chat_message,
)


@dataclass(frozen=True, slots=True)
class ResponseText:
    """A response as text, and its end token (empty without one)."""

    text: str
    end_token: str


@dataclass(frozen=True, slots=True)
class TemplateDeviation:
    """A span in which a dialogue deviates from its template."""

    kind: DifferenceKind
    turn: int
    """Index of the response that the span belongs to; 0 for spans before the first response."""
    start: int
    """Offset in the template's text."""
    template: str
    prompt: str


@dataclass(frozen=True, slots=True)
class DialogueComparison:
    """Quintet's prompt of a dialogue and the text of the chat template; replacing the deviations in `template` results
    in `prompt`."""

    prompt: str
    template: str
    deviations: tuple[TemplateDeviation, ...]


def compare(
    parts: TemplateParts,
    render: Renderer,
    system: str,
    observations: Sequence[str],
    responses: Sequence[ResponseText],
) -> DialogueComparison:
    """Compare the prompt of a dialogue with the template over the whole dialogue. There is one more observation than
    responses."""
    prompt_literals = _prompt_literals(parts, system, observations, responses)
    # with the prefix from the generation prompt, without what the template adds.
    contents = [parts.response_prefix + response.text.removeprefix(parts.history_only) for response in responses]
    try:
        template_literals = _template_literals(parts, render, system, observations, contents)
        template = render(parts.messages(system, observations, contents))
    except TemplateRenderingError as error:
        message, text = f"the template rejects it: {error}", "".join(prompt_literals)
        deviation = TemplateDeviation(DifferenceKind.OTHER, 0, 0, message, text)
        return DialogueComparison(text, message, (deviation,))
    texts = _observation_texts(parts, system, observations)
    text = "".join(_interleave(prompt_literals, texts))
    if template_literals is None or "".join(_interleave(template_literals, texts)) != template:
        return DialogueComparison(text, template, _unexplained(text, template))
    deviations: list[TemplateDeviation] = []
    start = 0
    for number, (literal, template_literal, observation) in enumerate(
        zip(prompt_literals, template_literals, (*texts, ""), strict=True)
    ):
        deviations += _deviations(parts, literal, template_literal, start, max(0, number - 1), responses)
        start += len(template_literal) + len(observation)
    return DialogueComparison(text, template, tuple(deviations))


def _observation_texts(parts: TemplateParts, system: str, observations: Sequence[str]) -> list[str]:
    """The observations as the template writes them."""
    first = parts.opening_texts(system, observations[0])[-1]
    return [first, *map(parts.next_user, observations[1:])]


def _prompt_literals(
    parts: TemplateParts, system: str, observations: Sequence[str], responses: Sequence[ResponseText]
) -> list[str]:
    """Text around the observations in the prompt."""
    head = parts.first[0]
    if not parts.merges_system:
        head += parts.system(system) + parts.first[1]
    literals, header = [head], parts.first[-1]
    for response in responses:
        closed = response.end_token == parts.end
        end = response.end_token if closed else f"{response.end_token}{parts.before_end}{parts.end}"
        literals.append(f"{header}{response.text}{end}{parts.after_end}")
        header = parts.header
    return [*literals, header]


def _template_literals(
    parts: TemplateParts, render: Renderer, system: str, observations: Sequence[str], responses: Sequence[str]
) -> list[str] | None:
    """Text around the observations in the template's text; None if it does not write each observation once and in
    order. A marker is put into the middle of each observation, because templates may check how one begins or ends."""
    messages = parts.messages(system, observations, responses)
    users = [number for number, message in enumerate(messages) if message["role"] == "user"]
    markers = [f"\ue000\ue001{number}\ue001\ue000" for number in range(len(users))]
    halves: list[tuple[str, str]] = []
    for number, marker in zip(users, markers, strict=True):
        content = messages[number]["content"]
        marked = f"{content[: len(content) // 2]}{marker}{content[len(content) // 2 :]}"
        messages[number] = chat_message("user", marked)
        before, _, after = (parts.next_user if halves else parts.user)(marked).partition(marker)
        halves.append((before, after))
    literals, rest = [], render(messages)
    for marker, (before, after) in zip(markers, halves, strict=True):
        literal, separator, rest = rest.partition(marker)
        if not (separator and literal.endswith(before) and rest.startswith(after)):
            return None
        literals.append(literal.removesuffix(before))
        rest = rest.removeprefix(after)
    return [*literals, rest]


def _interleave(literals: Sequence[str], texts: Sequence[str]) -> Iterator[str]:
    for literal, text in zip(literals, (*texts, ""), strict=True):
        yield literal
        yield text


def _deviations(
    parts: TemplateParts, prompt: str, template: str, start: int, turn: int, responses: Sequence[ResponseText]
) -> Iterator[TemplateDeviation]:
    """Deviations between two literals; `start` is the offset in the template's text."""
    if prompt == template:
        return
    spans = _response_spans(parts, responses[turn], template) if turn < len(responses) else None
    if spans is None or "".join(prompt_text for _, prompt_text, _ in spans) != prompt:
        moved = DifferenceKind.SYSTEM_STAYS in _reported_kinds(parts)
        spans = [(DifferenceKind.SYSTEM_STAYS if moved else DifferenceKind.OTHER, prompt, template)]
    for kind, prompt_text, template_text in spans:
        head, tail = _common_ends(prompt_text, template_text)
        if prompt_text != template_text:
            yield TemplateDeviation(
                kind,
                turn,
                start + head,
                template_text[head : len(template_text) - tail],
                prompt_text[head : len(prompt_text) - tail],
            )
        start += len(template_text)


def _reported_kinds(parts: TemplateParts) -> set[DifferenceKind]:
    return {difference.kind for difference in parts.differences}


Span = tuple[DifferenceKind, str, str]
"""Why a span may deviate, text of the prompt, text of the template."""


def _response_spans(parts: TemplateParts, response: ResponseText, template: str) -> list[Span] | None:
    """The spans from one observation to the next; None if the template does not write the response between its
    literals."""
    head = parts.header.removesuffix(parts.prompt_only)
    closing = f"{parts.end}{parts.after_end}"
    if not template.startswith(head):
        return None
    prompt_only, rest = _split_prefix(template[len(head) :], parts.prompt_only)
    lead, rest = _split_prefix(rest, parts.history_only)
    prompt_lead, text = _split_prefix(response.text, parts.history_only)
    at = _end_of_response(parts, rest, text)
    if at is None:
        return None
    rest, after = rest[:at], rest[at:]
    before_end = parts.before_end if rest.endswith(parts.before_end) else ""
    content = rest.removesuffix(before_end)
    closed = response.end_token == parts.end
    return [
        (DifferenceKind.OTHER, head, head),
        (DifferenceKind.GENERATION_PROMPT, parts.prompt_only, prompt_only),
        (DifferenceKind.LEAD, prompt_lead, lead),
        (_kind_of_text(parts, text, content), text, content),
        (DifferenceKind.OTHER_END, "" if closed else response.end_token, ""),
        (DifferenceKind.BEFORE_END, "" if closed else parts.before_end, before_end),
        (DifferenceKind.SYSTEM_STAYS, closing, after),
    ]


def _end_of_response(parts: TemplateParts, rest: str, text: str) -> int | None:
    """Offset of the end token: at the end, or behind the response if a moved system message follows."""
    closing = f"{parts.end}{parts.after_end}"
    if rest.endswith(closing):
        return len(rest) - len(closing)
    candidates = (f"{rule(text)}{parts.before_end}" for rule in WhitespaceRule)
    return next((len(candidate) for candidate in candidates if rest.startswith(f"{candidate}{parts.end}")), None)


def _split_prefix(text: str, prefix: str) -> tuple[str, str]:
    return (prefix, text[len(prefix) :]) if text.startswith(prefix) else ("", text)


def _kind_of_text(parts: TemplateParts, prompt: str, template: str) -> DifferenceKind:
    reported = _reported_kinds(parts)
    if DifferenceKind.THOUGHTS in reported and THINK[1] in prompt:
        return DifferenceKind.THOUGHTS
    stripped = DifferenceKind.RESPONSE_WHITESPACE in reported and prompt.strip() == template.strip()
    return DifferenceKind.RESPONSE_WHITESPACE if stripped else DifferenceKind.OTHER


def _unexplained(prompt: str, template: str) -> tuple[TemplateDeviation, ...]:
    """A single deviation from the first to the last difference."""
    if prompt == template:
        return ()
    head, tail = _common_ends(prompt, template)
    template_text, prompt_text = template[head : len(template) - tail], prompt[head : len(prompt) - tail]
    return (TemplateDeviation(DifferenceKind.OTHER, 0, head, template_text, prompt_text),)


def _common_ends(a: Sequence[Any], b: Sequence[Any]) -> tuple[int, int]:
    """Lengths of the common prefix and the common suffix, which do not overlap."""
    longest = min(len(a), len(b))
    tail = next((i for i in range(longest) if a[-1 - i] != b[-1 - i]), longest)
    head = next((i for i in range(longest - tail) if a[i] != b[i]), longest - tail)
    return head, tail


@dataclass(frozen=True, slots=True)
class RetokenizedSpan:
    """Tokens that change if their text is decoded and encoded again."""

    turn: int
    has_response_tokens: bool
    start: int
    """Index of the first token."""
    tokens: tuple[int, ...]
    retokenized: tuple[int, ...]


def find_retokenized_spans(
    tokenizer: Any, tokens: Sequence[int], turns: Sequence[int], is_response: Sequence[bool]
) -> tuple[RetokenizedSpan, ...]:
    """Find all spans of a sequence that re-tokenizing its text would change; `turns` and `is_response` give each
    token's turn and whether the policy sampled it."""
    original = list(tokens)
    text = tokenizer.decode(original, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    retokenized = list(tokenizer.encode(text, add_special_tokens=False))
    if retokenized == original:
        return ()
    return tuple(
        RetokenizedSpan(turns[min(at, len(original) - 1)], any(is_response[at : at + len(before)]), at, before, after)
        for at, before, after in _changed_spans(original, retokenized)
    )


def _changed_spans(a: Sequence[int], b: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Index in `a`, tokens of `a` and tokens of `b` of each span that differs."""
    head, tail = _common_ends(a, b)
    inner_a, inner_b = a[head : len(a) - tail], b[head : len(b) - tail]
    for tag, begin, end, first, last in SequenceMatcher(None, inner_a, inner_b, autojunk=False).get_opcodes():
        if tag != "equal":
            yield head + begin, tuple(inner_a[begin:end]), tuple(inner_b[first:last])
