"""If these fail, the text environments of RAGEN pay other rewards than they say, or mix training with validation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from quintet.config.native.envs import ENVS, FrozenLakeConfig, SokobanConfig
from quintet.config.native.text_envs import BanditConfig, CountdownConfig, QuestionsConfig, WebShopConfig
from quintet.envs.bandit import Bandit
from quintet.envs.countdown import Countdown, draw_problem
from quintet.envs.factory import build_env, env_factory
from quintet.envs.start_states import Split, split_seed
from quintet.envs.vector_env import EpisodeStarted, LocalVectorEnv
from quintet.errors import ConfigError
from quintet.expressions import evaluate

TRAIN, VALIDATION = ([split_seed(split, index) for index in range(60)] for split in (Split.TRAIN, Split.VALIDATION))


def test_the_better_arm_of_a_bandit_pays_in_a_quarter_of_the_episodes() -> None:
    rewards = []
    for seed in range(400):
        bandit = Bandit(BanditConfig())
        assert set(bandit.reset(seed).text[len("There are two arms: ") : -1].split(" and ")) == {"Phoenix", "Dragon"}
        step = bandit.step("Dragon")
        rewards.append(step.reward)
        assert (step.terminated, step.info["success"]) == (True, True)
    assert set(rewards) == {0.0, 1.0}
    assert 0.19 < sum(rewards) / 400 < 0.31


def test_the_other_arm_always_pays_a_tenth() -> None:
    bandit = Bandit(BanditConfig(low_arm="Trader", high_arm="Librarian"))
    observations = {bandit.reset(seed).text for seed in range(20)}
    assert observations == {
        "There are two arms: Trader and Librarian.",
        "There are two arms: Librarian and Trader.",
    }
    step = bandit.step("Trader")
    assert (step.reward, step.info["success"], step.observation.text) == (0.1, False, "Trader: 0.1 points")
    assert bandit.render().shape[2] == 3
    with pytest.raises(ValidationError, match="has the name of `low_arm`"):
        BanditConfig(low_arm="dragon")


def test_the_arms_of_a_bandit_pay_what_is_configured() -> None:
    config = {"low_reward": 0.2, "high_reward": 3.0, "miss_reward": -1.0}
    for probability, reward in ((1.0, 3.0), (0.0, -1.0)):
        bandit = Bandit(BanditConfig(**config, high_probability=probability))
        for seed in range(20):
            bandit.reset(seed)
            assert bandit.step("Dragon").reward == reward
    bandit.reset(0)
    assert bandit.step("Phoenix").reward == 0.2


def test_drawn_arms_are_those_of_their_list_and_the_riskier_one_is_better() -> None:
    drawn = set()
    for seed in range(200):
        bandit = Bandit(BanditConfig(arms="test"))
        assert "Explorer" in bandit.actions
        assert "Trader" not in bandit.actions
        text = bandit.reset(seed).text
        assert set(text[len("There are two arms: ") : -1].split(" and ")) == set(bandit.actions)
        drawn.add(bandit.actions)
        assert bandit.expert_action() == bandit.actions[1]
    assert len(drawn) == 8
    bandit.reset(0)
    absent = next(name for pair in drawn for name in pair if name not in bandit.actions)
    step = bandit.step(absent)
    assert (step.reward, step.terminated) == (0.0, False)
    step = bandit.step(bandit.actions[0])
    assert (step.reward, step.terminated, step.info["success"]) == (0.1, True, False)


def test_only_the_two_arms_of_an_episode_are_valid() -> None:
    config = BanditConfig(arms="train")
    envs = LocalVectorEnv(env_factory(config))
    envs.start(0, 5)
    (started,) = envs.poll()
    bandit = Bandit(config)
    bandit.reset(5)
    assert isinstance(started, EpisodeStarted)
    assert started.actions == bandit.actions
    assert len(started.actions) == 2


@pytest.mark.parametrize(
    ("answer", "reward", "success"),
    [("(3 + 5) - 2", 1.0, True), ("3 + 5 + 2", 0.1, False), ("3 + 5", 0.0, False), ("six", 0.0, False)],
)
def test_countdown_pays_for_solutions_and_a_little_for_the_form(
    tmp_path: Path, answer: str, reward: float, success: bool
) -> None:
    file = tmp_path / "problems.parquet"
    pq.write_table(pa.table({"nums": [[3, 5, 2]], "target": [6]}), file)
    env = Countdown(CountdownConfig(path=str(file)))
    assert env.reset(_seed_with_rows(env)).text == "Target: 6, numbers: 3, 5, 2"
    step = env.step(answer)
    assert (step.reward, step.terminated, step.info["success"]) == (reward, True, success)


def test_countdown_draws_as_many_numbers_as_configured_up_to_the_largest() -> None:
    env = Countdown(CountdownConfig(numbers=3, largest_number=5))
    for seed in TRAIN[:20]:
        numbers = env.reset(seed).text.partition("numbers: ")[2].split(", ")
        assert len(numbers) == 3
        assert max(map(int, numbers)) <= 5


def test_the_form_of_a_countdown_answer_pays_what_is_configured(tmp_path: Path) -> None:
    file = tmp_path / "problems.jsonl"
    file.write_text("\n".join(json.dumps({"nums": [3, number], "target": 6}) for number in range(60)))
    env = Countdown(CountdownConfig(path=str(file), format_reward=0.3, max_rows=20))
    numbers = [int(env.reset(seed).text.rpartition(" ")[2]) for seed in TRAIN]
    assert max(numbers) < 20
    assert env.step(f"3 + {numbers[-1]} * 1").reward == 0.0
    assert env.step(f"3 - {numbers[-1]}").reward == 0.3


def _seed_with_rows(env: Any) -> int:
    """The first seed whose split has the only row of a file."""
    for seed in range(3):
        try:
            env.reset(seed)
        except ConfigError as error:
            assert "a hash assigns a third of them" in str(error)  # noqa: PT017 - other seeds have the row
        else:
            return seed
    raise AssertionError("no split has the row")


def test_drawn_countdown_problems_have_a_solution_and_differ_between_splits() -> None:
    seen = []
    for seeds in (TRAIN, VALIDATION):
        problems = [draw_problem(4, 20, seed) for seed in seeds]
        for numbers, target, expression in problems:
            value, used = evaluate(expression)
            assert (value, sorted(used)) == (target, numbers)
        seen.append({(*numbers, target) for numbers, target, _ in problems})
    assert not seen[0] & seen[1]
    assert draw_problem(4, 20, 7) == draw_problem(4, 20, 7)


def test_the_reward_of_a_question_halves_with_each_wrong_answer(tmp_path: Path) -> None:
    file = tmp_path / "math.jsonl"
    rows = [{"query": f"{n} + {n}?", "response": f"We add.\nThe answer is: {2 * n}"} for n in range(60)]
    file.write_text("\n".join(map(json.dumps, rows)))
    env = build_env(QuestionsConfig(path=str(file)))
    text = env.reset(TRAIN[0]).text
    right = str(2 * int(text.split()[0]))
    assert [(step.reward, step.terminated) for step in map(env.step, ("wrong", "no", f" {right} "))] == [
        (0.0, False),
        (0.0, False),
        (0.25, True),
    ]
    questions = [{env.reset(seed).text for seed in seeds} for seeds in (TRAIN, VALIDATION)]
    assert not questions[0] & questions[1]


def test_questions_are_read_from_the_configured_columns_and_discounted_as_configured(tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text("\n".join(json.dumps({"problem": f"{n} + {n}?", "solution": str(2 * n)}) for n in range(60)))
    config = QuestionsConfig(path=str(file), question_key="problem", answer_key="solution", discount=0.25)
    env = build_env(config)
    right = str(2 * int(env.reset(TRAIN[0]).text.split()[0]))
    assert [env.step(answer).reward for answer in ("wrong", right)] == [0.0, 0.25]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("gone.jsonl", None, "does not exist"),
        ("rows.csv", "query,response", "does not end in"),
        ("rows.jsonl", '{"query": "1 + 1?"}', "without the column response"),
        ("rows.json", "[{", "cannot read"),
        ("rows.json", '[{"query": "1?", "response": "1"}, {"query": "2?", "response": null}]', "row 1 has no response"),
        ("rows.jsonl", '{"query": "1?", "response": " "}', "row 0 has no response"),
    ],
)
def test_a_file_that_cannot_be_asked_from_is_named(
    tmp_path: Path, name: str, content: str | None, problem: str
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=rf"env\.path = .*{problem}"):
        env_factory(QuestionsConfig(path=str(file)))


def test_a_question_without_a_stated_answer_is_not_answered_by_nothing(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"query": f"{n}?", "response": "The answer is:"}) for n in range(30)))
    env = build_env(QuestionsConfig(path=str(file)))
    with pytest.raises(ValueError, match=r"\?' has no answer"):
        env.reset(TRAIN[0])


@pytest.mark.parametrize("column", ["query", "response"])
def test_a_question_is_no_text_of_a_python_value(tmp_path: Path, column: str) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"query": f"{n}?", "response": "1", column: [n, "1?"]} for n in range(30)]
    file.write_text("\n".join(map(json.dumps, rows)))
    env = build_env(QuestionsConfig(path=str(file)))
    with pytest.raises(ConfigError, match=rf"column {column} contains \[.*neither text nor a number"):
        env.reset(TRAIN[0])


def test_symbols_of_sokoban_are_those_of_the_configuration() -> None:
    plain, letters = (build_env(SokobanConfig(symbols=symbols)) for symbols in ("#_O√XPS", "W.GCBA@"))
    translated = plain.reset(3).text.split("\n")[0:6], letters.reset(3).text.split("\n")[0:6]
    table = str.maketrans("#_O√XPS", "W.GCBA@")
    assert [line.translate(table) for line in translated[0]] == translated[1]
    assert "Push every box B onto a target G. W is a wall" in letters.instruction()
    with pytest.raises(ValidationError, match="has a character twice"):
        SokobanConfig(symbols="##O√XPS")


def test_an_instruction_of_the_configuration_replaces_that_of_the_env() -> None:
    config = FrozenLakeConfig(instruction="Walk.")
    assert build_env(config).instruction() == env_factory(config)().instruction() == "Walk."


class Shop:
    """As `webshop_minimal.WebAgentTextEnv`."""

    def __init__(self, **options: Any) -> None:
        self.options, self.server, self.observation = options, SimpleNamespace(goals=["a"] * 2000), ""

    def reset(self, session: int) -> tuple[str, None]:
        self.session, self.observation = session, "Instruction: a red cup"
        return self.observation, None

    def get_available_actions(self) -> dict[str, Any]:
        return {"has_search_bar": self.observation.startswith("Instruction"), "clickables": ["search", "buy now"]}

    def step(self, action: str) -> tuple[str, float, bool, None]:
        self.observation = f"after {action}"
        return self.observation, 1.0, True, None

    def close(self) -> None:
        self.observation = ""


def test_the_shop_is_built_as_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    module, datasets = ModuleType("webshop_minimal"), []
    vars(module).update(WebAgentTextEnv=Shop, init_basedir=datasets.append)
    monkeypatch.setitem(sys.modules, "webshop_minimal", module)
    from quintet.envs.webshop_env import WebShop

    config = WebShopConfig(dataset="full", file_path="mine.json", observation="html", products=7, human_goals=True)
    options = WebShop(config)._shop.options
    assert datasets == ["full"]
    assert len(options.pop("session_prefix")) == 32
    assert options == {
        "observation_mode": "html",
        "num_products": 7,
        "human_goals": True,
        "file_path": "mine.json",
    }


def test_webshop_is_played_through_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"(?s)requires webshop_minimal.*external/webshop-minimal"):
        ENVS.get("webshop").load()
    module = ModuleType("webshop_minimal")
    vars(module).update(WebAgentTextEnv=Shop, init_basedir=lambda dataset: None)
    monkeypatch.setitem(sys.modules, "webshop_minimal", module)
    from quintet.envs.webshop_env import WebShop

    env = WebShop(WebShopConfig(products=100))
    assert env.reset(TRAIN[0]).text.endswith("Available: search[words], click[buy now]")
    step = env.step("click[buy now]")
    assert (step.reward, step.terminated, step.info) == (1.0, True, {"success": True})
    sessions = [[env.reset(seed) and env._shop.session for seed in seeds] for seeds in (TRAIN, VALIDATION)]
    assert not set(sessions[0]) & set(sessions[1])
