"""If these fail, questions that are answered by searching are scored wrongly, or searches show other passages."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from json_service import json_service

from quintet.config.native.text_envs import SearchQuestionsConfig
from quintet.envs.factory import env_factory
from quintet.errors import ConfigError
from quintet.rewards.chat_endpoint import EndpointError
from quintet.tools.search_questions import SearchQuestions, passages_text, similarity


@pytest.fixture
def questions(tmp_path: Path) -> str:
    """Enough rows with the same answer that every split has some."""
    rows = [
        {"question": f"Which river flows through town {n}?", "ground_truth": ["The Seine", "river Seine"]}
        for n in range(30)
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def build_questions(path: str, **options: Any) -> SearchQuestions:
    env = SearchQuestions(SearchQuestionsConfig(path=path, **options))
    assert env.reset(0).text.startswith("Question: Which river flows through town")
    return env


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("finish[Seine]", 2.0),
        ("finish[ the  SEINE. ]", 2.0),
        # one of its three words is the only right one without its article: F1 is 2 / (3 + 1); below, it is 2 / (7 + 1)
        ("finish[Seine in Paris]", 1.0),
        ("Seine", 2.0),
        ("finish[b c d e f g Seine]", -1.0),
        ("finish[yes]", -1.0),
        ("finish[]", -1.0),
    ],
)
def test_answers_pay_by_their_words(questions: str, answer: str, reward: float) -> None:
    step = build_questions(questions, correct_reward=2.0, wrong_reward=-1.0).step(answer)
    assert (step.reward, step.terminated, step.info["success"]) == (reward, True, reward > 0)


def test_an_answer_counts_from_the_configured_f1_on(questions: str) -> None:
    """F1 is 2 / (7 + 1)."""
    step = build_questions(questions, min_f1=0.25).step("finish[b c d e f g Seine]")
    assert (step.reward, step.info["success"]) == (0.25, True)


def test_only_the_first_rows_are_asked(questions: str) -> None:
    env = build_questions(questions, max_rows=10)
    towns = {int(env.reset(seed).text.rpartition(" ")[2][:-1]) for seed in range(90)}
    assert max(towns) < 10


def test_a_question_is_no_text_of_a_python_value(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    rows = [{"question": [{"role": "user", "content": f"{n}?"}], "ground_truth": "1"} for n in range(30)]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ConfigError, match=r"column question contains .* neither text nor a number"):
        SearchQuestions(SearchQuestionsConfig(path=str(path))).reset(0)


def test_similarity_is_the_f1_of_words() -> None:
    """By hand: 2 × 2 shared of 3 + 4 words; articles are none, and yes counts only as a whole."""
    assert similarity("a large red house", "the red house by lakes") == pytest.approx(2 * 2 / (3 + 4))
    assert similarity("house house", "house") == pytest.approx(2 / 3)
    assert similarity("yes", "yes it is") == similarity("yes it is", "yes") == 0.0
    assert similarity("Yes.", "yes") == 1.0
    assert similarity("", "Seine") == 0.0


def test_a_search_shows_the_passages_of_the_service(questions: str) -> None:
    asked = []

    def answer(body: Any) -> tuple[int, Any]:
        asked.append(body)
        results = [{"id": "7", "content": "Paris lies on the Seine.", "score": 0.9}, {"content": "x" * 801}, {}]
        return 200, {"results": [] if body["query"] == "nothing" else results}

    with json_service(answer) as url:
        env = build_questions(questions, url=url, passages=2)
        step = env.step("search[Paris river]")
        assert env.step("search[nothing]").observation.text == "No passages were found."
        short = build_questions(questions, url=url, max_characters=10).step("search[Paris]").observation.text
    assert asked[0] == {"query": "Paris river", "top_k": 2}
    first, second = (
        "[Document 1] (ID: 7, Score: 0.900)\nParis lies on the Seine.",
        "[Document 2] (ID: doc_2, Score: 0.000)",
    )
    assert step.observation.text == f"{first}\n\n{second}\n{'x' * 800}..."
    assert (step.reward, step.terminated, step.truncated) == (0.0, False, False)
    assert short == "[Document ..."
    assert passages_text([]) == ""
    assert passages_text([{"content": None, "score": None}]).endswith("Score: 0.000)\n")


def test_an_episode_ends_after_its_searches(questions: str) -> None:
    with json_service(lambda _: (200, {"results": []})) as url:
        env = build_questions(questions, url=url, max_steps=2)
        steps = [env.step("search[a]"), env.step("")]
    assert "finish[…]" in steps[1].observation.text
    assert [(step.truncated, step.info["success"]) for step in steps] == [(False, False), (True, False)]


def test_a_service_that_refuses_ends_the_episode_with_an_error(questions: str) -> None:
    with json_service(lambda _: (400, {"error": "no index"})) as url, pytest.raises(EndpointError):
        build_questions(questions, url=url).step("search[a]")


def test_what_the_env_needs_is_checked_before_the_run(questions: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"env\.url = localhost"):
        env_factory(SearchQuestionsConfig(path=questions, url="localhost"))
    with pytest.raises(ConfigError, match="does not exist"):
        env_factory(SearchQuestionsConfig(path=str(tmp_path / "none.parquet")))
    assert env_factory(SearchQuestionsConfig(path=questions))().instruction()


def test_questions_and_answers_are_read_from_the_configured_columns(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    rows = [{"asked": f"Which river flows through town {n}?", "right": "Loire"} for n in range(30)]
    path.write_text("\n".join(map(json.dumps, rows)))
    env = build_questions(str(path), question_key="asked", answer_key="right")
    assert env.step("finish[Loire]").reward == 1.0


def test_a_search_is_given_up_after_the_time_limit(questions: str) -> None:
    def answer(_: Any) -> tuple[int, Any]:
        time.sleep(0.5)
        return 200, {"results": []}

    with json_service(answer) as url, pytest.raises(EndpointError, match=r"within 0\.05 s"):
        build_questions(questions, url=url, timeout_seconds=0.05).step("search[a]")
