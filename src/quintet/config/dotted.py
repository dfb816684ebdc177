"""Nested mappings addressed by dotted keys: `env.size` is `tree["env"]["size"]`."""

from collections.abc import Iterator, Mapping
from typing import Any


def get_value(tree: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Return the value of a dotted key, or `default` if it is missing or a parent is no mapping.

    >>> get_value({"env": {"size": 4}}, "env.size")
    4
    """
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return default
        node = node[part]
    return node


def has_key(tree: Mapping[str, Any], key: str) -> bool:
    """Return whether the tree has a value for a dotted key; null counts."""
    missing = object()
    return get_value(tree, key, missing) is not missing


def set_value(tree: dict[str, Any], key: str, value: object) -> None:
    """Set a dotted key in place. Missing parents, and parents that are no mappings, become mappings."""
    *parents, last = key.split(".")
    node = tree
    for part in parents:
        if not isinstance(node.get(part), dict):
            node[part] = {}
        node = node[part]
    node[last] = value


def delete_value(tree: dict[str, Any], key: str) -> None:
    """Delete a dotted key in place, which has to exist; its section stays."""
    *sections, last = key.split(".")
    node = tree
    for section in sections:
        node = node[section]
    del node[last]


def is_inside(key: str, section: str) -> bool:
    """Return whether a dotted key is the section or lies in it."""
    return key == section or key.startswith(f"{section}.")


def sections_around(key: str) -> Iterator[str]:
    """Yield the sections in which a dotted key lies, the innermost first.

    >>> [*sections_around("actor.optimizer.epsilon")]
    ['actor.optimizer', 'actor']
    """
    while "." in key:
        key = key.rpartition(".")[0]
        yield key


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping of dotted keys, in the same order. An empty mapping leaves no key.

    >>> flatten({"seed": 1, "env": {"size": 4}})
    {'seed': 1, 'env.size': 4}
    """
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping of dotted keys as nested mappings.

    >>> unflatten({"env.name": "sokoban", "env.boxes": 2})
    {'env': {'name': 'sokoban', 'boxes': 2}}
    """
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        set_value(tree, key, value)
    return tree
