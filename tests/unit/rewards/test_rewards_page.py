"""If these fail, docs/rewards.md promises other scores than verifiers, judges and format checks give."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from quintet.rewards.format_check import has_format
from quintet.rewards.llm_judge import PARSERS
from quintet.rewards.verifiers.registry import VERIFIERS

PAGE = Path(__file__).parents[3] / "docs/rewards.md"
EXEMPT = {
    "code_sandbox": "its rows are whole test suites, which no cell holds: test_code_sandbox.py",
    "reasoning_gym": "its scores are those of the package's generators, and it only runs in confined processes",
}
"""Verifiers without a table, and why."""
REFUSED = "error"
"""Score of a row whose ground truth, format or verdict is refused instead of scored."""
_SPAN = re.compile(r"(JSON )?(`+)(.*?[^`])\2")
_ESCAPE = re.compile(r"\\\\n|\\n|\\\|")
_ESCAPED = {r"\\n": r"\n", r"\n": "\n", r"\|": "|"}


@dataclass(frozen=True)
class Example:
    """Row of a table `| response | ground truth | score |`, optionally with `extra` and `options` as JSON."""

    checked: str
    """Verifier, `judge VERDICT` or `format NAME`."""
    line: int
    response: str
    truth: Any
    score: str
    extra: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def tables(page: str) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Yield the name after each `<!-- examples: NAME -->`, and the numbered lines of the table that follows."""
    lines = page.split("\n")
    for number, line in enumerate(lines):
        if (mark := re.fullmatch(r"<!-- examples: (.+) -->", line.strip())) is None:
            continue
        start = next(n for n in range(number + 1, len(lines)) if lines[n].strip())
        end = next((n for n in range(start, len(lines)) if not lines[n].startswith("|")), len(lines))
        yield mark[1], [(n + 1, lines[n]) for n in range(start, end)]


def cells(line: str) -> list[str]:
    r"""Split a row at the pipes that are not escaped."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def value(cell: str) -> Any:
    r"""Return the text of a code span, with `\n` for a newline, `\\n` for a backslash and n, and `\|` for a pipe; the
    span in `JSON `…`` is JSON, and `` ` ` `` or nothing is an empty text."""
    match = _SPAN.fullmatch(cell)
    if match is None:
        assert not cell.strip("` "), f"no code span: {cell}"
        return ""
    if match[1]:
        return json.loads(match[3].replace(r"\|", "|"))
    text = match[3]
    if text.startswith(" ") and text.endswith(" ") and text.strip():
        text = text[1:-1]
    return _ESCAPE.sub(lambda escape: _ESCAPED[escape[0]], text)


def examples() -> Iterator[Example]:
    for name, ((_, header), _, *rows) in tables(PAGE.read_text()):
        columns = cells(header)
        for line, row in rows:
            found = dict(zip(columns, cells(row), strict=True))
            optional = {
                key: json.loads(value(found[key])) for key in ("extra", "options") if found.get(key, "").strip()
            }
            truth = value(found["ground truth"]) if "ground truth" in found else None
            yield Example(name, line, value(found["response"]), truth, found["score"].strip("`"), **optional)


EXAMPLES = list(examples())


def score(example: Example) -> float | None:
    kind, _, name = example.checked.partition(" ")
    if kind == "format":
        return float(has_format(name, example.response))
    if kind == "judge":
        return PARSERS[name](example.response)
    entry = VERIFIERS.get(example.checked)
    options = {} if entry.config is None else {"options": entry.config.model_validate(example.options)}
    return float(entry.load()(example.response, example.truth, example.extra, **options).score)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"{example.checked}-line-{example.line}")
def test_an_example_of_the_page_has_the_score_that_the_page_shows(example: Example) -> None:
    if example.score == REFUSED:
        try:
            given = score(example)
        except ValueError:
            return
        assert given is None, example
    else:
        assert score(example) == pytest.approx(float(example.score)), example


def test_each_verifier_has_examples() -> None:
    shown = {example.checked for example in EXAMPLES}
    built_in = {entry.name for entry in VERIFIERS if str(entry.target).startswith("quintet.")}
    assert built_in - EXEMPT.keys() == shown & built_in


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("`a`", "a"),
        (r"`a\nb \| c \\neq`", "a\nb | c \\neq"),
        ("`` ```py\\nx\\n``` ``", "```py\nx\n```"),
        ("JSON `[1, null]`", [1, None]),
        ("", ""),
    ],
)
def test_cells_are_read_as_the_page_says(cell: str, text: Any) -> None:
    assert value(cell) == text
