"""Hardware and installed packages of this machine, found without importing any of them.

Callers write `hardware.num_gpus()`, so that a test that replaces a function here replaces it for all of them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

DEVICES = Path("/dev")
CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def num_gpus() -> int:
    """Count the GPUs by their device files; at least 1 under WSL, which exposes a GPU without such files."""
    nvidia = sum(path.name.removeprefix("nvidia").isdigit() for path in DEVICES.glob("nvidia*"))
    nvidia = nvidia or int((DEVICES / "dxg").exists())
    return nvidia or (len(list(DEVICES.glob("dri/renderD*"))) if (DEVICES / "kfd").exists() else 0)


def sees_gpu() -> bool:
    """Return whether a run of this process would compute on a GPU."""
    return num_gpus() > 0 and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")


def nvidia_smi() -> tuple[str, ...]:
    """Return name, memory and driver of each GPU, a line each; empty if `nvidia-smi` is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    command = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)  # noqa: S603 - no shell
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(done.stdout.splitlines())


def cpu_cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Return the size of host memory, or the limit of this process's control groups if that is smaller."""
    return min((os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_group_limits()))


def _group_limits() -> Iterator[int]:
    """Yield the memory limits of the control groups that this process is in, of either version of cgroups."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        lines = []
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        root, name = (CGROUPS / "memory", "memory.limit_in_bytes") if controllers else (CGROUPS, "memory.max")
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            with suppress(OSError, ValueError):
                yield int((directory / name).read_text())


def is_installed(module: str) -> bool:
    """Return whether a module can be imported; only the packages around it are."""
    try:
        return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def package_version(distribution: str) -> str | None:
    """Return the installed version of a distribution, None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def install_command(packages: Iterable[str]) -> str:
    """Return a shell command that installs packages.

    >>> install_command(["wandb", "einops<1,>=0.8"])
    "pip install wandb 'einops<1,>=0.8'"
    """
    return shlex.join(["pip", "install", *packages])


def extra_packages(extra: str) -> list[str]:
    """Return the packages of an extra of this distribution with their versions, such as `einops<1,>=0.8`.

    The extra itself can be installed only from a clone: no package index has this distribution. Returns nothing if the
    code runs from a directory that is not installed.
    """
    from packaging.requirements import Requirement

    try:
        requirements = map(Requirement, importlib.metadata.requires("quintet") or ())
    except importlib.metadata.PackageNotFoundError:
        return []
    return [
        f"{package.name}{package.specifier}"
        for package in requirements
        if package.marker is not None and package.marker.evaluate({"extra": extra})
    ]
