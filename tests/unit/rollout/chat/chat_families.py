"""Tokenizers of several model families, made on the spot: the special tokens and the way of taking text apart that
the family has, and a vocabulary learnt from a page of text, so that merges across borders really happen."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "templates"
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA_WORDS = QWEN_WORDS.replace(r"\p{N}|", r"\p{N}{1,3}|")
PAGE = (
    "system\nYou are a walker on ice. Reach the goal.\n\n",
    "user\n P _ O _\n _ _ G _\n\nWhere do you go?\n",
    "user\n\n\nassistant\n\nassistant\n <think>\n go right \n</think>\n\n<answer> Right </answer>\n",
    "assistant\nRight || Down\n\n\n  and   then  Up \n model\n [INST] go [/INST] <|im_end|> </s> <end_of_turn>\n",
    "Größe, naïve, 目标, goal goal goal, 12 345 _ _ _ _ 🙂🙂\n\n",
)


@dataclass(frozen=True, slots=True)
class Family:
    """A chat template and the tokenizer that goes with it."""

    template: str
    make: Callable[[], PreTrainedTokenizerFast]


def _specials(tokens: Sequence[str]) -> list[AddedToken]:
    return [AddedToken(token, normalized=False, special=True) for token in tokens]


def _finished(
    backend: Tokenizer, special: Sequence[str], other: Sequence[str], bos: str | None, eos: str
) -> PreTrainedTokenizerFast:
    backend.add_special_tokens(_specials(special))
    backend.add_tokens([AddedToken(token, normalized=False, special=False) for token in other])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, clean_up_tokenization_spaces=False
    )


Made = Callable[[], PreTrainedTokenizerFast]


def by_bytes(pattern: str, special: Sequence[str], other: Sequence[str], bos: str | None, eos: str) -> Made:
    """Byte-level BPE over words of that pattern, as Qwen and Llama 3 have it."""

    @cache
    def make() -> PreTrainedTokenizerFast:
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=520, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator(PAGE, trainer)
        return _finished(backend, special, other, bos, eos)

    return make


def by_pieces(special: Sequence[str], scheme: str, bos: str, eos: str) -> Made:
    """BPE over text whose blanks are `▁`, what isn't known byte by byte: as Mistral and Gemma have it. `scheme` says
    where a blank is put before text."""

    @cache
    def make() -> PreTrainedTokenizerFast:
        backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
        space = normalizers.Replace(" ", "▁")
        if scheme == "never":
            backend.normalizer = space
            backend.pre_tokenizer = pre_tokenizers.Split("▁", behavior="merged_with_next")
        else:
            backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
            + ([] if scheme == "never" else [decoders.Strip(" ", 1, 0)])
        )
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            vocab_size=700,
            special_tokens=["<unk>", *special, *bytes_],
            initial_alphabet=["▁", "\n"],
            show_progress=False,
        )
        backend.train_from_iterator(PAGE, trainer)
        # the trainer's special tokens are words of the vocabulary; those that are meant come back below
        learnt = json.loads(backend.to_str()) | {"added_tokens": []}
        return _finished(Tokenizer.from_str(json.dumps(learnt)), special, (), bos, eos)

    return make


QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>", "<tool_response>", "</tool_response>")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
qwen = by_bytes(QWEN_WORDS, QWEN, ("<tool_call>",), None, "<|im_end|>")
qwen3 = by_bytes(QWEN_WORDS, QWEN, THINK, None, "<|im_end|>")
llama = by_bytes(LLAMA_WORDS, LLAMA, (), "<|begin_of_text|>", "<|eot_id|>")
mistral = by_pieces(("<s>", "</s>"), "first", "<s>", "</s>")
mistral_legacy = by_pieces(("<s>", "</s>"), "always", "<s>", "</s>")
mistral_v3 = by_pieces(("<s>", "</s>", "[INST]", "[/INST]"), "first", "<s>", "</s>")
tekken = by_bytes(LLAMA_WORDS, ("<s>", "</s>", "[INST]", "[/INST]"), (), "<s>", "</s>")
gemma = by_pieces(("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "never", "<bos>", "<eos>")

FAMILIES: dict[str, Family] = {
    "qwen2_5": Family("qwen2_5", qwen),
    "qwen3": Family("qwen3", qwen3),
    "qwen3_nonthinking": Family("qwen3", qwen3),
    "qwen3_thinking": Family("qwen3_thinking", qwen3),
    "llama3": Family("llama3", llama),
    "llama3_2": Family("llama3_2", llama),
    "mistral_v1": Family("mistral_v1", mistral),
    "mistral_v1_legacy": Family("mistral_v1", mistral_legacy),
    "mistral_v2": Family("mistral_v2", mistral),
    "mistral_v3": Family("mistral_v3", mistral_v3),
    "mistral_v3_bytes": Family("mistral_v3", tekken),
    "gemma": Family("gemma", gemma),
}


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """The family's tokenizer with its template."""
    family = FAMILIES[name]
    tokenizer = copy.deepcopy(family.make())
    tokenizer.chat_template = (TEMPLATES / f"{family.template}.jinja").read_text()
    return tokenizer
