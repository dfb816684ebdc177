"""Small action policies with random weights for the robot and the tasks of a simulator."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from quintet.policies.tiny_models import MESSAGE_START, train_tokenizer
from quintet.policies.vla.action_presets import ActionPreset, MlpPreset, VlaPreset
from quintet.policies.vla.mlp_policy import MlpConfig, MlpPolicy
from quintet.policies.vla.openvla import OpenVlaPolicy
from quintet.policies.vla.openvla_base import OpenVlaBase
from quintet.policies.vla.openvla_config import OpenVlaConfig
from quintet.policies.vla.openvla_oft import OpenVlaOftPolicy
from quintet.policies.vla.vision_tower import TowerShape, VisionTower

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

INSTRUCTION_TOKENS = 384
"""Vocabulary of instructions, of which 256 are bytes."""


@dataclass(frozen=True, slots=True)
class RobotSpec:
    """Sizes of a robot's actions and observations, and its tasks, from which a preset policy is created."""

    action_dim: int
    state_dim: int
    instructions: tuple[str, ...]


def build_preset(
    preset: ActionPreset, robot: RobotSpec, settings: dict[str, Any], seed: int, *, is_autoregressive: bool = False
) -> PreTrainedModel:
    """Build a policy with random weights determined by `seed`. `settings` are fields of its configuration;
    `is_autoregressive` builds an OpenVLA instead of an OpenVLA-OFT."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if isinstance(preset, MlpPreset):
            sizes = {"hidden_dim": preset.hidden, "num_action_chunks": preset.action_chunk}
            sizes |= {"obs_dim": robot.state_dim, "action_dim": robot.action_dim}
            return MlpPolicy(MlpConfig(**{**sizes, **settings}))
        tokenizer = train_tokenizer(INSTRUCTION_TOKENS, robot.instructions)
        tokenizer.bos_token = MESSAGE_START
        sizes = _vla_sizes(preset, robot, tokenizer) | {"learned_slots": not is_autoregressive} | settings
        policy: OpenVlaBase = (OpenVlaPolicy if is_autoregressive else OpenVlaOftPolicy)(OpenVlaConfig(**sizes))
        policy.set_tokenizer(tokenizer)
        _place_patches(policy.vision_backbone.featurizer)
        return policy


def _vla_sizes(preset: VlaPreset, robot: RobotSpec, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    bounds = {"q01": [-preset.action_range] * robot.action_dim, "q99": [preset.action_range] * robot.action_dim}
    return {
        "text_config": _text_sizes(preset, len(tokenizer) + preset.bins),
        "vision_towers": [asdict(_tower(preset))],
        "image_means": [[preset.image_mean] * 3],
        "image_stds": [[preset.image_std] * 3],
        "use_film": preset.film,
        "n_action_bins": preset.bins,
        "pad_to_multiple_of": 0,
        "norm_stats": {"robot": {"action": bounds}},
        "action_dim": robot.action_dim,
        "num_action_chunks": preset.action_chunk,
        "proprio_dim": robot.state_dim,
        "max_prompt_length": preset.prompt_tokens,
        "prompt": "{instruction}",
        "prompt_end": "",
    }


@torch.no_grad()
def _place_patches(tower: VisionTower) -> None:
    """Initialize position embeddings with sines and cosines of rows and columns, 1/2 to 4 half-waves per image. Small
    random ones are lost among the colors, and positions are learned late."""
    side, size = tower.shape.image // tower.shape.patch, tower.shape.hidden // 4
    rows, columns = torch.meshgrid(*[torch.linspace(-1, 1, side)] * 2, indexing="ij")
    frequencies = torch.pi / 2 * 2 ** (3 * torch.arange(size) / size)
    phases = [places.flatten().unsqueeze(-1) * frequencies for places in (columns, rows)]
    waves = torch.cat([wave(phase) for phase in phases for wave in (torch.sin, torch.cos)], dim=1)
    tower.pos_embed[0, :, : waves.shape[1]] = waves


def _tower(preset: VlaPreset) -> TowerShape:
    return TowerShape(
        hidden=preset.vision_hidden,
        depth=preset.vision_depth,
        heads=preset.vision_heads,
        mlp=preset.vision_mlp,
        patch=preset.patch,
        image=preset.image,
        merge=preset.merge,
        is_penultimate=False,
    )


def _text_sizes(preset: VlaPreset, vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": preset.hidden,
        "intermediate_size": preset.mlp,
        "num_hidden_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.heads,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": preset.rope_theta},
        "initializer_range": preset.initializer_range,
        "attention_bias": preset.qkv_bias,
        "mlp_bias": preset.linear_bias,
    }
