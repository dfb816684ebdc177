"""Where a model's `config.json` lies: in a directory, in the cache of the Hugging Face hub, or nowhere yet."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quintet.config.plan.shapes import PRESET_SHAPES, Shape, Unreadable, read_shape

if TYPE_CHECKING:
    from quintet.config.native import Experiment

__all__ = ["Models", "Unknown", "config_file", "find_models", "find_shape", "is_hub_name", "read_config"]

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)
LARGEST = 1 << 20
"""Bytes of the largest `config.json` that is read."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Why a model's sizes aren't known, and what to do about it."""

    reason: str
    hint: str


@dataclass(frozen=True, slots=True)
class Models:
    """The shape of each model of a run, or why it isn't known."""

    policy: Shape | Unknown
    critic: Shape | Unknown
    reward: Shape | Unknown
    reference: Shape | Unknown

    def of(self, component: str) -> Shape | None:
        """The shape of a component's model, as far as it is known."""
        own = {"critic": self.critic, "reward": self.reward, "reference": self.reference, "worlds": None}
        shape = own.get(component, self.policy)
        return shape if isinstance(shape, Shape) else None

    @property
    def unknown(self) -> Mapping[str, Unknown]:
        """What isn't known, by the key that names the model."""
        keys = {"policy.path": self.policy, "critic.path": self.critic, "reward.model.path": self.reward}
        keys |= {"reference.path": self.reference}
        found = {key: shape for key, shape in keys.items() if isinstance(shape, Unknown)}
        return {key: shape for key, shape in found.items() if key == "policy.path" or shape != self.policy}


def find_models(config: Experiment) -> Models:
    """Read what is there."""
    policy = config.policy
    path = config.sft.path if config.sft and config.sft.path else policy.path
    actor: Shape | Unknown = PRESET_SHAPES[policy.preset or "grid-1m"]
    if path is not None:
        actor = find_shape(path, policy.overrides)
    critic = actor if config.critic.path is None else find_shape(config.critic.path, {})
    reward = config.reward.model if config.reward else None
    judge = actor if reward is None or reward.path is None else find_shape(reward.path, {})
    reference = actor if config.reference.path is None else find_shape(config.reference.path, {})
    return Models(actor, critic, judge, reference)


def is_hub_name(path: str) -> bool:
    """Whether it may name a model on the hub: `organisation/name`, and no such directory is here."""
    return HUB_NAME.fullmatch(path) is not None and not _exists(Path(path))


def find_shape(path: str, overrides: Mapping[str, Any]) -> Shape | Unknown:
    """The shape of the model at a directory, or of that name in the cache of the hub."""
    if (file := config_file(path)) is None:
        get = f"hf download {path} config.json" if is_hub_name(path) else "give a Hugging Face model directory"
        return Unknown(f"no config.json at {_directory(path)}", get)
    try:
        return read_shape({**read_config(file), **overrides})
    except (Unreadable, OSError, ValueError, RecursionError) as error:
        return Unknown(f"{file} can't be counted: {error}", "models of the Llama, Qwen and Gemma kind can")


def config_file(path: str) -> Path | None:
    """The `config.json` of the model at a directory, or of that name in the cache of the hub."""
    file = _directory(path) / "config.json"
    return file if _exists(file) else None


def read_config(file: Path) -> dict[str, Any]:
    """What a `config.json` says.

    Raises:
        Unreadable: it is too large, or holds no keys.
        ValueError: it isn't JSON.
    """
    if file.stat().st_size > LARGEST:
        raise Unreadable(f"it is larger than {LARGEST >> 20} MiB")
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise Unreadable("it holds no keys")
    return found


def _exists(path: Path) -> bool:
    """Whether it is there and may be looked at."""
    try:
        return path.exists()
    except OSError:
        return False


def _directory(path: str) -> Path:
    """Where a model lies, or would. Of a name on the hub: the snapshot that `main` names, else any one that has a
    `config.json`, in the cache of `huggingface_hub`, which these variables place."""
    if not is_hub_name(path):
        return Path(os.path.expanduser(path))
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.path.expanduser(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub"))
    model = cache / f"models--{path.replace('/', '--')}"
    main = model / "refs" / "main"
    wanted = main.read_text(encoding="utf-8", errors="replace").strip() if _exists(main) else None
    snapshots = sorted(file.parent for file in model.glob("snapshots/*/config.json"))
    found = [place for place in snapshots if place.name == wanted] or snapshots
    return found[-1] if found else model
