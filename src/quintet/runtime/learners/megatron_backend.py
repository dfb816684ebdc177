"""Megatron's learners in a run: their construction and their checkpoints.

A checkpoint has full tensors under Hugging Face names, like those of the other backends, so that any backend can resume
from it.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from quintet.config.checks.backends import backend_problems
from quintet.config.composed import ComposedConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import BudgetConfig, OptimizerConfig
from quintet.config.native.megatron import ConversionConfig, MegatronConfig
from quintet.config.native.training import SftConfig
from quintet.config.problems import raise_problems
from quintet.errors import MachineError
from quintet.runtime.dtypes import with_dtypes
from quintet.training.checkpoint.learner_state import MODEL_STEM, OPTIMIZER_STEM, LearnerSnapshot
from quintet.training.checkpoint.shards import ShardReader, TensorShard
from quintet.training.checkpoint.snapshot import HostBuffers
from quintet.training.megatron.core_package import require_megatron
from quintet.training.parallel.process_group import RankGroup

if TYPE_CHECKING:
    from quintet.training.protocols import Learner, LocalActor, LocalCritic, LogProbScorer, PolicyCopy

CRITIC = "critic"
CHECKPOINT_PREFIXES = {"model.": "body.", "value_head.": "head."}
"""Prefix of a critic's tensors in checkpoints by the prefix in Megatron's learner."""
MEGATRON_PREFIXES = {stored: megatron for megatron, stored in CHECKPOINT_PREFIXES.items()}


def _with_prefix(name: str, prefixes: Mapping[str, str]) -> str:
    prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
    return name if prefix is None else prefixes[prefix] + name.removeprefix(prefix)


class FullWeights(Protocol):
    """Model whose full weights can be read and loaded under Hugging Face names. All ranks call its methods."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors, the same on all ranks."""

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Load full tensors.

        Raises:
            KeyError: one is missing.
            RuntimeError: one has another shape.
        """


class FullStateLearner(FullWeights, Protocol):
    """Learner whose full weights and optimizer state can be read and loaded."""

    def optimizer_state_dict(self) -> dict[str, Tensor]:
        """Return the optimizer state by `<parameter>.<field>`."""

    def load_optimizer_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load the result of `optimizer_state_dict`."""


def _without_initial_checkpoint(config: Experiment) -> Experiment:
    options = config.actor.megatron or MegatronConfig()
    fine_tuned = options.model_copy(update={"checkpoint": None, "conversion": ConversionConfig()})
    return config.model_copy(update={"actor": config.actor.model_copy(update={"megatron": fine_tuned})})


class MegatronBackend:
    """`LearnerBackend` on Megatron Core."""

    def __init__(self) -> None:
        require_megatron()

    def build_actor(self, config: Experiment, policy: Path, optimizer: OptimizerConfig, ranks: RankGroup) -> LocalActor:
        # after supervised fine-tuning, the policy is the fine-tuned model, not the one that `actor.megatron` names
        initial = config if config.sft is None else _without_initial_checkpoint(config)
        raise_problems(backend_problems(ComposedConfig(config, {})))
        return _build_actor(initial, policy, optimizer)

    def build_sft_actor(self, config: Experiment, sft: SftConfig, base: Path, ranks: RankGroup) -> LocalActor:
        raise_problems(backend_problems(ComposedConfig(config, {})))
        return _build_actor(_with_sft_settings(config, sft), base, sft.optimizer)

    def build_critic(self, config: Experiment, actor: Learner, policy: Path, ranks: RankGroup) -> LocalCritic:
        from quintet.training.megatron.build import build_megatron_critic

        path, config = config.critic.path, with_dtypes(config)
        with _without_warnings():
            if path is not None:
                return build_megatron_critic(config, Path(path))
            return build_megatron_critic(config, policy, actor.weights())

    def build_reference(self, config: Experiment, actor: Learner, policy: Path, ranks: RankGroup) -> LogProbScorer:
        from quintet.training.megatron.build import build_megatron_reference

        path = config.reference.path
        with _without_warnings():
            weights = actor.weights() if path is None else None
            reference = build_megatron_reference(with_dtypes(config), Path(path or policy), weights)
        return cast("LogProbScorer", reference)  # only Megatron's learners compute a divergence to it

    def build_policy_scorer(self, config: Experiment, policy: Path, ranks: RankGroup) -> PolicyCopy:
        from quintet.training.megatron.build import build_megatron_policy_scorer

        raise_problems(backend_problems(ComposedConfig(config, {})))
        with _without_warnings():
            scorer = build_megatron_policy_scorer(with_dtypes(config), policy)
        return cast("PolicyCopy", scorer)  # only Megatron's learners compute a divergence to it


def _build_actor(config: Experiment, policy: Path, optimizer: OptimizerConfig) -> LocalActor:
    from quintet.training.megatron.build import build_megatron_actor

    with _without_warnings():
        # its reference is a Megatron scorer, too: the configuration is checked before a run
        return cast("LocalActor", build_megatron_actor(with_dtypes(config), policy, optimizer))


def _with_sft_settings(config: Experiment, sft: SftConfig) -> Experiment:
    """Return the configuration with the settings of the SFT stage; the temperature is 1 since nothing is sampled."""
    budget = BudgetConfig() if sft.sequences_per_pass is None else BudgetConfig(sequences=sft.sequences_per_pass)
    actor = {"budget": budget, "inference_budget": budget, "gradient_checkpointing": sft.gradient_checkpointing}
    return config.model_copy(
        update={
            "actor": config.actor.model_copy(update=actor),
            "rollout": config.rollout.model_copy(update={"temperature": 1.0}),
        }
    )


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress Megatron's warnings of missing Apex and of its own defaults, which it repeats for each model."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"megatron\.")
        yield


@dataclass(frozen=True, slots=True)
class WriteAssignment:
    """Assignment of full tensors, which all ranks gather, to the ranks that write them."""

    ranks: RankGroup
    all_ranks_write: bool = False
    """Divide the tensors among all ranks, instead of writing all on the first."""

    @classmethod
    def from_config(cls, config: Experiment, ranks: RankGroup) -> WriteAssignment:
        """Build the assignment; with the actor's `use_dist_ckpt` all ranks write."""
        options = config.actor.megatron
        return cls(ranks, options is not None and options.use_dist_ckpt)

    def writes(self, index: int) -> bool:
        """Return whether this rank writes the tensor with this index."""
        return index % (self.ranks.size if self.all_ranks_write else 1) == self.ranks.rank

    def snapshot(
        self, name: str, tensors: Mapping[str, Iterable[tuple[str, Tensor]]], memory: HostBuffers
    ) -> LearnerSnapshot:
        """Copy tensors, by the stem of their file names, to host memory one after the other."""
        shards = {stem: self._copy_shards(named, f"{name}/{stem}", memory) for stem, named in tensors.items()}
        return LearnerSnapshot(name, self.ranks, shards, gathered=not self.all_ranks_write)

    def _copy_shards(
        self, tensors: Iterable[tuple[str, Tensor]], buffer_owner: str, memory: HostBuffers
    ) -> list[TensorShard]:
        shards = []
        for index, (megatron_name, tensor) in enumerate(tensors):
            if self.writes(index):
                is_critic = buffer_owner.startswith(CRITIC)
                name = _with_prefix(megatron_name, CHECKPOINT_PREFIXES) if is_critic else megatron_name
                copied = memory.copy({name: tensor}, buffer_owner)[name]
                shards.append(TensorShard(name, tuple(tensor.shape), (0,) * tensor.dim(), copied))
        return shards


def snapshot_full_state(
    learner: object, name: str, contents: Collection[str], memory: HostBuffers, assignment: WriteAssignment
) -> LearnerSnapshot:
    """Copy weights and optimizer state, as far as `contents` names them. All ranks call it."""
    full, tensors = cast("FullStateLearner", learner), {}
    if MODEL_STEM in contents:
        tensors[MODEL_STEM] = full.weights()
    if "optimizer" in contents:
        tensors[OPTIMIZER_STEM] = iter(full.optimizer_state_dict().items())
    return assignment.snapshot(name, tensors, memory)


def snapshot_weights(model: object, name: str, memory: HostBuffers, assignment: WriteAssignment) -> LearnerSnapshot:
    """Copy the weights of a model without an optimizer."""
    return assignment.snapshot(name, {MODEL_STEM: cast("FullWeights", model).weights()}, memory)


def restore_full_state(learner: object, checkpoint: Path, name: str, contents: Collection[str]) -> None:
    """Restore the weights and optimizer state that any backend has saved, as far as `contents` names them. All ranks
    call it.

    Raises:
        MachineError: the checkpoint does not have them, or belongs to another model.
    """
    state_learner = cast("FullStateLearner", learner)
    if MODEL_STEM in contents:
        restore_weights(state_learner, checkpoint, name)
    if "optimizer" in contents:
        state = _read(checkpoint, f"{name}/{OPTIMIZER_STEM}", "optimizer")
        with _check_same_model(checkpoint):
            state_learner.load_optimizer_state_dict(state)


def restore_weights(model: object, checkpoint: Path, name: str) -> None:
    """Restore the weights alone; raises the same errors as `restore_full_state`."""
    weights = _read(checkpoint, f"{name}/{MODEL_STEM}", "model")
    with _check_same_model(checkpoint):
        cast("FullWeights", model).load_weights(weights)


def restore_from_directory(model: object, directory: Path) -> None:
    """Load the weights of a Hugging Face directory; raises the same errors as `restore_full_state`."""
    from quintet.training.megatron.hf_weights import HfWeights

    with _check_same_model(directory):
        cast("FullWeights", model).load_weights(HfWeights(directory))


def _read(checkpoint: Path, stem: str, content: str) -> dict[str, Tensor]:
    stored = ShardReader.open(checkpoint, stem)
    if stored is None:
        raise MachineError(f"{checkpoint} has no {stem}", f"remove {content} from checkpoint.load_contents")
    state = {name: torch.empty(stored.shape(name), dtype=stored.dtype(name)) for name in stored.names}
    stored.load_into(state)
    return {_with_prefix(name, MEGATRON_PREFIXES): tensor for name, tensor in state.items()}


@contextmanager
def _check_same_model(source: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, RuntimeError) as error:
        raise MachineError(f"{source} does not fit the model: {error}", "use a checkpoint of the same model") from error
