"""If these fail, training waits for the disk, a checkpoint mixes two steps, or a failed one goes unnoticed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quintet.errors import MachineError
from quintet.training.checkpoint.async_save import AsyncCheckpointer, AsyncShardWriter, WriteFiles
from quintet.training.checkpoint.checkpoint import find_checkpoint
from quintet.training.checkpoint.safetensors_files import write_tensors
from quintet.training.checkpoint.snapshot import HostBuffers


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[AsyncCheckpointer]:
    made = AsyncCheckpointer(tmp_path, keep=2)
    yield made
    made.close()


def never(path: Path, reason: str) -> None:
    pytest.fail(f"{path} was rejected: {reason}")


def file_with(text: str) -> Callable[[Path], WriteFiles]:
    return held(lambda directory: (directory / "it").write_text(text) and None)


def held(write: WriteFiles) -> Callable[[Path], WriteFiles]:
    """Nothing has to be copied for what is written."""
    return lambda place: write


def test_training_continues_while_a_checkpoint_is_written(saver: AsyncCheckpointer, tmp_path: Path) -> None:
    gate = threading.Event()

    def slowly(directory: Path) -> None:
        assert gate.wait(20)
        (directory / "it").write_text("whole")

    saver.save(1, {}, held(slowly))
    assert find_checkpoint(tmp_path, never) is None, "not there before it is whole"
    gate.set()
    saver.wait()
    actual = find_checkpoint(tmp_path, never)
    assert actual is not None
    assert actual.step == 1


def test_the_next_save_waits_for_the_previous_one(saver: AsyncCheckpointer, tmp_path: Path) -> None:
    order: list[str] = []

    def slowly(directory: Path) -> None:
        time.sleep(0.1)
        order.append("first")

    saver.save(1, {}, held(slowly))
    saver.save(2, {}, held(lambda directory: order.append("second")))
    saver.wait()
    assert order == ["first", "second"]
    assert sorted(path.name for path in tmp_path.glob("global*")) == ["global_step_1", "global_step_2"]


def test_a_failed_write_raises_at_the_next_save_or_wait(saver: AsyncCheckpointer, tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        raise OSError(28, "No space left on device")

    saver.save(1, {}, file_with("good"))
    saver.save(2, {}, held(fail))
    with pytest.raises(OSError, match="No space"):
        saver.save(3, {}, file_with("never"))
    saver.save(3, {}, held(fail))
    with pytest.raises(OSError, match="No space"):
        saver.wait()
    saver.wait()
    actual = find_checkpoint(tmp_path, never)
    assert actual is not None
    assert actual.step == 1, "the last good one stands"


def test_the_state_is_copied_at_save(saver: AsyncCheckpointer, tmp_path: Path) -> None:
    gate, pending = threading.Event(), [1, 2]
    saver.save(1, {"starts": {"in_flight": pending}}, held(lambda directory: gate.wait(20) and None))
    pending.append(3)
    gate.set()
    saver.wait()
    assert json.loads((tmp_path / "global_step_1/state.json").read_text())["starts"] == {"in_flight": [1, 2]}


def test_copies_do_not_change_and_reuse_buffers() -> None:
    memory, weight = HostBuffers(), torch.nn.Parameter(torch.ones(3))
    frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    copies = memory.copy({"w": weight, "again": weight, "frozen": frozen}, "actor")
    with torch.no_grad():
        weight += 1
    assert copies["w"].tolist() == [1, 1, 1]
    assert copies["again"] is copies["w"]
    assert copies["frozen"].data_ptr() == frozen.data_ptr(), "what nobody changes isn't copied"
    place = copies["w"].data_ptr()
    later = memory.copy({"w": weight}, "actor")["w"]
    assert later.data_ptr() == place
    assert later.tolist() == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_safetensors_can_load_the_files(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "matrix": torch.arange(6).reshape(2, 3).to(dtype),
        "turned": torch.arange(6).reshape(2, 3).T.to(dtype),
        "number": torch.tensor(7).to(dtype),
        "byte": torch.tensor([1, 0, 1], dtype=torch.uint8),
    }
    write_tensors(tmp_path / "it.safetensors", tensors)
    actual = load_file(tmp_path / "it.safetensors")
    assert actual.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert actual[name].dtype == tensor.dtype
        assert torch.equal(actual[name].float(), tensor.float()), name


def test_the_first_rank_waits_for_the_other_ranks_files(tmp_path: Path) -> None:
    first, second = AsyncCheckpointer(tmp_path, keep=2, other_ranks=["1"]), AsyncShardWriter("1")

    def late(directory: Path) -> None:
        time.sleep(0.1)
        (directory / "theirs").write_text("theirs")

    def both(directory: Path) -> WriteFiles:
        second.save(directory, late)
        return file_with("mine")(directory)

    for step in (1, 2):
        first.save(step, {}, both)
    first.wait()
    assert set(json.loads((tmp_path / "global_step_2/manifest.json").read_text())) == {"it", "theirs", "state.json"}
    first.close()


def test_a_rank_that_cannot_write_is_named_and_no_checkpoint_appears(tmp_path: Path) -> None:
    first, second = AsyncCheckpointer(tmp_path, keep=2, other_ranks=["1"]), AsyncShardWriter("1")

    def fail(directory: Path) -> None:
        raise OSError(28, "No space left on device")

    def both(directory: Path) -> WriteFiles:
        second.save(directory, fail)
        return file_with("mine")(directory)

    first.save(1, {}, both)
    with pytest.raises(MachineError, match="rank 1") as error:
        first.wait()
    with pytest.raises(OSError, match="No space"):
        second.wait()
    assert find_checkpoint(tmp_path, never) is None
    assert "No space left" in str(error.value), "nobody else tells it"
    silent = AsyncCheckpointer(tmp_path, keep=2, other_ranks=["1"], timeout_seconds=0.05)
    silent.save(1, {}, file_with("mine"))
    with pytest.raises(MachineError, match=r"rank 1 did not write its part of the checkpoint within 0.05 s"):
        silent.wait()
    for saver in (first, silent):
        saver.close()


def test_a_full_disk_on_another_rank_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = AsyncCheckpointer(tmp_path, keep=2, other_ranks=["1"], timeout_seconds=20), AsyncShardWriter("1")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    def both(directory: Path) -> WriteFiles:
        monkeypatch.setattr(Path, "write_text", full)
        second.save(directory, full)
        return lambda place: None

    begun = time.monotonic()
    first.save(1, {}, both)
    with pytest.raises(MachineError, match="rank 1 could not write"):
        first.wait()
    assert time.monotonic() - begun < 10
    with pytest.raises(OSError, match="No space"):
        second.wait()
    first.close()


def test_a_dead_rank_is_not_waited_for(tmp_path: Path) -> None:
    def check() -> None:
        raise MachineError("rank 1 has ended")

    saver = AsyncCheckpointer(tmp_path, keep=2, other_ranks=["1"], timeout_seconds=20, check_alive=check)
    begun = time.monotonic()
    saver.save(1, {}, file_with("mine"))
    with pytest.raises(MachineError, match="rank 1 has ended"):
        saver.wait()
    saver.close()
    assert time.monotonic() - begun < 10


def test_files_of_a_failed_write_are_deleted(saver: AsyncCheckpointer, tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "half").write_bytes(bytes(1000))
        raise OSError(28, "No space left on device")

    saver.save(1, {}, file_with("good"))
    saver.save(2, {}, held(fail))
    with pytest.raises(OSError, match="No space"):
        saver.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", "latest_checkpointed_iteration.txt"]
