"""Check that the chat template of a run describes its tools, from the files of the policy, without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quintet.config.composed import ComposedConfig
from quintet.config.plan.models import config_file, policy_path
from quintet.config.problems import ConfigProblem
from quintet.data.chat_templates import KEY, chat_template
from quintet.errors import ConfigError

TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tokenizer_config.json")
"""Files with chat templates, those first that transformers prefers."""
MAX_BYTES = 64 << 20
"""Larger files are not read."""


def template_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield a problem if responses may call tools and the template never mentions them."""
    config = composed.experiment
    if config.data is None or config.rollout.tool_calls is None:
        return
    try:
        text = chat_template(config.data.template).text or _stored_template(composed)
    except ConfigError:
        return  # an unknown template is reported when it is used
    if text and "tools" not in text:
        yield composed.problem(
            KEY, "the chat template does not show tools", f"{KEY}=hermes, or rollout.tool_calls=null"
        )


def _stored_template(composed: ComposedConfig) -> str:
    """Return the texts of all templates of the policy's tokenizer; empty if there are none or no files."""
    policy, path = composed.experiment.policy, policy_path(composed.experiment)
    file = None if path is None else config_file(path)
    directory = Path(policy.tokenizer) if policy.tokenizer else file and file.parent
    if directory is None:
        return ""
    others = sorted(directory.glob("additional_chat_templates/*.jinja"))
    texts = [_read(other) for other in others]
    return "\n".join([*texts, next(filter(None, (_read(directory / name) for name in TEMPLATE_FILES)), "")])


def _read(file: Path) -> str:
    """Return the template in a file, or all of them; empty if there is none."""
    try:
        if file.stat().st_size > MAX_BYTES:
            return ""
        text = file.read_text(encoding="utf-8")
        stored: Any = text if file.suffix == ".jinja" else json.loads(text).get("chat_template")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    return stored if isinstance(stored, str) else json.dumps(stored) if stored else ""
