"""Execute the notebooks of docs/tutorials and store their outputs.

    python scripts/run_tutorials.py [--check] [NOTEBOOK …]

Each runs in an empty directory, with `quintet` of this Python on the PATH. `--check` stores nothing. Fails if a cell
does.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import nbformat
from nbclient import NotebookClient

TUTORIALS = Path(__file__).parents[1] / "docs/tutorials"
CELL_SECONDS = 300


def execute(path: Path) -> nbformat.NotebookNode:
    """Return a notebook with the outputs of all cells.

    Raises:
        CellExecutionError: a cell fails.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=CELL_SECONDS, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.get("metadata", {}).pop("execution", None)  # times of execution differ each time
    return notebook


def main(names: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(TUTORIALS.glob("*.ipynb")))
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(names)
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for path in options.notebooks:
        notebook = execute(path)
        if not options.check:
            nbformat.write(notebook, path)


if __name__ == "__main__":
    main()
