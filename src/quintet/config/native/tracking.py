"""What a run writes for people, and what it can be resumed from."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from quintet.config.capability import Capability, Waits
from quintet.config.native.section import Count, Section, Texts

__all__ = ["CheckpointConfig", "TrackingConfig", "VideoConfig"]

Content = Literal["model", "optimizer", "extra", "hf_model"]
Contents = Annotated[tuple[Content, ...], Field(strict=False)]
LATER = ("mlflow", "swanlab", "vemlp_wandb", "clearml", "trackio", "file")
"""Loggers of the five frameworks that this version hasn't."""
ALL: tuple[Content, ...] = ("model", "optimizer", "extra")


class VideoConfig(Section):
    """Films of simulated games."""

    overlay: bool = True
    """Reward and success are written into the picture."""
    directory: str | None = None
    """Where they lie; null takes the run's directory."""


class TrackingConfig(Section):
    """What a run writes for people."""

    loggers: Annotated[Texts, Waits(Capability.LOGGERS, lacks=LATER)] = ("console", "jsonl", "tensorboard")
    """Where metrics go: names from `quintet list`."""
    project: str | None = None
    """Project under which loggers file the run."""
    run_name: Annotated[str | None, Waits(Capability.LOGGERS)] = None
    """Name of the run in loggers; null takes `name`."""
    log_dir: Annotated[str | None, Waits(Capability.LOGGERS)] = None
    """Where loggers write their own files; null takes the run's directory."""
    trajectories_every_steps: Annotated[int, Field(ge=0)] = 10
    """Store the games of every n-th step; 0 stores only validation games."""
    validation_generations: Annotated[Count, Waits(Capability.LOGGERS)] = 0
    """Validation games whose text goes to the loggers, at each validation."""
    pictures: Count = 0
    """Games of each stored step that are drawn, turn by turn."""
    pictures_dir: str | None = None
    """Where those drawings lie; null takes the run's directory."""
    video: Annotated[VideoConfig | None, Waits(Capability.LOGGERS)] = None
    """null films nothing."""
    validation_video: Annotated[VideoConfig | None, Waits(Capability.LOGGERS)] = None
    """The same of validation games; null films none of them."""
    config_dir: str | None = None
    """A second copy of `config.yaml` is written there; null writes none."""
    flops: Annotated[bool, Waits(Capability.LOGGERS)] = False
    """Floating-point operations a second are measured."""
    report_games: Annotated[int, Field(ge=0, le=200)] = 12
    """Games shown in `report.html`."""


class CheckpointConfig(Section):
    """What a run can be resumed from."""

    every_steps: Annotated[int, Field(ge=0)] = 10
    """0 keeps only the last."""
    keep: PositiveInt = 2
    """Older ones are removed."""
    contents: Annotated[Contents, Waits(Capability.CHECKPOINTS)] = ALL
    """What is saved: weights, optimizer, schedule and random state, a Hugging Face directory."""
    load_contents: Annotated[Contents, Waits(Capability.CHECKPOINTS)] = ALL
    """What is read when a run goes on."""
    remote_dir: Annotated[str | None, Waits(Capability.CHECKPOINTS)] = None
    """Where checkpoints are copied to."""
    delete_after_load: Annotated[bool, Waits(Capability.CHECKPOINTS)] = False
    """A checkpoint is removed once the run went on from it."""
