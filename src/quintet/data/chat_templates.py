"""Chat templates by name, for tokenizers without a template or data sets that need another one.

Formats are those published by the model makers: ChatML (OpenAI), Qwen2.5 (ChatML with a default system message), Qwen3
(ChatML without earlier thoughts), Llama 3, and ChatML with the tool calls of Hermes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quintet.errors import ConfigError, did_you_mean

KEY = "data.template"
TEMPLATE_SUFFIXES: Final = (".jinja", ".jinja2", ".j2")

CHATML, QWEN2_5, QWEN3, HERMES, LLAMA3, PLAIN = (
    (Path(__file__).with_name("templates") / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    for name in ("chatml", "qwen2_5", "qwen3", "hermes", "llama3", "plain")
)
MARKER_START, MARKER_END = "\uf8f0", "\uf8f1"
MARKED = CHATML.replace("<|im_start|>", MARKER_START).replace("<|im_end|>", MARKER_END)
"""ChatML with markers from Unicode's private use area, which text does not contain."""
BUILT_IN: Collection[str] = frozenset({CHATML, QWEN2_5, QWEN3, HERMES, LLAMA3, PLAIN, MARKED})
"""Texts of the templates that come with Quintet. All others may be malicious."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Jinja template of a conversation.

    `text` null uses the tokenizer's template, `thinking` is passed to it as `enable_thinking`, `response_prefix` is
    the beginning of every response, `source` is the key or file of the text.
    """

    text: str | None = None
    thinking: bool | None = None
    response_prefix: str = ""
    source: str = KEY


TEMPLATES: Mapping[str, ChatTemplate] = {
    "native": ChatTemplate(),
    "native_thinking": ChatTemplate(thinking=True),
    "native_nonthinking": ChatTemplate(thinking=False),
    "chatml": ChatTemplate(CHATML),
    "qwen2_5": ChatTemplate(QWEN2_5),
    "qwen3": ChatTemplate(QWEN3, thinking=True),
    "qwen3_nonthinking": ChatTemplate(QWEN3, thinking=False),
    "hermes": ChatTemplate(HERMES),
    "llama3": ChatTemplate(LLAMA3),
    "none": ChatTemplate(PLAIN),
    "plain": ChatTemplate(PLAIN),
    # ROLL's names
    "empty": ChatTemplate(CHATML),
    "longCOT_V3": ChatTemplate(response_prefix="<think>\n"),
}


def chat_template(name: str | None) -> ChatTemplate:
    """Return the template for a name, a file or a template text; null for the tokenizer's own.

    Raises:
        ConfigError: unknown template, or the file cannot be read.
    """
    if name is None:
        return TEMPLATES["native"]
    if name in TEMPLATES:
        return TEMPLATES[name]
    if "{{" in name or "{%" in name:
        return ChatTemplate(name)
    if name.endswith(TEMPLATE_SUFFIXES):
        return ChatTemplate(_read_template(name), source=name)
    valid = f"valid: {', '.join(TEMPLATES)}, or a file ending in {', '.join(TEMPLATE_SUFFIXES)}"
    hint = f"{did_you_mean(name, TEMPLATES, '{}')} {valid}".lstrip()
    raise ConfigError(f"{KEY} = {name}: unknown template", key=KEY, value=name, hint=hint)


def _read_template(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{KEY} = {name}: cannot read the file: {error}", key=KEY, value=name) from error
