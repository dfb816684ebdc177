"""Scores, models and data sets of the environment `svg` that are missing here."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from quintet import hardware
from quintet.config.composed import ComposedConfig
from quintet.config.model_locations.locations import config_file
from quintet.config.native.envs import SvgConfig
from quintet.config.problems import ConfigProblem

DREAMSIM_FILES: Final = (
    *("clip_vitb16_pretrain.pth.tar", "dino_vitb16_pretrain.pth", "open_clip_vitb16_pretrain.pth.tar"),
    *("ensemble_lora", "facebookresearch_dino_main"),
)
"""What the package `dreamsim` downloads otherwise."""


def svg_problems(composed: ComposedConfig) -> Iterator[ConfigProblem]:
    """Yield the scores that count and cannot be computed, and missing data sets; a service has its own."""
    for env in composed.experiment.run_envs:
        config = env.config
        if not isinstance(config, SvgConfig):
            continue
        if not config.weights:
            key = f"{env.key}.structural_weight"
            yield composed.problem(key, "all weights are 0, so that no score counts", f"{key}=1")
        if config.service is None:
            yield from (replace(problem, elsewhere=True) for problem in _missing(composed, env.key, config))


def _missing(composed: ComposedConfig, key: str, config: SvgConfig) -> Iterator[ConfigProblem]:
    if config.dataset is not None and not os.path.exists(config.dataset):
        problem = "does not exist; put files with SVG code there"
        yield composed.problem(f"{key}.dataset", problem, f"{key}.dataset=null to draw icons")
    reasons = {"dino": _dino_reason(config), "dreamsim": _dreamsim_reason(config)}
    for name, reason in reasons.items():
        if name in config.weights and reason is not None:
            problem, remedy = reason
            provided = f"{remedy}, and set {key}.{name}_path=DIRECTORY, or " if remedy else ""
            yield composed.problem(f"{key}.{name}_weight", problem, f"{provided}{key}.{name}_weight=0")


def _dino_reason(config: SvgConfig) -> tuple[str, str] | None:
    """Return why DINOv2 is not available, and what to do."""
    if config.dino_path is not None and config_file(config.dino_path) is not None:
        return None
    remedy = "download a DINOv2 model, `hf download facebook/dinov2-small`"
    if config.dino_path is None:
        return "needs a DINOv2 model, and dino_path is not set", remedy
    return f"there is no config.json of dino_path = {config.dino_path} on this machine", remedy


def _dreamsim_reason(config: SvgConfig) -> tuple[str, str] | None:
    """Return why DreamSim is not available, and what to do."""
    if not hardware.is_installed("dreamsim"):
        return "needs the package dreamsim, with the torchvision of your torch, not installed here", ""
    remedy = f"put {', '.join(DREAMSIM_FILES)} of dreamsim_checkpoint.zip of its release into a directory"
    if config.dreamsim_path is None:
        return "needs DreamSim's weights, and dreamsim_path is not set", remedy
    directory = Path(os.path.expanduser(config.dreamsim_path))
    missing = [name for name in DREAMSIM_FILES if not (directory / name).exists()]
    return (f"{config.dreamsim_path} lacks {', '.join(missing)}", remedy) if missing else None
