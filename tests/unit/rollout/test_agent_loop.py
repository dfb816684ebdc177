"""If these fail, episodes do not follow the configuration, or training uses other tokens than the rollout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from vision_models import PROCESSOR, SHAPE, TEXTS, random_image

from quintet.config.native.relations import RelationScoring
from quintet.config.native.rollout import RolloutConfig
from quintet.config.native.state_reward import StateRewardConfig
from quintet.envs.env import Env
from quintet.envs.vector_env import LocalVectorEnv
from quintet.errors import ConfigError
from quintet.policies.model_loading import load_tokenizer
from quintet.policies.tiny_models import train_tokenizer
from quintet.records import FinishReason, Generation, Observation, Outcome, Request, Step, Trajectory
from quintet.relations import Relation
from quintet.rollout.agent_loop import AgentLoop, _turn_result
from quintet.rollout.chat.chat_format import ChatFormat, Dialogue
from quintet.rollout.chat.image_prompts import ImagePrompts
from quintet.rollout.collate import collate
from quintet.rollout.episode import Episode
from quintet.rollout.episode_limits import EpisodeLimits, EpisodeRules
from quintet.rollout.sampling_params import SamplingParams
from quintet.seeds import derive_seed
from quintet.tracking.summaries import summarize_episodes

GREEDY = SamplingParams(0.0, 0, 1.0, 0)


class Corridor:
    """Three steps to the right win; `Down` raises."""

    actions = ("Left", "Down", "Right", "Up")

    def instruction(self) -> str:
        return "Walk right."

    def reset(self, seed: int) -> Observation:
        if seed == 13:
            raise OSError("no map")
        self.place = 0
        return Observation(" P _ _ G")

    def step(self, action: str) -> Step:
        if action == "Down":
            raise RuntimeError("the floor gave way")
        self.place += action == "Right"
        won = self.place == 3
        text = "".join(" P" if i == self.place else " _" for i in range(4))
        return Step(Observation(text), float(won), won, False, {"success": won})

    def render(self) -> np.ndarray:
        return np.zeros((1, 1, 3), np.uint8)

    def close(self) -> None:
        pass


class Script:
    """An engine with scripted responses per turn; an episode's seed selects the script."""

    weight_version = 3

    def __init__(self, chat: ChatFormat, responses: list[str], stop: FinishReason = FinishReason.STOP) -> None:
        self.chat, self.responses, self.stop = chat, responses, stop
        self.waiting: list[Request] = []
        self.prompts: list[tuple[int, ...]] = []
        self.turns: dict[int, int] = {}

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def add_request(self, request: Request) -> None:
        self.waiting.append(request)
        self.prompts.append(request.prompt)

    def step(self) -> list[Generation]:
        request = self.waiting.pop()
        turn = self.turns.get(request.id, 0)
        self.turns[request.id] = turn + 1
        ending = (self.chat.end_token_id,) if self.stop is FinishReason.STOP else ()
        tokens = (*self.chat.encode(self.responses[turn % len(self.responses)]), *ending)
        return [Generation(request.id, tokens, (-0.5,) * len(tokens), self.stop, 3)]

    def load_weights(self, version: int, weights: object) -> None: ...
    def reset_prefix_cache(self) -> None: ...

    def sleep(self) -> None: ...
    def wake_up(self) -> None: ...


@pytest.fixture
def chat(policy_directory: Path) -> ChatFormat:
    return ChatFormat(load_tokenizer(policy_directory))


def play(
    chat: ChatFormat, responses: list[str], episodes: int = 1, **options: object
) -> tuple[list[Trajectory], Script]:
    config = RolloutConfig.model_validate({"max_turns": 5, "window_size": None, "max_prompt_tokens": 900, **options})
    engine = Script(chat, responses)
    loop = AgentLoop(engine, chat, LocalVectorEnv(make_corridor), [EpisodeRules("corridor", config)])
    return list(loop.collect_rollouts([Episode(10 + i, i // 2, i % 2) for i in range(episodes)], GREEDY)), engine


def make_corridor() -> Env:
    return Corridor()


RIGHT = "<think> go </think><answer> Right </answer>"


def test_an_episode_is_won_over_several_turns(chat: ChatFormat) -> None:
    (episode,), _ = play(chat, [RIGHT])
    assert episode.outcome is Outcome.SUCCESS
    assert [turn.actions for turn in episode.turns] == [("Right",)] * 3
    assert [turn.reward for turn in episode.turns] == [0.0, 0.0, 1.0]
    assert episode.turns[1].observation == " _ P _ _"
    assert episode.turns[2].frames == (" _ _ _ P",)


def test_actions_behind_the_end_of_the_episode_are_not_executed(chat: ChatFormat) -> None:
    texts = ["<think> go </think><answer> Right || Right || Right || Right </answer>"]
    (episode,), _ = play(chat, texts, max_actions_per_turn=4)
    assert episode.turns[0].actions == ("Right",) * 3
    assert episode.turns[0].reward == 1.0


def test_the_rewards_of_a_turn_that_cancel_are_0() -> None:
    """In floats, 0.1 + 0.2 - 0.3 is 5.6e-17."""
    config = RolloutConfig.model_validate({"format_reward": 0.1})
    steps = [Step(Observation(""), reward, False, False, {}) for reward in (0.2, -0.3)]
    assert _turn_result(config, steps, valid=True) == (0.0, None)


def test_unparsable_responses_get_the_format_penalty(chat: ChatFormat) -> None:
    (episode,), _ = play(chat, ["hm", RIGHT])
    assert [turn.valid_format for turn in episode.turns] == [False, True, False, True, False]
    assert episode.outcome is Outcome.MAX_TURNS
    assert episode.turns[0].reward == -0.1
    assert episode.turns[1].observation == episode.turns[0].observation


@pytest.mark.proves("vagen", "env1.env_config.format_reward")
def test_valid_responses_get_the_format_reward(chat: ChatFormat) -> None:
    (episode,), _ = play(chat, ["hm", RIGHT, RIGHT.replace("Right", "Jump"), RIGHT], format_reward=0.25)
    assert [turn.reward for turn in episode.turns] == [-0.1, 0.25, -0.1, 0.25, -0.1]
    (won,), _ = play(chat, [RIGHT], format_reward=0.25, binary_reward=True)
    assert [turn.reward for turn in won.turns] == [0.0, 0.0, 1.0]


@pytest.mark.proves("vagen", "train_envs.env1.config.format_reward")
def test_executed_actions_get_the_format_reward_also_before_an_unknown_one(chat: ChatFormat) -> None:
    """As in VAGEN since 2026: the second response executes one action before an unknown one, the third none."""
    texts = ["hm", RIGHT.replace("Right", "Right || Jump"), RIGHT.replace("Right", "Jump")]
    options = {"format_reward": 0.25, "format_penalty": 0.0, "max_actions_per_turn": 2}
    (episode,), _ = play(chat, texts, format_reward_for="executed", **options)
    assert [turn.reward for turn in episode.turns[:3]] == [0.0, 0.25, 0.0]
    (strict,), _ = play(chat, texts, **options)
    assert [turn.reward for turn in strict.turns[:3]] == [0.0, 0.0, 0.0]


def test_required_thoughts_are_described_to_the_policy(chat: ChatFormat) -> None:
    plain, engine = play(chat, [RIGHT], thoughts="grounding_structured", action_separator="|")
    assert not plain[0].turns[0].valid_format  # thoughts without the sections
    prompt = chat.decode(engine.prompts[0])
    assert "Walk right.\nAlways respond in this form" in prompt
    assert "<observation> the current state, as a JSON object" in prompt
    assert "<answer> your actions, separated by | </answer>" in prompt


def test_descriptions_around_the_answer_are_described_to_the_policy(chat: ChatFormat) -> None:
    free = play(chat, [RIGHT], thoughts="free_wm", response_format="anywhere")[1]
    prompt = chat.decode(free.prompts[0])
    assert "you may reason between these parts" in prompt
    assert prompt.index("<observation>") < prompt.index("<answer>") < prompt.index("<prediction>")


class Placed(Corridor):
    """The corridor, which says where its goal is."""

    def reset(self, seed: int) -> Observation:
        return replace(super().reset(seed), relations=(Relation("target", "same", "right"),))

    def step(self, action: str) -> Step:
        step = super().step(action)
        side = "same" if self.place == 3 else "right"
        return replace(step, observation=replace(step.observation, relations=(Relation("target", "same", side),)))


DESCRIBED = "<think><observation>target right</observation><reasoning>-</reasoning><prediction>{}</prediction></think>"


@pytest.mark.proves(
    "vagen",
    "env1.env_config.use_state_reward",
    "env1.env_config.grounding_reward_weight",
    "env1.env_config.worldmodeling_reward_weight",
)
def test_descriptions_of_the_state_before_and_after_the_actions_are_rewarded(chat: ChatFormat) -> None:
    """The goal is in the same row, which the first description omits: a half match, F1 ½."""
    at_goal = DESCRIBED.format("The player is at the same position as the target") + "<answer>Right</answer>"
    config = RolloutConfig(max_turns=3, max_prompt_tokens=4096, thoughts="grounding_worldmodeling")
    scored = {"grounding_weight": 0.5, "worldmodeling_weight": 2.0}
    config = config.model_copy(update={"state_reward": StateRewardConfig.model_validate(scored)})
    scoring = RelationScoring({"target": 1.0}, partial=True)
    rules = EpisodeRules("corridor", config, EpisodeLimits(max_actions=9), relation_scoring=scoring)
    loop = AgentLoop(Script(chat, [at_goal]), chat, LocalVectorEnv(Placed), [rules])
    (episode,) = loop.collect_rollouts([Episode(1, 0, 0)], GREEDY)
    # the prediction is half right until the last move, by which the goal is reached
    assert [[score.score for score in turn.state_scores] for turn in episode.turns] == [[0.5, 0.5]] * 2 + [[0.5, 1.0]]
    assert [turn.reward for turn in episode.turns] == [0.25 + 1.0, 0.25 + 1.0, 1.0 + 0.25 + 2.0]
    assert not loop.busy
    summary = summarize_episodes([episode])
    assert summary["state_reward/worldmodeling/mean"] == pytest.approx(2 / 3)
    assert summary["state_reward/failed"] == 0
    silent = AgentLoop(Script(chat, [at_goal]), chat, LocalVectorEnv(Corridor), [rules])
    (failed,) = silent.collect_rollouts([Episode(1, 0, 0)], GREEDY)
    assert failed.failure is not None
    assert failed.failure.error_type == "NoRelations"


def test_responses_in_another_form_have_no_state_reward(chat: ChatFormat) -> None:
    config = RolloutConfig(max_turns=1, max_prompt_tokens=4096, thoughts="grounding_worldmodeling")
    rules = EpisodeRules("corridor", config.model_copy(update={"state_reward": StateRewardConfig()}))
    thought = DESCRIBED.format("target right")
    for text in (f"well, {thought}<answer>Right</answer>", f"{thought}<answer>Jump</answer>", "<answer>Right</answer>"):
        loop = AgentLoop(Script(chat, [text]), chat, LocalVectorEnv(Placed), [rules])
        (episode,) = loop.collect_rollouts([Episode(1, 0, 0)], GREEDY)
        assert episode.turns[0].state_scores == ()


class Pictures(Corridor):
    """The corridor as a picture of six tokens."""

    def reset(self, seed: int) -> Observation:
        super().reset(seed)
        return Observation("<image>", (random_image(16, 24),))


def test_limits_of_an_episode_count_the_tokens_of_images() -> None:
    tokenizer = train_tokenizer(SHAPE.vocabulary, TEXTS, images=True)
    before, after = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
    chat = ChatFormat(tokenizer, images=ImagePrompts(PROCESSOR, before, after))

    def played(limits: EpisodeLimits = EpisodeLimits(), **options: int) -> Trajectory:  # noqa: B008
        config = RolloutConfig(max_turns=1, **{"max_prompt_tokens": 4096, **options})
        loop = AgentLoop(
            Script(chat, ["hm"]), chat, LocalVectorEnv(Pictures), [EpisodeRules("corridor", config, limits)]
        )
        return next(loop.collect_rollouts([Episode(1, 0, 0)], GREEDY))

    prompt = played().turns[0].prompt
    assert sum(token < 0 for token in prompt) == 6
    size = len(prompt)
    assert [len(played(max_prompt_tokens=limit).turns) for limit in (size, size - 1)] == [1, 0]
    assert played(max_prompt_tokens=size - 1).outcome is Outcome.CONTEXT
    assert played(EpisodeLimits(max_tokens=size)).outcome is Outcome.MAX_TOKENS
    assert len(played(EpisodeLimits(max_tokens=size + 1)).turns) == 1


def test_a_truncated_response_is_invalid(chat: ChatFormat) -> None:
    config = RolloutConfig(max_turns=1)
    loop = AgentLoop(
        Script(chat, [RIGHT], FinishReason.LENGTH),
        chat,
        LocalVectorEnv(make_corridor),
        [EpisodeRules("corridor", config)],
    )
    (episode,) = loop.collect_rollouts([Episode(1, 0, 0)], GREEDY)
    assert not episode.turns[0].valid_format


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.CONTEXT])
@pytest.mark.parametrize(("ends", "turns"), [(True, 1), (False, 3)])
def test_a_truncated_response_ends_the_episode_only_if_that_is_configured(
    chat: ChatFormat, ends: bool, turns: int, reason: FinishReason
) -> None:
    config = RolloutConfig(max_turns=3, response_format="anywhere", truncation_ends_episode=ends)
    loop = AgentLoop(
        Script(chat, [RIGHT], reason), chat, LocalVectorEnv(make_corridor), [EpisodeRules("corridor", config)]
    )
    (episode,) = loop.collect_rollouts([Episode(1, 0, 0)], GREEDY)
    assert [turn.actions for turn in episode.turns] == [("Right",)] * turns
    assert episode.outcome is (Outcome.MAX_TOKENS if ends else Outcome.SUCCESS)


def test_an_env_error_fails_only_its_own_episode(chat: ChatFormat) -> None:
    episodes, _ = play(chat, [RIGHT], episodes=6)  # the fourth has seed 13
    failed = [episode for episode in episodes if episode.outcome is Outcome.FAILED]
    assert [episode.seed for episode in failed] == [13]
    assert failed[0].failure is not None
    assert (failed[0].failure.where, failed[0].failure.error_type) == ("reset", "OSError")
    assert sum(episode.success for episode in episodes) == 5
    (fallen,), _ = play(chat, [RIGHT, RIGHT.replace("Right", "Down")])
    assert fallen.failure is not None
    assert "gave way" in fallen.failure.message
    assert len(fallen.turns) == 1


def test_a_full_context_ends_the_episode(chat: ChatFormat) -> None:
    (episode,), engine = play(chat, ["hm"], max_prompt_tokens=60)
    assert episode.outcome is Outcome.CONTEXT
    assert max(map(len, engine.prompts)) <= 60


@pytest.mark.parametrize("window", [None, 1, 2, 3])
def test_collated_sequences_equal_the_engines_prompts_and_responses(chat: ChatFormat, window: int | None) -> None:
    """The packed sequences are the engine's prompts and responses, token by token."""
    (episode,), engine = play(chat, ["hm", RIGHT, "mm"], window_size=window)
    batch = collate([episode])
    parts = batch.tokens.split(batch.lengths.tolist())
    masks = batch.loss_mask.split(batch.lengths.tolist())
    seen = [(part[: i + 1]).tolist() for part, mask in zip(parts, masks, strict=True) for i in _ends(mask)]
    assert seen == [[*prompt, *turn.tokens] for prompt, turn in zip(engine.prompts, episode.turns, strict=True)]
    assert int(batch.loss_mask.sum()) == episode.response_tokens
    assert float(batch.rewards.sum()) == pytest.approx(episode.reward)
    assert int(batch.turn_end.sum()) == len(episode.turns)
    assert bool(batch.loss_mask[batch.turn_end].all())


def _ends(mask: torch.Tensor) -> Iterator[int]:
    for i in range(len(mask)):
        if mask[i] and (i + 1 == len(mask) or not mask[i + 1]):
            yield i


@pytest.mark.parametrize("window", [None, 1, 2, 3])
def test_an_incremental_dialogue_equals_the_rendered_template(
    policy_directory: Path, chat: ChatFormat, window: int | None
) -> None:
    """The prompt built turn by turn equals the chat template rendered over the whole dialogue."""
    tokenizer = load_tokenizer(policy_directory)
    dialogue = Dialogue(chat, "Walk.", window)
    history: list[dict[str, str]] = []
    for number in range(5):
        prompt, _, _ = dialogue.observe(f" P _ {number}")
        history.append({"role": "user", "content": f" P _ {number}"})
        kept = history if window is None else history[-(2 * window - 1) :]
        messages = [{"role": "system", "content": "Walk."}, *kept]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert prompt == tuple(tokenizer.encode(text, add_special_tokens=False))
        dialogue.add_response((*chat.encode(RIGHT), chat.end_token_id))
        history.append({"role": "assistant", "content": RIGHT})


def test_a_template_that_drops_messages_is_a_config_error(policy_directory: Path) -> None:
    tokenizer = load_tokenizer(policy_directory)
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    with pytest.raises(ConfigError, match="drops a message"):
        ChatFormat(tokenizer)


def test_derived_seeds_are_stable_and_distinct() -> None:
    assert derive_seed(1, "a", 2) == derive_seed(1, "a", 2)
    assert len({derive_seed(i, j) for i in range(50) for j in range(50)}) == 2500
    assert all(0 <= derive_seed(i) < 2**63 for i in range(100))


class Toll(Corridor):
    """Each step costs one, winning brings ten."""

    def step(self, action: str) -> Step:
        done = super().step(action)
        return Step(done.observation, 10.0 * done.reward - 1.0, done.terminated, done.truncated, done.info)


@pytest.mark.parametrize(("binary", "rewards"), [(False, [-0.1, -1.0, -1.0, 9.0]), (True, [0.0, 0.0, 0.0, 1.0])])
def test_binary_reward_ignores_env_rewards_and_penalties(chat: ChatFormat, binary: bool, rewards: list[float]) -> None:
    config = RolloutConfig(max_turns=5, window_size=None, max_prompt_tokens=900, binary_reward=binary)
    loop = AgentLoop(
        Script(chat, ["nonsense", RIGHT, RIGHT, RIGHT]), chat, LocalVectorEnv(Toll), [EpisodeRules("corridor", config)]
    )
    (episode,) = loop.collect_rollouts([Episode(10, 0, 0)], GREEDY)
    assert [turn.reward for turn in episode.turns] == rewards


def test_long_observations_and_start_prompts_are_truncated(chat: ChatFormat) -> None:
    options: tuple[dict[str, object], ...] = ({}, {"max_observation_tokens": 2}, {"max_start_tokens": 5})
    whole, cut, short = (play(chat, [RIGHT], **limits)[1].prompts[0] for limits in options)
    assert chat.decode(cut).count(" _") == chat.decode(whole).count(" _") - 1
    assert short == whole[-5:]


def test_a_prompt_has_as_many_observations_as_the_window(chat: ChatFormat) -> None:
    _, engine = play(chat, ["hm", RIGHT, "mm"], window_size=2)
    assert [chat.decode(prompt).count(" P") for prompt in engine.prompts] == [1, 2, 2, 2, 2]
