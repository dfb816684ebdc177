"""The final weights of fine-tuning: where they lie, and copies of them elsewhere."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.config.native import Experiment
from quintet.errors import MachineError
from quintet.pipelines.sft_stage import sft_of
from quintet.policies.adapters import ADAPTER_DIRECTORY
from quintet.tracking.run_directory import RunDirectory, machine_errors
from quintet.training.remote import file_system

__all__ = ["Places", "copy_away", "put", "remote"]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the final weights lie; None where there are none of that kind."""

    model: Path | None
    adapters: Path | None

    @classmethod
    def of(cls, config: Experiment) -> Places:
        """As `sft.output_dir`, `sft.lora` and `sft.merge` have it."""
        sft = sft_of(config)
        home = RunDirectory.of(config).path if sft.output_dir is None else Path(sft.output_dir)
        model = home / ("model" if sft.output_dir is None else "merged_model")
        whole = sft.lora is None or sft.merge
        return cls(model if whole else None, home / ADAPTER_DIRECTORY if sft.lora else None)

    @property
    def main(self) -> Path:
        """What a later run begins with."""
        place = self.model or self.adapters
        if place is None:
            raise ValueError("neither model nor adapters")
        return place

    @property
    def all(self) -> tuple[Path, ...]:
        """Both."""
        return tuple(place for place in (self.model, self.adapters) if place)


def put(place: Path, write: Callable[[Path], object]) -> None:
    """Have `write(directory)` fill a directory beside `place`, then give it that name: it is there whole or not at
    all. What was there is replaced.

    Raises:
        MachineError: the machine refuses.
    """
    staging, old = (place.with_name(f".{place.name}.{word}") for word in ("partial", "old"))
    with machine_errors(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        for rest in (staging, old):
            shutil.rmtree(rest, ignore_errors=True)
        staging.mkdir()
        try:
            write(staging)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        if place.exists():
            place.rename(old)
        staging.rename(place)
        shutil.rmtree(old, ignore_errors=True)


def remote(config: Experiment) -> tuple[Any, str] | None:
    """The file system of `sft.remote_dir` and the path there; None where nothing is copied.

    Raises:
        ConfigError: nobody knows such an address here.
    """
    url = sft_of(config).remote_dir
    if url is None:
        return None
    return file_system(url, "sft.remote_dir")


def copy_away(config: Experiment) -> str | None:
    """Copy the final weights to `sft.remote_dir`; gives the address, None where there is none.

    Raises:
        MachineError: they can't be copied; they lie where they lay.
    """
    found = remote(config)
    if found is None:
        return None
    system, path = found
    url = str(sft_of(config).remote_dir)
    for place in Places.of(config).all:
        target = f"{path.rstrip('/')}/{place.name}"
        try:
            if system.exists(target):
                system.rm(target, recursive=True)
            system.makedirs(target, exist_ok=True)
            for file in sorted(file for file in place.rglob("*") if file.is_file()):
                system.put_file(str(file), f"{target}/{file.relative_to(place)}")
        except (OSError, ValueError, ImportError) as error:
            told = f"can't copy {place} to {url}: {type(error).__name__}: {error}"
            raise MachineError(told, "mend that, then give the same command again, or copy by hand") from error
    return url
