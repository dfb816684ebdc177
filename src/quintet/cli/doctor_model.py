"""`quintet doctor MODEL`: which code computes a model on a CPU, and why."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from quintet.cli.model_downloads import downloaded_model
from quintet.cli.tables import numbers_table, page
from quintet.cli.transformers_setup import silence_transformers

if TYPE_CHECKING:
    from quintet.policies.model_paths import ModelPaths


def run(location: str, *, as_json: bool = False) -> None:
    """Print what computes the model at `location`, whose weights are not read. A published model is downloaded.

    Raises:
        MachineError: there is no model.
    """
    silence_transformers()
    from quintet.pipelines.model_lookup import find_model
    from quintet.policies.model_paths import ModelPaths

    path = Path(downloaded_model(location)).expanduser()
    paths = ModelPaths.from_directory(path if (path / "config.json").is_file() else find_model(str(path)).policy)
    if as_json:
        print(json.dumps(asdict(paths), indent=1))
        return
    with page() as out:
        out.print(Text(f"{paths.model_class} ({paths.family}), {paths.parameters:,} parameters", style="bold"))
        out.print(numbers_table(_rows(paths)))


def _rows(paths: ModelPaths) -> list[tuple[str, str, str]]:
    if paths.refused:
        return [("training, rollout.engine=hf", "refused", paths.refused)]
    family = ("tested", "") if paths.is_tested else ("not tested", "compared with transformers when it is loaded")
    return [
        ("family", *family),
        ("training on a CPU", *_path("compiled kernels", paths.training_obstacle)),
        ("rollout.engine=hf on a CPU", *_path("embedded decoder", paths.sampling_obstacle)),
    ]


def _path(fast: str, obstacle: str | None) -> tuple[str, str]:
    return (fast, "") if obstacle is None else ("modules of transformers", f"slower, since {obstacle}")
