"""Chat templates of published models, written from their documented behaviour, and tokenizers with their tokens."""

from __future__ import annotations

import copy
import re
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "chat_templates"
NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
SPECIAL = re.compile(r"<[|｜][^<>{}]*?[|｜]>|\[/?[A-Z_]{3,}\]")
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen's words: blank lines are tokens, and brackets share a token with what is beside them."""
PAGE = (
    "user\nWhat is the weather in Paris, and in Rome?\n\n\n<think>\n\n</think>\n\nIt is sunny.\n",
    'assistant\n\n\n{"name": "weather", "arguments": {"city": "Paris", "days": 3}}\n\n</tool_call>\n<tool_response>\n',
    "<think>\nThe user asks for the weather.\n</think>\n\nsystem\nBe short.\n\n",
)
END_TOKENS = ("<|im_end|>", "<｜end▁of▁sentence｜>", "<|eot_id|>", "<|end_of_text|>", "<|return|>")


@cache
def _tokenizer(name: str) -> PreTrainedTokenizerFast:
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=480, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(PAGE, trainer)
    special = {*SPECIAL.findall(template), "<|im_user|>", "<|im_assistant|>", "<|system|>", "<|user|>", "<|assistant|>"}
    eos = next((token for token in END_TOKENS if token in special), "<|endoftext|>")
    tokens = sorted({*special, eos, "<bos>"})
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def published(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a template."""
    return copy.deepcopy(_tokenizer(name))
