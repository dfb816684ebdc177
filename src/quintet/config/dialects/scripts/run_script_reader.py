"""Run scripts: the overrides that a shell script passes to a framework's trainer, with the line of each.

`python3 -m verl.trainer.main_ppo data.train_batch_size=8 …` is read and never run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from quintet.config.dialects.composition.checkout import is_trainer_file, package_directory, trainer_files
from quintet.config.dialects.ragen.dialect import EARLY_ENV
from quintet.config.dialects.registry import DIALECTS, FRAMEWORK_FILES, detect
from quintet.config.dialects.releases import is_of_framework, is_switch
from quintet.config.dialects.scripts.config_files import ConfigFiles
from quintet.config.dialects.scripts.override_list import (
    as_overrides,
    is_override_list,
    key_of,
    keys_as_tree,
    read_override_list,
)
from quintet.config.dialects.scripts.run_script import MissingValue, RunScript
from quintet.config.dialects.scripts.simple_commands import Argument, ScriptCommand
from quintet.config.dialects.scripts.trainer_calls import (
    NAMES,
    TRAINERS,
    TrainerCall,
    all_commands,
    distinct_calls,
    many_calls_error,
    no_trainer_error,
    started_module,
)
from quintet.config.dialects.scripts.variables import MARKER, Variables, cleaned, script_error, unknown_value_hint
from quintet.config.dialects.vagen.evaluation_file import read_evaluation
from quintet.config.dotted import has_key
from quintet.config.yaml_reader import read_file, read_text
from quintet.errors import nearest

COMMENT_LINES = re.compile(
    r"""(?<=\\\n)(?P<comments>(?:[ \t]*\#.*\n)+)
    (?=[ \t]+[+~]{0,2}[\w./@-]+= | [+~]{0,2}\w+(?:\.\w+)+= | [ \t]*"?\$\{?@)(?P<lost>(?:.*\\\n)*.*)""",
    re.VERBOSE,
)
"""Comment lines inside a command, the first of which ends it, and the overrides after them, which are lost."""
TORCHRUN = re.compile(r"(.*/)?torchrun|torch\.distributed\.(run|launch)")
AGENT_TRAINER = "vagen.main_ppo"
"""Trainer of VAGEN whose environments are in lists, not in an `env_config.yaml`."""
TORCHRUN_OPTIONS = {"--nnodes": 0, "--nproc_per_node": 1, "--nproc-per-node": 1}
"""Position in `Dialect.process_keys` of the key that an option of torchrun decides."""
CONFIG_OPTIONS = {
    **dict.fromkeys(("--config-path", "-cp", "--config_path"), "path"),
    **dict.fromkeys(("--config-name", "-cn", "--config_name"), "name"),
    "--config": "file",
}
CONFIG_KEYS = ("name", "path")
OVERRIDE = re.compile(r"(\+{0,2}|~)([^\s=~+'\"][^\s='\"]*)=(.*)|~[^\s=]+", re.DOTALL)
CALL = re.compile(r"(?P<name>.+?):(?P<line>\d{1,9})(?::(?P<iteration>\d{1,9}))?")
"""`train_all.sh:12` or `sweep.sh:12:3`."""
MAX_ENV_FILE = 4096
"""Bytes of the file of an environment, at most."""
VARIABLE = re.compile(r"\$\{?([A-Z][A-Z0-9_]*)\b")
"""An environment variable that a script reads, by convention in capitals."""
YAML, SHELL = (".yaml", ".yml"), (".sh", ".bash")

Override = tuple[str, str]
"""An override and its source `FILE:LINE`."""


def read_run_script(
    path: Path, environment: Mapping[str, str] | None = None, arguments: Sequence[str] | None = None
) -> RunScript:
    """Read a run script or a list of overrides; of a YAML file, return only its path.

    Raises:
        ConfigError: the script runs no known trainer, or several; a word cannot be understood.
        MachineError: the file is missing or cannot be read.
    """
    if path.suffix in YAML:
        own = (path,) if path.is_file() and is_trainer_file(path) else ()
        return _over_base(path) or _evaluation(path) or RunScript(path, trainer_files=own)
    path, selected = _path_and_call(path)
    text = cleaned(read_text(path))
    if path.suffix not in SHELL and is_override_list(text):
        overrides = read_override_list(path, text)
        dialect = next(iter(detect(keys_as_tree(override for override, _ in overrides))), None)
        return RunScript(_env_config_beside(path) if dialect == "vagen" else None, *_columns(overrides), dialect)
    if path.suffix in SHELL or text.startswith("#!") or any(f"-m {module}" in text for module in TRAINERS):
        script = _read_script(path, text, os.environ if environment is None else environment, selected, arguments)
        return replace(script, variables=frozenset(VARIABLE.findall(text)), takes_arguments=True)
    return RunScript(path)


def _over_base(path: Path) -> RunScript | None:
    """Return a file of an environment of early RAGEN over the `base.yaml` beside it; None for any other file."""
    base, sources = path.parent / "base.yaml", dict[str, str]()
    if not path.is_file() or not base.is_file() or path.stat().st_size > MAX_ENV_FILE:
        return None
    if EARLY_ENV.rpartition(".")[2] not in read_text(path) or not has_key(tree := read_file(path, sources), EARLY_ENV):
        return None
    return RunScript(base, *_columns(as_overrides(tree, sources.__getitem__)), "ragen")


def _evaluation(path: Path) -> RunScript | None:
    """Return the content of a file of VAGEN's evaluations; None for any other file."""
    evaluation = read_evaluation(path) if path.is_file() else None
    if evaluation is None:
        return None
    tree, sources = evaluation
    return RunScript(None, *_columns(as_overrides(tree, lambda key: sources.get(key, str(path)))), "vagen")


def _path_and_call(path: Path) -> tuple[Path, tuple[int, ...]]:
    """Split `train_all.sh:12` and `sweep.sh:12:3` into the script, and the line and number of a call of a trainer."""
    selected = CALL.fullmatch(path.name)
    if selected is None or path.exists():
        return path, ()
    return path.parent / selected["name"], tuple(int(number) for number in selected.groups()[1:] if number)


def _columns(overrides: Sequence[Override]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(override for override, _ in overrides), tuple(source for _, source in overrides)


def _env_config_beside(path: Path) -> Path | None:
    """Return VAGEN's file of environments beside a script."""
    file = path.parent / "env_config.yaml"
    return file if file.is_file() else None


def _read_script(
    path: Path,
    text: str,
    environment: Mapping[str, str],
    selected: tuple[int, ...],
    script_arguments: Sequence[str] | None,
) -> RunScript:
    # an inherited PWD may be that of another directory
    environment = {**environment, "PWD": os.getcwd()}
    variables = Variables(path, environment, arguments=None if script_arguments is None else tuple(script_arguments))
    lost_lines = [
        (text.count("\n", 0, matched.start()) + 1, text.count("\n", 0, matched.end()) + 1)
        for matched in COMMENT_LINES.finditer(text)
    ]
    text = COMMENT_LINES.sub(lambda matched: matched["comments"] + "\n" * matched["lost"].count("\n"), text)
    script = all_commands(text, variables, environment)
    calls = distinct_calls(script.commands)
    of_script = [each for each in calls if each[1].path is None]
    chosen = [each for each in calls if (each[1].line, each[1].iteration)[: len(selected)] == selected]
    chosen = (selected and chosen) or of_script or calls
    if not chosen:
        raise no_trainer_error(path, script, variables)
    if len(chosen) > 1:
        raise many_calls_error(path, [call for _, call in chosen], variables)
    command, call = chosen[0]
    before = script.commands[: script.commands.index(command)]
    arguments = _TrainerArguments(call.path or path, variables, call)
    run_script = arguments.run_script(_yaml_path_option(before), lost_lines, _written_sections(before, call))
    remarks = [
        f"{re.sub('^line ', f'{path}:', place)}: {reason}; the variables that it sets are not known"
        for place, reason in variables.unread.items()
    ]
    config = run_script.config
    own = trainer_files(call.module, call.path or path, config)
    is_frameworks_file = config in own and not call.module.endswith(".py")
    if is_frameworks_file and config is not None and config.resolve() != own[0].resolve():
        is_frameworks_file = config.stem in FRAMEWORK_FILES
    remarks = [*call.remarks, *remarks, *run_script.remarks]
    return replace(
        run_script,
        remarks=tuple(remarks),
        conditions=call.conditions,
        trainer_files=own,
        is_frameworks_file=is_frameworks_file,
        checkout=package_directory(call.module, call.path or path),
    )


def _yaml_path_option(commands: Sequence[ScriptCommand]) -> Argument | None:
    """Return the `--yaml_path` of VAGEN's last `create_dataset`."""
    for command in reversed(commands):
        options, _ = _split_options(command.words, {"--yaml_path": "yaml_path"})
        if options and any(word.text.endswith(("create_dataset", "create_dataset.py")) for word in command.words):
            return options["yaml_path"]
    return None


def _written_sections(commands: Sequence[ScriptCommand], call: TrainerCall) -> list[Override]:
    """Return the sections that programs before the trainer write, as overrides; the last one counts."""
    sections: list[Override] = []
    for command in commands:
        words = [word.text for word in command.words]
        module = started_module(words)
        written = DIALECTS[call.dialect].sections_of_program(
            module, words[words.index(module) + 1 :] if module in words else []
        )
        if written and not any(MARKER.search(word) for word in words):
            source = command.source
            sections = [(override, source) for override, _ in as_overrides(written, str)]
    return sections


def _split_options(words: Sequence[Argument], names: Mapping[str, str]) -> tuple[dict[str, Argument], list[Argument]]:
    """Return the values of options by their `names`, and the other words."""
    options: dict[str, Argument] = {}
    others = []
    following = iter(words)
    for word in following:
        option, sign, value = word.text.partition("=")
        if option not in names:
            others.append(word)
        else:
            inline = replace(word, text=value)
            options[names[option]] = inline if sign else next(following, inline)
    return options, others


class _TrainerArguments:
    """The arguments of a trainer, read into overrides and options."""

    def __init__(self, path: Path, variables: Variables, call: TrainerCall) -> None:
        self.path, self.variables, self.call = path, variables, call
        self.overrides: list[Override] = []
        self.missing: list[MissingValue] = []
        self.remarks: list[str] = []
        self.env_file: Path | None = None
        """File of the environment that early RAGEN's trainer takes by its name."""
        self.files = ConfigFiles(path, call)
        self.options, words = _split_options(call.words, CONFIG_OPTIONS)
        for word in words:
            self._add_override(word)
        self.overrides += self._process_overrides()

    def run_script(
        self, yaml_path: Argument | None, lost_lines: Sequence[tuple[int, int]], sections: Sequence[Override]
    ) -> RunScript:
        """Return the content of the script; `yaml_path` is VAGEN's file of environments, `sections` are those that
        another program of the script writes."""
        if "file" in self.options:
            return self._over_file()
        config = self._config_file()
        if config is None:
            self.overrides = [*self._without_choices()]
        beneath = self._framework_overrides() if config is None else []
        beneath += as_overrides(self.files.keys, lambda _: self.call.source)
        if self.env_file is not None:
            lines: dict[str, str] = {}
            beneath += as_overrides(read_file(self.env_file, lines), lines.__getitem__)
        has_envs = self.call.dialect == "vagen" and not self.call.module.endswith(AGENT_TRAINER)
        if has_envs and (envs := self._env_config(yaml_path)) is not None:
            if config is not None:
                sources: dict[str, str] = {}
                beneath += as_overrides(read_file(envs, sources), sources.__getitem__)
            config = config or envs
        else:
            beneath += sections
        overrides = _columns([*beneath, *self.overrides])
        last_line = self.call.words[-1].line if self.call.words else self.call.line
        remarks = tuple(
            f"{self.path}:{first}: a shell ends the command at this comment; the overrides up to line {last} are lost"
            for first, last in lost_lines
            if self.call.path is None and self.call.line < first <= last_line + 2
        )
        environment = self.call.exports
        missing, module = tuple(self.missing), self.call.module
        remarks = (*remarks, *self.remarks)
        return RunScript(config, *overrides, self.call.dialect, missing, environment, remarks, module=module)

    def _over_file(self) -> RunScript:
        """Return the overrides of an evaluation over those of its file."""
        name = self._option_text(self.options["file"])
        existing = next((file for file in (Path(name), self.path.parent / name) if file.is_file()), None)
        if existing is None or (script := _evaluation(existing)) is None:
            hint = "name a file with envs, run and backends"
            raise script_error(self._source(self.options["file"]), f"{name} is no file of an evaluation", hint, name)
        words, places = _columns(self.overrides)
        exports = self.call.exports
        return RunScript(
            None, (*script.words, *words), (*script.places, *places), self.call.dialect, tuple(self.missing), exports
        )

    def _env_file(self, name: str) -> Path:
        return self.path.parent / "config" / f"{name}.yaml"

    def _process_overrides(self) -> Iterator[Override]:
        """Yield the numbers of nodes and devices, which torchrun decides if it starts the trainer."""
        keys, words = DIALECTS[self.call.dialect].process_keys, self.call.launcher
        if not any(TORCHRUN.fullmatch(word.text) for word in words):
            return
        options, _ = _split_options(words, {option: keys[index] for option, index in TORCHRUN_OPTIONS.items()})
        for key, word in options.items():
            if word.text.isdecimal():
                yield f"{key}={word.text}", self._source(word)

    def _add_override(self, word: Argument) -> None:
        source = self._source(word)
        if (unknown := self.variables.find_unknown(word.text)) is not None:
            key = key_of(word.text)
            if key in NAMES:
                self._add_name(word.text, source)
                return
            reason = f"{unknown} ({unknown.place})"
            if "=" not in word.text or self.variables.find_unknown(key) is not None:
                raise script_error(source, reason, unknown_value_hint(unknown, self.variables.script))
            is_unset = bool(unknown.variable) and MARKER.fullmatch(word.text.partition("=")[2]) is not None
            if is_unset and is_switch(DIALECTS[self.call.dialect], key):
                self.overrides.append((f"{key}=false", source))
                self.remarks.append(f"{source}: {reason}: {key} is empty for a shell, and false")
                return
            is_known = is_of_framework(DIALECTS[self.call.dialect], key)
            of_fork = "" if is_known else self._with_texts(word.text)
            self.missing.append(MissingValue(key, source, reason, unknown.variable, of_fork))
        elif OVERRIDE.fullmatch(word.text):
            self.overrides.append((word.text, source))
        elif self.call.dialect == "ragen" and not self.env_file and (file := self._env_file(word.text)).is_file():
            self.env_file = file
        elif word.text.isspace():
            raise script_error(source, "a blank after the backslash ends the command there", "remove the blank")
        else:
            hint = "the arguments of a trainer are key=value, --config-path and --config-name"
            raise script_error(source, f"{word.text!r} is not an override", hint, word.text)

    def _add_name(self, text: str, source: str) -> None:
        """Add a name with unknown parts, such as the time, which are replaced by their text in the script."""
        for matched in MARKER.finditer(text):
            unknown, shown = self.variables.unknown_values[int(matched[1])], self._with_texts(matched[0])
            self.remarks.append(f"{source}: {unknown} ({unknown.place}): the name has {shown} in its place")
        self.overrides.append((self._with_texts(text), source))

    def _with_texts(self, text: str) -> str:
        """Return a text in which the text of the script stands for its unknown parts."""

        def shown(matched: re.Match[str]) -> str:
            name = re.sub(r"\W+", "-", self.variables.shown(matched[0])).strip("-")
            return name if re.match(r"[A-Za-z]", name) else f"argument-{name}"

        return MARKER.sub(shown, text)

    def _source(self, word: Argument) -> str:
        return f"{word.path}:{word.line}"

    def _option_text(self, option: Argument) -> str:
        if (unknown := self.variables.find_unknown(option.text)) is not None:
            hint = unknown_value_hint(unknown, self.variables.script)
            raise script_error(self._source(option), f"{unknown} ({unknown.place})", hint)
        return option.text

    def _config_file(self) -> Path | None:
        """Return the file that `--config-name` names, or that the trainer uses without it; None for one that comes with
        the framework."""
        name, directory = (self._option_text(each) if (each := self.options.get(key)) else None for key in CONFIG_KEYS)
        files = self.files.candidates(name, directory)
        existing = next((file for file in files if file.is_file()), None)
        if existing is not None:
            return existing
        if directory is not None and not self.files.has_directory(directory):
            hint = "check --config-path; Hydra takes a relative one from the directory of the trainer"
            raise script_error(
                self._source(self.options["path"]), f"there is no directory {directory}", hint, directory
            )
        file = self.files.name(name)
        if name is not None and PurePath(file).stem not in FRAMEWORK_FILES:
            beside = [other.stem for file in files if file.parent.is_dir() for other in file.parent.glob("*.yaml")]
            close = nearest(PurePath(file).stem, beside)
            hint = f"did you mean {close}?" if close else f"looked for {files[0]} and {files[1].absolute()}"
            shown = self.files.directory if directory is None else directory
            raise script_error(self._source(self.options["name"]), f"there is no {shown}/{file}", hint, file)
        return None

    def _framework_overrides(self) -> list[Override]:
        """Return what a file that comes with the framework sets differently from the reference."""
        named = self.options.get("name")
        file = Path(named.text if named else self.files.default).name
        source = self._source(named) if named else self.call.source
        return as_overrides(FRAMEWORK_FILES.get(file.removesuffix(".yaml"), {}), lambda _: source)

    def _without_choices(self) -> Iterator[Override]:
        """Yield the overrides with keys in place of choices among the framework's own files."""
        choices = DIALECTS[self.call.dialect].choices
        for text, source in self.overrides:
            name, _, value = text.partition("=")
            if name not in choices:
                yield text, source
            elif (key := choices[name]) is not None:
                # `actor@actor_rollout_ref.actor=dp_actor`: the files of a group may end in its name
                group = name.partition("@")[0]
                yield f"{key}={value.removesuffix(f'_{group}')}", source

    def _env_config(self, yaml_path: Argument | None) -> Path | None:
        """Return VAGEN's file of environments: that of `--yaml_path`, or the one beside the script."""
        if yaml_path is None:
            return _env_config_beside(self.path)
        name = self._option_text(yaml_path)
        existing = next((file for file in (self.path.parent / name, Path(name)) if file.is_file()), None)
        if existing is None:
            raise script_error(self._source(yaml_path), f"there is no {name}", "check --yaml_path", name)
        directory = self.path.parent.resolve()
        inside = existing.resolve().is_relative_to(directory)
        return self.path.parent / existing.resolve().relative_to(directory) if inside else existing
