"""Prompts of OpenVLA policies as tokens of equal length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from quintet.errors import ConfigError
from quintet.policies.vla.openvla_config import OpenVlaConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptEncoder:
    """Encodes instructions: first token, padding, prompt, and the token that ends it.

    Padding follows the first token, as in RLinf: image features are inserted between both, so that the prompt and the
    action slots are at the end of every sequence.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: OpenVlaConfig) -> None:
        self.tokenizer = tokenizer
        self._config = config
        self._encoded: dict[str, list[int]] = {}

    def encode(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return tokens, int64 [B, L], and the mask of those that are no padding, bool [B, L].

        Raises:
            ConfigError: a prompt has more than `max_prompt_length` tokens.
        """
        rows = [self._encode(instruction) for instruction in instructions]
        length, pad = self._config.max_prompt_length, self._pad
        tokens = torch.tensor([row[:1] + [pad] * (length - len(row)) + row[1:] for row in rows])
        padding = torch.tensor([length - len(row) for row in rows]).unsqueeze(1)
        index = torch.arange(length)
        return tokens, (index == 0) | (index > padding)

    def _encode(self, instruction: str) -> list[int]:
        if instruction not in self._encoded:
            self._encoded[instruction] = self._tokenize(instruction)
        return self._encoded[instruction]

    def _tokenize(self, instruction: str) -> list[int]:
        text = self._config.prompt.format(instruction=instruction.lower())
        tokens = list(self.tokenizer(text)["input_ids"])
        if self.tokenizer.bos_token_id is not None and tokens[:1] != [self.tokenizer.bos_token_id]:
            tokens.insert(0, self.tokenizer.bos_token_id)
        if self._end is not None and tokens[-1] != self._end:
            tokens.append(self._end)
        if len(tokens) > self._config.max_prompt_length:
            raise ConfigError(
                f"the instruction {instruction!r} has {len(tokens)} tokens with its prompt, more than"
                f" rollout.max_prompt_tokens = {self._config.max_prompt_length}",
                key="rollout.max_prompt_tokens",
                value=self._config.max_prompt_length,
                hint=f"set rollout.max_prompt_tokens={len(tokens)} or more",
            )
        return tokens

    @cached_property
    def _end(self) -> int | None:
        return self.tokenizer.convert_tokens_to_ids(self._config.prompt_end) if self._config.prompt_end else None

    @cached_property
    def _pad(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id if pad is None else pad)
