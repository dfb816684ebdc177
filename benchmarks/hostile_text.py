"""Mutations of configurations: YAML files, run scripts, lists of overrides, and what lies beside them."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

SECRET = "the-secret-of-this-machine"
EVIL_MODULE = "evil_module"
LEVELS = 400


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Files outside of a configuration's directory that it must not read, and what lies in its directory."""

    outside: Path

    @classmethod
    def create(cls, outside: Path) -> Surroundings:
        outside.mkdir(parents=True)
        (outside / "secret.yaml").write_text(f"seed: 7\nname: {SECRET}\n")
        (outside / "secret.sh").write_text(f"export NAME={SECRET}\n")
        (outside / f"{EVIL_MODULE}.py").write_text("open('code-was-executed', 'w')\n")
        return cls(outside)

    def contents(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(self.outside.iterdir())}

    def prepare(self, directory: Path) -> None:
        """Put a module, links, a pipe and a file of zeros beside a configuration."""
        (directory / f"{EVIL_MODULE}.py").write_text("open('code-was-executed', 'w')\n")
        (directory / "link.yaml").symlink_to(self.outside / "secret.yaml")
        (directory / "link.sh").symlink_to(self.outside / "secret.sh")
        (directory / "linked").symlink_to(self.outside)
        os.mkfifo(directory / "pipe.yaml")
        (directory / "zero.yaml").symlink_to("/dev/zero")
        with (directory / "sparse.yaml").open("wb") as file:
            file.truncate(1 << 40)


def names_outside(draws: random.Random) -> str:
    """Return the name of a file that a configuration must not read."""
    return draws.choice(
        (
            "link",
            "linked/secret",
            "pipe",
            "zero",
            "sparse",
            "../../outside/secret",
            "/etc/passwd",
            "../" * 30 + "etc/passwd",
        )
    )


def scalar(draws: random.Random) -> str:
    """Return a value as YAML writes it: half of them such as users write."""
    if draws.random() < 0.5:
        return draws.choice(("0", "1", "2", "-1", "0.5", "1e-6", "true", "null", "x", "[1, 2]", "{a: 1}", "''"))
    return draws.choice(SCALARS)(draws)


SCALARS: tuple[Callable[[random.Random], str], ...] = (
    lambda d: "9" * d.choice((20, 400, 5000)),
    lambda d: f"-{'9' * d.choice((20, 400))}",
    lambda d: d.choice((".nan", ".inf", "-.inf", "1e999", "-1e-999", "0x" + "f" * 300, "1_0" * 50, "0o7", "190:20:30")),
    lambda d: d.choice(("null", "~", "''", "[]", "{}", "true", "no", "'\\0'", '"\\0"', '"\\uD800"', '"\\U0010FFFF"')),
    lambda d: d.choice(("'\u202e\u200b\ufeff'", "'\u2028'", '"\\x1b[2J\\x1b]0;x\\x07"', "'😀'", "'ſ'", "'İ'")),
    lambda d: d.choice(("${oc.env:HOME}", "${oc.env:SECRET,${oc.env:PATH}}", "${oc.decode:${oc.env:HOME}}")),
    lambda d: d.choice(("${oc.create:{a: 1}}", "${oc.dict.keys:a}", "${oc.select:a,b}", "${oc.deprecated:a}")),
    lambda d: d.choice(("${seed}", "${.}", "${..}", "${...name}", "${a.b.c[0]}", "${trainer}", "${" * LEVELS)),
    lambda d: "${" * d.choice((3, LEVELS)) + "a" + "}" * d.choice((3, LEVELS)),
    lambda d: d.choice(
        ('${eval:\'__import__("os").system("touch code-was-executed")\'}', "${hydra:runtime.cwd}", "${now:%Y}")
    ),
    lambda d: d.choice((f"{EVIL_MODULE}:Env", f"./{EVIL_MODULE}.py:Env", f"{EVIL_MODULE}.Env", f"pkg://{EVIL_MODULE}")),
    lambda d: f"{names_outside(d)}{d.choice(('', '.yaml'))}",
    lambda d: d.choice(
        ("!!python/object/apply:os.system ['touch code-was-executed']", f"!!python/name:{EVIL_MODULE}.x")
    ),
    lambda d: d.choice(
        (f"!!python/module:{EVIL_MODULE}", "!!binary aGk=", "!include link.yaml", "!!set {a, b}", "!x y")
    ),
    lambda d: "[" * d.choice((40, LEVELS, 20_000)) + "]" * d.choice((0, LEVELS)),
    lambda d: "{a: " * d.choice((40, LEVELS, 5000)) + "1" + "}" * LEVELS,
    lambda d: f"'{'x' * d.choice((1000, 200_000, 300_000))}'",
    lambda d: f"[{', '.join(['0'] * d.choice((1000, 9000, 60_000)))}]",
    lambda d: f"[*[x], {'a: b: c'}]",
    lambda d: "&a [*a, *a]",
    lambda d: "&a {b: *a}",
    lambda d: "*missing",
)
YAML_LINES: tuple[Callable[[random.Random], str], ...] = (
    lambda d: f"defaults: [{names_outside(d)}, _self_]",
    lambda d: f"defaults:\n  - {names_outside(d)}\n  - override /{names_outside(d)}: x\n  - _self_",
    lambda d: f"defaults: [{{{names_outside(d)}@actor: y}}, optional {names_outside(d)}]",
    lambda d: f"hydra:\n  searchpath: [file://{names_outside(d)}, pkg://{EVIL_MODULE}]",
    lambda d: f"external_libs: [{EVIL_MODULE}]",
    lambda d: f"env: {{name: custom, path: {EVIL_MODULE}.py:Env}}",
    lambda d: f"reward: {{function: {EVIL_MODULE}.py:score}}",
    lambda d: f"custom_reward_function: {{path: {EVIL_MODULE}.py, name: score}}",
    lambda d: f"policy: {{path: {names_outside(d)}, preset: null, trust_remote_code: true}}",
    lambda d: f"_target_: {EVIL_MODULE}.Env",
    lambda d: "a: &a [x]\n" + "\n".join(f"{n}: &{n} [{', '.join([f'*{m}'] * 9)}]" for m, n in pairwise("abcdefghi")),
    lambda d: "a: ${b}\nb: ${c}\nc: ${a}",
    lambda d: "a: ${b}${b}\n" + "\n".join(f"{n}: ${{{m}}}${{{m}}}" for n, m in pairwise("bcdefghijklmnopqrstuvwxyz")),
    lambda d: "<<: [*x, {a: 1}]\nx: &x {b: 2}",
    lambda d: "<<: 7",
    lambda d: "? [a, b]\n: c\n? {d: e}\n: f",
    lambda d: "--- a\n--- b\n...\n%YAML 9.9",
    lambda d: "%TAG ! tag:evil,2000:\n---",
    lambda d: "\t- tab: 1",
    lambda d: (
        f"{d.choice(('seed', 'name', 'actor', 'trainer.total_epochs', 'null', '1', '~', '2020-01-01'))}: {scalar(d)}"
    ),
    lambda d: "".join(f"{'  ' * n}k{n}:\n" for n in range(d.choice((31, 33, LEVELS)))),
    lambda d: f"{'k' * d.choice((100, 100_000))}: 1",
    lambda d: ".".join(["a"] * d.choice((10, 5000))) + ": 1",
)
SHELL_LINES: tuple[Callable[[random.Random], str], ...] = (
    lambda d: "while true; do :; done",
    lambda d: "while [ 1 -eq 1 ]; do X=$X$X; done",
    lambda d: "until false; do echo x; done",
    lambda d: "for ((i=0; ; i++)); do X=$i; done",
    lambda d: "f() { f; }; f",
    lambda d: "f() { g; g; }; g() { f; f; }; f",
    lambda d: ":(){ :|:& };:",
    lambda d: f"X={{1..{d.choice((10**4, 10**9, 10**30))}}}",
    lambda d: f'for i in {{1..{d.choice((10**4, 10**9))}}}; do ARGS="$ARGS a=$i"; done',
    lambda d: "echo " + "{a,b}" * d.choice((5, 30, 200)),
    lambda d: f"X=$(({d.choice(('9**9**9', '1<<100000000', '1/0', 'x[x[x]]', '08', '1e9', 'a=b,b=a'))}))",
    lambda d: "x=x; echo $((x))",
    lambda d: f"source {names_outside(d)}.sh",
    lambda d: f". {d.choice(('link.sh', 'linked/secret.sh', 'pipe.yaml', '/dev/zero', '/dev/stdin'))}",
    lambda d: f"export NAME=$(cat {d.choice(('link.sh', 'linked/secret.sh', '/etc/passwd', '/dev/zero'))})",
    lambda d: "NAME=`touch code-was-executed`",
    lambda d: f'python3 -c "import {EVIL_MODULE}"',
    lambda d: "eval \"$(printf 'touch code-was-executed')\"",
    lambda d: "read X < pipe.yaml",
    lambda d: "mapfile -t LINES < /dev/zero",
    lambda d: "exec 3<>/dev/tcp/127.0.0.1/9; cat <&3",
    lambda d: "cat <<EOF > code-was-executed\n$(cat link.sh)\nEOF",
    lambda d: "cat <<A <<B\n1\nA\n2",
    lambda d: "bash <<'EOF'\ntouch code-was-executed\nEOF",
    lambda d: "$(" * d.choice((5, LEVELS, 20_000)),
    lambda d: "(" * d.choice((5, LEVELS, 20_000)) + ")" * LEVELS,
    lambda d: "if true; then " * d.choice((5, LEVELS)),
    lambda d: "{ " * LEVELS + "}; " * LEVELS,
    lambda d: "X=${" * d.choice((3, LEVELS)) + "X" + "}" * d.choice((3, LEVELS)),
    lambda d: "X=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!; [[ $X =~ ^(a+)+$ ]] && echo x",
    lambda d: "shopt -s extglob; X=aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab; X=${X//+(+(a))c/}; case $X in +(+(a))c) ;; esac",
    lambda d: "printf -v X '%*s' 999999999 x",
    lambda d: "X=${X:0:999999999}; X=${X:-1:-1}; X=${!X}; X=${X@P}",
    lambda d: "X[999999999999]=1; X=(${X[@]} ${X[@]})",
    lambda d: "X=x; for i in 1 2 3 4 5 6 7 8 9; do for j in 1 2 3 4 5 6 7 8 9; do X=$X$X; done; done",
    lambda d: "set -- $(seq 1 1000000); shift 999999",
    lambda d: "trap 'touch code-was-executed' EXIT DEBUG",
    lambda d: "declare -n X=X; echo $X; unset PATH; export BASH_ENV=link.sh PYTHONPATH=linked",
    lambda d: "alias python3='touch code-was-executed'",
    lambda d: f"export {d.choice(('HOME', 'MODEL_PATH', 'X'))}='\x00\x1b[2J\u202e'",
    lambda d: d.choice(("'", '"', "`", "$((", "<<EOF", "\\", "case x in", "done", "}", "fi", ";;", "&&", "|| |")),
    lambda d: f"X={'x' * d.choice((1000, 300_000))}",
)


def _override(draws: random.Random) -> str:
    key = draws.choice(
        ("trainer.total_epochs", "+a.b", "++c", "~trainer", "data.train_files", "actor", "a" * 3000, "=", "a..b")
    )
    return f"{key}={scalar(draws)}"


def _replace_value(lines: list[str], draws: random.Random) -> None:
    """Replace the value of a line, in any of the formats."""
    candidates = [n for n, line in enumerate(lines) if re.search(r"[:=]", line)]
    if candidates:
        number = draws.choice(candidates)
        head = re.match(r".*?[:=]\s*", lines[number])
        lines[number] = f"{head[0] if head else ''}{scalar(draws)}"


def _insert(lines: list[str], draws: random.Random, kinds: tuple[Callable[[random.Random], str], ...]) -> None:
    lines.insert(draws.choice((0, len(lines), draws.randint(0, len(lines)))), draws.choice(kinds)(draws))


def _duplicate(lines: list[str], draws: random.Random) -> None:
    first = draws.randrange(len(lines) + 1)
    lines[first:first] = lines[first : first + draws.randint(1, 40)] * draws.choice((1, 2, 50))


def _remove(lines: list[str], draws: random.Random) -> None:
    first = draws.randrange(len(lines) + 1)
    del lines[first : first + draws.randint(1, 10)]


def _indent(lines: list[str], draws: random.Random) -> None:
    if lines:
        lines[draws.randrange(len(lines))] = " " * draws.randint(0, 40) + lines[draws.randrange(len(lines))].strip()


def _flip(lines: list[str], draws: random.Random) -> None:
    """Change some characters."""
    text = list("\n".join(lines))
    for _ in range(draws.choice((1, 10, 200))):
        if text:
            text[draws.randrange(len(text))] = chr(draws.choice((0, 9, 27, 34, 36, 39, 58, 92, 123, 125, 233, 0xD7FF)))
    lines[:] = "".join(text).split("\n")


def _swap(path: Path, draws: random.Random) -> None:
    """Put something else in place of the file."""
    path.unlink()
    choice = draws.randrange(5)
    if choice == 0:
        os.mkfifo(path)
    elif choice == 1:
        path.symlink_to(draws.choice(("/dev/zero", "/dev/stdin", path.name, "missing")))
    elif choice == 2:
        path.mkdir()
    elif choice == 3:
        path.write_bytes(bytes(draws.randrange(256) for _ in range(draws.choice((0, 1, 1000)))))
    else:
        path.write_bytes(draws.choice((b"\xff\xfe", b"\xef\xbb\xbf", b"#!/bin/sh\x00")) + b"a: 1\n" * 10)


TEXT_MUTATIONS: Mapping[str, Callable[[list[str], random.Random], None]] = {
    "value": _replace_value,
    "yaml line": lambda lines, draws: _insert(lines, draws, YAML_LINES),
    "shell line": lambda lines, draws: _insert(lines, draws, SHELL_LINES),
    "override": lambda lines, draws: _insert(lines, draws, (_override,)),
    "duplicate": _duplicate,
    "remove": _remove,
    "indent": _indent,
    "flip": _flip,
}
FITTING = {".sh": ("shell line", "override"), ".txt": ("override",), ".yaml": ("yaml line",)}
"""Mutations that are tried more often in a file."""


def mutate(path: Path, draws: random.Random) -> str:
    """Change a configuration, or replace it; return the name of the mutation."""
    is_plain = path.is_file() and not path.is_symlink()
    if not is_plain or draws.random() < 0.02:
        if is_plain:
            _swap(path, draws)
        return "file"
    fitting = FITTING.get(path.suffix, ())
    name = draws.choice([*TEXT_MUTATIONS, *("value",) * 4, *fitting * 4])
    lines = path.read_text(errors="surrogateescape").split("\n")
    TEXT_MUTATIONS[name](lines, draws)
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    return name
