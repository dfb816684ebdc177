"""Reader of the words of a shell script, which expands them and runs nothing."""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass

from quintet.config.dialects.scripts.arithmetic import ExpressionError, UnknownOperand, assigned_names, evaluate
from quintet.config.dialects.scripts.brace_expansion import SKIPPED, TooManyWords, brace_expansion
from quintet.config.dialects.scripts.conditions import Status
from quintet.config.dialects.scripts.parameter_expansion import BRACED_PARAMETER, ParameterExpansion
from quintet.config.dialects.scripts.patterns import (
    EMPTY_ITEM,
    REPLACEMENT,
    is_file_pattern,
    protected,
    unprotected,
)
from quintet.config.dialects.scripts.text_reader import BLANKS, HERE_DOCUMENT_END, WORD_END, TextReader
from quintet.config.dialects.scripts.variables import MARKER, MAX_LENGTH, Variables, array_of
from quintet.config.dialects.scripts.word_splitting import SPLIT_POINTS, pathname_expansion, with_split_points

REDIRECTION = re.compile(
    r"(?P<number>\d*|\{(?P<variable>[A-Za-z_]\w*)\})(?P<operator><<<|<<-?|&>>?|>>|>&|<&|>\||<>|[<>](?!\())"
)
COMMAND_END = re.compile(r"[\n;&|()#]|\Z")
RAW_WORD = re.compile(rf"(?:{SKIPPED.pattern}|[^\s;&|()<>])*", re.DOTALL)
LITERAL = re.compile(r"""[^\s;&|()<>\\'"`$~{}\]:=/]+|.""", re.DOTALL)
QUOTED_LITERAL = re.compile(r"""[^\\"`$()}\]]+|.""", re.DOTALL)
SINGLE_QUOTED = re.compile(r"'([^']*)'")
ANSI_QUOTED = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
ANSI_ESCAPE = re.compile(r"\\([abefnrtv\\'\"?])")
ANSI_ESCAPES = dict(zip("abefnrtv\\'\"?", "\a\b\x1b\f\n\r\t\v\\'\"?", strict=True)) | {"e": "\x1b"}
ESCAPE = re.compile(r"\\(.?)", re.DOTALL)
TILDE = re.compile(r"~(?P<user>[\w+-]*)(?=[/:\s;&|()<>}]|\Z)")
ARRAY_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<append>\+?)=\(")
NAME_ASSIGNED = re.compile(r"[A-Za-z_]\w*\+?=")
ELEMENT = re.compile(r"\[(?P<subscript>[^\]]+)\](?P<append>\+?)=")
PARAMETER = re.compile(r"\$([A-Za-z_]\w*|[0-9#@*?$!-])")
ONLY_PARAMETER = re.compile(r"\$\{?(?P<name>[A-Za-z_]\w*)\}?")
BACKQUOTED = re.compile(r"`((?:[^`\\]|\\.)*)`", re.DOTALL)
OPENING, CLOSING = "$((", "))"


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command."""

    source: str
    """The word in the script."""
    line: int
    expansion: str
    """The word after expansion, with quoted characters protected."""
    fields: tuple[str, ...]
    """The words that a program receives for it."""
    items: tuple[str, ...] | None = None
    """The words in the parentheses of `NAME=(…)`."""
    raw: str | None = None
    """Text of `NAME=(…)`."""
    count_is_unknown: bool = False
    """Whether it may be more or fewer words than `fields`."""

    @property
    def text(self) -> str:
        """The word after expansion and without splitting, as in an assignment."""
        return unprotected(self.expansion)


class WordReader(TextReader):
    """Reads and expands words from a position in a script."""

    def __init__(self, text: str, variables: Variables, first_line: int = 1) -> None:
        super().__init__(text, variables, first_line)
        self.parameters = ParameterExpansion(self)
        self.stdin: str | None = None
        """The input of a command; None if it is not known."""
        self.redirected = False
        """Whether the output of the last command goes elsewhere."""
        self.has_input_file = self.is_prompted = False
        """Whether the last command reads a file, or what a user types."""
        self.status: Status = True
        """Status of the last command."""
        self.assumptions: list[str] = []
        """What is assumed where it is not known whether a command runs, or whether the script goes on."""
        self.unknown_in_condition = ""
        """Why the last condition is not known."""
        self.counts_arguments = False
        """Whether the last condition depends on the arguments of a script that is read without any."""
        self.count_is_unknown = False
        """Whether the last part of a word may be any number of words."""

    def skip_redirections(self) -> None:
        """Skip blanks and redirections."""
        self.match(BLANKS)
        while redirection := self.match(REDIRECTION):
            self.match(BLANKS)
            operator = redirection["operator"]
            if operator in ("<<", "<<-"):
                end = self.match(HERE_DOCUMENT_END)
                self.here_documents.append((operator, end[0] if end else ""))
                self.stdin, self.has_input_file, self.is_prompted = None, True, False
            else:
                target = "" if WORD_END.match(self.text, self.position) else self.read_word(is_assignment=True).text
                if variable := redirection["variable"]:
                    self.variables.forget([variable], "is the number of an open file", self.line)
                elif "<" in operator:
                    self.stdin = f"{target}\n" if operator == "<<<" else "" if target == "/dev/null" else None
                    self.has_input_file, self.is_prompted = self.stdin is None, False
                elif redirection["number"] in ("", "1"):
                    self.redirected = True
            self.match(BLANKS)

    def read_words(self) -> list[Word]:
        """Read the words of a command, without redirections."""
        words: list[Word] = []
        while True:
            if in_test := bool(words) and words[0].source == "[[" and words[-1].source != "]]":
                self.match(TEST_BLANKS)
            else:
                self.skip_redirections()
            if self.at_end or (not in_test and COMMAND_END.match(self.text, self.position)):
                return words
            operator = self.take("&&", "||", "<", ">", "(", ")") if in_test else ""
            if operator and not (words[-1].source == "=~" and operator == "("):
                words.append(Word(operator, self.line, operator, (operator,)))
            elif in_test and words[-1].source == "=~":
                self.position -= len(operator)
                words.append(self._regular_expression())
            else:
                words += self.read_words_of_braces() if not in_test else [self.read_word(is_assignment=True)]

    def _regular_expression(self) -> Word:
        """Read the word after `=~`, in which parentheses and `|` are no operators."""
        start, line, expansion, depth = self.position, self.line, "", 0
        while not self.at_end and (depth or self.text[self.position] not in " \t\n"):
            depth += {"(": 1, ")": -1}.get(self.text[self.position], 0)
            expansion += self._part(quoted=False)
        return Word(self.text[start : self.position], line, expansion, (unprotected(expansion),))

    def read_words_of_braces(self) -> list[Word]:
        """Read a word, or those for which one with braces stands."""
        raw = RAW_WORD.match(self.text, self.position)
        if raw is None or "{" not in raw[0] or ARRAY_ASSIGNMENT.match(self.text, self.position):
            return [self.read_word()]
        try:
            texts = brace_expansion(raw[0])
        except TooManyWords:
            raise self.error("the braces stand for too many words", "write them out", self.line) from None
        if texts == [raw[0]] or not WORD_END.match(self.text, raw.end()):
            return [self.read_word()]
        words = []
        for text in texts:
            with self.inner_text(text):
                words += [self.read_word()] if text else []
        self.position = raw.end()
        return words

    def read_word(self, *, is_assignment: bool = False) -> Word:
        """Read a word at the position, or a single character that ends words."""
        line, start = self.line, self.position
        if array := self.match(ARRAY_ASSIGNMENT):
            return self._array(array, line)
        expansion, count_is_unknown = "", False
        assigned = NAME_ASSIGNED.match(self.text, start)
        while self.position == start or not WORD_END.match(self.text, self.position):
            before = self.text[self.position - 1] if self.position > start else ""
            is_value = bool(assigned) and self.position >= assigned.end() if assigned else False
            if not before or (is_value and before in "=:"):
                expansion += self.tilde()
                if self.position > start and WORD_END.match(self.text, self.position):
                    break
            self.count_is_unknown, is_value = False, "=" in expansion
            expansion = self._limit(expansion + self._part(quoted=False))
            count_is_unknown |= self.count_is_unknown and not is_value
        source = self.text[start : self.position]
        fields = (unprotected(expansion),) if is_assignment else self.fields_of(source, expansion)
        return Word(source, line, expansion, fields, count_is_unknown=count_is_unknown)

    def fields_of(self, source: str, expansion: str) -> tuple[str, ...]:
        """Return the words that a program receives for an expanded word."""
        parameter = ONLY_PARAMETER.fullmatch(source)
        if parameter is not None and self.variables.get(parameter["name"]) is None:
            return ()  # as with an environment that does not set it
        fields = []
        for field in SPLIT_POINTS.split(expansion):
            if field:
                fields += (
                    pathname_expansion(field, self.variables, self.line)
                    if is_file_pattern(field) and not MARKER.search(field)
                    else [unprotected(field)]
                )
        return tuple(fields)

    def _array(self, array: re.Match[str], line: int) -> Word:
        """Read the words of `NAME=(…)`."""
        name, appends, start = array["name"], bool(array["append"]), array.start()
        is_associative = self.variables.has(name, "A")
        items: dict[str, str] = {}
        position, unknown = 0, ""
        if appends and not self.variables.is_unknown_array(name):
            items = self.parameters.items_of(name)
            position = max([int(key) + 1 for key in items], default=0) if not is_associative else 0
        for _ in self.lines_until("(", ")"):
            if element := ELEMENT.match(self.text, self.position):
                self.position = element.end()
                key = self.parameters.subscript(name, element["subscript"], is_associative=is_associative)
                word = (
                    Word("", line, "", ("",))
                    if WORD_END.match(self.text, self.position)
                    else self.read_word(is_assignment=True)
                )
                unknown = unknown or (key if MARKER.search(key) else "")
                if not unknown:
                    items[key] = (items.get(key, "") if element["append"] else "") + word.text
                    position = 0 if is_associative else int(key) + 1
                continue
            for word in self.read_words_of_braces():
                unknown = unknown or (word.expansion if word.count_is_unknown else "")
                for field in word.fields:
                    items[str(position)], position = field, position + 1
        if is_associative and not unknown and any(element_key.isdecimal() for element_key in items) and not appends:
            unknown = self._unknown(f"{name}=(…)", "is an associative array without keys: not supported")
        values = (self.variables.unknown_array(unknown),) if unknown else array_of(items, is_associative=is_associative)
        return Word(array[0], line, "", (), values, self.text[start : self.position])

    def _unknown(self, construct: str, reason: str) -> str:
        return self.variables.unknown(construct, reason, self.line)

    def _limit(self, text: str) -> str:
        """Return a text, or its start and a marker if it is too long."""
        return text if len(text) <= MAX_LENGTH else text[:99] + self._unknown("a word", "is too long")

    def _part(self, *, quoted: bool) -> str:
        """Read and expand a literal, a quoted text or an expansion."""
        if not quoted and (text := self._unquoted_part()) is not None:
            return text
        if self.take('"'):
            return self._quoted()
        if escape := self.match(ESCAPE):
            backslash = "\\" if quoted and escape[1] not in '$`"\\\n' else ""
            return "" if escape[1] == "\n" else protected(f"{backslash}{escape[1]}")
        if self.text[self.position] in "$`<>" and (expansion := self._expansion(quoted=quoted)) is not None:
            if quoted:
                return expansion
            self.count_is_unknown = MARKER.search(expansion) is not None
            return with_split_points(expansion, self.variables, self.line)
        literal = self.match(QUOTED_LITERAL if quoted else LITERAL)
        return literal[0] if literal else ""

    def _quoted(self) -> str:
        """Read a text up to the closing double quote."""
        start = self.position
        text = protected(self.parts_until('"', '"', quoted=True))
        self.count_is_unknown = any(self.variables.unknown_values[int(n)].is_array for n in MARKER.findall(text))
        # `"$@"` without arguments is no word
        return (
            text
            if text or re.fullmatch(r"(?:\$@|\$\{[^}]*@[^}]*\})+", self.text[start : self.position - 1])
            else EMPTY_ITEM
        )

    def _expansion(self, *, quoted: bool) -> str | None:
        """Read what begins with `$`, a backquote or `<(`; None for a single `$`."""
        start = self.position
        if self.take("$((") or self.take("$["):
            opening = self.text[start : self.position]
            expression = self.parts_until("))" if opening == OPENING else "]", opening, quoted=True)
            return str(self.evaluate(unprotected(expression), self.text[start : self.position]))
        if opening := self.take("$(", "<(", ">("):
            output = self.substituted(start)
            if opening != "$(":
                return self._unknown(self.text[start : self.position], "is a file that bash makes")
            return output
        if backquoted := self.match(BACKQUOTED):
            end, self.position = self.position, start
            with self.inner_text(re.sub(r"\\([\\`$])", r"\1", backquoted[1])):
                output = self.substituted(start, "`")
            self.position = end
            return output
        if self.text.startswith('$"', start) and not quoted:
            self.position += 1
            return self._part(quoted=False)
        if parameter := self.match(BRACED_PARAMETER):
            return self.parameters.expanded(parameter, quoted=quoted)
        parameter = self.match(PARAMETER)
        return None if parameter is None else self.parameters.value_of(parameter[1], quoted=quoted)

    def _unquoted_part(self) -> str | None:
        """Read what has no meaning between double quotes."""
        if quotes := self.match(SINGLE_QUOTED):
            return protected(quotes[1]) or EMPTY_ITEM
        if quotes := self.match(ANSI_QUOTED):
            if re.search(r"\\[^abefnrtv\\'\"?]", quotes[1]):
                return self._unknown(quotes[0], UNSUPPORTED)
            return protected(ANSI_ESCAPE.sub(lambda each: ANSI_ESCAPES[each[1]], quotes[1])) or EMPTY_ITEM
        if self.text[self.position] == "'":
            raise self.not_closed("'", self.line)
        return None

    def tilde(self) -> str:
        """Expand `~` at the beginning of a word or of a part of an assigned value."""
        tilde = self.match(TILDE)
        if tilde is None:
            return ""
        if tilde["user"]:
            return self._unknown(tilde[0], "is the directory of another user")
        home = self.variables.scalar("HOME")
        return protected(home) if home is not None else self._unknown("~", "is not known without HOME")

    def parts_until(self, closing: str, opening: str, *, quoted: bool, separator: str = "") -> str:
        """Read and expand parts up to `closing`; in arithmetic, after the parentheses in it are closed.

        The first `separator` becomes `REPLACEMENT`.
        """
        line = self.line
        text = ""
        parentheses = 0
        while parentheses or not self.take(closing):
            if self.at_end:
                raise self.not_closed(opening, line)
            if separator and text and self.take(separator):
                text, separator = text + REPLACEMENT, ""
                continue
            if closing == CLOSING:
                parentheses += {"(": 1, ")": -1}.get(self.text[self.position], 0)
            text = self._limit(text + self._part(quoted=quoted))
        return text

    def expand(self, text: str) -> str:
        """Expand a text as between double quotes."""
        expansion = ""
        with self.inner_text(text):
            while not self.at_end:
                if self.take('"'):
                    expansion += '"'
                else:
                    expansion = self._limit(expansion + self._part(quoted=True))
        return unprotected(expansion)

    def evaluate(self, expression: str, source: str) -> int | str:
        """Evaluate an expression and set the variables that it assigns; a marker if the result is not known.

        Raises:
            ConfigError: bash refuses it.
        """
        if (unknown := MARKER.search(expression)) is not None:
            return self._unknown_arithmetic(expression, unknown[0], source)
        if self.skipped:
            return 0
        try:
            return evaluate(expression, self.parameters)
        except UnknownOperand as error:
            return self._unknown_arithmetic(expression, str(error), source)
        except ExpressionError:
            message = f"{' '.join(source.split())} is not integer arithmetic"
            raise self.error(message, "a shell ends the command here: correct it", self.line) from None

    def _unknown_arithmetic(self, expression: str, marker: str, source: str) -> str:
        self.variables.forget(assigned_names(expression), "is set in arithmetic that is not known", self.line)
        return self.variables.depending(" ".join(source.split()), marker, self.line)

    @abstractmethod
    def end(self, reason: str) -> None:
        """End the script, or the process of a `(…)` around the position."""

    @abstractmethod
    def substituted(self, start: int, opening: str = "$(") -> str:
        """Read the commands of `$(…)`, and return what they print."""


UNSUPPORTED = "can only be evaluated by a shell"
TEST_BLANKS = re.compile(r"(?:[ \t\n]|\\\n)*")
