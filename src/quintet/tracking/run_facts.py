"""What loggers show of a run besides its metrics: configuration, kind, versions and commit."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from quintet import __version__
from quintet.config.native.experiment import Experiment
from quintet.config.plan.run_plan import describe_kind
from quintet.hardware import package_version

PACKAGES = ("torch", "transformers", "vllm", "ray")
GIT_SECONDS = 5.0


def run_facts(config: Experiment) -> dict[str, Any]:
    """Return the configuration as JSON values, and under `run` the kind of run, versions and the commit of the working
    directory, if it is in a git repository."""
    versions = {name: version for name in PACKAGES if (version := package_version(name)) is not None}
    facts = {"kind": describe_kind(config), "quintet": __version__, "python": platform.python_version(), **versions}
    if commit := working_commit():
        facts["commit"] = commit
    return {**config.model_dump(mode="json"), "run": facts}


def working_commit() -> str | None:
    """Return the commit of the repository around the working directory, None without one."""
    git = shutil.which("git")
    if git is None:
        return None
    command = [git, "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_SECONDS)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def flat_facts(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings under dotted names.

    >>> [*flat_facts({"policy": {"preset": "grid-1m"}, "seed": 0})]
    [('policy.preset', 'grid-1m'), ('seed', 0)]
    """
    for name, value in facts.items():
        if isinstance(value, Mapping) and value:
            yield from flat_facts(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
