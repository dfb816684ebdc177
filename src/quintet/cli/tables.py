"""Tables and headings of commands, which print them as text of at most `WIDTH` characters."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

WIDTH = 100
Row = tuple[str, str, str]
"""Name, number and explanation."""


@contextmanager
def page() -> Iterator[Console]:
    """Yield a console that prints to standard output at the end, without trailing blanks and without markup."""
    terminal, buffer = sys.stdout.isatty(), io.StringIO()
    width = None if terminal else WIDTH
    yield Console(file=buffer, force_terminal=terminal, width=width, markup=False, emoji=False, highlight=False)
    print("\n".join(line.rstrip() for line in buffer.getvalue().splitlines()))


def section(out: Console, title: str) -> None:
    """Print a heading with a blank line above."""
    out.print()
    out.print(Text(title, style="bold cyan"))


def clean(text: str) -> str:
    """Replace control characters, which could move the cursor."""
    return "".join(char if char.isprintable() or char == "\n" else "�" for char in text)


def numbers_table(rows: Iterable[Row]) -> Table:
    """Return a table of name, number and explanation."""
    columns = (Column(), Column(justify="right", style="bold"), Column(style="dim"))
    table = Table.grid(*columns, padding=(0, 2, 0, 0))
    for name, number, explanation in rows:
        table.add_row(f"  {name}", number, explanation)
    return table


def plain_table(*columns: Column | str) -> Table:
    """Return a table with a single line below the header."""
    return Table(*columns, box=SIMPLE_HEAD, show_edge=False, header_style="dim", padding=(0, 1, 0, 0), pad_edge=False)
