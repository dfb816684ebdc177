"""Settings that run Python code of others, which a run directory must not bring with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from quintet.config.composed import ComposedConfig
from quintet.config.native.section import RunsCode, Section
from quintet.config.problems import ConfigProblem
from quintet.config.schema import format_value
from quintet.config.yaml_reader import COMMAND_LINE

_NAMED_CODE = re.compile(r"[:/]|\.py$")
"""Part of a reference to a file or module; the names of built-in and of registered objects have none of these."""
_ENGINE_CODE = re.compile(r"trust_remote_code|_(cls|class)$|logits_processors?|plugin|hf_overrides")
"""Arguments of vLLM and SGLang that run code."""


def code_settings(section: Section, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys and values below a section that run Python code of a file, a module or a model directory. Defaults
    are Quintet's choice, and not somebody else's."""
    for name, field in type(section).model_fields.items():
        value, key = getattr(section, name), f"{prefix}{name}"
        if any(isinstance(mark, RunsCode) for mark in field.metadata):
            if value == field.default:
                continue
            if isinstance(value, dict):
                yield from (
                    (f"{key}.{each}", part) for each, part in value.items() if part and _ENGINE_CODE.search(each)
                )
            elif _runs_code(value):
                yield key, value
        elif isinstance(value, Section):
            yield from code_settings(value, f"{key}.")
        elif isinstance(value, dict):
            for entry, part in value.items():
                if isinstance(part, Section):
                    yield from code_settings(part, f"{key}.{entry}.")


def _runs_code(value: object) -> bool:
    if isinstance(value, str):
        return _NAMED_CODE.search(value) is not None
    return bool(value)


def sections_of(section: Section) -> Iterator[Section]:
    """Yield a section and those below it."""
    yield section
    for name in type(section).model_fields:
        value = getattr(section, name)
        for part in value.values() if isinstance(value, dict) else (value,):
            if isinstance(part, Section):
                yield from sections_of(part)


def run_code_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield the settings of a run's own configuration that run code: the run directory may come from somebody else, so
    only the command line may set them."""
    for key, value in code_settings(composed.experiment):
        if composed.source(key) != COMMAND_LINE:
            problem = "it runs code that the run directory names, which only the command line may ask for"
            yield composed.problem(key, problem, f"{key}={format_value(value)}")
