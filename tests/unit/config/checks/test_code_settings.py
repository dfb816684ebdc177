"""If these fail, code that a run directory from somebody else names runs without a word on the command line."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from quintet.config.checks.code_settings import code_settings, run_code_problems
from quintet.config.compose import load_experiment
from quintet.config.native.field_docs import field_docs
from quintet.config.native.section import RunsCode, Section

DOCUMENTED = re.compile(r"file\.py:|module:|Python file|Python modules|Run Python code|Interaction file|Tool file")


def sections(base: type[BaseModel] = Section) -> Iterator[type[BaseModel]]:
    for section in base.__subclasses__():
        yield section
        yield from sections(section)


def test_every_field_that_runs_code_by_its_documentation_is_marked() -> None:
    unmarked = {
        f"{section.__name__}.{name}"
        for section in sections()
        for name, text in field_docs(section).items()
        if DOCUMENTED.search(text)
        and not any(isinstance(mark, RunsCode) for mark in section.model_fields[name].metadata)
    }
    assert not unmarked


CODE: dict[str, dict[str, Any]] = {
    "policy.trust_remote_code": {"policy": {"trust_remote_code": True}},
    "policy.trust_tokenizer_code": {"policy": {"trust_tokenizer_code": True}},
    "external_libs": {"external_libs": ["os"]},
    "env.path": {"env": {"name": "custom", "path": "evil.py:Env"}},
    "env.id": {"env": {"name": "gymnasium", "id": "evil:Env-v0"}},
    "envs.a.env.path": {"envs": {"a": {"env": {"name": "custom", "path": "evil:Env"}}}},
    "algorithm.loss.function": {"algorithm": {"loss": {"name": "custom", "function": "evil:loss"}}},
    "algorithm.advantage.function": {"algorithm": {"advantage": {"name": "custom", "function": "/tmp/evil.py:f"}}},
    "rollout.engine_options.arguments.worker_cls": {
        "rollout": {"engine_options": {"arguments": {"worker_cls": "evil.Worker"}}}
    },
}


@pytest.mark.parametrize("key", CODE)
def test_code_is_refused_unless_the_command_line_names_it(tmp_path: Path, key: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(CODE[key]))
    (problem,) = run_code_problems(load_experiment(str(config), []))
    assert problem.key == key
    assert str(config) in str(problem)
    overrides = [f"{section}={json.dumps(value)}" for section, value in CODE[key].items()]
    assert not list(run_code_problems(load_experiment(str(config), overrides)))


def test_built_in_names_are_no_code() -> None:
    config = load_experiment(None, ["env={name: simulator, simulator: arm}", "policy.preset=null", "policy.path=x"])
    assert not list(code_settings(config.experiment))


def test_an_environment_whose_default_names_a_package_runs_from_a_run_directory() -> None:
    composed = load_experiment(None, ["env.name=primitive_skill"])
    assert not list(run_code_problems(composed))
    assert not list(code_settings(composed.experiment))
