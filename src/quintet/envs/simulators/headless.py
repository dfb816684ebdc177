"""Rendering by MuJoCo on machines without a display."""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib
import os
import sys

from quintet.errors import MachineError

LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}
"""Libraries by the values of `MUJOCO_GL`, in the order in which they are tried."""


def select_renderer() -> None:
    """Set `MUJOCO_GL` to a library that is installed, unless it is set. MuJoCo reads it when it is imported.

    Raises:
        MachineError: neither EGL nor OSMesa is installed.
    """
    if "MUJOCO_GL" not in os.environ and sys.platform == "linux":
        installed = [name for name, library in LIBRARIES.items() if ctypes.util.find_library(library)]
        if not installed:
            raise MachineError(
                "MuJoCo cannot render without a display: neither EGL nor OSMesa is installed",
                "install libegl1 and a driver (Mesa or NVIDIA), or set MUJOCO_GL=glfw where there is a display",
            )
        os.environ["MUJOCO_GL"] = installed[0]
    # Triton and Mesa's drivers both contain LLVM; triton, which torch's optimizers import, must be loaded first.
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")
