"""The runs that the viewer shows."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from quintet.config.yaml_reader import compose_limited
from quintet.contained_files import is_contained, read_contained
from quintet.errors import MachineError, UserError
from quintet.tracking.run_directory import RunDirectory
from quintet.tracking.run_status import RunStatus, find_runs, is_run_directory, read_status, status_as_json
from quintet.viewer.metrics_file import ColumnBudget, Headline, MetricsFile
from quintet.viewer.trajectory_index import TrajectoryIndex

HEADLINE_POINTS = 60
"""Values of the headline in a list of runs."""


@dataclass(slots=True)
class ViewedRun:
    """A run with its files and the cached contents of them."""

    name: str
    directory: RunDirectory
    headline: Headline
    metrics: MetricsFile
    trajectories: TrajectoryIndex
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while its files are read."""

    @classmethod
    def open(cls, name: str, path: Path, budget: ColumnBudget) -> ViewedRun:
        """Return the run in a directory; nothing is read yet. `budget` bounds the memory of the metrics of all runs."""
        run = RunDirectory(path)
        return cls(name, run, Headline(run.metrics), MetricsFile(run.metrics, budget), TrajectoryIndex(path))

    def config(self) -> Mapping[str, ConfigValue]:
        """Return the values of its configuration, empty before it is written."""
        return read_config_values(self.directory.config)

    def status(self) -> RunStatus:
        """Return its state and progress."""
        return read_status(self.directory.path)

    def tokenizer(self) -> Path | None:
        """Return the file of its tokenizer: of its policy, its newest checkpoint, or the model that it started from."""
        start = self.config().get("policy.path")
        folders = [self.directory.policy, *sorted(self.directory.checkpoints.glob("global_step_*/hf"), reverse=True)]
        files = [folder / "tokenizer.json" for folder in folders]
        contained = [file for file in files if is_contained(self.directory.path, file)]
        started_from = [Path(start.text) / "tokenizer.json"] if start else []
        return next((file for file in (*contained, *started_from) if file.is_file()), None)


class RunCatalog:
    """All runs below some paths, each a run directory or a directory of runs; runs that start later are added."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._runs: dict[Path, ViewedRun] = {}
        self._budget = ColumnBudget()
        self._lock = threading.Lock()

    def runs(self) -> list[ViewedRun]:
        """Return all runs, the most recently started first."""
        with self._lock:
            paths = list(dict.fromkeys(path.resolve() for path in self._directories()))
            names = _distinct_names(paths)
            for path in paths:
                if path not in self._runs:
                    self._runs[path] = ViewedRun.open(names[path], path, self._budget)
                self._runs[path].name = names[path]
            return [self._runs[path] for path in paths]

    def get(self, name: str) -> ViewedRun:
        """Return the run with this name.

        Raises:
            MachineError: there is none.
        """
        for run in self.runs():
            if run.name == name:
                return run
        raise MachineError(f"no run is named {name}", "reload the page")

    def _directories(self) -> Iterator[Path]:
        for path in self._paths:
            yield from [path] if is_run_directory(path) else find_runs(path)


def _distinct_names(paths: Sequence[Path]) -> dict[Path, str]:
    """Return the names of run directories, with as many parent directories as distinguish them."""
    names = {path: path.name for path in paths}
    for path in paths:
        if list(names.values()).count(path.name) > 1:
            shared = os.path.commonpath(paths)
            names[path] = os.path.relpath(path, shared)
    return names


def run_row(run: ViewedRun) -> dict[str, Any]:
    """Return the row of a run in the list of runs."""
    headline = run.headline
    headline.refresh()
    return status_as_json(run.status()) | {
        "name": run.name,
        "step": headline.step,
        "seconds": headline.seconds,
        "metric": headline.name,
        "values": headline.values(HEADLINE_POINTS),
    }


ABSENT = "–"
LINE_BREAK = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
"""Those that YAML counts."""


class ConfigValue(NamedTuple):
    """A value as YAML writes it, and where it comes from: `default`, `command line`, a file and line."""

    text: str
    source: str


def read_config_values(path: Path) -> dict[str, ConfigValue]:
    """Return the values of a run's configuration by dotted key; empty if there is no file, or if it is damaged."""
    try:
        text = read_contained(path.parent, path.name).decode()
        root = compose_limited(text, path.name)
    except (OSError, ValueError, UserError):
        return {}
    lines = LINE_BREAK.split(text)
    return dict(_values(root, "", lines)) if root is not None else {}


def _values(node: yaml.Node, key: str, lines: Sequence[str]) -> Iterator[tuple[str, ConfigValue]]:
    if isinstance(node, yaml.MappingNode) and node.value:
        for name, value in node.value:
            yield from _values(value, f"{key}.{name.value}" if key else str(name.value), lines)
        return
    text = node.value if isinstance(node, yaml.ScalarNode) else yaml.serialize(node, width=1000).strip()
    _, _, source = lines[node.start_mark.line].rpartition("  # ")
    yield key, ConfigValue(str(text), source)


def differences(configs: Sequence[Mapping[str, ConfigValue]]) -> dict[str, list[str]]:
    """Return the keys whose values differ between runs, each with the value of every run."""
    keys = dict.fromkeys(key for config in configs for key in config)
    texts = {key: [config[key].text if key in config else ABSENT for config in configs] for key in keys}
    return {key: values for key, values in texts.items() if len(set(values)) > 1}
