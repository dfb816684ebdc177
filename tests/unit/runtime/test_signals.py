"""If these fail, a run cannot be stopped, or scripts take a stopped run for a finished one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from quintet.runtime.signals import stop_on_signals

BUSY = """
import sys, time
from quintet.runtime.signals import exit_on_second_signal, stop_on_signals

with exit_on_second_signal(), stop_on_signals() as stop:
    print("ready", flush=True)
    {work}
"""
WORK = {
    "python": "while True: pass",
    "native code": "import hashlib; hashlib.pbkdf2_hmac('sha256', b'p', b's', 10**9)",
    "sleep": "time.sleep(60); time.sleep(60)",
}


def start(work: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", BUSY.format(work=work)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    return process


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
@pytest.mark.parametrize(("first", "second"), [("SIGINT", "SIGINT"), ("SIGINT", "SIGTERM"), ("SIGTERM", "SIGTERM")])
def test_a_second_signal_ends_the_process_within_a_second(work: str, first: str, second: str) -> None:
    process = start(work)
    try:
        process.send_signal(signal.Signals[first])
        time.sleep(0.7)
        assert process.poll() is None
        process.send_signal(signal.Signals[second])
        process.wait(1.0)
        _, errors = process.communicate()
    finally:
        process.kill()
    assert process.returncode == 128 + signal.Signals[second]
    assert f"second signal, {second}" in errors


def test_two_signals_of_one_ctrl_c_are_one_request() -> None:
    process = start(WORK["python"])
    try:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.7)
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()


def test_the_first_signal_is_a_request() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.number is signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.number is signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
