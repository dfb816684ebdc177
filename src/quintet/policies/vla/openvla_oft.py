"""OpenVLA-OFT (arXiv:2502.19645): all actions of a chunk in one forward pass with full attention."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from quintet.embodied_records import ActionSample, ActionSampling, ActionStatistics
from quintet.policies.vla.action_distributions import (
    normal_statistics,
    sample_normal,
    sample_tokens,
    token_statistics,
)
from quintet.policies.vla.openvla_base import OpenVlaBase


class OpenVlaOftPolicy(OpenVlaBase):
    """Action slots follow the prompt. Their embeddings are zero, and every token attends to all others but padding.

    The distribution of a slot is computed from the token before it, and values from the last token of the prompt, as in
    RLinf and in the training of published checkpoints.
    """

    def sample(self, inputs: Mapping[str, Tensor], uniforms: Tensor | None, sampling: ActionSampling) -> ActionSample:
        output, values = self._forward(inputs)
        if self.config.action_head == "tokens":
            actions, logprobs = sample_tokens(output, uniforms, sampling)
        else:
            actions, logprobs = sample_normal(output, self.action_head.log_std, uniforms, sampling)
        return ActionSample(actions, logprobs, values)

    def statistics(self, inputs: Mapping[str, Tensor], actions: Tensor, sampling: ActionSampling) -> ActionStatistics:
        output, values = self._forward(inputs)
        if self.config.action_head == "tokens":
            logprobs, entropies = token_statistics(output, actions, sampling)
        else:
            logprobs, entropies = normal_statistics(output, self.action_head.log_std, actions, sampling)
        return ActionStatistics(logprobs, entropies, values)

    def _forward(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return logits [B, C, D, bins], or means [B, C, D], and values [B, V]."""
        prompt, mask = self._embed_prompt(inputs)
        slots = prompt.new_zeros(len(prompt), self.config.num_slots, prompt.shape[-1])
        if self.config.learned_slots:
            slots = slots + self.slot_embeddings.to(slots.dtype)
        mask = torch.cat([mask, mask.new_ones(slots.shape[:2])], dim=1)
        hidden = self.language_model.model(
            inputs_embeds=torch.cat([prompt, slots], dim=1),
            attention_mask=self._attention_mask(mask[:, None, None, :], prompt),
            position_ids=mask.long().cumsum(1) - 1,
            use_cache=False,
        ).last_hidden_state
        hidden = hidden[:, -self.config.num_slots - 1 : -1]
        values = self._values(hidden[:, 0])
        if self.config.action_head == "l1":
            return self.action_head(hidden), values
        logits = self._action_logits(hidden)
        return logits.view(len(logits), self.action_chunk, self.action_dim, -1), values
