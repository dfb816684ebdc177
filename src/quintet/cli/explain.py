"""`quintet explain KEY`."""

from __future__ import annotations

from quintet.config.keys import Key, keys, nearest_keys, show
from quintet.errors import ConfigError

__all__ = ["run"]


def run(name: str) -> None:
    """Print the meaning, type, range and default of a key, or the keys of a section.

    Raises:
        ConfigError: no such key; the message names the nearest.
    """
    found = [key for key in keys() if key.name == name]
    if not found:
        near = nearest_keys(name, list(keys()))
        hint = f"did you mean {' or '.join(near)}?" if near else "`quintet explain world` shows a section"
        raise ConfigError(f"unknown key {name}", key=name, hint=hint)
    for key in found:
        _explain(key)


def _explain(key: Key) -> None:
    print(_title(key))
    if key.meaning:
        print(f"  {key.meaning}")
    print(f"  takes    {key.takes}")
    if not key.is_section:
        print(f"  default  {show(key.default)}")
        return
    print("  keys")
    for other in keys():
        if other.name.startswith(f"{key.name}.") and not other.is_section:
            print(f"    {_title(other)}")


def _title(key: Key) -> str:
    return key.name if key.kind is None else f"{key.name}  (with {key.kind[0]}={key.kind[1]})"
