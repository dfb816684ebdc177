"""One run, from its parts."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from quintet.config.native.advantages import OutsideAdvantageConfig
from quintet.config.native.algorithm import AlgorithmConfig
from quintet.config.native.data import DataConfig, EvaluationConfig, RewardConfig
from quintet.config.native.learners import ActorConfig, CriticConfig, ReferenceConfig
from quintet.config.native.mixture import PlayedWorld, played_worlds
from quintet.config.native.placement import PlacementConfig
from quintet.config.native.policy import PolicyConfig
from quintet.config.native.rollout import RolloutConfig, ValidationConfig
from quintet.config.native.section import Section, Texts
from quintet.config.native.tracking import CheckpointConfig, TrackingConfig
from quintet.config.native.training import SftConfig, TrainingConfig, WarmStartConfig
from quintet.config.native.worlds import FrozenLakeConfig, MixedWorldConfig, WorldConfig

__all__ = ["Experiment"]


class Experiment(Section):
    """One run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "frozenlake"
    """The run's directory under `output_dir`."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Every random draw follows from it."""
    output_dir: str = "runs"
    """Where runs lie."""
    resume: str = "auto"
    """`auto` goes on from the last good checkpoint, `never` starts anew, a path starts from there."""
    external_libs: Texts = ()
    """Modules that are imported before anything is built."""
    policy: PolicyConfig = PolicyConfig(overrides={})
    """The model that acts."""
    world: WorldConfig = FrozenLakeConfig()
    """What is played."""
    worlds: dict[str, MixedWorldConfig] = {}  # noqa: RUF012 - pydantic copies it
    """Several worlds in one run, each under a name of your own, in place of `world`."""
    data: DataConfig | None = None
    """Prompts from files; null where the world makes its own."""
    reward: RewardConfig | None = None
    """What judges answers; null where the world does."""
    rollout: RolloutConfig = RolloutConfig()
    """How it is played."""
    warm_start: WarmStartConfig | None = WarmStartConfig()
    """null starts reinforcement learning from the policy as it is."""
    sft: SftConfig | None = None
    """Supervised fine-tuning in place of reinforcement learning; null for none."""
    evaluation: EvaluationConfig | None = None
    """Stored answers are judged and nothing is trained; null trains."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """What is optimised."""
    actor: ActorConfig = ActorConfig()
    """How the policy learns."""
    critic: CriticConfig = CriticConfig()
    """How the critic learns."""
    reference: ReferenceConfig = ReferenceConfig()
    """Where the reference of `algorithm.kl` lies."""
    training: TrainingConfig = TrainingConfig()
    """The loop."""
    validation: ValidationConfig = ValidationConfig()
    """Held-out games."""
    placement: PlacementConfig = PlacementConfig()
    """On which devices it runs."""
    tracking: TrackingConfig = TrackingConfig()
    """What is written down."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What can be resumed."""

    @property
    def needs_critic(self) -> bool:
        advantage = self.algorithm.advantage
        asked = isinstance(advantage, OutsideAdvantageConfig) and advantage.needs_critic
        return asked or advantage.name in ("gae", "bi_level_gae", "turn_wise_gae")

    @property
    def played(self) -> tuple[PlayedWorld, ...]:
        """The worlds of the run, one or several, each with its share and the rules it is played by."""
        return played_worlds(self)

    @property
    def held_out_starts(self) -> int:
        """Start states of a validation, over all worlds."""
        return sum(one.validation_games for one in self.played)

    @property
    def longest_game(self) -> int:
        """The most tokens that the policy can write in one game."""
        turns = 1 if self.world.name == "prompts" else self.rollout.max_turns
        return turns * self.rollout.max_response_tokens

    @model_validator(mode="after")
    def _reference_of_its_own(self) -> Self:
        if self.reference.path is not None and self.algorithm.kl and self.algorithm.kl.refresh_every_steps:
            raise ValueError("a reference from `reference.path` isn't renewed: leave out kl.refresh_every_steps")
        return self

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.kl is not None or self.algorithm.loss.name == "distillation"
