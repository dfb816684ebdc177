"""Forms of conversational rows, which their columns tell apart, so that no key has to name a column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from quintet.config.native.data import DataConfig

DEFAULT_PROMPT_COLUMN: Final[str] = DataConfig.model_fields["prompt_key"].default
INSTRUCTION_COLUMN: Final = "instruction"
"""Column of the prompt in files of Alpaca and ROLL."""
CONVERSATION_FORMS: Final[Mapping[str, str]] = {
    "messages": "conversations of TRL and OpenAI",
    "conversations": "conversations of ShareGPT",
}
"""Columns of whole conversations, with the libraries that define them."""


def messages_column(config: DataConfig, row: Mapping[str, Any]) -> str | None:
    """Return the column of a whole conversation: `data.messages_key`, or that of a known form in rows without a column
    of prompts; None for rows with one."""
    if config.messages_key is not None or not _lacks_prompt(config, row):
        return config.messages_key
    columns = [column for column in CONVERSATION_FORMS if column in row]
    # a file with rows of several forms has all columns in each row
    filled = next((column for column in columns if row[column] is not None), None)
    is_empty = filled is None and columns and row.get(INSTRUCTION_COLUMN) is None
    return columns[0] if is_empty else filled


def prompt_column(config: DataConfig, row: Mapping[str, Any]) -> str:
    """Return the column of the prompt: `data.prompt_key`, or Alpaca's in rows without it."""
    is_instruction = _lacks_prompt(config, row) and row.get(INSTRUCTION_COLUMN) is not None
    return INSTRUCTION_COLUMN if is_instruction else config.prompt_key


def _lacks_prompt(config: DataConfig, row: Mapping[str, Any]) -> bool:
    return config.prompt_key == DEFAULT_PROMPT_COLUMN and row.get(DEFAULT_PROMPT_COLUMN) is None


def describe_form(config: DataConfig, row: Mapping[str, Any]) -> str:
    """Return which columns of a row are read, and whose form it is if it is a known one.

    >>> describe_form(DataConfig(), {"conversations": []})
    'conversations of ShareGPT: conversations'
    >>> describe_form(DataConfig(), {"instruction": "Add", "input": "2 + 2", "output": "4"})
    'instructions of Alpaca: instruction, input, output'
    """
    if (column := messages_column(config, row)) is not None:
        return f"{CONVERSATION_FORMS.get(column, 'conversations')}: {column}"
    column = prompt_column(config, row)
    if column == INSTRUCTION_COLUMN and "output" in row:
        return f"instructions of Alpaca: {', '.join(name for name in (column, 'input', 'output') if name in row)}"
    if "completion" in row and config.response_key is None:
        return f"prompts and completions of TRL: {column}, completion"
    return (
        f"prompts of verl: {column}" if config.truth_key in row and config.source_key in row else f"prompts: {column}"
    )
