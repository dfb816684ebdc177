"""Which code computes a model on a CPU, from its `config.json` alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from quintet.config.plan.model_support import model_support, unsupported_reason
from quintet.kernels.build import find_compiler
from quintet.policies.inference_decoder import decoder_obstacle
from quintet.policies.model_check import has_layers
from quintet.policies.model_loading import build_meta_model
from quintet.policies.training_decoder import kernel_obstacle
from quintet.policies.vision.image_encoder import text_decoder


@dataclass(frozen=True, slots=True)
class ModelPaths:
    """Code that computes a model on a CPU in float32, without adapters."""

    model_class: str
    family: str
    """`model_type` of its configuration."""
    parameters: int
    is_tested: bool
    """Whether the tests compare its family with transformers' own forward pass."""
    refused: str | None
    """Why it is neither trained nor sampled by the embedded engine."""
    training_obstacle: str | None
    """Why the compiled kernels of training do not compute its layers; the modules of transformers do."""
    sampling_obstacle: str | None
    """Why the decoder of the embedded engine does not; the modules of transformers do."""

    @classmethod
    def from_directory(cls, directory: Path, *, trust_remote_code: bool = False) -> ModelPaths:
        """Read the configuration, and build the model without weights; raises as `build_meta_model`."""
        model = build_meta_model(directory, trust_remote_code=trust_remote_code)
        config, body = model.config, getattr(model, "model", None)
        refused = unsupported_reason(config.to_dict())
        decoder = None if body is None else text_decoder(body)
        if refused is None and (decoder is None or not hasattr(model, "lm_head") or not has_layers(decoder)):
            refused = "its layers and its head are not at model.layers and lm_head, as in Llama"
        return cls(
            type(model).__name__,
            config.model_type,
            sum(parameter.numel() for parameter in model.parameters()),
            is_tested=config.model_type in model_support()["tested"],
            refused=refused,
            training_obstacle=None if refused or decoder is None else _training_obstacle(decoder),
            sampling_obstacle=None if refused or decoder is None else decoder_obstacle(decoder),
        )


def _training_obstacle(decoder: nn.Module) -> str | None:
    return "there is no C++ compiler" if find_compiler() is None else kernel_obstacle(decoder, torch.float32)
