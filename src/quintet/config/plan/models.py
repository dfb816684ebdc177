"""Shapes of a run's models, from their `config.json`."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quintet.config.composed import config_value
from quintet.config.model_locations.locations import (
    UnreadableConfigError,
    hub_revision,
    is_hub_name,
    model_directory,
    read_config,
    read_model_config,
)
from quintet.config.native.experiment import Experiment
from quintet.config.plan.model_shapes import OPENVLA, PRESET_SHAPES, ModelShape, read_shape
from quintet.config.plan.vision_encoder import VisionEncoderShape

MODEL_PATHS = {"critic": "critic.path", "reward": "reward.model.path", "reference": "reference.path"}
"""Keys of the models that may differ from the policy, by component."""
MIN_PUBLISHED_BYTES = 2 << 30
"""Published models of OpenVLA have 15 GB of weights; smaller ones are made for tests."""


@dataclass(frozen=True, slots=True)
class UnknownModel:
    """Reason why the shape of a model is unknown, and a hint."""

    reason: str
    hint: str


@dataclass(frozen=True, slots=True)
class Models:
    """Shape of each model of a run, or why it is unknown."""

    policy: ModelShape | UnknownModel
    by_component: Mapping[str, ModelShape | UnknownModel]
    """Models of critic, reward and reference; the other components have the policy."""

    def of(self, component: str) -> ModelShape | None:
        """Return the shape of a component's model, None if unknown."""
        shape = self.by_component.get(component, self.policy)
        return shape if isinstance(shape, ModelShape) and component != "envs" else None

    @property
    def unknown(self) -> Mapping[str, UnknownModel]:
        """Models of unknown shape by the key of their path."""
        others = {MODEL_PATHS[name]: shape for name, shape in self.by_component.items() if shape != self.policy}
        models = {"policy.path": self.policy, **others}
        return {key: shape for key, shape in models.items() if isinstance(shape, UnknownModel)}


def policy_path(config: Experiment) -> str | None:
    """Return the path of the initial weights, those of fine-tuning if the run begins with it; None for a preset."""
    return config.sft.path if config.sft and config.sft.path else config.policy.path


def find_models(config: Experiment) -> Models:
    """Read the shapes of all models whose `config.json` is available locally."""
    path, policy = policy_path(config), config.policy
    actor = _preset_shape(config) if path is None else find_model_shape(path, policy.overrides)
    if isinstance(actor, UnknownModel) and policy.kind in ("openvla", "openvla_oft") and not _is_small(path):
        # all published ones have this size
        actor = replace(OPENVLA, dtype="bfloat16")
    paths = {name: config_value(config, key) for name, key in MODEL_PATHS.items()}
    others = {name: actor if path is None else find_model_shape(path, {}) for name, path in paths.items()}
    return Models(actor, others)


def _is_small(path: str | None) -> bool:
    """Return whether the weights in a directory are clearly fewer than those of a published model."""
    sizes = [file.stat().st_size for file in model_directory(path).glob("*.safetensors")] if path is not None else []
    return 0 < sum(sizes) < MIN_PUBLISHED_BYTES


def _preset_shape(config: Experiment) -> ModelShape | UnknownModel:
    preset = config.policy.preset or "grid-1m"
    if config.env.is_simulator and preset not in PRESET_SHAPES:
        return UnknownModel("memory is only estimated for policies with a language model", "it is small")
    return PRESET_SHAPES[preset]


def find_model_shape(path: str, overrides: Mapping[str, Any]) -> ModelShape | UnknownModel:
    """Return the shape of a model, also if it is still to be downloaded or converted."""
    try:
        config = read_model_config(path)
        if config is None:
            return _missing(path)
        shape = read_shape({**config, **overrides})
        return shape if shape.encoder is None else replace(shape, encoder=_with_limits(shape.encoder, path))
    except (UnreadableConfigError, OSError, ValueError, RecursionError) as error:
        source = model_directory(path) / "config.json" if os.path.isdir(model_directory(path)) else path
        return UnknownModel(f"{source} has no known shape: {error}", "supported: models like Llama, Qwen and Gemma")


def _missing(path: str) -> UnknownModel:
    if not is_hub_name(path):
        return UnknownModel(f"no config.json at {model_directory(path)}", "give a Hugging Face model directory")
    name, revision = hub_revision(path)
    reason = f"the directory {path} does not exist, and the Hugging Face cache has no config.json of that name"
    return UnknownModel(reason, f"hf download {name} config.json" + (f" --revision {revision}" if "@" in path else ""))


def _with_limits(encoder: VisionEncoderShape, path: str) -> VisionEncoderShape:
    """Return the encoder with the limits of the model's image processor, if its file is there."""
    file = model_directory(path) / "preprocessor_config.json"
    settings = read_config(file) if os.path.exists(file) else {}
    size = settings.get("size") or {}
    smallest_edge, largest_edge = size.get("shortest_edge"), size.get("longest_edge")
    smallest, largest = smallest_edge or settings.get("min_pixels"), largest_edge or settings.get("max_pixels")
    return replace(
        encoder, min_pixels=int(smallest or encoder.min_pixels), max_pixels=int(largest or encoder.max_pixels)
    )
