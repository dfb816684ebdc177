"""Which keys of its configuration a run reads: `python recorded_reads.py OUTPUT train CONFIG KEY=VALUE …`.

Each rank, also of a run with `--ray`, writes `OUTPUT.RANK.json` with the keys of the run and those that it read after
its checks. A key that only a check or an estimate reads is not read: it changes nothing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quintet.config.native.experiment import Experiment
from quintet.config.native.section import Section

__all__ = ["main"]

NO_EFFECT = ("quintet.config.checks", "quintet.config.plan.memory", "quintet.config.problems", "quintet.cli.choices")
NO_EFFECT += ("quintet.runtime.calls.remote_call",)
"""Modules whose reads change nothing in a run but its refusal, or pass a section on to the rank that reads it."""
FREE = object.__getattribute__
LAUNCHED = "--launched"
"""First argument of a rank that the launcher of Ray has started."""


class Recorder:
    """Notes which fields of an experiment, and of what is copied from it, are read."""

    def __init__(self) -> None:
        self.reads: dict[str, set[str]] = {}
        """Modules that read a key, by key."""
        self.unplaced: set[str] = set()
        """Fields, by class, that were read in sections of no experiment, such as those that a worker was sent."""
        self._prefixes: dict[int, str] = {}
        self._sections: list[Section] = []
        """Keeps sections alive, whose `id` must not be reused."""

    def install(self) -> None:
        """Watch the fields of all sections from now on."""
        recorder, copy, dump, dump_json = self, Section.model_copy, Section.model_dump, Section.model_dump_json

        def getattribute(section: Section, name: str) -> Any:
            value = FREE(section, name)
            if name in type(section).__pydantic_fields__:
                recorder._note(section, name, value, sys._getframe(1).f_globals.get("__name__", ""))
            return value

        def model_copy(section: Section, **arguments: Any) -> Section:
            copied = copy(section, **arguments)
            recorder._place(copied, recorder._prefix(section))
            return copied

        def dumped(original: Any) -> Any:
            def dump_section(section: Section, **arguments: Any) -> Any:
                caller = sys._getframe(1).f_globals.get("__name__", "")
                prefix = recorder._prefix(section)
                if prefix and not caller.startswith(NO_EFFECT):
                    for name in leaves(section):
                        recorder.reads.setdefault(f"{prefix}{name}", set()).add(caller)
                return original(section, **arguments)

            return dump_section

        Section.__getattribute__ = getattribute  # type: ignore[method-assign,assignment]
        Section.model_copy = model_copy  # type: ignore[method-assign,assignment]
        Section.model_dump = dumped(dump)  # type: ignore[method-assign]
        Section.model_dump_json = dumped(dump_json)  # type: ignore[method-assign]

    def _prefix(self, section: Section) -> str | None:
        return "" if type(section) is Experiment else self._prefixes.get(id(section))

    def _place(self, section: object, prefix: str | None) -> None:
        if isinstance(section, Section) and prefix:
            self._prefixes[id(section)] = prefix
            self._sections.append(section)

    def _note(self, section: Section, name: str, value: object, module: str) -> None:
        prefix = self._prefix(section)
        if prefix is None:
            if not module.startswith((*NO_EFFECT, "quintet.config.native.")):
                self.unplaced.add(f"{type(section).__name__}.{name}")
            return
        if isinstance(value, Section):
            self._place(value, f"{prefix}{name}.")
        elif isinstance(value, dict):
            for entry, part in value.items():
                self._place(part, f"{prefix}{name}.{entry}.")
        if not isinstance(value, Section) and not module.startswith(NO_EFFECT):
            self.reads.setdefault(f"{prefix}{name}", set()).add(module)


def leaves(section: Section, prefix: str = "") -> Iterator[str]:
    """Yield the keys of a section that are no sections themselves."""
    for name, value in FREE(section, "__dict__").items():
        parts = value.items() if isinstance(value, dict) else ()
        inner = {f"{name}.{entry}": part for entry, part in parts if isinstance(part, Section)}
        for key, part in (inner or {name: value}).items():
            if isinstance(part, Section):
                yield from leaves(part, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}"


def _separate(experiment: Experiment) -> Experiment:
    """Return the experiment with an object of its own for each section: two sections may share a default."""
    return Experiment.model_validate(experiment.model_dump())


def _record_launched_ranks(output: Path) -> None:
    """Have the launcher of Ray start this program in place of the command of a rank."""
    from quintet.runtime.ray_cluster import launcher

    command = launcher.RankCommand

    def recording(argv: list[str], *others: Any) -> launcher.RankCommand:
        start = argv.index("quintet.cli.launched_rank") + 1
        return command([sys.executable, __file__, str(output), LAUNCHED, *argv[start:]], *others)

    launcher.RankCommand = recording  # type: ignore[assignment,misc]


def main(output: Path, arguments: list[str]) -> int:
    """Run a command of Quintet and write the keys that it reads after it has composed its configuration."""
    from dataclasses import replace

    from quintet.cli import configuration, evaluate, generate, launched_rank, sft, train
    from quintet.cli.main import main as quintet

    is_launched = arguments[0] == LAUNCHED
    rank = os.environ.get("RANK", "0")  # a rank removes it from its environment
    if "--ray" in arguments:
        _record_launched_ranks(output)
    recorder, load = Recorder(), configuration.load_config
    keys: list[str] = []

    def load_config(*arguments: Any, **options: Any) -> Any:
        composed = load(*arguments, **options)
        composed = replace(composed, experiment=_separate(composed.experiment))
        keys.extend(leaves(composed.experiment))
        recorder.install()
        return composed

    for module in (train, sft, generate, evaluate):
        module.load_config = load_config  # type: ignore[attr-defined]
    sys.argv = ["quintet", *arguments[is_launched:]]
    status = 0
    try:
        (launched_rank.main if is_launched else quintet)()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(bool(end.code))
    reads = {key: sorted(modules) for key, modules in recorder.reads.items()}
    result = {"keys": keys, "reads": reads, "unplaced": sorted(recorder.unplaced)}
    if keys:
        output.with_suffix(f".{rank}.json").write_text(json.dumps(result, indent=1))
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
