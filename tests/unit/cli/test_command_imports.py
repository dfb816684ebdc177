"""If these fail, a command that prints names or documentation takes seconds to start."""

from __future__ import annotations

import subprocess
import sys

import pytest

SHOW_IMPORTS = """
import sys
from quintet.cli.main import main

sys.argv[0] = "quintet"
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(*sorted(name for name in MODULES if name in sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("command", "modules"),
    [
        (["list"], ["torch", "transformers", "hydra", "pyarrow"]),
        (["doctor"], ["torch", "transformers", "hydra", "pyarrow", "quintet.config.plan.run_plan"]),
        (
            ["explain", "training.steps"],
            ["torch", "transformers", "hydra", "omegaconf", "numpy", "pyarrow", "quintet.config.dialects.loader"],
        ),
        (
            ["explain", "actor_rollout_ref.actor.clip_ratio"],
            ["torch", "hydra", "omegaconf", "quintet.cli.explain_metric"],
        ),
    ],
    ids=lambda value: value[0],
)
def test_a_command_imports_nothing_that_it_does_not_need(command: list[str], modules: list[str]) -> None:
    """Each of these takes a quarter of a second or more."""
    program = SHOW_IMPORTS.replace("MODULES", repr(modules))
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr.strip() == ""
