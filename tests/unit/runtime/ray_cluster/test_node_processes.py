"""If these fail, a launcher does not see how ranks end, or leaves processes behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quintet.runtime.ray_cluster.node_processes import NodeProcesses, NodeStatus

PROGRAM = """
import os, sys, time
rank = int(os.environ["RANK"])
print(f"rank {rank} in {os.getcwd()}", flush=True)
if rank == 1:
    sys.exit(7)
time.sleep(60)
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcesses]:
    processes = NodeProcesses()
    environments = {rank: {"RANK": str(rank)} for rank in (1, 2)}
    processes.start([sys.executable, "-c", PROGRAM], str(tmp_path), environments)
    yield processes
    processes.kill()


def wait_for(node: NodeProcesses, is_reached: Callable[[NodeStatus], bool]) -> NodeStatus:
    deadline = time.monotonic() + 20
    while not is_reached(status := node.status()):
        assert time.monotonic() < deadline, status
        time.sleep(0.02)
    return status


def test_exit_status_and_signals_of_ranks_are_known(node: NodeProcesses) -> None:
    assert wait_for(node, lambda status: 1 in status.exit_codes).exit_codes == {1: 7}
    node.send_signal(signal.SIGKILL, 2)
    assert wait_for(node, lambda status: 2 in status.exit_codes).exit_codes == {1: 7, 2: -signal.SIGKILL}
    node.send_signal(signal.SIGTERM, 2)  # it has ended: nothing to do


def test_a_character_whose_bytes_arrive_in_two_parts_is_shown_as_it_was_printed(tmp_path: Path) -> None:
    processes = NodeProcesses()
    program = (
        "import os, time\n"
        "for part in (b'\\xe2\\x82', b'\\xac'):\n"
        "    os.write(1, part)\n"
        "    while not os.path.exists('read'): time.sleep(0.01)\n"
    )
    processes.start([sys.executable, "-c", program], str(tmp_path), {0: {}})
    log = processes._log(0)
    deadline = time.monotonic() + 20
    while log.stat().st_size < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert processes.status().output == ""
    (tmp_path / "read").touch()
    assert wait_for(processes, lambda status: bool(status.output)).output == "€"
    processes.kill()


def test_a_stopped_rank_is_noticed(node: NodeProcesses) -> None:
    wait_for(node, lambda status: 1 in status.exit_codes)
    assert not node.status().stopped
    node.send_signal(signal.SIGSTOP, 2)
    wait_for(node, lambda status: status.stopped == [2])
    node.send_signal(signal.SIGCONT, 2)
    wait_for(node, lambda status: not status.stopped)


def test_output_of_the_first_rank_is_returned_once(node: NodeProcesses, tmp_path: Path) -> None:
    output = ""
    deadline = time.monotonic() + 20
    while "\n" not in output and time.monotonic() < deadline:
        output += node.status().output
    assert output == f"rank 1 in {tmp_path}\n"
    assert node.status().output == ""


def test_no_rank_is_left_when_they_are_killed(node: NodeProcesses) -> None:
    pids = [process.pid for process in node._processes.values()]
    node.kill()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_directory_that_the_node_lacks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        NodeProcesses().start([sys.executable, "-c", PROGRAM], str(tmp_path / "missing"), {0: {"RANK": "0"}})
