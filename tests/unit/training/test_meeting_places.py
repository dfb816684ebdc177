"""If these fail, ranks wait forever for one that is no more, end one that is well, or fight over a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any, cast

import pytest

from quintet.config.started import Started
from quintet.errors import MachineError
from quintet.training import meeting
from quintet.training.meeting import Meeting, Peer, _machine, _own_gpu, _refuse_shared_gpus
from quintet.training.ranks import Ranks


@pytest.mark.parametrize(("local_rank", "visible", "own"), [(0, 4, 0), (3, 4, 3), (3, 1, 0)])
def test_each_rank_has_the_gpu_of_its_number_or_the_only_one_it_sees(local_rank: int, visible: int, own: int) -> None:
    assert _own_gpu(Started(local_rank, 4, local_rank, 4), visible) == own


def test_more_processes_than_gpus_are_told_so() -> None:
    with pytest.raises(MachineError, match="rank 6 is process 2 of its machine, which has 2 GPUs"):
        _own_gpu(Started(6, 8, 2, 4), 2)


def test_ranks_with_the_same_gpu_are_named() -> None:
    _refuse_shared_gpus([{"gpu": None}, {"gpu": None}, {"gpu": "a"}, {"gpu": "b"}])
    with pytest.raises(MachineError, match="ranks 1, 3 have the same GPU"):
        _refuse_shared_gpus([{"gpu": "a"}, {"gpu": "b"}, {"gpu": "c"}, {"gpu": "b"}])


@pytest.fixture
def other() -> Any:
    found = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield found
    found.kill()
    found.wait()


def beside(process: int, host: str | None = None) -> Meeting:
    """Rank 0 and a peer."""
    peers = (Peer(0, _machine(), os.getpid(), ""), Peer(1, host or _machine(), process, ""))
    return Meeting(Ranks(0, 2), cast(Any, None), peers)


def test_a_rank_that_is_stuck_hears_who_has_ended(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(meeting, "GRACE_SECONDS", 0.3)
    told: list[str] = []
    heard = threading.Event()
    with beside(other.pid).watched(lambda who: (told.append(who), heard.set())[0]):
        assert not heard.wait(0.6)  # while the other is there nobody is disturbed
        other.kill()
        assert heard.wait(20)
    assert told == ["rank 1 has ended"]


def test_a_rank_that_ends_in_its_own_way_is_let(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(meeting, "GRACE_SECONDS", 0.5)
    heard = threading.Event()
    other.kill()
    with beside(other.pid).watched(lambda who: heard.set()):
        assert not heard.wait(0.2)
    assert not heard.wait(1.0)


def test_nothing_is_known_of_another_machines_processes(other: Any) -> None:
    other.kill()
    other.wait()
    assert beside(other.pid).gone() == [1]
    assert beside(other.pid, "localhost another-boot pid:[7]").gone() == []
