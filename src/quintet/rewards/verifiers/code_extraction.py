"""Extraction of the program from a response, with fences as CommonMark 0.31 defines them.

`docs/rewards.md` states the rules. The time is linear in the length of the text: at most `MAX_PARSED_CHARS` characters
are parsed as Python, and blocks are not searched for inline Markdown.
"""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Final

from quintet.rewards.thoughts import THOUGHT_TAGS

if TYPE_CHECKING:
    from markdown_it import MarkdownIt

MAX_PARSED_CHARS: Final = 500_000
"""Limit of the characters of a response that are parsed as Python; blocks beyond it do not count as programs."""
MAX_ENDS: Final = 8
"""Further ends that are tried for a block that does not end where CommonMark ends it."""
MAX_BLOCKS: Final = 64
"""Only the last blocks of a response are considered."""
THOUGHT_END = re.compile("|".join(re.escape(end) for _, end in THOUGHT_TAGS))
THOUGHT_START: Final = tuple(start for start, _ in THOUGHT_TAGS)
PYTHON_TAG = re.compile(
    r"[{.\s]*(?:lang(?:uage)?[-=:])?(?:(?:i|c)?python[\w.-]*|(?:pypy|py)(?:[-.]?\d[\d.]*)?(?![\w-]))|\S*\.py\b",
    re.IGNORECASE,
)
"""Info strings of Python: `python3`, `Python 3`, `{.python}`, `python_code`, `py title=…`, `main.py`."""
GENERIC_TAG = re.compile(r"\W*(?:code|source|program|solution|answer|text|txt|plain|plaintext|none)\b", re.IGNORECASE)
"""Info strings that name no language."""
ANSWER = re.compile(r"^[ \t]*<answer>(.*?)(?:</answer>|\Z)", re.MULTILINE | re.DOTALL | re.IGNORECASE)
MARKS = re.compile(
    r"</?(?:answer|solution|code|pre|program|python)>|\[/?(?:BEGIN|DONE|END|PYTHON|CODE|ANSWER|SOLUTION)\]|<\|\w+\|>|`",
    re.IGNORECASE,
)
"""Tags, special tokens and the ends of inline code around programs without fences."""
PROGRAM_START = re.compile(r"^(?:from [\w.]+ import |import \w|(?:async )?def \w|class \w|@\w)", re.MULTILINE)
FRAME_LINES = re.compile(r"\A\s*(?:python3?|py|\[(?:BEGIN|PYTHON)\])[ \t]*\n|\n\s*\[(?:DONE|END)\]\s*\Z", re.IGNORECASE)
"""First and last lines that are expressions of Python, but no part of a program."""
INVISIBLE = {0xFEFF: None, 0x200B: None, 0xA0: " "}
"""Characters that are no Python, but occur in copied text: marks of the byte order, spaces of zero or fixed width."""
THOUGHT_BEFORE_FENCE = re.compile(rf"({THOUGHT_END.pattern})[ \t]*(?=```|~~~)")
OPENING = re.compile(r"(`{3,}|~{3,})[ \t]*([^`\n]*?)[ \t]*$")
"""Opening fence at the end of any line, also behind other text."""
ONE_LINE = re.compile(r"```[ \t]*(?:(?:python3?|py)[ \t]+)?([^`\n]+)```")
TILDES = re.compile(r"^[ \t>]*~~~", re.MULTILINE)
FENCE_LINE = re.compile(r"[ \t>]*(`{3,}|~{3,})")


@dataclass(frozen=True, slots=True)
class Block:
    """Fenced code block: its info string, content, the lines of the text that it occupies, and whether it is closed."""

    info: str
    content: str
    start: int
    end: int
    closed: bool
    indent: int = 0

    @property
    def is_python(self) -> bool:
        return PYTHON_TAG.match(self.info) is not None


def extract_program(text: str, names: Sequence[str] = ()) -> str:
    """Return the last complete Python program of a response, preferably one that defines all `names`.

    The content of the last `<answer>` comes first if its program defines all `names`. Blocks tagged as Python come
    before untagged ones. Without any block the text itself is the program, or the lines of it that are Python. Text
    before the last `</think>` does not count, nor do thoughts without end.
    """
    parser = _Parser()
    text = text.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff")
    answer = answer_part(THOUGHT_BEFORE_FENCE.sub(r"\1\n", text), parser)
    parts = ANSWER.findall(answer)[-1:] if parser.program(answer) is None else []
    if final := [program for part in parts for program in _find(part, parser)]:
        program = _choose(final, names, parser)
        if set(names) <= parser.definitions(program):
            return program
    if programs := _find(answer, parser):
        return _choose(programs, names, parser)
    if "```" not in answer and "~~~" not in answer:
        return answer
    blocks = [block for block in fenced_blocks(answer) if block.is_python or not block.info]
    tagged = [block for block in blocks if block.is_python]
    return (tagged or blocks)[-1].content if blocks else ""


def _find(text: str, parser: _Parser) -> list[str]:
    """Return the programs of a text in its most explicit form: the text, blocks by their info, or unfenced lines."""
    has_fence = "```" in text or "~~~" in text
    # an opening fence of tildes is an expression of Python
    if TILDES.search(text) is None and (program := parser.program(text)) is not None:
        return [program]
    forms = (_tagged, _untagged, _inline, _generic) if has_fence else (_unfenced,)
    return next((programs for find in forms if (programs := find(text, parser))), [])


def _choose(programs: Sequence[str], names: Sequence[str], parser: _Parser) -> str:
    """Return the last program that defines all names, or else the last program."""
    defining = (each for each in reversed(programs) if set(names) <= parser.definitions(each))
    return next(defining, programs[-1]) if names else programs[-1]


def answer_part(text: str, parser: _Parser | None = None) -> str:
    """Return the text after the last end of thoughts that is not part of a program; nothing of thoughts without end."""
    parser = parser or _Parser()
    ends = list(THOUGHT_END.finditer(text))
    programs = [block for block in (fenced_blocks(text) if ends else ()) if THOUGHT_END.search(block.content)]
    spans = [range(block.start, block.end) for block in programs if parser.rank(block.content)]
    for end in reversed(ends):
        if not spans or not any(text.count("\n", 0, end.start()) in span for span in spans):
            return text[end.end() :]
    return "" if text.lstrip().startswith(THOUGHT_START) else text


def python_blocks(text: str) -> list[str]:
    """Return the closed blocks tagged as Python, or else the untagged ones that are Python, in their order."""
    parser = _Parser()
    blocks = [block for block in fenced_blocks(text) if block.closed]
    tagged = _programs(text, [block for block in blocks if block.is_python], parser)
    return tagged or [block.content for block in blocks if not block.info and parser.rank(block.content)]


def _tagged(text: str, parser: _Parser) -> list[str]:
    return _programs(text, [block for block in fenced_blocks(text) if block.is_python], parser)


def _untagged(text: str, parser: _Parser) -> list[str]:
    """Return untagged blocks with a definition, import or call, or else those with a statement: a number, a list or a
    word that a program prints is Python, too."""
    programs = _programs(text, [block for block in fenced_blocks(text) if not block.info], parser)
    best = max(map(parser.rank, programs), default=0)
    return [each for each in programs if parser.rank(each) == best]


def _generic(text: str, parser: _Parser) -> list[str]:
    return _programs(text, [block for block in fenced_blocks(text) if GENERIC_TAG.match(block.info)], parser)


def _unfenced(text: str, parser: _Parser) -> list[str]:
    """Return programs between tags, or that start with a definition or import and end before a line that is no
    Python."""
    programs = []
    for part in MARKS.split(text)[-MAX_BLOCKS:]:
        start = PROGRAM_START.search(part)
        source = part[start.start() :] if start else ""
        program = parser.program(part)
        for _ in range(MAX_ENDS):
            if program is not None or not source:
                break
            program = parser.program(source)
            source = parser.before_error(source)
        programs += [program] if program is not None else []
    return [each for each in programs if parser.rank(each) == max(map(parser.rank, programs))]


def _programs(text: str, blocks: Sequence[Block], parser: _Parser) -> list[str]:
    lines = text.split("\n")
    return [program for block in blocks if (program := _complete(lines, block, parser)) is not None]


def _complete(text_lines: Sequence[str], block: Block, parser: _Parser) -> str | None:
    """Return the content of a block if it is a program, up to a later fence if CommonMark's end is inside a string."""
    if (program := parser.program(block.content)) is not None:
        return program
    lines = text_lines[block.start + 1 :]
    fences = (number for number, line in enumerate(lines) if FENCE_LINE.match(line))
    ends = list(islice(fences, MAX_ENDS))
    for end in (*ends, len(lines)):
        content = "\n".join(line[min(block.indent, len(line) - len(line.lstrip())) :] for line in lines[:end]) + "\n"
        if (program := parser.program(content)) is not None:
            return program
    return None


def _inline(text: str, parser: _Parser) -> list[str]:
    """Return programs behind opening fences that are not at the start of a line, or that follow an open block."""
    programs, lines = [], text.split("\n")
    openings = [(number, match) for number, line in enumerate(lines) if (match := OPENING.search(line)) is not None]
    for number, opening in openings[-MAX_BLOCKS:]:
        if opening[2] and not PYTHON_TAG.match(opening[2]):
            continue
        rest = "\n".join(lines[number + 1 :])
        end = rest.find(opening[1])
        if (program := parser.program(rest if end < 0 else rest[:end])) is not None:
            programs.append(program)
    return programs or [program for program in ONE_LINE.findall(text)[-MAX_BLOCKS:] if parser.rank(program) == 2]


@lru_cache(maxsize=2)
def fenced_blocks(text: str) -> Sequence[Block]:
    """Return the last fenced code blocks of a text, in list items and quotations too; those that are indented by four
    or more columns only if there are no others."""
    blocks = list(_blocks(text, indented=False)) or list(_blocks(text, indented=True))
    return blocks[-MAX_BLOCKS:]


def _blocks(text: str, indented: bool) -> Iterator[Block]:
    lines = text.split("\n")
    for token in _markdown(indented).parse(text):
        if token.type == "fence" and token.map is not None:
            start, end = token.map
            closed = (
                end - start >= 2 and token.markup in lines[end - 1] and token.content.count("\n") == end - start - 2
            )
            indent = len(lines[start]) - len(lines[start].lstrip())
            yield Block(token.info.strip(), token.content, start, end, closed, indent)


@cache
def _markdown(indented: bool) -> MarkdownIt:
    """Return a parser of blocks only. Tags such as `<answer>` do not hide the fence in the next line, as they would in
    HTML blocks."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark")
    parser.core.ruler.enableOnly(["normalize", "block"])
    parser.block.ruler.enableOnly(["fence", "blockquote", "list", "paragraph", *([] if indented else ["code"])])
    return parser


class _Parser:
    """Python parser with a limit of characters per response."""

    def __init__(self) -> None:
        self._left = MAX_PARSED_CHARS
        self._parsed: dict[str, ast.Module | None] = {}

    def program(self, source: str) -> str | None:
        """Return a source if it is a program, or else without common indentation and invisible characters."""
        source = FRAME_LINES.sub("", source)
        if self.rank(source):
            return source
        cleaned = textwrap.dedent(source.translate(INVISIBLE))
        return cleaned if cleaned != source and self.rank(cleaned) else None

    def rank(self, source: str) -> int:
        """Return 2 for a program with a definition, import or call, 1 for another one with a statement, else 0."""
        module = self._parse(source)
        if module is None or not module.body:
            return 0
        if any(isinstance(node, _SUBSTANTIAL) for node in ast.walk(module)):
            return 2
        return int(any(not isinstance(node, ast.Expr) for node in module.body))

    def before_error(self, source: str) -> str:
        """Return the lines before the first syntax error."""
        self._left -= len(source)
        try:
            if self._left >= 0:
                parse_strictly(source)
        except SyntaxError as error:
            return "\n".join(source.split("\n")[: max((error.lineno or 1) - 1, 0)])
        except UNPARSABLE:
            pass
        return ""

    def definitions(self, source: str) -> set[str]:
        """Return the functions and classes that a program defines, methods included, and the names that it assigns."""
        nodes = list(ast.walk(self._parse(source) or ast.Module([], [])))
        defined = {
            node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        return defined | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}

    def _parse(self, source: str) -> ast.Module | None:
        if source not in self._parsed:
            self._left -= len(source)
            self._parsed[source] = parse_python(source) if self._left >= 0 else None
        return self._parsed[source]


_DEFINITIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SUBSTANTIAL: Final = (*_DEFINITIONS, ast.Call, ast.Import, ast.ImportFrom)


UNPARSABLE: Final = (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError)


def parse_python(source: str) -> ast.Module | None:
    """Return the syntax tree of a source, or None if it is not Python or nested too deeply."""
    try:
        return parse_strictly(source)
    except UNPARSABLE:
        return None


def parse_strictly(source: str) -> ast.Module:
    """Return the syntax tree of a source without warning of invalid escapes.

    Raises:
        SyntaxError: it is not Python.
    """
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(source)
