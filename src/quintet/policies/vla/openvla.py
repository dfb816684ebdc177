"""OpenVLA (arXiv:2406.09246): action tokens one after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import DynamicCache

from quintet.embodied_records import ActionSample, ActionSampling, ActionStatistics
from quintet.policies.transformers_interface import cache_argument
from quintet.policies.vla.action_distributions import sample_tokens, token_statistics
from quintet.policies.vla.openvla_base import OpenVlaBase


class OpenVlaPolicy(OpenVlaBase):
    """Autoregressive action tokens with causal attention, sampled with a KV cache.

    Values are computed from the last token of the prompt.
    """

    def sample(self, inputs: Mapping[str, Tensor], uniforms: Tensor | None, sampling: ActionSampling) -> ActionSample:
        prompt, mask = self._embed_prompt(inputs)
        flat = None if uniforms is None else uniforms.flatten(1)
        cache = DynamicCache(config=self.config.get_text_config())
        tokens = []
        logprobs = []
        embeddings = prompt
        values = None
        with self._stored_activations():
            for slot in range(self.config.num_slots):
                hidden = self._hidden_states(embeddings, mask, cache)
                values = self._values(hidden[:, -1]) if slot == 0 else values
                sampled = sample_tokens(
                    self._action_logits(hidden[:, -1]), None if flat is None else flat[:, slot], sampling
                )
                tokens.append(sampled[0])
                logprobs.append(sampled[1])
                embeddings = self._embed_actions(sampled[0].unsqueeze(1))
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        shape = (len(prompt), self.action_chunk, self.action_dim)
        return ActionSample(torch.stack(tokens, 1).view(shape), torch.stack(logprobs, 1).view(shape), values)

    def statistics(self, inputs: Mapping[str, Tensor], actions: Tensor, sampling: ActionSampling) -> ActionStatistics:
        prompt, mask = self._embed_prompt(inputs)
        embeddings = torch.cat([prompt, self._embed_actions(actions.flatten(1)[:, :-1])], dim=1)
        mask = torch.cat([mask, mask.new_ones(len(mask), self.config.num_slots - 1)], dim=1)
        hidden = self._hidden_states(embeddings, mask)[:, -self.config.num_slots :]
        logits = self._action_logits(hidden).view(*actions.shape, -1)
        return ActionStatistics(*token_statistics(logits, actions, sampling), self._values(hidden[:, 0]))

    def _embed_actions(self, tokens: Tensor) -> Tensor:
        """Return embeddings [B, N, H] of bins [B, N]."""
        embeddings: Tensor = self.get_input_embeddings()(tokens + self.config.first_action_token)
        return embeddings

    def _hidden_states(self, embeddings: Tensor, mask: Tensor, cache: DynamicCache | None = None) -> Tensor:
        """Return hidden states [B, N, H] of the last N tokens of sequences whose other tokens are in the cache. `mask`,
        bool [B, S], is of all tokens."""
        length, total = embeddings.shape[1], mask.shape[1]
        causal = torch.ones(length, total, dtype=torch.bool, device=mask.device).tril(total - length)
        output: Tensor = self.language_model.model(
            inputs_embeds=embeddings,
            attention_mask=self._attention_mask(causal & mask[:, None, None, :], embeddings),
            position_ids=(mask.long().cumsum(1) - 1)[:, -length:],
            use_cache=cache is not None,
            **{cache_argument(self.language_model.model): cache},
        ).last_hidden_state
        return output

    @contextmanager
    def _stored_activations(self) -> Iterator[None]:
        """Suspend activation checkpointing, under which layers do not use the cache."""
        layers = [layer for layer in self.language_model.model.layers if layer.training]
        for layer in layers:
            layer.training = False
        try:
            yield
        finally:
            for layer in layers:
                layer.training = True
