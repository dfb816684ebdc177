"""Assignments, and the builtin commands `declare`, `export`, `local`, `readonly`, `typeset` and `unset`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from quintet.config.dialects.scripts.arithmetic import assigned_names
from quintet.config.dialects.scripts.command_lists import CommandListReader
from quintet.config.dialects.scripts.conditions import Status
from quintet.config.dialects.scripts.patterns import protected, unprotected
from quintet.config.dialects.scripts.variables import ALL_NAMES, MARKER, SparseArray, array_of
from quintet.config.dialects.scripts.word_reader import Word
from quintet.errors import ConfigError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[(?:[^\]\[]|\[[^\]]*\])*\])?(\+?)=")
NAME = re.compile(r"[A-Za-z_]\w*")
ATTRIBUTES = "aAgilrux"
"""Options of `declare` that are supported."""


class Assignments:
    """Sets variables and their attributes for a reader."""

    def __init__(self, reader: CommandListReader) -> None:
        self.reader, self.variables = reader, reader.variables

    def unsupported(self, construct: str) -> ConfigError:
        """Return the error of a command that is not supported."""
        return self.reader.error(f"`{construct}` is not supported", "write the script without it", self.reader.line)

    def assign(self, word: Word) -> str:
        """Set the variable of `NAME=value`, `NAME+=value`, `NAME[index]=value` or `NAME=(…)`; return its name."""
        matched = ASSIGNMENT.match(unprotected(word.source) if word.items is None else word.source)
        assigned = ASSIGNMENT.match(word.expansion) if word.items is None else matched
        if assigned is None:
            raise self.reader.error(f"{word.source} is not supported", "write it in another way", word.line)
        name, index, append = assigned.groups()
        value = "" if word.items is not None else unprotected(word.expansion[assigned.end() :])
        variables, before = self.variables, self.variables.values.get(name, ())
        if word.items is not None:
            variables.assign(name, word.items, word.line)
        elif index or isinstance(before, SparseArray) or variables.has(name, "A"):
            self._assign_element(name, index or "[0]", value, word.line, appends=bool(append))
        elif variables.has(name, "i"):
            self.assign_arithmetic(f"{name}{append}=({value or 0})", word.source)
        else:
            text = (variables.scalar(name) or "" if append else "") + value
            rest = before[1:] if len(before) > 1 else ()
            unknown = variables.find_unknown(text)
            values = (text, *rest) if unknown is None or len(before) < 2 else (variables.unknown_array(text),)
            variables.assign(name, values, word.line)
        return name

    def _assign_element(self, name: str, index: str, value: str, line: int, *, appends: bool) -> None:
        parameters, is_associative = self.reader.parameters, self.variables.has(name, "A")
        subscript = re.sub(r"""\A(["'])(.*)\1\Z""", r"\2", index[1:-1], flags=re.DOTALL)
        key = parameters.subscript(name, unprotected(subscript), is_associative=is_associative)
        if self.variables.is_unknown_array(name):
            return
        if MARKER.search(key) or (not is_associative and int(key) < 0) or (is_associative and not key):
            self.variables.forget([name], "has an element whose subscript is not known", line)
            return
        items = parameters.items_of(name)
        if self.variables.has(name, "i"):
            value = str(self.reader.evaluate(value, value))
        items[key] = (items.get(key, "") if appends else "") + value
        self.variables.assign(name, array_of(items, is_associative=is_associative), line)

    def assign_arithmetic(self, expression: str, source: str) -> Status:
        """Evaluate an expression with its assignments; return whether it is not 0."""
        try:
            value = self.reader.evaluate(expression, source)
        except ConfigError as error:
            if "is not integer arithmetic" not in str(error):
                raise
            self.variables.forget(assigned_names(expression), "is not integer arithmetic", self.reader.line)
            return None
        if isinstance(value, str):
            self.reader.unknown_in_condition = str(self.variables.find_unknown(value))
            return None
        return value != 0

    def declare(self, name: str, words: Sequence[Word]) -> Status:
        """Apply `export`, `declare`, `local`, `typeset` or `readonly`."""
        if name == "local" and not self.variables.local_values:
            return False
        names, options, removed = self._names_and_options(name, words)
        if set(options) & set("fFp"):
            self.reader.print_text(None)
            return None
        options += {"export": "x", "readonly": "r"}.get(name, "")
        if name == "export":
            removed, options = (removed + "x", options.replace("x", "")) if "n" in options else (removed, options)
            options = options.replace("n", "")
        is_local = name in ("local", "declare", "typeset") and bool(self.variables.local_values) and "g" not in options
        for each in names:
            self._declare_name(each, options, removed, is_local=is_local)
        return True

    def _names_and_options(self, name: str, words: Sequence[Word]) -> tuple[list[str | Word], str, str]:
        """Return the names and assignments of a declaration, and the letters of its options after `-` and `+`."""
        names: list[str | Word] = []
        options = removed = ""
        for word in words:
            if ASSIGNMENT.match(word.source):
                names.append(word)
                continue
            for field in word.fields:
                if not names and re.fullmatch(r"-\w+", field):
                    options += field[1:]
                elif not names and re.fullmatch(r"\+\w+", field):
                    removed += field[1:]
                elif matched := ASSIGNMENT.match(field):
                    source = Word(field, word.line, matched[0] + protected(field[matched.end() :]), (field,))
                    names.append(source)
                else:
                    names += [field] if field != "--" else []
            if word.count_is_unknown:
                self.variables.forget([ALL_NAMES], f"may be set by `{name} {word.source}`", word.line)
        return names, options, removed

    def _declare_name(self, word: str | Word, options: str, removed: str, *, is_local: bool) -> None:
        """Give a variable its attributes and value."""
        variables, line = self.variables, self.reader.line
        name = re.split(r"\+?=|\[", word if isinstance(word, str) else word.expansion or word.source)[0]
        if not NAME.fullmatch(name):
            if MARKER.search(name):
                variables.forget([ALL_NAMES], f"may be set by `declare {variables.shown(name)}`", line)
            return
        if is_local and name not in variables.local_values[-1]:
            variables.local_values[-1][name] = (variables.values.get(name), variables.attributes.get(name, ""))
            variables.attributes.pop(name, None)
            variables.values[name] = ()
        if not set(options) <= set(ATTRIBUTES) or not set(removed) <= set("xilu"):
            self._forget_reference(name, word, options, removed)
            return
        kept = re.sub(
            f"[{removed}il]" if set("lu") & set(options) else f"[{removed} ]", "", variables.attributes.get(name, "")
        )
        added = "".join(option for option in options if option in "Ailu")
        if "A" in added and variables.values.get(name) and not variables.has(name, "A"):
            raise self.unsupported(f"declare -A {name}")
        variables.attributes[name] = "".join(sorted({*kept, *added}, key="Ailur".find))
        if "A" in added and name not in variables.values:
            variables.values[name] = ()
        if isinstance(word, Word):
            if word.items is not None and "A" in added:
                word = self._reread(word)
            self.assign(word)
        if "r" in options:
            variables.attributes[name] += "r"
        variables.exported |= {name} if "x" in options else set()
        variables.exported -= {name} if "x" in removed else set()

    def _reread(self, word: Word) -> Word:
        """Read `NAME=(…)` again, which has keys once the variable is an associative array."""
        if word.raw is None:
            return word
        with self.reader.inner_text(word.raw):
            return self.reader.read_word()

    def _forget_reference(self, name: str, word: str | Word, options: str, removed: str) -> None:
        """Make a variable unknown for good, and that to which `declare -n` makes it refer."""
        target = "" if isinstance(word, str) else word.text.partition("=")[2]
        names = {name, target} if NAME.fullmatch(target) or not target else {name, ALL_NAMES}
        names = {ALL_NAMES, name} if "n" in options and not target else names
        shown = "".join([f"-{options}" * bool(options), f"+{removed}" * bool(removed)])
        self.variables.forget(names - {""}, f"is declared with {shown}, which is not supported", self.reader.line)
        for each in names - {"", ALL_NAMES}:
            self.variables.attributes[each] = "n"

    def unset(self, fields: Sequence[str]) -> Status:
        """Apply `unset`."""
        variables = self.variables
        for field in fields:
            name, _, subscript = field.partition("[")
            if field.startswith("-"):
                continue
            if not NAME.fullmatch(name):
                unknown = variables.find_unknown(field)
                # a script that unsets what `env` lists rids itself of the variables of a scheduler
                of_env = unknown is not None and "$(env" in unknown.reason
                names = variables.inherited - {"HOME", "PATH", "PWD"} if of_env else {ALL_NAMES}
                variables.forget(names, f"may be unset by `unset {variables.shown(field)}`", self.reader.line)
            elif subscript:
                self._unset_element(name, subscript.removesuffix("]"))
            elif "-f" in fields or (variables.get(name) is None and name in variables.functions):
                variables.functions.pop(name, None)
            elif variables.has(name, "r"):
                raise self.unsupported(f"unset {name}")
            elif not variables.has(name, "n"):
                variables.values[name] = ()
                variables.attributes.pop(name, None)
                variables.exported -= {name}
        return True

    def _unset_element(self, name: str, subscript: str) -> None:
        parameters, is_associative = self.reader.parameters, self.variables.has(name, "A")
        key = parameters.subscript(name, subscript, is_associative=is_associative)
        if self.variables.is_unknown_array(name) or MARKER.search(key) or subscript in ("@", "*"):
            self.variables.forget([name], "is changed by `unset`", self.reader.line)
            return
        items = parameters.items_of(name)
        items.pop(key, None)
        self.variables.assign(name, array_of(items, is_associative=is_associative), self.reader.line)
