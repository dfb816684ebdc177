"""Episodes of multi-turn rollouts: the request for one, and its state while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quintet.config.native.relations import RelationScoring
from quintet.envs.start_states import env_seed
from quintet.records import (
    Failure,
    FinishReason,
    Generation,
    ImageInput,
    Observation,
    Outcome,
    Request,
    Step,
    Trajectory,
    Turn,
)
from quintet.rewards.state_reward import Description, descriptions
from quintet.rollout.chat.chat_format import Dialogue
from quintet.rollout.chat.response_parser import ParsedResponse, ResponseFormat
from quintet.rollout.episode_limits import EpisodeRules
from quintet.rollout.sampling_params import SamplingParams
from quintet.seeds import derive_seed

UNEXPLAINED = Failure("engine", "Unexplained", "the engine stopped in the middle of a response without a reason")
EMPTY = Failure("engine", "EmptyResponse", "the engine returned no token, not even an end token")
NO_RELATIONS = Failure(
    "observation", "NoRelations", "rollout.state_reward needs observations with relations, and this env sends none"
)
LOST = Failure("engine", "Lost", "the engine has no requests left and never finished this one")
NO_ACTIONS = ParsedResponse((), valid=False)


@dataclass(frozen=True, slots=True)
class Episode:
    """An episode to run: its start state, its group and the sample's index within the group."""

    seed: int
    """Seed of the env; with several envs it also selects the env, see `quintet.envs.start_states`."""
    group: int
    sample: int
    replay: int = 0
    """How often the step has used this start state before, so that other responses are sampled."""

    def sampling_seed(self, sampling: SamplingParams, turn: int) -> int:
        """Return the seed for sampling the response of a turn."""
        repeated = (self.replay,) if self.replay else ()
        return derive_seed(sampling.seed, self.seed, self.sample, turn, *repeated)


def unfinished_outcome(generation: Generation) -> tuple[Outcome, Failure | None] | None:
    """Return how an episode ends whose response the engine did not finish, or that is empty; None if it is complete."""
    if generation.finish_reason is FinishReason.FAILED:
        return Outcome.FAILED, generation.failure or UNEXPLAINED
    if generation.finish_reason is FinishReason.ABORT:
        return Outcome.ABORTED, None
    if not generation.tokens:
        is_full = generation.finish_reason is FinishReason.CONTEXT
        return (Outcome.CONTEXT, None) if is_full else (Outcome.FAILED, EMPTY)
    return None


@dataclass(frozen=True, slots=True)
class PolicyResponse:
    """The policy's response in a turn, with the actions parsed from it."""

    generation: Generation
    text: str = ""
    parsed: ParsedResponse = NO_ACTIONS

    @property
    def valid(self) -> bool:
        """Whether it ended with an end token and its format is valid."""
        return self.parsed.valid and self.generation.finish_reason is FinishReason.STOP


@dataclass(slots=True)
class RunningEpisode:
    """State of an episode that is running."""

    id: int
    episode: Episode
    sampling: SamplingParams
    rules: EpisodeRules
    dialogue: Dialogue | None = None
    """None until the env has started."""
    format: ResponseFormat | None = None
    observation: Observation = field(default_factory=lambda: Observation(""))
    """As the policy sees it."""
    env_observation: Observation = field(default_factory=lambda: Observation(""))
    """As the env sent it, without the problem of an invalid response."""
    new_prompt: tuple[int, ...] = ()
    """See `Turn.prompt`."""
    continues: bool = False
    """See `Turn.continues`."""
    image_inputs: tuple[ImageInput, ...] = ()
    """See `Turn.image_inputs`."""
    turns: list[Turn] = field(default_factory=list)
    response: PolicyResponse | None = None
    """Response whose actions the env is executing; None while the policy generates or the env starts."""
    is_generating: bool = False
    """Whether the engine has its request."""
    num_actions: int = 0
    num_tokens: int = 0
    descriptions: list[tuple[Description, ...]] = field(default_factory=list)
    """Descriptions of states in the responses, by turn; empty without `rollout.state_reward`."""

    @property
    def reached_limit(self) -> Outcome | None:
        """The limit of turns, actions or tokens of a response that the episode has reached, if any."""
        max_actions = self.rules.limits.max_actions
        is_cut_off = bool(self.turns) and self.turns[-1].finish_reason.truncated
        if is_cut_off and self.rules.config.truncation_ends_episode:
            return Outcome.MAX_TOKENS
        if len(self.turns) >= self.rules.config.max_turns:
            return Outcome.MAX_TURNS
        return Outcome.MAX_ACTIONS if max_actions is not None and self.num_actions >= max_actions else None

    def request(
        self, prompt: tuple[int, ...], images: tuple[ImageInput, ...], max_tokens: int, stop_token_ids: Sequence[int]
    ) -> Request:
        """Return the request for the next turn; `images` are those in the prompt."""
        turn, config = len(self.turns), self.rules.config
        continues = turn + 1 < config.max_turns and (config.window_size is None or turn + 1 < config.window_size)
        seed = self.episode.sampling_seed(self.sampling, turn)
        return self.sampling.request(
            self.id, prompt, max_tokens, seed, stop_token_ids, keep_kv_cache=continues, images=images
        )

    def add_turn(self, response: PolicyResponse, reward: float = 0.0, steps: Sequence[Step] = ()) -> None:
        """Record a turn: the response, and the env steps that its actions caused."""
        generation = response.generation
        turn = Turn(
            observation=self.observation.text,
            prompt=self.new_prompt,
            continues=self.continues,
            tokens=generation.tokens,
            logprobs=generation.logprobs,
            weight_version=generation.weight_version,
            text=response.text,
            actions=response.parsed.actions[: len(steps)],
            valid_format=response.valid,
            reward=reward,
            finish_reason=generation.finish_reason,
            frames=tuple(step.observation.text for step in steps),
            images=self.observation.images,
            image_inputs=self.image_inputs,
            images_after=steps[-1].observation.images if steps else (),
            version_changes=generation.version_changes,
        )
        self.turns.append(turn)

    def describe_states(self, after: Observation) -> None:
        """Record the response's descriptions of the states before and after its actions, if its format is valid."""
        if self.rules.config.state_reward is None or self.response is None:
            return
        sections = self.response.parsed.sections if self.response.valid else {}
        scoring = self.rules.relation_scoring or RelationScoring()
        self.descriptions.append(descriptions(sections, self.observation.relations, after.relations, scoring))

    def finish(self, outcome: Outcome, failure: Failure | None) -> Trajectory:
        """Return the record of the episode."""
        return Trajectory(
            env=self.rules.name,
            seed=env_seed(self.episode.seed),
            group=self.episode.group,
            sample=self.episode.sample,
            turns=tuple(self.turns),
            outcome=outcome,
            failure=failure,
            env_type=self.rules.env_type,
        )
