"""Hardware and installed packages of this machine, found without importing any of them.

Callers write `hardware.num_gpus()`, so that a test that replaces a function here replaces it for all of them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import math
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
    """Count the CPU cores that this process may use; the time that its control groups may use is whole cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min((cores, *(max(1, math.ceil(quota)) for quota in _cpu_quotas())))


def memory_bytes() -> int:
    """Return the size of host memory, or the limit of this process's control groups if that is smaller."""
    limits = [int(text) for text in _group_files("memory", "memory.limit_in_bytes", "memory.max") if text.isdecimal()]
    return min((os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits))


def _cpu_quotas() -> Iterator[float]:
    """Yield the CPU limits of this process's control groups, cores."""
    quotas = [text.split() for text in _group_files("cpu", "cpu.cfs_quota_us", "cpu.max")]
    periods = [text.split()[-1] for text in _group_files("cpu", "cpu.cfs_period_us", "cpu.max")]
    for (quota, *_), period in zip(quotas, periods, strict=False):
        if quota.isdecimal() and period.isdecimal() and int(period):  # without a limit: -1, or max
            yield int(quota) / int(period)


def _group_files(controller: str, name: str, unified_name: str) -> Iterator[str]:
    """Yield the contents of a file in each control group that this process is in: `name` in version 1 of cgroups,
    where a controller has groups of its own, `unified_name` in version 2."""
    try:
        lines = MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for controllers, path in (line.split(":", 2)[1:] for line in lines):
        if controllers and controller not in controllers.split(","):
            continue
        group = (CGROUPS / controllers if controllers else CGROUPS) / path.lstrip("/")
        for directory in (group, *group.parents):
            if not directory.is_relative_to(CGROUPS):
                break
            with suppress(OSError):
                yield (directory / (name if controllers else unified_name)).read_text(encoding="utf-8").strip()


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
