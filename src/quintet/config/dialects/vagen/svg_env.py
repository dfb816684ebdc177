"""Conversion of the options of VAGEN's environment `svg`."""

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

from quintet.config.dialects.vagen.key_values import TABLES
from quintet.config.native.envs import SvgConfig

SVG = "svg"
DATASET = ("env_config.data_dir", "env_config.dataset_name", "env_config.split")
MODEL_SIZE, SIZES = "env_config.model_size", ("small", "base", "large")
DEVICES = {f"env.{name}_device": f"env_config.device.{name}" for name in ("dino", "dreamsim")}
DINO = "facebook/dinov2-{}"


def svg_to_native(option: Callable[[str], Any]) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Yield native keys with their values and the options that they are computed from."""
    directory, name, split = map(option, DATASET)
    yield "env.dataset", str(PurePosixPath(directory, name.replace("/", "-"), split)), DATASET
    yield "env.dino_path", DINO.format(option(MODEL_SIZE)), (MODEL_SIZE,)
    for key, device in DEVICES.items():
        value = option(device)
        yield key, f"cuda:{value}" if isinstance(value, int) else value, (device,)
    for key, value in TABLES["svg_constants"].items():
        yield key, value, ()


def svg_from_native(config: SvgConfig) -> Iterator[tuple[str, Any]]:
    """Yield the options that have a counterpart to the native values."""
    path = PurePosixPath(config.dataset or "")
    if len(path.parts) > 1:
        values = (str(path.parent.parent), path.parent.name.replace("-", "/", 1), path.name)
        yield from zip(DATASET, values, strict=True)
    yield from ((MODEL_SIZE, size) for size in SIZES if config.dino_path == DINO.format(size))
    for key, device in DEVICES.items():
        value = getattr(config, key.removeprefix("env."))
        number = value.removeprefix("cuda:")
        yield device, int(number) if number.isdigit() else value
