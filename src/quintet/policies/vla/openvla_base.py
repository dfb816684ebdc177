"""What OpenVLA policies have in common: vision towers, projector, language model, and inputs and outputs of robots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from quintet.embodied_records import RobotObservation
from quintet.errors import ConfigError
from quintet.policies.attention_backends import EAGER
from quintet.policies.lora import has_adapters
from quintet.policies.vla.action_normalization import ActionBins, Normalizer, find_statistics
from quintet.policies.vla.openvla_config import OpenVlaConfig
from quintet.policies.vla.openvla_modules import (
    INITIAL_LOG_STD,
    ImageProjector,
    InstructionFilm,
    ProprioProjector,
    RegressionHead,
    VisionBackbone,
)
from quintet.policies.vla.policy_directory import STATISTICS_FILE
from quintet.policies.vla.robot_actions import from_robot, to_robot
from quintet.policies.vla.value_head import ValueHead
from quintet.policies.vla.vision_tower import LayerScale, VisionTower

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PREPROCESSOR_FILE = "preprocessor_config.json"
RESIZE_STRATEGY = "resize-naive"
"""Height and width are scaled to those of the tower, whatever the proportions."""


class OpenVlaBase(PreTrainedModel):  # type: ignore[misc]
    """Vision towers, projector and language model under the names of published checkpoints; see `ActionPolicy`."""

    config_class = OpenVlaConfig
    base_model_prefix = ""
    generation_config = None
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _no_split_modules = ["LlamaDecoderLayer"]  # noqa: RUF012 - the type is transformers'

    def __init__(self, config: OpenVlaConfig) -> None:
        super().__init__(config)
        self.vision_backbone = VisionBackbone(config)
        self.projector = ImageProjector(config)
        self.language_model = LlamaForCausalLM._from_config(
            config.get_text_config(), attn_implementation=config._attn_implementation or "sdpa"
        )
        if config.use_film:
            self.film = InstructionFilm(config)
        if config.use_proprio:
            self.proprio_projector = ProprioProjector(config)
        if config.action_head == "l1":
            self.action_head = RegressionHead(config)
        if config.learned_slots:
            self.slot_embeddings = nn.Parameter(torch.zeros(config.num_slots, config.language_size))
        if config.add_value_head:
            self.value_head = ValueHead(config.language_size, (512, 128), config.num_values, "gelu")
        self.prompts: PromptEncoder | None = None
        self.action_dim, self.action_chunk = config.action_dim, config.num_action_chunks
        self.value_size = config.num_values
        self.post_init()
        self.freeze_unused()

    def freeze_unused(self) -> None:
        """Exclude the weights of the vision towers that do not affect their features from training."""
        for tower in self.vision_backbone.towers:
            for parameter in tower.unused_parameters():
                parameter.requires_grad_(False)

    @property
    def tokens_per_chunk(self) -> int:
        """Length of the sequence of a chunk."""
        config = self.config
        images = config.num_images_in_input * config.towers[0].num_tokens
        return int(images + config.max_prompt_length + config.use_proprio + config.num_slots)

    @property
    def robot_action_dim(self) -> int:
        return len(self.config.robot_dimensions or range(self.action_dim))

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.language_model.get_input_embeddings()
        return embeddings

    def get_output_embeddings(self) -> nn.Module:
        head: nn.Module = self.language_model.lm_head
        return head

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, ValueHead):
            module.reset_parameters()
        elif isinstance(module, OpenVlaBase) and hasattr(module, "slot_embeddings"):
            nn.init.normal_(module.slot_embeddings, std=self.config.get_text_config().initializer_range)
        elif isinstance(module, VisionTower):
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter, std=0.02)
        elif isinstance(module, RegressionHead):
            nn.init.constant_(module.log_std, INITIAL_LOG_STD)
        elif isinstance(module, LayerScale):
            nn.init.ones_(module.scale_factor)
        else:
            super()._init_weights(module)

    def prepare(self, observation: RobotObservation) -> dict[str, Tensor]:
        if self.prompts is None:
            raise RuntimeError("the policy has no tokenizer")
        config = self.config
        shape = self.config.towers[0]
        cameras = observation.images.shape[1]
        if cameras < config.num_images_in_input:
            raise ConfigError(
                f"policy.vla.images = {config.num_images_in_input}, but the simulator has {cameras} camera"
                + "s" * (cameras > 1),
                key="policy.vla.images",
                value=config.num_images_in_input,
                hint=f"set policy.vla.images={cameras}",
            )
        images = observation.images[:, : config.num_images_in_input]
        tokens, mask = self.prompts.encode(observation.instructions)
        inputs = {
            "images": prepare_images(images, shape.image, shape.image, center_crop=config.center_crop),
            "tokens": tokens,
            "mask": mask,
        }
        return inputs | ({"state": self._prepare_state(observation.state)} if config.use_proprio else {})

    def _prepare_state(self, state: np.ndarray) -> Tensor:
        if state.shape[1] != self.config.proprio_dim:
            raise ConfigError(
                f"policy.vla.state_dim = {self.config.proprio_dim}, but the simulator's state has {state.shape[1]}"
                " values",
                key="policy.vla.state_dim",
                value=self.config.proprio_dim,
                hint="use a policy for this robot, or policy.vla.use_proprioception=false",
            )
        normalizer = self._normalizer("proprio")
        normalized = state if normalizer is None else np.clip(normalizer.normalize(state), -1.0, 1.0)
        return torch.from_numpy(normalized.astype(np.float32))

    def _normalizer(self, part: str) -> Normalizer | None:
        """Return the normalizer of the data set's `action` or `proprio`; None if there are no statistics."""
        entry = find_statistics(self.config.norm_stats, self.config.unnorm_key)
        if entry is None or part not in entry[1]:
            return None
        return Normalizer.from_statistics(entry[1][part], self.config.normalization_bounds)

    def to_robot_actions(self, actions: Tensor) -> np.ndarray:
        values = actions.cpu().numpy()
        if self.config.action_head == "tokens":
            values = ActionBins(self.config.n_action_bins).decode(values)
        normalizer = self._normalizer("action")
        values = values if normalizer is None else normalizer.denormalize(values)
        return to_robot(values, self.config.gripper, self.config.robot_dimensions).astype(np.float32)

    def from_robot_actions(self, actions: np.ndarray) -> Tensor:
        config, normalizer = self.config, self._normalizer("action")
        actions = from_robot(actions, config.gripper, config.robot_dimensions, config.action_dim)
        normalized = actions if normalizer is None else normalizer.normalize(actions)
        if self.config.action_head == "tokens":
            return torch.from_numpy(ActionBins(self.config.n_action_bins).encode(normalized))
        return torch.from_numpy(np.asarray(normalized, np.float32))

    def _embed_prompt(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return embeddings [B, S, H] of first token, images, state and prompt, and their mask, bool [B, S]."""
        embeddings, mask = self.get_input_embeddings()(inputs["tokens"]), inputs["mask"]
        features = self.vision_backbone(inputs["images"])
        if self.config.use_film:
            features = self.film(features, embeddings, mask)
        context = [self.projector(features)]
        if self.config.use_proprio:
            context.append(self.proprio_projector(inputs["state"]))
        context = [part.to(embeddings.dtype) for part in context]
        count = sum(part.shape[1] for part in context)
        parts = [embeddings[:, :1], *context, embeddings[:, 1:]]
        mask = torch.cat([mask[:, :1], mask.new_ones(len(mask), count), mask[:, 1:]], dim=1)
        return torch.cat(parts, dim=1), mask

    def _attention_mask(self, mask: Tensor, embeddings: Tensor) -> Tensor:
        """Return the mask, bool [B, 1, ?, S], as the attention backend takes it: eager attention adds it to scores."""
        if self.language_model.config._attn_implementation != EAGER:
            return mask
        scores = torch.zeros(mask.shape, dtype=embeddings.dtype, device=mask.device)
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)

    def _action_logits(self, hidden: Tensor) -> Tensor:
        """Return logits of the bins [..., bins] from hidden states [..., H]."""
        head, first = self.language_model.lm_head, self.config.first_action_token
        tokens = slice(first, first + self.config.n_action_bins)
        if has_adapters(head):
            logits: Tensor = head(hidden)[..., tokens]
            return logits
        return F.linear(hidden, head.weight[tokens])

    def _values(self, hidden: Tensor) -> Tensor | None:
        """Return values [B, V] of the hidden state [B, H] of the last token of the prompt."""
        return self.value_head(hidden) if self.value_size else None

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        """Write a directory that `load_action_policy` loads: weights, configuration, tokenizer, statistics."""
        super().save_pretrained(save_directory, **options)
        self.save_files(Path(save_directory))

    def save_files(self, directory: Path) -> None:
        """Write the files of the directory other than configuration and weights."""
        if self.prompts is not None:
            self.prompts.tokenizer.save_pretrained(directory)
        if self.config.norm_stats:
            (directory / STATISTICS_FILE).write_text(json.dumps(self.config.norm_stats), encoding="utf-8")
        sizes = [[3, tower.image, tower.image] for tower in self.config.towers]
        processor = {
            "image_processor_type": "PrismaticImageProcessor",
            "image_resize_strategy": RESIZE_STRATEGY,
            "input_sizes": sizes,
            "interpolations": ["bicubic"] * len(sizes),
            "means": self.config.image_means,
            "stds": self.config.image_stds,
            "use_fused_vision_backbone": len(sizes) > 1,
        }
        (directory / PREPROCESSOR_FILE).write_text(json.dumps(processor), encoding="utf-8")

    def set_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Use a tokenizer for instructions."""
        self.prompts = PromptEncoder(tokenizer, self.config)


CROPPED_AREA = 0.9
"""Share of the area that a center crop keeps, as in the evaluation of OpenVLA-OFT."""


def prepare_images(images: np.ndarray, height: int, width: int, *, center_crop: bool) -> Tensor:
    """Return images, uint8 [B, cameras, H, W, 3], cropped and resized to uint8 [B, cameras, 3, height, width].

    Resizing is bicubic with antialiasing, and rounds, as torchvision's of uint8 tensors.
    """
    batch, cameras = images.shape[:2]
    pixels = torch.from_numpy(np.ascontiguousarray(images)).flatten(0, 1).permute(0, 3, 1, 2)
    if center_crop:
        pixels = _center_crop(pixels)
    if pixels.shape[-2:] != (height, width):
        resized = F.interpolate(pixels.float(), (height, width), mode="bicubic", antialias=True)
        pixels = resized.round().clamp(0, 255).to(torch.uint8)
    return pixels.reshape(batch, cameras, 3, height, width)


def _center_crop(pixels: Tensor) -> Tensor:
    height, width = (round(size * CROPPED_AREA**0.5) for size in pixels.shape[-2:])
    top, left = (pixels.shape[-2] - height) // 2, (pixels.shape[-1] - width) // 2
    return pixels[..., top : top + height, left : left + width]


class PromptEncoder:
    """Encodes instructions: first token, padding, prompt, and the token that ends it.

    Padding follows the first token, as in RLinf: image features are inserted between both, so that the prompt and the
    action slots are at the end of every sequence.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, config: OpenVlaConfig) -> None:
        self.tokenizer = tokenizer
        self._config = config
        self._encoded: dict[str, list[int]] = {}

    def encode(self, instructions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return tokens, int64 [B, L], and the mask of those that are no padding, bool [B, L].

        Raises:
            ConfigError: a prompt has more than `max_prompt_length` tokens.
        """
        rows = [self._encode(instruction) for instruction in instructions]
        length, pad = self._config.max_prompt_length, self._pad
        tokens = torch.tensor([row[:1] + [pad] * (length - len(row)) + row[1:] for row in rows])
        padding = torch.tensor([length - len(row) for row in rows]).unsqueeze(1)
        index = torch.arange(length)
        return tokens, (index == 0) | (index > padding)

    def _encode(self, instruction: str) -> list[int]:
        if instruction not in self._encoded:
            self._encoded[instruction] = self._tokenize(instruction)
        return self._encoded[instruction]

    def _tokenize(self, instruction: str) -> list[int]:
        text = self._config.prompt.format(instruction=instruction.lower())
        tokens = list(self.tokenizer(text)["input_ids"])
        if self.tokenizer.bos_token_id is not None and tokens[:1] != [self.tokenizer.bos_token_id]:
            tokens.insert(0, self.tokenizer.bos_token_id)
        if self._end is not None and tokens[-1] != self._end:
            tokens.append(self._end)
        if len(tokens) > self._config.max_prompt_length:
            raise ConfigError(
                f"the instruction {instruction!r} has {len(tokens)} tokens with its prompt, more than"
                f" rollout.max_prompt_tokens = {self._config.max_prompt_length}",
                key="rollout.max_prompt_tokens",
                value=self._config.max_prompt_length,
                hint=f"set rollout.max_prompt_tokens={len(tokens)} or more",
            )
        return tokens

    @cached_property
    def _end(self) -> int | None:
        return self.tokenizer.convert_tokens_to_ids(self._config.prompt_end) if self._config.prompt_end else None

    @cached_property
    def _pad(self) -> int:
        pad = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id if pad is None else pad)
