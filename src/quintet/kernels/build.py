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
from functools import lru_cache
from pathlib import Path

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
        logger.info("no C++ compiler found: %s on the CPU falls back to slower torch operations", name)
        return None
    source = SOURCE_DIRECTORY / f"{name}.cpp"
    path = _library_path(command, source)
    try:
        if not path.is_file():
            _compile(command, source, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "cannot build the %s kernels, falling back to slower torch operations: %s", name, _error_line(error)
        )
        return None


def _library_path(command: str, source: Path) -> Path:
    """Return the cache path, which depends on source, compiler, flags and processor."""
    texts = [path.read_text() for path in (source, *sorted(SOURCE_DIRECTORY.glob("*.hpp")))]
    parts = [*texts, command, str(FLAG_SETS), platform.machine(), _cpu_features()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return _cache_directory() / f"{source.stem}-{digest}.so"


def _cache_directory() -> Path:
    """Return a directory that is owned by the user, or a temporary one."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = root / "quintet"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_uid == os.getuid() and os.access(directory, os.W_OK):
            return directory
    except OSError:
        # the home directory is not writable: use the library for this process only
        pass
    return _temporary_directory()


@lru_cache(maxsize=1)
def _temporary_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="quintet-kernels-"))


def _cpu_features() -> str:
    """Return the CPU's feature flags, since machines of several kinds may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
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
    stderr = getattr(error, "stderr", None)
    return stderr.decode(errors="replace").strip().splitlines()[0] if stderr else str(error)
