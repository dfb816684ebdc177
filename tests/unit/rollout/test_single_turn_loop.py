"""If these fail, responses get the score of another prompt, or a failing scorer ends the run or goes unnoticed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quintet.config.native.data import RewardConfig
from quintet.config.native.experiment import Experiment
from quintet.config.native.rollout import RolloutConfig
from quintet.errors import MachineError
from quintet.policies.model_loading import load_tokenizer
from quintet.records import (
    Failure,
    FinishReason,
    Generation,
    ImageInput,
    Outcome,
    PromptRow,
    Request,
    Response,
    RewardResult,
)
from quintet.rollout.collate import collate
from quintet.rollout.episode import Episode
from quintet.rollout.sampling_params import SamplingParams
from quintet.rollout.single_turn_loop import SingleTurnLoop
from quintet.runtime import components

GREEDY = SamplingParams(0.0, 0, 1.0, 0)


class Book:
    """Question n asks for n."""

    def __getitem__(self, number: int) -> PromptRow:
        return PromptRow(number, "sums", ({"role": "user", "content": f"say {number}"},), ground_truth=str(number))

    def prompt(self, number: int) -> tuple[int, ...]:
        return (5, 6, number)

    def images(self, number: int) -> tuple[ImageInput, ...]:
        return ()

    def first_rows(self) -> list[PromptRow]:
        return [self[2]]


class Echo:
    """An engine that responds with the number in the prompt, last request first, as `length` if it is odd."""

    weight_version = 1

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.waiting: list[Request] = []
        self.seen: list[Request] = []
        self.forgot = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def add_request(self, request: Request) -> None:
        self.waiting.append(request)
        self.seen.append(request)

    def step(self) -> list[Generation]:
        request = self.waiting.pop()
        number = request.prompt[-1]
        text_tokens = tuple(self.tokenizer.encode(f"it is {number}", add_special_tokens=False))
        cut = number % 2 == 1
        tokens = text_tokens if cut else (*text_tokens, self.tokenizer.eos_token_id)
        stop = FinishReason.LENGTH if cut else FinishReason.STOP
        return [Generation(request.id, tokens, (-0.5,) * len(tokens), stop, 1)]

    def abort(self, ids: Collection[int]) -> list[Generation]:
        dropped = [request for request in self.waiting if request.id in ids]
        self.waiting = [request for request in self.waiting if request.id not in ids]
        return [Generation(one.id, (5, 6), (-0.5, -0.5), FinishReason.ABORT, 1) for one in dropped]

    def load_weights(self, version: int, weights: object) -> None: ...
    def reset_prefix_cache(self) -> None:
        self.forgot += 1

    def sleep(self) -> None: ...
    def wake_up(self) -> None: ...


class SlowScorer:
    """A scorer that returns nothing until it is drained; fails on given numbers."""

    def __init__(self, fails: tuple[str, ...] = ()) -> None:
        self.fails = fails
        self.answers: list[Response] = []
        self.closed = False

    def submit(self, answer: Response) -> None:
        self.answers.append(answer)

    def ready(self) -> list[RewardResult]:
        return []

    def drain(self) -> list[RewardResult]:
        answers, self.answers = self.answers, []
        return [self._verdict(answer) for answer in answers]

    def _verdict(self, answer: Response) -> RewardResult:
        truth = str(answer.prompt_row.ground_truth)
        if truth in self.fails:
            return RewardResult(answer.id, -1.0, {"acc": 0.0}, failure=Failure("reward", "Timeout", "10 s"))
        right = float(answer.text == f"it is {truth}")
        return RewardResult(answer.id, 5 * right, {"acc": right}, extracted_answer=truth)

    def close(self) -> None:
        self.closed = True


def loop(policy_directory: Path, judge: SlowScorer, limit: float = 0.5, engine: type[Echo] = Echo) -> SingleTurnLoop:
    tokenizer = load_tokenizer(policy_directory)
    ends = (tokenizer.eos_token_id,)
    return SingleTurnLoop(
        engine(tokenizer), tokenizer, Book(), judge, RolloutConfig(), stop_token_ids=ends, max_failed_share=limit
    )


class Odd(Echo):
    """Fails on 1, has no room for 3, an empty response to 5, loses 7, changes weights in the middle of 9."""

    def add_request(self, request: Request) -> None:
        if request.prompt[-1] == 3:
            raise ValueError("too long")
        super().add_request(request)

    def step(self) -> list[Generation]:
        number = self.waiting[-1].prompt[-1]
        (whole,) = super().step()
        failure = Failure("engine", "OutOfMemory", "no cache left")
        if number == 1:
            return [replace(whole, tokens=whole.tokens[:2], finish_reason=FinishReason.FAILED, failure=failure)]
        if number == 5:
            return [replace(whole, tokens=(), logprobs=())]
        if number == 9:
            return [replace(whole, version_changes=((2, 4),))]
        return [] if number == 7 else [whole]


def test_each_response_is_scored_with_its_own_question(policy_directory: Path) -> None:
    episodes = [Episode(number, group, sample) for group, number in enumerate((4, 7, 2)) for sample in range(2)]
    played = list(loop(policy_directory, SlowScorer()).collect_rollouts(episodes, GREEDY))
    assert sorted((t.seed, t.group, t.sample) for t in played) == sorted((g.seed, g.group, g.sample) for g in episodes)
    assert all(t.turns[0].text == f"it is {t.seed}" and t.reward == 5.0 for t in played)
    assert {t.seed: t.outcome for t in played} == dict.fromkeys((4, 7, 2), Outcome.SUCCESS)
    assert {t.seed: t.turns[0].valid_format for t in played} == {4: True, 7: False, 2: True}
    batch = collate(sorted(played, key=lambda t: (t.group, t.sample)))
    assert batch.rewards[batch.turn_end].tolist() == [5.0] * 6
    assert batch.reward_components is not None
    assert batch.reward_components["acc"].tolist() == [1.0] * 6


@pytest.mark.parametrize(
    ("end", "prefix"),
    [
        ("<think>\n", "<think>\n"),
        ("<think>", "<think>"),
        ("<think>\n\n</think>\n\n", ""),
        ("assistant\n", ""),
        ("write <think> first", ""),
    ],
)
def test_the_scorer_knows_the_thought_that_the_prompt_has_opened(policy_directory: Path, end: str, prefix: str) -> None:
    scorer = SlowScorer()
    asking = loop(policy_directory, scorer)
    prompt = (*asking._tokenizer.encode(end, add_special_tokens=False),)
    asking._prompts.prompt = lambda number: (-7, *prompt)  # an image is a negative number
    submitted: list[Response] = []
    scorer.submit = submitted.append
    asking.start([Episode(2, 0, 0)], GREEDY)
    asking._engine.step = lambda: [Generation(0, prompt[:1], (-0.5,), FinishReason.LENGTH, 1)]
    asking._step()
    assert [response.response_prefix for response in submitted] == [prefix]


def test_samples_of_a_prompt_have_different_seeds(policy_directory: Path) -> None:
    asking = loop(policy_directory, SlowScorer())
    list(asking.collect_rollouts([Episode(4, 0, 0), Episode(4, 0, 1), Episode(6, 1, 0)], GREEDY))
    assert len({request.seed for request in asking._engine.seen}) == 3


def test_a_scoring_failure_affects_only_its_own_response(policy_directory: Path) -> None:
    episodes = [Episode(number, number, 0) for number in (2, 4, 6)]
    played = {t.seed: t for t in loop(policy_directory, SlowScorer(("4",))).collect_rollouts(episodes, GREEDY)}
    assert played[4].reward == -1.0
    assert played[4].failure == Failure("reward", "Timeout", "10 s")
    assert not played[4].success
    assert played[2].success


@pytest.mark.parametrize("share", [0.7, 0.6])
def test_the_configuration_says_how_many_scores_may_fail(
    policy_directory: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr(components, "build_reward_scorer", lambda *_: SlowScorer(("4", "6")))
    tokenizer = load_tokenizer(policy_directory)
    config = Experiment(reward=RewardConfig(function_arguments={}, max_failed_share=share))
    model = SimpleNamespace(generation_config=None)
    learners = SimpleNamespace(load_reward_model=None, actor=SimpleNamespace(model=model))
    controller = SimpleNamespace(start_judge_servers=None)
    asking = components._single_turn_loop(
        config, Echo(tokenizer), tokenizer, learners, Book(), policy_directory, controller
    )
    played = asking.collect_rollouts([Episode(number, number, 0) for number in (2, 4, 6)], GREEDY)
    if share > 2 / 3:
        assert sum(t.reward for t in played) == 5.0 - 1.0 - 1.0
    else:
        with pytest.raises(MachineError, match="2 of 3 responses could not be scored"):
            list(played)


def test_too_many_scoring_failures_end_the_run(policy_directory: Path) -> None:
    episodes = [Episode(number, number, 0) for number in (2, 4, 6)]
    with pytest.raises(MachineError, match=r"2 of 3 responses could not be scored \(first: Timeout: 10 s\)"):
        list(loop(policy_directory, SlowScorer(("4", "6"))).collect_rollouts(episodes, GREEDY))


def test_engine_failures_affect_only_their_own_responses(policy_directory: Path) -> None:
    episodes = [Episode(number, number, 0) for number in (1, 2, 3, 5, 7, 9)]
    played = {t.seed: t for t in loop(policy_directory, SlowScorer(), 0.9, Odd).collect_rollouts(episodes, GREEDY)}
    assert len(played) == len(episodes)
    assert {number: t.outcome for number, t in played.items()} == {
        1: Outcome.FAILED,
        2: Outcome.SUCCESS,
        3: Outcome.CONTEXT,
        5: Outcome.FAILED,
        7: Outcome.FAILED,
        9: Outcome.SUCCESS,
    }
    kinds = {number: t.failure.error_type for number, t in played.items() if t.failure}
    assert kinds == {1: "OutOfMemory", 5: "EmptyResponse", 7: "Lost"}
    assert [len(played[number].turns) for number in (1, 3, 5, 7)] == [1, 0, 0, 0]
    assert played[1].reward == 0.0
    assert played[9].turns[0].version_changes == ((2, 4),)


def test_too_many_engine_failures_end_the_run(policy_directory: Path) -> None:
    asking = loop(policy_directory, SlowScorer(), 0.5, Odd)
    with pytest.raises(MachineError, match=r"responses could not be generated \(first: OutOfMemory: no cache left\)"):
        list(asking.collect_rollouts([Episode(1, number, 0) for number in range(4)], GREEDY))
    assert not asking.busy


def test_concurrent_rollouts_equal_separate_ones(policy_directory: Path) -> None:
    """Episodes start while others run; their samples do not depend on when they start."""
    first, second = [Episode(2, 0, 0), Episode(4, 1, 0)], [Episode(6, 2, 0), Episode(8, 3, 0)]
    asking = loop(policy_directory, SlowScorer())
    asking.start(first, GREEDY)
    assert asking.busy
    ended = asking.step()
    asking.start(second, GREEDY)
    while asking.busy:
        ended += asking.step()
    alone = list(loop(policy_directory, SlowScorer()).collect_rollouts([*first, *second], GREEDY))
    assert sorted(ended, key=lambda t: t.group) == sorted(alone, key=lambda t: t.group)
    assert asking._engine.forgot == 1, "nothing is forgotten while episodes run"


def test_collecting_rollouts_returns_only_its_own_episodes(policy_directory: Path) -> None:
    asking = loop(policy_directory, SlowScorer())
    asking.start([Episode(2, 0, 0)], GREEDY)
    assert [t.seed for t in asking.collect_rollouts([Episode(4, 1, 0)], GREEDY)] == [4]
    left = []
    while asking.busy:
        left += asking.step()
    assert [t.seed for t in left] == [2]


def test_abort_returns_partial_groups(policy_directory: Path) -> None:
    judge = SlowScorer()
    asking = loop(policy_directory, judge)
    asking.start([Episode(2, 0, 0), Episode(4, 1, 0), Episode(6, 2, 0)], GREEDY)
    asking.step()
    assert [answer.prompt_row.id for answer in judge.answers] == [6]
    gone = {t.seed: t for t in asking.abort([1, 2])}
    assert {t.outcome for t in gone.values()} == {Outcome.ABORTED}
    assert gone[4].turns[0].tokens == (5, 6)
    assert gone[6].turns[0].text == "it is 6", "written already, and not judged"
    assert {t.reward for t in gone.values()} == {0.0}
    left = []
    while asking.busy:
        left += asking.step()
    assert [t.seed for t in left] == [2], "a verdict on a question that was given up is passed over"
    assert asking.abort([0]) == []


def test_a_configured_end_token_ends_a_response(policy_directory: Path) -> None:
    asking = loop(policy_directory, SlowScorer())
    own = replace(GREEDY, stop_token_ids=(9,), stop_strings=("!",), min_tokens=2)
    (played,) = asking.collect_rollouts([Episode(2, 0, 0)], own)
    (request,) = asking._engine.seen
    assert (request.stop_token_ids, request.stop_strings, request.min_tokens) == ((9,), ("!",), 2)
    assert played.turns[0].text != "it is 2", "the tokenizer's end token is a word like any other then"
