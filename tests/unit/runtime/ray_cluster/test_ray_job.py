"""If these fail, a submitted job's end is misreported, or its secrets are shown on Ray's dashboard."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from quintet.errors import MachineError
from quintet.runtime.ray_cluster import job
from quintet.runtime.ray_cluster.job import _Job, _job_environment, submit_job
from quintet.runtime.signals import StopRequest

pytest.importorskip("ray", reason="pip install 'quintet[ray]'")


class Endpoint:
    """Client of an endpoint that reports these states, one per request; None is no answer."""

    def __init__(self, *states: tuple[str, int | None] | None) -> None:
        self.states: Sequence[Any] = states
        self.stopped: list[str] = []
        self.polls = 0

    def get_job_info(self, job_id: str) -> Any:
        from ray.job_submission import JobStatus

        state = self.states[min(self.polls, len(self.states) - 1)]
        self.polls += 1
        if state is None:
            raise ConnectionError("refused\nby 127.0.0.1")
        return SimpleNamespace(status=JobStatus[state[0]], driver_exit_code=state[1], message="lost its node")

    def get_job_logs(self, job_id: str) -> str:
        return "".join(f"line {number}\n" for number in range(self.polls))

    def stop_job(self, job_id: str) -> None:
        self.stopped.append(job_id)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "POLL_SECONDS", 0.0)


def follow(endpoint: Endpoint, number: signal.Signals | None = None) -> tuple[int, str]:
    output: list[str] = []
    status = _Job(endpoint, "job-1", output.append).follow(StopRequest(number))
    return status, "".join(output)


def test_the_exit_status_is_that_of_the_run_and_its_output_is_shown_once() -> None:
    running = ("RUNNING", None)
    assert follow(Endpoint(running, None, running, ("SUCCEEDED", 0))) == (0, "line 0\nline 1\nline 2\nline 3\n")
    assert follow(Endpoint(("FAILED", 2)))[0] == 2
    assert follow(Endpoint(("FAILED", None))) == (2, "line 0\nquintet: job job-1: failed: lost its node\n")
    assert follow(Endpoint(("STOPPED", None)))[0] == 2


def test_a_signal_stops_the_job_and_waits_for_it() -> None:
    endpoint = Endpoint(("RUNNING", None), ("RUNNING", None), ("STOPPED", None))
    assert follow(endpoint, signal.SIGINT)[0] == 130
    assert endpoint.stopped == ["job-1"]
    assert follow(Endpoint(("SUCCEEDED", 0)), signal.SIGTERM)[0] == 0  # it had finished


def test_a_lost_endpoint_is_an_error_that_names_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "LOST_SECONDS", 0.01)
    with pytest.raises(MachineError, match=r"\(refused\); job job-1 may still run"):
        follow(Endpoint(None))


def test_an_endpoint_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:2")  # Ray would use it instead
    with pytest.raises(MachineError, match=r"--ray http://127\.0\.0\.1:1: cannot submit a job: .*127\.0\.0\.1:1"):
        submit_job("http://127.0.0.1:1", ["true"], "/", print)


def test_secrets_are_not_sent() -> None:
    variables = {"NCCL_DEBUG": "INFO", "HF_TOKEN": "a", "WANDB_API_KEY": "b", "QUINTET_TOKEN": "c", "HOME": "/"}
    assert _job_environment(variables).keys() == {"NCCL_DEBUG", "RAY_JOB_STOP_WAIT_TIME_S"}
