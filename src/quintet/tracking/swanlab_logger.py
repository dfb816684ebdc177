"""SwanLab logger; writes to disk only if nobody is logged in."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from quintet.tracking.generations import COLUMNS, TABLE, LoggedGeneration
from quintet.tracking.logger import LoggerContext


class SwanlabLogger:
    """SwanLab run. Without an API key it is offline; `swanlab sync` uploads it later."""

    def __init__(self, context: LoggerContext) -> None:
        import swanlab

        self._swanlab = swanlab
        self._run = swanlab.init(
            project=context.project,
            name=context.name,
            config=dict(context.facts),
            log_dir=str(context.files / "swanlab"),
            mode=None if _is_online() else "offline",
            settings=swanlab.Settings(
                interactive=False,
                terminal=swanlab.Settings.Terminal(proxy_type="none"),
                probe=swanlab.Settings.Probe(monitor=False, requirements=False),
            ),
        )

    def log(self, step: int, time_seconds: float, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "time_seconds": time_seconds}, step=step)

    def log_generations(self, step: int, generations: Sequence[LoggedGeneration]) -> None:
        """Log the table `val/generations` with a row per episode, and the images of all episodes."""
        table = self._swanlab.echarts.Table()
        table.add(
            headers=[*COLUMNS],
            rows=[[step, generation.input, generation.output, generation.score] for generation in generations],
        )
        images = [
            self._swanlab.Image(image, caption=f"episode {number}")
            for number, logged in enumerate(generations, 1)
            for image in logged.images
        ]
        self._run.log({TABLE: table} | ({f"{TABLE}/images": images} if images else {}), step=step)

    def log_video(self, step: int, name: str, path: Path) -> None:
        """Show a GIF; SwanLab plays no MP4, of which it shows the path."""
        is_gif = path.suffix == ".gif"
        shown = self._swanlab.Video(str(path)) if is_gif else self._swanlab.Text(str(path.resolve()))
        self._run.log({name: shown}, step=step)

    def close(self) -> None:
        self._run.finish()


def _is_online() -> bool:
    """Return whether the user is logged in or has set `SWANLAB_MODE`."""
    if os.environ.get("SWANLAB_MODE") or os.environ.get("SWANLAB_API_KEY"):
        return True
    folder = Path(os.environ.get("SWANLAB_SAVE_DIR") or Path.home() / ".swanlab")
    return (folder / ".netrc").is_file()
