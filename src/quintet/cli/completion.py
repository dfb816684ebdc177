"""Completion of configuration files and keys in shells; `quintet --install-completion` sets it up."""

from __future__ import annotations

from pathlib import Path

SUFFIXES = (".yaml", ".yml", ".sh", ".txt")
"""Of files that a command reads as a configuration."""


def complete_config(incomplete: str) -> list[str]:
    """Return the configuration files and directories whose path begins so, and the native keys that do."""
    path = Path(incomplete)
    folder, prefix = (path, "") if incomplete.endswith("/") or not incomplete else (path.parent, path.name)
    entries = sorted(folder.glob("*")) if folder.is_dir() else []
    files = [
        f"{entry}/" if entry.is_dir() else str(entry)
        for entry in entries
        if entry.name.startswith(prefix) and (entry.is_dir() or entry.suffix in SUFFIXES)
    ]
    return files + (complete_key(incomplete) if incomplete else [])


def complete_key(incomplete: str) -> list[str]:
    """Return the native keys that begin so, each with `=`; after a section's dot those of the section."""
    from quintet.config.schema import key_names

    level = incomplete.count(".") + 1
    names = (name for name in key_names() if name.startswith(incomplete))
    parts = {".".join(name.split(".")[:level]): name.count(".") >= level for name in names}
    return [f"{name}." if is_section else f"{name}=" for name, is_section in parts.items()]
