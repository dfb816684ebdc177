"""The policy of a run that only generates: weights for engines, and nothing that trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from quintet.config.native.experiment import Experiment
from quintet.policies.model_loading import cast_weights
from quintet.runtime.engines.engine_builders import engine_dtype, load_merged_model
from quintet.training.parallel.process_group import RankGroup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FrozenPolicy:
    """See `Policy`: a whole copy of the model on each rank with an engine, in the engine's dtype."""

    def __init__(self, config: Experiment, directory: Path) -> None:
        self._config, self._directory = config, directory
        self._model: PreTrainedModel | None = None

    @property
    def model(self) -> PreTrainedModel:
        """The model, which is loaded on first use."""
        if self._model is None:
            self._model = load_merged_model(self._config, self._directory)
            cast_weights(self._model, engine_dtype(self._config, self._directory))
        return self._model

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Policy.weights`; a rank without an engine yields none."""
        if self._model is not None:
            yield from self._model.named_parameters()


@dataclass(frozen=True, slots=True)
class FrozenPolicyOfRank:
    """See `PolicyGroup`: the policy on one rank."""

    ranks: RankGroup
    actor: FrozenPolicy

    @property
    def has_full_weights(self) -> bool:
        return True
