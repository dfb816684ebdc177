"""Chat templates by name, for tokenizers that have none and for data sets that want another.

Formats as their makers publish them: ChatML (OpenAI), Qwen2.5's and Qwen3's (ChatML, the first with a
system message of its own, the second without earlier thoughts), Llama 3's headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quintet.errors import ConfigError, nearest

__all__ = ["TEMPLATES", "ChatTemplate", "chat_template"]

KEY = "data.template"
FILES: Final = (".jinja", ".jinja2", ".j2")

_MESSAGE = "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
_HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = f"{{% for message in messages %}}{_MESSAGE}{{% endfor %}}{_HEADER}"
QWEN2_5 = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n"
    f"You are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n{{% endif %}}{CHATML}"
)
QWEN3 = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' %}{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token or '<|begin_of_text|>' }}{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
PLAIN = "{% for message in messages %}{{ message['content'] }}{{ '\\n' if not loop.last }}{% endfor %}"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """How messages become text: `text` null is the tokenizer's own, `thinking` is told to it where it asks, `ending`
    is what an answer always begins with."""

    text: str | None = None
    thinking: bool | None = None
    ending: str = ""


TEMPLATES: Mapping[str, ChatTemplate] = {
    "native": ChatTemplate(),
    "native_nonthinking": ChatTemplate(thinking=False),
    "chatml": ChatTemplate(CHATML),
    "qwen2_5": ChatTemplate(QWEN2_5),
    "qwen3": ChatTemplate(QWEN3, thinking=True),
    "qwen3_nonthinking": ChatTemplate(QWEN3, thinking=False),
    "llama3": ChatTemplate(LLAMA3),
    "none": ChatTemplate(PLAIN),
    "plain": ChatTemplate(PLAIN),
    # ROLL's names
    "empty": ChatTemplate(CHATML),
    "longCOT_V3": ChatTemplate(ending="<think>\n"),
}


def chat_template(name: str | None) -> ChatTemplate:
    """The template of that name, of that file, or the one that the text itself is; null takes the tokenizer's.

    Raises:
        ConfigError: there is none.
    """
    if name is None:
        return TEMPLATES["native"]
    if name in TEMPLATES:
        return TEMPLATES[name]
    if "{{" in name or "{%" in name:
        return ChatTemplate(name)
    if name.endswith(FILES):
        return ChatTemplate(_text(name))
    close = nearest(name, TEMPLATES)
    hint = (f"did you mean {close}? " if close else "") + f"there are {', '.join(TEMPLATES)}, and files that end in "
    raise ConfigError(f"{KEY} = {name}: there is no such template", key=KEY, value=name, hint=hint + ", ".join(FILES))


def _text(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{KEY} = {name}: can't read it: {error}", key=KEY, value=name) from error
