"""Write docs/configuration.md and docs/metrics.md from the code: `python scripts/write_reference.py [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

from quintet.config.faults import legal_keys
from quintet.config.native import Experiment
from quintet.tracking.metrics import markdown_table

DOCS = Path(__file__).parent.parent / "docs"


def configuration() -> str:
    """Every key with its default and meaning."""
    lines = [
        "# Configuration",
        "",
        "Made from the code by `scripts/write_reference.py`. Every key can stand in a YAML file or on the command line",
        "(`quintet train run.yaml training.steps=50`). A key that isn't listed here is refused.",
        "",
        "| key | default | meaning |",
        "| --- | --- | --- |",
    ]
    seen = set()
    for key, info in legal_keys(Experiment):
        section = hasattr(info.default, "model_dump")
        if section or key in seen:
            continue
        seen.add(key)
        default = "required" if info.is_required() else f"`{info.default}`"
        meaning = " ".join((info.description or "").split()).replace("|", "\\|")
        lines.append(f"| `{key}` | {default.replace('|', chr(92) + '|')} | {meaning} |")
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
