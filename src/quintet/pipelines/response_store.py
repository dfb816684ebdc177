"""Responses of a run that only generates, stored batch by batch, so that an interrupted run can continue."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quintet.config.dotted import flatten
from quintet.config.native.experiment import Experiment
from quintet.errors import ConfigError
from quintet.package_files import read_yaml
from quintet.tracking.atomic_files import translate_os_errors

SECTIONS = ("policy.", "data.", "rollout.", "generation.", "seed")
MAY_CHANGE = read_yaml(__file__, "resume.yaml")["of_responses"]
"""Keys that affect the responses at most by rounding."""


@dataclass(frozen=True, slots=True)
class ResponseBatch:
    """Responses to consecutive prompts."""

    responses: Sequence[Sequence[str]]
    """Texts by prompt and sample."""
    tokens: int
    """Tokens of all responses."""
    num_cut_off: int
    """Responses that were cut off at the maximum length."""
    num_empty: int = 0
    """Responses of prompts that leave no room for one."""


def generation_settings(config: Experiment, files: Sequence[Path]) -> dict[str, Any]:
    """Return the settings that determine the responses, by key, with size and time of the data files."""
    values: Mapping[str, Any] = flatten(config.model_dump(mode="json"))
    settings = {key: value for key, value in values.items() if key.startswith(SECTIONS) and key not in MAY_CHANGE}
    states = {str(file): (file.stat().st_size, file.stat().st_mtime_ns) for file in files}
    return json.loads(json.dumps({**settings, "files": states}))  # type: ignore[no-any-return]


class ResponseStore:
    """File whose first line has the settings, and each further line a batch, in the order of the prompts."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, restart: bool = False) -> None:
        """Open the file; with `restart`, or without a file, start with no responses.

        Raises:
            ConfigError: the responses were generated with other settings.
            MachineError: the file cannot be read or written.
        """
        self.path = path
        self.num_prompts = 0
        """Number of prompts with responses."""
        with translate_os_errors(path):
            end = 0 if restart or not path.exists() else self._read(settings)
            self._file = path.open("r+b" if end else "wb")
            self._file.truncate(end)
            self._file.seek(end)
        if not end:
            self._write(settings)

    def append(self, batch: ResponseBatch) -> None:
        """Store the responses to the next prompts; they are on disk when this returns.

        Raises:
            MachineError: the file cannot be written.
        """
        self._write(asdict(batch))
        self.num_prompts += len(batch.responses)

    def batches(self) -> Iterator[ResponseBatch]:
        """Yield the stored batches."""
        with self.path.open("rb") as file:
            file.readline()
            for line in file:
                yield ResponseBatch(**json.loads(line))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: Mapping[str, Any]) -> None:
        with translate_os_errors(self.path):
            self._file.write(json.dumps(line).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def _read(self, settings: Mapping[str, Any]) -> int:
        """Count the stored prompts; return the length of the file without an incomplete last line."""
        with self.path.open("rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):
                return 0
            self._check_settings(json.loads(first), settings)
            end = file.tell()
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self.num_prompts += len(json.loads(line)["responses"])
                end += len(line)
        return end

    def _check_settings(self, stored: Mapping[str, Any], current: Mapping[str, Any]) -> None:
        changed = [key for key in sorted({*stored, *current}) if stored.get(key) != current.get(key)]
        if not changed:
            return
        key, hint = changed[0], f"restore the value, or remove {self.path} to start again"
        if key == "files":
            message = f"data.train_files: a file has changed since the responses in {self.path} were generated"
            raise ConfigError(message, key="data.train_files", hint=f"remove {self.path} to start again")
        message = f"{key} = {current.get(key)!r}, but the responses in {self.path} were generated with"
        raise ConfigError(f"{message} {stored.get(key)!r}", key=key, value=current.get(key), hint=hint)
