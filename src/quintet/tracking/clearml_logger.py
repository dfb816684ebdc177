"""ClearML logger; writes to disk only without credentials of a server."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from quintet.tracking.generations import COLUMNS, LoggedGeneration
from quintet.tracking.logger import LoggerContext
from quintet.tracking.run_facts import flat_facts


class ClearmlLogger:
    """ClearML task. Offline, its session is a ZIP file that `clearml-task --import-offline-session` uploads."""

    def __init__(self, context: LoggerContext) -> None:
        if not _is_online():
            # read when clearml is imported: directory of offline sessions
            os.environ.setdefault("CLEARML_CACHE_DIR", str((context.files / "clearml").resolve()))
        from clearml import Task

        Task.set_offline(not _is_online())
        # sdk.development.report_use_subprocess of clearml.conf: otherwise ClearML forks this process to send records,
        # with all its memory and locks, and the end of a run waits for that process
        Task._report_subprocess_enabled = False
        # ClearML would otherwise patch argparse, frameworks and the output of the process
        self._task = Task.init(
            project_name=context.project,
            task_name=context.name,
            continue_last_task=_is_online() and context.resume_step is not None,
            output_uri=False,
            auto_connect_arg_parser=False,
            auto_connect_frameworks=False,
            auto_connect_streams=False,
            auto_resource_monitoring=False,
        )
        self._task.connect(dict(flat_facts(context.facts)), name="Configuration")
        self._logger = self._task.get_logger()

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        for name, value in {**metrics, "time_seconds": time_seconds}.items():
            title, _, series = name.partition("/")
            self._logger.report_scalar(title, series or title, value, step)

    def log_generations(self, step: int, generations: Sequence[LoggedGeneration]) -> None:
        """Report verl's table `Validation`, `Validation generations`, and the images of each episode."""
        rows = [[step, generation.input, generation.output, generation.score] for generation in generations]
        self._logger.report_table("Validation", "Validation generations", step, table_plot=[[*COLUMNS], *rows])
        for number, logged in enumerate(generations, 1):
            for index, image in enumerate(logged.images, 1):
                self._logger.report_image("Validation", f"image {number}.{index}", step, image=image)

    def log_video(self, step: int, name: str, path: Path) -> None:
        title, _, series = name.partition("/")
        self._logger.report_media(title, series, step, local_path=str(path))

    def close(self) -> None:
        self._task.close()


def _is_online() -> bool:
    """Return whether there are credentials of a server, and offline mode is not asked for."""
    if os.environ.get("CLEARML_OFFLINE_MODE", "") not in ("", "0"):
        return False
    file = Path(os.environ.get("CLEARML_CONFIG_FILE") or Path.home() / "clearml.conf")
    return bool(os.environ.get("CLEARML_API_ACCESS_KEY")) or file.is_file()
