"""A reward model whose weights are sharded over the ranks that have it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from quintet.config.native.data import RewardModelConfig
from quintet.policies.reward_model import ResponseScorer, RewardModel
from quintet.records import PromptRow
from quintet.training.parallel.fsdp import fsdp_units
from quintet.training.parallel.process_group import RankGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ShardedRewardModel:
    """See `ResponseScorer`: each rank scores a part of the responses, with weights that FSDP2 gathers unit by unit. All
    ranks call `score` with the same responses, and return the scores of all."""

    def __init__(self, config: RewardModelConfig, policy: Path, max_length: int, ranks: RankGroup) -> None:
        """See `RewardModel.load`."""
        self._ranks, self._min_parameters = ranks, config.min_sharded_parameters
        self._offloaded = config.offload_parameters
        self._model = RewardModel.load(config, policy, max_length, shard=self._shard, num_passes=self._num_passes)

    @property
    def offloads(self) -> bool:
        return self._model.offloads

    def score(self, prompt_rows: Sequence[PromptRow], responses: Sequence[str]) -> list[float]:
        part = slice(self._ranks.rank, None, self._ranks.size)
        scores = torch.zeros(len(responses), dtype=torch.float64)
        scores[part] = torch.tensor(self._model.score(prompt_rows[part], responses[part]), dtype=torch.float64)
        all_scores: list[float] = self._ranks.all_reduce(scores).tolist()
        return all_scores

    def _shard(self, model: PreTrainedModel) -> None:
        mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (self._ranks.size,))
        for unit in fsdp_units(model, self._min_parameters):
            fully_shard(unit, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if self._offloaded:
            model.to(torch.device("cpu"))

    def _num_passes(self, local: int) -> int:
        """Return the number of passes of the rank with most: every rank takes part in gathering weights for each."""
        counts = torch.zeros(self._ranks.size, dtype=torch.int64)
        counts[self._ranks.rank] = local
        return int(self._ranks.all_reduce(counts).max())


def shards_reward_model(config: RewardModelConfig, num_ranks: int) -> bool:
    """Return whether the weights are sharded over that many ranks."""
    return config.min_sharded_parameters > 0 and num_ranks > 1


def load_reward_model(config: RewardModelConfig, policy: Path, max_length: int, ranks: RankGroup) -> ResponseScorer:
    """Load the reward model, sharded over the ranks or whole, as `RewardModel.load` does."""
    if shards_reward_model(config, ranks.size):
        return ShardedRewardModel(config, policy, max_length, ranks)
    return RewardModel.load(config, policy, max_length)
