"""Directories of the final weights of fine-tuning, and copies of them in remote stores."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quintet.config.native.experiment import Experiment
from quintet.errors import MachineError
from quintet.pipelines.sft.stage import sft_config
from quintet.policies.lora import ADAPTER_DIRECTORY
from quintet.tracking.atomic_files import OUTPUT_KEY, translate_os_errors
from quintet.tracking.run_directory import RunDirectory
from quintet.training.checkpoint.remote_store import open_file_system


@dataclass(frozen=True, slots=True)
class FinalWeights:
    """Directories of the final weights; None if there are none of that kind."""

    model: Path | None
    adapters: Path | None

    @classmethod
    def of(cls, config: Experiment) -> FinalWeights:
        """Return the directories according to `sft.output_dir`, `sft.lora` and `sft.merge`."""
        sft = sft_config(config)
        parent = RunDirectory.from_config(config).path if sft.output_dir is None else Path(sft.output_dir)
        model = parent / ("model" if sft.output_dir is None else "merged_model")
        has_model = sft.lora is None or sft.merge
        return cls(model if has_model else None, parent / ADAPTER_DIRECTORY if sft.lora else None)

    @property
    def main(self) -> Path:
        """Directory that a later run starts from."""
        directory = self.model or self.adapters
        if directory is None:
            raise ValueError("neither model nor adapters")
        return directory

    @property
    def all(self) -> tuple[Path, ...]:
        """All directories."""
        return tuple(directory for directory in (self.model, self.adapters) if directory)


def write_directory(target: Path, write: Callable[[Path], object], key: str = OUTPUT_KEY) -> None:
    """Call `write` with a temporary directory, then move that to `target`, so that `target` is always complete.
    An existing directory is replaced. `key` is the config key that names it.

    Raises:
        MachineError: the directory cannot be written.
    """
    staging, old = (target.with_name(f".{target.name}.{suffix}") for suffix in ("partial", "old"))
    with translate_os_errors(target, key):
        target.parent.mkdir(parents=True, exist_ok=True)
        for leftover in (staging, old):
            shutil.rmtree(leftover, ignore_errors=True)
        staging.mkdir()
        with ExitStack() as on_failure:
            on_failure.callback(shutil.rmtree, staging, ignore_errors=True)
            write(staging)
            on_failure.pop_all()
        if target.exists():
            target.rename(old)
        staging.rename(target)
        shutil.rmtree(old, ignore_errors=True)


def remote_file_system(config: Experiment) -> tuple[Any, str] | None:
    """Return the file system of `sft.remote_dir` and the path in it; None if it is not set.

    Raises:
        ConfigError: no installed file system supports the address.
    """
    url = sft_config(config).remote_dir
    if url is None:
        return None
    return open_file_system(url, "sft.remote_dir")


def copy_to_remote(config: Experiment) -> str | None:
    """Copy the final weights to `sft.remote_dir` and return the address; None if it is not set.

    Raises:
        MachineError: the copy failed; the local weights are complete.
    """
    remote = remote_file_system(config)
    if remote is None:
        return None
    system, path = remote
    url = str(sft_config(config).remote_dir)
    for directory in FinalWeights.of(config).all:
        target = f"{path.rstrip('/')}/{directory.name}"
        try:
            if system.exists(target):
                system.rm(target, recursive=True)
            system.makedirs(target, exist_ok=True)
            for file in sorted(file for file in directory.rglob("*") if file.is_file()):
                system.put_file(str(file), f"{target}/{file.relative_to(directory)}")
        except (OSError, ValueError, ImportError) as error:
            message = f"cannot copy {directory} to {url}: {type(error).__name__}: {error}"
            raise MachineError(
                message, "fix that and rerun the same command, or copy the directory yourself"
            ) from error
    return url
