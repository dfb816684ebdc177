"""The native configuration: what one run is. Frozen, every field documented in place.

A value that makes no sense by itself is refused here; what needs several keys at once is in
`quintet.config.plan`. Nothing here imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

__all__ = [
    "ActorConfig",
    "AdvantageConfig",
    "AlgorithmConfig",
    "BiLevelGaeConfig",
    "CheckpointConfig",
    "CriticConfig",
    "Experiment",
    "FrozenLakeConfig",
    "GaeConfig",
    "GrpoConfig",
    "KlConfig",
    "OptimizerConfig",
    "PolicyConfig",
    "RolloutConfig",
    "SokobanConfig",
    "TrackingConfig",
    "TrainingConfig",
    "ValidationConfig",
    "WarmStartConfig",
    "WorldConfig",
]

Observed = Literal["grid", "grid_neighbors"]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
DecayRate = Annotated[float, Field(ge=0.0, lt=1.0)]


class Section(BaseModel):
    """A part of the configuration: immutable, no unknown keys, types not bent."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, strict=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_this_place(cls, given: Any) -> Any:
        """A section that is given in part keeps, for the rest, the defaults of its place: those of
        `actor.optimizer` aren't those of `warm_start.optimizer`."""
        if not isinstance(given, dict):
            return given
        defaults = {name: info.default for name, info in cls.model_fields.items()}
        return {name: _over(defaults.get(name), value) for name, value in given.items()}


def _over(default: Any, given: Any) -> Any:
    """What is given laid over a default section; options of another kind (another `name`) stand alone."""
    if not isinstance(default, Section) or not isinstance(given, dict):
        return given
    parts = {name: getattr(default, name) for name in type(default).model_fields}
    if "name" in parts and given.get("name", parts["name"]) != parts["name"]:
        return given
    return parts | {name: _over(parts.get(name), value) for name, value in given.items()}


class PolicyConfig(Section):
    """The model that acts."""

    preset: str | None = "grid-1m"
    """A small model made on the spot. Exclusive with `path`."""
    path: str | None = None
    """A Hugging Face model directory. Exclusive with `preset`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights while generating and of matrix products while training; the optimizer
    always keeps float32 weights."""
    trust_remote_code: bool = False
    """Run code that lies in the model's directory."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.preset is None):
            raise ValueError("give either `preset` or `path`: set the other to null")
        return self


class FrozenLakeConfig(Section):
    """Cross a frozen lake from a random start to a random goal without falling into a hole."""

    name: Literal["frozenlake"] = "frozenlake"
    """Which world."""
    size: Annotated[int, Field(ge=2, le=32)] = 4
    """Cells a side."""
    floor_density: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Probability that a cell is frozen rather than a hole (RAGEN's `p`)."""
    slippery: bool = False
    """The ice moves the agent sideways now and then."""
    success_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0 / 3.0
    """On slippery ice, probability that a move goes where it was meant to; the rest is split
    between the two sides."""
    max_steps: PositiveInt = 100
    """Actions until the world itself ends the game."""
    observation: Observed = "grid_neighbors"
    """`grid` shows the map; `grid_neighbors` adds a line that says what lies next to the player."""


class SokobanConfig(Section):
    """Push every box onto a target."""

    name: Literal["sokoban"] = "sokoban"
    """Which world."""
    width: Annotated[int, Field(ge=4, le=16)] = 6
    """Cells, walls included."""
    height: Annotated[int, Field(ge=4, le=16)] = 6
    """Cells, walls included."""
    boxes: Annotated[int, Field(ge=1, le=6)] = 1
    """Boxes, and as many targets."""
    max_steps: PositiveInt = 100
    """Actions until the world itself ends the game."""
    pull_steps: PositiveInt = 30
    """Moves of the reverse play that makes a puzzle from its solution."""
    min_solution_pushes: PositiveInt = 1
    """Puzzles whose boxes all lie closer than this many pushes (in sum) to their targets are not used."""
    observation: Observed = "grid_neighbors"
    """`grid` shows the room; `grid_neighbors` adds a line that says what lies next to the player."""


WorldConfig = Annotated[FrozenLakeConfig | SokobanConfig, Field(discriminator="name")]


class RolloutConfig(Section):
    """How the policy plays."""

    engine: str = "hf"
    """Generation engine."""
    max_turns: PositiveInt = 8
    """Replies of the policy in one game."""
    window_size: PositiveInt | None = 1
    """Observations in the context, the current one included; null keeps the whole history."""
    max_actions_per_turn: PositiveInt = 1
    """Actions executed from one answer; the rest is dropped."""
    action_separator: Annotated[str, Field(min_length=1)] = "||"
    """Between the actions of one answer."""
    think: bool = True
    """The policy writes `<think>…</think>` before `<answer>…</answer>`."""
    binary_reward: bool = False
    """A game's reward is 1 for success and 0 otherwise, in place of the world's own and of penalties."""
    format_penalty: float = -0.1
    """Added to the reward of a turn whose text can't be parsed or names no legal action."""
    max_prompt_tokens: PositiveInt = 512
    """A longer context ends the game."""
    max_start_tokens: PositiveInt | None = None
    """Tokens of a game's first prompt; of a longer one the end is kept. null cuts nothing."""
    max_observation_tokens: PositiveInt | None = None
    """Tokens of one observation; a longer one loses its end. null cuts nothing."""
    max_response_tokens: PositiveInt = 24
    """Tokens of one reply."""
    temperature: Annotated[float, Field(gt=0.0, le=10.0)] = 1.0
    """Divides the logits while sampling and while learning."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the likeliest tokens that together reach this probability."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 keeps the whole vocabulary."""
    max_concurrent: PositiveInt = 256
    """Requests the engine decodes side by side."""


class OptimizerConfig(Section):
    """AdamW, linear warm-up, then constant, linear or cosine decay."""

    learning_rate: PositiveFloat = 1e-4
    """Peak learning rate."""
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    """Optimizer steps from 0 to `learning_rate`."""
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    """Decay after the warm-up."""
    min_learning_rate_ratio: Share = 0.1
    """Share of `learning_rate` left at the end."""
    betas: Annotated[tuple[DecayRate, DecayRate], Field(strict=False)] = (0.9, 0.95)
    """AdamW's decay rates of the two moments."""
    epsilon: PositiveFloat = 1e-8
    """AdamW's term for stability."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are scaled down to this global norm."""


class ActorConfig(Section):
    """How the policy learns."""

    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=6e-4, betas=(0.9, 0.99), max_grad_norm=0.4)
    """Steps and schedule."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""


class CriticConfig(Section):
    """The value model of `gae` and `bi_level_gae`; it starts from the policy's own weights."""

    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-4)
    """Steps and schedule."""
    value_clip: PositiveFloat | None = 0.5
    """New values stay within this distance of the old ones in the loss; null doesn't clip."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which only the critic learns."""


class GrpoConfig(Section):
    """Reward of a game against the others that started from the same state."""

    name: Literal["grpo"] = "grpo"
    """Which estimator of advantages."""
    normalize_by_std: bool = True
    """Divide by the group's deviation; false gives Dr. GRPO."""


class GaeConfig(Section):
    """Generalised advantage estimation over the policy's own tokens, with a critic."""

    name: Literal["gae"] = "gae"
    """Which estimator of advantages."""
    gamma: Share = 1.0
    """Discount a token."""
    lam: Share = 0.95
    """Weight of longer returns."""
    whiten: bool = True
    """Advantages to mean 0 and deviation 1 over the batch."""


class BiLevelGaeConfig(Section):
    """GAE over turns with a discount of its own, then over the tokens inside each turn."""

    name: Literal["bi_level_gae"] = "bi_level_gae"
    """Which estimator of advantages."""
    gamma: Share = 1.0
    """Discount a token, inside a turn."""
    lam: Share = 0.95
    """Weight of longer returns (λ)."""
    turn_gamma: Share = 0.95
    """Discount a turn."""
    turn_lam: Share = 0.95
    """Weight of longer returns over turns (λ)."""
    whiten: bool = True
    """Advantages to mean 0 and deviation 1 over the batch."""


AdvantageConfig = Annotated[GrpoConfig | GaeConfig | BiLevelGaeConfig, Field(discriminator="name")]


class KlConfig(Section):
    """A reference, the policy as reinforcement learning found it, and what it costs to leave it."""

    place: Literal["loss", "reward"] = "loss"
    """A term of the loss, or a penalty on each token's reward."""
    coefficient: Annotated[float, Field(ge=0.0)] = 0.001
    """Weight of the divergence."""
    estimator: Literal["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"] = "k3"
    """How the divergence is estimated from the tokens that were sampled; with `+`, the gradient is
    that of `k2`."""
    target: PositiveFloat | None = None
    """Divergence, in nats, towards which the coefficient of a reward penalty is steered; null leaves it
    fixed."""
    horizon: PositiveInt = 10000
    """Games over which the coefficient is steered."""
    refresh_every_steps: Annotated[int, Field(ge=0)] = 0
    """The reference becomes the present policy at every n-th step; 0 never."""

    @model_validator(mode="after")
    def _steers_a_penalty(self) -> Self:
        if self.target is not None and self.place == "loss":
            raise ValueError("only a reward penalty is steered to a `target`: set `place` to reward, or leave it out")
        return self


class AlgorithmConfig(Section):
    """What is optimised."""

    advantage: AdvantageConfig = GrpoConfig()
    """How good each token was."""
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """The probability ratio is clipped below 1 - clip_low …"""
    clip_high: PositiveFloat = 0.28
    """… and above 1 + clip_high."""
    clip_dual: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Bound on ratio × advantage where the advantage is negative; null for none."""
    entropy_coefficient: Annotated[float, Field(ge=0.0)] = 0.0
    """Weight of the entropy bonus."""
    kl: KlConfig | None = None
    """null knows no reference."""
    aggregation: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """How token losses become one number, always over the whole mini-batch."""
    drop_groups_without_signal: bool = True
    """Groups whose games all had the same reward give no gradient under `grpo`: leave them out of
    the update. Has no effect with a critic."""
    signal_threshold: Annotated[float, Field(ge=0.0)] = 0.0
    """Standard deviation of its rewards up to which a group counts as one without signal. Where each
    move costs a little, games that all failed differ a little, and `grpo` would blow that up."""


class TrainingConfig(Section):
    """The loop and its arithmetic: a step plays groups_per_step × samples_per_group games."""

    steps: Annotated[int, Field(ge=0)] = 70
    """Rounds of playing and learning."""
    groups_per_step: PositiveInt = 32
    """Start states a step."""
    samples_per_group: PositiveInt = 16
    """Games from each start state."""
    mini_batches: PositiveInt = 8
    """Optimizer steps for each pass over the games of a step; must divide groups_per_step."""
    epochs: PositiveInt = 1
    """Passes over the games of a step."""
    micro_batch_tokens: PositiveInt = 16384
    """Tokens of one forward and backward pass; changes memory, not the result."""
    threads: Annotated[int, Field(gt=0, le=1024)] | None = None
    """CPU threads; null takes every core."""


class WarmStartConfig(Section):
    """Supervised start on solved games."""

    games: PositiveInt = 400
    """Solved games to learn from."""
    updates: Annotated[int, Field(ge=0)] = 250
    """Optimizer steps."""
    until_success: Share | None = 0.5
    """Ends early once the policy wins this share of training games, greedily: the rest is left to
    reinforcement learning. null makes every update."""
    check_every_updates: PositiveInt = 2
    """Updates between two such trials, of 256 games."""
    turns_per_update: PositiveInt = 64
    """Demonstrated turns in one optimizer step."""
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=2e-3, warmup_steps=20)
    """Steps and schedule."""


class ValidationConfig(Section):
    """Greedy games on maps that are in neither training nor demonstrations."""

    games: PositiveInt = 256
    """Held-out start states, one game each."""
    every_steps: Annotated[int, Field(ge=0)] = 25
    """0 validates only before and after."""


class TrackingConfig(Section):
    """What a run writes for people."""

    loggers: Annotated[tuple[str, ...], Field(strict=False)] = ("console", "jsonl", "tensorboard")
    """Where metrics go: names from `quintet list`."""
    trajectories_every_steps: Annotated[int, Field(ge=0)] = 10
    """Store the games of every n-th step; 0 stores only validation games."""
    report_games: Annotated[int, Field(ge=0, le=200)] = 12
    """Games shown in `report.html`."""


class CheckpointConfig(Section):
    """What a run can be resumed from."""

    every_steps: Annotated[int, Field(ge=0)] = 10
    """0 keeps only the last."""
    keep: PositiveInt = 2
    """Older ones are removed."""


class Experiment(Section):
    """One run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "frozenlake"
    """The run's directory under `output_dir`."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Every random draw follows from it."""
    output_dir: str = "runs"
    """Where runs lie."""
    resume: str = "auto"
    """`auto` goes on from the last good checkpoint, `never` starts anew, a path starts from there."""
    policy: PolicyConfig = PolicyConfig()
    """The model that acts."""
    world: WorldConfig = FrozenLakeConfig()
    """What is played."""
    rollout: RolloutConfig = RolloutConfig()
    """How it is played."""
    warm_start: WarmStartConfig | None = WarmStartConfig()
    """null starts reinforcement learning from the policy as it is."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """What is optimised."""
    actor: ActorConfig = ActorConfig()
    """How the policy learns."""
    critic: CriticConfig = CriticConfig()
    """How the critic learns."""
    training: TrainingConfig = TrainingConfig()
    """The loop."""
    validation: ValidationConfig = ValidationConfig()
    """Held-out games."""
    tracking: TrackingConfig = TrackingConfig()
    """What is written down."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What can be resumed."""

    @property
    def needs_critic(self) -> bool:
        return self.algorithm.advantage.name != "grpo"
