"""Records that pass between components: from observations to batches for the learner.

All are frozen. Docstrings of tensors have shape and unit: `N` packed tokens, `B` sequences, `R` trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal

from quintet.relations import Relation
from quintet.reward_sum import sum_rewards
from quintet.sampling import SamplingSettings

if TYPE_CHECKING:
    import numpy as np
    import torch


class FinishReason(StrEnum):
    """Why generation of a response ended; counted under `response/stop_reason/<value>`."""

    STOP = "stop"
    """The policy generated a stop token or stop text."""
    LENGTH = "length"
    """`max_response_tokens` was reached."""
    CONTEXT = "context"
    """The prompt left no room in the context window."""
    ABORT = "abort"
    """The request was aborted."""
    FAILED = "failed"
    """The engine failed; see `Generation.failure`."""

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens cut the response."""
        return self in (FinishReason.LENGTH, FinishReason.CONTEXT)


class Outcome(StrEnum):
    """Reason for the end of a trajectory; counted under `trajectory/outcome/<value>`."""

    SUCCESS = "success"
    """The env reports that the task is solved."""
    TERMINATED = "terminated"
    """The env ended without success (the agent fell into a hole)."""
    TRUNCATED = "truncated"
    """The step limit of the env was reached; with prompts, a limit of tokens cut the last response, or replies to it
    left no room for another one."""
    MAX_TURNS = "max_turns"
    """`max_turns` was reached."""
    MAX_ACTIONS = "max_actions"
    """`env.max_actions` was reached."""
    MAX_TOKENS = "max_tokens"
    """`env.max_tokens` left no room for another turn."""
    CONTEXT = "context"
    """The prompt no longer fits in the context window."""
    FAILED = "failed"
    """The env or the engine failed; see `Trajectory.failure`."""
    ABORTED = "aborted"
    """The episode was cancelled because it is no longer needed."""


INCOMPLETE_OUTCOMES = (Outcome.FAILED, Outcome.ABORTED)
"""Outcomes of episodes that did not run to their end; they are not trained on."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Observation of an env: text, and images as RGB `uint8[height, width, 3]`."""

    text: str
    images: tuple[np.ndarray, ...] = ()
    relations: tuple[Relation, ...] | None = None
    """The state behind the observation, which descriptions of the policy are compared with; None if the env does not
    say. The policy does not see it."""


@dataclass(frozen=True, slots=True)
class ImageInput:
    """An image in the patches that a vision encoder reads, see `quintet.policies.vision.image_processing`."""

    key: int
    """Hash of grid and patches, which stands for the image in token sequences."""
    grid: tuple[int, int]
    """Rows and columns of image tokens."""
    patches: bytes
    """uint8 [rows · columns, patches per token · channels · patch side²]."""


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one action. `info["success"]` is true if the task is solved."""

    observation: Observation
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """Error recorded as data: where it happened (`reset`, `step`, `engine`, `interaction`, `reward`), error type and
    message."""

    where: str
    error_type: str
    message: str


@dataclass(frozen=True, slots=True)
class PromptRow:
    """Row of a data file: the prompt, and the fields to verify responses with.

    >>> messages = ({"role": "user", "content": "2 + 3 = ?"},)
    >>> PromptRow(id=7, data_source="openai/gsm8k", messages=messages, ground_truth="5").ground_truth
    '5'
    """

    id: int
    """Number of the row over all files."""
    data_source: str
    """Data source, which selects the verifier; empty if the row has none."""
    messages: tuple[Mapping[str, Any], ...]
    """Chat messages, each with `role` and `content`."""
    ground_truth: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields for the reward function."""
    response: str | None = None
    """Demonstrated response, if the row has one."""
    agent_loop: str | None = None
    """How it is answered, `single_turn_agent` or `tool_agent`; None calls tools if there are any."""
    location: str = field(default="", compare=False)
    """File and row of the file, for messages."""
    columns: tuple[str, ...] = field(default=(), compare=False)
    """Columns of a row without a ground truth, for messages."""

    @property
    def tool_selection(self) -> tuple[str, ...] | None:
        """Names of the tools that its responses may call, None for all of the run: `tool_selection` in `extra_info`."""
        selection = self.extra.get("tool_selection")
        return tuple(map(str, selection)) if isinstance(selection, list | tuple) and selection else None

    @property
    def has_replies(self) -> bool:
        """Whether its responses may call tools, and simulated users reply to them."""
        return self.agent_loop != "single_turn_agent"


def with_opened_thought(text: str) -> str:
    """Return a text with the `<think>` before a thought that it only closes, since its prompt has opened it.

    >>> with_opened_thought("2 and 2 </think> 4"), with_opened_thought("4")
    ('<think>2 and 2 </think> 4', '4')
    """
    thought, closing, _ = text.partition("</think>")
    return f"<think>{text}" if closing and "<think>" not in thought else text


@dataclass(frozen=True, slots=True)
class Response:
    """Response of the policy to be scored. `tokens` is the number of sampled tokens, without replies between turns; the
    caller chooses `id`."""

    id: int
    prompt_row: PromptRow
    text: str
    tokens: int
    response_prefix: str | None = None
    """Start of the response that is already in the prompt: `<think>` and a newline with chat templates that add them.
    None if the prompt is unknown, as with stored responses."""

    @property
    def whole_text(self) -> str:
        """The text with the thought that the prompt has opened; with an unknown prompt, one that is only closed."""
        if self.response_prefix is not None:
            return self.response_prefix + self.text
        return with_opened_thought(self.text)


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Reward of a response: `score` includes all factors and penalties."""

    id: int
    score: float
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Components of the reward and further metrics by name; `acc` is the correctness, 0 to 1."""
    extracted_answer: str | None = None
    """Extracted answer, for majority votes."""
    failure: Failure | None = None
    """Why scoring failed; `score` is then that of a wrong response."""
    measures_success: bool = True
    """Whether a response is right or wrong. If not, the goal is the reward of a function or a model."""


@dataclass(frozen=True, slots=True)
class Request(SamplingSettings):
    """Request to an engine for one response.

    Sampling only depends on `seed`, not on the other requests in a batch.
    """

    id: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time that it occurs in the response so far, as at OpenAI."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occur in the response so far, as at OpenAI."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens and what is added to their logits."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the response and are its last token; empty continues to `max_tokens`."""
    keep_kv_cache: bool = False
    """The conversation may continue: cache the keys and values of the response for prompts that begin with it. Of
    several engines, the one with this `id` gets the next request."""
    top_logprobs: int = 0
    """Number of likeliest tokens to return at each position."""
    prompt_logprobs: int | None = None
    """Return the log-probs of the prompt's tokens, and this number of likeliest tokens at each of their positions; None
    returns neither. Then `max_tokens` may be 0."""
    images: tuple[ImageInput, ...] = ()
    """The distinct images of the image tokens in `prompt`."""

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a structured output could not end where it is complete.
        """
        if self.structured_output is not None and (self.min_tokens or not self.stop_token_ids):
            raise ValueError(
                "a structured output ends by a stop token where it is complete: remove min_tokens, and keep the "
                "model's end tokens"
            )


TopLogprobs = tuple[tuple[int, float], ...]
"""The likeliest tokens at one position and their log-probs, the likeliest first."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probs of the tokens of a prompt behind its first one, nats, at temperature 1."""

    logprobs: tuple[float, ...]
    top_logprobs: tuple[TopLogprobs, ...]
    """The likeliest tokens at each position; empty if the request does not ask for them."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Response of an engine to a `Request`.

    The log-probs, nats, are over the whole vocabulary at the sampling temperature (1 if greedy), before top-k, top-p,
    min-p, penalties, biases and structured outputs: as a learner computes them for the same tokens.
    """

    id: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    weight_version: int
    """Version of the weights that generated the first token."""
    version_changes: tuple[tuple[int, int], ...] = ()
    """`(index, version)` per weight update during generation: newer weights from this token on."""
    failure: Failure | None = None
    """Why the engine failed, for `FinishReason.FAILED`."""
    top_logprobs: tuple[TopLogprobs, ...] = ()
    """The likeliest tokens at the position of each token; empty if the request does not ask for them."""
    prompt_logprobs: PromptLogprobs | None = None
    """None if the request does not ask for them."""


@dataclass(frozen=True, slots=True)
class StateScore:
    """Score of a description of a state by the policy."""

    kind: Literal["grounding", "worldmodeling"]
    """Description of the state before the actions of a turn, or prediction of the state after them."""
    text: str
    score: float
    """0 to 1, or a penalty."""
    failure: Failure | None = None
    """Why it could not be scored; `score` is then 0."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn of an episode: observation, response and its effect.

    >>> Turn(observation="_ P G", prompt=(1, 2), continues=False, tokens=(7, 3), logprobs=(-0.1, -0.2),
    ...      weight_version=4, text="<answer> Right </answer>", actions=("Right",), valid_format=True,
    ...      reward=1.0, finish_reason=FinishReason.STOP).actions
    ('Right',)
    """

    observation: str
    """Text of the env before the response."""
    prompt: tuple[int, ...]
    """Prompt token ids: the whole prompt, or only the tokens after the previous response if the turn `continues` the
    sequence of the previous turn."""
    continues: bool
    tokens: tuple[int, ...]
    """Response token ids as sampled."""
    logprobs: tuple[float, ...]
    """Log-probs of `tokens`, nats."""
    weight_version: int
    text: str
    actions: tuple[Any, ...]
    """Valid parsed actions in order: words, or arrays for continuous control."""
    valid_format: bool
    reward: float
    """Sum of the env's rewards in this turn, the format penalty or reward, and the state reward."""
    finish_reason: FinishReason
    frames: tuple[str, ...] = ()
    """Text of the env after each executed action."""
    images: tuple[np.ndarray, ...] = ()
    """Images of the observation, RGB `uint8[height, width, 3]`."""
    image_inputs: tuple[ImageInput, ...] = ()
    """The same, as the policy saw them."""
    images_after: tuple[np.ndarray, ...] = ()
    """Images of the env after the last executed action; in the next turn they are `images`."""
    version_changes: tuple[tuple[int, int], ...] = ()
    """See `Generation.version_changes`."""
    state_scores: tuple[StateScore, ...] = ()
    """Scores of `rollout.state_reward`, whose weighted sum `reward` includes."""


PROMPTS = "prompts"
"""Type of the env of prompts."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """Record of one episode. Trajectories of the same `group` have the same start state."""

    env: str
    seed: int
    group: int
    sample: int
    turns: tuple[Turn, ...]
    outcome: Outcome
    failure: Failure | None = None
    reward_components: Mapping[str, float] = field(default_factory=dict)
    """Components of the reward by name, if the reward function returns them."""
    extracted_answer: str | None = None
    """Answer that a verifier extracted from the response."""
    env_type: str | None = None
    """Type of the env, if `env` is a user-defined name; `PROMPTS` if it is the data source of a prompt."""
    measures_success: bool = True
    """See `RewardResult.measures_success`."""
    ground_truth: Any = None
    """Ground truth of the prompt."""
    replies_exceed_limit: bool = False
    """The replies to the last response, such as results of tools, left no room for another response."""

    @property
    def truncated(self) -> bool:
        """Whether a limit of tokens cut a response or ended the episode. Limits of turns, actions and env steps do not
        count: they are part of the task."""
        cut = any(turn.finish_reason.truncated for turn in self.turns)
        return cut or self.replies_exceed_limit or self.outcome in (Outcome.MAX_TOKENS, Outcome.CONTEXT)

    @property
    def success(self) -> bool:
        return self.outcome is Outcome.SUCCESS

    @property
    def checks_format(self) -> bool:
        """Whether responses have a form to keep to: that of actions, or one that the reward checks."""
        return self.env_type != PROMPTS or "format" in self.reward_components

    @property
    def reward(self) -> float:
        """Sum over turns."""
        return sum_rewards(turn.reward for turn in self.turns)

    @property
    def response_tokens(self) -> int:
        return sum(len(turn.tokens) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Batch:
    """Token sequences packed without padding.

    A trajectory has one sequence, or several consecutive ones with a sliding context window, in the order of its turns,
    so that advantages run over the whole episode.
    """

    tokens: torch.Tensor
    """int64 [N]."""
    positions: torch.Tensor
    """int64 [N], from 0 in each sequence; with images int64 [N, 3], in time, height and width."""
    lengths: torch.Tensor
    """int64 [B], tokens of each sequence; sums to N."""
    loss_mask: torch.Tensor
    """bool [N], response tokens."""
    turn: torch.Tensor
    """int64 [N], index of the turn within its trajectory."""
    turn_end: torch.Tensor
    """bool [N], last response token of each turn."""
    trajectory: torch.Tensor
    """int64 [B], index of each sequence's trajectory, ascending."""
    group: torch.Tensor
    """int64 [R], group of each trajectory."""
    logprobs: torch.Tensor
    """float32 [N], nats, at sampling; 0 outside the loss mask."""
    rewards: torch.Tensor
    """float32 [N], reward of a turn at its `turn_end`; 0 elsewhere."""
    rollout_logprobs: torch.Tensor | None = None
    """float32 [N], nats, of the engine at sampling, if `logprobs` were recomputed by the learner."""
    ref_logprobs: torch.Tensor | None = None
    """float32 [N], nats, of the reference policy; 0 outside the loss mask."""
    sum_squared_probs: torch.Tensor | None = None
    """float32 [N], sum over the vocabulary of squared probabilities at each response token."""
    correction: torch.Tensor | None = None
    """float32 [N], factor on the loss of each token; None for 1."""
    trained_mask: torch.Tensor | None = None
    """bool [N], response tokens that are trained on; None for all."""
    divergence: torch.Tensor | None = None
    """float32 [N], nats, KL divergence from the reference over the whole vocabulary."""
    observation_group: torch.Tensor | None = None
    """int64 [N], the same number for turns of a group with the same observation."""
    domain: torch.Tensor | None = None
    """int64 [R], number of the domain of each trajectory's prompt; None without `data.domains`."""
    baseline: torch.Tensor | None = None
    """float32 [R], reward of a greedy episode from the same start state."""
    reward_components: Mapping[str, torch.Tensor] | None = None
    """Components of the rewards by name, each float32 [R]."""
    response_tokens: torch.Tensor | None = None
    """int64 [R], sampled tokens of each trajectory; unlike the loss mask, never with observations or results of
    tools."""
    truncated: torch.Tensor | None = None
    """bool [R], see `Trajectory.truncated`."""
    values: torch.Tensor | None = None
    """float32 [N], value estimate of the critic before each token."""
    advantages: torch.Tensor | None = None
    """float32 [N]."""
    returns: torch.Tensor | None = None
    """float32 [N], targets of the critic."""
    image_keys: torch.Tensor | None = None
    """int64 [I], ascending hashes of the images, which image tokens contain; None without images."""
    image_grids: torch.Tensor | None = None
    """int64 [I, 2], rows and columns of image tokens of each image."""
    image_patches: torch.Tensor | None = None
    """uint8 [T, bytes per image token] of the images one after the other, see `ImageInput.patches`."""

    @property
    def token_trajectory(self) -> torch.Tensor:
        """int64 [N], index of each token's trajectory."""
        return self.trajectory.repeat_interleave(self.lengths)
