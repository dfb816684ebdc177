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
    flops: bool = False
    """Floating-point operations of the policy's updates are counted and logged, a second and device, and their share of
    the device's peak where that is known."""
    report_games: Annotated[int, Field(ge=0, le=200)] = 12
    """Games shown in `report.html`."""


class CheckpointConfig(Section):
    """What a run can be resumed from."""

    every_steps: Annotated[int, Field(ge=0)] = 10
    """0 keeps only the last."""
    keep: PositiveInt = 2
    """Older ones are removed."""
    contents: Contents = ALL
    """What is saved beside `hf/`, the model as transformers reads it, and the weights of critic and reference, which
    always are: the policy's weights as the learner holds them, the optimizer's moments, and what else a run goes on by
    (how far it has drawn, where its schedules are). `hf_model` links `hf/` under verl's name for it,
    `actor/huggingface`."""
    load_contents: Contents | None = None
    """What is read when a run goes on; null takes all that was saved. Without `optimizer` its moments begin anew,
    without `extra` schedules and draws do; without `model` the weights are those of `hf/` where `hf_model` is named,
    else those of `policy.path`."""
    remote_dir: str | None = None
    """Each checkpoint is copied there, in the background: any address that fsspec knows, such as `hdfs://…` or
    `s3://…`. A run whose own directory has none goes on from the newest one there. Nothing is removed there."""
    delete_after_load: bool = False
    """The checkpoint that a run goes on from is removed once its next one is whole."""
