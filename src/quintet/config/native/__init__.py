"""The native configuration: what one run is. Frozen, every field documented in place.

A value that makes no sense by itself is refused here; what needs several keys at once is in
`quintet.config.plan`. A field that this version can't honour yet is marked by `Waits`. Nothing here
imports torch.
"""

from quintet.config.native.advantages import AdvantageConfig, BiLevelGaeConfig, GaeConfig, GrpoConfig
from quintet.config.native.algorithm import AlgorithmConfig, KlConfig
from quintet.config.native.data import DataConfig, EvaluationConfig, RewardConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.learners import ActorConfig, CriticConfig, OptimizerConfig
from quintet.config.native.losses import LossConfig, PpoLossConfig
from quintet.config.native.mixture import PlayedWorld
from quintet.config.native.policy import PolicyConfig
from quintet.config.native.rollout import EngineConfig, RolloutConfig, SamplingConfig, ValidationConfig
from quintet.config.native.section import Section
from quintet.config.native.tracking import CheckpointConfig, TrackingConfig
from quintet.config.native.training import SftConfig, TrainingConfig, WarmStartConfig
from quintet.config.native.worlds import FrozenLakeConfig, MixedWorldConfig, SokobanConfig, WorldConfig

__all__ = [
    "ActorConfig",
    "AdvantageConfig",
    "AlgorithmConfig",
    "BiLevelGaeConfig",
    "CheckpointConfig",
    "CriticConfig",
    "DataConfig",
    "EngineConfig",
    "EvaluationConfig",
    "Experiment",
    "FrozenLakeConfig",
    "GaeConfig",
    "GrpoConfig",
    "KlConfig",
    "LossConfig",
    "MixedWorldConfig",
    "OptimizerConfig",
    "PlayedWorld",
    "PolicyConfig",
    "PpoLossConfig",
    "RewardConfig",
    "RolloutConfig",
    "SamplingConfig",
    "Section",
    "SftConfig",
    "SokobanConfig",
    "TrackingConfig",
    "TrainingConfig",
    "ValidationConfig",
    "WarmStartConfig",
    "WorldConfig",
]
