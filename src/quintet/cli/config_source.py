"""Source of a configuration: a YAML file, a run script or a list of overrides, and the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quintet.cli.messages import warn
from quintet.config.capabilities import Capability
from quintet.config.dialects.composition.checkout import class_defaults, trainer_code
from quintet.config.dialects.composition.default_files import default_names, trees_with_defaults
from quintet.config.dialects.registry import DIALECTS, detect
from quintet.config.dialects.release_tables import NO_EVIDENCE, ReleaseEvidence, Table
from quintet.config.dialects.scripts.override_list import keys_as_tree
from quintet.config.dialects.scripts.run_script import RunScript
from quintet.config.dotted import has_key
from quintet.errors import ConfigError, UnsupportedRunError, nearest

NATIVE = "native"
EASYR1_MARKS = ("worker.actor", "worker.rollout", "worker.reward")
"""Sections by which a configuration of EasyR1 is recognised."""


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """A configuration before it is composed."""

    path: Path | None
    overrides: tuple[str, ...]
    """Overrides of a script or list, then those of the command line."""
    override_sources: tuple[str, ...]
    """Line of each override of the script or list."""
    dialect: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the script sets."""
    evidence: ReleaseEvidence = NO_EVIDENCE
    """What is known of the framework's release, besides the keys."""
    is_frameworks_file: bool = False
    """Whether the file is the framework's own, in a checkout."""
    trainer_files: tuple[Path, ...] = ()
    """Files that the trainer has in the checkout; keys that only they have are those of a fork."""


def read_config_source(
    config: str | None, overrides: Sequence[str], dialect: str | None, *, quiet: bool = False
) -> ConfigSource:
    """Read the source and detect its dialect; `dialect` may have a release, `verl@0.4`.

    Unless `quiet`, the dialect and the parts of a script that are read differently than by a shell go to stderr.

    Raises:
        ConfigError: the dialect is unknown, or the script is not supported.
        MachineError: a file is missing or cannot be read.
    """
    from quintet.config.dialects.scripts.run_script_reader import read_run_script  # a parser of bash

    dialect, release = split_release(dialect)
    check_dialect(dialect)
    if config is None and dialect not in (None, NATIVE):
        raise ConfigError(
            f"--dialect {dialect} needs a file", key="--dialect", hint=f"name the file: CONFIG --dialect {dialect}"
        )
    overrides, arguments = split_script_arguments(overrides)
    script = RunScript(None) if config is None else read_run_script(Path(config), arguments=arguments)
    if arguments is not None and not script.takes_arguments:
        raise _unused_arguments(config, arguments)
    script = script.with_fork_values(overrides)
    for remark in () if quiet else script.remarks:
        warn(remark)
    all_overrides = tuple(script.with_overrides(overrides))
    detected = dialect or script.dialect or _detect_dialect(script)
    if dialect is None and detected != NATIVE and not quiet:
        print(f"{config}: a configuration of {detected}", file=sys.stderr)
    if release is not None and detected == NATIVE:
        message = f"--release {release}: {config or 'the configuration'} is of no other framework"
        raise ConfigError(message, key="--release", value=release, hint="leave it out")
    code = {} if script.checkout is None else trainer_code(script.module, script.checkout)
    tables: Mapping[str, Table] = {}
    if detected != NATIVE and script.config is not None:
        tables = class_defaults(script.config, DIALECTS[detected].class_files, DIALECTS[detected].classes)
    evidence = ReleaseEvidence(script.module, named=release, code=code, tables=tables, checkout=script.checkout)
    return ConfigSource(
        script.config,
        all_overrides,
        script.places,
        detected,
        script.environment,
        evidence,
        script.is_frameworks_file,
        script.trainer_files,
    )


def split_release(dialect: str | None) -> tuple[str | None, str | None]:
    """Return the dialect and the release of `verl@0.4`."""
    name, _, release = (dialect or "").partition("@")
    return name or None, release or None


def _unused_arguments(config: str | None, arguments: Sequence[str]) -> ConfigError:
    message = f"{config or 'a command without a file'} takes no arguments after `--`"
    hint = "they are those of a run script; overrides stand before `--`"
    return ConfigError(message, value=" ".join(arguments), source="command line", hint=hint)


def split_script_arguments(overrides: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the overrides of a command line and the arguments of its run script, which stand after `--`."""
    if "--" not in overrides:
        return list(overrides), None
    position = [*overrides].index("--")
    return list(overrides[:position]), list(overrides[position + 1 :])


def with_further(words: Sequence[str], further: Sequence[str]) -> list[str]:
    """Add overrides or options to a command line, before the arguments of its run script."""
    overrides, arguments = split_script_arguments(words)
    return [*overrides, *further, *([] if arguments is None else ["--", *arguments])]


def _detect_dialect(script: RunScript) -> str:
    tree: dict[str, Any] = keys_as_tree(script.words)
    file, *defaults = [{}] if script.config is None else trees_with_defaults(script.config)
    for other in (file, *defaults):
        tree = dict(other) | tree if other is not file else tree | dict(other)
    dialect = next(iter([*detect(tree), *_dialects_of_defaults(file)]), NATIVE)
    _refuse_other_formats(file, script.config)
    if dialect == NATIVE and isinstance(file.get("defaults"), list):
        message = f"{script.config} has a defaults list of Hydra, and no key that tells the framework"
        missing = ", ".join(default_names(file))
        hint = f"put the files that it names beside it ({missing}), or name the framework: --dialect ragen"
        raise ConfigError(message, key="defaults", value=file["defaults"], hint=hint)
    if dialect == NATIVE and file and all(isinstance(part, Mapping) and "env_name" in part for part in file.values()):
        message = f"{script.config} is VAGEN's environment file, which has no settings of the training"
        hint = "give the run script or the list of overrides beside it (docs/dialects.md); it is found from there"
        raise ConfigError(message, hint=hint)
    return dialect


def _refuse_other_formats(file: Mapping[str, Any], path: Path | None) -> None:
    """Refuse a configuration of EasyR1, and RAGEN's file of environments, which is no configuration of a run."""
    if any(has_key(file, mark) for mark in EASYR1_MARKS):
        raise UnsupportedRunError(f"{path} {Capability.EASYR1.refusal()}", source=str(path))
    envs = file.get("custom_envs")
    sections = envs.values() if isinstance(envs, Mapping) and set(file) == {"custom_envs"} else ()
    if any(isinstance(section, Mapping) and "max_actions_per_traj" in section for section in sections):
        message = f"{path} is RAGEN's file of environments, which has no settings of a run"
        hint = "give a file whose defaults list names it, such as _2_sokoban.yaml beside it"
        raise ConfigError(message, key="custom_envs", hint=hint)


def _dialects_of_defaults(file: Mapping[str, Any]) -> Iterator[str]:
    """Yield the dialects whose own files, or groups of files, a defaults list names."""
    listed = file.get("defaults")
    for entry in listed if isinstance(listed, list) else ():
        names = {str(part).split("@")[0] for part in (entry if isinstance(entry, Mapping) else (entry,))}
        yield from (name for name, dialect in DIALECTS.items() if names & {*dialect.framework_files, *dialect.choices})


def check_dialect(dialect: str | None) -> None:
    """Check the name of a dialect.

    Raises:
        ConfigError: it is unknown; the message names the most similar one.
    """
    valid = [NATIVE, *DIALECTS]
    if dialect is not None and dialect not in valid:
        close = nearest(dialect, valid)
        hint = (f"did you mean {close}? " if close else "") + f"valid: {', '.join(valid)}"
        raise ConfigError(f"unknown dialect {dialect}", key="--dialect", value=dialect, hint=hint)
