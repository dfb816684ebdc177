"""Small run scripts, run by bash with stub programs and read by the reader, to compare the arguments of the trainer."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from quintet.config.dialects.scripts.run_script import RunScript
from quintet.config.dialects.scripts.run_script_reader import read_run_script
from quintet.errors import ConfigError

MODULE = "verl.trainer.main_ppo"
TRAIN = f"python3 -m {MODULE}"
TIME_LIMIT = 5
FILES = {
    "data/a.parquet": "",
    "data/b.parquet": "",
    "one.txt": "",
    "env.sh": "BS=128\nONLY_THERE=o=1\nFIRST=$1\ngreet() { N=hello-$1; }\n",
    "fails.sh": "BS=64\nreturn 3\n",
    "inner.sh": f'E=${{E:-e}}0\n{TRAIN} in.a=${{A:-none}} in.e=$E in.n=$# "$@"\n',
}
"""Files in the directory of each script."""
STUB = """#!/bin/sh
printf '%s\\0' "$#" "$@" >> "{calls}"
"""
LAUNCHER = """#!/bin/sh
while [ $# -gt 0 ]; do
  case "$1" in
    python*) shift; exec python3 "$@" ;;
    -m) exec python3 "$@" ;;
  esac
  shift
done
"""
RUN_NAME = re.compile(r"^  (\S+:\d+(?::\d+)?)  ", re.MULTILINE)


@dataclass(frozen=True)
class Comparison:
    """What bash and the reader make of a script."""

    result: str
    """`equal`, `unknown` or `different`."""
    bash: tuple[tuple[str, ...], ...]
    """The arguments of each call of the trainer."""
    reader: str
    """The arguments that the reader gives, or its message."""

    @property
    def reason(self) -> str:
        """The first reason why something is not known."""
        lines = [line for line in self.reader.splitlines() if line and not line.startswith("'")]
        return lines[0] if lines else "a word that the trainer refuses"


class ScriptComparison:
    """Runs scripts with bash and reads them, in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.programs, self.calls = directory / "run", directory / "bin", directory / "calls"
        self.programs.mkdir(parents=True)
        for name in ("python3", "python"):
            self._add_program(name, STUB.format(calls=self.calls))
        for name in ("torchrun", "ray", "srun"):
            self._add_program(name, LAUNCHER)
        self.environment = {"HOME": "/home/me", "PATH": f"{self.programs}:/usr/bin:/bin"}

    def compare(self, text: str, arguments: Sequence[str] | None = None) -> Comparison:
        """Compare the calls that bash makes with those that the reader gives."""
        shutil.rmtree(self.directory, ignore_errors=True)
        for name, content in FILES.items():
            (self.directory / name).parent.mkdir(parents=True, exist_ok=True)
            (self.directory / name).write_text(content)
        script = self.directory / "run.sh"
        script.write_text(text)
        bash = self._run(script, arguments or ())
        before = Path.cwd()
        os.chdir(self.directory)
        try:
            result, shown = self._read(Path("run.sh"), arguments, bash)
        finally:
            os.chdir(before)
        return Comparison(result, tuple(bash), shown)

    def _add_program(self, name: str, text: str) -> None:
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def _run(self, script: Path, arguments: Sequence[str]) -> list[tuple[str, ...]]:
        self.calls.write_bytes(b"")
        process = subprocess.Popen(
            [shutil.which("bash") or "bash", "--norc", script.name, *arguments],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        limit = Timer(TIME_LIMIT, os.killpg, (process.pid, 9))
        limit.start()
        process.wait()
        _wait_for_group(process.pid)
        limit.cancel()
        calls = [call for call in _calls(self.calls.read_text()) if MODULE in call]
        return [call[call.index(MODULE) + 1 :] for call in calls]

    def _read(self, script: Path, arguments: Sequence[str] | None, bash: Sequence[tuple[str, ...]]) -> tuple[str, str]:
        try:
            run = read_run_script(script, self.environment, arguments)
        except ConfigError as error:
            names = RUN_NAME.findall(str(error)) if "trains " in str(error).splitlines()[0] else []
            if not names:
                return _result_of_refusal(error, bash), str(error)
            try:
                read = [read_run_script(Path(name), self.environment, arguments) for name in names]
            except ConfigError as inner:
                return _result_of_refusal(inner, bash), str(inner)
            if not any(word.startswith("in.") for each in read for word in each.words):
                # the calls of the script itself count
                bash = [call for call in bash if not "".join(call[:1]).startswith("in.")]
            results = {self._result(each, bash) for each in read}
            if not any(each.conditions for each in read) and len({*bash}) != len({each.words for each in read}):
                results |= {"unknown" if any(each.missing for each in read) else "different"}
            worst = next(each for each in ("different", "unknown", "equal") if each in results)
            return worst, "\n".join(map(_shown, read))
        return self._result(run, bash), _shown(run)

    def _result(self, run: RunScript, bash: Sequence[tuple[str, ...]]) -> str:
        if not any(word.startswith("in.") for word in run.words):
            bash = [call for call in bash if not "".join(call[:1]).startswith("in.")]
        if run.words in bash and not run.missing:
            return "equal"
        if run.missing and (not bash or any(_agree(run, call) for call in bash)):
            return "unknown"
        return "unknown" if run.conditions else "different"


def _calls(text: str) -> Iterator[tuple[str, ...]]:
    fields = text.split("\0")[:-1]
    while fields:
        count = int(fields[0])
        yield tuple(fields[1 : count + 1])
        del fields[: count + 1]


def _wait_for_group(group: int) -> None:
    """Wait for the programs that a script has left in the background."""
    for _ in range(1000):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.002)


def _result_of_refusal(error: ConfigError, bash: Sequence[tuple[str, ...]]) -> str:
    """Return the result for a script that is refused: some refusals are a claim about what bash does."""
    message = str(error)
    if not bash:
        return "equal" if "runs no known trainer" in message or "ends here" in message else "unknown"
    is_certain = "; at " not in message and "which cannot be followed" not in message
    if ("runs no known trainer" in message and is_certain) or "ends here before it trains" in message:
        return "different"
    if "is not an override" in message:
        return "equal" if any(error.value in call for call in bash) else "different"
    return "unknown" if re.search(r"run\.sh:\d+|\(line \d+\)", message) else "different"


def _agree(run: RunScript, call: tuple[str, ...]) -> bool:
    """Return whether a call has the known words of a script in their order, and the missing keys."""
    keys, known = {value.key for value in run.missing}, [*run.words]
    is_after_missing = False
    for word in call:
        if known and word == known[0]:
            known, is_after_missing = known[1:], False
        elif word.partition("=")[0].lstrip("+~") in keys:
            is_after_missing = True  # and other words, if the value has blanks
        elif not is_after_missing:
            return False
    return not known


def _shown(run: RunScript) -> str:
    return "\n".join([" ".join(map(repr, run.words)), *map(str, run.missing), *run.conditions])
