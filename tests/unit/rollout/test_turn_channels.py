"""If these fail, a full queue between engines and environments holds nothing back, or a rollout waits for itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import yaml

from quintet.cli.configuration import inspect_config
from quintet.config.native.experiment import Experiment
from quintet.config.native.rollout import RolloutConfig
from quintet.envs.vector_env import EnvEvent, LocalVectorEnv
from quintet.policies.model_loading import load_tokenizer
from quintet.records import FinishReason, Generation, Observation, Outcome, Request, Step, Trajectory
from quintet.rollout.agent_loop import AgentLoop
from quintet.rollout.channel import Channel
from quintet.rollout.chat.chat_format import ChatFormat
from quintet.rollout.episode import Episode
from quintet.rollout.episode_limits import EpisodeRules
from quintet.rollout.sampling_params import SamplingParams
from quintet.rollout.turn_channels import ActionQueue, with_turn_channels
from quintet.seeds import derive_seed

SAMPLING = SamplingParams(0.0, 0, 1.0, 0)
ROLLOUT = RolloutConfig(max_turns=5, window_size=None, max_prompt_tokens=900)
WORDS = ("Right", "Left", "Right || Right", "Up", "hm")
"""The last one is no action."""


class Walk:
    """Three steps to the right win; the start of some fails."""

    actions = ("Left", "Up", "Right")

    def instruction(self) -> str:
        return "Walk right."

    def reset(self, seed: int) -> Observation:
        if seed % 11 == 5:
            raise OSError("no map")
        self.place = 0
        return Observation("P")

    def step(self, action: str) -> Step:
        self.place += action == "Right"
        return Step(Observation("_" * self.place + "P"), 0.0, self.place == 3, False, {"success": self.place == 3})

    def close(self) -> None: ...


class SlotEngine:
    """Decodes up to `slots` requests at the same time; prompt and seed decide on response and number of steps."""

    weight_version = 1

    def __init__(self, chat: ChatFormat, slots: int, max_steps: int = 4) -> None:
        self.chat, self.slots, self.max_steps = chat, slots, max_steps
        self.waiting: deque[Request] = deque()
        self.running: dict[int, tuple[Request, int]] = {}
        self.most_waiting = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def add_request(self, request: Request) -> None:
        self.waiting.append(request)
        self.most_waiting = max(self.most_waiting, len(self.waiting) + len(self.running) - self.slots)

    def step(self) -> list[Generation]:
        while self.waiting and len(self.running) < self.slots:
            request = self.waiting.popleft()
            self.running[request.id] = (request, 1 + request.seed % self.max_steps)
        self.running = {number: (request, steps - 1) for number, (request, steps) in self.running.items()}
        done = [request for request, steps in self.running.values() if steps == 0]
        for request in done:
            del self.running[request.id]
        return [self.respond(request) for request in done]

    def respond(self, request: Request) -> Generation:
        word = WORDS[derive_seed(*request.prompt, request.seed) % len(WORDS)]
        text = word if word == "hm" else f"<think> go </think><answer> {word} </answer>"
        tokens = (*self.chat.encode(text), self.chat.end_token_id)
        return Generation(request.id, tokens, (-0.5,) * len(tokens), FinishReason.STOP, 1)

    def abort(self, ids: Collection[int]) -> list[Generation]:
        self.waiting = deque(request for request in self.waiting if request.id not in ids)
        self.running = {number: entry for number, entry in self.running.items() if number not in ids}
        return []

    def reset_prefix_cache(self) -> None: ...


class SlowEnvs(LocalVectorEnv):
    """Envs in other processes: a request completes after some polls."""

    def __init__(self) -> None:
        super().__init__(Walk)
        self.requests: list[tuple[int, int, Callable[[], None]]] = []

    def start(self, episode: int, seed: int) -> None:
        self.requests.append((1 + seed % 3, episode, lambda: super(SlowEnvs, self).start(episode, seed)))

    def step(self, episode: int, actions: Any) -> None:
        self.requests.append((1 + episode % 4, episode, lambda: super(SlowEnvs, self).step(episode, actions)))

    def drop(self, episode: int) -> None:
        self.requests = [request for request in self.requests if request[1] != episode]
        super().drop(episode)

    def poll(self, *, wait: bool = False, seconds: float | None = None) -> list[EnvEvent]:
        while True:
            self.requests = [(polls - 1, *rest) for polls, *rest in self.requests]  # type: ignore[misc]
            done = [request for request in self.requests if request[0] == 0]
            self.requests = [request for request in self.requests if request[0] > 0]
            for _, _, complete in done:
                complete()
            events = super().poll()
            if events or not wait or not self.requests:
                return events

    @property
    def pending(self) -> bool:
        return bool(self.requests) or super().pending


@pytest.fixture
def chat(policy_directory: Path) -> ChatFormat:
    return ChatFormat(load_tokenizer(policy_directory))


@pytest.fixture
def fullest(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The largest number of items that each channel has had."""
    lengths: dict[str, int] = {}
    put = Channel.put_nowait

    def recorded(channel: Channel[Any], item: Any) -> None:
        put(channel, item)
        lengths[channel.name] = max(lengths.get(channel.name, 0), len(channel))

    monkeypatch.setattr(Channel, "put_nowait", recorded)
    return lengths


def experiment(observations: int, actions: int, slots: int) -> Experiment:
    placement = {"envs": {"channel": {"size": observations}}, "rollout": {"action_channel": {"size": actions}}}
    return Experiment.model_validate({"placement": placement, "rollout": {"max_concurrent": slots}})


def build(config: Experiment, engine: SlotEngine, envs: LocalVectorEnv) -> AgentLoop:
    behind = with_turn_channels(config, engine, envs)
    return AgentLoop(behind[0], engine.chat, behind[1], [EpisodeRules("walk", ROLLOUT)])


def play(loop: AgentLoop, count: int = 24) -> list[Trajectory]:
    episodes = [Episode(seed, seed // 2, seed % 2) for seed in range(count)]
    return sorted(loop.collect_rollouts(episodes, SAMPLING), key=lambda episode: episode.seed)


@pytest.mark.parametrize("envs", [SlowEnvs, lambda: LocalVectorEnv(Walk)], ids=["in processes", "in process"])
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("actions", [0, 1, 3])
@pytest.mark.parametrize("observations", [0, 1, 3])
def test_no_queue_exceeds_its_size_and_all_episodes_end_as_without_limits(
    chat: ChatFormat,
    fullest: dict[str, int],
    envs: Callable[[], LocalVectorEnv],
    slots: int,
    actions: int,
    observations: int,
) -> None:
    engine = SlotEngine(chat, slots)
    played = play(build(experiment(observations, actions, slots), engine, envs()))
    assert played == play(AgentLoop(SlotEngine(chat, 8), chat, LocalVectorEnv(Walk), [EpisodeRules("walk", ROLLOUT)]))
    assert {Outcome.FAILED, Outcome.SUCCESS, Outcome.MAX_TURNS} == {episode.outcome for episode in played}
    assert 0 < fullest.get("envs/observations", 1) <= (observations or 24)
    assert 0 < fullest.get("rollout/actions", 1) <= (actions or 24)
    if observations:
        # observations wait in the channel, not in the engine, except where both queues are full
        assert engine.most_waiting <= (slots if actions else 0)
        assert fullest["envs/observations"] == observations


def test_no_environment_starts_while_the_queue_of_observations_is_full(chat: ChatFormat) -> None:
    engine, envs = SlotEngine(chat, slots=2, max_steps=1), LocalVectorEnv(Walk)
    loop = build(experiment(3, 0, 2), engine, envs)
    engine.step = list  # type: ignore[method-assign]  # it computes for long
    loop.start([Episode(seed, seed, 0) for seed in range(24) if seed % 11 != 5], SAMPLING)
    for _ in range(20):
        assert loop.step() == []
    assert len(envs._envs) == 5
    metrics = loop.pop_metrics()
    assert metrics["channel/envs/observations/items"] == 3
    assert metrics["channel/envs/observations/put_seconds"] > 0
    loop.close()


def test_the_engines_are_not_stepped_while_the_queue_of_actions_is_full(chat: ChatFormat) -> None:
    engine, envs = SlotEngine(chat, slots=8, max_steps=1), SlowEnvs()
    engine.respond = lambda request: _moving(chat, request)  # type: ignore[method-assign]
    loop = build(experiment(1, 2, 8), engine, envs)
    loop.start([Episode(seed, seed, 0) for seed in range(12, 16)], SAMPLING)
    steps: list[int] = []
    step = engine.step
    behind = loop._envs
    assert isinstance(behind, ActionQueue)
    engine.step = lambda: [steps.append(len(behind._channel)), step()][1]  # type: ignore[method-assign,func-returns-value]
    ended: list[Trajectory] = []
    while len(ended) < 4:
        ended += loop.step()
    assert max(steps) < 2
    assert {episode.outcome for episode in ended} == {Outcome.SUCCESS}


def test_no_more_responses_are_taken_than_the_queue_of_actions_has_room_for(chat: ChatFormat) -> None:
    queue, _ = with_turn_channels(experiment(4, 2, 8), SlotEngine(chat, 8, max_steps=1), SlowEnvs())
    for number in range(4):
        queue.add_request(Request(number, (1, 2), 8, seed=number))
    assert [len(queue.step()), len(queue.step())] == [2, 2]


def _moving(chat: ChatFormat, request: Request) -> Generation:
    tokens = (*chat.encode("<think> go </think><answer> Right </answer>"), chat.end_token_id)
    return Generation(request.id, tokens, (-0.5,) * len(tokens), FinishReason.STOP, 1)


def test_aborted_episodes_leave_no_observation_or_action(chat: ChatFormat) -> None:
    loop = build(experiment(2, 2, 2), SlotEngine(chat, 2), SlowEnvs())
    for count in range(1, 30, 4):
        loop.start([Episode(seed, seed, 0) for seed in range(12)], SAMPLING)
        for _ in range(count):
            loop.step()
        loop.abort(range(12))
        assert not loop.busy
        assert not loop._engine.busy
        assert not loop._envs.pending
    assert len(play(loop)) == 24


def test_a_prompt_without_room_for_a_response_ends_its_episode(chat: ChatFormat) -> None:
    engine = SlotEngine(chat, 2)

    def refuse(request: Request) -> None:
        raise ValueError("too long")

    engine.add_request = refuse  # type: ignore[method-assign]
    played = play(build(experiment(1, 1, 2), engine, LocalVectorEnv(Walk)), 4)
    assert {episode.outcome for episode in played} == {Outcome.CONTEXT}


def rlinf(path: Path, **keys: Any) -> Experiment:
    file = path / "config.yaml"
    file.write_text(yaml.safe_dump({"runner": {"task_type": "embodied"}, **keys}))
    inspected = inspect_config(str(file), [], "rlinf", "refuse")
    assert not [each for each in inspected.unsupported if "channel" in each.message]
    return inspected.composed.experiment


@pytest.mark.proves("rlinf", "env.channel.name", "env.channel.queue_name", "env.channel.queue_size")
@pytest.mark.proves("rlinf", "rollout.channel.name", "rollout.channel.queue_name", "rollout.channel.queue_size")
def test_rlinfs_queues_of_observations_and_actions_are_bounded_and_in_the_metrics(
    chat: ChatFormat, tmp_path: Path, fullest: dict[str, int]
) -> None:
    config = rlinf(
        tmp_path,
        env={"channel": {"name": "pipe", "queue_name": "seen", "queue_size": 2}},
        rollout={"channel": {"queue_name": "moves", "queue_size": 3}},
    )
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_concurrent": 4})})
    loop = build(config, SlotEngine(chat, 4), SlowEnvs())
    turns = sum(len(episode.turns) for episode in play(loop))
    metrics = loop.pop_metrics()
    assert metrics["channel/pipe/seen/puts"] == metrics["channel/pipe/seen/gets"] == turns
    assert metrics["channel/pipe/moves/puts"] == metrics["channel/pipe/moves/gets"] > 0
    assert fullest["pipe/seen"] == 2
    assert fullest["pipe/moves"] <= 3


def test_without_names_and_sizes_there_is_no_channel(chat: ChatFormat, tmp_path: Path) -> None:
    engine, envs = SlotEngine(chat, 1), LocalVectorEnv(Walk)
    assert with_turn_channels(rlinf(tmp_path), engine, envs) == (engine, envs)
    named = Experiment.model_validate({"placement": {"envs": {"channel": {"name": "pipe"}}}})
    loop = build(named, engine, envs)
    play(loop)
    assert {"channel/pipe/observations/puts", "channel/rollout/actions/puts"} <= set(loop.pop_metrics())
