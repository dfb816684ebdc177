"""Parts of OpenVLA-OFT policies that published directories have in separate files."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from quintet.errors import MachineError

PARTS = {"proprio_projector": "proprio_projector--*.pt", "action_head": "action_head--*.pt"}
"""Pattern of the file by the name of the module."""
INITIALIZED = ("value_head.", "slot_embeddings", "action_head.log_std")
"""Weights that published policies do not have; they are initialized."""


def load_separate_parts(policy: nn.Module, directory: Path, missing: set[str]) -> set[str]:
    """Load the parts among the `missing` weights from their files, and return the weights that are still missing.

    Raises:
        MachineError: a file cannot be read, or its weights do not fit.
    """
    for part, pattern in PARTS.items():
        names = {name for name in missing if name.startswith(f"{part}.")}
        files = sorted(directory.glob(pattern))
        if names and files:
            _load_part(policy.get_submodule(part), files[-1])
            missing = missing - names
    return {name for name in missing if not name.startswith(INITIALIZED) and not _is_new_bias(name)}


def _is_new_bias(name: str) -> bool:
    """Return whether a weight is a bias that `policy.vla` adds to the language model."""
    return name.startswith("language_model.") and name.endswith(".bias")


def _load_part(module: nn.Module, path: Path) -> None:
    try:
        weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
        result = module.load_state_dict(
            {name.removeprefix("module."): tensor for name, tensor in weights.items()}, strict=False
        )
    except Exception as error:
        raise MachineError(f"cannot load {path}: {error}", "use the file of the published policy") from error
    if wrong := [*result.unexpected_keys, *(name for name in result.missing_keys if name != "log_std")]:
        raise MachineError(f"{path} does not fit the policy: {wrong[0]}", "use the file of the published policy")
