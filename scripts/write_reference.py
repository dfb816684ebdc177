"""Write docs/configuration.md and docs/metrics.md from the code: `python scripts/write_reference.py [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

from quintet.config.keys import keys, show
from quintet.tracking.metrics import markdown_table

DOCS = Path(__file__).parent.parent / "docs"


def configuration() -> str:
    """Every key with what it takes, its default and meaning."""
    lines = [
        "# Configuration",
        "",
        "Made from the code by `scripts/write_reference.py`. Every key can stand in a YAML file or on the command line",
        "(`quintet train run.yaml training.steps=50`). A key that isn't listed here is refused.",
        "",
        "| key | takes | default | meaning |",
        "| --- | --- | --- | --- |",
    ]
    for key in keys():
        if not key.is_section:
            only = f" Only with `{key.kind[0]}={key.kind[1]}`." if key.kind and not key.name.endswith(".name") else ""
            cells = [f"`{key.name}`", key.takes, f"`{show(key.default)}`", f"{key.meaning}{only}"]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def metrics() -> str:
    """Every metric with its meaning, unit and healthy range."""
    head = (
        "# Metrics\n\nMade from the code by `scripts/write_reference.py`."
        " What a run writes to `metrics.jsonl` and TensorBoard.\n\n"
    )
    return head + markdown_table().rstrip("\n") + "\n"


def main() -> int:
    pages = {"configuration.md": configuration(), "metrics.md": metrics()}
    if "--check" in sys.argv:
        return int(any((DOCS / name).read_text() != text for name, text in pages.items()))
    for name, text in pages.items():
        (DOCS / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
