"""Figures of devices from `devices.yaml`, and the device of this machine."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml

from quintet import hardware
from quintet.errors import ConfigError, nearest

REFERENCE_DEVICE = "h100"
"""Device whose figures rank proposals if only the memory is known."""


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """Peak figures of one device, in bytes and FLOP/s; the file documents them."""

    name: str
    memory: float
    flops: float
    float32_flops: float
    memory_bandwidth: float
    link: float
    network: float
    host: float
    source: str


@cache
def known_devices() -> Mapping[str, DeviceFigures]:
    """Return all devices of the file by name."""
    text = (resources.files("quintet.config.plan") / "devices.yaml").read_text(encoding="utf-8")
    return {name: _figures(name, entry) for name, entry in yaml.safe_load(text).items()}


def _figures(name: str, entry: Mapping[str, float | str]) -> DeviceFigures:
    # data sheets mean GiB by the GB of memory, and GB by those of bandwidths
    units = {"memory": float(1 << 30), "flops": 1e12, "float32_flops": 1e12}
    numbers = {key: float(value) * units.get(key, 1e9) for key, value in entry.items() if key != "source"}
    return DeviceFigures(name, source=str(entry["source"]), **numbers)


def find_device(name: str) -> DeviceFigures:
    """Return the figures of a device.

    Raises:
        ConfigError: the name is unknown; the message names the most similar one.
    """
    devices = known_devices()
    if name.lower() not in devices:
        close = nearest(name.lower(), devices)
        hint = (f"did you mean {close}? " if close else "") + f"known: {', '.join(devices)}"
        raise ConfigError(f"--device {name}: unknown device", key="--device", value=name, hint=hint)
    return devices[name.lower()]


def device_of_machine() -> tuple[DeviceFigures | None, int] | None:
    """Return figures and memory in bytes of the first GPU that `nvidia-smi` lists, without figures if it is not in the
    file; None if there is no such GPU."""
    fields = next((line.split(", ") for line in hardware.nvidia_smi()), [])
    memory = re.fullmatch(r"(\d+) MiB", fields[1]) if len(fields) > 1 else None
    if memory is None:
        return None
    words = set(re.findall(r"\w+", fields[0].lower()))
    matching = [name for name in known_devices() if words.issuperset(name.split("-"))]
    return known_devices()[max(matching, key=len)] if matching else None, int(memory[1]) << 20
