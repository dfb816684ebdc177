"""If these fail, a user's own reward function is called otherwise than documented, or its faults aren't told."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from quintet.config.native.data import RewardConfig
from quintet.errors import ConfigError
from quintet.records import PromptRow, Response, RewardResult
from quintet.rewards.factory import RewardScorer, build_verifier_scorer

FUNCTION_SOURCE = """
def judge(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    print("a line that is no message")
    assert data_source == "mine" and isinstance(extra_info, dict)
    if solution_str == "raise":
        raise ValueError("no such unit")
    if solution_str == "nan":
        return float("nan")
    if solution_str == "words":
        return "very good"
    if solution_str == "nothing":
        return {"pred": 3}
    if solution_str == "several":
        return {"score": 0.5, "acc": True, "pred": 3, "style": 0.25, "note": "fine", "odd": float("inf")}
    if solution_str == "sequence":
        return [0.75, "because"]
    if solution_str == "extra":
        return extra_info["numbers"][1] + len(extra_info["picture"])
    return (solution_str == ground_truth) + bonus
"""


def question(truth: object = "7", **extra: object) -> PromptRow:
    return PromptRow(0, "mine", (), truth, extra)


def build_scorer(tmp_path: Path, source: str, name: str = "judge", **options: object) -> RewardScorer:
    (tmp_path / "mine.py").write_text(source)
    values = {"function": f"{tmp_path / 'mine.py'}:{name}", "timeout_seconds": 2.0, **options}
    return build_verifier_scorer(RewardConfig.model_validate(values), 100)


def verdicts(judge: RewardScorer, *texts: str, prompt_row: PromptRow | None = None) -> list[RewardResult]:
    try:
        for number, text in enumerate(texts):
            judge.submit(Response(number, prompt_row or question(), text, 5))
        return sorted(judge.drain(), key=lambda verdict: verdict.id)
    finally:
        judge.close()


def test_the_functions_result_is_the_reward(tmp_path: Path) -> None:
    actual = verdicts(build_scorer(tmp_path, FUNCTION_SOURCE, scale=2.0), "7", "8", "several", "sequence")
    assert [verdict.score for verdict in actual] == [2.0, 0.0, 1.0, 1.5]
    assert actual[2].reward_components == {"acc": 1.0, "pred": 3.0, "style": 0.25}
    assert actual[2].extracted_answer == "3"
    assert all(verdict.failure is None for verdict in actual)


def test_arguments_are_given_on(tmp_path: Path) -> None:
    (actual,) = verdicts(build_scorer(tmp_path, FUNCTION_SOURCE, function_arguments={"bonus": 0.25}), "7")
    assert actual.score == 1.25


def test_the_function_gets_the_row_unchanged(tmp_path: Path) -> None:
    prompt_row = question(numbers=np.array([1, 2]), picture=b"\x00\xff\x01")
    (actual,) = verdicts(build_scorer(tmp_path, FUNCTION_SOURCE), "extra", prompt_row=prompt_row)
    assert actual.score == 5.0


def test_errors_of_a_function_are_recorded_with_their_cause(tmp_path: Path) -> None:
    actual = verdicts(
        build_scorer(tmp_path, FUNCTION_SOURCE, wrong_reward=-1.0), "raise", "nan", "words", "nothing", "7"
    )
    kinds = [verdict.failure and verdict.failure.error_type for verdict in actual]
    assert kinds == ["ValueError", "ValueError", "TypeError", "TypeError", None]
    assert "no such unit" in actual[0].failure.message
    assert "mine.py:6" in actual[0].failure.message
    assert [verdict.score for verdict in actual] == [-1.0, -1.0, -1.0, -1.0, 1.0]


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("def judge(data_source): return 1", "judge", "cannot be called with data_source, solution_str"),
        ("def judge(**a): return 1", "jugde", "mine.py:judge?"),
        ("import no_such_package", "judge", "No module named 'no_such_package'"),
        ("def judge(", "judge", "SyntaxError"),
        ("import os; os._exit(4)", "judge", "status 4"),
        ("raise SystemExit(4)", "judge", "SystemExit"),
    ],
)
def test_an_unusable_function_is_reported_before_the_run(tmp_path: Path, source: str, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_scorer(tmp_path, source, name)
    assert message in str(caught.value)
    assert caught.value.key == "reward.function"


def test_a_missing_function_file_is_reported_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        build_verifier_scorer(RewardConfig(function=f"{tmp_path / 'none.py'}:judge"), 100)


BATCHED = """
def judge(data_sources, solution_strs, ground_truths, extra_infos):
    assert len(data_sources) == len(ground_truths) == len(extra_infos)
    if "raise" in solution_strs:
        raise RuntimeError("all of it")
    if "short" in solution_strs:
        return [1.0]
    return [{"score": text == truth, "of": len(solution_strs)} for text, truth in zip(solution_strs, ground_truths)]
"""


def test_batch_calls_once_for_all(tmp_path: Path) -> None:
    judge = build_scorer(tmp_path, BATCHED, manager="batch")
    for number, text in enumerate(["7", "8", "7"]):
        judge.submit(Response(number, question(), text, 5))
    assert judge.ready() == []
    actual = judge.drain()
    assert [(verdict.score, verdict.reward_components["of"]) for verdict in actual] == [
        (1.0, 3.0),
        (0.0, 3.0),
        (1.0, 3.0),
    ]
    assert judge.drain() == []
    (again,) = verdicts(judge, "7")
    assert again.reward_components["of"] == 1.0


@pytest.mark.parametrize("text", ["raise", "short"])
def test_where_a_batch_fails_all_have_failed(tmp_path: Path, text: str) -> None:
    actual = verdicts(build_scorer(tmp_path, BATCHED, manager="batch"), "7", text)
    assert [verdict.failure is not None for verdict in actual] == [True, True]


def test_dapo_takes_marks_of_the_end_off_and_a_penalty(tmp_path: Path) -> None:
    judge = build_scorer(tmp_path, FUNCTION_SOURCE, manager="dapo", overlong={"buffer": 10})
    judge.submit(Response(0, question(), "7<|im_end|>", 95))
    (actual,) = judge.drain()
    judge.close()
    assert (actual.score, actual.reward_components) == (0.5, {"acc": 1.0, "overlong": -0.5})


@pytest.mark.parametrize("workers", [1, 4])
def test_rate_limited_spaces_calls(tmp_path: Path, workers: int) -> None:
    """120 calls per minute: the fourth is 1.5 s after the first."""
    judge = build_scorer(tmp_path, FUNCTION_SOURCE, manager="rate_limited", requests_per_minute=120, workers=workers)
    started = time.monotonic()
    for number in range(4):
        judge.submit(Response(number, question(), "7", 5))
    actual = judge.drain()
    assert time.monotonic() - started >= 1.5
    judge.close()
    assert sum(verdict.score for verdict in actual) == 4.0


class Address(BaseHTTPRequestHandler):
    """Scores 1 where the truth is given, as a mapping; dies, dawdles or talks nonsense where it is told to."""

    seen: ClassVar[list[dict]] = []

    def do_POST(self) -> None:
        parsed = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(parsed)
        text = parsed["solution_str"]
        if text == "slow":
            time.sleep(2)
        body = b"{" if text == "nonsense" else json.dumps({"score": text == parsed["ground_truth"], "by": 9}).encode()
        self.send_response(500 if text == "error" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Address)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # whoever was asked too slowly has gone
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/judge"
    server.shutdown()
    server.server_close()


def test_remote_asks_an_address(address: str) -> None:
    config = RewardConfig(
        manager="remote", function=address, function_arguments={"strict": True}, timeout_seconds=1.0, workers=3
    )
    actual = verdicts(
        build_verifier_scorer(config, 100), "7", "8", "error", "nonsense", "slow", prompt_row=question(a=1)
    )
    assert [verdict.score for verdict in actual] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert actual[0].reward_components == {"acc": 1.0, "by": 9.0}
    assert [verdict.failure and verdict.failure.error_type for verdict in actual[:4]] == [
        None,
        None,
        "HTTPError",
        "JSONDecodeError",
    ]
    assert actual[4].failure.error_type in ("Timeout", "TimeoutError")
    options = {"data_source": "mine", "solution_str": "7", "ground_truth": "7", "extra_info": {"a": 1}, "strict": True}
    assert options in Address.seen


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"manager": "dapo"}, "reward.overlong"),
        ({"manager": "remote"}, "reward.function"),
        ({"overlong": {"buffer": 200}}, "reward.overlong.buffer"),
        ({"kind": "maths"}, "reward.kind"),
    ],
)
def test_conflicting_reward_options_are_reported_before_the_run(options: dict, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_verifier_scorer(RewardConfig.model_validate(options), 100)
    assert caught.value.key == key


def test_unknown_sources_are_reported_before_the_run() -> None:
    with pytest.raises(ConfigError, match="openai/gsm8k"):
        build_verifier_scorer(RewardConfig(), 100, ["openai/gsm8"])
