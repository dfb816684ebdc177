"""Shapes of a run's models, from `config.json` in a directory or in the cache of the Hugging Face hub."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quintet.config.composed import config_value
from quintet.config.native.experiment import Experiment
from quintet.config.plan.model_shapes import OPENVLA, PRESET_SHAPES, ModelShape, UnreadableConfigError, read_shape
from quintet.config.plan.vision_encoder import VisionEncoderShape

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)
MODEL_PATHS = {"critic": "critic.path", "reward": "reward.model.path", "reference": "reference.path"}
"""Keys of the models that may differ from the policy, by component."""
MIN_PUBLISHED_BYTES = 2 << 30
"""Published models of OpenVLA have 15 GB of weights; smaller ones are made for tests."""
MAX_CONFIG_BYTES = 1 << 20
"""Larger `config.json` files are not read."""


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
    sizes = [file.stat().st_size for file in _directory(path).glob("*.safetensors")] if path is not None else []
    return 0 < sum(sizes) < MIN_PUBLISHED_BYTES


def _preset_shape(config: Experiment) -> ModelShape | UnknownModel:
    preset = config.policy.preset or "grid-1m"
    if config.env.is_simulator and preset not in PRESET_SHAPES:
        return UnknownModel("memory is only estimated for policies with a language model", "it is small")
    return PRESET_SHAPES[preset]


def is_hub_name(path: str) -> bool:
    """Return whether a path may be a model on the hub: `organisation/name`, and not an existing directory."""
    return HUB_NAME.fullmatch(path) is not None and not os.path.exists(path)


def find_model_shape(path: str, overrides: Mapping[str, Any]) -> ModelShape | UnknownModel:
    """Return the shape of a model in a directory or in the hub cache."""
    if (file := config_file(path)) is None:
        if is_hub_name(path):
            reason = f"the directory {path} does not exist, and the Hugging Face cache has no config.json of that name"
            return UnknownModel(reason, f"hf download {path} config.json")
        return UnknownModel(f"no config.json at {_directory(path)}", "give a Hugging Face model directory")
    try:
        shape = read_shape({**read_config(file), **overrides})
        return shape if shape.encoder is None else replace(shape, encoder=_with_limits(shape.encoder, file.parent))
    except (UnreadableConfigError, OSError, ValueError, RecursionError) as error:
        return UnknownModel(f"{file} has no known shape: {error}", "supported: models like Llama, Qwen and Gemma")


def _with_limits(encoder: VisionEncoderShape, directory: Path) -> VisionEncoderShape:
    """Return the encoder with the limits of the model's image processor, if its file is there."""
    file = directory / "preprocessor_config.json"
    settings = read_config(file) if os.path.exists(file) else {}
    size = settings.get("size") or {}
    smallest_edge, largest_edge = size.get("shortest_edge"), size.get("longest_edge")
    smallest, largest = smallest_edge or settings.get("min_pixels"), largest_edge or settings.get("max_pixels")
    return replace(
        encoder, min_pixels=int(smallest or encoder.min_pixels), max_pixels=int(largest or encoder.max_pixels)
    )


def config_file(path: str) -> Path | None:
    """Return the `config.json` of a model in a directory or in the hub cache, None if missing."""
    file = _directory(path) / "config.json"
    return file if os.path.exists(file) else None


def cached_model(path: str) -> str | None:
    """Return the directory of a model of the hub in the cache of `huggingface_hub`; None if it is not there."""
    file = config_file(path) if is_hub_name(path) else None
    return None if file is None else str(file.parent)


def read_config(file: Path) -> dict[str, Any]:
    """Parse a `config.json`.

    Raises:
        UnreadableConfigError: it is too large, or not a mapping.
        ValueError: it is not JSON.
    """
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise UnreadableConfigError(f"it is larger than {MAX_CONFIG_BYTES >> 20} MiB")
    config = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise UnreadableConfigError("it is not a mapping")
    return config


def _directory(path: str) -> Path:
    """Return the directory of a model, for a hub name that of a snapshot in the cache of `huggingface_hub`.

    The snapshot is the one that `main` refers to, otherwise any one with a `config.json`.
    """
    if not is_hub_name(path):
        return Path(os.path.expanduser(path))
    hf_home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or Path(hf_home) / "hub"))
    model = cache / f"models--{path.replace('/', '--')}"
    main = model / "refs" / "main"
    commit = main.read_text(encoding="utf-8", errors="replace").strip() if os.path.exists(main) else None
    snapshots = sorted(file.parent for file in model.glob("snapshots/*/config.json"))
    matching = [path for path in snapshots if path.name == commit] or snapshots
    return matching[-1] if matching else model
