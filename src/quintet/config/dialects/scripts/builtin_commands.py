"""Builtin commands of bash: assignments, `declare`, `read`, `echo`, `cd`, `set` and the like."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence

from quintet.config.dialects.scripts.assignments import NAME, Assignments
from quintet.config.dialects.scripts.command_lists import CommandListReader
from quintet.config.dialects.scripts.conditional_expressions import ConditionalExpressions
from quintet.config.dialects.scripts.conditions import Status
from quintet.config.dialects.scripts.input_commands import InputCommands
from quintet.config.dialects.scripts.variables import ALL_NAMES, DIRECTORY, INTEGER_LITERAL, MARKER
from quintet.config.dialects.scripts.word_reader import Word

DECLARATIONS = ("export", "local", "declare", "typeset", "readonly")
SET_OPTIONS = {
    "errexit": "e",
    "nounset": "u",
    "noglob": "f",
    "allexport": "a",
    "pipefail": "pipefail",
    "braceexpand": "B",
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
        self.assignments, self.input = Assignments(reader), InputCommands(reader)
        self.conditions = ConditionalExpressions(reader)

    def run(self, name: str, words: Sequence[Word]) -> Status:
        """Apply one of `BUILT_INS` to its arguments.

        Raises:
            ConfigError: it is not supported.
        """
        fields = [field for word in words for field in word.fields]
        match name:
            case "[[" | "[" | "test":
                return self._condition(name, words, fields)
            case "true" | ":" | "false":
                return name != "false"
            case "let":
                return [self.assignments.assign_arithmetic(field, field) for field in fields][-1] if fields else False
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

    def _condition(self, name: str, words: Sequence[Word], fields: Sequence[str]) -> Status:
        if name == "[[":
            return self.conditions.conditional(words[:-1])
        if name == "[":
            return self.conditions.test(words[:-1]) if fields[-1:] == ["]"] else False
        return self.conditions.test(words)

    def _set_variables(self, name: str, words: Sequence[Word], fields: list[str]) -> Status:
        """Apply a builtin command that changes variables or options, or prints."""
        match name:
            case "echo":
                self._echo(fields)
            case "printf":
                self._printf(fields)
            case "read" | "mapfile" | "readarray" | "getopts":
                return self.input.run(name, fields)
            case "unset":
                return self.assignments.unset(fields)
            case "shift":
                return self._shift(fields)
            case "set":
                self._set(words, fields)
            case "shopt":
                return self._shopt(fields)
            case "trap":
                self._trap(fields)
            case _:
                return self.assignments.declare(name, words)
        return True

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

    def _shift(self, fields: Sequence[str]) -> Status:
        arguments = self.variables.arguments
        count = int(fields[0]) if fields and fields[0].isdecimal() else 1
        if arguments is None or self.variables.is_unknown_count(arguments):
            return None
        if len(fields) > 1 or (fields and not fields[0].isdecimal()):
            raise self.assignments.unsupported(f"shift {' '.join(map(self.variables.shown, fields))}")
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
            raise self.assignments.unsupported(f"set {sign}{option if len(option) == 1 else f'o {option}'}")
        self.variables.options -= {option, f"?{option}"}
        self.variables.options |= {option} if sign == "-" else set()

    def _shopt(self, fields: Sequence[str]) -> Status:
        if not fields or fields[0] not in ("-s", "-u") or len(fields) == 1:
            self.reader.print_text(None)
            return None
        for option in fields[1:]:
            if option not in SHOPT_OPTIONS:
                raise self.assignments.unsupported(f"shopt {fields[0]} {option}")
            name = SHOPT_OPTIONS[option]
            self.variables.options -= {name, f"?{name}"}
            self.variables.options |= {name} if fields[0] == "-s" and name != "x" else set()
        return True

    def _trap(self, fields: Sequence[str]) -> None:
        action, *signals = [field for field in fields if field != "--"] or ["-"]
        if not signals or action in ("", "-") or action.startswith("-"):
            return
        is_run = {"DEBUG", "ERR", "RETURN"} & {signal.removeprefix("SIG").upper() for signal in signals}
        is_known = "\ue000" not in action and not is_run
        if not (is_known or HARMLESS_ACTION.fullmatch(action)) or re.search("python|torchrun", action):
            raise self.assignments.unsupported(f"trap '{self.variables.shown(action)}' {' '.join(signals)}")


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
