"""If these fail, a chat model is not told the form of the responses that its env expects, or a policy that knows it is
given other prompts than it was trained on."""

from __future__ import annotations

from typing import Any

import pytest

from quintet.config.native.rollout import RolloutConfig
from quintet.envs.vector_env import LocalVectorEnv
from quintet.policies.tiny_models import train_tokenizer
from quintet.records import FinishReason, Generation, Observation, Outcome, Request, Step, Trajectory
from quintet.rollout.agent_loop import AgentLoop
from quintet.rollout.chat.chat_format import ChatFormat
from quintet.rollout.chat.response_instruction import response_instruction
from quintet.rollout.engines.openai_endpoint import message_tokenizer
from quintet.rollout.episode import Episode
from quintet.rollout.episode_limits import EpisodeRules
from quintet.rollout.sampling_params import SamplingParams

FORM = "<think>[your thoughts]</think><answer>[one action]</answer>"


class Box:
    """An env of a user: `Take` with the right number wins. `states` is what it says of the form of responses."""

    def __init__(self, states: str = "", accepts: bool = True) -> None:
        self.actions = ("Look", "Take({number})")
        self.states, self.accepts = states, accepts

    def instruction(self) -> str:
        return f"Find the box.{self.states}"

    def reset(self, seed: int) -> Observation:
        return Observation("boxes 1 to 3")

    def step(self, action: str) -> Step:
        won = action == "Take(2)"
        return Step(Observation("no box"), float(won), won, False, {"success": won, "valid_format": self.accepts})

    def close(self) -> None: ...


class Replies:
    """An engine that gives the replies one after the other, and remembers the prompts as text."""

    weight_version = 0

    def __init__(self, chat: ChatFormat, replies: list[str], stop: FinishReason = FinishReason.STOP) -> None:
        self.chat, self.replies, self.stop = chat, replies, stop
        self.waiting: list[Request] = []
        self.prompts: list[str] = []

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def add_request(self, request: Request) -> None:
        self.waiting.append(request)
        self.prompts.append(self.chat.decode(request.prompt))

    def step(self) -> list[Generation]:
        request = self.waiting.pop()
        reply = self.replies[(len(self.prompts) - 1) % len(self.replies)]
        end = (self.chat.end_token_id,) if self.stop is FinishReason.STOP else ()
        tokens = (*self.chat.encode(reply), *end)
        return [Generation(request.id, tokens, (0.0,) * len(tokens), self.stop, 0)]

    def load_weights(self, version: int, weights: object) -> None: ...
    def reset_prefix_cache(self) -> None: ...
    def sleep(self) -> None: ...
    def wake_up(self) -> None: ...


def chat_model() -> ChatFormat:
    return ChatFormat(message_tokenizer())


def play(
    replies: list[str],
    env: Box | None = None,
    chat: ChatFormat | None = None,
    stop: FinishReason = FinishReason.STOP,
    **options: Any,
) -> tuple[Trajectory, list[str]]:
    """Return the episode and its prompts."""
    chat = chat or chat_model()
    config = RolloutConfig.model_validate({"max_turns": len(replies), "max_prompt_tokens": 4000, **options})
    engine = Replies(chat, replies, stop)
    loop = AgentLoop(engine, chat, LocalVectorEnv(lambda: env or Box()), [EpisodeRules("box", config)])
    (episode,) = loop.collect_rollouts([Episode(0, 0, 0)], SamplingParams(0.0, 0, 1.0, 0))
    return episode, engine.prompts


def test_a_chat_model_is_told_the_form_and_the_actions_with_placeholders() -> None:
    episode, (prompt,) = play(["<think>go</think><answer>Take(2)</answer>"])
    assert episode.outcome is Outcome.SUCCESS
    assert f"Find the box.\nAlways respond in this form and add nothing else: {FORM}\n" in prompt
    assert "Actions: Look, Take({number}), with a number in place of {number}" in prompt


def test_without_thoughts_the_form_has_none() -> None:
    _, (prompt,) = play(["<answer>Look</answer>"], think=False)
    assert "add nothing else: <answer>[one action]</answer>\n" in prompt
    assert "<think>" not in prompt


@pytest.mark.parametrize(
    ("options", "actions", "expected"),
    [
        ({"max_actions_per_turn": 3, "action_separator": "|"}, ("a",), "[up to 3 actions, separated by |]"),
        ({}, ("{text}",), "[your answer]"),
        ({}, ("<svg{text}</svg>",), "[<svg…</svg>]"),
        ({"response_format": "anywhere"}, ("a",), "in this form: <think>"),
        ({"response_format": "strict"}, ("a",), "and add nothing else: <think>"),
        ({"thoughts": "grounding"}, ("a",), "<think><observation> the current state, in words </observation>"),
    ],
)
def test_the_form_follows_the_configuration(options: dict[str, Any], actions: tuple[str, ...], expected: str) -> None:
    assert expected in response_instruction(RolloutConfig.model_validate(options), actions)


def test_actions_that_the_env_names_are_not_listed_again() -> None:
    assert "Actions" not in response_instruction(RolloutConfig(), ("Up", "Down"), "Answer with up or down.")
    assert "Actions" not in response_instruction(RolloutConfig(), tuple(f"move {n}" for n in range(33)))
    assert "Actions: Up, Down" in response_instruction(RolloutConfig(), ("Up", "Down"), "Answer with up.")


def test_an_env_that_states_the_form_is_left_as_it_is() -> None:
    _, (prompt,) = play(["<answer>Look</answer>"], Box(" Write <answer>your action</answer>."))
    assert "Always respond" not in prompt
    assert "Always respond" in play(["a"], Box(" Write <answer>x</answer>."), format_instruction=True)[1][0]


def test_a_preset_gets_the_prompts_that_it_was_trained_on() -> None:
    tokenizer = train_tokenizer(400, ["system\nFind the box.\nuser\nboxes 1 to 3\nassistant\n"])
    _, prompts = play(["Take it", "Take it"], chat=ChatFormat(tokenizer))
    assert all("Always" not in prompt and "invalid" not in prompt for prompt in prompts)
    assert "Always respond" in play(["Take it"], chat=ChatFormat(tokenizer), format_instruction=True)[1][0]


def test_nothing_is_told_where_the_configuration_says_so() -> None:
    _, prompts = play(["Take it", "Take it"], format_instruction=False)
    assert all("Always" not in prompt and "invalid" not in prompt for prompt in prompts)


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        ("Take the second one", "it has no <answer>…</answer>"),
        ("<think>a <answer>Look</answer></think>", "it has no <answer>…</answer>"),
        ("<answer>Take(2)</answer>", "it has no <think>…</think> before <answer>"),
        ("<think>a</think><answer>Take two</answer>", "'Take two' is none of the actions"),
        ("<think>a</think><answer></answer>", "'' is none of the actions"),
        ("So: <think>a</think><answer>Look</answer>", "it has other parts, or text around them"),
    ],
)
def test_the_observation_after_an_invalid_response_states_problem_and_form(reply: str, problem: str) -> None:
    episode, prompts = play([reply, reply, "<think>a</think><answer>Take(2)</answer>"])
    note = f"Your last response was invalid: {problem}. Always respond in this form and add nothing else: {FORM}"
    assert [note in prompt for prompt in prompts] == [False, True, True]
    assert prompts[2].count("Your last response") == 1, "the problems of earlier turns are repeated"
    assert prompts[1].endswith(prompts[2][-40:])
    assert episode.outcome is Outcome.SUCCESS
    assert episode.turns[1].observation.startswith(note), "stored episodes lack what the model saw"


def test_a_response_that_was_cut_off_is_called_so() -> None:
    _, prompts = play(["<think>abc", "b"], stop=FinishReason.LENGTH)
    assert "Your last response was invalid: it was cut off after 10 tokens. Always" in prompts[1]


def test_an_action_that_the_env_refuses_is_called_so() -> None:
    _, prompts = play(["<think>a</think><answer>Look</answer>"] * 2, Box(accepts=False))
    assert "invalid: the environment does not accept its action. Always respond" in prompts[1]
    assert prompts[1].count("no box") == 1


def test_an_observation_that_states_the_form_itself_is_left_as_it_is() -> None:
    class Strict(Box):
        def reset(self, seed: int) -> Observation:
            return Observation("Answer: <answer>…</answer>")

    _, prompts = play(["Look", "Look"], Strict())
    assert prompts[0] == prompts[1]
