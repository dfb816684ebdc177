"""The records that everything passes through, from a world's first words to a gradient.

Frozen and slotted; tensors carry their shape and unit in the field's docstring. `N` counts packed
tokens, `B` sequences, `R` trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = [
    "UNPLAYED",
    "Answer",
    "Batch",
    "Failure",
    "Generation",
    "Observation",
    "Outcome",
    "Question",
    "Request",
    "Step",
    "StopReason",
    "Trajectory",
    "Turn",
    "Verdict",
]


class StopReason(StrEnum):
    """Why the policy stopped writing; counted under `response/stop_reason/<value>`."""

    STOP = "stop"
    """It ended its turn itself."""
    LENGTH = "length"
    """`max_response_tokens` was reached."""
    CONTEXT = "context"
    """The prompt left no room in the context window."""
    ABORT = "abort"
    """The engine was told to drop the request."""
    FAILED = "failed"
    """The engine couldn't go on; see `Generation.failure`."""


class Outcome(StrEnum):
    """How a trajectory ended; counted under `trajectory/outcome/<value>`."""

    SUCCESS = "success"
    """The world says the task is solved."""
    TERMINATED = "terminated"
    """The world ended without success (the agent fell into a hole)."""
    TRUNCATED = "truncated"
    """The world's own step limit was reached."""
    MAX_TURNS = "max_turns"
    """`max_turns` was reached."""
    MAX_ACTIONS = "max_actions"
    """`world.max_actions` was reached."""
    MAX_TOKENS = "max_tokens"
    """`world.max_tokens` left no room for another turn."""
    CONTEXT = "context"
    """The dialogue outgrew the context window."""
    FAILED = "failed"
    """The world or the engine failed; see `Trajectory.failure`."""
    ABORTED = "aborted"
    """It was given up in the middle, because nobody needs it any more."""


UNPLAYED = (Outcome.FAILED, Outcome.ABORTED)
"""Games that didn't come to an end of their own: nothing is learnt from them."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a world shows: `text`, and images as RGB `uint8[height, width, 3]`."""

    text: str
    images: tuple[np.ndarray, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What one action brought. `info["success"]` says whether the task is solved."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """A fault kept as data: where it happened (`reset`, `step`, `engine`, `reward`), the error's type, its message."""

    where: str
    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Question:
    """One row of a data file: what is asked, and what an answer is judged by.

    >>> Question(id=7, source="openai/gsm8k", messages=({"role": "user", "content": "2 + 3 = ?"},), truth="5").truth
    '5'
    """

    id: int
    """Number of the row over all files."""
    source: str
    """Says which rules judge; empty where the row doesn't say."""
    messages: tuple[Mapping[str, Any], ...]
    """Chat messages, each with `role` and `content`."""
    truth: Any = None
    """What is right."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What a reward function is told besides."""
    response: str | None = None
    """A demonstrated answer, where the row has one."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the policy answered, to be judged. `tokens` counts those it wrote; `id` is the caller's own."""

    id: int
    question: Question
    text: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an answer is worth: `score` is its reward, all factors and penalties included."""

    id: int
    score: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the reward is made of and what is to be logged, by name; `acc` says how right the answer is, 0 to 1."""
    predicted: str | None = None
    """The answer that was read out of the text, for votes among answers."""
    failure: Failure | None = None
    """Why it couldn't be judged; the score is then that of a wrong answer."""


@dataclass(frozen=True, slots=True)
class Request:
    """One turn to be written by an engine.

    `seed` alone decides the random draws, so the answer doesn't depend on its neighbours in a batch.
    """

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together reach this probability."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that prompt or answer already hold (Keskar et al.
    2019, arXiv:1909.05858)."""
    min_tokens: int = 0
    """Tokens before which nothing ends the answer: until then no `stop_ids` are drawn."""
    stop_ids: tuple[int, ...] = ()
    """Tokens that end the answer; such a token is its last. None of them: it goes on to `max_tokens`."""
    stop_texts: tuple[str, ...] = ()
    """Texts that end the answer wherever they come up in it, over the borders of tokens too."""
    keep: bool = False
    """The dialogue goes on after this answer: what is computed for it is kept until the next request of that `id`."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What an engine wrote for a `Request`.

    The log-probs are nats over the whole vocabulary under the sampling temperature (under 1 where greedy), before
    top-k, top-p, min-p and the repetition penalty change the draw: what a learner computes for the same tokens.
    """

    id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop: StopReason
    weight_version: int
    """Version of the weights that wrote the first token."""
    switches: tuple[tuple[int, int], ...] = ()
    """`(place, version)` for each weight update in the middle: from that token on, newer weights wrote."""
    failure: Failure | None = None
    """Why the engine couldn't go on, where it stopped for that."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange: what the policy saw, what it wrote, what came of it.

    >>> Turn(observation="_ P G", prompt=(1, 2), continues=False, tokens=(7, 3), logprobs=(-0.1, -0.2),
    ...      weight_version=4, text="<answer> Right </answer>", actions=("Right",), valid_format=True,
    ...      reward=1.0, stop=StopReason.STOP).actions
    ('Right',)
    """

    observation: str
    """The world's text before the policy spoke."""
    prompt: tuple[int, ...]
    """Token ids new to the policy: the whole prompt, or only what follows its last word where the
    turn `continues` the sequence of the turn before."""
    continues: bool
    tokens: tuple[int, ...]
    """Token ids the policy produced, as sampled."""
    logprobs: tuple[float, ...]
    """Nats, one for each of `tokens`."""
    weight_version: int
    text: str
    actions: tuple[Any, ...]
    """What was parsed and legal, in order: words, or arrays for continuous control."""
    valid_format: bool
    reward: float
    """Sum of the world's rewards in this turn, plus the format penalty."""
    stop: StopReason
    frames: tuple[str, ...] = ()
    """The world's text after each executed action."""
    images: tuple[np.ndarray, ...] = ()
    switches: tuple[tuple[int, int], ...] = ()
    """See `Generation.switches`."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One game. Trajectories with the same `group` started from the same state."""

    world: str
    seed: int
    group: int
    sample: int
    turns: tuple[Turn, ...]
    outcome: Outcome
    failure: Failure | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the reward is made of, by name, where a reward function says so."""
    predicted: str | None = None
    """The answer that was read out of the policy's words, where a verifier reads one."""
    kind: str | None = None
    """Which world `world` is, where that is a name of the user's own."""

    @property
    def success(self) -> bool:
        return self.outcome is Outcome.SUCCESS

    @property
    def reward(self) -> float:
        """Sum over turns."""
        return sum(turn.reward for turn in self.turns)

    @property
    def response_tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Batch:
    """Token sequences packed end to end, no padding.

    A trajectory gives one sequence, or several where its context window slides; its sequences lie
    next to each other in the order they were played, so that advantages run over the whole game.
    """

    tokens: torch.Tensor
    """int64 [N]."""
    positions: torch.Tensor
    """int64 [N], from 0 in each sequence."""
    lengths: torch.Tensor
    """int64 [B], tokens of each sequence; sums to N."""
    loss_mask: torch.Tensor
    """bool [N], true where the policy wrote the token."""
    turn: torch.Tensor
    """int64 [N], index of the turn within its trajectory."""
    turn_end: torch.Tensor
    """bool [N], true at the last token the policy wrote in a turn."""
    trajectory: torch.Tensor
    """int64 [B], index of each sequence's trajectory, ascending."""
    group: torch.Tensor
    """int64 [R], group of each trajectory."""
    logprobs: torch.Tensor
    """float32 [N], nats, as the engine sampled; 0 where the mask is false."""
    rewards: torch.Tensor
    """float32 [N], a turn's reward at its `turn_end`; 0 elsewhere."""
    rollout_logprobs: torch.Tensor | None = None
    """float32 [N], nats, as the engine sampled, where `logprobs` are the learner's own."""
    ref_logprobs: torch.Tensor | None = None
    """float32 [N], nats, of the reference policy; 0 where the mask is false."""
    squared_mass: torch.Tensor | None = None
    """float32 [N], sum of the squared probabilities of all tokens where each own token was drawn."""
    correction: torch.Tensor | None = None
    """float32 [N], by what each token's loss is multiplied; null multiplies by 1."""
    learnt: torch.Tensor | None = None
    """bool [N], own tokens that are learnt from; null learns from all."""
    divergence: torch.Tensor | None = None
    """float32 [N], nats, of the policy from the reference over the whole vocabulary."""
    saw: torch.Tensor | None = None
    """int64 [N], the same number for turns of a group that answered the same words of the world."""
    baseline: torch.Tensor | None = None
    """float32 [R], reward of a greedy game from the same start."""
    parts: Mapping[str, torch.Tensor] | None = None
    """float32 [R] each, what the rewards are made of."""
    values: torch.Tensor | None = None
    """float32 [N], the critic's estimate before each token."""
    advantages: torch.Tensor | None = None
    """float32 [N]."""
    returns: torch.Tensor | None = None
    """float32 [N], what the critic learns."""

    @property
    def token_trajectory(self) -> torch.Tensor:
        """int64 [N], index of each token's trajectory."""
        return self.trajectory.repeat_interleave(self.lengths)
