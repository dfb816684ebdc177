"""Types of RLinf's values that a type expression cannot describe, and RLinf's names of native components."""

import re
from collections.abc import Mapping
from typing import Any

from quintet.config.dialects.dialect import tables
from quintet.config.dialects.value_types import ValueType

TABLES = tables("rlinf")
_RANGE = r"(all|\d+(-\d+)?)(:\d+(-\d+)?)?"
_RANKS = re.compile(rf"({_RANGE})(,({_RANGE}))*,?", re.IGNORECASE)


def _is_placement(value: Any) -> bool:
    if isinstance(value, Mapping):
        # a group of nodes waits by its own key
        return set(value) == {"node_group", "placement"} and _is_placement(value["placement"])
    if isinstance(value, str):
        return _RANKS.fullmatch(re.sub(r"\s", "", value)) is not None
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_path_or_empty(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_image_size(value: Any) -> bool:
    is_list = isinstance(value, list | tuple) and len(value) in (2, 3)
    return is_list and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value)


VALUE_TYPES = {
    "path_or_empty": ValueType("text, or '' or null for random weights", _is_path_or_empty),
    "image_size": ValueType("a list of two integers ≥ 1, after the channels if there are three", _is_image_size),
    "placement": ValueType("ranks such as all, 3, 0,2,3, 0-3, 0-3,5,14, or with processes 0-1:0-3", _is_placement),
    "fsdp_strategy": ValueType(
        "fsdp or fsdp2, in any case", lambda value: str(value).lower() in ("fsdp", "fsdp2"), ("fsdp", "fsdp2")
    ),
    "group_selection": ValueType(
        "a group and what is taken from it", lambda value: isinstance(value, Mapping) and len(value) == 1
    ),
}
COMPONENTS: Mapping[str, tuple[str, ...]] = {name: tuple(names) for name, names in TABLES["components"].items()}
"""Native components by the names in `cluster.component_placement`; `inference` computes the log-probs of the policy
before its updates, and those of the reference."""
AGENT_SECTIONS = ("agentloop", "agentlightning", "tools", "rollout_server")
"""Sections that only runs of agents have."""
