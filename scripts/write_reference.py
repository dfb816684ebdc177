"""Write the reference pages from the code: `python scripts/write_reference.py [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

from quintet.config.dialects.checking import noop_words
from quintet.config.dialects.dialect import DIALECTS, Dialect
from quintet.config.dialects.ledger import Row
from quintet.config.keys import REPEATED, Key, keys, show
from quintet.tracking.metrics import markdown_table

DOCS = Path(__file__).parent.parent / "docs"


def configuration() -> str:
    """Every key that works, with what it takes, its default and meaning."""
    lines = [
        "# Configuration",
        "",
        "Made from the code by `scripts/write_reference.py`. Every key can stand in a YAML file or on the command line",
        "(`quintet train run.yaml training.steps=50`). A key that is neither here nor among those",
        "[known and not yet built](reference/waiting.md) is refused as unknown.",
    ]
    section = None
    for key in keys():
        if (key.is_section and key.name != REPEATED) or (key.waits and not key.lacks):
            continue
        if key.name.startswith(f"{REPEATED}."):
            continue
        above = key.name.split(".")[0] if "." in key.name else "the run"
        if above != section:
            section = above
            lines += ["", f"## {above}", "", "| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
        lines.append(_table_row([f"`{key.name}`", key.takes, f"`{show(key.default)}`", _meaning(key)]))
    return "\n".join(lines) + "\n"


def waiting() -> str:
    """Every key that is known and can't be honoured yet, with what it waits for."""
    lines = [
        "# Keys that wait",
        "",
        "Made from the code by `scripts/write_reference.py`. The native schema says all that the five frameworks can",
        "ask for. These keys of it are checked, planned and translated; a run that sets one to anything else than its",
        "default is refused and names what it waits for. `critic` and `reference` take those of `actor`, too.",
        "",
        "| key | takes | default | meaning | waits for |",
        "| --- | --- | --- | --- | --- |",
    ]
    waits = [key for key in keys() if key.waits and not key.lacks and not key.is_section]
    waits = [key for key in waits if not key.name.startswith(f"{REPEATED}.")]
    names = {key.name for key in waits}
    for key in waits:
        section, _, rest = key.name.partition(".")
        if section not in ("critic", "reference") or f"actor.{rest}" not in names:
            cells = [f"`{key.name}`", key.takes, f"`{show(key.default)}`", _meaning(key), key.waits]
            lines.append(_table_row(cells))
    return "\n".join(lines) + "\n"


def _meaning(key: Key) -> str:
    only = f" Only with `{key.kind[0]}={key.kind[1]}`." if key.kind and not key.name.endswith(".name") else ""
    lacks = f" {', '.join(f'`{value}`' for value in key.lacks)} wait for {key.waits}." if key.lacks else ""
    return f"{key.meaning}{only}{lacks}"


def metrics() -> str:
    """Every metric with its meaning, unit and healthy range."""
    head = (
        "# Metrics\n\nMade from the code by `scripts/write_reference.py`."
        " What a run writes to `metrics.jsonl` and TensorBoard.\n\n"
    )
    return head + markdown_table().rstrip("\n") + "\n"


def dialect_page(dialect: Dialect) -> str:
    """Every documented key of a dialect with what becomes of it."""
    rows = [row for reference in dialect.references for row in reference.load()]
    honoured = sum(row.pending is None for row in rows)
    lines = [
        f"# The {dialect.name} dialect",
        "",
        "Made from the code by `scripts/write_reference.py`. A honoured key does what its line says; a pending one",
        "names what it waits for, and a run that sets it to anything else than the values in brackets is refused.",
        "",
        f"{len(rows)} keys, {honoured} honoured.",
    ]
    for reference in dialect.references:
        lines += ["", f"## {reference.name}", "", "| key | takes | shown | effect | native | state |"]
        lines += ["| --- | --- | --- | --- | --- | --- |", *map(_ledger_row, reference.load())]
    return "\n".join(lines) + "\n"


def _ledger_row(row: Row) -> str:
    also = f" Also `{'`, `'.join(row.aliases)}`." if row.aliases else ""
    without = f" [{', '.join(f'`{noop_words(value)}`' for value in row.noop)}]" if row.noop else ""
    state = "honoured" if row.pending is None else f"pending: {row.pending}{without}"
    native = ", ".join(f"`{name}`" for name in row.native)
    where = f" Only where `{row.only_if[0]}` is `{noop_words(row.only_if[1])}`." if row.only_if else ""
    effect = f"{row.effect}{where}{also}"
    return _table_row([f"`{row.key}`", row.takes.words, f"`{show(row.default)}`", effect, native, state])


def _table_row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def main() -> int:
    pages = {"configuration.md": configuration(), "metrics.md": metrics()}
    pages |= {"reference/waiting.md": waiting()}
    pages |= {f"reference/{dialect.name}.md": dialect_page(dialect) for dialect in DIALECTS.values()}
    if "--check" in sys.argv:
        return int(any((DOCS / name).read_text() != text for name, text in pages.items()))
    for name, text in pages.items():
        (DOCS / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
