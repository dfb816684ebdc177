"""Which commands a shell script would run, and with which words. Nothing is run.

A condition that can be told (`[ "$MODE" = fast ]`) is followed; where it can't, both ways are gone, and what
differs between them stays open. Functions and loops are gone through once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from quintet.config.dialects.scripts.shell import Command, Kind, Word, commands
from quintet.config.dialects.scripts.values import MARK, Field, Shell

__all__ = ["Ran", "ran"]

PASSED = {"!", "time"}
"""Words before a command that don't change which words it has."""
DECLARING = {"export", "local", "declare", "typeset", "readonly"}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=(.*)", re.DOTALL)
NUMBERS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}

Truth = bool | None
"""None where it can't be told."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A command that runs, or may run."""

    words: tuple[Field, ...]
    line: int
    comments: tuple[int, ...] = ()
    """Lines of comments at which a shell would end it."""


@dataclass(slots=True)
class _Block:
    """An `if`, a loop or a `case` that the way has led into."""

    kind: str
    line: int
    running: Truth = True
    """Whether the branch where it is runs."""
    done: Truth = False
    """Whether a branch before it ran."""
    verdict: Truth = True
    """What the condition says so far."""
    joint: str = "&&"
    asking: bool = True
    """Whether it is in the condition, or the pattern, rather than in a branch."""
    subject: str = ""
    because: str = ""
    """What keeps the condition from being told."""
    groups: list[tuple[Truth, str]] = field(default_factory=list)
    """Of each `{` around the place: the verdict before it, and how it joins."""
    before: dict[str, str | tuple[str, ...] | None] = field(default_factory=dict)
    differing: set[str] = field(default_factory=set)


def ran(text: str, shell: Shell, first_line: int = 1) -> Iterator[Ran]:
    """Every command of a script that certainly or perhaps runs. The variables of `shell` follow the way.

    Raises:
        ConfigError: a quote or a bracket is never closed.
    """
    flow = _Flow(shell)
    for command in commands(text, str(shell.path), first_line):
        yield from flow.follow(command)


class _Flow:
    def __init__(self, shell: Shell) -> None:
        self.shell = shell
        self.blocks: list[_Block] = []
        self.status: Truth = True
        self.joint = "\n"

    def follow(self, command: Command) -> Iterator[Ran]:
        words = self._past_keywords(command)
        block = self.blocks[-1] if self.blocks else None
        if block is not None and block.asking and block.kind == "case":
            self._pattern(block, words, command.end)
        elif block is not None and block.asking:
            if words or not command.words:
                self._ask(block, self._test(words) if words else None, words)
            block.joint = command.end
        elif words and self._runs() is not False:
            yield from self._simple(words, command)
        self.joint = command.end
        if command.end.startswith(";") and command.end != ";" and block is not None and block.kind == "case":
            self._leave_branch(block)
            block.asking = True

    def _runs(self) -> Truth:
        """Whether it comes here at all, and past `&&` or `||`."""
        runs = [block.running for block in self.blocks]
        if self.joint in ("&&", "||") and self.status is not None:
            runs.append(self.status is (self.joint == "&&"))
        elif self.joint in ("&&", "||"):
            runs.append(None)
        return False if False in runs else None if None in runs else True

    def _past_keywords(self, command: Command) -> Sequence[Word]:
        words = command.words
        while words and (keyword := words[0].plain) is not None:
            if keyword in ("if", "while", "until", "for", "select", "case", "function"):
                return self._begin(keyword, words[1:], command.line)
            if keyword in ("then", "else", "elif", "do", "fi", "done", "esac"):
                self._turn(keyword)
            elif keyword in ("{", "}"):
                self._group(keyword)
            elif keyword not in PASSED:
                break
            words = words[1:]
        return words

    def _begin(self, kind: str, words: tuple[Word, ...], line: int) -> Sequence[Word]:
        """Enter a block; what is left of its first command."""
        if kind == "function":
            return ()
        if kind in ("for", "select"):
            self._loop_over(words, line)
            self.blocks.append(_Block("loop", line, asking=False))
            return ()
        if kind == "case":
            subject = self.shell.text(words[0]) if words else ""
            self.blocks.append(_Block("case", line, verdict=False, subject=subject))
            return words[2:]
        self.blocks.append(_Block("if" if kind == "if" else "loop", line))
        return words

    def _loop_over(self, words: tuple[Word, ...], line: int) -> None:
        items = self.shell.items(words[2:])
        if words and (name := words[0].plain):
            several = self.shell.mark(f"${name}", f"changes in the loop at line {line}", line)
            self.shell.assign(name, items[0] if len(items) == 1 else several, line, more=False)

    def _turn(self, keyword: str) -> None:
        if not self.blocks:
            return
        block = self.blocks[-1]
        if keyword in ("then", "do"):
            self._enter_branch(block, block.verdict if block.kind == "if" else True)
        elif keyword in ("fi", "done", "esac"):
            if not block.asking:
                self._leave_branch(block)
            self._leave(self.blocks.pop())
        else:
            self._leave_branch(block)
            block.verdict, block.joint, block.asking = True, "&&", True
            if keyword == "else":
                self._enter_branch(block, True)

    def _enter_branch(self, block: _Block, verdict: Truth) -> None:
        block.asking = False
        block.before = dict(self.shell.variables)
        if block.done is True or verdict is False:
            block.running = False
        else:
            block.running = verdict if block.done is False else None

    def _leave_branch(self, block: _Block) -> None:
        """What a branch changed that runs perhaps isn't known after it."""
        if block.running is None:
            after = self.shell.variables
            block.differing |= {name for name in {*after, *block.before} if after.get(name) != block.before.get(name)}
            self.shell.variables = dict(block.before)
        if block.kind != "loop" and block.running is not False:
            block.done = True if block.running or block.done else None
        block.running = True

    def _leave(self, block: _Block) -> None:
        for name in block.differing:
            why = f"depends on the condition at line {block.line}{block.because}"
            self.shell.variables[name] = self.shell.mark(f"${name}", why, block.line)

    def _ask(self, block: _Block, found: Truth, words: Sequence[Word] = ()) -> None:
        """What one command of a condition says, beside those before it."""
        if found is None:
            self._because(block, words)
        if block.joint == "&&":
            block.verdict = _both(block.verdict, found)
        elif block.joint == "||":
            block.verdict = _either(block.verdict, found)
        else:
            block.verdict = found

    def _group(self, brace: str) -> None:
        """`{` and `}` in a condition: what stands between them counts as one."""
        block = self.blocks[-1] if self.blocks else None
        if block is None or not block.asking:
            return
        if brace == "{":
            block.groups.append((block.verdict, block.joint))
            block.verdict, block.joint = True, "&&"
        elif block.groups:
            inner = block.verdict
            block.verdict, block.joint = block.groups.pop()
            self._ask(block, inner)

    def _because(self, block: _Block, words: Sequence[Word], text: str = "") -> None:
        said = "".join([text, *(self.shell.text(word) for word in words)])
        if (unknown := self.shell.open_in(said)) is not None:
            block.because = f", where {unknown}"

    def _pattern(self, block: _Block, words: Sequence[Word], end: str) -> None:
        """One pattern of a `case`; after `)` its branch begins."""
        for word in words:
            pattern = self.shell.text(word)
            known = not MARK.search(block.subject) and not MARK.search(pattern)
            if not known:
                self._because(block, [], f"{block.subject}{pattern}")
            fits: Truth = fnmatchcase(block.subject, pattern) if known else True if pattern == "*" else None
            block.verdict = _either(block.verdict, fits)
        if end == ")":
            self._enter_branch(block, block.verdict)
            block.verdict = False

    def _simple(self, words: Sequence[Word], command: Command) -> Iterator[Ran]:
        """Assignments, or a command with its words."""
        certain = self._runs()
        rest = list(words)
        while rest and ASSIGNMENT.match(_begins(rest[0])):
            rest.pop(0)
        if not rest:
            self._assign(words, certain)
            self.status = True
            return
        name = rest[0].plain
        if name in DECLARING:
            self._assign([word for word in rest[1:] if ASSIGNMENT.match(_begins(word))], certain)
            if name == "export":
                self.shell.exported |= {_begins(word).partition("=")[0].rstrip("+") for word in rest[1:]}
            return
        elif name in ("read", "unset", "mapfile", "readarray", "cd", ":"):
            self._built_in(name, rest[1:], command.line)
        self.status = self._test(rest) if name in ("[", "[[", "test", "true", "false", ":") else True
        fields = tuple(one for word in rest for one in self.shell.fields(word))
        if fields:
            yield Ran(fields, command.line, command.comments)

    def _assign(self, words: Sequence[Word], certain: Truth) -> None:
        for word in words:
            found = ASSIGNMENT.match(self.shell.text(word))
            if found is None:
                continue
            name, value = found[1], found[4]
            items = None if word.items is None else self.shell.items(word.items)
            if found[2] or (certain is None and self.joint in ("&&", "||")):
                value, items = self.shell.mark(f"${name}", "is set on a condition that isn't known", word.line), None
            self.shell.assign(name, value if items is None else items, word.line, more=found[3] == "+")

    def _built_in(self, name: str, words: Sequence[Word], line: int) -> None:
        """Commands that change variables."""
        texts = [one.text for word in words for one in self.shell.fields(word)]
        if name == "cd":
            here = self.shell.value("PWD") or "."
            self.shell.assign("PWD", str(Path(here, *texts[-1:])), line, more=False)
        for text in texts if name in ("read", "unset", "mapfile", "readarray") else ():
            if name == "unset":
                self.shell.variables[text] = None
            elif re.fullmatch(r"[A-Za-z_]\w*", text):
                why = "is asked for while the script runs"
                self.shell.assign(text, self.shell.mark(f"${text}", why, line), line, more=False)

    def _test(self, words: Sequence[Word]) -> Truth:
        """What `[ … ]`, `[[ … ]]` or `test …` says."""
        texts = [field.text for word in words for field in self.shell.fields(word) or [Field("", word.line)]]
        if texts[:1] in (["true"], [":"], ["false"]):
            return texts[0] != "false"
        if texts[:1] not in (["["], ["[["], ["test"]):
            return None
        negated = texts[1:2] == ["!"]
        inside = texts[2 if negated else 1 : len(texts) - (texts[0] != "test")]
        if any(MARK.search(text) for text in inside):
            return None
        said = _said(inside, pattern=texts[0] == "[[")
        return None if said is None else said is not negated


def _both(one: Truth, other: Truth) -> Truth:
    return False if False in (one, other) else None if None in (one, other) else True


def _either(one: Truth, other: Truth) -> Truth:
    return True if True in (one, other) else None if None in (one, other) else False


def _begins(word: Word) -> str:
    """The plain text that a word begins with."""
    first = word.parts[0] if word.parts else None
    return first.text if first is not None and first.kind is Kind.TEXT and not first.quoted else ""


def _said(words: list[str], *, pattern: bool) -> Truth:
    match words:
        case [text]:
            return text != ""
        case ["-z" | "-n" as sign, text]:
            return (text == "") is (sign == "-z")
        case ["-e" | "-f" | "-d" as sign, path]:
            place = Path(path)
            return {"-e": place.exists, "-f": place.is_file, "-d": place.is_dir}[sign]()
        case [left, "=" | "==" | "!=" as sign, right]:
            return (fnmatchcase(left, right) if pattern else left == right) is (sign != "!=")
        case [left, sign, right] if sign in NUMBERS and all(re.fullmatch(r"-?\d{1,18}", one) for one in (left, right)):
            less, same = int(left) < int(right), int(left) == int(right)
            return {"-eq": same, "-ne": not same, "-lt": less, "-le": less or same, "-gt": not (less or same)}.get(
                sign, not less
            )
    return None
