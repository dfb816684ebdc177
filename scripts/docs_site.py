"""Hook of mkdocs: adds the pages that are in the root of the repository, with their links adapted to the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Add the root pages to the site."""
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=adapt((ROOT / name).read_text(encoding="utf-8"))))
    return files


def adapt(text: str) -> str:
    """Return a root page with links as they are in the site: relative to docs/, and to the names of `PAGES`.

    >>> adapt("[a](docs/a.md#b), [c](CONTRIBUTING.md), [d](LICENSE)")
    '[a](a.md#b), [c](contributing.md), d'
    """
    text = re.sub(r"\]\(docs/", "](", text)
    for name, page in PAGES.items():
        text = text.replace(f"]({name}", f"]({page}")
    return re.sub(r"\[([^\]]+)\]\((?:LICENSE|src/[^)]*|examples/[^)]*|benchmarks/[^)]*)\)", r"\1", text)
