"""Text functions that the rewards of ROLL share."""

from __future__ import annotations

SPECIAL_TOKENS = ("<|endoftext|>", "<pad>", "<|im_end|>")
"""Tokens as text that ROLL's rules remove from a response."""
NGRAM_WORDS = 3


def remove_special_tokens(text: str, tokens: tuple[str, ...] = SPECIAL_TOKENS) -> str:
    """Remove each of the tokens everywhere, in their order."""
    for token in tokens:
        text = text.replace(token, "")
    return text


def text_after_thinking(text: str) -> str:
    """Return the text after the last `</think>` without leading line breaks, or the whole text."""
    _, tag, rest = text.rpartition("</think>")
    return rest.lstrip("\n") if tag else text


def repetition_penalty(text: str, max_penalty: float) -> float:
    """Return `max_penalty` times the share of word triples that occurred before (Yeo et al. 2025).

    >>> repetition_penalty("a b c A B C", -0.5)  # abc bca cab abc
    -0.125
    """
    words = text.lower().split()
    ngrams = list(zip(*(words[start:] for start in range(NGRAM_WORDS)), strict=False))
    return (1 - len(set(ngrams)) / len(ngrams)) * max_penalty if ngrams else 0.0
