"""Shapes of a run's models, from `config.json` in a directory or in the cache of the Hugging Face hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config.plan.model_shapes import PRESET_SHAPES, ModelShape, UnreadableConfigError, read_shape

if TYPE_CHECKING:
    from quintet.config.native.experiment import Experiment

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)
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
    critic: ModelShape | UnknownModel
    reward: ModelShape | UnknownModel
    reference: ModelShape | UnknownModel

    def of(self, component: str) -> ModelShape | None:
        """Return the shape of a component's model, None if unknown."""
        shapes = {"critic": self.critic, "reward": self.reward, "reference": self.reference, "envs": None}
        shape = shapes.get(component, self.policy)
        return shape if isinstance(shape, ModelShape) else None

    @property
    def unknown(self) -> Mapping[str, UnknownModel]:
        """Models of unknown shape by the key of their path."""
        keys = {"policy.path": self.policy, "critic.path": self.critic, "reward.model.path": self.reward}
        keys |= {"reference.path": self.reference}
        unknown = {key: shape for key, shape in keys.items() if isinstance(shape, UnknownModel)}
        return {key: shape for key, shape in unknown.items() if key == "policy.path" or shape != self.policy}


def find_models(config: Experiment) -> Models:
    """Read the shapes of all models whose `config.json` is available locally."""
    policy = config.policy
    path = config.sft.path if config.sft and config.sft.path else policy.path
    actor: ModelShape | UnknownModel = PRESET_SHAPES[policy.preset or "grid-1m"]
    if path is not None:
        actor = find_model_shape(path, policy.overrides)
    critic = actor if config.critic.path is None else find_model_shape(config.critic.path, {})
    reward = config.reward.model if config.reward else None
    reward_model = actor if reward is None or reward.path is None else find_model_shape(reward.path, {})
    reference = actor if config.reference.path is None else find_model_shape(config.reference.path, {})
    return Models(actor, critic, reward_model, reference)


def is_hub_name(path: str) -> bool:
    """Return whether a path may be a model on the hub: `organisation/name`, and not an existing directory."""
    return HUB_NAME.fullmatch(path) is not None and not _exists(Path(path))


def find_model_shape(path: str, overrides: Mapping[str, Any]) -> ModelShape | UnknownModel:
    """Return the shape of a model in a directory or in the hub cache."""
    if (file := config_file(path)) is None:
        hint = f"hf download {path} config.json" if is_hub_name(path) else "give a Hugging Face model directory"
        return UnknownModel(f"no config.json at {_directory(path)}", hint)
    try:
        return read_shape({**read_config(file), **overrides})
    except (UnreadableConfigError, OSError, ValueError, RecursionError) as error:
        return UnknownModel(f"{file} has no known shape: {error}", "supported: models like Llama, Qwen and Gemma")


def config_file(path: str) -> Path | None:
    """Return the `config.json` of a model in a directory or in the hub cache, None if missing."""
    file = _directory(path) / "config.json"
    return file if _exists(file) else None


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


def _exists(path: Path) -> bool:
    """Return whether a path exists and is accessible."""
    try:
        return path.exists()
    except OSError:
        return False


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
    commit = main.read_text(encoding="utf-8", errors="replace").strip() if _exists(main) else None
    snapshots = sorted(file.parent for file in model.glob("snapshots/*/config.json"))
    matching = [path for path in snapshots if path.name == commit] or snapshots
    return matching[-1] if matching else model
