"""Models of a configuration or an argument, downloaded and converted with a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quintet.cli.configuration import model_paths
from quintet.config.composed import ComposedConfig, with_values
from quintet.config.model_locations.locations import is_gguf_file, is_in_cache, local_directory, published_model
from quintet.errors import MachineError

if TYPE_CHECKING:
    from quintet.pipelines.model_download import Report


def with_downloaded_models(composed: ComposedConfig) -> ComposedConfig:
    """Return the configuration with the directories of its models, which are downloaded or converted if need be.

    Raises:
        MachineError: one cannot be; the message names its key.
    """
    from quintet.pipelines.model_download import obtain_model

    locations = model_paths(composed.experiment)
    directories = {}
    for key, location in ((key, path) for key, path in locations.items() if is_in_cache(path)):
        try:
            with download_progress() as report:
                directories[key] = str(obtain_model(location, report))
        except MachineError as error:
            message = f"{composed.describe(key)}: {error.message}"
            raise type(error)(message, error.hint and composed.hint_for_user(error.hint)) from error
    return with_values(composed, directories)


def downloaded_model(location: str) -> str:
    """Return the directory of a model that an argument names: of a published model or a GGUF file, downloaded and
    converted if need be, or of a model in the cache of the hub. Other arguments are returned as they are.

    Raises:
        MachineError: it cannot be downloaded or converted.
    """
    if published_model(location) is None and not is_gguf_file(location):
        return local_directory(location) or location
    from quintet.pipelines.model_download import obtain_model

    with download_progress() as report:
        return str(obtain_model(location, report))


@contextmanager
def download_progress() -> Iterator[Report]:
    """Show downloads and conversions on stderr: a bar on a terminal, otherwise a line at the beginning of each."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bars:
        tasks = {}

        def report(task: str, done: int, total: int | None) -> None:
            if task not in tasks:
                tasks[task] = bars.add_task(task, total=total)
                if not sys.stderr.isatty():
                    print(task, file=sys.stderr)
            bars.update(tasks[task], completed=done)

        yield report
