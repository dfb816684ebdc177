"""If these fail, a hint about generated rows and demonstrations leads nowhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from data_directory import fill
from hint_cases import HintCase, case, name_of

from quintet.config.compose import load_experiment
from quintet.config.native.envs import SokobanConfig
from quintet.config.native.training import SolvedEpisodesConfig
from quintet.data import demonstration_rows
from quintet.data.demonstrations import collect_demonstrations
from quintet.data.tasks.generation import generate_dataset
from quintet.data.tasks.task import build_task
from quintet.envs.env import Env
from quintet.envs.factory import build_env


class NoExpert:
    """An environment without an expert."""


class NewExpert(NoExpert):
    """The same with one."""

    def __new__(cls) -> Any:
        return boxes(1)()


def boxes(pushes: int) -> Callable[[], Env]:
    """A Sokoban that takes at least so many moves."""
    return lambda: build_env(SokobanConfig(min_solution_pushes=pushes))


def demonstrated(env_and_turns: tuple[Any, int]) -> None:
    env, turns = env_and_turns
    collect_demonstrations(env, 2, max_turns=turns)


def demonstrated_for(asked: tuple[Any, list[str]]) -> None:
    """Demonstrations of an environment for a run that needs them."""
    env, words = asked
    config = load_experiment(None, words).experiment
    if config.policy.preset or config.warm_start:
        collect_demonstrations(env, 2, max_turns=9)


def random_walks(epsilon_and_env: tuple[float, Callable[[], Env]]) -> None:
    """Demonstrations with random actions."""
    epsilon, env = epsilon_and_env
    collect_demonstrations(env, 1, max_turns=30, epsilon=epsilon)


def without_actions() -> Env:
    """An environment with an expert that takes any text as an action."""
    env = boxes(1)()
    env.actions = ()
    return env


def solved(asked: tuple[Mapping[str, Any], int, int], env: str = "sokoban") -> None:
    """Solve episodes of an environment with these options, in so many moves."""
    options, episodes, depth = asked
    config = demonstration_rows.parse_env_config(env, options)
    settings = SolvedEpisodesConfig(episodes=episodes, validation_episodes=1, max_depth=depth)
    list(demonstration_rows._iter_distinct_episodes(config, settings))


def frozen(size_and_episodes: tuple[int, int]) -> None:
    """Solve episodes on a lake of a size."""
    solved(({"size": size_and_episodes[0]}, size_and_episodes[1], 9), "frozenlake")


def env_with_expert(name: str) -> None:
    demonstration_rows.parse_env_config(name, {})


def generated(directory_and_settings: tuple[str, Mapping[str, Any]]) -> None:
    directory, settings = directory_and_settings
    generate_dataset("addition", Path(directory), **{"validation": 0, **settings})


def task(name_and_options: tuple[str, Mapping[str, Any]]) -> None:
    build_task(*name_and_options)


WITHOUT = ["policy.path=model", "policy.preset=null", "warm_start=null"]
CHAIN = "reasoning_gym:chain_sum"
CASES = [
    case(
        demonstrated_for,
        (NoExpert, []),
        "add the method, or train an existing model without a warm start: policy.path=DIRECTORY policy.preset=null",
        (NewExpert, []),
        (NoExpert, WITHOUT),
    ),
    case(
        demonstrated,
        (boxes(2), 1),
        "increase rollout.max_turns or make the environment easier",
        (boxes(2), 30),
        (boxes(1), 1),
    ),
    case(random_walks, (0.5, without_actions), "remove warm_start.epsilon", (0.0, without_actions)),
    case(
        solved,
        ({"min_solution_pushes": 2}, 1, 1),
        "increase max_depth, or make the environment easier",
        ({"min_solution_pushes": 2}, 1, 30),
        ({"min_solution_pushes": 1}, 1, 1),
    ),
    case(
        frozen,
        (2, 40),
        "request fewer episodes, or enlarge the environment: its layouts repeat",
        (2, 1),
        (4, 40),
    ),
    case(env_with_expert, "sokobann", "did you mean sokoban? environments with an expert: ", "sokoban"),
    case(generated, ("new", {"train": 0}), "request rows, for example --train 1000", ("new", {"train": 1000})),
    case(
        generated,
        ("data", {"train": 1}),
        "use another directory, or --overwrite to replace it",
        ("new", {"train": 1}),
        ("data", {"train": 1, "overwrite": True}),
    ),
    case(
        generated,
        ("new", {"train": 200, "options": {"digits": 1}}),
        "request fewer, or change the options: more digits",
        ("fewer", {"train": 20, "options": {"digits": 1}}),
        ("longer", {"train": 200, "options": {"digits": 2}}),
    ),
    case(task, ("addition:x", {}), "use addition", ("addition", {})),
    case(task, ("addition", {"digit": 2}), "options of addition: ", ("addition", {"digits": 2})),
    case(task, (f"{CHAIN}s", {}), f"did you mean {CHAIN}?", (CHAIN, {})),
    case(task, (CHAIN, {"min_digit": 2}), "did you mean min_digits? valid options: ", (CHAIN, {"min_digits": 2})),
]


@pytest.fixture(autouse=True)
def _directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy_directory: Path) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, policy_directory)


@pytest.mark.parametrize("entry", CASES, ids=name_of)
def test_a_hint_about_generated_rows_removes_its_error(entry: HintCase) -> None:
    entry.check()
