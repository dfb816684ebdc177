"""If these fail, one answer that never ends or kills its process holds up or takes down others."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quintet.config.native.data import RewardConfig
from quintet.errors import MachineError
from quintet.records import PromptRow, Response, RewardResult
from quintet.rewards.factory import build_verifier_scorer
from quintet.rewards.reward_managers import PooledRewardScorer

ENDLESS = [
    r"\boxed{\sum_{k=1}^{1} 9^{9^{9^{9}}}}",
    r"\boxed{\sum_{k=1}^{1000000000} \frac{1}{k^k}}",
    r"\boxed{\prod_{k=1}^{1} 100000000!}",
]
TIMEOUT = 2.0


def answer(number: int, text: str, truth: object = "7", source: str = "lighteval/MATH") -> Response:
    return Response(number, PromptRow(number, source, (), truth), text, 5)


def by_id(verdicts: list[RewardResult]) -> dict[int, RewardResult]:
    actual = {verdict.id: verdict for verdict in verdicts}
    assert len(actual) == len(verdicts)
    return actual


def kinds(verdicts: list[RewardResult]) -> dict[int, str]:
    return {verdict.id: verdict.failure.error_type for verdict in verdicts if verdict.failure is not None}


@pytest.fixture(scope="module", params=[TIMEOUT])
def judge(request: pytest.FixtureRequest) -> Iterator[PooledRewardScorer]:
    config = RewardConfig(manager="prime", workers=2, timeout_seconds=request.param)
    made = build_verifier_scorer(config, 100, ["lighteval/MATH"])
    assert isinstance(made, PooledRewardScorer)
    yield made
    made.close()


def test_hanging_verifications_are_killed_and_delay_no_others(judge: PooledRewardScorer) -> None:
    judge.submit(answer(-1, r"\boxed{x}", "x+0"))
    judge.drain()
    started = time.monotonic()
    for number in range(60):
        text = f"\\boxed{{{number}}}" if number % 6 else ENDLESS[number % 3]
        judge.submit(answer(number, text, str(number)))
    early = 0
    while early < 50 and time.monotonic() - started < TIMEOUT:
        early += len([verdict for verdict in judge.ready() if verdict.score == 1.0])
        time.sleep(0.01)
    late = judge.drain()
    endless = [verdict for verdict in late if verdict.failure is not None]
    # on a busy machine some of the others, or all, come late, too
    assert early + sum(verdict.score == 1.0 for verdict in late) == 50
    assert kinds(late) == dict.fromkeys(range(0, 60, 6), "Timeout")
    assert {verdict.score for verdict in endless} == {0.0}
    assert "killed" in endless[0].failure.message
    # generous, for a busy machine: one after another they would take 5 s in two processes
    assert time.monotonic() - started < TIMEOUT + 3


@pytest.mark.parametrize("judge", [60.0], indirect=True, ids=["patient"])
def test_rows_of_all_sources_are_scored_by_one_scorer(judge: PooledRewardScorer) -> None:
    entry = {"question": "1 + 2 =", "answer": "3", "metadata": {"source_dataset": "chain_sum"}}
    rows = [
        answer(0, "#### 7", "7", "openai/gsm8k"),
        answer(1, r"\boxed{\sqrt{4}}", "2"),
        answer(2, "<answer>3</answer>", entry, "reasoning_gym/chain_sum"),
        answer(3, "print(input())", {"inputs": ["a"], "outputs": ["a"]}, "codeforces"),
        answer(4, "<answer>3 + 4</answer>", {"target": 7, "numbers": [3, 4]}, "countdown"),
        answer(5, "<answer>4</answer>", entry, "reasoning_gym/chain_sum"),
    ]
    for _ in range(3):
        for row in rows:
            judge.submit(row)
        actual = judge.drain()
        assert not kinds(actual), actual
        assert sorted((verdict.id, verdict.score == 1.0) for verdict in actual) == [
            *((number, True) for number in range(5)),
            (5, False),
        ]


def test_a_source_has_its_verifier_with_its_options_and_others_have_the_common_one() -> None:
    """Under `strict`, a right letter without a box has -1; by default it would have 0.5."""
    letters = {"kind": "crossthinkqa", "arguments": {"reward_type": "strict"}}
    judge = build_verifier_scorer(
        RewardConfig.model_validate({"kind": "exact", "verifiers": {"letters": letters}, "timeout_seconds": 60.0}), 100
    )
    text = "<think>It is hot.</think>The answer is B."
    judge.submit(answer(0, text, "B", "letters"))
    judge.submit(answer(1, text, "B", "others"))
    scores = {verdict.id: verdict.score for verdict in judge.drain()}
    judge.close()
    assert scores == {0: -1.0, 1: 1.0}


@pytest.mark.parametrize("judge", [60.0], indirect=True, ids=["patient"])
def test_a_failing_verification_fails_only_its_response(judge: PooledRewardScorer) -> None:
    judge.submit(answer(1, "<answer>3</answer>", "3", "reasoning_gym/no_such_generator"))
    judge.submit(answer(2, r"\boxed{7}"))
    actual = by_id(judge.drain())
    assert actual[1].failure is not None
    assert "no_such_generator" in actual[1].failure.message
    assert actual[2].score == 1.0


def test_puzzles_are_only_scored_under_confinement(judge: PooledRewardScorer, tmp_path: Path) -> None:
    """Some of reasoning-gym's rules evaluate the answer as Python."""
    made = tmp_path / "made"
    entry = {"question": "", "answer": "[1, 2]", "metadata": {"source_dataset": "number_sorting"}}
    for number, text in enumerate(
        (f"open({str(made)!r}, 'w')", "__import__('os').fork()", "__import__('socket').socket()")
    ):
        judge.submit(answer(number, f"<answer>{text}</answer>", entry, "reasoning_gym/n_queens"))
        judge.submit(answer(number + 10, f"<answer>{text}</answer>", entry, "reasoning_gym/number_sorting"))
    assert all(verdict.score < 1.0 for verdict in judge.drain())
    assert not made.exists()


FUNCTION = """
import os, signal, subprocess, sys, time

def judge(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "hang":
        time.sleep(1000)
    if solution_str == "hang with a child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        with open(ground_truth, "w") as file:
            file.write(f"{os.getpid()} {child.pid}")
        time.sleep(1000)
    if solution_str == "die":
        os.kill(os.getpid(), getattr(signal, ground_truth))
    if solution_str == "exit":
        os._exit(3)
    if solution_str == "sys.exit":
        sys.exit(3)
    if solution_str == "pid":
        return {"score": 1, "pid": os.getpid()}
    if solution_str == "meet":
        open(os.path.join(ground_truth, str(os.getpid())), "w").close()
        deadline = time.monotonic() + 15
        while len(os.listdir(ground_truth)) < 3:
            if time.monotonic() > deadline:
                return 0.0
            time.sleep(0.01)
    return 1.0
"""


@pytest.fixture
def function(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(FUNCTION)
    return f"{tmp_path / 'mine.py'}:judge"


def build_scorer(function: str, **options: object) -> PooledRewardScorer:
    config = RewardConfig.model_validate({"function": function, "timeout_seconds": TIMEOUT, **options})
    made = build_verifier_scorer(config, 100)
    assert isinstance(made, PooledRewardScorer)
    return made


def gone(pid: int, seconds: float = 5.0) -> bool:
    """Whether a process has ended, or does so in time; one that only waits to be counted has."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_a_hanging_function_is_killed_with_its_child_processes(function: str, tmp_path: Path) -> None:
    judge = build_scorer(function)
    note = tmp_path / "pids"
    judge.submit(answer(0, "hang with a child", str(note)))
    judge.submit(answer(1, "fine"))
    actual = by_id(judge.drain())
    judge.close()
    assert (actual[0].failure.error_type, actual[0].score, actual[1].score) == ("Timeout", 0.0, 1.0)
    assert all(gone(int(pid)) for pid in note.read_text().split())


def test_a_dying_process_fails_only_its_own_response(function: str) -> None:
    judge = build_scorer(function)
    texts = ["fine", "die", "fine", "exit", "sys.exit", "die", "fine"]
    for number, text in enumerate(texts):
        judge.submit(answer(number, text, "SIGSEGV" if number == 1 else "SIGKILL"))
    actual = by_id(judge.drain())
    judge.close()
    assert [actual[number].score for number in range(7)] == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    assert kinds(list(actual.values())) == {1: "ProcessDied", 3: "ProcessDied", 4: "SystemExit", 5: "ProcessDied"}
    assert "SIGSEGV" in actual[1].failure.message
    assert "out of memory?" in actual[5].failure.message
    assert "status 3" in actual[3].failure.message


def test_naive_scores_in_one_process_and_prime_in_several(function: str) -> None:
    for options, most in (({"manager": "naive"}, 1), ({"manager": "prime", "workers": 3}, 3)):
        judge = build_scorer(function, **options)
        for number in range(30):
            judge.submit(answer(number, "pid"))
        pids = {verdict.reward_components["pid"] for verdict in judge.drain()}
        judge.close()
        assert 1 <= len(pids) <= most


def test_as_many_responses_are_scored_at_once_as_there_are_workers(function: str, tmp_path: Path) -> None:
    judge = build_scorer(function, workers=3, timeout_seconds=60.0)
    (tmp_path / "pids").mkdir()
    for number in range(3):
        judge.submit(answer(number, "meet", str(tmp_path / "pids")))
    verdicts = judge.drain()
    judge.close()
    assert [verdict.score for verdict in verdicts] == [1.0, 1.0, 1.0]


def test_the_death_of_the_fork_server_fails_only_pending_responses(function: str) -> None:
    judge = build_scorer(function, manager="prime", workers=1)
    judge.submit(answer(0, "pid"))
    (first,) = judge.drain()
    keeper = int(Path(f"/proc/{int(first.reward_components['pid'])}/stat").read_text().rpartition(")")[2].split()[1])
    judge.submit(answer(1, "hang"))
    time.sleep(0.2)
    judge.submit(answer(2, "fine"))
    os.kill(keeper, signal.SIGKILL)
    actual = by_id(judge.drain())
    judge.close()
    assert actual[1].failure.error_type == "ProcessDied"
    assert actual[2].score == 1.0
    assert gone(int(first.reward_components["pid"]))


def test_a_closed_judge_has_no_processes_left(function: str) -> None:
    judge = build_scorer(function)
    judge.submit(answer(0, "pid"))
    (actual,) = judge.drain()
    judge.submit(answer(1, "hang"))
    judge.close()
    judge.close()
    assert gone(int(actual.reward_components["pid"]))
    with pytest.raises(RuntimeError, match="closed"):
        judge.submit(answer(2, "fine"))


def test_failing_to_start_a_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    judge = build_verifier_scorer(RewardConfig(), 100)
    judge.submit(answer(0, r"\boxed{7}"))
    with pytest.raises(MachineError, match="cannot start verifier processes"):
        judge.drain()
    judge.close()


RUN = """
import sys, time
from quintet.config.native.data import RewardConfig
from quintet.records import PromptRow, Response
from quintet.rewards.factory import build_verifier_scorer

judge = build_verifier_scorer(RewardConfig(function=sys.argv[1], timeout_seconds=600.0), 10)
judge.submit(Response(0, PromptRow(0, "", (), sys.argv[2]), "hang with a child", 1))
{last}
"""


@pytest.mark.parametrize(
    ("last", "end"),
    [
        ("judge.drain()", lambda run: run.send_signal(signal.SIGKILL)),
        ("judge.drain()", lambda run: run.send_signal(signal.SIGTERM)),
        ("judge.drain()", lambda run: run.send_signal(signal.SIGINT)),
        ("time.sleep(1); raise SystemExit", lambda run: None),
    ],
    ids=["SIGKILL", "SIGTERM", "SIGINT", "no close"],
)
def test_no_process_outlives_the_run(
    function: str, tmp_path: Path, last: str, end: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    note = tmp_path / "pids"
    command = [sys.executable, "-c", textwrap.dedent(RUN.format(last=last)), function, str(note)]
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    pids: list[int] = []
    try:
        ends = time.monotonic() + 20
        while len(pids) < 2 and time.monotonic() < ends:
            time.sleep(0.02)
            pids = [int(pid) for pid in note.read_text().split()] if note.exists() else []
        end(run)
        run.wait(10)
        assert len(pids) == 2
        assert all(gone(pid) for pid in pids)
    finally:
        run.kill()
        run.wait()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
