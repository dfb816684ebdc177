"""If these fail, a failing episode affects others, is not counted, or all episodes wait for the slowest env."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quintet.config.native.envs import CustomEnvConfig, EnvProcessesConfig, FrozenLakeConfig
from quintet.config.native.rollout import RolloutConfig
from quintet.envs.factory import build_vector_env
from quintet.envs.mixed_env import build_run_envs
from quintet.envs.vector_env import LocalVectorEnv
from quintet.errors import MachineError
from quintet.policies.model_loading import load_model, load_tokenizer
from quintet.records import Failure, FinishReason, Generation, Observation, Outcome, Request, Step, Trajectory
from quintet.rollout.agent_loop import AgentLoop
from quintet.rollout.chat.chat_format import ChatFormat
from quintet.rollout.episode import Episode
from quintet.rollout.episode_limits import EpisodeLimits, EpisodeRules, build_episode_rules
from quintet.rollout.sampling_params import SamplingParams
from quintet.seeds import derive_seed
from quintet.tracking.metrics import describe
from quintet.tracking.summaries import summarize_episodes, summarize_validation

GREEDY = SamplingParams(0.0, 0, 1.0, 0)
SAMPLED = SamplingParams(1.0, 0, 1.0, 5)
CAUSE = Failure("engine", "OutOfMemoryError", "no room")

Reply = Callable[[Request, int], Generation]
"""Response of an engine to a request in its n-th step."""


class Walk:
    """Three steps win; each observation is the number of steps."""

    actions = ("Go", "Stay", "Raise")

    def instruction(self) -> str:
        return "Walk."

    def reset(self, seed: int) -> Observation:
        if seed == 13:
            raise OSError("no map")
        self.seed, self.place = seed, 0
        return Observation(f" at 0 of {seed}")

    def step(self, action: str) -> Step:
        if action == "Raise":
            raise RuntimeError("the floor gave way")
        self.place += action == "Go"
        won = self.place == 3
        return Step(Observation(f" at {self.place} of {self.seed}"), float(won), won, False, {"success": won})

    def render(self) -> np.ndarray:
        return np.zeros((1, 1, 3), np.uint8)

    def close(self) -> None: ...


class Desk:
    """An engine that finishes all requests at each step, with scripted responses."""

    weight_version, max_model_len = 3, 900

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.waiting: list[Request] = []
        self.seen: list[Request] = []
        self.aborted: list[int] = []
        self.steps = self.forgotten = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting)

    def add_request(self, request: Request) -> None:
        if len(request.prompt) >= self.max_model_len:
            raise ValueError("the prompt leaves no room")
        self.waiting.append(request)
        self.seen.append(request)

    def step(self) -> list[Generation]:
        self.steps += 1
        requests, self.waiting = self.waiting, []
        return [self.reply(request, self.steps) for request in requests]

    def abort(self, ids: Sequence[int]) -> list[Generation]:
        self.aborted += ids
        gone = [request for request in self.waiting if request.id in ids]
        self.waiting = [request for request in self.waiting if request.id not in ids]
        return [Generation(request.id, (5, 6), (-1.0, -1.0), FinishReason.ABORT, 3) for request in gone]

    def load_weights(self, version: int, weights: object) -> None: ...
    def reset_prefix_cache(self) -> None:
        self.forgotten += 1

    def sleep(self) -> None: ...
    def wake_up(self) -> None: ...
    def close(self) -> None: ...


@pytest.fixture(scope="module")
def chat(policy_directory: Path) -> ChatFormat:
    return ChatFormat(load_tokenizer(policy_directory))


def scripted_reply(chat: ChatFormat, *texts: str) -> Reply:
    """Always the same response; with several, the request's seed selects one."""
    replies = [(*chat.encode(f"<think> go </think><answer> {word} </answer>"), chat.end_token_id) for word in texts]

    def reply(request: Request, _: int) -> Generation:
        tokens = replies[request.seed % len(replies)]
        return Generation(request.id, tokens, (-0.5,) * len(tokens), FinishReason.STOP, 3)

    return reply


def build_loop(
    chat: ChatFormat, reply: Reply, limits: EpisodeLimits | None = None, **options: Any
) -> tuple[AgentLoop, Desk]:
    config = RolloutConfig.model_validate({"max_turns": 5, "window_size": None, "max_prompt_tokens": 900, **options})
    engine = Desk(reply)
    return AgentLoop(
        engine, chat, LocalVectorEnv(Walk), [EpisodeRules("walk", config, limits or EpisodeLimits())]
    ), engine


def episodes(count: int, first: int = 100) -> list[Episode]:
    return [Episode(first + i // 2, i // 2, i % 2) for i in range(count)]


def by_place(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    return sorted(trajectories, key=lambda t: (t.group, t.sample))


def test_a_failed_request_fails_only_its_own_episode(chat: ChatFormat) -> None:
    good = scripted_reply(chat, "Go")

    def reply(request: Request, step: int) -> Generation:
        if request.id == 1 and step == 2:
            return Generation(1, (7,), (-0.1,), FinishReason.FAILED, 3, failure=CAUSE)
        if request.id == 2:
            return Generation(2, (), (), FinishReason.FAILED, 3)
        return good(request, step)

    loop, _ = build_loop(chat, reply)
    played = by_place(list(loop.collect_rollouts(episodes(4), GREEDY)))
    assert [episode.outcome for episode in played] == [Outcome.SUCCESS, Outcome.FAILED, Outcome.FAILED, Outcome.SUCCESS]
    assert played[1].failure == CAUSE
    assert [turn.finish_reason for turn in played[1].turns] == [FinishReason.STOP, FinishReason.FAILED]
    assert played[2].failure is not None
    assert played[2].failure.error_type == "Unexplained"
    metrics = summarize_episodes(played)
    assert metrics["trajectory/failures/engine/OutOfMemoryError"] == 1
    assert metrics["trajectory/failures/engine/Unexplained"] == 1
    assert metrics["trajectory/failed"] == 2
    assert metrics["response/stop_reason/failed"] == pytest.approx(2 / 9)
    assert summarize_validation("walk", played)["val/walk/failed"] == 2
    for name in metrics:
        describe(name)


def test_failure_metrics_have_valid_names_for_any_error_class(chat: ChatFormat) -> None:
    loop, _ = build_loop(chat, scripted_reply(chat, "Go"))
    (episode,) = loop.collect_rollouts([Episode(13, 0, 0)], GREEDY)
    odd = replace(episode, failure=Failure("step", "a/b c", "?"))
    metrics = summarize_episodes([episode, odd])
    assert {name for name in metrics if "failures" in name} == {
        "trajectory/failures/reset/OSError",
        "trajectory/failures/step/a_b_c",
    }
    assert all(describe(name) for name in metrics)


def test_an_empty_response_is_a_failure_but_an_end_token_is_not(chat: ChatFormat) -> None:
    def reply(request: Request, _: int) -> Generation:
        tokens = () if request.id == 0 else (chat.end_token_id,)
        return Generation(request.id, tokens, (-0.5,) * len(tokens), FinishReason.STOP, 3)

    loop, _ = build_loop(chat, reply, max_turns=2)
    nothing, word = by_place(list(loop.collect_rollouts(episodes(2), GREEDY)))
    assert nothing.failure is not None
    assert nothing.failure.error_type == "EmptyResponse"
    assert (word.outcome, [turn.reward for turn in word.turns]) == (Outcome.MAX_TURNS, [-0.1, -0.1])
    assert summarize_episodes([word])["response/empty"] == 1.0


def test_a_prompt_beyond_the_engines_context_ends_its_episode(chat: ChatFormat) -> None:
    loop, engine = build_loop(chat, scripted_reply(chat, "Stay"))
    engine.max_model_len = 70
    (episode,) = loop.collect_rollouts([Episode(100, 0, 0)], GREEDY)
    assert episode.outcome is Outcome.CONTEXT
    assert episode.turns
    assert max(len(request.prompt) for request in engine.seen) < 70

    def full(request: Request, _: int) -> Generation:
        return Generation(request.id, (), (), FinishReason.CONTEXT, 3)

    loop, _ = build_loop(chat, full)
    (episode,) = loop.collect_rollouts([Episode(100, 0, 0)], GREEDY)
    assert (episode.outcome, episode.failure, episode.turns) == (Outcome.CONTEXT, None, ())


def test_requests_that_the_engine_loses_fail(chat: ChatFormat) -> None:
    loop, engine = build_loop(chat, scripted_reply(chat, "Go"))
    answer = engine.step
    engine.step = lambda: [one for one in answer() if one.id != 1]  # type: ignore[method-assign]
    played = by_place(list(loop.collect_rollouts(episodes(2), GREEDY)))
    assert [episode.success for episode in played] == [True, False]
    assert played[1].failure is not None
    assert played[1].failure.error_type == "Lost"


def test_a_response_ended_by_a_stop_string_is_parsed_and_closed(chat: ChatFormat) -> None:
    text = "<think> go </think><answer> Go </answer>"

    def reply(request: Request, _: int) -> Generation:
        tokens = chat.encode(text)
        return Generation(request.id, tokens, (-0.5,) * len(tokens), FinishReason.STOP, 3)

    loop, engine = build_loop(chat, reply)
    (episode,) = loop.collect_rollouts([Episode(100, 0, 0)], replace(GREEDY, stop_strings=("</answer>",)))
    assert episode.success
    assert all(turn.valid_format for turn in episode.turns)
    assert engine.seen[0].stop_strings == ("</answer>",)
    seen = engine.seen[1].prompt
    before = (*engine.seen[0].prompt, *chat.encode(text))
    assert seen[: len(before)] == before
    assert seen[len(before)] == chat.end_token_id
    assert loop.pop_metrics()["prompt/reply_closed"] == 2


def test_weight_versions_of_tokens_are_recorded(chat: ChatFormat) -> None:
    good = scripted_reply(chat, "Go")
    loop, _ = build_loop(chat, lambda request, step: replace(good(request, step), version_changes=((2, 4),)))
    (episode,) = loop.collect_rollouts([Episode(100, 0, 0)], GREEDY)
    assert {turn.version_changes for turn in episode.turns} == {((2, 4),)}


@pytest.mark.parametrize(
    ("window", "kept"), [(None, [True] * 4 + [False]), (1, [False] * 5), (3, [True, True, False, False, False])]
)
def test_requests_say_whether_their_dialogue_continues(chat: ChatFormat, window: int | None, kept: list[bool]) -> None:
    loop, engine = build_loop(chat, scripted_reply(chat, "Stay"), window_size=window)
    list(loop.collect_rollouts([Episode(100, 0, 0)], GREEDY))
    assert [request.keep_kv_cache for request in engine.seen] == kept


def test_max_actions_ends_an_episode(chat: ChatFormat) -> None:
    text = "Stay || Go || Stay"
    loop, _ = build_loop(chat, scripted_reply(chat, text), EpisodeLimits(max_actions=4), max_actions_per_turn=3)
    (episode,) = loop.collect_rollouts([Episode(100, 0, 0)], GREEDY)
    assert [turn.actions for turn in episode.turns] == [("Stay", "Go", "Stay"), ("Stay",)]
    assert (episode.outcome, episode.turns[1].valid_format) == (Outcome.MAX_ACTIONS, True)


def test_max_tokens_ends_an_episode(chat: ChatFormat) -> None:
    """The last response is limited to the remaining tokens."""
    loop, engine = build_loop(chat, scripted_reply(chat, "Stay"))
    (whole,) = loop.collect_rollouts([Episode(100, 0, 0)], GREEDY)
    sizes = [len(turn.prompt) + len(turn.tokens) for turn in whole.turns]
    limit = sum(sizes[:3]) + len(whole.turns[3].prompt) + 4
    loop, engine = build_loop(chat, scripted_reply(chat, "Stay"), EpisodeLimits(max_tokens=limit))
    (episode,) = loop.collect_rollouts([Episode(100, 0, 0)], GREEDY)
    assert [request.max_tokens for request in engine.seen] == [24, 24, 24, 4]
    assert episode.outcome is Outcome.MAX_TOKENS
    loop, _ = build_loop(chat, scripted_reply(chat, "Stay"), EpisodeLimits(max_tokens=len(whole.turns[0].prompt)))
    (episode,) = loop.collect_rollouts([Episode(100, 0, 0)], GREEDY)
    assert (episode.outcome, episode.turns) == (Outcome.MAX_TOKENS, ())


def test_too_many_failures_end_the_run_and_name_the_first(chat: ChatFormat) -> None:
    loop, engine = build_loop(chat, scripted_reply(chat, "Go"), EpisodeLimits(max_failed_share=0.25))
    unlucky = [Episode(13 if i in (2, 5) else 100, i, 0) for i in range(8)]
    assert sum(episode.failure is not None for episode in loop.collect_rollouts(unlucky, GREEDY)) == 2
    with pytest.raises(MachineError, match=r"3 of 8 episodes failed \(first, in reset: OSError: no map"):
        list(loop.collect_rollouts([*unlucky[:7], Episode(13, 9, 0)], GREEDY))
    assert not loop.busy
    assert not engine.busy
    assert all(episode.success for episode in loop.collect_rollouts(episodes(4), GREEDY))


def test_failures_are_counted_over_incremental_episodes(chat: ChatFormat) -> None:
    """A single failing episode is compared with the number of concurrent episodes."""
    loop, _ = build_loop(chat, scripted_reply(chat, "Stay"), EpisodeLimits(max_failed_share=0.5))
    loop.start(episodes(4), GREEDY)
    loop.start([Episode(13, 9, 0)], GREEDY)
    actual = loop.step()
    assert [episode.failure is not None for episode in actual] == [True]


def test_incremental_episodes_equal_collected_ones(chat: ChatFormat) -> None:
    text = scripted_reply(chat, "Go", "Stay", "Raise", "nonsense")
    loop, engine = build_loop(chat, text)
    at_once = by_place(list(loop.collect_rollouts(episodes(24), SAMPLED)))
    assert {Outcome.SUCCESS, Outcome.FAILED} < {episode.outcome for episode in at_once} | {Outcome.MAX_TURNS}
    loop, engine = build_loop(chat, text)
    pieces: list[Trajectory] = []
    for first in range(0, 24, 8):
        loop.start(episodes(24)[first : first + 8], SAMPLED)
        pieces += loop.step()
    assert engine.forgotten == 1
    while loop.busy:
        pieces += loop.step()
    assert by_place(pieces) == at_once


def test_collecting_rollouts_beside_running_episodes(chat: ChatFormat) -> None:
    loop, engine = build_loop(chat, scripted_reply(chat, "Go"))
    loop.start(episodes(2), GREEDY)
    loop.step()
    round_ = list(loop.collect_rollouts(episodes(3, first=500), GREEDY))
    assert [episode.seed for episode in by_place(round_)] == [500, 500, 501]
    assert engine.forgotten == 1
    assert loop.busy
    assert [episode.seed for episode in loop.step()] == [100, 100]
    assert not loop.busy


def test_abort_returns_unfinished_episodes(chat: ChatFormat) -> None:
    loop, engine = build_loop(chat, scripted_reply(chat, "Go"))
    loop.start(episodes(6), GREEDY)
    loop.step()
    loop.step()
    gone = loop.abort({0, 2})
    assert sorted((episode.group, episode.sample) for episode in gone) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert {episode.outcome for episode in gone} == {Outcome.ABORTED}
    assert [turn.finish_reason for turn in gone[0].turns] == [FinishReason.STOP, FinishReason.ABORT]
    assert sorted(engine.aborted) == [0, 1, 4, 5]
    rest: list[Trajectory] = []
    while loop.busy:
        rest += loop.step()
    assert [(episode.group, episode.outcome) for episode in rest] == [(1, Outcome.SUCCESS)] * 2
    assert loop.abort({0, 1, 2}) == []


def test_stopping_the_iteration_aborts_its_episodes(chat: ChatFormat) -> None:
    loop, engine = build_loop(chat, scripted_reply(chat, "Go", "Stay"))
    playing: Iterator[Trajectory] = loop.collect_rollouts(episodes(8), SAMPLED)
    next(playing)
    playing.close()  # type: ignore[attr-defined]
    assert not loop.busy
    assert not engine.busy


def test_metrics_are_reset_when_read(chat: ChatFormat) -> None:
    loop, _ = build_loop(chat, scripted_reply(chat, "Stay"), window_size=1)
    list(loop.collect_rollouts(episodes(2), GREEDY))
    first, second = loop.pop_metrics(), loop.pop_metrics()
    assert first["prompt/window"] == 8
    assert min(first[f"timing_s/{part}"] for part in ("engine", "env", "loop")) > 0
    assert set(second.values()) == {0.0}
    for name in first:
        describe(name)


SLOW = '''
import time
from pathlib import Path
from quintet.envs.frozenlake import FrozenLake
from quintet.config.native.envs import FrozenLakeConfig
from quintet.records import Observation, Step


class Slow:
    """Episodes take as long as their seeds say, until a file is written."""

    actions = ("Go",)

    def __init__(self, note):
        self.note = Path(note)

    def instruction(self):
        return "Walk."

    def reset(self, seed):
        self.seed, self.place = seed, 0
        return Observation(" at 0")

    def step(self, action):
        while self.seed == 7 and not self.note.exists():
            time.sleep(0.01)
        self.place += 1
        return Step(Observation(f" at {self.place}"), 0.0, self.place == 3, False)

    def close(self):
        pass


class Flaky(FrozenLake):
    """Raises in some episodes."""

    def __init__(self, size):
        super().__init__(FrozenLakeConfig(size=size))

    def reset(self, seed):
        if seed % 4 == 0:
            raise RuntimeError("this map is torn")
        return super().reset(seed)
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("envs") / "slow.py"
    path.write_text(SLOW)
    return path


def test_a_slow_env_does_not_delay_other_episodes(chat: ChatFormat, file: Path, tmp_path: Path) -> None:
    """The slow episode's first step ends only after the other episodes."""
    note = tmp_path / "note"
    config = CustomEnvConfig(name="custom", path=f"{file}:Slow", arguments={"note": str(note)})
    envs = build_vector_env(config)
    rollout = RolloutConfig(max_turns=5, window_size=None, max_prompt_tokens=900)
    engine = Desk(scripted_reply(chat, "Go"))
    loop = AgentLoop(engine, chat, envs, [EpisodeRules("slow", rollout)])
    seeds: list[int] = []
    for episode in loop.collect_rollouts([Episode(7, 0, 0), Episode(8, 1, 0), Episode(9, 2, 0)], GREEDY):
        seeds.append(episode.seed)
        if len(seeds) == 2:
            note.touch()
    loop.close()
    assert seeds[-1] == 7
    assert engine.steps > 3


def test_episodes_are_equal_with_envs_in_subprocesses(chat: ChatFormat) -> None:
    """Responses depend on the prompt and the seed, not on the order of requests."""
    replies = [scripted_reply(chat, word) for word in ("Left", "Down", "Right", "Up", "Right || Down", "well")]

    def reply(request: Request, step: int) -> Generation:
        return replies[derive_seed(*request.prompt, request.seed) % len(replies)](request, step)

    played = []
    for processes in (None, EnvProcessesConfig(max_processes=5)):
        env = FrozenLakeConfig(slippery=True, processes=processes)
        rollout = RolloutConfig(max_turns=6, max_actions_per_turn=2, max_prompt_tokens=900)
        loop = AgentLoop(Desk(reply), chat, build_vector_env(env), [EpisodeRules(env.name, rollout)])
        played.append(by_place(list(loop.collect_rollouts(episodes(12), SAMPLED))))
        loop.close()
    assert played[0] == played[1]
    assert len({episode.outcome for episode in played[0]}) > 1


def test_rollouts_continue_while_a_user_defined_env_fails(policy_directory: Path, file: Path) -> None:
    from quintet.config.native.experiment import Experiment
    from quintet.rollout.engines.engine import ENGINES, EngineSetup

    env = CustomEnvConfig(name="custom", path=f"{file}:Flaky", arguments={"size": 3})
    config = Experiment(env=env, rollout=RolloutConfig(max_turns=2, max_response_tokens=6, max_prompt_tokens=400))
    tokenizer, model = load_tokenizer(policy_directory), load_model(policy_directory)
    setup = EngineSetup(
        directory=policy_directory,
        model=model,
        dtype=model.dtype,
        max_num_seqs=8,
        max_model_len=406,
        detokenize=lambda tokens: str(tokenizer.decode(list(tokens))),
        options=config.rollout.engine_options,
    )
    loop = AgentLoop(
        ENGINES.get("hf").load()(setup), ChatFormat(tokenizer), build_run_envs(config), build_episode_rules(config)
    )
    played = list(loop.collect_rollouts([Episode(seed, seed, 0) for seed in range(1, 13)], SAMPLED))
    loop.close()
    metrics = summarize_episodes(played)
    assert metrics["trajectory/failures/reset/RuntimeError"] == metrics["trajectory/failed"] == 3
    assert {episode.seed for episode in played if episode.failure} == {4, 8, 12}
    assert all(episode.turns for episode in played if not episode.failure)
    with pytest.raises(MachineError, match=r"env.max_failed_share \(now 0.5\)"):
        list(
            AgentLoop(
                loop._engine, ChatFormat(tokenizer), build_run_envs(config), build_episode_rules(config)
            ).collect_rollouts([Episode(4, 0, 0)], SAMPLED)
        )
