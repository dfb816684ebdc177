"""If these fail, a simulated user replies otherwise than verl's, or one that hangs, dies or raises ends others, too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quintet.config.interaction_files import run_users
from quintet.config.native.envs import EnvProcessesConfig
from quintet.config.native.interactions import InteractionsConfig, UserConfig
from quintet.errors import ConfigError
from quintet.records import Failure
from quintet.tools.gsm8k_interaction import Gsm8kInteraction
from quintet.tools.interaction import UserReply
from quintet.tools.tool import ToolEpisode
from quintet.tools.user_executor import UserEnv, UserExecutor
from quintet.tools.users import load_user, user_name

ROOT = Path(__file__).parents[3]
TROUBLE = '''
import os, time
from quintet.tools.interaction import UserReply


class Trouble:
    """Does what the policy says, and counts its replies."""

    def __init__(self, start=0):
        self.count = start

    def create(self, episode):
        self.prefix = episode.arguments.get("prefix", "")

    def reply(self, messages):
        self.count += 1
        said = messages[-1]["content"]
        if said == "raise":
            raise ValueError("no such thing")
        if said == "hang":
            time.sleep(600)
        if said == "die":
            os._exit(3)
        if said == "text":
            return "no reply"
        return UserReply(f"{self.prefix}{self.count}", None if said == "unscored" else 0.5, ended=self.count > 11)

    def close(self):
        pass


class OfVerl:
    """A class with verl's interface."""

    def __init__(self, config):
        self.name, self.rewards = config["name"], {}

    async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
        self.rewards[instance_id] = (ground_truth, kwargs)
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        truth, created = self.rewards[instance_id]
        right = truth in messages[-1]["content"]
        return right, f"{self.name} {created['query']} {kwargs['name']} {len(messages)}", 1.0 if right else None, {}


class Empty:
    pass
'''


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UserExecutor]:
    directory = tmp_path_factory.mktemp("users")
    (directory / "trouble.py").write_text(TROUBLE)
    trouble = {"user": f"{directory}/trouble.py:Trouble", "arguments": {"start": 10}}
    config = {"users": {"trouble": trouble, "gsm8k": {}}, "timeout_seconds": 0.5, "max_processes": 2}
    executor = UserExecutor(InteractionsConfig.model_validate(config))
    yield executor
    executor.close()


@pytest.fixture
def executor(processes: UserExecutor) -> Iterator[UserExecutor]:
    """An executor without episodes; all tests share its fork server."""
    yield processes
    for episode in (1, 2, 3):
        processes.drop(episode)


def test_processes_of_users_have_the_configured_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[EnvProcessesConfig] = []
    monkeypatch.setattr("quintet.tools.executor.SubprocessVectorEnv", lambda env, given: limits.append(given))
    config = {"max_processes": 3, "timeout_seconds": 7.0, "memory_gib": 2.0}
    UserExecutor(InteractionsConfig.model_validate({"users": {"gsm8k": {}}, **config}))
    (given,) = limits
    assert (given.max_processes, given.step_timeout_seconds, given.memory_gib) == (3, 7.0, 2.0)


def say(executor: UserExecutor, episode: int, *texts: str, user: str = "trouble", **arguments: Any) -> None:
    messages = [{"role": "assistant", "content": text} for text in texts]
    executor.submit(episode, user, messages, ToolEpisode("7", arguments), seed=0)


def collect(executor: UserExecutor) -> dict[int, UserReply | Failure]:
    replies: dict[int, UserReply | Failure] = {}
    while executor.pending:
        replies |= dict(executor.poll(wait=True))
    return replies


def test_a_user_who_raises_hangs_or_dies_fails_only_its_own_episode(executor: UserExecutor) -> None:
    say(executor, 1, "raise")
    say(executor, 2, "hi", prefix="call ")
    replies = collect(executor)
    assert replies[1] == Failure("interaction", "ValueError", "no such thing (trouble.py:19)")
    assert replies[2] == UserReply("call 11", 0.5)
    executor.drop(1)
    say(executor, 1, "hang")
    say(executor, 2, "hi", "unscored")
    replies = collect(executor)
    assert replies[1] == Failure("interaction", "Timeout", "no step after 0.5 s: its process was killed")
    # the same object has replied twice to this episode
    assert replies[2] == UserReply("call 12", None, ended=True)
    executor.drop(1)
    executor.drop(2)
    say(executor, 1, "die")
    say(executor, 2, "text")
    replies = collect(executor)
    assert replies[1] == Failure("interaction", "ProcessDied", "its process ended with status 3")
    assert isinstance(replies[2], Failure)
    assert replies[2].message.startswith("reply() returned a str, not a UserReply")


def test_rows_choose_their_users_and_replies_after_the_end_of_an_episode_do_not_arrive(executor: UserExecutor) -> None:
    say(executor, 1, "#### 7", user="gsm8k")
    say(executor, 2, "hang")
    executor.drop(2)
    assert collect(executor) == {1: UserReply("Your response is correct!", 1.0, ended=True)}


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("4 + 3 = 7\n#### 7", True),
        ("#### 1,007 no, #### 7", True),
        ("the answer is 7", False),
        ("#### 7 no, #### 8", False),
    ],
)
def test_the_gsm8k_user_says_what_verls_interaction_says(response: str, right: bool) -> None:
    user = Gsm8kInteraction()
    user.create(ToolEpisode("8", {"ground_truth": "7"}))
    wrong = UserReply("Your response is incorrect! You need to reflect on your answer and try again.", 0.0)
    messages = [{"role": "user", "content": "4 + 3?"}, {"role": "assistant", "content": response}]
    assert user.reply(messages) == (UserReply("Your response is correct!", 1.0, ended=True) if right else wrong)


def test_a_class_written_for_verl_replies_as_under_verl(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TROUBLE)
    config = UserConfig(user=f"{tmp_path}/mine.py:OfVerl", arguments={"config": {"name": "strict"}})
    user = load_user("strict", config)()
    user.create(ToolEpisode("1", {"name": "strict", "ground_truth": "7", "query": "4+3?"}))
    assert user.reply([{"role": "assistant", "content": "8"}]) == UserReply("strict 4+3? strict 1", None)
    assert user.reply([{"role": "assistant", "content": "7"}]) == UserReply("strict 4+3? strict 1", 1.0, ended=True)
    user.close()


def test_the_user_of_the_page_replies_as_the_page_says(tmp_path: Path) -> None:
    _, code = re.findall(r"```python\n(.*?)```", (ROOT / "docs/tools.md").read_text(), re.DOTALL)
    (tmp_path / "teacher.py").write_text(code)
    env = UserEnv({"teacher": {"user": f"{tmp_path}/teacher.py:Teacher", "arguments": {"hints": 1}}})
    turn = {"user": "teacher", "messages": [{"role": "assistant", "content": "8"}], "episode": {"ground_truth": "7"}}
    first, second = env.step(turn), env.step(turn)
    assert (first.observation.text, first.info["ended"]) == ("Try again.", False)
    assert (second.observation.text, second.info["ended"]) == ("It is 7.", True)
    env.close()


def test_an_interaction_file_of_verl_names_its_users_as_verl_names_them(tmp_path: Path) -> None:
    (tmp_path / "users.yaml").write_text(
        "interaction:\n"
        "  - {class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction, config: {}}\n"
        "  - {name: strict, class_name: mine.users.StrictInteraction, config: {mode: 1}}\n"
    )
    users = run_users(InteractionsConfig.model_validate({"file": f"{tmp_path}/users.yaml", "users": {"other": {}}}))
    assert users == {
        "gsm8k": UserConfig(user="gsm8k", arguments={}),
        "strict": UserConfig(user="mine.users:StrictInteraction", arguments={"config": {"mode": 1, "name": "strict"}}),
        "other": UserConfig(arguments={}),
    }


GSM8K = "class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("interaction: [{class_name: verl.interactions.weather_interaction.WeatherInteraction}]", "not supported yet"),
        ("interaction: []", "has no list `interaction`"),
        ("interaction: [{name: x}]", "has an interaction without class_name"),
        (f"interaction: [{{{GSM8K}}}, {{name: gsm8k, {GSM8K}}}]", "has two interactions named gsm8k"),
        ("interaction: [{class_name: a.B, config: 7}]", "the config of a.B is no mapping"),
    ],
)
def test_an_interaction_file_that_cannot_be_used_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "users.yaml").write_text(text)
    with pytest.raises(ConfigError, match=problem) as error:
        run_users(InteractionsConfig.model_validate({"file": f"{tmp_path}/users.yaml"}))
    assert error.value.key == "rollout.interactions.file"


@pytest.mark.parametrize(
    ("user", "problem"),
    [
        ({"user": "gsm8"}, "did you mean 'gsm8k'"),
        ({"user": "nowhere.py:User"}, "nowhere.py"),
        ({"user": "trouble.py:Empty"}, "lacks create, reply, close"),
        ({"user": "trouble.py:Trouble", "arguments": {"end": 1}}, "cannot be called with end"),
    ],
)
def test_a_user_who_cannot_be_used_is_refused_by_the_key(
    user: dict[str, Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trouble.py").write_text(TROUBLE)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_user("mine", UserConfig.model_validate(user))
    assert problem in f"{error.value.message} {error.value.hint}"
    assert str(error.value.key).startswith("rollout.interactions.users.mine.")


def test_rows_need_not_name_the_only_user() -> None:
    assert user_name({"interaction_kwargs": {"name": "b"}}, ["a", "b"]) == "b"
    assert user_name({"interaction_kwargs": {"name": None}}, ["a"]) == "a"
    assert user_name({}, ["a"]) == "a"
    assert user_name({}, ["a", "b"]) is None
