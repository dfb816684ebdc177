"""Run scripts and lists of overrides: what they say to a framework's trainer, with the line of each word.

`python3 -m verl.trainer.main_ppo data.train_batch_size=8 …` in a shell script is read and never run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quintet.config.dialects.dialect import detect
from quintet.config.dialects.scripts.flow import Ran, ran
from quintet.config.dialects.scripts.values import Field, Open, Shell
from quintet.config.source import read_file, read_text
from quintet.errors import ConfigError, nearest

__all__ = ["OWN_FILES", "Missing", "Scripted", "read_words", "spoken_of"]

TRAINERS: Mapping[str, str] = {
    "verl.trainer.main_ppo": "verl",
    "verl.trainer.main_eval": "verl",
    "verl.trainer.fsdp_sft_trainer": "verl",
    "vagen.trainer.main_ppo": "vagen",
    "vagen.main_ppo": "vagen",
    "ragen.train": "ragen",
}
"""Modules whose words are read, each with the dialect of those."""
PROGRAMS: Mapping[str, str] = {
    r"train_embodied_agent|train_async|main_grpo": "rlinf",
    r"start_\w+_pipeline": "roll",
}
"""The same for programs that are called by the name of their file."""
RAGEN_SCRIPT = "train.sh"
PRINTING = {"echo", "printf", "cat", "tee"}
PYTHON = re.compile(r"(.*/)?(python[\d.]*|torchrun|accelerate|deepspeed)")
OWN_FILES: Mapping[str, Mapping[str, Any]] = {
    "ppo_trainer": {},
    "sft_trainer": {},
    "evaluation": {},
    "base": {},
    "ppo_megatron_trainer": {"actor_rollout_ref": {"actor": {"strategy": "megatron"}}},
}
"""Primary files that come with the frameworks: what they say otherwise than their reference."""
CONFIG_OPTIONS = {
    **dict.fromkeys(("--config-path", "-cp", "--config_path"), "path"),
    **dict.fromkeys(("--config-name", "-cn", "--config_name"), "name"),
}
OVERRIDE = re.compile(r"(\+{0,2}|~)([^\s=~+'\"][^\s='\"]*)=(.*)|~[^\s=]+", re.DOTALL)
LIST_LINE = re.compile(r"(\+{0,2}|~)[A-Za-z_][\w.@/:-]*\s*=.*|~[\w.@/:-]+", re.DOTALL)
YAML, SCRIPT = (".yaml", ".yml"), (".sh", ".bash")


@dataclass(frozen=True, slots=True)
class Missing:
    """An override whose value the script leaves to something that can't be known."""

    key: str
    place: str
    reason: str

    def __str__(self) -> str:
        return f"{self.key} ({self.place}): {self.reason}"


@dataclass(frozen=True, slots=True)
class Scripted:
    """What a file says: another file beneath, and overrides over it."""

    config: Path | None
    words: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    dialect: str | None = None
    """Where the script or the words tell it."""
    missing: tuple[Missing, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the script hands on to the program, for `${oc.env:…}`."""
    remarks: tuple[str, ...] = ()

    def over(self, overrides: Sequence[str]) -> list[str]:
        """Its words and then those of the command line.

        Raises:
            ConfigError: the value of a key can't be known, and the command line doesn't say it either.
        """
        said = {_key(word) for word in overrides}
        missing = [one for one in self.missing if one.key not in said]
        if missing:
            hint = f"say it on the command line: {' '.join(f'{one.key}=…' for one in missing)}"
            first = missing[0]
            raise ConfigError("\n".join(map(str, missing)), key=first.key, source=first.place, hint=hint)
        return [*self.words, *overrides]


@dataclass(slots=True)
class _Trainer:
    """A command that trains, and what is said to it."""

    module: str
    dialect: str
    words: tuple[Field, ...]
    line: int
    comments: tuple[int, ...]


def read_words(path: Path, environment: Mapping[str, str] | None = None) -> Scripted:
    """Read a run script, a list of overrides, or merely name a YAML file, whichever it is.

    Raises:
        ConfigError: the script runs no known trainer, or several; a word can't be understood.
        MachineError: the file is missing or can't be read.
    """
    if path.suffix in YAML:
        return Scripted(path)
    text = read_text(path).translate(dict.fromkeys([0, *range(0xE000, 0xE005)]))
    lines = list(_list_lines(text))
    if path.suffix not in SCRIPT and lines and all(LIST_LINE.fullmatch(line) for _, line in lines):
        return _list(path, lines)
    if path.suffix in SCRIPT or text.startswith("#!") or any(f"-m {module}" in text for module in TRAINERS):
        return _script(path, text, os.environ if environment is None else environment)
    return Scripted(path)


def _list_lines(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        bare = _uncommented(line).strip().removesuffix("\\").strip()
        if bare:
            yield number, bare


def _uncommented(line: str) -> str:
    """Without what follows a `#` that stands in no quotes."""
    quote = ""
    for place, letter in enumerate(line):
        if letter in "'\"" and quote in ("", letter):
            quote = "" if quote else letter
        elif letter == "#" and not quote and (place == 0 or line[place - 1].isspace()):
            return line[:place]
    return line


def _list(path: Path, lines: list[tuple[int, str]]) -> Scripted:
    for number, line in lines:
        if re.search(r"\s(\+{0,2}|~)[A-Za-z_]\w*(\.\w+)*=", re.sub(r"'[^']*'|\"[^\"]*\"|\[[^\]]*\]", "", line)):
            source = f"{path}:{number}"
            raise ConfigError(f"{source}: two overrides in a line", value=line, source=source, hint="write one a line")
    words = tuple(re.sub(r"\s*=\s*", "=", line, count=1) for _, line in lines)
    places = tuple(f"{path}:{number}" for number, _ in lines)
    dialect = next(iter(detect(spoken_of(words))), None)
    return Scripted(_beside(path) if dialect == "vagen" else None, words, places, dialect)


def spoken_of(words: Iterable[str]) -> dict[str, Any]:
    """Sections and keys that are spoken of, to tell the dialect by."""
    tree: dict[str, Any] = {}
    for word in words:
        place = tree
        for part in _key(word).split("."):
            place = place.setdefault(part, {})
    return tree


def _key(word: str) -> str:
    return word.partition("=")[0].strip().lstrip("+~")


def _beside(path: Path) -> Path | None:
    """VAGEN's file of worlds."""
    file = path.parent / "env_config.yaml"
    return file if file.is_file() else None


def _script(path: Path, text: str, environment: Mapping[str, str]) -> Scripted:
    shell = Shell(path, {"PWD": os.getcwd(), **environment})
    commands = list(_all_ran(text, shell))
    found = [trainer for command in commands for trainer in _trainers(command)]
    if len(found) != 1:
        raise _not_one(path, commands, found)
    return _Reading(path, shell, found[0]).scripted(_worlds(commands))


def _all_ran(text: str, shell: Shell) -> Iterator[Ran]:
    """Its commands, and those that stand in a word of one: `tmux send-keys "python3 -m …"`."""
    for command in ran(text, shell):
        if command.words[0].text in PRINTING:
            continue
        yield command
        inner = [word for word in command.words if re.search(r"\s-m\s+(verl|vagen|ragen)\.", word.text)]
        for word in inner:
            yield from ran(word.text, Shell(shell.path, shell.environment, {}, shell.left_open), word.line)


def _trainers(command: Ran) -> Iterator[_Trainer]:
    """What of a command is a trainer with its words: the first module or program in it that is one."""
    words = command.words
    by_python = False
    for place, word in enumerate(words):
        if (found := _dialect_of(words, place, by_python=by_python)) is not None:
            yield _Trainer(*found, words[place + 1 :], word.line, command.comments)
            return
        by_python = by_python or PYTHON.fullmatch(word.text) is not None


def _dialect_of(words: Sequence[Field], place: int, *, by_python: bool) -> tuple[str, str] | None:
    """The module and the dialect of a word that names a trainer."""
    text, before = words[place].text, words[place - 1].text if place else ""
    if before == "-m":
        return (text, TRAINERS[text]) if text in TRAINERS else None
    if Path(text).name == RAGEN_SCRIPT and (place == 0 or before in ("bash", "sh")):
        return RAGEN_SCRIPT, "ragen"
    if not by_python or not text.endswith(".py"):
        return None
    module = text.removesuffix(".py").replace("/", ".")
    for name, dialect in TRAINERS.items():
        if module == name or module.endswith(f".{name}"):
            return name, dialect
    return next(((text, one) for pattern, one in PROGRAMS.items() if re.fullmatch(pattern, Path(text).stem)), None)


def _not_one(path: Path, commands: list[Ran], found: list[_Trainer]) -> ConfigError:
    if found:
        told = ", ".join(f"{one.module} at line {one.line}" for one in found)
        message = f"{path} trains {len(found)} times: {told}"
        return ConfigError(
            message, source=f"{path}:{found[1].line}", hint="leave one of them in, or write one file each"
        )
    hint = f"read are scripts that run {', '.join(TRAINERS)}"
    for command in commands:
        texts = [word.text for word in command.words]
        module = texts[texts.index("-m") + 1] if "-m" in texts[:-1] else ""
        if module.split(".")[0] in ("verl", "vagen", "ragen", "recipe"):
            source = f"{path}:{command.line}"
            return ConfigError(f"{source} runs {module}, whose words aren't read here", source=source, hint=hint)
    return ConfigError(f"{path} runs no trainer that is known here", source=str(path), hint=hint)


def _worlds(commands: list[Ran]) -> tuple[str, int] | None:
    """The `--yaml_path` of VAGEN's `create_dataset`, and its line."""
    for command in commands:
        words = command.words
        if any(word.text.endswith("create_dataset") or word.text.endswith("create_dataset.py") for word in words):
            for place, word in enumerate(words):
                option, sign, value = word.text.partition("=")
                if option == "--yaml_path" and (sign or place + 1 < len(words)):
                    return (value if sign else words[place + 1].text), word.line
    return None


class _Reading:
    """The words of one trainer."""

    def __init__(self, path: Path, shell: Shell, trainer: _Trainer) -> None:
        self.path, self.shell, self.trainer = path, shell, trainer
        self.words: list[tuple[str, str]] = []
        self.missing: list[Missing] = []
        self.options: dict[str, Field] = {}

    def scripted(self, worlds: tuple[str, int] | None) -> Scripted:
        """What the script says to it."""
        words = list(self.trainer.words)
        world = words.pop(0) if self.trainer.module == RAGEN_SCRIPT and words and "=" not in words[0].text else None
        while words:
            self._read(words)
        config, under = self._config(), list[tuple[str, str]]()
        if self.trainer.dialect == "vagen" and (file := self._worlds_file(worlds)) is not None:
            under = [] if config is None else list(_spread(file))
            config = config or file
        if world is not None:
            config, under = self._ragen(world)
        every = [*self._own(), *under, *self.words]
        remarks = tuple(
            f"{self.path}:{line}: a shell ends the command at this comment; the lines after it are read as well"
            for line in self.trainer.comments
        )
        return Scripted(
            config,
            tuple(word for word, _ in every),
            tuple(place for _, place in every),
            self.trainer.dialect,
            tuple(self.missing),
            self._handed_on(),
            remarks,
        )

    def _read(self, words: list[Field]) -> None:
        """Take one word off the front, or an option with its value."""
        word = words.pop(0)
        place = f"{self.path}:{word.line}"
        option, sign, value = word.text.partition("=")
        if option in CONFIG_OPTIONS:
            taken = Field(value, word.line) if sign else words.pop(0) if words else Field("", word.line)
            self.options[CONFIG_OPTIONS[option]] = taken
        elif (unknown := self.shell.open_in(word.text)) is not None:
            self._open_word(word, place, unknown)
        elif word.text and not word.text.strip():
            message = f"{place}: a blank after the backslash ends the command there"
            raise ConfigError(message, source=place, hint="take the blank away")
        elif OVERRIDE.fullmatch(word.text):
            self.words.append((word.text, place))
        elif word.text:
            hint = "what is said to a trainer is key=value, --config-path and --config-name"
            raise ConfigError(f"{place}: {word.text!r} is not an override", value=word.text, source=place, hint=hint)

    def _open_word(self, word: Field, place: str, unknown: Open) -> None:
        key = _key(word.text)
        if "=" not in word.text or self.shell.open_in(key) is not None:
            hint = "write its words out in the script, or set what it depends on: NAME=… quintet …"
            raise ConfigError(f"{place}: {unknown} (line {unknown.line})", source=place, hint=hint)
        self.missing.append(Missing(key, place, f"{unknown} (line {unknown.line})"))

    def _told(self, taken: Field) -> str:
        if (unknown := self.shell.open_in(taken.text)) is not None:
            place = f"{self.path}:{taken.line}"
            raise ConfigError(f"{place}: {unknown} (line {unknown.line})", source=place, hint="write it out")
        return taken.text

    def _config(self) -> Path | None:
        """The primary file that the options name, None for one that comes with the framework."""
        if "name" not in self.options:
            return None
        name = self._told(self.options["name"])
        name = name if name.endswith(YAML) else f"{name}.yaml"
        folder = self._told(self.options["path"]) if "path" in self.options else "."
        above = Path(self.trainer.module).parent if self.trainer.module.endswith(".py") else Path()
        roots = [self.path.parent, Path(), above, self.path.parent.parent]
        files = [Path(os.path.normpath(root / folder / name)) for root in roots]
        found = next((file for file in files if file.is_file()), None)
        if found is None and Path(name).stem not in OWN_FILES:
            place = f"{self.path}:{self.options['name'].line}"
            beside = [other.stem for file in files if file.parent.is_dir() for other in file.parent.glob("*.yaml")]
            close = nearest(Path(name).stem, beside)
            hint = f"did you mean {close}?" if close else f"looked for {files[0]} and {files[1].absolute()}"
            raise ConfigError(f"{place}: there is no {folder}/{name}", value=name, source=place, hint=hint)
        return found

    def _own(self) -> Iterator[tuple[str, str]]:
        """What the framework's own file says otherwise than its reference, where that is named and not at hand."""
        name = self.options.get("name")
        if name is not None and self._config() is None:
            place = f"{self.path}:{name.line}"
            yield from _as_words(OWN_FILES[Path(name.text).name.removesuffix(".yaml")], "", lambda _: place)

    def _worlds_file(self, worlds: tuple[str, int] | None) -> Path | None:
        """VAGEN's file of worlds: named in the script, or beside it."""
        if worlds is None:
            return _beside(self.path)
        name = self._told(Field(*worlds))
        files = [self.path.parent / name, Path(name)]
        found = next((file for file in files if file.is_file()), None)
        if found is None:
            place = f"{self.path}:{worlds[1]}"
            raise ConfigError(f"{place}: there is no {name}", value=name, source=place, hint="check --yaml_path")
        near = found.resolve()
        inside = near.is_relative_to(self.path.parent.resolve())
        return self.path.parent / near.relative_to(self.path.parent.resolve()) if inside else found

    def _ragen(self, world: Field) -> tuple[Path | None, list[tuple[str, str]]]:
        """`train.sh ENV`: RAGEN lays `config/ENV.yaml` over `config/base.yaml`."""
        folder = self.path.parent / "config"
        base, own = folder / "base.yaml", folder / f"{self._told(world)}.yaml"
        return base if base.is_file() else None, list(_spread(own)) if own.is_file() else []

    def _handed_on(self) -> dict[str, str]:
        found = {name: self.shell.variables.get(name) for name in self.shell.exported}
        return {
            name: text for name, text in found.items() if isinstance(text, str) and self.shell.open_in(text) is None
        }


def _spread(path: Path) -> Iterator[tuple[str, str]]:
    """The values of a file as overrides, each with its line."""
    sources: dict[str, str] = {}
    tree = read_file(path, sources)
    yield from _as_words(tree, "", sources.__getitem__)


def _as_words(tree: Mapping[str, Any], prefix: str, place: Any) -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _as_words(value, f"{dotted}.", place)
        else:
            yield f"{dotted}={_hydra_word(value)}", place(dotted)


def _hydra_word(value: Any) -> str:
    """A plain value as Hydra's overrides have it."""
    if isinstance(value, str):
        # backslashes count only before a quote
        quoted = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
        return f"'{quoted}'"
    if isinstance(value, list):
        return f"[{','.join(map(_hydra_word, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_hydra_word(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value)
