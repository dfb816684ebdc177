"""Builtin commands of bash: assignments, `declare`, `read`, `echo`, `cd`, `set` and the like."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path

from quintet.config.dialects.scripts.arithmetic import assigned_names
from quintet.config.dialects.scripts.command_lists import CommandListReader
from quintet.config.dialects.scripts.conditional_expressions import ConditionalExpressions
from quintet.config.dialects.scripts.conditions import Status
from quintet.config.dialects.scripts.patterns import EMPTY_ITEM, protected, unprotected
from quintet.config.dialects.scripts.variables import (
    DIRECTORY,
    ALL_NAMES,
    INTEGER_LITERAL,
    MARKER,
    PROMPTED,
    SparseArray,
    array_of,
)
from quintet.config.dialects.scripts.word_reader import Word
from quintet.errors import ConfigError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[(?:[^\]\[]|\[[^\]]*\])*\])?(\+?)=")
NAME = re.compile(r"[A-Za-z_]\w*")
READ_OPTIONS = re.compile(r"-[ers]*(?P<option>[adinNptu])?(?P<value>.*)")
DECLARATIONS = ("export", "local", "declare", "typeset", "readonly")
ATTRIBUTES = "aAgilrux"
"""Options of `declare` that are supported."""
SET_OPTIONS = {
    **{"errexit": "e", "nounset": "u", "noglob": "f", "allexport": "a", "pipefail": "pipefail", "braceexpand": "B"},
    **dict.fromkeys(("xtrace", "verbose", "errtrace", "functrace", "hashall", "monitor", "notify", "noclobber"), "x"),
    **dict.fromkeys(("histexpand", "history", "emacs", "vi", "ignoreeof", "interactive-comments", "physical"), "x"),
}
HARMLESS_SET_LETTERS = "xvhmbCEHPT"
SHOPT_OPTIONS = {
    **dict.fromkeys(("dotglob", "globstar", "nocaseglob", "failglob", "globasciiranges"), "glob"),
    **dict.fromkeys(("checkwinsize", "cmdhist", "histappend", "huponexit", "extglob", "progcomp", "promptvars"), "x"),
    "nullglob": "nullglob",
}
WITHOUT_EFFECT = frozenset(
    (
        *("alias", "bg", "bind", "caller", "compgen", "complete", "compopt", "dirs", "disown", "fg", "hash", "help"),
        *("history", "jobs", "kill", "times", "type", "ulimit", "umask", "unalias", "wait", "fc", "logout"),
    )
)
"""Builtin commands that set nothing that a trainer's arguments depend on."""
UNSUPPORTED_BUILT_INS = ("enable", "suspend")
BUILT_INS = WITHOUT_EFFECT | {
    *("[", "[[", "test", *DECLARATIONS, "cd", "pushd", "popd", "pwd", "read", "mapfile", "readarray", "unset"),
    *("true", "false", ":", "echo", "printf", "shift", "set", "shopt", "trap", "getopts", "let", "source", "."),
    *("eval", *UNSUPPORTED_BUILT_INS),
}
HARMLESS_ACTION = re.compile(r"\s*(?:(?:echo|printf|exit|kill|rm|wait|return|:|true)\b[^=;&|]*[;&|\s]*)*")
"""Action of `trap` that sets no variable."""
PRINTF = re.compile(r"%(?P<width>0?\d{0,3})(?P<kind>[sdi])|%%|\\[nt\\]|[^%\\]+")


class BuiltIns:
    """Applies builtin commands to the variables of a reader."""

    def __init__(self, reader: CommandListReader) -> None:
        self.reader, self.variables = reader, reader.variables
        self.conditions = ConditionalExpressions(reader)

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

    def run(self, name: str, words: Sequence[Word]) -> Status:
        """Apply one of `BUILT_INS` to its arguments.

        Raises:
            ConfigError: it is not supported.
        """
        fields = [field for word in words for field in word.fields]
        match name:
            case "[[":
                return self.conditions.conditional(words[:-1])
            case "[":
                return self.conditions.test(words[:-1]) if fields[-1:] == ["]"] else False
            case "test":
                return self.conditions.test(words)
            case "true" | ":":
                return True
            case "false":
                return False
            case "let":
                return [self.assign_arithmetic(field, field) for field in fields][-1] if fields else False
            case "cd" | "pushd" | "popd":
                return self._change_directory(name, fields)
            case "pwd":
                self.reader.print_text(f"{self.variables.scalar(DIRECTORY)}\n")
                return True
        if name in UNSUPPORTED_BUILT_INS:
            raise self.reader.error(f"`{name}` is not supported", "write the script without it", self.reader.line)
        if name in WITHOUT_EFFECT:
            self.reader.print_text(None)
            return True if name == "alias" else None
        return self._set_variables(name, words, fields)

    def _set_variables(self, name: str, words: Sequence[Word], fields: list[str]) -> Status:
        """Apply a builtin command that changes variables or options, or prints."""
        match name:
            case "echo":
                self._echo(fields)
            case "printf":
                self._printf(fields)
            case "read":
                return self._read(fields)
            case "mapfile" | "readarray":
                names = [field for field in fields if NAME.fullmatch(field)]
                self.variables.forget(names[-1:] or ["MAPFILE"], "has the lines of a file", self.reader.line)
                return None
            case "unset":
                return self._unset(fields)
            case "shift":
                return self._shift(fields)
            case "set":
                self._set(words, fields)
            case "shopt":
                return self._shopt(fields)
            case "trap":
                self._trap(fields)
            case "getopts":
                return self._getopts(fields)
            case _:
                return self._declare(name, words)
        return True

    def _unsupported(self, construct: str) -> ConfigError:
        message = f"`{construct}` is not supported"
        return self.reader.error(message, "write the script without it", self.reader.line)

    def _declare(self, name: str, words: Sequence[Word]) -> Status:
        """Apply `export`, `declare`, `local`, `typeset` or `readonly`."""
        if name == "local" and not self.variables.local_values:
            return False
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
        kept = re.sub(f"[{removed}il]" if set("lu") & set(options) else f"[{removed} ]", "", variables.attributes.get(name, ""))
        added = "".join(option for option in options if option in "Ailu")
        if "A" in added and variables.values.get(name) and not variables.has(name, "A"):
            raise self._unsupported(f"declare -A {name}")
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

    def _echo(self, fields: list[str]) -> None:
        options = ""
        while fields and re.fullmatch(r"-[neE]+", fields[0]):
            options += fields.pop(0)[1:]
        text = " ".join(fields)
        is_known = "e" not in options or "\\" not in text
        self.reader.print_text(text + ("" if "n" in options else "\n") if is_known else None)

    def _printf(self, fields: list[str]) -> None:
        name = fields[1] if fields[:1] == ["-v"] and len(fields) > 1 else ""
        rest = fields[2:] if name else fields
        rest = rest[1:] if rest[:1] == ["--"] else rest
        text = _formatted(rest[0], rest[1:]) if rest else None
        if not name:
            self.reader.print_text(text)
        elif text is None or not NAME.fullmatch(name):
            names = [name] if NAME.fullmatch(name) else [name.partition("[")[0] if NAME.match(name) else ALL_NAMES]
            self.variables.forget(names, "is set by `printf -v`, whose format is not supported", self.reader.line)
        else:
            self.variables.assign(name, (text,), self.reader.line)

    def is_command(self, fields: Sequence[str]) -> Status:
        """Return whether a program, function or builtin of the name in `command -v NAME` is there, and print where."""
        self.reader.print_text(None)
        match fields:
            case ["-v" | "-V", name] if not MARKER.search(name):
                path = self.variables.scalar("PATH")
                if name in BUILT_INS or name in self.variables.functions:
                    return True
                return None if MARKER.search(path or "") else shutil.which(name, path=path) is not None
        return None

    def _change_directory(self, name: str, fields: Sequence[str]) -> Status:
        """Apply `cd`, `pushd` and `popd`; of a directory that does not exist on this machine, the result is unknown."""
        variables, line = self.variables, self.reader.line
        arguments = [field for field in fields if field not in ("-P", "-L", "-e", "--")]
        before, stack = variables.scalar(DIRECTORY) or ".", variables.values.get("DIRSTACK", ())
        if name == "popd" and not arguments and stack:
            path, stack = stack[0], stack[1:]
        else:
            target = (arguments or [variables.scalar("HOME") or ""])[0]
            target = variables.scalar("OLDPWD") or "" if target == "-" and name == "cd" else target
            path = os.path.normpath(os.path.join(before, target)) if target else ""
            stack = (before, *stack) if name == "pushd" else stack
        is_known = len(arguments) < 2 and path and not MARKER.search(path) and variables.get("CDPATH") is None
        is_known = is_known and (bool(arguments) or name != "pushd") and not re.match(r"[-+]\d", "".join(arguments))
        if name == "pushd" or name == "popd" or "-" in arguments:
            self.reader.print_text(None)
        if not is_known or not os.path.isdir(path):
            reason = f"depends on whether `{name} {' '.join(map(variables.shown, fields))}` succeeds"
            variables.forget([DIRECTORY, "PWD", "OLDPWD", "DIRSTACK"], reason, line)
            self.reader.unknown_in_condition = f"{path or name} is no directory on this machine"
            return None
        variables.assign("OLDPWD", (before,), line)
        variables.assign("PWD", (path,), line)
        variables.values[DIRECTORY] = (path,)
        variables.values["DIRSTACK"] = stack
        return True

    def _unset(self, fields: Sequence[str]) -> Status:
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
                raise self._unsupported(f"unset {name}")
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

    def _shift(self, fields: Sequence[str]) -> Status:
        arguments = self.variables.arguments
        count = int(fields[0]) if fields and fields[0].isdecimal() else 1
        if arguments is None or self.variables.is_unknown_count(arguments):
            return None
        if len(fields) > 1 or (fields and not fields[0].isdecimal()):
            raise self._unsupported(f"shift {' '.join(map(self.variables.shown, fields))}")
        if count > len(arguments):
            return False
        self.variables.set_arguments(arguments[count:])
        return True

    def _set(self, words: Sequence[Word], fields: list[str]) -> None:
        """Apply options, and the arguments after them."""
        if any(word.count_is_unknown for word in words):
            self.variables.forget(["@"], "is set by `set` to words that are not known", self.reader.line)
            return
        rest = list(fields)
        while rest and re.fullmatch(r"[-+][A-Za-z]+", rest[0]):
            sign, letters = rest[0][0], rest.pop(0)[1:]
            for letter in letters:
                if letter == "o":
                    self._set_option(SET_OPTIONS.get(rest[0], rest.pop(0)) if rest else "x", sign)
                else:
                    self._set_option(letter, sign)
        if not rest and fields:
            return
        if rest[:1] in (["--"], ["-"]):
            del rest[0]
        elif not rest:
            self.reader.print_text(None)
            return
        self.variables.set_arguments(tuple(rest))

    def _set_option(self, option: str, sign: str) -> None:
        if option in HARMLESS_SET_LETTERS or (option == "B" and sign == "-"):
            return
        if option not in ("e", "u", "f", "a", "pipefail"):
            raise self._unsupported(f"set {sign}{option if len(option) == 1 else f'o {option}'}")
        self.variables.options -= {option, f"?{option}"}
        self.variables.options |= {option} if sign == "-" else set()

    def _shopt(self, fields: Sequence[str]) -> Status:
        if not fields or fields[0] not in ("-s", "-u") or len(fields) == 1:
            self.reader.print_text(None)
            return None
        for option in fields[1:]:
            if option not in SHOPT_OPTIONS:
                raise self._unsupported(f"shopt {fields[0]} {option}")
            name = SHOPT_OPTIONS[option]
            self.variables.options -= {name, f"?{name}"}
            self.variables.options |= {name} if fields[0] == "-s" and name != "x" else set()
        return True

    def _trap(self, fields: Sequence[str]) -> None:
        action, *signals = [field for field in fields if field != "--"] or ["-"]
        if not signals or action in ("", "-") or action.startswith("-"):
            return
        is_run = {"DEBUG", "ERR", "RETURN"} & {signal.removeprefix("SIG").upper() for signal in signals}
        if (is_run and not HARMLESS_ACTION.fullmatch(action)) or re.search("python|torchrun|\ue000", action):
            raise self._unsupported(f"trap '{self.variables.shown(action)}' {' '.join(signals)}")

    def _getopts(self, fields: Sequence[str]) -> Status:
        """Take the next option of the arguments, each of one letter."""
        variables, line = self.variables, self.reader.line
        names = [*fields[1:2], "OPTARG", "OPTIND"]
        arguments = tuple(fields[2:]) or variables.arguments or ()
        index = variables.values.get("OPTIND", ("1",))[0]
        is_known = len(fields) > 1 and NAME.fullmatch(fields[1]) and INTEGER_LITERAL.fullmatch(index)
        if not is_known or any(map(MARKER.search, arguments)):
            variables.forget([name for name in names if NAME.fullmatch(name)] + [ALL_NAMES] * (not is_known), "is set by `getopts`", line)
            return None
        position = int(index) - 1
        option = arguments[position] if position < len(arguments) else ""
        if not re.match(r"-[^-]", option):
            variables.assign(fields[1], ("?",), line)
            variables.assign("OPTIND", (str(position + 1 + (option == "--")),), line)
            return False
        takes_value = fields[0].partition(option[1])[2].startswith(":")
        value = option[2:] or "".join(arguments[position + 1 : position + 2])
        if option[1] not in fields[0].replace(":", "") or (option[2:] and not takes_value) or (takes_value and not value):
            variables.forget(names, f"is set by `getopts` to {option}, which is not supported", line)
            return None
        variables.assign(fields[1], (option[1],), line)
        variables.assign("OPTIND", (str(position + 2 + (takes_value and not option[2:])),), line)
        variables.assign("OPTARG", (value,) if takes_value else (), line)
        return True

    def _read(self, fields: list[str]) -> Status:
        """Read a line of the known input into variables, or make them unknown."""
        names: list[str] = []
        option_letters = ""
        while fields:
            field = fields.pop(0)
            option = READ_OPTIONS.fullmatch(field)
            if names or option is None:
                names.append(field)
                continue
            option_letters += field[1:] if not option["option"] else field[1 : field.index(option["option"]) + 1]
            if option["option"] not in (None, "a") and not option["value"]:
                del fields[:1]
        if any(not NAME.fullmatch(name) for name in names):
            names = [ALL_NAMES]
        is_array, names = "a" in option_letters, names or ["REPLY"]
        text, ifs = self.reader.stdin, self.variables.scalar("IFS")
        is_supported = text is not None and not set("dnNu") & set(option_letters) and ("r" in option_letters or "\\" not in text)
        parts = None
        if is_supported and text is not None and not MARKER.search(ifs or ""):
            parts = _split(text, " \t\n" if ifs is None else ifs, None if is_array else len(names))
        if parts is None:
            reason = PROMPTED if self.reader.is_prompted else "is read from a file or a program"
            self.variables.forget(names, reason, self.reader.line)
            return None
        values = _known_parts(parts)
        if is_array:
            unknown = next(filter(MARKER.search, values), None)
            items = tuple(values) if unknown is None else (self.variables.unknown_array(unknown),)
            self.variables.assign(names[0], items, self.reader.line)
        else:
            for name, value in zip_longest(names, values[: len(names)], fillvalue=values[-1] if any(map(MARKER.search, values)) else ""):
                self.variables.assign(name, (value,), self.reader.line)
        return bool(text) if not text or "\n" in text else None


def _formatted(form: str, arguments: Sequence[str]) -> str | None:
    """Return the output of `printf`; None for a format that is not supported."""
    parts = list(PRINTF.finditer(form))
    if "".join(part[0] for part in parts) != form or MARKER.search(form):
        return None
    taken = sum(part["kind"] is not None for part in parts)
    text, rest = "", list(arguments)
    while True:
        for part in parts:
            if part["kind"]:
                argument = rest.pop(0) if rest else ""
                if part["kind"] != "s" and argument and not INTEGER_LITERAL.fullmatch(argument):
                    return None
                argument = argument or "0" if part["kind"] != "s" else argument
                if part["width"] and (part["kind"] == "s" or MARKER.search(argument)):
                    return None
                text += f"{int(argument):{part['width']}d}" if part["width"] else argument
            else:
                text += {"%%": "%", "\\n": "\n", "\\t": "\t", "\\\\": "\\"}.get(part[0], part[0])
        if not rest or not taken:
            return text


def _known_parts(parts: Sequence[str]) -> list[str]:
    """Return the fields of a line with those from the first unknown one on unknown, since it may be several."""
    values: list[str] = []
    for part in parts:
        unknown = MARKER.search("".join([*values[-1:], part]))
        values.append(part if unknown is None else unknown[0])
    return values


def _split(text: str, separators: str, count: int | None) -> list[str] | None:
    """Return the fields of a line for `count` variables, of which the last one gets what is left; all if it is None.

    None for separators that are not supported.
    """
    line = text.split("\n")[0]
    if not separators:
        return [line]
    if not separators.strip(" \t\n"):
        line = line.strip(separators)
        parts = re.split(f"[{separators}]+", line, maxsplit=0 if count is None else count - 1) if count != 1 else [line]
        return parts if parts != [""] else []
    if len(separators) > 1:
        return None
    parts = line.split(separators)
    parts = parts[:-1] if parts[-1] == "" else parts
    return parts if count is None or len(parts) <= count else line.split(separators, count - 1)
