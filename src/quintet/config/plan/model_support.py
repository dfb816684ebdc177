"""Model architectures that this version refuses, from `model_support.yaml`."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib import resources
from typing import Any

import yaml

LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
"""Settings of a `config.json` that list the kinds of its layers."""


@lru_cache(maxsize=1)
def model_support() -> Mapping[str, Any]:
    """Return the contents of `model_support.yaml`."""
    text = (resources.files("quintet.config.plan") / "model_support.yaml").read_text(encoding="utf-8")
    support: Mapping[str, Any] = yaml.safe_load(text)
    return support


def unsupported_features(config: Mapping[str, Any]) -> list[str]:
    """Return what a model does that this version does not compute, such as "state-space layers", from its
    `config.json`; empty if nothing is known."""
    parts = (config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict))
    text: Mapping[str, Any] = next(parts, {})
    found = [*_family_features((config.get("model_type"), text.get("model_type"))), *_features({**config, **text})]
    return list(dict.fromkeys(found))


def unsupported_reason(config: Mapping[str, Any]) -> str | None:
    """Return for a message why a model is refused, for example "state-space layers (mamba) are not supported yet"."""
    features = unsupported_features(config)
    if not features:
        return None
    return f"{' and '.join(features)} ({config.get('model_type')}) are not supported yet"


def _family_features(families: Iterable[object]) -> Iterator[str]:
    for feature, names in model_support()["families"].items():
        if any(family in names for family in families):
            yield feature


def _features(config: Mapping[str, Any]) -> Iterator[str]:
    support = model_support()
    listed = (config[key] for key in LAYER_LISTS if isinstance(config.get(key), list | tuple))
    for kind in dict.fromkeys(str(kind) for kinds in listed for kind in kinds):
        if kind in support["layers"]:
            yield support["layers"][kind]
    for name, setting in support["settings"].items():
        value = config.get(name)
        if value is not None and value is not False and value not in setting["neutral"]:
            yield setting["text"]
