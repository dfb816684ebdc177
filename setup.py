"""Adds the examples to the wheel; everything else is in pyproject.toml."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithExamples(build_py):
    """Copies `examples/` into the package; an editable installation reads them beside the sources."""

    def run(self) -> None:
        """Build the package."""
        super().run()
        if not self.editable_mode:
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree("examples", Path(self.build_lib) / "quintet/examples", dirs_exist_ok=True, ignore=ignore)


setup(cmdclass={"build_py": BuildWithExamples})
