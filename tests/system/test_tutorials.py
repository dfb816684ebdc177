"""If these fail, a reader who executes a tutorial gets an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs/tutorials").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_all_cells_of_the_tutorial_run(notebook: Path) -> None:
    assert len(NOTEBOOKS) == 2
    # cells run in other directories: a relative path of modules would end there
    paths = [str(Path(part).resolve()) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, ROOT / "scripts/run_tutorials.py", "--check", notebook]
    subprocess.run(command, check=True, env=environment, timeout=400)
