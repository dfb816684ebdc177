"""The kernels, compiled on the spot: once for a machine, kept in the user's cache."""

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

__all__ = ["OFF", "compiler", "library"]

OFF = "QUINTET_KERNELS"
"""Environment variable: `0` leaves them out, and torch's own operations take their place."""
FOLDER = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
PLAIN = ("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
FLAGS = ((*PLAIN, "-march=native", "-mprefer-vector-width=512"), (*PLAIN, "-march=native"), PLAIN)
"""The first that the compiler knows are taken."""
SECONDS = 120

logger = logging.getLogger(__name__)


def compiler() -> str | None:
    """The C++ compiler of this machine: `$CXX`, or the first of the usual names."""
    return next((found for name in (os.environ.get("CXX"), *COMPILERS) if name and (found := shutil.which(name))), None)


@lru_cache(maxsize=4)
def library(name: str = "decoding") -> ctypes.CDLL | None:
    """The compiled kernels of a source; None where there is no compiler, or they are left out by `QUINTET_KERNELS=0`.

    They call the OpenMP library that torch has loaded, so torch must have been imported.
    """
    if os.environ.get(OFF) == "0":
        return None
    command = compiler()
    if command is None:
        logger.info("no C++ compiler: %s on a CPU takes torch's own operations, slower", name)
        return None
    source = FOLDER / f"{name}.cpp"
    path = _place(command, source)
    try:
        if not path.is_file():
            _compile(command, source, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s takes torch's own operations, slower: %s", name, _reason(error))
        return None


def _place(command: str, source: Path) -> Path:
    """Where the library lies: one for each source, compiler and processor."""
    texts = [path.read_text() for path in (source, *sorted(FOLDER.glob("*.hpp")))]
    words = [*texts, command, str(FLAGS), platform.machine(), _processor()]
    digest = hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]
    return _cache() / f"{source.stem}-{digest}.so"


def _cache() -> Path:
    """A directory of the user's own, that nobody else can write."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = root / "quintet"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory.stat().st_uid == os.getuid() and os.access(directory, os.W_OK):
            return directory
    except OSError:
        # a home that can't be written: what is compiled lasts as long as this process
        pass
    return _temporary()


@lru_cache(maxsize=1)
def _temporary() -> Path:
    return Path(tempfile.mkdtemp(prefix="quintet-kernels-"))


def _processor() -> str:
    """What the processor can do: a cache may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _compile(command: str, source: Path, path: Path) -> None:
    """Compile into place, all at once: several processes may do so at a time.

    Raises:
        subprocess.SubprocessError: the compiler can't.
        OSError: nothing can be written.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, whole = Path(folder) / "made.o", Path(folder) / "whole.so"
        for position, flags in enumerate(FLAGS):
            try:
                _run(command, *flags, "-c", str(source), "-o", str(made))
                break
            except subprocess.CalledProcessError:
                if position + 1 == len(FLAGS):
                    raise
        # without -fopenmp: torch's own OpenMP library is in the process already, and must stay the only one
        _run(command, "-shared", str(made), "-o", str(whole))
        whole.replace(path)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=SECONDS, stdin=subprocess.DEVNULL)  # noqa: S603


def _reason(error: Exception) -> str:
    said = getattr(error, "stderr", None)
    return said.decode(errors="replace").strip().splitlines()[0] if said else str(error)
