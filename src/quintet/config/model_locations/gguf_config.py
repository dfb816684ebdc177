"""The `config.json` of a GGUF file, for the architectures in `gguf_config.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from quintet.config.model_locations.gguf_header import GGUFHeader, UnreadableGGUFError, read_gguf_header
from quintet.package_files import read_yaml

TOKENS = "tokenizer.ggml.tokens"
SPECIAL_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}
"""Names of special tokens in `config.json`, by the names in GGUF files."""


class UnsupportedGGUFError(Exception):
    """The file has an architecture, a setting or a tensor that is not converted."""


@lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = read_yaml(__file__)
    return table


def gguf_architectures() -> tuple[str, ...]:
    """Return the architectures of GGUF files that can be converted."""
    return tuple(_table()["architectures"])


def read_gguf_config(file: Path) -> dict[str, Any]:
    """Return the `config.json` of the model in a GGUF file, from its header alone.

    Raises:
        UnsupportedGGUFError: it would not describe the model.
        UnreadableGGUFError: the file is no GGUF file, is damaged, or lacks a setting.
        OSError: it cannot be read.
    """
    header = read_gguf_header(file)
    if header.architecture not in gguf_architectures():
        supported = ", ".join(gguf_architectures())
        raise UnsupportedGGUFError(f"its architecture is {header.architecture}; supported are {supported}")
    architecture: Mapping[str, Any] = _table()["architectures"][header.architecture]
    names: Mapping[str, str] = {**_table()["settings"], **architecture.get("settings", {})}
    _check_settings(header, {*names, *_table()["checked"]})
    _check_tensors(header, architecture)
    _check_tokenizer(header)
    return {
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "vocab_size": _vocabulary(header),
        **architecture["config"],
        **{name: _setting(header, key) for key, name in names.items() if _key(header, key) in header.settings},
        **_rope(header),
        **_special_tokens(header),
    }


def _key(header: GGUFHeader, name: str) -> str:
    return f"{header.architecture}.{name}"


def _setting(header: GGUFHeader, name: str) -> Any:
    key = _key(header, name)
    if key not in header.settings:
        raise UnreadableGGUFError(f"it has no single value of {key}")
    return header.settings[key]


def _check_settings(header: GGUFHeader, known: set[str]) -> None:
    prefix = f"{header.architecture}."
    for key in (*header.settings, *header.array_lengths):
        if key.startswith(prefix) and key.removeprefix(prefix) not in known:
            value = header.settings.get(key, "a list")
            raise UnsupportedGGUFError(f"its setting {key} = {value} is not converted")


def _check_tensors(header: GGUFHeader, architecture: Mapping[str, Any]) -> None:
    table = _table()
    mlp = table["expert_tensors" if architecture.get("has_experts") else "mlp_tensors"]
    of_layers = {*table["layer_tensors"], *mlp, *architecture.get("tensors", ())}
    for name in header.tensors:
        block, _, rest = name.partition(".")
        part = rest.partition(".")[2] if block == "blk" else None
        if name not in table["tensors"] and part not in of_layers:
            raise UnsupportedGGUFError(f"its tensor {name} is not converted")


def _check_tokenizer(header: GGUFHeader) -> None:
    splits = header.settings.get("tokenizer.ggml.pre")
    if header.settings.get("tokenizer.ggml.model") == "gpt2" and splits not in _table()["pre_tokenizers"]:
        raise UnsupportedGGUFError(f"its setting tokenizer.ggml.pre = {splits} is not converted")


def _vocabulary(header: GGUFHeader) -> int:
    stored = header.settings.get(_key(header, "vocab_size"), header.array_lengths.get(TOKENS))
    if not isinstance(stored, int):
        raise UnreadableGGUFError("it has neither a vocabulary nor its size")
    return stored


def _rope(header: GGUFHeader) -> dict[str, Any]:
    """Return the settings of rotary embeddings.

    Raises:
        UnsupportedGGUFError: they rotate a part of each head, or values have another size than keys.
    """
    hidden, heads = _setting(header, "embedding_length"), _setting(header, "attention.head_count")
    head_dim = header.settings.get(_key(header, "attention.key_length"), hidden // heads)
    for name in ("rope.dimension_count", "attention.value_length"):
        if header.settings.get(_key(header, name), head_dim) != head_dim:
            message = f"{_key(header, name)} = {_setting(header, name)} differs from the {head_dim} of a key"
            raise UnsupportedGGUFError(f"its setting {message}, which is not converted")
    rope = {"rope_type": "default", "rope_theta": header.settings.get(_key(header, "rope.freq_base"), 10000.0)}
    return {"head_dim": head_dim, "rope_parameters": rope}


def _special_tokens(header: GGUFHeader) -> dict[str, Any]:
    keys = {name: f"tokenizer.ggml.{token}_token_id" for token, name in SPECIAL_TOKENS.items()}
    return {name: header.settings.get(key) for name, key in keys.items()}
