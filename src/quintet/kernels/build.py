"""Compilation of the C++ kernels on first use, cached per machine in the user's cache directory."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from quintet.cache_directory import private_directories

KERNELS_VARIABLE = "QUINTET_KERNELS"
"""Environment variable; `0` disables the kernels, and torch operations are used."""
SOURCE_DIRECTORY = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
BASE_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
FLAG_SETS = ((*BASE_FLAGS, "-march=native", "-mprefer-vector-width=512"), (*BASE_FLAGS, "-march=native"), BASE_FLAGS)
"""In order of preference; the first set that the compiler accepts is used."""
COMPILE_TIMEOUT_SECONDS = 120

logger = logging.getLogger(__name__)


def find_compiler() -> str | None:
    """Return the path of the C++ compiler: `$CXX`, or the first of `COMPILERS` that is installed."""
    return next((path for name in (os.environ.get("CXX"), *COMPILERS) if name and (path := shutil.which(name))), None)


@lru_cache(maxsize=4)
def load_library(name: str = "decode") -> ctypes.CDLL | None:
    """Return the compiled library of `<name>.cpp`; None without a compiler or with `QUINTET_KERNELS=0`.

    It uses the OpenMP library that torch has loaded, so torch must have been imported.
    """
    if os.environ.get(KERNELS_VARIABLE) == "0":
        return None
    command = find_compiler()
    if command is None:
        logger.warning(
            "no C++ compiler (%s): %s on the CPU falls back to slower torch operations", ", ".join(COMPILERS), name
        )
        return None
    source = SOURCE_DIRECTORY / f"{name}.cpp"
    file_name, reasons = _library_name(command, source), []
    for directory in _directories():
        path = directory / file_name
        try:
            if not path.is_file():
                _compile(command, source, path)
            return ctypes.CDLL(str(path))
        except (OSError, subprocess.SubprocessError) as error:  # a full disk, or one from which no code may be loaded
            reasons.append(f"{directory}: {_error_line(error)}")
    logger.warning("cannot build the %s kernels, falling back to slower torch operations: %s", name, "; ".join(reasons))
    return None


def _directories() -> Iterator[Path]:
    """Yield directories in which the library may be: caches of the user, then one of this process."""
    yield from private_directories()
    with tempfile.TemporaryDirectory(prefix="quintet-kernels-") as directory:
        yield Path(directory)


def _library_name(command: str, source: Path) -> str:
    """Return the file name, which depends on source, compiler, flags and processor."""
    texts = [path.read_text(encoding="utf-8") for path in (source, *sorted(SOURCE_DIRECTORY.glob("*.hpp")))]
    parts = [*texts, command, str(FLAG_SETS), platform.machine(), _cpu_features()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return f"{source.stem}-{digest}.so"


def _cpu_features() -> str:
    """Return the CPU's feature flags, since machines of several kinds may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(command: str, source: Path, path: Path) -> None:
    """Compile `source` to `path` atomically, since several processes may compile at the same time.

    Raises:
        subprocess.SubprocessError: compilation failed.
        OSError: the library cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        object_file, library_file = Path(directory) / "kernels.o", Path(directory) / "kernels.so"
        for position, flags in enumerate(FLAG_SETS):
            try:
                _run(command, *flags, "-c", str(source), "-o", str(object_file))
                break
            except subprocess.CalledProcessError:
                if position + 1 == len(FLAG_SETS):
                    raise
        # link without -fopenmp: torch's OpenMP library is already loaded and must stay the only one
        _run(command, "-shared", str(object_file), "-o", str(library_file))
        library_file.replace(path)


def _run(*parts: str) -> None:
    subprocess.run(parts, check=True, capture_output=True, timeout=COMPILE_TIMEOUT_SECONDS, stdin=subprocess.DEVNULL)  # noqa: S603


def _error_line(error: Exception) -> str:
    """Return the compiler's line with the error, or else its first."""
    stderr = getattr(error, "stderr", None)
    lines = stderr.decode(errors="replace").strip().splitlines() if stderr else [str(error)]
    return next((line for line in lines if "error" in line.lower() or "No space" in line), lines[0])
